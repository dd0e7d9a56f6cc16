// Tables: plain ones, lists that are read by cursors, and long ones of which only what is seen is in the page.
import { Refused } from "./data.js";
import { button, el, fill, soft } from "./dom.js";

const align = (column) => (column.number ? "number" : column.wide ? "wide" : "");

function headOf(columns) {
  return el("thead", {}, el("tr", {}, columns.map((one) => el("th", { className: align(one), scope: "col" }, one.head ?? one.title))));
}

const rowOf = (columns, entry) => el("tr", {}, columns.map((one) => el("td", { className: align(one) }, one.of(entry))));

/** A table of columns {title, of, number, wide}; `show` puts entries into it. */
export function table(columns, { label, empty = "Nothing yet.", id = "" }) {
  const body = el("tbody");
  const none = soft(empty);
  const node = el("div", { className: "scrolls", tabIndex: 0, role: "region", ariaLabel: label, id }, el("table", {}, headOf(columns), body));
  none.hidden = node.hidden = true; // Until something is known.
  const count = () => {
    none.hidden = body.children.length > 0;
    node.hidden = body.children.length === 0;
  };
  const show = (entries) => {
    fill(body, entries.map((entry) => rowOf(columns, entry)));
    count();
  };
  const add = (entries) => {
    body.append(...entries.map((entry) => rowOf(columns, entry)));
    count();
  };
  /** Nothing, without a word about it. */
  const clear = () => {
    body.replaceChildren();
    node.hidden = none.hidden = true;
  };
  return { node: el("div", {}, node, none), show, add, clear, body };
}

/** A list that is read by cursors, more of it on demand. `begin` gives a new pager, which may say `about` what it has read. */
export function paged(columns, begin, { signal, label, empty, id, most = 2000 }) {
  const made = table(columns, { label, empty, id });
  let pager = null;
  const wrong = soft();
  wrong.hidden = true;
  const more = button("More", () => load(), { hidden: true });
  const about = soft();
  async function load(anew = false) {
    const mine = pager;
    fill(about, mine.about);
    try {
      const entries = await mine.next(signal);
      if (mine !== pager) return;
      if (mine.unread) made.clear();
      else if (anew) made.show(entries);
      else made.add(entries);
      wrong.hidden = true;
      fill(about, mine.about);
      fill(more, mine.verb);
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      if (mine !== pager) return;
      if (anew && ["invalid-request", "invalid-cursor"].includes(error.type)) made.clear(); // What is there is of another question.
      wrong.textContent = `This cannot be shown: ${error.message}`;
      wrong.hidden = false;
    }
    more.hidden = !mine.more || made.body.children.length >= most;
    if (made.body.children.length >= most) fill(about, mine.about, ` No more than ${most} are shown.`);
  }
  async function refresh() {
    pager = begin();
    await load(true);
  }
  return { node: el("div", {}, made.node, wrong, about, el("p", {}, more)), refresh, body: made.body };
}

export const ROW_PX = 34;

/** A long table: rows of one height, of which those that are seen are there. `reach` is called near the end. */
export function longTable(columns, { label, id, reach }) {
  const body = el("tbody");
  const [above, below] = [el("tr", { className: "spacer", ariaHidden: "true" }, el("td", { colSpan: columns.length })), el("tr", { className: "spacer", ariaHidden: "true" }, el("td", { colSpan: columns.length }))];
  const inner = el("table", {}, headOf(columns), body);
  const node = el("div", { className: "scrolls long", tabIndex: 0, role: "region", ariaLabel: label, id }, inner);
  let entries = [];
  let range = [-1, -1];
  function draw(force = false) {
    const first = Math.max(0, Math.floor(node.scrollTop / ROW_PX) - 10);
    const last = Math.min(entries.length, first + Math.ceil((node.clientHeight || 600) / ROW_PX) + 20);
    if (last > entries.length - 30) reach();
    if (!force && first === range[0] && last === range[1]) return;
    range = [first, last];
    const at = document.activeElement?.closest?.("tr")?.dataset.key;
    const tag = document.activeElement?.tagName;
    above.firstChild.style.height = `${first * ROW_PX}px`;
    below.firstChild.style.height = `${(entries.length - last) * ROW_PX}px`;
    fill(body, above, entries.slice(first, last).map((entry) => {
      const row = rowOf(columns, entry);
      row.dataset.key = entry.id;
      return row;
    }), below);
    if (at) body.querySelector(`tr[data-key="${CSS.escape(at)}"] ${tag}`)?.focus({ preventScroll: true });
  }
  inner.setAttribute("aria-rowcount", "-1");
  node.addEventListener("scroll", () => requestAnimationFrame(() => draw()), { passive: true });
  new ResizeObserver(() => draw()).observe(node);
  const show = (found) => {
    entries = found;
    draw(true);
  };
  return { node, show, body };
}

/** A part's own reading: where it is refused, that is told where it stands. */
export async function reading(node, read) {
  try {
    await read();
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    fill(node, soft(`This cannot be shown: ${error.message}`));
  }
}
