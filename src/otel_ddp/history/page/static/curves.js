// Lines of logged values and of samples: means, the band of lowest and highest, smoothing.

import { dash, seriesColor } from "./colors.js";
import { measured } from "./shown.js";
import { escaped } from "./marks.js";

const SHOWN_NOTES = 40;

/** The x of each point, as the library of plots takes it. */
export function positions(columns, kind) {
  if (kind === "time") return columns.ms.map((at) => (at === null ? null : new Date(at).toISOString()));
  if (kind === "epoch") return columns.epoch || [];
  return columns.x;
}

/** An exponential mean that is right from its first point on; gaps stay gaps. */
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
 * Traces of several series, and a sentence on each.
 *
 * `name(series)` is how it is called, `color` and `dashed` are numbers of groups.
 */
export function curves(answer, kind, { name, color, dashed = () => 0, smoothing = 0, log = false, unit = "" }) {
  const traces = [];
  const notes = [];
  let [hidden, bad, most] = [0, 0, 1];
  for (const series of answer.series) {
    const { columns } = series;
    const x = positions(columns, kind);
    const y = columns.mean || columns.per_second;
    const [called, painted] = [name(series), seriesColor(color(series))];
    const line = { color: painted, dash: dash(dashed(series)), width: 1.6 };
    const alone = x.length < 3;
    const shared = { x, name: escaped(called), type: "scatter", mode: alone ? "lines+markers" : "lines" };
    if (columns.low && columns.values.some((count) => count > 1)) {
      const edge = { ...shared, mode: "lines", line: { width: 0 }, hoverinfo: "skip" };
      traces.push({ ...edge, y: columns.low });
      traces.push({ ...edge, y: columns.high, fill: "tonexty", fillcolor: faint(painted) });
    }
    if (smoothing > 0) {
      traces.push({ ...shared, y, line, opacity: 0.3, hoverinfo: "skip" });
      traces.push({ ...shared, y: smoothed(y, smoothing), line: { ...line, width: 2 } });
    } else {
      traces.push({ ...shared, y, line });
    }
    if (log) hidden += (columns.low || y).filter((value) => value !== null && value <= 0).length;
    bad += (columns.not_finite || []).reduce((sum, count) => sum + count, 0);
    most = Math.max(most, ...(columns.values || []));
    if (notes.length < SHOWN_NOTES) notes.push(sentence(called, columns, unit));
  }
  const left = answer.series.length - SHOWN_NOTES;
  if (left > 0) notes.push(`and ${left} further lines`);
  if (answer.left_out) notes.push(`${answer.left_out} further series are left out: choose a rank.`);
  if (bad) notes.push(`${bad} ${bad === 1 ? "value is" : "values are"} not finite, and not drawn.`);
  if (hidden) notes.push(`${hidden} points are not above 0: a logarithmic axis cannot show them.`);
  if (most > 1) notes.push(`A point is the mean of up to ${most} values; the band goes from the lowest to the highest.`);
  if (kind === "epoch" && !answer.series.some((each) => (each.columns.epoch || []).some((at) => at !== null))) {
    notes.push("No epoch was logged with these values.");
  }
  return { traces, notes, label: notes.slice(0, 4).join(". ") };
}

function sentence(called, columns, unit) {
  const last = latest(columns);
  if (last < 0) return `${called}: no value`;
  const shown = (value) => measured(value, unit);
  if (columns.per_second) return `${called}: last ${shown(columns.per_second[last])} a second`;
  const lows = columns.low.filter((value) => value !== null);
  const highs = columns.high.filter((value) => value !== null);
  const final = columns.last[last] === null ? "not finite" : shown(columns.last[last]);
  if (!lows.length) return `${called}: last ${final}`;
  const low = lows.reduce((a, b) => Math.min(a, b));
  const high = highs.reduce((a, b) => Math.max(a, b));
  return `${called}: last ${final}, lowest ${shown(low)}, highest ${shown(high)}`;
}

function latest(columns) {
  return (columns.last || columns.per_second).length - 1;
}

function faint(color) {
  return `${color}33`;
}
