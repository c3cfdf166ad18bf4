// The list of runs: filtered, grouped, and ticked to be compared.

import { ask, keep } from "./api.js";
import { choose, chosen, compareAddress, runAddress } from "./address.js";
import { choice, el, fill, labelled, number, table } from "./dom.js";
import { number as shownNumber, seconds, time } from "./shown.js";
import { OVER, said } from "./verdicts.js";

const EACH_MS = 2000;
const LABELS = ["group", "run", "job_type", "node", "rank", "local_rank"];
const GROUPS = ["", "group", "run", "job_type", "node", "rank", "local_rank", "state", "script"];
const MOST_VALUES = 4;
const MOST_ROWS = 500;

export function show(main) {
  document.title = "Runs · otel_ddp";
  const view = new Runs();
  main.replaceChildren(view.element);
  return keep(() => view.poll(), EACH_MS);
}

class Runs {
  constructor() {
    this.ticked = new Map();
    this.answer = null;
    this.list = el("div");
    const filter = el("input", { type: "search", value: chosen("filter"), placeholder: "lr, node=n1, state=failed", input: () => { choose("filter", filter.value); this.lay(); } });
    this.filter = filter;
    const grouped = choice(GROUPS.map((each) => [each, each || "nothing"]), chosen("by"), (value) => { choose("by", value); this.lay(); });
    this.compare = el("button", { type: "button", disabled: true, click: () => { location.href = compareAddress(this.ticked.values()); } }, "Compare the ticked runs");
    this.element = el("div", {}, el("h1", {}, "Runs"), el("div", { class: "controls" }, labelled("Filter", filter), labelled("Group by", grouped), this.compare), this.list);
  }

  async poll() {
    const answer = await ask("runs");
    // Only the clock has moved: whoever reads or points at a row is left alone.
    this.answer = answer;
    document.getElementById("node").textContent = answer.agent ? answer.node : answer.folder;
    this.lay();
  }

  lay() {
    if (!this.answer) return;
    const { runs, faults } = this.answer;
    const wanted = runs.filter(matches(this.filter.value));
    const problems = faults.map((each) => el("p", { class: "warn" }, each));
    if (!runs.length) {
      fill(this.list, el("p", {}, "No run is known here yet. ", el("code", {}, "otel-ddp demo"), " trains two small ranks for 20 s; in a script of yours, ", el("code", {}, "otel_ddp.instrument(model)"), " begins one."), problems);
      return;
    }
    const parts = [];
    const by = chosen("by");
    for (const [name, members] of grouped(wanted.slice(0, MOST_ROWS), by)) {
      if (by) parts.push(el("tr", { class: "group" }, el("th", { colspan: "9", scope: "rowgroup" }, `${by}: ${name || "none"} (${members.length})`)));
      parts.push(...members.map((run) => this.row(run)));
    }
    const caption = `${wanted.length} of ${runs.length} runs${wanted.length > MOST_ROWS ? `, the newest ${MOST_ROWS}` : ""}`;
    const was = this.list.dataset.was;
    fill(this.list, problems, table(caption, ["compare", "run", "group", "state", "step", "values", "began", "duration", "verdict"], parts));
    if (this.list.dataset.was !== was) this.tick();
  }

  row(run) {
    const key = `${run.group} ${run.run}`;
    const box = el("input", { type: "checkbox", "aria-label": `Compare ${run.run}`, "data-key": key });
    const [worst] = run.verdicts;
    const isOver = OVER.includes(run.state) || run.silent;
    const isLate = worst && !worst.harmless && (isOver || !worst.until_ns);
    const end = run.state === "running" && !run.silent ? this.answer.now_ns : run.seen_ns;
    const state = run.silent ? `${run.state}? last seen ${time(run.seen_ns)}` : run.state;
    const bad = run.state === "failed" || run.state === "killed";
    return el(
      "tr", { class: isLate ? "late" : null, "data-run": run.run },
      el("td", {}, box),
      el("td", { class: "long" }, el("a", { href: runAddress(run.group, run.run) }, run.run), el("div", { class: "quiet" }, about(run))),
      el("td", {}, run.group), el("td", { class: bad ? "bad" : null }, state),
      number(run.step === null ? "-" : String(run.step)), el("td", {}, values(run.summary)),
      number(time(run.began_ns)), number(seconds(Math.floor((end - run.began_ns) / 1e9))),
      el("td", { class: "long" }, worst ? said(worst) : ""),
    );
  }

  /** Rows are made anew with each answer: what was ticked stays so. */
  tick() {
    for (const box of this.list.querySelectorAll("input[data-key]")) {
      const run = this.answer.runs.find((each) => `${each.group} ${each.run}` === box.dataset.key);
      box.checked = this.ticked.has(box.dataset.key);
      box.addEventListener("change", () => {
        if (box.checked) this.ticked.set(box.dataset.key, { group: run.group, run: run.run });
        else this.ticked.delete(box.dataset.key);
        this.compare.disabled = this.ticked.size < 2;
      });
    }
  }
}

/** What tells runs with made names apart: their title and their script. */
function about(run) {
  return [run.name, run.script].filter(Boolean).join(" · ");
}

function values(summary) {
  const order = [...summary].sort((one, other) => Boolean(other.direction) - Boolean(one.direction));
  return order.slice(0, MOST_VALUES).map((row) => {
    const found = row.direction && row[row.direction];
    const last = row.last ? shownNumber(row.last.value) : "-";
    return el("div", {}, `${row.name}${row.split ? ` (${row.split})` : ""}: ${last}${found ? `, best ${shownNumber(found.value)}` : ""}`);
  });
}

function of(run, label) {
  if (label === "script") return [run.script || ""];
  if (label === "node") return run.nodes;
  if (label === "rank") return run.ranks;
  if (label === "job_type") return run.job_type;
  if (label === "local_rank") return run.local_ranks;
  return [run[label]];
}

/** Words, and label=value for the six labels and the state. All of them have to hold. */
function matches(text) {
  const words = text.split(/\s+/).filter(Boolean);
  return (run) => words.every((word) => {
    const [label, value] = word.split("=", 2);
    if (value !== undefined && (LABELS.includes(label) || label === "state" || label === "script")) return of(run, label).includes(value);
    const all = [run.run, run.group, run.project, run.state, run.name, run.script, ...run.nodes, ...[run.tags].flat()];
    return all.some((each) => String(each ?? "").toLowerCase().includes(word.toLowerCase()));
  });
}

function grouped(runs, by) {
  if (!by) return [["", runs]];
  const found = new Map();
  for (const run of runs) {
    for (const name of of(run, by)) found.set(name, [...(found.get(name) || []), run]);
  }
  return [...found].sort(([one], [other]) => String(one).localeCompare(String(other), undefined, { numeric: true }));
}
