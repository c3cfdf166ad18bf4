// A picture of several runs: each is asked for, and all are drawn into one.

import { askOnce, csvAddress } from "./api.js";
import { Picture } from "./picture.js";

export class MergedPicture extends Picture {
  /** `keys` are the runs; `draw` gets their answers as `parts`, and their series as one list. */
  constructor({ keys, ...rest }) {
    super(rest);
    this.keys = keys;
    this.csv.addEventListener("click", (event) => {
      event.preventDefault();
      this.saveCsv();
    });
  }

  async load(parameters) {
    const parts = await Promise.all(this.keys.map((key) => askOnce(this.path, { ...parameters, ...key })));
    const series = parts.flatMap((part, of) => (part.series || []).map((each) => ({ ...each, of })));
    const left_out = parts.reduce((sum, part) => sum + (part.left_out || 0), 0);
    return { parts, series, left_out };
  }

  offerCsv(parameters) {
    this.csvParameters = parameters;
  }

  /** One table, with the run before each row. */
  async saveCsv() {
    const tables = await Promise.all(this.keys.map(async (key) => {
      const answer = await fetch(csvAddress(this.path, { ...this.csvParameters, ...key }));
      const [head, ...rows] = (await answer.text()).trimEnd().split("\r\n");
      const run = `"${key.run.replaceAll('"', '""')}"`;
      return { head: `run,${head}`, rows: rows.map((row) => `${run},${row}`) };
    }));
    const text = [tables[0].head, ...tables.flatMap((each) => each.rows)].join("\r\n");
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
    link.download = "otel_ddp.csv";
    link.click();
    URL.revokeObjectURL(link.href);
  }
}
