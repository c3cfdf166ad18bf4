// Two pictures of the time of a step: its duration, and its phases stacked.

import { seriesColor } from "./colors.js";
import { positions } from "./curves.js";
import { el, fill } from "./dom.js";
import { seconds, share as percent } from "./shown.js";
import { marks } from "./marks.js";
import { Picture } from "./picture.js";

// The picture has at most this many remarks on which steps the ranks measure, and which they do not.
const MOST_REMARKS = 3;

export class Timing {
  constructor(run, axis, look) {
    const kind = () => (axis.kind === "epoch" ? "step" : axis.kind);
    const shared = { path: "steps", axis, kind, parameters: () => ({ ...run.key(), rank: look.rank || null }) };
    this.remarks = el("div");
    this.element = el(
      "section", { "aria-labelledby": "timing", hidden: true }, el("h2", { id: "timing" }, "Step time and phases"), this.remarks,
      el(
        "div", { class: "grid wide" },
        new Picture({ ...shared, title: "Step time", draw: (answer, of) => stepTime(answer, of, run, look) }).element,
        new Picture({ ...shared, title: "Phases of a step", draw: (answer, of) => phases(answer, of, run, look) }).element,
      ),
    );
  }

  show({ step, measuring }) {
    this.element.hidden = step === null;
    const more = measuring.length > MOST_REMARKS ? [`and ${measuring.length - MOST_REMARKS} more`] : [];
    fill(this.remarks, [...measuring.slice(0, MOST_REMARKS), ...more].map((each) => el("p", { class: "quiet" }, each)));
  }
}

function phases(answer, kind, run, look) {
  const { columns } = answer;
  if (!columns.x) return none();
  const mean = meanOf(columns);
  const shown = answer.phases
    .map((each) => ({ ...each, mean_s: mean(each.name) }))
    .filter((each) => each.mean_s > 0)
    .sort((one, other) => other.mean_s - one.mean_s);
  const whole = mean("step_s");
  const lines = shown.map(({ name, shown: called, colour }) => ({ x: positions(columns, kind), y: columns[name], name: called, color: colour, isArea: true }));
  const share = ({ shown: called, mean_s, colour }) => el("span", {}, el("i", { style: `background: ${colour}` }), `${called}: ${seconds(mean_s)} a step, ${percent(mean_s / whole)}`);
  const told = shown.map(share);
  return {
    lines, unit: "s", fromZero: true, isStacked: true, spans: marks(run.verdicts(), kind, begun(run, kind)),
    notes: [`step: ${seconds(whole)}, ${whose(answer, look)}`, ...told, ...wide(answer)], label: told.map((each) => each.textContent).join(". "),
  };
}

function stepTime(answer, kind, run, look) {
  const { columns } = answer;
  if (!columns.x) return none();
  const [mean, highest] = [meanOf(columns)("step_s"), columns.high_s.reduce((most, value) => Math.max(most, value || 0), 0)];
  const notes = [`mean ${seconds(mean)}, longest ${seconds(highest)}, ${whose(answer, look)}`, ...wide(answer)];
  return {
    lines: [{ x: positions(columns, kind), y: columns.step_s, low: columns.low_s, high: columns.high_s, name: "step", color: seriesColor(0) }],
    unit: "s", fromZero: true, spans: marks(run.verdicts(), kind, begun(run, kind)), notes, label: notes.join(". "),
  };
}

/** A function that returns the mean of a column over all steps. */
export function meanOf(columns) {
  const total = columns.steps.reduce((sum, count) => sum + count, 0);
  return (name) => columns[name].reduce((sum, value, at) => sum + (value || 0) * columns.steps[at], 0) / total;
}

/** The attempts to mark; none on an axis of steps, which has our numbers: attempts have the program's. */
function begun(run, kind) {
  return kind === "time" ? run.attempts() : [];
}

function whose({ many }, look) {
  const device = many.by_device ? ", by the device's clock" : "";
  return (look.rank ? `rank ${look.rank}` : many.ranks > 1 ? `mean of ${many.ranks} ranks` : "one rank") + device;
}

function wide({ wide: steps }) {
  return steps > 1 ? [`A point is the mean of ${steps} steps.`] : [];
}

function none() {
  return { lines: [], notes: ["No step is known yet."], label: "No step is known yet." };
}
