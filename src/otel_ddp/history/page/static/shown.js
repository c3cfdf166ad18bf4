// Formats durations, shares, sizes and logged values for people, as shown.py does; and times.

const UNKNOWN = "-";
// For each unit: the smallest duration to show in it, its length, and its name.
const DURATIONS = [
  [172800, 86400, "d"], [7200, 3600, "h"], [120, 60, "min"], [0.9995, 1, "s"],
  [0.9995e-3, 1e-3, "ms"], [0.9995e-6, 1e-6, "us"], [1e-12, 1e-9, "ns"],
];
// Long durations have two units: the smallest such duration, how many small units make a large one,
// the length of the small unit, and the names of both.
const LONG = [[86370, 24, 3600, "d", "h"], [3599.5, 60, 60, "h", "min"], [119.5, 60, 1, "min", "s"]];
const PREFIXES = ["", "k", "M", "G", "T"];

export function seconds(value) {
  if (value === null || value === undefined) return UNKNOWN;
  const long = LONG.find(([least]) => Math.abs(value) >= least);
  if (long) {
    const [, many, length, large, small] = long;
    const count = Math.floor(Math.abs(value) / length + 0.5);
    return `${value < 0 ? "-" : ""}${Math.floor(count / many)} ${large}${count % many ? ` ${count % many} ${small}` : ""}`;
  }
  const [factor, unit] = scaled(value, "s");
  return `${threeDigits(value * factor)} ${unit}`;
}

export function share(value) {
  return value === null || value === undefined ? UNKNOWN : `${threeDigits(100 * value)} %`;
}

export function size(count, unit = "B") {
  if (count === null || count === undefined) return UNKNOWN;
  let [at, rest] = [0, count];
  while (Math.abs(rest) >= 999.5 && at < PREFIXES.length - 1) {
    rest /= 1000;
    at += 1;
  }
  return `${threeDigits(rest)} ${PREFIXES[at]}${unit}`;
}

/** The factor that converts a value to a unit that makes it short, and the name of that unit. */
export function scaled(value, unit) {
  if (unit === "s") {
    const [, length, name] = DURATIONS.find(([least]) => Math.abs(value) >= least) || [0, 1, "s"];
    return [1 / length, name];
  }
  if (unit === "1") return [100, "%"];
  if (unit === "By" || unit === "Hz") {
    const at = Math.max(Math.min(Math.floor(Math.log10(Math.abs(value) || 1) / 3), PREFIXES.length - 1), 0);
    return [1000 ** -at, `${PREFIXES[at]}${unit === "By" ? "B" : unit}`];
  }
  return [1, unit === "Cel" ? "°C" : unit];
}

/** A logged value with five digits, as two losses may differ in the fourth. */
export function number(value) {
  if (value === null || value === undefined) return UNKNOWN;
  if (!Number.isFinite(value)) return String(value).replace("Infinity", "inf");
  const length = Math.abs(value);
  if (Number.isInteger(value) && length < 1e15) return String(value);
  if (length >= 1e-4 && length < 1e15) return length < 99999.5 ? String(Number(value.toPrecision(5))) : String(Math.round(value));
  const [digits, power] = value.toExponential(4).split("e");
  return `${Number(digits)}e${Number(power)}`;
}

/** The value of a point; null is NaN, which JSON does not have. */
export function logged({ value }) {
  return value === null ? "NaN" : number(value);
}

function threeDigits(value) {
  if (Math.abs(value) >= 999.5) return String(Math.round(value));
  return Math.abs(value) >= 1e-3 ? String(Number(value.toPrecision(3))) : "0";
}

/** A time in the browser's time zone, with its date unless that is today. */
export function time(ns) {
  if (!ns) return "-";
  const at = new Date(ns / 1e6);
  const clock = at.toLocaleTimeString("en-GB");
  const today = new Date().toDateString() === at.toDateString();
  return today ? clock : `${day(at)} ${clock}`;
}

function day(at) {
  const two = (part) => String(part).padStart(2, "0");
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
}

/** A value with its unit. `unit`: as in the catalogue of metrics. */
export function measured(value, unit) {
  if (unit === "s") return seconds(value);
  if (unit === "1") return share(value);
  if (unit === "By" || unit === "Hz") return size(value, unit === "By" ? "B" : unit);
  return `${number(value)} ${unit === "Cel" ? "°C" : unit}`.trim();
}
