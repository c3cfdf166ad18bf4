// What happened in a run: verdicts, post-mortems and events.

import { ask } from "./api.js";
import { choose, chosen } from "./address.js";
import { el, fill, labelled, number, table } from "./dom.js";
import { seconds, time } from "./shown.js";
import { said, subject, title } from "./verdicts.js";

export class Verdicts {
  constructor() {
    this.list = el("div");
    this.element = el("section", { "aria-labelledby": "verdicts", hidden: true }, el("h2", { id: "verdicts" }, "Verdicts"), this.list);
  }

  show(head) {
    this.element.hidden = !head.verdicts.length;
    const rows = [...head.verdicts].reverse().map((each) => el(
      "tr", { class: each.until_ns || each.harmless ? null : "late" },
      el("td", {}, time(each.since_ns)), el("td", {}, each.until_ns ? time(each.until_ns) : "goes on"),
      el("td", {}, each.since_step ?? ""), el("td", {}, title(each.kind)), el("td", {}, subject(each)),
      el("td", {}, each.phase || ""), el("td", { class: "long" }, said(each)),
      number(each.evidence?.lost_s === undefined ? "" : seconds(each.evidence.lost_s)),
    ));
    fill(this.list, table("Verdicts, the latest first", ["since", "until", "step", "what", "who", "phase", "sentence", "cost to the others"], rows));
  }
}

export class Postmortems {
  constructor(run) {
    this.run = run;
    this.list = el("div");
    this.element = el("section", { "aria-labelledby": "postmortems", hidden: true }, el("h2", { id: "postmortems" }, "Post-mortems"), this.list);
  }

  async refresh() {
    const { postmortems } = await ask("postmortems", this.run.key());
    const known = postmortems.map((each) => `${each.name} ${each.written_ns}`).join();
    if (known === this.known) return;
    this.known = known;
    this.element.hidden = !postmortems.length;
    this.list.replaceChildren(...postmortems.map((each, at) => this.one(each, at === 0)));
  }

  one({ name, written_ns, sentence }, isOpen) {
    const text = el("pre", { tabindex: "0", "aria-label": `Post-mortem ${name}` }, "…");
    const load = async () => {
      text.textContent = await ask("postmortem", { name }).catch((error) => error.message);
    };
    if (isOpen) load();
    return el("details", { open: isOpen, toggle: load }, el("summary", {}, `${time(written_ns)} ${sentence}`), text);
  }
}

export class Events {
  constructor(run) {
    this.run = run;
    this.list = el("div");
    let timer = 0;
    const filter = el("input", {
      type: "search", value: chosen("events"),
      input: () => {
        clearTimeout(timer);
        timer = setTimeout(() => {
          choose("events", filter.value);
          this.refresh().catch(() => {});
        }, 200);
      },
    });
    this.filter = filter;
    this.element = el(
      "section", { "aria-labelledby": "events", hidden: true }, el("h2", { id: "events" }, "Events"),
      el("div", { class: "controls" }, labelled("Filter events", filter)), this.list,
    );
  }

  async refresh() {
    const like = this.filter.value;
    const { events } = await ask("events", { ...this.run.key(), like });
    this.element.hidden = !events.length && !like;
    const rows = events.map((each) => [
      time(each.time_ns), each.severity, each.rank, each.step ?? "", each.name,
      el("td", { class: "long" }, each.body, attributes(each.attributes)),
    ]);
    fill(this.list, table("Events, the latest first", ["time", "severity", "rank", "step", "event", "text"], rows, { class: "scroll tall" }));
  }
}

function attributes(found) {
  const pairs = Object.entries(found || {});
  if (!pairs.length) return null;
  return el("details", {}, el("summary", {}, `${pairs.length} attributes`), pairs.map(([key, value]) => el("div", {}, `${key}: ${typeof value === "string" ? value : JSON.stringify(value)}`)));
}
