// A run's logs by process, followed.
import { Refused, eventsOf, get } from "./data.js";
import { button, el, fill, labelled, soft } from "./dom.js";
import { follow, listen } from "./live.js";
import { reading } from "./tables.js";
import { ENDED } from "./units.js";

const TAIL = 500;
const MOST = 5000;
const SHOWN_MS = 100;
const AGAIN_MS = 3000;

export function showLogs(body, view) {
  const { place, signal } = view;
  const sources = el("select", { id: "log-source" });
  const search = el("input", { type: "search" });
  const following = el("input", { type: "checkbox", checked: true });
  const lines = el("pre", { className: "log", id: "log", tabIndex: 0, ariaLabel: "Log" });
  const state = soft();
  const problem = el("div");
  fill(body, el("form", { className: "filters", onsubmit: (event) => event.preventDefault() }, labelled("Of", sources), labelled("Only with", search), labelled("Follow", following), button("To the end", () => lines.scrollTo(0, lines.scrollHeight))), problem, state, lines);
  let [after, asked, busy] = ["", 0, 0];
  let [stream, granted, known] = [null, null, false]; // `known`: what was there is read, and a stream goes on behind it.
  let [come, timer, again] = [[], 0, 0];

  const matches = (text) => text.toLowerCase().includes(search.value.trim().toLowerCase());
  const placed = (more) => `${place}/logs?${new URLSearchParams({ source: sources.value || "process", ...(after ? { after } : {}), ...more })}`;
  function filter() {
    for (const one of lines.children) one.hidden = !matches(one.textContent);
  }
  function show(found) {
    const below = lines.scrollHeight - lines.scrollTop - lines.clientHeight < 40;
    after = found.at(-1)?.id || after;
    lines.append(...found.map((one) => el("span", { textContent: `${one.data.line ?? ""}\n`, hidden: !matches(one.data.line ?? "") })));
    while (lines.children.length > MOST) lines.firstChild.remove();
    if (below) lines.scrollTo(0, lines.scrollHeight);
    tell();
  }
  function tell() {
    const waits = granted === false && following.checked && !ENDED.has(view.run?.phase);
    fill(state, waits ? "Other windows follow logs already: this one goes on once one of them is closed or not seen. " : "", known && !lines.children.length ? "Nothing is in this log." : "");
  }
  function settle() {
    timer = 0;
    show(come.splice(0));
  }
  async function read() {
    const mine = asked;
    let found;
    try {
      found = await eventsOf(`${place}/logs`, { source: sources.value || "process", ...(after ? { after } : { tail: String(TAIL) }) }, signal);
    } catch (error) {
      if (mine === asked && after && error.type === "events-gone") after = ""; // It is another file now, or was cut: its newest lines come next.
      throw error;
    }
    if (mine !== asked) return;
    known = true;
    problem.replaceChildren();
    show(found);
    open();
  }
  async function readOn() {
    const mine = asked;
    [known, busy] = [false, mine];
    await reading(problem, read);
    if (mine !== asked) return;
    busy = 0;
    if (!known && !signal.aborted) again = setTimeout(goOn, AGAIN_MS);
  }
  function goOn() {
    again = 0;
    if (!document.hidden && !signal.aborted) readOn().catch(view.wrong);
  }
  function close() {
    clearTimeout(again);
    clearTimeout(timer);
    stream?.close();
    [stream, again] = [null, 0];
    if (come.length) settle();
  }
  /** Go on behind what is there, by a stream of the page's own, while it is seen and may have one. */
  function open() {
    if (stream || again || !known || !granted || document.hidden || !following.checked || signal.aborted || ENDED.has(view.run?.phase)) return;
    const made = new EventSource(placed());
    stream = made;
    made.onmessage = (event) => {
      if (stream !== made) return;
      come.push({ id: event.lastEventId, data: JSON.parse(event.data) });
      timer = timer || setTimeout(settle, SHOWN_MS);
    };
    made.addEventListener("log.ended", close);
    made.onerror = () => {
      if (stream !== made || made.readyState !== EventSource.CLOSED) return; // Else it connects again by itself.
      close();
      again = setTimeout(goOn, AGAIN_MS); // A question says why there is none.
    };
  }
  function begin() {
    close();
    asked += 1;
    after = "";
    lines.replaceChildren();
    return readOn();
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
  const held = () => {
    if (document.hidden) granted = null; // It is told anew once it is seen.
    if (!granted || !following.checked) close();
    else if (known) open();
    else if (asked && !again && !busy) goOn();
    tell();
  };
  sources.onchange = () => begin().catch(view.wrong);
  search.oninput = filter;
  following.onchange = held;
  document.addEventListener("visibilitychange", held, { signal });
  listen((told) => {
    if (told.kind !== "follow") return;
    granted = told.granted;
    held();
  }, signal);
  follow(signal);
  signal.addEventListener("abort", close);
  return { refresh: () => readSources().then(held), ready: readSources().then(begin) };
}
