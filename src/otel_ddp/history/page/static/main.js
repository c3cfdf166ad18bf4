// Shows the view that the address selects.

import { place } from "./address.js";
import { ask } from "./api.js";
import { answers, isSaved } from "./saved.js";
import { el } from "./dom.js";

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
  if (isSaved) {
    const more = answers.names.left_out;
    const note = `Saved ${new Date(answers.run.now_ns / 1e6).toLocaleString("en-GB")}.`;
    document.querySelector("nav").replaceWith(el("span", {}, more ? `${note} ${more} more names are in report.json.` : note));
    document.querySelector("header a").removeAttribute("href");
    document.querySelector("footer").remove();
  }
  // Request the head while the browser still loads the scripts of the view.
  const head = named === "run" ? ask("run", { run: where.run, group: where.group }) : null;
  const view = await VIEWS[named]();
  view.show(document.getElementById("main"), where, head);
}

open();
