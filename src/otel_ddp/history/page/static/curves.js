// Lines of logged values and samples: means, smoothed means, and bands from lowest to highest.

import { dash, seriesColor } from "./colors.js";
import { el } from "./dom.js";
import { measured } from "./shown.js";

const SHOWN_NOTES = 6;

/** The x of each point: its step, time or epoch. */
export function positions(columns, kind) {
  return { time: columns.ms, epoch: columns.epoch || [] }[kind] || columns.x;
}

/** The EWMA of the values, without bias towards 0 at the first points. Null stays null. */
export function smoothed(values, weight) {
  let [sum, total] = [0, 0];
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

/**
 * Lines of several series, and a sentence on each.
 *
 * `name(series)` returns its name in the legend; `color` and `dashed` return the number of a colour
 * and of a dash pattern.
 */
export function curves(answer, kind, { name, color, dashed = () => 0, smoothing = 0, isLog = false, unit = "", isShort = false }) {
  const lines = [];
  const notes = [];
  let [hidden, bad, most] = [0, 0, 1];
  const ranks = new Set(answer.series.map((series) => series.ranks || 1));
  for (const series of answer.series) {
    const { columns } = series;
    const y = columns.mean || columns.per_second;
    const called = name(series);
    const line = { x: positions(columns, kind), y, name: called, color: seriesColor(color(series)), dash: dash(dashed(series)) };
    const hasBand = columns.low && columns.values.some((count) => count > 1);
    const band = hasBand ? { low: columns.low, high: columns.high } : {};
    if (smoothing > 0) lines.push({ ...line, ...band, alpha: "55", isQuiet: true }, { ...line, y: smoothed(y, smoothing) });
    else lines.push({ ...line, ...band });
    if (isLog) hidden += (columns.low || y).filter((value) => value !== null && value <= 0).length;
    bad += (columns.not_finite || []).reduce((sum, count) => sum + count, 0);
    most = Math.max(most, ...(columns.values || []));
    if (notes.length < SHOWN_NOTES) notes.push(el("span", {}, el("i", { style: `background: ${line.color}` }), isShort ? called : sentence(called, columns, unit)));
  }
  const left = answer.series.length - SHOWN_NOTES;
  if (left > 0) notes.push(`and ${left} further lines`);
  if (answer.left_out) notes.push(`${answer.left_out} further series are left out: choose a rank.`);
  if (bad) notes.push(`${bad} ${bad === 1 ? "value is" : "values are"} NaN or infinite, and not drawn.`);
  if (hidden) notes.push(`${hidden} points are not above 0: a logarithmic axis cannot show them.`);
  if (most > 1) notes.push(`Mean of ${ranks.size > 1 ? "all ranks" : ranks.has(1) ? `up to ${most} values` : `${[...ranks]} ranks`}; band: lowest to highest.`);
  if (kind === "epoch" && !answer.series.some((each) => (each.columns.epoch || []).some((at) => at !== null))) {
    notes.push("No epoch was logged with these values.");
  }
  return { lines, notes, unit, isLog, label: notes.slice(0, 4).map((each) => each.textContent || each).join(". ") };
}

function sentence(called, columns, unit) {
  const last = latest(columns);
  if (last < 0) return `${called}: no value`;
  const shown = (value) => measured(value, unit);
  if (columns.per_second) return `${called}: last ${shown(columns.per_second[last])} a second`;
  const lows = columns.low.filter((value) => value !== null);
  const highs = columns.high.filter((value) => value !== null);
  const final = columns.last[last] === null ? "NaN" : shown(columns.last[last]);
  if (!lows.length) return `${called}: last ${final}`;
  const low = lows.reduce((a, b) => Math.min(a, b));
  const high = highs.reduce((a, b) => Math.max(a, b));
  return `${called}: last ${final}, lowest ${shown(low)}, highest ${shown(high)}`;
}

function latest(columns) {
  return (columns.last || columns.per_second).length - 1;
}
