// The GPUs of the ranks, and the host: a table of the last samples, and pictures over time.

import { ask } from "./api.js";
import { curves } from "./curves.js";
import { choice, el, fill, labelled, number, table } from "./dom.js";
import { measured } from "./shown.js";
import { Picture } from "./picture.js";

const GPU = ["hw.gpu.utilization", "hw.gpu.memory.usage", "hw.power", "hw.temperature"];
const HOST = ["system.cpu.utilization", "system.memory.usage", "process.memory.usage"];
const HEADS = ["busy", "memory", "power", "temperature"];
// Keys of a series that the names of its lines leave out.
const PLAIN = ["name", "rank", "node", "columns", "hw.type", "hw.model"];

export class NodePictures {
  constructor(run, axis) {
    Object.assign(this, { run, axis });
    this.shown = new Set();
    this.devices = el("div");
    this.gpus = el("div", { class: "grid" });
    this.host = el("div", { class: "grid" });
    this.others = el("div", { class: "controls" });
    this.known = "";
    this.element = el("div", {},
      el("section", { "aria-labelledby": "gpus", hidden: true }, el("h2", { id: "gpus" }, "GPUs"), this.devices, this.gpus),
      el("section", { "aria-labelledby": "host", hidden: true }, el("h2", { id: "host" }, "Host"), this.others, this.host),
    );
  }

  setNames(metrics) {
    const known = metrics.map((each) => each.name).join(" ");
    if (known === this.known) return;
    this.known = known;
    this.metrics = new Map(metrics.map((each) => [each.name, each]));
    for (const name of GPU) this.add(name, this.gpus);
    for (const name of HOST) this.add(name, this.host);
    const rest = metrics.map((each) => each.name).filter((name) => !GPU.includes(name) && !HOST.includes(name));
    const options = [["", "choose one"], ...rest.map((name) => [name, name])];
    const chooser = choice(options, "", (name) => this.add(name, this.host));
    fill(this.others);
    if (rest.length) this.others.replaceChildren(labelled("Show also", chooser));
    this.gpus.parentElement.hidden = !GPU.some((name) => this.metrics.has(name));
    this.host.parentElement.hidden = metrics.every(({ name }) => GPU.includes(name));
  }

  add(name, into) {
    const metric = this.metrics.get(name);
    if (!metric || this.shown.has(name)) return;
    this.shown.add(name);
    into.append(new Picture({
      title: name, path: "node", axis: this.axis, kind: () => "time",
      parameters: () => ({ ...this.run.key(), name }),
      draw: (answer, kind) => {
        const owners = [...new Set(answer.series.map(owner))];
        const labels = [...new Set(answer.series.map(parts))];
        const drawn = curves(answer, kind, { name: label, color: (each) => owners.indexOf(owner(each)), dashed: (each) => labels.indexOf(parts(each)), unit: metric.unit });
        drawn.notes.unshift(metric.text);
        return drawn;
      },
    }).element);
  }

  /** The table of devices: last, mean and highest value of each metric. */
  async refreshDevices() {
    const wanted = [...GPU, "hw.gpu.memory.limit"].filter((name) => this.metrics && this.metrics.has(name));
    if (!wanted.some((name) => GPU.includes(name))) return;
    const { series } = await ask("node", { ...this.run.key(), name: wanted, columns: 2 });
    const rows = new Map();
    for (const each of series) {
      const key = JSON.stringify([each.rank, each.node, each["hw.id"] || ""]);
      if (!rows.has(key)) rows.set(key, { series: each, told: {} });
      const { told } = rows.get(key);
      if (!(each.name in told) || each["hw.gpu.task"] === "general") told[each.name] = summary(each.columns, this.metrics.get(each.name).unit);
    }
    // Before its rank has reported which device it uses, and after the rank's end, a device also has
    // samples without a rank: leave these out.
    const device = ({ node, "hw.id": id }) => `${node} ${id}`;
    const used = new Set([...rows.values()].filter((row) => row.series.rank).map((row) => device(row.series)));
    const shown = [...rows.values()].filter(({ series: each }) => each.rank || !used.has(device(each)));
    fill(this.devices, table("Each device", ["rank", "node", "device", ...HEADS], shown.map(({ series: each, told }) => [
      each.rank || "none", each.node, `${each["hw.model"] || ""} ${each["hw.id"] || ""}`.trim(), ...GPU.map((name) => number(told[name] || "-")),
    ]), { class: "scroll tall" }));
  }
}

function summary(columns, unit) {
  const samples = columns.values?.reduce((sum, count) => sum + count, 0);
  if (!samples) return "-";
  const mean = columns.mean.reduce((sum, value, at) => sum + (value || 0) * columns.values[at], 0) / samples;
  const last = columns.last[columns.last.length - 1];
  return `${measured(last, unit)}, mean ${measured(mean, unit)}, highest ${measured(Math.max(...columns.high), unit)}`;
}

function owner(series) {
  return `${series.rank} ${series.node} ${series["hw.id"] || ""}`;
}

/** The labels by which the lines of one rank differ, such as used and free memory. */
function parts(series) {
  return Object.entries(series).filter(([key]) => ![...PLAIN, "gpu", "hw.id"].includes(key)).map(([, value]) => value).join(", ");
}

function label(series) {
  const { gpu, ...others } = series;
  if (gpu) delete others["hw.id"];
  const more = Object.entries(others).filter(([key]) => !PLAIN.includes(key)).map(([, value]) => value);
  return [series.rank ? `rank ${series.rank}` : series.node, ...(gpu ? [`GPU ${gpu}`] : []), ...more].join(", ");
}
