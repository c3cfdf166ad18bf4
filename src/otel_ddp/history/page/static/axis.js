// The x axis that all pictures of a view share: its kind (step, time or epoch), and its zoomed range.

import { choose, chosen } from "./address.js";

export class Axis {
  constructor(kinds = ["step", "time", "epoch"]) {
    const kind = chosen("x", "step");
    this.kind = kinds.includes(kind) ? kind : "step";
    this.pictures = new Set();
    this.zooms = {};
    const [of, low, high] = chosen("zoom").split("~");
    if (of && Number.isFinite(Number(low)) && Number.isFinite(Number(high)) && low !== high) {
      this.zooms[of] = [Number(low), Number(high)];
    }
  }

  zoomOf(kind) {
    return this.zooms[kind] || null;
  }

  /** Zoom all pictures with this kind of x axis to the range; without a range, show all data. */
  zoomTo(kind, range) {
    const before = this.zooms[kind];
    if (range && before && range.every((at, number) => at === before[number])) return;
    if (!range && !before) return;
    this.zooms = range ? { [kind]: range } : {};
    choose("zoom", range ? [kind, ...range.map((at) => Number(at.toPrecision(15)))].join("~") : "");
    this.refresh();
  }

  change(kind) {
    this.kind = kind;
    this.zooms = {};
    choose("x", kind, "step");
    choose("zoom", "");
    this.refresh();
  }

  refresh() {
    for (const each of this.pictures) each.refresh();
  }

  redraw() {
    for (const each of this.pictures) each.redraw();
  }
}
