// Numbers, durations and times for people.

export function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return String(value);
  return String(Number(value.toPrecision(6)));
}

/** Parts of a second as milliseconds. */
export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value !== 0 && Math.abs(value) < 1e-6) return `${Number((value * 1e9).toPrecision(3))} ns`;
  if (Math.abs(value) < 0.001) return `${Number((value * 1e6).toPrecision(3))} µs`;
  if (Math.abs(value) < 1) return `${Number((value * 1e3).toPrecision(4))} ms`;
  if (Math.abs(value) < 120) return `${Number(value.toPrecision(4))} s`;
  return duration(value);
}

export function duration(value) {
  const total = Math.max(0, Math.round(value));
  const [days, hours] = [Math.floor(total / 86400), Math.floor((total % 86400) / 3600)];
  const [minutes, rest] = [Math.floor((total % 3600) / 60), total % 60];
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  if (minutes) return `${minutes} min ${rest} s`;
  return `${rest} s`;
}

/** A time of this browser's clock and zone, with its date unless that is today. */
export function time(ns) {
  if (!ns) return "–";
  const at = new Date(ns / 1e6);
  const clock = at.toLocaleTimeString("en-GB");
  const today = new Date().toDateString() === at.toDateString();
  return today ? clock : `${day(at)} ${clock}`;
}

function day(at) {
  const two = (part) => String(part).padStart(2, "0");
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
}

const SCALES = { By: ["B", "kB", "MB", "GB", "TB"], Hz: ["Hz", "kHz", "MHz", "GHz"] };

/** A value in the unit of the catalogue of metrics. */
export function measured(value, unit) {
  if (value === null || value === undefined) return "–";
  if (unit === "s") return seconds(value);
  // Of samples; what a program logs has no unit.
  if (unit === "1") return `${Number((value * 100).toPrecision(3))} %`;
  if (unit === "") return number(value);
  if (unit in SCALES) {
    let [at, rest] = [0, value];
    while (Math.abs(rest) >= 1000 && at < SCALES[unit].length - 1) {
      rest /= 1000;
      at += 1;
    }
    return `${Number(rest.toPrecision(4))} ${SCALES[unit][at]}`;
  }
  const shown = Number.isInteger(value) ? value : Number(value.toPrecision(4));
  return `${shown} ${unit === "Cel" ? "°C" : unit}`;
}
