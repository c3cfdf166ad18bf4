// Who waits for whom: a bar for each suspect rank, one bar for all others; below, a strip that shows
// how late each rank was over the steps.

import { themed } from "./colors.js";
import { el, fill } from "./dom.js";
import { seconds, share } from "./shown.js";
import { isLate, named } from "./verdicts.js";

const [STRIP_PX, LABEL_PX] = [116, 13];
const WAIT = "comm_wait";
const LAST = ["other", WAIT];
// Bars leave out these phases, because they do not count as lateness.
const SPECIAL = ["checkpoint", "eval", "compile"];

export class Waits {
  constructor(run) {
    this.run = run;
    this.bars = el("div");
    this.canvas = el("canvas", { class: "strip", role: "img" });
    this.ends = el("div", { class: "ends quiet" });
    this.groups = el("div");
    this.note = el("p", { class: "quiet" });
    this.element = el(
      "section", { class: "card", "aria-labelledby": "waits", hidden: true },
      el("h2", { id: "waits" }, "Who waits for whom"), this.bars, this.groups, this.note, this.canvas, this.ends,
    );
    new ResizeObserver(() => this.paint()).observe(this.canvas);
  }

  show(answer, head) {
    this.answer = answer;
    this.element.hidden = answer.ranks.length < 2 && !answer.others;
    if (this.element.hidden) return;
    const { ranks, others, phases, usual_work_s: usual_s } = answer;
    this.late = named(head.first.filter(isLate));
    const all = [...ranks.map((each) => each.phases), others?.phases].filter(Boolean);
    const shown = phases.filter((each) => !SPECIAL.includes(each.name) && all.some((of) => of[each.name] > 0))
      .sort((one, other) => LAST.indexOf(one.name) - LAST.indexOf(other.name));
    const longest = Math.max(...all.map((each) => shown.reduce((sum, { name }) => sum + each[name], 0)));
    const bar = (called, of, told, isLate) => el(
      "div", { class: isLate ? "wait late" : "wait" }, el("span", { title: called }, called),
      el("div", { role: "img", "aria-label": shown.map(({ name, shown: word }) => `${word} ${seconds(of[name])}`).join(", ") },
        shown.map(({ name, colour }) => el("i", { style: `width: ${100 * of[name] / longest}%; background: ${name === WAIT ? "var(--wait)" : colour}` }))),
      el("span", { class: "number" }, told),
    );
    fill(
      this.bars, el("p", { class: "quiet" }, `Mean of steps ${answer.first.toLocaleString("en-US")} to ${answer.until.toLocaleString("en-US")}, the latest rank first`),
      ranks.map((each) => bar(`rank ${each.rank} ${each.node}`, each.phases, told(each, usual_s), this.late.has(each.rank))),
      others ? bar(`${others.count} other${others.count > 1 ? "s" : ""}`, others.phases, `${[...new Set(others.work_s.map(seconds))].join(" to ")} work`, false) : null,
      el("p", { class: "legend quiet" }, shown.map(({ name, shown: word, colour }) => el("span", {}, el("i", { style: `background: ${name === WAIT ? "var(--wait)" : colour}` }), word))),
    );
    fill(this.groups, dimensions(answer));
    const inside = head.first.find((each) => each.evidence?.waits_in)?.evidence.waits_in;
    fill(this.note, inside ? `Where the others wait: ${inside}.` : "");
    const { strip } = answer;
    const latest = [...strip.rows].map((row) => [Math.max(0, ...row.late_s), row]).sort(([one], [other]) => other - one)[0];
    this.canvas.setAttribute("aria-label", `How late each rank is against the median one, steps ${strip.x[0]} to ${strip.until}. The latest: ${rows(latest[1])}, by up to ${seconds(latest[0])} a step.`);
    fill(this.ends, el("span", {}, strip.x[0].toLocaleString("en-US")), el("span", {}, `later than the median rank, by step · darkest: ${seconds(this.most())}`), el("span", {}, strip.until.toLocaleString("en-US")));
    this.paint();
  }

