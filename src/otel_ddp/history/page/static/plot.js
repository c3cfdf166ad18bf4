// Draws lines with uPlot: axes, bands, stacked areas, marked times, and the values under the pointer.

import { themed } from "./colors.js";
import { el } from "./dom.js";
import { measured, number, scaled } from "./shown.js";

const FONT = "11px system-ui, sans-serif";
// One very high value would flatten the rest of the chart. So if the values without the highest RARE
// share of them span less than 1 / FAR of the full range, higher values are cut off, with a mark.
const [RARE, FAR] = [0.02, 3];
// In a line with at most this many values, each value gets a dot.
const FEW = 60;
// If all values are equal within SAME, the axis extends by AROUND of the value to each side.
const [SAME, AROUND] = [1e-9, 0.1];
const MOST_TOLD = 9;

/**
 * Draws into an element. When the user selects a range with the pointer, `change([from, to])` is
 * called.
 *
 * A line has x, y, name and color, and may have low, high, dash, alpha, isArea and isQuiet.
 */
export function plot(into, { lines, spans = [], unit = "", isLog = false, fromZero = false, isStacked = false }, { kind, zoom, change }) {
  const colors = themed();
  const shown = isStacked ? stacked(lines) : lines;
  const { data, series, bands, told } = tables(shown.map((line) => ordered(line, isLog)), colors);
  const range = rangeOf(shown, { isLog, fromZero, cut: !isStacked });
  const axis = { font: FONT, stroke: colors.quiet, grid: { stroke: colors.line, width: 1 }, ticks: { show: false } };
  const tip = el("div", { class: "tip", hidden: true });
  const made = new window.uPlot({
    width: Math.max(into.clientWidth, 50), height: Math.max(into.clientHeight, 50), ms: 1, padding: [spans.length ? 18 : 8, 10, 0, 0],
    series: [{}, ...series], bands, legend: { show: false },
    cursor: { y: false, drag: { x: true, y: false, setScale: false }, points: { size: 6 } },
    scales: {
      x: { time: kind === "time", range: zoom ? () => zoom : (_, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) },
      y: isLog ? { distr: 3 } : { range: () => range.ends },
    },
    axes: [
      { ...axis, size: kind === "time" ? 38 : 24, gap: 3, grid: { show: false }, ...(kind === "time" ? {} : { values: (_, at) => at.map((each) => each.toLocaleString("en-US")) }) },
      { ...axis, gap: 4, size: (_, values) => 14 + 6.4 * Math.max(3, ...(values || []).map((each) => each.length)), values: (_, at) => (isLog ? at.map((each) => (each === null ? "" : number(each))) : ticks(at, unit)) },
    ],
    hooks: {
      drawAxes: [(chart) => shade(chart, spans, colors)],
      draw: [(chart) => cutMarks(chart, range, shown, colors)],
      setSelect: [({ select, posToVal }) => {
        if (select.width > 3) change([posToVal(select.left, "x"), posToVal(select.left + select.width, "x")]);
      }],
      setCursor: [(chart) => showTip(chart, tip, told, { kind, unit })],
    },
  }, data, into);
  made.over.append(tip);
  made.over.addEventListener("dblclick", () => change(null));
  return { chart: made, cut: range.cut };
}

/** Stack the lines: each one on top of the lines before it. */
function stacked(lines) {
  let below = null;
  return lines.map((line) => {
    const sum = line.y.map((value, at) => (value === null ? null : value + (below ? below[at] || 0 : 0)));
    const made = { ...line, y: sum, own: line.y, low: below || sum.map(() => 0), high: sum };
    below = sum;
    return made;
  }).reverse();
}

/** The line as uPlot needs it: sorted by x, without unknown x, and on a log axis without values <= 0. */
function ordered(line, isLog) {
  const { x } = line;
  const isFine = x.every((at, place) => at !== null && (place === 0 || x[place - 1] <= at));
  const order = isFine ? null : x.map((_, at) => at).filter((at) => x[at] !== null).sort((one, other) => x[one] - x[other]);
  const value = (each) => (isLog && each <= 0 ? null : each);
  const made = { ...line };
  for (const key of ["x", "y", "low", "high", "own"]) {
    if (!line[key] || (isFine && !isLog)) continue;
    const values = isFine ? line[key] : order.map((at) => line[key][at]);
    made[key] = isLog && key !== "x" ? values.map(value) : values;
  }
  return made;
}

/** The data for uPlot: lines with the same x form a table, and uPlot joins the tables. */
function tables(lines, colors) {
  const of = new Map();
  for (const line of lines) of.set(line.x, [...(of.get(line.x) || []), line]);
  const found = { parts: [], series: [], bands: [], told: [] };
  for (const [x, members] of of) {
    const columns = [x];
    for (const line of members) {
      if (line.low) {
        const at = found.series.length + 1;
        columns.push(line.low, line.high);
        found.series.push(...[0, 1].map(() => ({ stroke: "transparent", width: 0, points: { show: false } })));
        found.bands.push({ series: [at + 1, at], fill: line.isArea ? line.color : `${line.color}2e` });
      }
      columns.push(line.y);
      const few = line.y.filter((value) => value !== null).length <= FEW;
      found.series.push({ stroke: `${line.color}${line.alpha || ""}`, width: line.isArea ? 0 : 1.6, dash: line.dash, points: { show: few && !line.isArea && !line.isQuiet, size: 5, fill: colors.panel } });
      if (!line.isQuiet) found.told.push({ line, at: found.series.length });
    }
    found.parts.push(columns);
  }
  if (!found.parts.length) found.parts.push([[]]);
  return { ...found, data: found.parts.length > 1 ? window.uPlot.join(found.parts) : found.parts[0] };
}

