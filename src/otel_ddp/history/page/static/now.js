// The view Now: what every rank does at this moment, and for how long; its stacks on request.

import { ask, pollWhileVisible } from "./api.js";
import { runAddress } from "./address.js";
import { el, fill, table } from "./dom.js";
import { showStacks } from "./first.js";
import { seconds, time } from "./shown.js";
import { named, OVER, openTroubles, said } from "./verdicts.js";

const EACH_MS = 1000;

export function show(main) {
  document.title = "Now · otel_ddp";
  const view = new Now();
  main.replaceChildren(view.element);
  pollWhileVisible(() => view.poll(), EACH_MS);
}

class Now {
  constructor() {
    this.list = el("div");
    this.stacks = el("div", { role: "status" });
    this.element = el("div", {}, el("h1", {}, "Now"), this.list, this.stacks);
  }

  async poll() {
    const answer = await ask("now");
    document.getElementById("node").textContent = answer.node;
    this.lay(answer);
  }

  lay(answer) {
    if (!answer.agent) {
      fill(this.list, el("p", {}, "No agent serves this page, but a folder: nothing goes on here. ", el("a", { href: "/" }, "Its runs")));
      return;
    }
    const runs = new Map();
    for (const each of answer.processes) {
      const key = JSON.stringify([each.group || "", each.run || ""]);
      runs.set(key, [...(runs.get(key) || []), each]);
    }
    const parts = [answer.remark ? el("p", { class: "warn" }, answer.remark) : null];
    for (const [key, processes] of runs) parts.push(this.run(JSON.parse(key), processes, answer));
    if (!runs.size) parts.push(el("p", {}, "No process runs on this node. ", el("code", {}, "otel-ddp demo"), " starts two."));
    fill(this.list, parts);
  }

  run([group, run], processes, answer) {
    const open = answer.verdicts.filter((each) => each.who && (each.who.group || "") === group && each.who.run === run);
    const troubles = openTroubles(open);
    const late = named(troubles, processes);
    const rows = [...processes].sort((one, other) => (one.rank ?? 1e9) - (other.rank ?? 1e9)).map((each) => {
      const isOver = OVER.includes(each.state);
      return el(
        "tr", { class: late.has(String(each.rank)) ? "late" : null, "data-rank": String(each.rank) },
        el("td", {}, String(each.rank ?? "?")), el("td", {}, each.node || ""), el("td", {}, each.state), el("td", { class: "number" }, String(each.step ?? "-")),
        el("td", {}, isOver ? "-" : each.phase), el("td", { class: "number" }, isOver ? time(each.seen_alive_ns) : seconds(Math.max(0, ((each.read_ns ?? answer.now_ns) - each.phase_since_ns) / 1e9))),
        el("td", {}, answer.stacks && !isOver ? this.button(group, run, each.rank) : ""),
      );
    });
    return el(
      "section", {}, el("h2", {}, el("a", { href: runAddress(group, run) }, run), group ? ` in group ${group}` : ""),
      (answer.links || []).filter((each) => (each.group || "") === group && each.run === run && each.look).map((each) => el("p", {}, each.look)),
      [...new Set(processes.map((each) => each.measuring).filter(Boolean))].map((each) => el("p", { class: "quiet" }, each)),
      open.map((each) => el("p", { class: troubles.includes(each) ? "bad verdict" : "verdict" }, said(each))),
      table(`Ranks of ${run}`, ["rank", "node", "state", "step", "phase", "for", "stacks"], rows),
    );
  }

  button(group, run, rank) {
    const key = `${group} ${run} ${rank}`;
    return el("button", { type: "button", "data-key": key, "aria-label": `Stacks of rank ${rank}`, click: () => this.ask(group, run, rank) }, "Stacks");
  }

  async ask(group, run, rank) {
    fill(this.stacks, el("p", {}, `Rank ${rank} is asked …`));
    await showStacks(this.stacks, { group, run, rank: String(rank ?? "") });
  }
}
