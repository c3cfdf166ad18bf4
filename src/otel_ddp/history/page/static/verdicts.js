// Verdicts in words, and which of them are shown in red.

export const OVER = ["finished", "failed", "killed"];

/** What is wrong at this moment. */
export function openTroubles(verdicts) {
  return verdicts.filter((each) => !each.until_ns && !each.harmless);
}

/** Whom it names: a rank, or the node whose ranks are late alike. */
export function subject({ kind, who }) {
  if (who?.rank) return `rank ${who.rank}`;
  return kind === "straggler" || kind === "imbalance" ? who?.node || "" : "";
}

/** The numbers of those among these ranks whom the verdicts name. */
export function named(verdicts, ranks) {
  const found = verdicts.flatMap((each) => {
    if (each.who?.rank) return [each.who.rank];
    if (Array.isArray(each.evidence?.ranks)) return each.evidence.ranks;
    return subject(each) ? ranks.filter((rank) => rank.node === each.who.node).map((rank) => rank.rank) : [];
  });
  return new Set(found.map(String));
}

export function said(verdict) {
  return verdict.sentence || verdict.kind;
}
