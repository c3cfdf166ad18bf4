// The numbers of a picture as CSV.

// A spreadsheet would run a text that begins with one of these characters as a formula.
const FORMULA = /^[=+\-@\t\r]/;

/** The points as rows; the labels of the series are the first columns. */
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
