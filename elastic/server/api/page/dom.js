// What pages are made of. Every text becomes a text node: nothing that the server tells is ever markup.

const TEXT_MAX = 20_000;
const STEERING = /[\p{Cc}\p{Cf}\p{Cs}]/gu;

/** The text with what would steer or reorder it made visible, and without the rest of a very long one. */
export function visible(text, most = TEXT_MAX) {
  const whole = String(text);
  const shown = whole.length > most ? whole.slice(0, most) : whole;
  const safe = shown.replace(STEERING, (mark) => (mark === "\n" || mark === "\t" ? mark : "\ufffd"));
  return whole.length > most ? `${safe}… ${(whole.length - most).toLocaleString("en")} more characters are not shown` : safe;
}

const TEXTS = new Set(["textContent", "title", "placeholder"]);

/** An element with these properties and children; children are nodes, texts, lists of these, or nothing. */
export function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (TEXTS.has(name)) made[name] = visible(value);
    else if (name === "href") setPlace(made, String(value));
    else if (name === "data") Object.assign(made.dataset, value);
    else if (name.startsWith("aria") || name === "role" || name === "for") made.setAttribute(name.replace("aria", "aria-").toLowerCase(), visible(value));
    else made[name] = value;
  }
  append(made, children);
  return made;
}

function append(node, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    if (Array.isArray(child)) append(node, child);
    else node.append(child instanceof Node ? child : visible(child));
  }
}

/** Links lead to places of this server only. */
function setPlace(node, place) {
  if (place.startsWith("#") || (place.startsWith("/") && !place.startsWith("//"))) node.setAttribute("href", place);
}

/** Put these children in place of a node's own. */
export function fill(node, ...children) {
  const made = document.createDocumentFragment();
  append(made, children);
  node.replaceChildren(made);
}

const SVG = "http://www.w3.org/2000/svg";

/** An SVG element with these attributes. */
export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, String(value));
  append(made, children);
  return made;
}

/** A text whose parts between backticks are code. */
export const withCode = (text) => text.split("`").map((part, n) => (n % 2 ? el("code", { textContent: part }) : part));

export const soft = (...children) => el("p", { className: "soft" }, ...children);
export const section = (title, ...children) => el("section", { className: "part" }, el("h2", { textContent: title }), ...children);

/** A button that is off while what it does is under way. */
export function button(text, act, properties = {}) {
  const made = el("button", { type: "button", textContent: text, ...properties });
  made.onclick = async () => {
    made.disabled = true;
    try {
      await act();
    } finally {
      made.disabled = false;
    }
  };
  return made;
}

/** A control with its label. */
export const labelled = (label, control) => el("label", {}, el("span", { textContent: label }), control);