/** The range of y: the lowest and the highest value except outliers; and the number of outliers. */
function rangeOf(lines, { isLog, fromZero, cut }) {
  const values = lines.flatMap((line) => line.y).filter((value) => value !== null && (!isLog || value > 0)).sort((one, other) => one - other);
  if (!values.length) return { ends: [0, 1], cut: 0 };
  const [low, all] = [fromZero ? 0 : values[0], values[values.length - 1]];
  const usual = values[Math.floor((values.length - 1) * (1 - RARE))];
  const isCut = cut && !isLog && usual > low && all - low > FAR * (usual - low);
  const high = isCut ? low + 1.3 * (usual - low) : all;
  if (high - low <= Math.abs(high) * SAME) {
    const half = Math.abs(high) * AROUND || 1;
    return { ends: [high - half, high + half], cut: 0 };
  }
  const space = 0.04 * (high - low);
  return { ends: [fromZero ? 0 : low - space, high + space], cut: isCut ? values.filter((value) => value > high).length : 0 };
}

/** The labels of ticks, with enough digits that neighbouring labels differ. */
function ticks(values, unit) {
  const [factor, name] = scaled(Math.max(...values.map(Math.abs)), unit);
  let digits = 0;
  while (digits < 7 && values.some((value) => Math.abs(value * factor * 10 ** digits - Math.round(value * factor * 10 ** digits)) > 1e-3)) digits += 1;
  return values.map((value) => (digits > 6 ? number(value) : `${(value * factor).toFixed(digits)}${name && ` ${name}`}`));
}

/** Shade the spans of verdicts from their first step to their last, and mark starts of attempts. */
function shade(chart, spans, colors) {
  const { ctx, bbox } = chart;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, 0, bbox.width, bbox.top + bbox.height);
  ctx.clip();
  ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
  ctx.textAlign = "left";
  ctx.textBaseline = "alphabetic";
  for (const { from, to, text, isBad } of spans) {
    const at = (value) => (value === null ? bbox.left + bbox.width : chart.valToPos(value, "x", true));
    const [left, color] = [at(from), isBad ? colors.bad : colors.quiet];
    ctx.fillStyle = `${colors.fill}1f`;
    if (to !== undefined) ctx.fillRect(left, bbox.top, Math.max(at(to) - left, 2), bbox.height);
    ctx.fillStyle = color;
    ctx.fillRect(left, bbox.top, devicePixelRatio, bbox.height);
    const { width } = ctx.measureText(text);
    const fits = left + width + 8 < bbox.left + bbox.width;
    ctx.fillText(text, fits ? left + 4 : Math.max(left - width - 4, bbox.left), isBad ? bbox.top - 5 * devicePixelRatio : bbox.top + bbox.height - 4);
  }
  ctx.restore();
}

function cutMarks(chart, range, lines, { quiet }) {
  if (!range.cut) return;
  const { ctx, bbox } = chart;
  const size = 3 * devicePixelRatio;
  ctx.fillStyle = quiet;
  for (const { x, y } of lines) {
    y.forEach((value, place) => {
      if (value === null || value <= range.ends[1]) return;
      const at = chart.valToPos(x[place], "x", true);
      ctx.beginPath();
      ctx.moveTo(at, bbox.top);
      ctx.lineTo(at - size, bbox.top + 2 * size);
      ctx.lineTo(at + size, bbox.top + 2 * size);
      ctx.fill();
    });
  }
}

/** Show for each line the last value at or left of the pointer. */
function showTip(chart, tip, told, { kind, unit }) {
  const { idx, left } = chart.cursor;
  tip.hidden = idx === null || idx === undefined || left < 0;
  if (tip.hidden) return;
  const at = chart.data[0][idx];
  const rows = told.slice(0, MOST_TOLD).map(({ line, at: column }) => {
    let place = idx;
    while (place >= 0 && (chart.data[column][place] === undefined || chart.data[column][place] === null)) place -= 1;
    const value = place < 0 ? null : line.own ? line.own[place] : chart.data[column][place];
    return el("div", {}, el("span", { style: `color: ${line.color}`, "aria-hidden": "true" }, "■"), ` ${line.name}: ${measured(value, unit)}`);
  });
  const more = told.length > MOST_TOLD ? [el("div", {}, `and ${told.length - MOST_TOLD} more`)] : [];
  tip.replaceChildren(el("div", {}, kind === "time" ? new Date(at).toLocaleString("en-GB") : `${kind} ${at.toLocaleString("en-US")}`), ...rows, ...more);
  const isRight = left > chart.over.clientWidth / 2;
  Object.assign(tip.style, { left: isRight ? "" : `${left + 10}px`, right: isRight ? `${chart.over.clientWidth - left + 10}px` : "" });
}
