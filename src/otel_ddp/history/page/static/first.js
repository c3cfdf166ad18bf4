// The top of a run's page: its title, what is wrong and what to do, and its main numbers as tiles.

import { ask } from "./api.js";
import { el, fill } from "./dom.js";
import { isSaved } from "./saved.js";
import { logged, number, seconds, share, size as sized, time } from "./shown.js";
import { cost, headline, isLate, openTroubles, OVER, size } from "./verdicts.js";

const MOST_TILES = 6;
const TOTAL = /^((max|total|num|train|training)_?)?(steps|iters|iterations)$/;

/** One line: name, state, ranks and nodes, step, duration, attempt, script. */
export function title(head) {
  const isOver = OVER.includes(head.state);
  const took = ((isOver || head.silent ? head.seen_ns : head.now_ns) - head.began_ns) / 1e9;
  const total = Object.entries(head.config || {}).find(([name, value]) => TOTAL.test(name) && value > head.step)?.[1];
  const step = head.step === null ? "no step yet" : `step ${steps(head.step)}${total && !isOver ? ` of ${steps(total)}` : ""}`;
  const nodes = head.nodes.length > 2 ? `${head.nodes.length} nodes` : head.nodes.join(", ");
  const attempt = head.time?.attempts.length > 1 ? `attempt ${head.time.attempts.at(-1).attempt}` : null;
  const facts = [`${head.ranks} rank${head.ranks === 1 ? "" : "s"} on ${nodes}`, step, head.began_ns ? seconds(took) : null, attempt, head.environment?.script];
  const bad = Object.entries(head.states).filter(([state]) => state === "failed" || state === "killed");
  return [
    el("h1", {}, head.group ? el("span", { class: "quiet" }, `${head.group} / `) : "", head.run),
    el("span", { class: `pill ${{ failed: "bad", killed: "bad", running: "good" }[head.state] || ""}` }, head.silent ? `${head.state}?` : head.state),
    el("span", { class: "quiet" }, facts.filter(Boolean).join(" · ")),
    ...bad.map(([state, count]) => el("span", { class: "bad" }, `${count} ${state}`)),
  ];
}

/** The worst verdict and the costliest one, each with actions: stack, profile command, link. */
export class Troubles {
  constructor(run) {
    this.run = run;
    this.list = el("div");
    this.stack = el("div", { role: "status" });
    this.element = el("div", {}, this.list, this.stack);
  }

  show(head) {
    const others = head.verdicts.filter((each) => !each.harmless).length - head.first.length;
    fill(this.list, head.first.map((each, at) => this.one(each, head, at, others)));
  }

  one(verdict, head, at, others) {
    const { first, rest, advice } = headline(verdict);
    const [by, spent] = [size(verdict, head.now_ns), cost(verdict, head.time?.rank_s)];
    const isOpen = openTroubles([verdict]).length && !OVER.includes(head.state);
    const when = isLate(verdict) ? span(verdict, isOpen) : time(verdict.since_ns);
    const rank = verdict.who?.rank;
    const command = `otel-ddp profile --rank ${rank}`;
    const button = (act, text, value) => el("button", { type: "button", "data-key": `${text} ${value}`, click: () => this.act(act, value) }, text);
    return el(
      "section", { class: isOpen ? "trouble" : "trouble over", "aria-label": first },
      el("div", { class: "what" }, el("h2", {}, first, " ", el("span", { class: "quiet" }, when)), el("p", { title: verdict.sentence }, rest, advice ? ` ${advice}` : "")),
      el(
        "div", { class: "acts" }, rank && isOpen && head.agent ? button("stack", "Its stack", rank) : null,
        rank && isOpen ? button("copy", "Profile command", command) : null, at || isSaved ? null : button("copy", "Link", location.href),
        others && !at ? el("a", { href: "#verdicts" }, `${others} other ${others === 1 ? "verdict" : "verdicts"}`) : null,
      ),
      el("div", { class: "size" }, el("strong", {}, by), el("span", { class: "quiet" }, spent)),
    );
  }

