// Marks in pictures where verdicts begin.

import { themed } from "./colors.js";
import { subject } from "./verdicts.js";

const MOST = 20;

/** Lines and words for the layout of a picture. */
export function marks(verdicts, kind) {
  const { bad } = themed();
  const found = verdicts
    .filter((each) => !each.harmless)
    .map((each) => ({ at: position(each, kind), text: word(each) }))
    .filter((each) => each.at !== null)
    .slice(-MOST);
  return {
    shapes: found.map(({ at }) => ({
      type: "line", x0: at, x1: at, yref: "paper", y0: 0, y1: 1,
      line: { color: bad, width: 1, dash: "dot" },
    })),
    annotations: found.map(({ at, text }) => ({
      x: at, yref: "paper", y: 1, yanchor: "top", xanchor: "left", showarrow: false,
      text: escaped(text), font: { color: bad, size: 10 },
    })),
  };
}

function position(verdict, kind) {
  if (kind === "time") return new Date(verdict.since_ns / 1e6).toISOString();
  return kind === "step" && Number.isInteger(verdict.since_step) ? verdict.since_step : null;
}

function word(verdict) {
  const whom = subject(verdict);
  return whom ? `${verdict.kind}: ${whom}` : verdict.kind;
}

/** The library of plots understands some markup in its texts. */
export function escaped(text) {
  return String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}
