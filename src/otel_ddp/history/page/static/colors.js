// Colours: of ranks and runs, told apart by most eyes, on white and on black.

const SERIES = ["#2a78d6", "#d95f02", "#1b9e77", "#c2569b", "#8c6bb1", "#a6761d", "#3a9fb5", "#7a8a2e"];

const DASHES = ["solid", "dash", "dot", "dashdot"];

export function seriesColor(number) {
  return SERIES[Math.max(number, 0) % SERIES.length];
}

export function dash(number) {
  return DASHES[number % DASHES.length];
}

/** What the style sheet says, for the library of plots. */
export function themed() {
  const style = getComputedStyle(document.documentElement);
  const get = (name) => style.getPropertyValue(name).trim();
  return { text: get("--text"), quiet: get("--quiet"), line: get("--line"), panel: get("--panel"), bad: get("--bad") };
}
