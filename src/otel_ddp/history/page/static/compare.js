// Several runs on one axis: values, step time, configurations, and the values at one step.

import { ask, pollWhileVisible } from "./api.js";
import { allChosen, choose, chosen, runAddress } from "./address.js";
import { Axis } from "./axis.js";
import { positions, curves } from "./curves.js";
import { el, fill, labelled, number, table } from "./dom.js";
import { logged, seconds } from "./shown.js";
import { seriesColor } from "./colors.js";
import { MergedPicture } from "./merged.js";
import { shown } from "./run.js";
import { meanOf } from "./timing.js";
import { brief } from "./verdicts.js";
import { look as readLook, lookControls, matcher } from "./values.js";

const EACH_MS = 3000;
const AT_ONCE = 24;

export function show(main) {
  document.title = "Compare · otel_ddp";
  const names = allChosen("run");
  const groups = allChosen("group");
  const runs = names.map((run, at) => ({ run, group: groups[at] ?? null }));
  if (runs.length < 2) {
    main.replaceChildren(el("h1", {}, "Compare"), el("p", {}, "Tick two or more runs in the ", el("a", { href: "/" }, "list of runs"), "."));
    return;
  }
  const view = new Compare(runs);
  main.replaceChildren(view.element);
  pollWhileVisible(() => view.poll(), EACH_MS);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => view.axis.redraw());
}

class Compare {
  constructor(runs) {
    this.runs = runs;
    this.axis = new Axis();
    this.look = readLook();
    this.heads = [];
    this.pictures = new Map();
    this.legend = el("div");
    this.controls = el("div");
    this.grid = el("div", { class: "grid" });
    this.count = el("p", { class: "quiet", role: "status" });
    this.configs = el("div");
    this.atStep = el("div");
    for (const part of ["result", "statistics", "same"]) this[part] = el("div");
    this.names = [];
    const filter = el("input", { type: "search", value: chosen("name"), input: () => { choose("name", filter.value); this.lay(); } });
    this.filter = filter;
    const step = el("input", { type: "number", min: "0", value: chosen("at"), placeholder: "last", change: () => { choose("at", step.value); this.showStep().catch(() => {}); } });
    this.step = step;
    this.element = el(
      "div", {}, el("h1", {}, `Compare ${runs.length} runs`), el("div", { class: "side" }, this.legend, this.configs), this.result, this.controls,
      el("section", { "aria-labelledby": "values" }, el("h2", { id: "values" }, "Values"), el("div", { class: "controls" }, labelled("Filter", filter), this.count), this.grid),
      el("section", { "aria-labelledby": "timing" }, el("h2", { id: "timing" }, "Step time"), el("div", { class: "grid wide" }, this.stepTime().element)),
      el("section", { "aria-labelledby": "at" }, el("h2", { id: "at" }, "Values at one step"), el("div", { class: "controls" }, labelled("Step", step)), this.atStep),
      this.statistics, this.same,
    );
  }

  async poll() {
    const asked = this.runs.map((run) => Promise.all([ask("run", run), ask("names", run)]));
    const found = await Promise.all(asked);
    const isFirst = !this.heads.length;
    const seen = found.map(([head]) => head.seen_ns).join();
    this.heads = found.map(([head]) => head);
    if (isFirst) this.controls.replaceChildren(lookControls(this.axis, this.look, 1, () => this.axis.refresh()));
    this.showLegend();
    this.names = [...new Set(found.flatMap(([, names]) => names.values))];
    this.lay();
    this.showConfigs();
    if (seen === this.seen) return;
    this.seen = seen;
    if (!isFirst) this.axis.refresh();
    await Promise.all([this.showStep(), this.showResult()]);
  }

  /** Show the result of `otel-ddp compare`, if there are two runs. */
  async showResult() {
    if (this.runs.length !== 2) return;
    const answer = await ask("compare", { run: this.runs.map((each) => each.run), group: this.heads.map((head) => head.group) });
    const named = `A is ${answer.a}, B is ${answer.b}`;
    const step = answer.rows.find((row) => row.name === "step_time");
    fill(this.result, el("p", {}, el("strong", {}, answer.conclusion), step ? ` A step takes ${seconds(step.a)} against ${seconds(step.b)}.` : ""));
    fill(this.statistics, el("details", {}, el("summary", {}, "Statistics"), answer.tables.map(({ heads, rows }) => table(`${heads[0]}: ${named}`, heads.map((each) => each || "verdict"), rows.map(([name, ...cells]) => [name, ...cells.map(number)]))), answer.notes.map((note) => el("p", { class: "quiet" }, note))));
  }

