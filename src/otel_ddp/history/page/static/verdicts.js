// Verdicts in words, and which of them are shown in red.

export const OVER = ["finished", "failed", "killed"];

/** What is wrong at this moment. */
export function openTroubles(verdicts) {
  return verdicts.filter((each) => !each.until_ns && !each.harmless);
}

/** Its sentence; for those who may not read it, what is public. */
export function said(verdict) {
  const rank = (verdict.who && verdict.who.rank) || "?";
  return verdict.sentence || `${verdict.kind}: rank ${rank}${verdict.phase ? `, in ${verdict.phase}` : ""}`;
}
