// A picture of several runs: requests the data of each run, and draws all into one chart.

import { askOnce } from "./api.js";
import { Picture } from "./picture.js";

export class MergedPicture extends Picture {
  /** `keys`: group and run of each run. `draw` gets the answers for all runs as `parts`. */
  constructor({ keys, ...rest }) {
    super(rest);
    this.keys = keys;
  }

  async load(parameters) {
    const parts = await Promise.all(this.keys.map((key) => askOnce(this.path, { ...parameters, ...key })));
    const series = parts.flatMap((part, of) => (part.series || []).map((each) => ({ ...each, of })));
    const left_out = parts.reduce((sum, part) => sum + (part.left_out || 0), 0);
    return { parts, series, left_out };
  }

  tables({ parts }) {
    return parts.flatMap((part, of) => super.tables(part).map((each) => ({ run: this.keys[of].run, ...each })));
  }
}
