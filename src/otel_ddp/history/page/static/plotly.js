// Loads the library of plots once a picture needs it; one picture at a time is drawn with it.

import { isSaved, unpacked } from "./saved.js";

let loading = null;

export function library() {
  loading = loading || load().catch((error) => {
    // The next picture tries again.
    loading = null;
    throw error;
  });
  return loading;
}

export function isThere() {
  return Boolean(window.Plotly);
}

let drawing = Promise.resolve();

/** One after the other, with a frame between: the first is seen before the others are drawn. */
export function inTurn(draw) {
  const done = drawing.then(draw);
  drawing = done.catch(() => {}).then(() => new Promise((next) => setTimeout(next)));
  return done;
}

/** Bring it here, but do not start it: that would hold up all else. */
export function fetchAhead() {
  const link = document.createElement("link");
  Object.assign(link, { rel: "preload", as: "script", href: address() });
  if (address()) document.head.append(link);
}

function address() {
  return isSaved ? "" : document.querySelector("meta[name=plotly]").content;
}

async function load() {
  const text = isSaved ? await unpacked("plotly") : "";
  if (!address() && !text) throw new Error("This installation lacks the library of plots: install it again.");
  if (text) {
    const { nonce } = document.querySelector("script[nonce]");
    document.head.append(Object.assign(document.createElement("script"), { nonce, textContent: text }));
    return window.Plotly;
  }
  await new Promise((done, failed) => {
    const script = document.createElement("script");
    script.src = address();
    script.onload = done;
    script.onerror = () => failed(new Error("The library of plots could not be loaded."));
    document.head.append(script);
  });
  return window.Plotly;
}
