// What happens in a run, in words: the newest, from then on what follows, and what was before on demand.
import { button, el, fill, labelled, soft } from "./dom.js";
import { reading } from "./tables.js";
import { eventsOf } from "./data.js";
import { clock } from "./units.js";
import { inWords, isSerious } from "./words.js";

const TAIL = 200;
const ABOUT = new Set(["begin", "read", "error", "run.ended"]); // Of the stream, not of the run.
const MOST = 5000;

export function showEvents(body, { place, signal }) {
  const list = el("ol", { className: "events", id: "events", reversed: true, tabIndex: 0, ariaLabel: "Events, the newest first" });
  const search = el("input", { type: "search", placeholder: "preempted, spot-3, …" });
  const routine = el("input", { type: "checkbox" });
  const state = soft();
  const problem = el("div");
  const older = button("Older", () => reading(problem, readOlder), { hidden: true });
  fill(body, el("form", { className: "filters", onsubmit: (event) => event.preventDefault() }, labelled("Only with", search), labelled("Routine too", routine)), problem, state, list, el("p", {}, older));
  let [after, begin] = ["", ""];
  let asked = 0;

  const line = (event) => {
    const text = inWords(event);
    const mark = isSerious(event) ? el("span", { className: "mark", ariaHidden: "true", textContent: "▲ " }) : null;
    const made = el("li", { title: event.event }, el("time", { textContent: clock(event.data.at_s) }), " ", mark, text);
    made.dataset.text = `${event.event} ${text}`.toLowerCase();
    return made;
  };
  function filter() {
    const wanted = search.value.trim().toLowerCase();
    for (const one of list.children) one.hidden = wanted !== "" && !one.dataset.text.includes(wanted);
  }
  const linesOf = (found) => found.filter((one) => !ABOUT.has(one.event)).reverse().map(line);
  function beginsAt(found) {
    const said = found.find((one) => one.event === "begin");
    begin = said?.data.older ? said.id : "";
    older.hidden = !begin || list.children.length >= MOST;
  }
  async function readOlder() {
    const mine = asked;
    const found = await eventsOf(`${place}/events`, { routine: String(routine.checked), tail: String(TAIL), until: begin }, signal);
    if (mine !== asked) return;
    list.append(...linesOf(found));
    beginsAt(found);
    filter();
  }
  async function read() {
    const mine = asked;
    const query = { routine: String(routine.checked), ...(after ? { after } : { tail: String(TAIL) }) };
    const found = await eventsOf(`${place}/events`, query, signal);
    if (mine !== asked) return;
    const first = !after;
    after = found.at(-1)?.id || after;
    const broken = found.find((one) => one.event === "error");
    list.prepend(...linesOf(found));
    while (list.children.length > MOST) list.lastChild.remove();
    if (first) beginsAt(found);
    fill(state, broken ? `What follows cannot be read: ${broken.data.detail}` : list.children.length ? "" : "Nothing has happened yet.");
    filter();
  }
  const refresh = () => reading(problem, read);
  search.oninput = filter;
  routine.onchange = () => {
    asked += 1;
    after = "";
    list.replaceChildren();
    refresh();
  };
  return { refresh };
}
