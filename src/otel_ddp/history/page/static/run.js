// The page of one run: the essentials on the first screen; below, pictures and tables of all data.

import { ask, pollWhileVisible } from "./api.js";
import { Axis } from "./axis.js";
import { curves } from "./curves.js";
import { el, fill, table } from "./dom.js";
import { Tiles, title, Troubles } from "./first.js";
import { Events, Postmortems, Verdicts } from "./happenings.js";
import { marks } from "./marks.js";
import { NodePictures } from "./node.js";
import { Picture } from "./picture.js";
import { Ranks } from "./ranks.js";
import { time } from "./shown.js";
import { timeSpent } from "./spent.js";
import { Timing } from "./timing.js";
import { Values, look as readLook, lookControls } from "./values.js";
import { Waits } from "./waits.js";

const EACH_MS = 1000;
// Names, ranks, events and post-mortems are requested in every SELDOM-th round only.
const SELDOM = 5;

export function show(main, { group, run }, head) {
  const view = new Run(group, run, head);
  main.replaceChildren(view.element);
  document.title = `${run} · otel_ddp`;
  view.start();
}

class Run {
  /** `asked`: the promise of the data of the page's head, which main.js has requested. */
  constructor(group, run, asked) {
    Object.assign(this, { group, run, asked });
    this.head = null;
    this.seen = "";
    this.round = 0;
    this.axis = new Axis();
    this.look = readLook();
    this.title = el("div", { class: "title" });
    this.remarks = el("div");
    this.troubles = new Troubles(this);
    this.tiles = new Tiles();
    this.waits = new Waits(this);
    this.spent = el("div");
    this.jump = el("nav", { class: "jump", "aria-label": "Parts of this page" });
    this.controls = el("div");
    this.learns = el("section", { class: "card", "aria-labelledby": "learns", hidden: true }, el("h2", { id: "learns" }, "What it learns"));
    this.ranks = new Ranks(this);
    // Each part below the first screen is hidden until it has something to show.
    this.values = new Values(this, this.axis, this.look);
    this.timing = new Timing(this, this.axis, this.look);
    this.node = new NodePictures(this, this.axis);
    this.happened = new Verdicts();
    this.postmortems = new Postmortems(this);
    this.events = new Events(this);
    this.about = el("section", { "aria-labelledby": "about", hidden: true });
    for (const each of [this.values, this.ranks]) each.element.hidden = true;
    this.element = el(
      "div", {}, this.title, this.remarks, this.troubles.element, this.tiles.element,
      el("div", { class: "pair" }, this.waits.element, this.learns), this.spent, this.jump,
      this.controls, this.values.element, this.timing.element, this.ranks.element, this.node.element, this.happened.element,
      this.postmortems.element, this.events.element, this.about,
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
    pollWhileVisible(() => this.poll(), EACH_MS);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.axis.redraw();
      this.waits.paint();
    });
  }

  async poll() {
    const seldom = this.round % SELDOM === 0;
    this.round += 1;
    const asked = this.asked || ask("run", this.key());
    this.asked = null;
    const [head, names] = await Promise.all([asked, seldom ? ask("names", this.key()) : null]);
    const isFirst = !this.head;
    this.head = head;
    this.group = head.group;
    this.showHead();
    this.happened.show(head);
    for (const each of [this.values, this.ranks]) each.element.hidden = false;
    if (isFirst) this.controls.replaceChildren(lookControls(this.axis, this.look, head.ranks, () => this.axis.refresh()));
    if (names) {
      this.values.setNames(names.values);
      this.node.setNames(names.node);
      this.showLoss();
    }
    const seen = `${head.seen_ns} ${head.state}`;
    if (!isFirst && seen !== this.seen) this.axis.refresh();
    if (seen !== this.seen || seldom) await this.refreshRest(seldom);
    this.seen = seen;
    this.showJumps();
  }

  async refreshRest(seldom) {
    this.showAbout();
    const work = [ask("waits", this.key()).then((answer) => this.showWaits(answer)), this.node.refreshDevices()];
    if (seldom) work.push(this.ranks.refresh(), this.postmortems.refresh(), this.events.refresh());
    await Promise.all(work);
  }

  showWaits(answer) {
    this.tiles.show(this.head, answer);
    this.waits.show(answer, this.head);
  }

  showHead() {
    const { head } = this;
    fill(this.title, title(head));
    fill(
      this.remarks,
      head.silent ? el("p", { class: "warn" }, `No agent has written since ${time(head.seen_ns)}: whether it still runs is not known here.`) : null,
      head.look ? el("p", {}, head.look) : null,
      head.insufficient.map((each) => el("p", { class: "quiet" }, `Ranks are not compared: ${each}`)),
      head.not_kept_since_ns ? el("p", { class: "warn" }, `Nothing is kept since ${time(head.not_kept_since_ns)}: the list of runs says why.`) : null,
      head.gaps.map((gap) => el("p", { class: "warn" }, `Not all was kept on ${gap.node} from ${time(gap.since_ns)} to ${gap.until_ns ? time(gap.until_ns) : "now"}: ${gap.why}.`)),
    );
    // Reserve the place of the waits until their answer comes, so that the page does not jump.
    if (!this.waits.answer) this.waits.element.hidden = head.ranks < 2 || head.step === null;
    this.troubles.show(head);
    this.tiles.show(head);
    this.timing.show(head);
    fill(this.spent, timeSpent(head));
  }

  /** Add the picture of training and validation loss, once one of them is logged. */
  showLoss() {
    // A loss and an accuracy have different scales, so they do not share a picture.
    const main = this.head.main.filter((each, at, [{ name }]) => /loss/i.test(each.name) === /loss/i.test(name));
    if (!main.length || !this.learns.hidden) return;
    this.learns.hidden = false;
    const called = (each) => `${each.name}${each.split ? ` (${each.split})` : ""}`;
    const of = (series) => main.findIndex((each) => each.name === series.name && each.split === (series.split || ""));
    const picture = new Picture({
      title: main.map(called).join(", "), path: "values", axis: this.axis, isBare: true,
      parameters: () => ({ ...this.key(), name: [...new Set(main.map((each) => each.name))], over: "ranks", rank: this.look.rank || null }),
      draw: ({ series, left_out }, kind) => {
        const shown = series.filter((each) => of(each) >= 0).sort((one, other) => of(one) - of(other));
        const drawn = curves({ series: shown, left_out }, kind, { name: called, color: of, dashed: of, smoothing: this.look.smoothing, isLog: this.look.log, isShort: true });
        return { ...drawn, spans: marks(this.verdicts(), kind, this.attempts()) };
      },
    });
    this.learns.append(picture.element);
  }

  /** Show links to the visible parts of the page. */
  showJumps() {
    const parts = [...this.element.querySelectorAll(":scope > section:not([hidden]) > h2[id], :scope > div > section:not([hidden]) > h2[id]")];
    const below = parts.filter((each) => !each.closest(".pair") && !each.closest(".card"));
    fill(this.jump, below.map((each) => el("a", { href: `#${each.id}` }, each.textContent)));
  }

  showAbout() {
    const { config, environment, texts } = this.head;
    const parts = [["Configuration", config], ["Environment", environment], ["Texts", texts]]
      .filter(([, found]) => Object.keys(found || {}).length)
      .map(([caption, found]) => table(caption, ["name", "value"], Object.entries(found).map(([key, value]) => [key, el("td", { class: "long" }, shown(value))])));
    const cost = this.head.telemetry ? el("p", { class: "quiet" }, `Telemetry took: ${this.head.telemetry}.`) : null;
    this.about.hidden = !parts.length && !cost;
    fill(this.about, el("h2", { id: "about" }, "Configuration and environment"), cost, el("div", { class: "side" }, parts));
  }
}

export function shown(value) {
  return typeof value === "string" ? value : JSON.stringify(value);
}
