// A run's logs by process, followed.
import { Refused, eventsOf, get } from "./data.js";
import { button, el, fill, labelled, soft } from "./dom.js";
import { reading } from "./tables.js";
import { ENDED } from "./units.js";

const TAIL = 500;
const MOST = 5000;
const EVERY_MS = 1500;

export function showLogs(body, view) {
  const { place, signal } = view;
  const sources = el("select", { id: "log-source" });
  const search = el("input", { type: "search" });
  const follow = el("input", { type: "checkbox", checked: true });
  const lines = el("pre", { className: "log", id: "log", tabIndex: 0, ariaLabel: "Log" });
  const state = soft();
  const problem = el("div");
  fill(body, el("form", { className: "filters", onsubmit: (event) => event.preventDefault() }, labelled("Of", sources), labelled("Only with", search), labelled("Follow", follow), button("To the end", () => lines.scrollTo(0, lines.scrollHeight))), problem, state, lines);
  let after = "";
  let asked = 0;
  let timer = 0;

  const matches = (text) => text.toLowerCase().includes(search.value.trim().toLowerCase());
  function filter() {
    for (const one of lines.children) one.hidden = !matches(one.textContent);
  }
  async function read() {
    const mine = asked;
    const found = await eventsOf(`${place}/logs`, { source: sources.value || "process", ...(after ? { after } : { tail: String(TAIL) }) }, signal);
    if (mine !== asked) return;
    const below = lines.scrollHeight - lines.scrollTop - lines.clientHeight < 40;
    after = found.at(-1)?.id || after;
    lines.append(...found.map((one) => el("span", { textContent: `${one.data.line ?? ""}\n`, hidden: !matches(one.data.line ?? "") })));
    while (lines.children.length > MOST) lines.firstChild.remove();
    if (below) lines.scrollTo(0, lines.scrollHeight);
    fill(state, lines.children.length ? "" : "Nothing is in this log.");
  }
  async function tick() {
    clearTimeout(timer);
    if (!document.hidden && follow.checked) await reading(problem, read);
    if (signal.aborted) return;
    timer = setTimeout(() => tick().catch(view.wrong), ENDED.has(view.run?.phase) ? 10 * EVERY_MS : EVERY_MS);
  }
  function begin() {
    asked += 1;
    after = "";
    lines.replaceChildren();
    return tick().catch(view.wrong);
  }
  async function readSources() {
    try {
      const found = await get(`${place}/log-sources`, signal);
      const names = [...new Set(["process", ...found])];
      if (names.length !== sources.options.length) fill(sources, names.map((name) => el("option", { value: name, textContent: name, selected: name === sources.value })));
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
    }
  }
  sources.onchange = begin;
  search.oninput = filter;
  follow.onchange = () => follow.checked && tick().catch(view.wrong);
  signal.addEventListener("abort", () => clearTimeout(timer));
  return { refresh: readSources, ready: readSources().then(begin) };
}
