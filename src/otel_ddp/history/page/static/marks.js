// Marks in pictures where verdicts begin, and where a run went on after a restart.

import { themed } from "./colors.js";
import { subject } from "./verdicts.js";

const MOST = 20;

/** Lines and words for the layout of a picture. */
export function marks(verdicts, kind, attempts = []) {
  const { bad, quiet } = themed();
  const of = (found, color, y) => found.filter((each) => each.at !== null).slice(-MOST).map((each) => ({ ...each, color, y }));
  const troubles = verdicts.filter((each) => !each.harmless)
    .map((each) => ({ at: position(each.since_ns, each.since_step, kind), text: word(each) }));
  const begun = attempts.slice(1)
    .map((each) => ({ at: position(each.began_ns, each.first_step, kind), text: `attempt ${each.attempt}` }));
  // They may begin at one place: one word above, one below.
  const found = [...of(troubles, bad, 1), ...of(begun, quiet, 0)];
  return {
    shapes: found.map(({ at, color }) => ({
      type: "line", x0: at, x1: at, yref: "paper", y0: 0, y1: 1,
      line: { color, width: 1, dash: "dot" },
    })),
    annotations: found.map(({ at, text, color, y }) => ({
      x: at, yref: "paper", y, yanchor: y ? "top" : "bottom", xanchor: "left", showarrow: false,
      text: escaped(text), font: { color, size: 10 },
    })),
  };
}

function position(ns, step, kind) {
  if (kind === "time") return new Date(ns / 1e6).toISOString();
  return kind === "step" && Number.isInteger(step) ? step : null;
}

function word(verdict) {
  const whom = subject(verdict);
  return whom ? `${verdict.kind}: ${whom}` : verdict.kind;
}

/** The library of plots understands some markup in its texts. */
export function escaped(text) {
  return String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}
