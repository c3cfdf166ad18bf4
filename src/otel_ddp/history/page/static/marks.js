// Marks in the pictures of a run: times of verdicts, and the starts of further attempts.

import { isLate, subject, title } from "./verdicts.js";

const MOST = 20;

/** The marks, as the `spans` of `plot`. */
export function marks(verdicts, kind, attempts = []) {
  const at = (ns, step) => (kind === "time" ? ns / 1e6 : kind === "step" && Number.isInteger(step) ? step : undefined);
  const troubles = verdicts.filter((each) => !each.harmless).map((each) => {
    // A verdict on a moment, such as a death, has its exact step in `step`.
    const [first, last] = isLate(each) ? [each.since_step, each.until_step] : [each.step ?? each.since_step, each.until_step];
    return { from: at(each.since_ns, first), to: each.until_ns ? at(each.until_ns, Math.max(last, first)) : null, text: word(each), isBad: true };
  });
  const begun = attempts.slice(1).map((each) => ({ from: at(each.began_ns, each.first_step), text: `attempt ${each.attempt}` }));
  return [...troubles, ...begun].filter((each) => each.from !== undefined).slice(-MOST);
}

function word(verdict) {
  const whom = subject(verdict);
  return whom ? `${title(verdict.kind)}: ${whom}` : title(verdict.kind);
}
