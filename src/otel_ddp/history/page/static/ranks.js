// The table of ranks, the worst first. Requested when it is opened; rows are added on scrolling.

import { ask } from "./api.js";
import { el, number, table } from "./dom.js";
import { seconds, time } from "./shown.js";
import { named, openTroubles, OVER } from "./verdicts.js";

const AT_ONCE = 100;
const ORDER = ["killed", "failed", "not heard"];
const HEADS = ["rank", "node", "state", "step", "phase", "since", "reason"];

export class Ranks {
  constructor(run) {
    this.run = run;
    this.list = el("div");
    this.rows = [];
    this.filter = el("input", { type: "search", input: () => this.lay() });
    this.element = el(
      "details", { id: "ranks", toggle: () => this.refresh() }, el("summary", {}, "Ranks, the worst first"),
      el("div", { class: "controls" }, el("label", {}, el("span", {}, "Ranks with"), this.filter)), this.list,
    );
  }

  async refresh() {
    if (!this.element.open || !this.run.head) return;
    const { ranks, now_ns } = await ask("ranks", this.run.key());
    const { verdicts, first } = this.run.head;
    const late = named([...openTroubles(verdicts), ...first], ranks);
    const worth = (each) => {
      const at = ORDER.indexOf(each.state);
      return at >= 0 ? at : late.has(each.rank) ? ORDER.length : ORDER.length + 1;
    };
    this.rows = ranks.map((each, at) => ({ each, at, worth: worth(each), text: [each.rank, each.node, each.state, each.phase, each.reason].join(" ").toLowerCase() }))
      .sort((one, other) => one.worth - other.worth || one.at - other.at);
    Object.assign(this, { late, now_ns });
    this.lay();
  }

  lay() {
    const word = this.filter.value.trim().toLowerCase();
    const wanted = this.rows.filter((row) => row.text.includes(word));
    const place = this.list.firstChild?.scrollTop || 0;
    const many = Math.max(AT_ONCE, this.list.querySelectorAll("tbody tr").length);
    const frame = table(`${wanted.length} of ${this.rows.length} ranks`, HEADS, wanted.slice(0, many).map((row) => this.row(row)), { class: "scroll tall" });
    const body = frame.querySelector("tbody");
    frame.addEventListener("scroll", () => {
      if (frame.scrollTop + 2 * frame.clientHeight < frame.scrollHeight) return;
      const drawn = body.childElementCount;
      body.append(...wanted.slice(drawn, drawn + AT_ONCE).map((row) => this.row(row)));
    });
    this.list.replaceChildren(frame);
    frame.scrollTop = place;
  }

  row({ each }) {
    const isOver = OVER.includes(each.state);
    const since = each.phase_since_ns ? seconds(Math.max(0, ((each.read_ns ?? this.now_ns) - each.phase_since_ns) / 1e9)) : "-";
    return el(
      "tr", { class: this.late.has(each.rank) ? "late" : null, "data-rank": each.rank },
      number(each.rank), el("td", {}, each.node || ""), el("td", {}, each.state), number(String(each.step ?? "-")),
      el("td", {}, isOver ? "-" : each.phase), number(isOver ? time(each.seen_alive_ns) : since), el("td", { class: "long" }, each.reason || ""),
    );
  }
}
