// Builds elements. Text is never parsed as HTML: the name of a run may contain markup.

/** An element. Attributes that are null are left out; functions become event listeners. */
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") made.addEventListener(name, value);
    else if (name === "value" || name === "checked") made[name] = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((each) => each !== null && each !== undefined));
  return made;
}

/** A table in a frame that scrolls. Each row is a list of cells, or an element. */
export function table(caption, heads, rows, attributes = {}) {
  const head = el("tr", {}, heads.map((each) => el("th", { scope: "col" }, each)));
  const body = rows.map((row) => (row instanceof Element ? row : el("tr", {}, row.map(cell))));
  return el(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": caption, ...attributes },
    el("table", {}, el("caption", {}, caption), el("thead", {}, head), el("tbody", {}, body)),
  );
}

export function cell(content) {
  if (content instanceof Element && content.tagName === "TD") return content;
  return el("td", {}, content === null || content === undefined ? "" : content);
}

export function number(text) {
  return el("td", { class: "number" }, text);
}

/** A label element that contains its control. */
export function labelled(text, control) {
  return el("label", {}, el("span", {}, text), control);
}

export function choice(options, chosen, changed) {
  const made = el("select", { change: () => changed(made.value) });
  for (const [value, text] of options) {
    made.append(el("option", { value, selected: value === chosen }, text));
  }
  return made;
}

/** Replace the content of an element if it has changed, but keep scroll positions and the focus. */
export function fill(element, ...children) {
  const made = el("div", {}, ...children);
  if (made.innerHTML === element.dataset.was && element.childNodes.length) return;
  const places = [...element.querySelectorAll(".scroll")].map((each) => [each.getAttribute("aria-label"), each.scrollTop, each.scrollLeft, each === document.activeElement]);
  const focused = element.contains(document.activeElement) ? document.activeElement.dataset.key : "";
  element.dataset.was = made.innerHTML;
  element.replaceChildren(...made.childNodes);
  for (const [label, top, left, hadFocus] of places) {
    const same = element.querySelector(`.scroll[aria-label="${CSS.escape(label)}"]`);
    if (!same) continue;
    same.scrollTo(left, top);
    if (hadFocus) same.focus({ preventScroll: true });
  }
  if (focused) element.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
}
