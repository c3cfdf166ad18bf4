// Asks the agent, and asks again each second or so while the page is seen.

import { answered, isSaved } from "./saved.js";

// The agent rests for so many times what its processor has spent on the answers, within bounds.
const REST = 20;
const LONGEST_REST_MS = 30000;
const ANSWER_MS = 20000;
const SHARED_MS = 200;

let spentMs = 0;

export class Refusal extends Error {}

export function address(path, parameters) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    if (value === null || value === undefined) continue;
    for (const each of Array.isArray(value) ? value : [value]) query.append(name, each);
  }
  return `/api/${path}?${query}`;
}

/** The answer; a Refusal where there is one that says why not. */
export async function ask(path, parameters = {}, options = {}) {
  if (isSaved) return answered(path, parameters);
  let answer, text;
  try {
    const signal = AbortSignal.timeout(ANSWER_MS);
    answer = await fetch(address(path, parameters), { signal, ...options });
    // A connection may also end in the middle of an answer.
    text = await answer.text();
  } catch {
    throw new Error("The agent does not answer.");
  }
  spentMs += Number(/cpu;dur=([\d.]+)/.exec(answer.headers.get("Server-Timing") || "")?.[1] || 0);
  if (!answer.headers.get("Content-Type")?.startsWith("application/json")) {
    if (answer.ok) return text;
    throw new Refusal(text || `The answer is ${answer.status}.`);
  }
  const content = JSON.parse(text);
  // A folder that is served has no metrics beside it.
  if ("agent" in content) document.querySelector("footer").hidden = !content.agent;
  if (!answer.ok) throw new Refusal(content.error);
  return content;
}

const asked = new Map();

/** As `ask`; those who want the same at the same time share one answer. */
export function askOnce(path, parameters) {
  const key = address(path, parameters);
  if (!asked.has(key)) {
    const answer = ask(path, parameters);
    asked.set(key, answer);
    const forget = () => setTimeout(() => asked.delete(key), SHARED_MS);
    answer.then(forget, forget);
  }
  return asked.get(key);
}

/** Ask again and again while the page is seen; of a saved one, once. */
export function keep(work, everyMs) {
  if (isSaved) {
    work().catch(tell);
    return;
  }
  let [timer, running] = [0, false];
  async function round() {
    clearTimeout(timer);
    if (running || document.hidden) return;
    running = true;
    spentMs = 0;
    try {
      await work();
      tell("");
    } catch (error) {
      tell(error);
    } finally {
      running = false;
    }
    const rest = Math.min(REST * spentMs, LONGEST_REST_MS);
    timer = setTimeout(round, Math.max(everyMs, rest));
  }
  document.addEventListener("visibilitychange", () => document.hidden || round());
  round();
}

let silentSince = null;

/** Says on the page what went wrong; what is drawn already stays. */
function tell(error) {
  const place = document.getElementById("trouble");
  if (!error) {
    silentSince = null;
    place.hidden = true;
    return;
  }
  if (!(error instanceof Refusal) && error.message.startsWith("The agent")) {
    silentSince = silentSince || new Date();
    const since = silentSince.toLocaleTimeString("en-GB");
    show(place, `The agent has not answered since ${since}. What is shown is as it was then.`);
  } else {
    show(place, error.message);
    if (!(error instanceof Refusal)) console.error(error);
  }
}

function show(place, text) {
  if (place.textContent !== text) place.textContent = text;
  place.hidden = false;
}