  showLegend() {
    const rows = this.heads.map((head, at) => [
      el("td", {}, el("span", { style: `color: ${seriesColor(at)}`, "aria-hidden": "true" }, "■ "), el("a", { href: runAddress(head.group, head.run) }, head.run)),
      head.group, head.state, number(String(head.step ?? "-")), el("td", { class: "bad" }, head.first.map((each) => el("div", {}, brief(each)))),
    ]);
    fill(this.legend, table("Runs", ["run", "group", "state", "step", "trouble"], rows));
  }

  lay() {
    const wanted = this.names.filter(matcher(this.filter.value));
    const now = wanted.slice(0, AT_ONCE);
    for (const [name, picture] of this.pictures) {
      if (now.includes(name)) continue;
      picture.remove();
      this.pictures.delete(name);
    }
    for (const name of now) {
      if (this.pictures.has(name)) continue;
      const made = this.values(name);
      this.pictures.set(name, made);
      this.grid.append(made.element);
    }
    this.count.textContent = `${now.length} of ${this.names.length} names${wanted.length > now.length ? ": filter to see others" : ""}`;
  }

  values(name) {
    const { look } = this;
    return new MergedPicture({
      title: name, path: "values", axis: this.axis, keys: this.runs,
      parameters: () => ({ name, over: "ranks", rank: look.rank || null }),
      draw: (answer, kind) => {
        const splits = [...new Set(answer.series.map((each) => each.split || ""))];
        return curves(answer, kind, {
          name: (each) => [this.runs[each.of].run, each.split].filter(Boolean).join(", "),
          color: (each) => each.of, dashed: (each) => splits.indexOf(each.split || ""), smoothing: look.smoothing, isLog: look.log,
        });
      },
    });
  }

  stepTime() {
    return new MergedPicture({
      title: "Step time, mean of ranks", path: "steps", axis: this.axis, keys: this.runs, parameters: () => ({}),
      kind: () => (this.axis.kind === "epoch" ? "step" : this.axis.kind),
      draw: (answer, kind) => {
        const found = answer.parts.map((part, at) => ({ part, run: this.runs[at].run, at })).filter(({ part }) => part.columns.x);
        const notes = found.map(({ part, run }) => `${run}: ${seconds(meanOf(part.columns)("step_s"))} a step`);
        const lines = found.map(({ part, run, at }) => ({ x: positions(part.columns, kind), y: part.columns.step_s, name: run, color: seriesColor(at) }));
        return { lines, unit: "s", fromZero: true, notes, label: notes.join(". ") };
      },
    });
  }

  /** Show the last value of each run at or before the chosen step. */
  async showStep() {
    const wanted = this.names.filter(matcher(this.filter.value)).slice(0, 20);
    if (!wanted.length) return;
    const until = this.step.value === "" ? null : this.step.value;
    const answers = await Promise.all(this.runs.map((run) => ask("values", { ...run, name: wanted, until, over: "ranks", columns: 4096 })));
    const rows = new Map();
    answers.forEach((answer, at) => {
      for (const each of answer.series) {
        const { x, last, first } = each.columns;
        const key = `${each.name}${each.split ? ` (${each.split})` : ""}`;
        if (!rows.has(key)) rows.set(key, this.runs.map(() => "-"));
        const place = x.length - 1;
        if (place < 0) continue;
        const about = first[place] === x[place] ? `step ${x[place]}` : `last of steps ${first[place]} to ${x[place]}`;
        rows.get(key)[at] = `${logged({ value: last[place] })} (${about})`;
      }
    });
    fill(this.atStep, table(until === null ? "Last values" : `Values at step ${until}`, ["name", ...this.runs.map((each) => each.run)], [...rows].map(([key, cells]) => [key, ...cells.map((text) => number(text))])));
  }

  showConfigs() {
    const all = this.heads.map((head) => ({ ...prefixed("environment", head.environment), ...head.config }));
    const keys = [...new Set(all.flatMap((each) => Object.keys(each)))];
    const texts = (key) => all.map((each) => (key in each ? shown(each[key]) : "-"));
    const differs = (key) => new Set(texts(key)).size > 1;
    const row = (key) => el("tr", { class: differs(key) ? "differs" : null }, el("th", { scope: "row" }, key), texts(key).map((text) => el("td", { class: "long" }, text)));
    const heads = ["name", ...this.runs.map((each) => each.run)];
    const [different, same] = [keys.filter(differs), keys.filter((key) => !differs(key))];
    fill(this.configs, different.length ? table("What differs", heads, different.map(row)) : el("p", {}, "Their settings do not differ."));
    fill(this.same, same.length ? el("details", {}, el("summary", {}, `${same.length} settings are the same`), table("What is the same", heads, same.map(row))) : "");
  }
}

function prefixed(word, found) {
  return Object.fromEntries(Object.entries(found || {}).map(([key, value]) => [`${word}: ${key}`, value]));
}
