// A picture of several runs: each is asked for, and all are drawn into one.

import { askOnce } from "./api.js";
import { Picture } from "./picture.js";

export class MergedPicture extends Picture {
  /** `keys` are the runs; `draw` gets their answers as `parts`, and their series as one list. */
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
