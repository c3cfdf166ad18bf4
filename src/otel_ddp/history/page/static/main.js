// Shows the view that the address names.

import { place } from "./address.js";
import { fetchAhead } from "./plotly.js";

const VIEWS = {
  runs: () => import("./runs.js"),
  run: () => import("./run.js"),
  compare: () => import("./compare.js"),
  now: () => import("./now.js"),
};

async function open() {
  const where = place();
  const named = where.view in VIEWS ? where.view : "runs";
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.view === named) link.setAttribute("aria-current", "page");
  }
  // Larger than all else together: it comes beside the rest.
  if (named === "run" || named === "compare") fetchAhead();
  const view = await VIEWS[named]();
  view.show(document.getElementById("main"), where);
}

open();
