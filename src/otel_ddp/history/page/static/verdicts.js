// Verdicts in words: what is wrong, by how much, and which of them a page shows first.

import { seconds, share } from "./shown.js";

export const OVER = ["finished", "failed", "killed"];
const LATE = ["straggler", "imbalance"];
const TITLES = {
  death: "died", silence: "not heard", stall: "hang", nonfinite: "NaN", straggler: "late",
  imbalance: "unequal work", recurring: "stalls again", bound: "bound",
};

/** What is wrong at this moment. */
export function openTroubles(verdicts) {
  return verdicts.filter((each) => !each.until_ns && !each.harmless);
}

/** Whom it names: a rank, or the node whose ranks are late alike. */
export function subject({ kind, who }) {
  if (who?.rank) return `rank ${who.rank}`;
  return LATE.includes(kind) ? who?.node || "" : "";
}

/** The numbers of those among these ranks whom the verdicts name. */
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

/** A kind in a word or two. */
export function title(kind) {
  return TITLES[kind] || kind;
}

/** Trouble in five words, for a list. */
export function brief(verdict) {
  const of = size(verdict);
  return [title(verdict.kind), subject(verdict), of].filter(Boolean).join(" · ");
}

/** Whether it says by how much somebody is late. */
export function isLate({ kind, evidence }) {
  return LATE.includes(kind) && evidence?.excess_s > 0;
}

/** How much slower a step is, or at which step it happened; empty where neither is known. */
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

/** One line that says who and what, and the rest of the sentence. */
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

/** The last sentences of one on a late rank say what to look at. */
function advice(text) {
  return /(?:^|\. )((?:Look|Its|Their|The device)\b.*)$/s.exec(text)?.[1] || "";
}

/** What it has cost all ranks; empty where that is not known. */
export function cost({ evidence }, rank_s) {
  const lost_s = evidence?.lost_s;
  if (!lost_s) return "";
  return `${seconds(lost_s)} of all ranks lost${rank_s ? `, ${share(lost_s / rank_s)}` : ""}`;
}
