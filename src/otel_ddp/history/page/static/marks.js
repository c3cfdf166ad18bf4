// Times of trouble, and where a run went on after a restart, for the pictures of a run.

import { isLate, subject, title } from "./verdicts.js";

const MOST = 20;

/** Spans as `plot` shades them. */
export function marks(verdicts, kind, attempts = []) {
  const at = (ns, step) => (kind === "time" ? ns / 1e6 : kind === "step" && Number.isInteger(step) ? step : undefined);
  const troubles = verdicts.filter((each) => !each.harmless).map((each) => {
    // What happened at once is known by its step.
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
