// One picture: drawn when it is scrolled to, with its numbers as text, CSV and PNG.

import { askOnce, csvAddress } from "./api.js";
import { themed } from "./colors.js";
import { rangeOfLines } from "./constant.js";
import { el, fill } from "./dom.js";
import { inTurn, isThere, library } from "./plotly.js";
import { isSaved } from "./saved.js";
import { sketch } from "./sketch.js";

const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) entry.target.picture.changeSeen(entry.isIntersecting);
  // All of a saved page may be printed.
}, { rootMargin: isSaved ? "1000000px" : "200px" });

const KEYS = { "+": [0.25, 0.75], "-": [-0.5, 1.5], ArrowLeft: [-0.25, 0.75], ArrowRight: [0.25, 1.25] };

/**
 * A picture of what one address answers.
 *
 * `draw(answer, kind)` gives traces, layout, notes (sentences) and label (for those who cannot see
 * it). `axis` is shared by pictures that zoom together; `kind()` is what this one has as its x.
 */
export class Picture {
  constructor({ title, path, parameters, draw, axis, kind, tall = false }) {
    Object.assign(this, { title, path, parameters, draw, axis });
    this.kind = kind || (() => axis.kind);
    this.isSeen = this.isStale = false;
    this.answer = this.whole = null;
    this.told = [];
    this.plot = el("div", { class: tall ? "plot tall" : "plot", role: "img", tabindex: "0", keydown: (event) => this.key(event) });
    this.notes = el("figcaption", { tabindex: "0" });
    this.csv = el("a", { download: "", href: "#", hidden: isSaved }, "CSV");
    this.csv.setAttribute("aria-label", `CSV of ${title}`);
    const png = el("button", { type: "button", "aria-label": `PNG of ${title}`, click: () => this.savePng() }, "PNG");
    this.whole_button = el("button", { type: "button", hidden: true, "aria-label": `Whole range of ${title}`, click: () => this.axis.zoomTo(this.kind(), null) }, "Whole range");
    this.element = el(
      "figure", { "data-picture": title },
      el("div", { class: "top" }, el("h3", {}, title), this.whole_button, this.csv, png),
      this.plot, this.notes,
    );
    this.element.picture = this;
    axis.pictures.add(this);
    seen.observe(this.element);
  }

  changeSeen(isSeen) {
    this.isSeen = isSeen;
    if (isSeen && (this.isStale || !this.element.dataset.drawn)) this.refresh();
  }

  remove() {
    seen.unobserve(this.element);
    this.axis.pictures.delete(this);
    if (window.Plotly) window.Plotly.purge(this.plot);
    this.element.remove();
  }

  /** Ask again, if it is seen; else once it is. */
  async refresh() {
    this.isStale = true;
    if (!this.isSeen || this.isAsking) return;
    this.isAsking = true;
    this.isStale = false;
    try {
      const zoom = this.axis.zoomOf(this.kind());
      const parameters = { ...this.parameters(), ...this.bounds(zoom) };
      this.offerCsv(parameters);
      const columns = Math.min(Math.max(Math.round(this.plot.clientWidth), 100), 2000);
      const answer = await awaited(this.load({ ...parameters, columns }));
      this.answer = answer;
      if (!isThere()) await this.sketch();
      await library();
      if (!zoom) this.whole = answer;
      await inTurn(() => this.redraw());
    } catch (error) {
      // What the sketch has told stays.
      fill(this.notes, el("span", { class: "bad" }, error.message), this.told.map((note) => el("span", {}, note)));
    } finally {
      this.isAsking = false;
    }
    if (this.isStale) this.refresh();
  }

  load(parameters) {
    return askOnce(this.path, parameters);
  }

  offerCsv(parameters) {
    this.csv.href = csvAddress(this.path, parameters);
  }

  /** The steps (or seconds) of a zoomed range, so that it is answered in more detail. */
  bounds(zoom) {
    if (!zoom) return {};
    const [low, high] = [Math.min(...zoom), Math.max(...zoom)];
    if (this.path === "node") return { first: Math.floor(low / 1000), until: Math.ceil(high / 1000) };
    if (this.kind() === "step") return { first: Math.floor(low), until: Math.ceil(high) };
    const column = this.kind() === "time" ? "ms" : "epoch";
    const parts = this.whole ? allColumns(this.whole) : [];
    let [first, until] = [Infinity, -Infinity];
    for (const columns of parts) {
      (columns[column] || []).forEach((at, number) => {
        if (at === null || at < low || at > high) return;
        first = Math.min(first, columns.first[number]);
        until = Math.max(until, columns.x[number]);
      });
    }
    return first <= until ? { first, until } : {};
  }