  async act(act, value) {
    if (act === "copy") {
      // Browsers offer the clipboard only over HTTPS or from this machine.
      await navigator.clipboard?.writeText(value).catch(() => {});
      fill(this.stack, el("p", { class: "quiet" }, navigator.clipboard ? "Copied: " : "", el("code", {}, value)));
      return;
    }
    fill(this.stack, el("p", {}, `Rank ${value} is asked …`));
    await showStacks(this.stack, { ...this.run.key(), rank: value });
  }
}

/** The steps of a verdict: the first, and also the last if the verdict is over. */
function span({ since_step: first, until_step: last, since_ns }, isOpen) {
  if (!Number.isInteger(first)) return `since ${time(since_ns)}`;
  if (isOpen) return `since step ${steps(first)}`;
  return last > first ? `steps ${steps(first)} to ${steps(last)}` : `step ${steps(first)}`;
}

const SHOWN_FRAMES = 40;

/** Request the Python stacks of a rank, and show them. */
export async function showStacks(into, key) {
  try {
    const { processes } = await ask("stacks", key, { method: "POST", headers: { "X-Otel-Ddp": "page" } });
    const line = (frame) => `${frame.function} (${frame.file}:${frame.line})`;
    const parts = processes.map((each) => el(
      "section", {}, el("h3", {}, `Rank ${each.rank}, pid ${each.pid}, at ${new Date().toLocaleTimeString("en-GB")}`),
      each.why ? el("p", { class: "warn" }, each.why) : null,
      each.threads.map((thread) => el("div", {}, el("h4", {}, `Thread ${thread.name}`), el("pre", { tabindex: "0", "aria-label": `Stack of ${thread.name}` }, thread.frames.slice(0, SHOWN_FRAMES).map(line).join("\n")))),
    ));
    fill(into, parts.length ? parts : el("p", {}, "It has ended by now."));
  } catch (error) {
    fill(into, el("p", { class: "warn" }, error.message));
  }
}

/** The main numbers of the run, each in a tile if it is known. */
export class Tiles {
  constructor() {
    this.element = el("div", { class: "tiles" });
  }

  /** `head` comes every second, `waits` only when there are new steps. */
  show(head, waits = this.waits) {
    this.waits = waits;
    fill(this.element, tiles(head, waits));
  }
}

function tiles(head, waits) {
  const [loss, checked] = head.main.map((main) => head.summary.find((row) => row.name === main.name && (row.split || "") === main.split));
  const productive = head.time?.share;
  const without = head.first.find((each) => each.evidence?.step_without_s && !each.until_ns)?.evidence.step_without_s;
  const found = [
    value(loss), value(checked),
    waits?.step_s ? ["step time", seconds(waits.step_s), without ? `without it ${seconds(without)}` : `steps ${steps(waits.first)} to ${steps(waits.until)}`] : null,
    waits?.work_per_s ? ["throughput", `${sized(waits.work_per_s, "")}/s`, "tokens or samples, all ranks"] : null,
    productive === undefined ? null : ["productive", share(productive), `of ${seconds(head.time.rank_s)} of all ranks`],
    waits?.checkpoint ? checkpoint(waits.checkpoint, head) : null,
  ];
  return found.filter(Boolean).slice(0, MOST_TILES).map(([name, shown, more]) => el("div", { class: "tile" }, el("span", { class: "quiet" }, name), el("strong", {}, shown), el("span", { class: "quiet" }, more)));
}

function checkpoint({ step, ended_ns, took_s }, head) {
  const at = Number.isInteger(step) ? `step ${steps(step)}` : time(ended_ns);
  const took = took_s === null ? "" : `took ${seconds(took_s)}`;
  if (OVER.includes(head.state) || head.silent) return ["last checkpoint", at, took];
  return ["last checkpoint", `${seconds(Math.max(0, head.now_ns - ended_ns) / 1e9)} ago`, [at, took].filter(Boolean).join(" · ")];
}

function value(row) {
  if (!row?.last) return null;
  const best = row.direction && row[row.direction];
  return [`${row.name}${row.split ? ` (${row.split})` : ""}`, logged(row.last), best ? `best ${number(best.value)} at step ${best.step ?? "-"}` : `step ${row.last.step ?? "-"}`];
}

function steps(number) {
  return number.toLocaleString("en-US");
}
