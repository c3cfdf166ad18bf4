// Words for verdicts: what is wrong, with whom, by how much, and at what cost.

import { seconds, share } from "./shown.js";

export const OVER = ["finished", "failed", "killed"];
const LATE = ["straggler", "imbalance"];
const TITLES = {
  death: "died", silence: "not heard", stall: "hang", nonfinite: "NaN", straggler: "late",
  imbalance: "unequal work", recurring: "stalls again", bound: "bound",
};

/** The open verdicts, without harmless ones. */
export function openTroubles(verdicts) {
  return verdicts.filter((each) => !each.until_ns && !each.harmless);
}

/** The subject of a verdict: a rank, or the node whose ranks are late alike; else empty. */
export function subject({ kind, who }) {
  if (who?.rank) return `rank ${who.rank}`;
  return LATE.includes(kind) ? who?.node || "" : "";
}

/** All ranks that the verdicts are about. `ranks`: all ranks, to find those of a late node. */
export function named(verdicts, ranks = []) {
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

/** A kind of verdict in a word or two. */
export function title(kind) {
  return TITLES[kind] || kind;
}

/** A verdict in about five words, for a list. */
export function brief(verdict) {
  const of = size(verdict);
  return [title(verdict.kind), subject(verdict), of].filter(Boolean).join(" · ");
}

/** Whether the verdict is about lateness, and has its amount. */
export function isLate({ kind, evidence }) {
  return LATE.includes(kind) && evidence?.excess_s > 0;
}

/** The size of the trouble: how much slower a step is, how long, or at which step; else empty. */
export function size({ kind, evidence, step, since_ns, until_ns }, now_ns) {
  const of = evidence || {};
  if (LATE.includes(kind) && of.step_s && of.step_without_s) return times(of.step_s / of.step_without_s);
  if (kind === "recurring" && of.stall_s) return `+${seconds(of.stall_s)}`;
  if (kind === "stall" && (until_ns || now_ns)) return seconds(((until_ns || now_ns) - since_ns) / 1e9);
  return Number.isInteger(step) ? `${kind === "death" ? "after " : ""}step ${step.toLocaleString("en-US")}` : "";
}

function times(factor) {
  return factor >= 1.005 ? `${Number(factor.toPrecision(3))}× slower` : "";
}

/** The sentence of a verdict in parts: a headline with who and what, the rest, and advice. */
export function headline(verdict) {
  const { kind, evidence, who, until_ns, phase } = verdict;
  const text = said(verdict);
  if (isLate(verdict)) {
    const where = { mixed: "in several phases", compute: "in its computation" }[phase] || `in ${phase}`;
    const without = evidence.step_without_s ? `: ${seconds(evidence.step_s)} a step instead of ${seconds(evidence.step_without_s)}` : "";
    const by = `${seconds(evidence.excess_s)} late ${where}${without}.`;
    const whom = subject(verdict);
    return { first: `${whom[0].toUpperCase()}${whom.slice(1)}${who.rank && who.node ? ` (${who.node})` : ""} ${until_ns ? "held" : "holds"} the run back`, rest: by, advice: advice(text) || verdict.advice };
  }
  const [, first, rest] = /^(.*?)(?:[;.] (.*))?$/s.exec(text);
  return { first: `${first[0].toUpperCase()}${first.slice(1)}`, rest: rest || "", advice: "" };
}

/** The advice at the end of the text on a late rank. */
function advice(text) {
  return /(?:^|\. )((?:Look|Its|Their|The device)\b.*)$/s.exec(text)?.[1] || "";
}

/** The time that the trouble has cost all ranks; empty if unknown. */
export function cost({ evidence }, rank_s) {
  const lost_s = evidence?.lost_s;
  if (!lost_s) return "";
  return `${seconds(lost_s)} of all ranks lost${rank_s ? `, ${share(lost_s / rank_s)}` : ""}`;
}
