// Loads the library of plots, once, after the page has been painted.

let loading = null;

export function library() {
  loading = loading || load();
  return loading;
}

async function load() {
  const address = document.querySelector("meta[name=plotly]").content;
  if (!address) throw new Error("This installation lacks the library of plots: install it again.");
  await new Promise((done, failed) => {
    const script = document.createElement("script");
    script.src = address;
    script.onload = done;
    script.onerror = () => failed(new Error("The library of plots could not be loaded."));
    document.head.append(script);
  });
  return window.Plotly;
}
