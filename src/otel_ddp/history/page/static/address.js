// Reads and writes the user's choices in the address of the page, so that a link includes them.

import { answers, isSaved } from "./saved.js";

/** The view, and the run if the view shows one run. */
export function place() {
  if (isSaved) return { view: "run", run: answers.run.run, group: answers.run.group };
  const path = location.pathname;
  if (path.startsWith("/run/")) {
    return { view: "run", run: decodeURIComponent(path.slice(5)), group: chosen("group", null) };
  }
  return { view: path.slice(1) || "runs" };
}

export function chosen(name, otherwise = "") {
  const found = new URLSearchParams(location.search).get(name);
  return found === null ? otherwise : found;
}

export function allChosen(name) {
  return new URLSearchParams(location.search).getAll(name);
}

/** Write a choice into the address, unless it is the default, `otherwise`. */
export function choose(name, value, otherwise = "") {
  // Some browsers do not let a script change the address of a local file.
  if (isSaved) return;
  const query = new URLSearchParams(location.search);
  if (value === otherwise || value === null) query.delete(name);
  else query.set(name, value);
  replace(query);
}

function replace(query) {
  const text = query.toString();
  history.replaceState(null, "", location.pathname + (text ? `?${text}` : "") + location.hash);
}

export function runAddress(group, run, more = {}) {
  const query = new URLSearchParams(group ? { group, ...more } : more).toString();
  return `/run/${encodeURIComponent(run)}${query ? `?${query}` : ""}`;
}

export function compareAddress(runs) {
  const query = new URLSearchParams();
  for (const { group, run } of runs) {
    query.append("run", run);
    query.append("group", group);
  }
  return `/compare?${query}`;
}
