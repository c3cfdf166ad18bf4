// The numbers of a picture as CSV.

// A spreadsheet takes a text that begins so for a formula.
const FORMULA = /^[=+\-@\t\r]/;

/** A row for each point; the labels of its series come first. */
export function csv(series) {
  const labels = [...new Set(series.flatMap(({ columns, ...own }) => Object.keys(own)))];
  const names = [...new Set(series.flatMap(({ columns }) => Object.keys(columns)))];
  const rows = series.flatMap((each) => (each.columns.x || []).map((_, at) => [
    ...labels.map((label) => each[label]), ...names.map((name) => each.columns[name]?.[at]),
  ]));
  return [[...labels, ...names], ...rows].map((row) => `${row.map(cell).join(",")}\r\n`).join("");
}

function cell(value) {
  const text = typeof value === "string" && FORMULA.test(value) ? `'${value}` : String(value ?? "");
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}
