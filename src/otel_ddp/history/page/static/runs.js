// The list of runs, one line each, to sort, filter and group, and to tick runs for a comparison.

import { ask, pollWhileVisible } from "./api.js";
import { choose, chosen, compareAddress, runAddress } from "./address.js";
import { choice, el, fill, labelled, number, table } from "./dom.js";
import { logged, seconds, share, time } from "./shown.js";
import { brief, OVER } from "./verdicts.js";

const EACH_MS = 2000;
const LABELS = ["group", "run", "job_type", "node", "rank", "local_rank"];
const GROUPS = ["", "group", "run", "job_type", "node", "rank", "local_rank", "state", "script"];
const MOST_ROWS = 500;
const MOST_SETTINGS = 4;
const SPARK = [72, 16];
// Each column: a function that makes its cell, and a function that returns its sort key.
const COLUMNS = {
  state: [(run) => el("td", { class: run.state === "failed" || run.state === "killed" ? "bad" : null }, run.silent ? `${run.state}?` : run.state), (run) => run.state],
  run: [(run) => el("td", { class: "cut", title: run.run }, el("a", { href: runAddress(run.group, run.run) }, run.run)), (run) => run.run],
  group: [(run) => el("td", { class: "cut", title: run.group }, run.group), (run) => run.group],
  what: [(run) => el("td", { class: "cut", title: what(run) }, what(run)), what],
  loss: [(run) => el("td", { class: "number" }, run.last, " ", spark(run.curve)), (run) => run.lastValue],
  validation: [(run) => number(run.checked), (run) => run.checkedValue],
  trouble: [(run) => el("td", { class: run.isBad ? "cut bad" : "cut", title: run.worst?.sentence }, run.trouble), (run) => (run.isBad ? run.trouble : "~")],
  step: [(run) => number(run.step === null ? "-" : run.step.toLocaleString("en-US")), (run) => run.step ?? -1],
  seen: [(run) => number(run.isLive ? "now" : run.seen_ns ? `${seconds(run.ago_s)} ago` : "-"), (run) => run.ago_s],
  took: [(run) => number(seconds(run.took_s)), (run) => run.took_s],
  began: [(run) => number(time(run.began_ns)), (run) => -run.began_ns],
  productive: [(run) => number(run.share === null ? "-" : share(run.share)), (run) => run.share ?? -1],
};
const USUAL = ["state", "run", "group", "what", "loss", "trouble", "step", "seen", "took", "productive"];

