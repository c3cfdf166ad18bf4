// Where the time goes: phases stacked, the length of steps, own work and waiting of each rank.

import { seriesColor } from "./colors.js";
import { positions } from "./curves.js";
import { el } from "./dom.js";
import { seconds, share as percent } from "./shown.js";
import { escaped, marks } from "./marks.js";
import { Picture } from "./picture.js";

const MOST_LINES = 64;
// One pause for a checkpoint would leave one colour for all else.
const RARE = 0.02;

export class Timing {
  constructor(run, axis, look) {
    const kind = () => (axis.kind === "epoch" ? "step" : axis.kind);
    const shared = { path: "steps", axis, kind };
    const every = () => run.key();
    const chosen = () => ({ ...run.key(), rank: look.rank || null });
    this.element = el(
      "section", { "aria-labelledby": "timing" },
      el("h2", { id: "timing" }, "Where the time goes"),
      el(
        "div", { class: "grid wide" },
        new Picture({ ...shared, title: "Phases of a step", parameters: chosen, draw: (answer, of) => phases(answer, of, run, look) }).element,
        new Picture({ ...shared, title: "Step time", parameters: chosen, draw: (answer, of) => stepTime(answer, of, run) }).element,
        new Picture({ ...shared, title: "Own work, rank by step", parameters: every, draw: (answer, of) => heatmap(answer, of, "work_s", "Cividis") }).element,
        new Picture({ ...shared, title: "Waiting for others, rank by step", parameters: every, draw: (answer, of) => heatmap(answer, of, "wait_s", "Cividis") }).element,
      ),
    );
  }
}

function phases(answer, kind, run, look) {
  const { columns } = answer;
  if (!columns.x) return none();
  const x = positions(columns, kind);
  const weights = columns.steps;
  const total = weights.reduce((sum, count) => sum + count, 0);
  const mean = (name) => columns[name].reduce((sum, value, at) => sum + (value || 0) * weights[at], 0) / total;
  const shown = answer.phases
    .map((each) => ({ ...each, mean_s: mean(each.name) }))
    .filter((each) => each.mean_s > 0)
    .sort((one, other) => other.mean_s - one.mean_s);
  const whole = mean("step_s");
  const traces = shown.map(({ name, shown: called, colour }) => ({
    x, y: columns[name], name: called, type: "scatter", mode: "lines", stackgroup: "all",
    line: { width: 0.5, color: colour }, fillcolor: colour,
    hovertemplate: "%{fullData.name}: %{y:.4s}s<extra></extra>",
  }));
  const share = ({ shown: called, mean_s }) => `${called}: ${seconds(mean_s)} a step, ${percent(mean_s / whole)}`;
  const who = look.rank ? `rank ${look.rank}` : answer.ranks.length > 1 ? `mean of ${answer.ranks.length} ranks` : "one rank";
  return {
    traces, layout: { yaxis: time(), showlegend: true, legend: { orientation: "h", y: 1.02, yanchor: "bottom" }, ...marks(run.verdicts(), kind, begun(run, kind)) },
    notes: [`step: ${seconds(whole)}, ${who}`, ...shown.map(share), ...wide(answer)], label: shown.map(share).join(". "),
  };
}

function stepTime(answer, kind, run) {
  const traces = [];
  const notes = [];
  answer.ranks.slice(0, MOST_LINES).forEach((each) => {
    const { columns } = each;
    const x = positions(columns, kind);
    const color = seriesColor(run.place(each.rank));
    if (answer.wide > 1 && answer.ranks.length <= 8) {
      const edge = { x, type: "scatter", mode: "lines", line: { width: 0 }, hoverinfo: "skip" };
      traces.push({ ...edge, y: columns.low_s });
      traces.push({ ...edge, y: columns.high_s, fill: "tonexty", fillcolor: `${color}22` });
    }
    traces.push({
      x, y: columns.step_s, name: escaped(`rank ${each.rank}`), type: "scatter", mode: "lines",
      line: { color, width: 1.4 }, hovertemplate: "%{fullData.name}: %{y:.4s}s<extra></extra>",
    });
    const total = columns.steps.reduce((sum, count) => sum + count, 0);
    const mean = columns.step_s.reduce((sum, value, place) => sum + (value || 0) * columns.steps[place], 0) / total;
    const clock = each.clock === "device" ? ", by the device's clock" : "";
    notes.push(`rank ${each.rank}: mean ${seconds(mean)}, longest ${seconds(highest(columns.high_s))}${clock}`);
  });
  if (!traces.length) return none();
  const left = answer.ranks.length - MOST_LINES;
  if (left > 0) notes.unshift(`${left} further ranks are not drawn: choose one.`);
  return {
    traces, layout: { yaxis: time(), ...marks(run.verdicts(), kind, begun(run, kind)) },
    notes: [...wide(answer), ...notes], label: notes.slice(0, 4).join(". "),
  };
}

function heatmap(answer, kind, column, colorscale) {
  if (!answer.ranks.length) return none();
  const x = positions(answer.columns, kind);
  const means = answer.ranks.map(({ rank, columns }) => {
    const total = columns.steps.reduce((sum, count) => sum + count, 0);
    const mean = columns[column].reduce((sum, value, at) => sum + (value || 0) * columns.steps[at], 0) / total;
    return { rank, mean };
  });
  const all = answer.ranks.flatMap((each) => each.columns[column]).filter((value) => value !== null).sort((one, other) => one - other);
  const [low, high] = [all[Math.floor(all.length * RARE)], all[Math.ceil(all.length * (1 - RARE)) - 1]];
  const rare = all.length && all[all.length - 1] > high ? [`Colours end at ${seconds(high)}; the highest is ${seconds(all[all.length - 1])}.`] : [];
  const sorted = [...means].sort((one, other) => other.mean - one.mean);
  const told = sorted.slice(0, 8).map(({ rank, mean }) => `rank ${rank}: ${seconds(mean)} a step`);
  return {
    traces: [{
      type: "heatmap", x, y: answer.ranks.map((each) => escaped(each.rank)),
      z: answer.ranks.map((each) => each.columns[column]), colorscale, hoverongaps: false, zmin: low, zmax: high,
      colorbar: { thickness: 10, exponentformat: "SI", ticksuffix: "s" },
      hovertemplate: "rank %{y}, %{x}: %{z:.4s}s<extra></extra>",
    }],
    layout: { yaxis: { type: "category", title: { text: "rank" }, autorange: "reversed" } },
    notes: [...told, ...rare, ...wide(answer)], label: `From most to least: ${told.join(". ")}.`,
  };
}

/** Against steps nothing: they are as we count them, which a program's own number need not be. */
function begun(run, kind) {
  return kind === "time" ? run.attempts() : [];
}

function wide({ wide: steps }) {
  return steps > 1 ? [`A point is the mean of ${steps} steps.`] : [];
}

function time() {
  return { tickformat: ".3s", ticksuffix: "s", rangemode: "tozero" };
}

function none() {
  return { traces: [], notes: ["No step is known yet."], label: "No step is known yet." };
}

function highest(values) {
  return values.reduce((most, value) => (value === null ? most : Math.max(most, value)), 0);
}
