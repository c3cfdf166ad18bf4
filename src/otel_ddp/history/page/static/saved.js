// What a saved page carries inside: the answers to all that it asks.

export const isSaved = Boolean(document.getElementById("answers"));

/** The text of an element that holds packed bytes. */
async function unpacked(id) {
  const text = document.getElementById(id).textContent;
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

export const answers = isSaved ? JSON.parse(await unpacked("answers")) : null;

/** As an agent would answer; a picture has all that there is of its name. */
export function answered(path, { name, like = "" }) {
  const found = answers[path];
  if (path === "values" || path === "node") {
    const parts = [name].flat().map((each) => found[each] || { series: [], left_out: 0 });
    return { series: parts.flatMap((each) => each.series), left_out: parts.reduce((sum, each) => sum + each.left_out, 0) };
  }
  if (path === "postmortem") return found[name];
  if (path === "events") {
    const words = like.toLowerCase();
    return { events: found.events.filter((each) => `${each.body} ${each.name}`.toLowerCase().includes(words)) };
  }
  return found;
}