export function show(main) {
  document.title = "Runs · otel_ddp";
  const view = new Runs();
  main.replaceChildren(view.element);
  pollWhileVisible(() => view.poll(), EACH_MS);
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
    const boxes = Object.keys(COLUMNS).map((name) => labelled(name, el("input", { type: "checkbox", checked: shownColumns().includes(name), change: (event) => this.choose(name, event.target.checked) })));
    this.said = el("p", { class: "warn", role: "status" });
    const typed = (type) => el("input", { type, size: "14", autocomplete: "off" });
    this.texts = { name: typed("text"), tags: typed("text") };
    const token = typed("password");
    const act = (text, what) => el("button", { type: "button", click: () => this.change(what(), token.value) }, text);
    const change = el(
      "details", {}, el("summary", {}, "Change the ticked runs"),
      el("div", { class: "controls" }, labelled("Name", this.texts.name), labelled("Tags", this.texts.tags), labelled("Token", token), act("Save", () => this.written()), act("Delete", () => ({ delete: "yes" }))),
    );
    this.element = el(
      "div", {}, el("h1", {}, "Runs"),
      el("div", { class: "controls" }, labelled("Filter", filter), labelled("Group by", grouped), this.compare, el("details", {}, el("summary", {}, "Columns"), el("div", { class: "controls" }, boxes)), change), this.said, this.list,
    );
  }

  choose(name, isShown) {
    const wanted = Object.keys(COLUMNS).filter((each) => (each === name ? isShown : shownColumns().includes(each)));
    choose("columns", wanted.join(" "), USUAL.join(" "));
    this.lay();
  }

  async poll() {
    this.answer = await ask("runs");
    const { agent, node, folder } = this.answer;
    const where = el("span", { title: folder }, agent ? node : folder.split("/").pop());
    document.getElementById("node").replaceChildren(where);
    this.lay();
  }

  lay() {
    if (!this.answer) return;
    const { runs, faults } = this.answer;
    const problems = faults.map((each) => el("p", { class: "warn" }, each));
    if (!runs.length) {
      fill(this.list, el("p", {}, "No run is known here yet. ", el("code", {}, "otel-ddp demo"), " trains two small ranks for 20 s; in a script of yours, ", el("code", {}, "otel_ddp.instrument(model)"), " begins one."), problems);
      return;
    }
    const by = chosen("by");
    const wanted = this.sorted(withFacts(runs, this.answer.now_ns).filter(matches(this.filter.value)));
    const columns = shownColumns();
    const rows = grouped(wanted.slice(0, MOST_ROWS), by).flatMap(([name, members]) => [
      ...(by ? [el("tr", { class: "group" }, el("th", { colspan: String(columns.length + 1), scope: "rowgroup" }, `${by}: ${name || "none"} (${members.length})`))] : []),
      ...members.map((run) => this.row(run, columns)),
    ]);
    const caption = `${wanted.length} of ${runs.length} runs${wanted.length > MOST_ROWS ? `, the first ${MOST_ROWS}` : ""}`;
    const [of, way] = this.order();
    const heads = columns.map((name) => el("button", { type: "button", class: "sort", "data-key": `sort ${name}`, "aria-label": `Sort by ${name}`, click: () => this.sort(name) }, `${name}${name === of ? (way > 0 ? " ▲" : " ▼") : ""}`));
    fill(this.list, problems, table(caption, ["compare", ...heads], rows, { class: "scroll lines" }));
  }

  sort(name) {
    choose("sort", chosen("sort") === name ? `-${name}` : name);
    this.lay();
  }

  order() {
    const [, down, name] = /^(-?)(\w*)$/.exec(chosen("sort")) || [];
    return name in COLUMNS ? [name, down ? -1 : 1] : ["", 1];
  }

  /** Sort by the chosen column; without one, in the agent's order: the newest first. */
  sorted(runs) {
    const [of, way] = this.order();
    if (!of) return runs;
    const [, key] = COLUMNS[of];
    const compared = (one, other) => (typeof one === "string" ? one.localeCompare(other, undefined, { numeric: true }) : one - other);
    return [...runs].sort((one, other) => way * compared(key(one), key(other)));
  }

  row(run, columns) {
    // Each answer creates new rows, so restore the user's ticks.
    const box = el("input", { type: "checkbox", "aria-label": `Compare ${run.run}`, "data-key": run.key, checked: this.ticked.has(run.key), change: () => this.tick(run, box.checked) });
    return el("tr", { "data-run": run.run }, el("td", {}, box), columns.map((name) => COLUMNS[name][0](run)));
  }

  /** Rename, tag or delete the ticked runs, which must be over. Needs the token. */
  async change(what, token) {
    if (what.delete && !confirm(`Delete ${this.ticked.size} runs with all that is known of them?`)) return;
    const headers = { "X-Otel-Ddp": "page", Authorization: `Bearer ${token}` };
    try {
      for (const { group, run } of this.ticked.values()) await ask("change", { group, run, ...what }, { method: "POST", headers, credentials: "omit" });
      this.ticked.clear();
      fill(this.said, "");
    } catch (error) {
      fill(this.said, error.message);
    }
    await this.poll();
  }

  tick(run, isTicked) {
    if (isTicked) this.ticked.set(run.key, run);
    else this.ticked.delete(run.key);
    this.compare.disabled = this.ticked.size < 2;
    // If one run is ticked, the fields show its texts, and an empty field deletes the text.
    if (this.ticked.size > 2) return;
    const [only] = this.ticked.size === 1 ? this.ticked.values() : [{}];
    for (const [name, field] of Object.entries(this.texts)) field.value = only[name] ?? "";
  }

  /** The texts to write. If several runs are ticked, an empty field leaves their texts unchanged. */
  written() {
    const all = Object.entries(this.texts).map(([name, field]) => [name, field.value]);
    return Object.fromEntries(all.filter(([, text]) => text || this.ticked.size === 1));
  }
}

