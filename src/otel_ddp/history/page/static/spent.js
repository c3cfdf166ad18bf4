// What the time of a run went to, as one bar; and its attempts, where there are several.

import { el, number, table } from "./dom.js";
import { seconds, share as percent, time } from "./shown.js";

const MOST_LATE = 5;

/** In the head of the page, as a link to all of it. */
export function inBrief({ time: told }) {
  if (!told) return null;
  const { attempts } = told;
  const which = attempts.length > 1 ? `attempt ${attempts[attempts.length - 1].attempt}, ` : "";
  return [" · ", el("a", { href: "#spent" }, `${which}${percent(productive(told))} moved it on`)];
}

/** Nothing of a run whose time was not counted. */
export function timeSpent({ time: told }) {
  if (!told) return null;
  const { causes, attempts } = told;
  const parts = causes.map((each) => `${each.shown}: ${percent(each.share)}`);
  return el(
    "section", { "aria-labelledby": "spent" }, el("h2", { id: "spent" }, "Goodput"),
    el("p", {}, el("strong", {}, percent(productive(told))), ` of ${seconds(told.rank_s)} of all ranks together moved the run on.`),
    el("div", { class: "bar", role: "img", "aria-label": parts.join(". ") }, causes.map(({ name, colour, share }) => el("span", { "data-cause": name, style: `width: ${100 * share}%; background: ${colour}` }))),
    el("ul", { class: "causes" }, causes.map((each) => cause(each, told))),
    attempts.length > 1 ? attemptsTable(attempts) : null,
  );
}

function productive({ causes }) {
  return causes.find((each) => each.name === "productive")?.share || 0;
}

function cause({ name, shown, colour, spent_s, share }, told) {
  const late = name === "late_rank" ? told.late : [];
  const more = late.length > MOST_LATE ? [`and ${late.length - MOST_LATE} more`] : [];
  const whom = [...late.slice(0, MOST_LATE).map(([who, s]) => `${who} ${seconds(s)}`), ...more];
  return el(
    "li", { "data-cause": name }, el("span", { style: `color: ${colour}`, "aria-hidden": "true" }, "■"),
    ` ${shown} `, el("span", { class: "number quiet" }, `${percent(share)} · ${seconds(spent_s)}`), whom.length ? ` (${whom.join(", ")})` : "",
  );
}

function attemptsTable(attempts) {
  const rows = attempts.map((each, at) => {
    // The end of an earlier one is not known where no agent was there.
    const open = at === attempts.length - 1 ? "goes on" : "-";
    const ended = each.ended_ns ? `${each.state} ${time(each.ended_ns)}` : open;
    return [
      number(String(each.attempt)), number(time(each.began_ns)), number(at ? seconds(each.back_s) : ""),
      number(String(each.first_step ?? "-")), number(String(each.last_step ?? "-")), number(each.repeated_steps ? String(each.repeated_steps) : "-"),
      number(ended), el("td", { class: "long" }, each.why || ""),
    ];
  });
  return table("Attempts", ["attempt", "began", "back after", "from step", "to step", "done twice", "ended", "why"], rows);
}