  /** What can be told before the library of plots is there: to start it takes a second. */
  async sketch() {
    const { traces, layout = {}, notes = [] } = this.draw(this.answer, this.kind());
    const lines = sketch(traces, layout, this.plot.clientWidth, this.plot.clientHeight);
    this.plot.replaceChildren(...(lines ? [lines] : []));
    this.told = notes;
    fill(this.notes, notes.map((note) => el("span", {}, note)));
    this.element.dataset.sketched = "yes";
    await Promise.allSettled([...underWay]);
    await painted();
  }

  async redraw() {
    const plotly = await library();
    // It may have been removed meanwhile.
    if (!this.answer || !this.axis.pictures.has(this)) return;
    const kind = this.kind();
    const { traces, layout = {}, notes = [], label = "" } = this.draw(this.answer, kind);
    const colors = themed();
    const zoom = this.axis.zoomOf(kind);
    const constant = rangeOfLines(traces, layout.yaxis || {});
    const line = { gridcolor: colors.line, linecolor: colors.line, zerolinecolor: colors.line };
    const whole = {
      margin: { l: 62, r: 12, t: 8, b: 36 },
      paper_bgcolor: colors.panel, plot_bgcolor: colors.panel,
      font: { color: colors.text, size: 11 }, showlegend: false, hovermode: "closest",
      uirevision: `${kind} ${this.axis.version}`,
      ...layout,
      xaxis: {
        ...line, title: { text: kind === "time" ? "" : kind, standoff: 4 },
        type: kind === "time" ? "date" : "linear", ...layout.xaxis,
        ...(zoom ? { range: zoom.map((at) => (kind === "time" ? new Date(at).toISOString() : at)), autorange: false } : { autorange: true }),
      },
      yaxis: { ...line, automargin: true, ...layout.yaxis, ...(constant ? { range: constant, autorange: false } : {}) },
    };
    this.whole_button.hidden = !zoom;
    const isNew = !this.plot.classList.contains("js-plotly-plot");
    if (isNew) this.plot.replaceChildren();
    await plotly.react(this.plot, traces, whole, { displayModeBar: false, responsive: true, scrollZoom: false, doubleClick: false });
    if (isNew) {
      this.plot.on("plotly_relayout", (change) => this.moved(change));
      this.plot.on("plotly_doubleclick", () => this.axis.zoomTo(this.kind(), null));
    }
    this.plot.setAttribute("aria-label", `${this.title}. ${label} Keys: + and - zoom, arrows move, 0 shows all.`);
    this.told = notes;
    fill(this.notes, notes.map((note) => el("span", {}, note)));
    this.element.dataset.drawn = "yes";
  }

  moved(change) {
    const range = change["xaxis.range"] || [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    if (range[0] === undefined) return;
    this.axis.zoomTo(this.kind(), range.map(plain));
  }

  key(event) {
    if (event.key === "0" || event.key === "Escape") this.axis.zoomTo(this.kind(), null);
    else if (event.key in KEYS && this.plot.layout) {
      const [from, to] = this.plot.layout.xaxis.range.map(plain);
      const [low, high] = KEYS[event.key].map((share) => from + share * (to - from));
      this.axis.zoomTo(this.kind(), [low, high]);
    } else return;
    event.preventDefault();
  }

  async savePng() {
    const plotly = await library();
    if (!this.answer) await this.refresh();
    await plotly.downloadImage(this.plot, { format: "png", width: 1200, height: 600, filename: this.title.replace(/[^\w.-]+/g, "_") });
  }
}

const underWay = new Set();

/** What pictures have asked for: all are sketched before the library holds up the page. */
function awaited(answer) {
  underWay.add(answer);
  const forget = () => underWay.delete(answer);
  answer.then(forget, forget);
  return answer;
}

/** The browser has drawn; one whose window is hidden draws nothing. */
function painted() {
  return new Promise((done) => {
    requestAnimationFrame(() => setTimeout(done));
    setTimeout(done, 100);
  });
}

/** Dates come as text; all ranges are kept as numbers. */
function plain(at) {
  return typeof at === "number" ? at : Date.parse(String(at).replace(" ", "T").replace(/(\.\d{3})\d*/, "$1") + (/[zZ]$/.test(at) ? "" : "Z"));
}

/** The columns of all that an answer holds. */
function allColumns(answer) {
  if (answer.parts) return answer.parts.flatMap(allColumns);
  const parts = [...(answer.series || []), ...(answer.ranks || [])].map((each) => each.columns);
  return answer.columns && answer.columns.x ? [answer.columns, ...parts] : parts;
}