function shownColumns() {
  return chosen("columns", USUAL.join(" ")).split(" ").filter((name) => name in COLUMNS);
}

/** Add the values that columns show, and their sort keys, to each run. */
function withFacts(runs, now_ns) {
  const settings = changed(runs);
  for (const run of runs) {
    const isOver = OVER.includes(run.state) || run.silent;
    const worst = run.verdicts.find((each) => !each.harmless);
    const [loss, checked] = run.main.map((main) => run.summary.find((row) => row.name === main.name && (row.split || "") === main.split)?.last);
    Object.assign(run, {
      key: `${run.group} ${run.run}`, isLive: !isOver, worst, trouble: worst ? brief(worst) : "", isBad: Boolean(worst) && (isOver || !worst.until_ns), settings: settings(run),
      ago_s: Math.max(0, (now_ns - run.seen_ns) / 1e9), took_s: Math.floor(((isOver ? run.seen_ns : now_ns) - run.began_ns) / 1e9),
      last: loss ? logged(loss) : "-", lastValue: loss?.value ?? Infinity, checked: checked ? logged(checked) : "-", checkedValue: checked?.value ?? Infinity,
    });
  }
  return runs;
}

/** For each run, the settings that differ between the runs of its group. */
function changed(runs) {
  const known = new Map();
  for (const { group, config } of runs) {
    for (const [name, value] of Object.entries(config)) {
      const key = JSON.stringify([group, name]);
      known.set(key, (known.get(key) || new Set()).add(JSON.stringify(value)));
    }
  }
  const text = (value) => (typeof value === "string" ? value : JSON.stringify(value));
  return ({ group, config }) => Object.entries(config).filter(([name]) => known.get(JSON.stringify([group, name])).size > 1)
    .slice(0, MOST_SETTINGS).map(([name, value]) => `${name}=${text(value)}`);
}

function what(run) {
  return [run.name, run.script, run.settings.join(" ")].filter(Boolean).join(" · ");
}

/** A sparkline, as high as a line of text. */
function spark(curve) {
  const values = curve.filter((value) => value !== null);
  if (values.length < 2) return "";
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const [width, height] = SPARK;
  const made = (tag, attributes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  };
  const points = values.map((value, at) => `${(at / (values.length - 1) * width).toFixed(1)},${(1 + (height - 2) * (high - value) / (high - low || 1)).toFixed(1)}`);
  const drawn = made("svg", { width, height, class: "spark", "aria-hidden": "true" });
  drawn.append(made("polyline", { points: points.join(" ") }));
  return drawn;
}

/** A filter by words, and by label=value (the six labels, state, script). All of them must match. */
function matches(text) {
  const words = text.split(/\s+/).filter(Boolean);
  return (run) => words.every((word) => {
    const [label, value] = word.split("=", 2);
    if (value !== undefined && (LABELS.includes(label) || label === "state" || label === "script")) return of(run, label).includes(value);
    const all = [run.run, run.group, run.project, run.state, run.name, run.script, ...run.settings, ...run.nodes, ...[run.tags].flat()];
    return all.some((each) => String(each ?? "").toLowerCase().includes(word.toLowerCase()));
  });
}

function of(run, label) {
  const several = { script: [run.script || ""], node: run.nodes, rank: run.ranks, job_type: run.job_type, local_rank: run.local_ranks };
  return several[label] || [run[label]];
}

function grouped(runs, by) {
  if (!by) return [["", runs]];
  const found = new Map();
  for (const run of runs) {
    for (const name of of(run, by)) found.set(name, [...(found.get(name) || []), run]);
  }
  return [...found].sort(([one], [other]) => String(one).localeCompare(String(other), undefined, { numeric: true }));
}
