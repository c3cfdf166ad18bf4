// One picture: a chart that is drawn when it scrolls into view, with CSV and PNG to download.

import { askOnce } from "./api.js";
import { themed } from "./colors.js";
import { csv } from "./csv.js";
import { el, fill } from "./dom.js";
import { plot } from "./plot.js";
import { isSaved } from "./saved.js";

const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) entry.target.picture.changeSeen(entry.isIntersecting);
  // A saved page is drawn as a whole, since it may be printed.
}, { rootMargin: isSaved ? "1000000px" : "200px" });
const resized = new ResizeObserver((entries) => {
  for (const { target } of entries) target.picture.resize();
});

const KEYS = { "+": [0.25, 0.75], "-": [-0.5, 1.5], ArrowLeft: [-0.25, 0.75], ArrowRight: [0.25, 1.25] };
const [PNG_SCALE, PNG_HEAD] = [2, 24];
// A picture requests a multiple of SHARED columns, up to MOST; a CSV file has up to MOST_ROWS rows.
const [SHARED, MOST, MOST_ROWS] = [800, 2400, 4096];

/**
 * A picture of the answer to one request.
 *
 * `draw(answer, kind)` returns the arguments of `plot`, `notes` (sentences), and `label` (for screen
 * readers). Pictures that zoom together share an `axis`; `kind()` returns the kind of the x axis.
 */
export class Picture {
  constructor({ title, path, parameters, draw, axis, kind, isBare = false }) {
    Object.assign(this, { title, path, parameters, draw, axis });
    this.kind = kind || (() => axis.kind);
    this.isSeen = this.isStale = false;
    this.answer = this.whole = this.drawn = null;
    this.plot = el("div", { class: "plot", role: "img", "aria-label": title, tabindex: "0", keydown: (event) => this.key(event) });
    this.plot.picture = this;
    this.notes = el("figcaption");
    const csv_button = el("button", { type: "button", "aria-label": `CSV of ${title}`, click: () => this.saveCsv() }, "CSV");
    const png = el("button", { type: "button", "aria-label": `PNG of ${title}`, click: () => this.savePng() }, "PNG");
    this.whole_button = el("button", { type: "button", hidden: true, "aria-label": `Whole range of ${title}`, click: () => this.axis.zoomTo(this.kind(), null) }, "Whole range");
    this.element = el(
      "figure", { "data-picture": title, class: isBare ? "bare" : null },
      el("div", { class: "top" }, isBare ? null : el("h3", {}, title), this.whole_button, csv_button, png),
      this.plot, this.notes,
    );
    this.element.picture = this;
    axis.pictures.add(this);
    seen.observe(this.element);
    resized.observe(this.plot);
  }

  changeSeen(isSeen) {
    this.isSeen = isSeen;
    if (isSeen && (this.isStale || !this.element.dataset.drawn)) this.refresh();
  }

  remove() {
    seen.unobserve(this.element);
    resized.unobserve(this.plot);
    this.axis.pictures.delete(this);
    this.drawn?.chart.destroy();
    this.element.remove();
  }

  /** Request the data again: now if the picture is in view, else once it comes into view. */
  async refresh() {
    this.isStale = true;
    if (!this.isSeen || this.isAsking) return;
    this.isAsking = true;
    this.isStale = false;
    try {
      const zoom = this.axis.zoomOf(this.kind());
      const parameters = { ...this.parameters(), ...this.bounds(zoom) };
      // Round up, so that pictures of similar width share one answer.
      const columns = Math.min(Math.ceil((this.plot.clientWidth || 1) / SHARED) * SHARED, MOST);
      this.answer = await this.load({ ...parameters, columns });
      if (!zoom) this.whole = this.answer;
      this.redraw();
    } catch (error) {
      fill(this.notes, el("span", { class: "warn" }, error.message));
    } finally {
      this.isAsking = false;
    }
    if (this.isStale) this.refresh();
  }

  load(parameters) {
    return askOnce(this.path, parameters);
  }

  /** The series of an answer, each with its columns. */
  tables({ series, columns }) {
    return series || [{ columns }];
  }

  /** The first and last step (or second) of the zoomed range, to request it in more detail. */
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

  redraw() {
    // The picture may have been removed while it waited for the answer.
    if (!this.answer || !this.axis.pictures.has(this)) return;
    const kind = this.kind();
    const wanted = this.draw(this.answer, kind);
    const zoom = this.axis.zoomOf(kind);
    const pointer = this.drawn?.chart.cursor;
    this.drawn?.chart.destroy();
    this.drawn = plot(this.plot, wanted, { kind, zoom, change: (range) => this.axis.zoomTo(kind, range) });
    if (pointer?.left >= 0) this.drawn.chart.setCursor({ left: pointer.left, top: pointer.top });
    this.whole_button.hidden = !zoom;
    const cut = this.drawn.cut ? [`${this.drawn.cut} values are above the picture (▲).`] : [];
    this.plot.setAttribute("aria-label", `${this.title}. ${wanted.label || ""} Keys: + and - zoom, arrows move, 0 shows all.`);
    fill(this.notes, [...wanted.notes, ...cut].map((note) => (note instanceof Element ? note : el("span", {}, note))));
    this.element.dataset.drawn = "yes";
  }

  resize() {
    const [width, height] = [this.plot.clientWidth, this.plot.clientHeight];
    if (this.drawn && width && (this.drawn.chart.width !== width || this.drawn.chart.height !== height)) this.drawn.chart.setSize({ width, height });
  }

  key(event) {
    if (event.key === "0" || event.key === "Escape") this.axis.zoomTo(this.kind(), null);
    else if (event.key in KEYS && this.drawn) {
      const { min, max } = this.drawn.chart.scales.x;
      this.axis.zoomTo(this.kind(), KEYS[event.key].map((share) => min + share * (max - min)));
    } else return;
    event.preventDefault();
  }

  async saveCsv() {
    const zoomed = this.bounds(this.axis.zoomOf(this.kind()));
    const answer = await this.load({ ...this.parameters(), ...zoomed, columns: MOST_ROWS });
    this.save(URL.createObjectURL(new Blob([csv(this.tables(answer))], { type: "text/csv" })), "csv");
  }

  save(href, ending) {
    el("a", { href, download: `${this.title.replace(/[^\w.-]+/g, "_")}.${ending}` }).click();
  }

  async savePng() {
    if (!this.answer) await this.refresh();
    const { canvas } = this.drawn.chart.ctx;
    const made = el("canvas", { width: canvas.width, height: canvas.height + PNG_SCALE * PNG_HEAD });
    const [into, colors] = [made.getContext("2d"), themed()];
    into.fillStyle = colors.panel;
    into.fillRect(0, 0, made.width, made.height);
    into.drawImage(canvas, 0, PNG_SCALE * PNG_HEAD);
    into.fillStyle = colors.text;
    into.font = `${PNG_SCALE * 12}px system-ui, sans-serif`;
    into.fillText(this.title, PNG_SCALE * 8, PNG_SCALE * 16);
    this.save(made.toDataURL("image/png"), "png");
  }
}

/** The columns of all series in an answer. */
function allColumns(answer) {
  if (answer.parts) return answer.parts.flatMap(allColumns);
  const parts = [...(answer.series || []), ...(answer.ranks || [])].map((each) => each.columns);
  return answer.columns && answer.columns.x ? [answer.columns, ...parts] : parts;
}
