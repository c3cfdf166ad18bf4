// One run: its state and ranks, and below all pictures and tables of it.

import { ask, keep } from "./api.js";
import { Axis } from "./axis.js";
import { el, fill, table } from "./dom.js";
import { number, seconds, time } from "./shown.js";
import { Events, Postmortems, Profiles, Verdicts } from "./happenings.js";
import { NodePictures } from "./node.js";
import { inBrief, timeSpent } from "./spent.js";
import { Timing } from "./timing.js";
import { named, OVER, openTroubles, said } from "./verdicts.js";
import { Values, look as readLook, lookControls } from "./values.js";

const EACH_MS = 1000;
// Names, events and post-mortems are asked for in every n-th round.
const SELDOM = 5;

export function show(main, { group, run }) {
  const view = new Run(group, run);
  main.replaceChildren(view.element);
  document.title = `${run} · otel_ddp`;
  return view.start();
}

class Run {
  constructor(group, run) {
    Object.assign(this, { group, run });
    this.head = null;
    this.seen = "";
    this.round = 0;
    this.axis = new Axis();
    this.look = readLook();
    this.top = el("div");
    this.controls = el("div");
    this.values = new Values(this, this.axis, this.look);
    this.timing = new Timing(this, this.axis, this.look);
    this.node = new NodePictures(this, this.axis);
    this.spent = el("div");
    this.happened = new Verdicts();
    this.postmortems = new Postmortems(this);
    this.profiles = new Profiles(this);
    this.events = new Events(this);
    this.about = el("section", { "aria-labelledby": "about" });
    this.element = el(
      "div", {}, el("h1", {}, run), this.top, this.controls, this.values.element, this.spent, this.timing.element,
      this.node.element, this.happened.element, this.postmortems.element, this.profiles.element, this.events.element, this.about,
    );
  }

  key() {
    return { run: this.run, group: this.group };
  }

  verdicts() {
    return this.head ? this.head.verdicts : [];
  }

  attempts() {
    return this.head?.time?.attempts || [];
  }

  start() {
    const end = keep(() => this.poll(), EACH_MS);
    const theme = matchMedia("(prefers-color-scheme: dark)");
    const redraw = () => this.axis.redraw();
    theme.addEventListener("change", redraw);
    return () => {
      end();
      theme.removeEventListener("change", redraw);
      for (const each of [...this.axis.pictures]) each.remove();
    };
  }

  async poll() {
    const seldom = this.round % SELDOM === 0;
    this.round += 1;
    const asked = [ask("run", this.key())];
    if (seldom) asked.push(ask("names", this.key()));
    const [head, names] = await Promise.all(asked);
    const isFirst = !this.head;
    this.head = head;
    this.group = head.group;
    this.showHead();
    this.happened.show(head);
    if (isFirst) {
      this.showControls();
      // What was quicker than the head has no colours of ranks.
      this.axis.refresh();
    }
    if (names) {
      this.values.setNames(names.values);
      this.node.setNames(names.node);
    }
    const seen = `${head.seen_ns} ${head.state}`;
    if (!isFirst && seen !== this.seen) this.axis.refresh();
    if (seen !== this.seen || seldom) await this.refreshRest(seldom);
    this.seen = seen;
  }

  async refreshRest(seldom) {
    this.showAbout();
    const work = [this.node.refreshDevices()];
    if (seldom) work.push(this.postmortems.refresh(), this.profiles.refresh(), this.events.refresh());
    await Promise.all(work);
  }

  /** The place of a rank among all: its colour in every picture. */
  place(rank) {
    return (this.head?.ranks || []).findIndex((each) => String(each.rank) === String(rank));
  }

  showControls() {
    const ranks = this.head.ranks.map((each) => each.rank);
    this.controls.replaceChildren(lookControls(this.axis, this.look, ranks, () => this.axis.refresh()));
  }

  showHead() {
    const { head } = this;
    const isOver = OVER.includes(head.state);
    const troubles = isOver || head.silent ? [head.worst].filter(Boolean) : openTroubles(head.verdicts);
    const late = named(troubles, head.ranks);
    const step = head.ranks.reduce((most, each) => Math.max(most, each.step ?? -1), -1);
    const took = ((isOver || head.silent ? head.seen_ns : head.now_ns) - head.began_ns) / 1e9;
    const state = el("strong", { class: { finished: "good", failed: "bad", killed: "bad" }[head.state] || "" }, head.state);
    const facts = [head.group ? `group ${head.group}` : null, `${head.ranks.length} rank${head.ranks.length === 1 ? "" : "s"} on ${head.nodes.join(", ")}`, step >= 0 ? `step ${step}` : "no step yet", head.began_ns ? `${isOver ? "took" : "for"} ${seconds(took)}` : null];
    const rows = head.ranks.map((each) => el(
      "tr", { class: late.has(each.rank) ? "late" : null, "data-rank": each.rank },
      [each.rank, each.node, each.state, each.step ?? "-", OVER.includes(each.state) ? "-" : each.phase, OVER.includes(each.state) ? time(each.seen_alive_ns) : since(each, head), each.reason || ""].map((text) => el("td", {}, text ?? "")),
    ));
    const ranks = table("Ranks", ["rank", "node", "state", "step", "phase", "since", "reason"], rows, { class: "scroll tall" });
    fill(
      this.top,
      el("p", {}, state, ` · ${facts.filter(Boolean).join(" · ")}`, inBrief(head)),
      head.silent ? el("p", { class: "warn" }, `No agent has written since ${time(head.seen_ns)}: whether it still runs is not known here.`) : null,
      head.look ? el("p", {}, head.look) : null,
      troubles.map((each) => el("p", { class: "bad verdict" }, said(each))),
      head.verdicts.filter((each) => !each.until_ns && each.harmless).map((each) => el("p", { class: "verdict" }, said(each))),
      head.not_kept_since_ns ? el("p", { class: "warn" }, `Nothing is kept since ${time(head.not_kept_since_ns)}: the list of runs says why.`) : null,
      head.gaps.map((gap) => el("p", { class: "warn" }, `Not all was kept on ${gap.node} from ${time(gap.since_ns)} to ${gap.until_ns ? time(gap.until_ns) : "now"}: ${gap.why}.`)),
      ranks, best(head.summary),
    );
    fill(this.spent, timeSpent(head));
  }

  showAbout() {
    const { config, environment, texts } = this.head;
    const parts = [["Configuration", config], ["Environment", environment], ["Texts", texts]]
      .filter(([, found]) => Object.keys(found || {}).length)
      .map(([title, found]) => table(title, ["name", "value"], Object.entries(found).map(([key, value]) => [key, el("td", { class: "long" }, shown(value))])));
    const cost = this.head.telemetry ? el("p", {}, `Telemetry took: ${this.head.telemetry}.`) : null;
    fill(this.about, el("h2", { id: "about" }, "Configuration and environment"), cost, parts.length ? parts : el("p", { class: "quiet" }, "None was given."));
  }
}

export function shown(value) {
  return typeof value === "string" ? value : JSON.stringify(value);
}

function since(rank, head) {
  return rank.phase_since_ns ? seconds(Math.max(0, (head.now_ns - rank.phase_since_ns) / 1e9)) : "-";
}

/** Last and best values of the summary. */
export function best(summary) {
  const rows = summary.map((row) => {
    const found = row.direction && row[row.direction];
    return [row.name, row.split || "", number(row.last && row.last.value), found ? `${row.direction} ${number(found.value)} at step ${found.step ?? "-"}` : ""];
  });
  return rows.length ? table("Last and best values", ["name", "split", "last", "best"], rows, { class: "scroll tall" }) : null;
}