  /** The least lateness that is shown in red, in seconds. */
  least() {
    return 0.05 * (this.answer.step_s || 0);
  }

  most() {
    const all = this.answer.strip.rows.flatMap((row) => row.late_s).filter((s) => s > 0).sort((one, other) => one - other);
    return Math.max(all[Math.floor(all.length * 0.98)] || 0, 2 * this.least());
  }

  paint() {
    const { canvas } = this;
    const width = canvas.clientWidth;
    if (!this.answer?.strip || !width) return;
    const { rows: all } = this.answer.strip;
    const [ratio, colors, least, most] = [devicePixelRatio, themed(), this.least(), this.most()];
    canvas.width = width * ratio;
    canvas.height = STRIP_PX * ratio;
    const into = canvas.getContext("2d");
    into.scale(ratio, ratio);
    const left = 44;
    const high = STRIP_PX / all.length;
    into.font = "11px system-ui, sans-serif";
    into.textBaseline = "middle";
    const isNamed = (row) => [...this.late].some((rank) => Number(rank) >= Number(row.ranks[0]) && Number(rank) <= Number(row.ranks[1]));
    const middle = (at) => Math.min(Math.max((at + 0.5) * high, 6), STRIP_PX - 6);
    const taken = all.map((row, at) => (isNamed(row) ? middle(at) : -Infinity));
    all.forEach((row, at) => {
      if (isNamed(row) || taken.every((other) => Math.abs(other - middle(at)) > LABEL_PX)) {
        into.fillStyle = isNamed(row) ? colors.bad : colors.quiet;
        into.fillText(rows(row).replace(/ranks? /, ""), 0, middle(at), left - 4);
        taken[at] = middle(at);
      }
      const wide = (width - left) / row.late_s.length;
      row.late_s.forEach((late_s, column) => {
        const share = Math.min(Math.max(((late_s || 0) - least) / (most - least), 0), 1);
        into.fillStyle = late_s === null ? colors.panel : colors.line;
        into.globalAlpha = late_s === null ? 1 : 0.45;
        into.fillRect(left + column * wide, at * high, Math.ceil(wide), Math.max(high - 1, 1));
        into.globalAlpha = share;
        into.fillStyle = colors.fill;
        into.fillRect(left + column * wide, at * high, Math.ceil(wide), Math.max(high - 1, 1));
        into.globalAlpha = 1;
      });
    });
  }
}

/** A bar for each rank and mesh dimension: its wait in process groups. The rank with the least wait is the one that others wait for. */
function dimensions({ dimensions: all, step_s }) {
  if (!all.length) return null;
  const most = Math.max(0.05 * step_s, ...all.flatMap(({ waits_s }) => waits_s.map(([, s]) => s)));
  return all.map(({ name, waits_s }) => {
    const sorted = [...waits_s].sort(([, one], [, other]) => one - other);
    const [[least], [longest, longest_s]] = [sorted[0], sorted[sorted.length - 1]];
    const bars = waits_s.map(([, s]) => el("i", { style: `flex: 1; align-self: end; height: ${100 * s / most}%; background: var(--grey-1)` }));
    return el(
      "div", { class: "wait" }, el("span", { title: name }, `waits in ${name}`),
      el("div", { role: "img", "aria-label": waits_s.map(([rank, s]) => `rank ${rank} ${seconds(s)}`).join(", ") }, bars),
      el("span", { class: "number" }, `rank ${longest} ${share(longest_s / step_s)}, least rank ${least}`),
    );
  });
}

function told({ work_s, phases }, usual_s) {
  const more = work_s - usual_s;
  return `${seconds(work_s)} work${more > 0.05 * usual_s ? `, ${seconds(more)} late` : `, ${seconds(phases.comm_wait)} wait`}`;
}

function rows({ ranks: [first, last] }) {
  return first === last ? `rank ${first}` : `ranks ${first}–${last}`;
}
