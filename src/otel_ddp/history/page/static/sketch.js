// Lines of a picture before the library of plots is there: over a slow tunnel that takes seconds.

import { themed } from "./colors.js";
import { rangeOfConstant } from "./constant.js";

const SVG = "http://www.w3.org/2000/svg";
const [LEFT, RIGHT, TOP, BOTTOM] = [62, 12, 8, 36];

/** The curves of these traces, with the ends of both axes; nothing for other kinds of traces. */
export function sketch(traces, layout, width, height) {
  const isLog = layout.yaxis?.type === "log";
  const lines = curves(traces).map(({ color, points }) => ({
    color,
    points: points.map(([x, y]) => [x, isLog ? Math.log10(y) : y]).filter(([x, y]) => Number.isFinite(x) && Number.isFinite(y)),
  }));
  const all = lines.flatMap((each) => each.points);
  if (!all.length) return null;
  const across = scale(all.map(([x]) => x), LEFT, width - RIGHT);
  const up = scale(all.map(([, y]) => y), height - BOTTOM, TOP, isLog ? () => null : rangeOfConstant);
  const drawn = made("svg", { width, height, "aria-hidden": "true" });
  for (const { color, points } of lines) {
    const path = points.map(([x, y]) => `${across.at(x).toFixed(1)},${up.at(y).toFixed(1)}`).join(" ");
    drawn.append(made("polyline", { points: path, fill: "none", stroke: color, "stroke-width": 1.6 }));
  }
  const ends = [up.low, up.high].map((y) => short(isLog ? 10 ** y : y));
  drawn.append(text(ends[0], LEFT - 6, height - BOTTOM), text(ends[1], LEFT - 6, TOP + 9));
  if (typeof traces[0].x[0] === "number") {
    drawn.append(text(short(across.low), LEFT + 12, height - BOTTOM + 16), text(short(across.high), width - RIGHT, height - BOTTOM + 16));
  }
  return drawn;
}

function curves(traces) {
  let below = null;
  return traces.filter((each) => each.type === "scatter" && each.line?.width !== 0).map((trace) => {
    let { y } = trace;
    if (trace.stackgroup) {
      y = y.map((value, at) => (value || 0) + (below ? below[at] : 0));
      below = y;
    }
    const at = (x) => (typeof x === "string" ? Date.parse(x) : x);
    const points = trace.x.map((x, number) => [x === null ? NaN : at(x), y[number] === null ? NaN : y[number]]);
    return { color: trace.line.color, points };
  });
}

function scale(values, from, to, widened = () => null) {
  const lowest = values.reduce((a, b) => Math.min(a, b));
  const highest = values.reduce((a, b) => Math.max(a, b));
  const [low, high] = widened(lowest, highest) || [lowest, highest];
  return { low, high, at: (value) => (high > low ? from + ((value - low) / (high - low)) * (to - from) : (from + to) / 2) };
}

function short(value) {
  return String(Number(value.toPrecision(3)));
}

function text(content, x, y) {
  const found = made("text", { x, y, "text-anchor": "end", "font-size": 11, fill: themed().text });
  found.textContent = content;
  return found;
}

function made(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}
