// Colours of lines, by split or by compared run. Phases have their own colours; red means trouble.

const LIGHT = ["#1f5fae", "#0f766e", "#8a5a00", "#8c3f8c", "#4b5563", "#5d6d1e", "#006f8f", "#7a5240"];
const DARK = ["#8ab8ff", "#5eead4", "#f2c14e", "#e3a5e8", "#c3c9d1", "#c5d86d", "#7fd6ee", "#d9b3a0"];

const DASHES = [[], [6, 4], [2, 3], [8, 3, 2, 3]];

export function seriesColor(number) {
  const all = matchMedia("(prefers-color-scheme: dark)").matches ? DARK : LIGHT;
  return all[Math.max(number, 0) % all.length];
}

export function dash(number) {
  return DASHES[Math.max(number, 0) % DASHES.length];
}

/** The colours of the style sheet, for drawing on a canvas. */
export function themed() {
  const style = getComputedStyle(document.documentElement);
  const get = (name) => style.getPropertyValue(name).trim();
  return { text: get("--text"), quiet: get("--quiet"), line: get("--line"), panel: get("--panel"), bad: get("--bad"), fill: get("--bad-fill") };
}
