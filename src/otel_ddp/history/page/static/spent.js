// Where the time of a run went, as one bar by cause; and a table of attempts if there are several.

import { el, number, table } from "./dom.js";
import { seconds, share as percent, time } from "./shown.js";
import { OVER } from "./verdicts.js";

const MOST_LATE = 5;
// Time lost to trouble is red, productive time has its own colour, and all other causes are grey.
const COLOURS = { productive: "var(--productive)", late_rank: "var(--bad-fill)", hang: "var(--bad-fill)", repeated: "var(--bad-pale)", between_attempts: "var(--bad-pale)" };
const GREYS = ["var(--grey-1)", "var(--grey-2)", "var(--grey-3)", "var(--grey-4)"];

/** The section; null if the time of the run was not counted. */
export function timeSpent({ time: told, state }) {
  if (!told) return null;
  const { attempts } = told;
  const causes = Object.entries(told.seconds).map(([name, spent_s]) => ({ name, shown: told.shown[name], spent_s, share: spent_s / told.rank_s }));
  const grey = causes.filter((each) => !COLOURS[each.name]);
  const coloured = causes.map((each) => ({ ...each, colour: COLOURS[each.name] || GREYS[grey.indexOf(each) % GREYS.length] }));
  const parts = causes.map((each) => `${each.shown}: ${percent(each.share)}`);
  return el(
    "section", { class: "card", "aria-labelledby": "spent" },
    el("h2", { id: "spent" }, `Where ${seconds(told.rank_s)} of all ranks went`, el("span", { class: "quiet" }, `${percent(told.share)} productive`)),
    el("div", { class: "bar", role: "img", "aria-label": parts.join(". ") }, coloured.map(({ name, colour, share }) => el("span", { "data-cause": name, style: `width: ${100 * share}%; background: ${colour}` }))),
    el("ul", { class: "causes" }, coloured.map((each) => cause(each, told))),
    attempts.length > 1 ? attemptsTable(attempts, OVER.includes(state) ? state : "goes on") : null,
  );
}

function cause({ name, shown, colour, spent_s, share }, told) {
  const late = name === "late_rank" ? Object.entries(told.late).sort((one, other) => other[1] - one[1]) : [];
  const more = late.length > MOST_LATE ? [`and ${late.length - MOST_LATE} more`] : [];
  const whom = [...late.slice(0, MOST_LATE).map(([who, s]) => `${who} ${seconds(s)}`), ...more];
  return el(
    "li", { "data-cause": name }, el("i", { style: `background: ${colour}` }),
    `${shown} `, el("span", { class: "number quiet" }, `${percent(share)} · ${seconds(spent_s)}`), whom.length ? ` (${whom.join(", ")})` : "",
  );
}

function attemptsTable(attempts, now) {
  const rows = attempts.map((each, at) => {
    // If no agent saw an earlier attempt end, its end is unknown.
    const open = at === attempts.length - 1 ? now : "-";
    const ended = each.ended_ns ? `${each.state} ${time(each.ended_ns)}` : open;
    return [
      number(String(each.attempt)), number(time(each.began_ns)), number(at ? seconds(each.back_s) : ""),
      number(String(each.first_step ?? "-")), number(String(each.last_step ?? "-")), number(each.repeated_steps ? String(each.repeated_steps) : "-"),
      number(ended), el("td", { class: "long" }, each.why || ""),
    ];
  });
  return table("Attempts", ["attempt", "began", "back after", "from step", "to step", "done twice", "ended", "why"], rows);
}
