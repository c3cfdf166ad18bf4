// Sends requests to the agent, and polls it every second or so while the page is visible.

import { answered, isSaved } from "./saved.js";

// Limits the page's load on the agent: after a round of requests, the page waits for this many times
// the CPU time that the agent's answers took, but no longer than LONGEST_REST_MS.
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

/** The answer to a request. Throws a Refusal if the agent answers with a reason instead. */
export async function ask(path, parameters = {}, options = {}) {
  if (isSaved) return answered(path, parameters);
  let answer, text;
  try {
    const signal = AbortSignal.timeout(ANSWER_MS);
    answer = await fetch(address(path, parameters), { signal, ...options });
    // Also within `try`, as the connection may break in the middle of an answer.
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
  // Without an agent there are no metrics, to which the footer links.
  if ("agent" in content) document.querySelector("footer").hidden = !content.agent;
  if (!answer.ok) throw new Refusal(content.error);
  return content;
}

const asked = new Map();

/** Like `ask`, but equal requests within a short time share one answer. */
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

/** Call `work` repeatedly while the page is visible; on a saved page once. */
export function pollWhileVisible(work, everyMs) {
  if (isSaved) {
    work().catch(showTrouble);
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
      showTrouble("");
    } catch (error) {
      showTrouble(error);
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

/** Show an error at the top of the page, or hide it if `error` is empty. The rest stays as it is. */
function showTrouble(error) {
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
