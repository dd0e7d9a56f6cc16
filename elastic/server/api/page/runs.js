// All runs: filtered, ordered and searched by the server, of which what is seen is in the page; several are compared.
import { Pager, Refused } from "./data.js";
import { el, fill, labelled, soft } from "./dom.js";
import { listen } from "./live.js";
import { phaseOf } from "./run.js";
import { longTable } from "./tables.js";
import { ENDED, count, many, moment, percent, readyWorkers, reward, usd } from "./units.js";

const PHASES = { "": "all phases", live: "living", starting: "starting", running: "running", pending: "pending", stopped: "stopped", finished: "finished", failed: "failed" };
const LIVE = ["pending", "starting", "running", "restarting", "stopping"];
const COMPARED_MAX = 8;
const NEWS_MS = 500;

const chosen = new Map(); // Runs that are to be compared, also while one looks at another page of the list.

export function showRuns(main, { signal, query, go, wrong }) {
  const asked = { search: query.get("search") ?? "", phase: query.get("phase") ?? "", label: query.get("label") ?? "", order: query.get("order") ?? "", ascending: query.get("ascending") === "true" };
  let entries = [];
  let pager = null;
  let loading = false;
  let timer = 0;

  const compare = el("button", { type: "button", id: "compare", onclick: () => go(`#/compare/${[...chosen.keys()].join(",")}`) });
  const status = el("p", { className: "soft", role: "status", id: "status" });
  function choose(run, on) {
    if (on) chosen.set(run.id, run.name);
    else chosen.delete(run.id);
    told();
  }
  function told() {
    compare.textContent = `Compare ${chosen.size} runs`;
    compare.hidden = chosen.size < 2;
    compare.disabled = chosen.size > COMPARED_MAX;
    compare.title = chosen.size > COMPARED_MAX ? `at most ${COMPARED_MAX}` : "";
  }
  const heading = (text, order) => {
    if (!order) return text;
    const now = asked.order === order;
    const mark = now ? (asked.ascending ? " ▲" : " ▼") : "";
    return el("button", { type: "button", className: "order", textContent: text + mark, ariaLabel: `Order by ${text}${now ? (asked.ascending ? ", smallest first" : ", largest first") : ""}`, onclick: () => ordered(order) });
  };
  const column = (title, order, of, number = true) => ({ title, number, of, head: heading(title, order) });
  const box = (run) => el("input", { type: "checkbox", checked: chosen.has(run.id), ariaLabel: `Compare ${run.name}`, onchange: (event) => choose(run, event.target.checked) });
  const nameOf = (run) => [el("a", { href: `#/runs/${run.id}`, textContent: run.name, title: run.id }), el("span", { className: "soft", textContent: ` …${run.id.slice(-6)}` })];
  const labelsOf = (run) => Object.entries(run.labels).slice(0, 4).map(([name, value]) => el("a", { className: "tag", href: `#/?label=${encodeURIComponent(`${name}=${value}`)}`, textContent: `${name}=${value}` }));
  const columns = [
    { title: "", of: box, head: el("span", { className: "hidden", textContent: "Compare" }) },
    column("Run", "name", nameOf, false),
    column("Phase", "phase", phaseOf, false),
    column("Step", "step", (run) => `${run.figures.step}/${run.figures.steps}`),
    column("Reward", "reward", (run) => reward(run.figures.last_mean_reward ?? run.figures.mean_reward)),
    column("Success", "success", (run) => percent(run.figures.last_success_rate ?? run.figures.success_rate)),
    column("Tokens/s", "tokens_per_s", (run) => count(ENDED.has(run.phase) ? 0 : run.figures.tokens_per_s)),
    column("Workers", null, (run) => count(ENDED.has(run.phase) ? 0 : readyWorkers(run.figures))),
    column("Preempted", "preemptions", (run) => count(run.figures.preemptions)),
    column("Cost", "usd", (run) => usd(run.figures.usd)),
    { title: "Labels", of: labelsOf },
    { title: "Submitted", of: (run) => moment(run.created_at) },
  ];
  const list = longTable(columns, { label: "Runs", id: "runs", reach: () => more().catch(wrong) });
  const empty = soft();
  empty.hidden = true;

  const search = el("input", { type: "search", value: asked.search, placeholder: "name, id or label", id: "search" });
  const phase = el("select", { id: "phase" }, Object.entries(PHASES).map(([value, text]) => el("option", { value, textContent: text, selected: value === asked.phase })));
  const label = el("input", { type: "search", value: asked.label, placeholder: "team=agents", id: "label" });
  const form = el("form", { className: "filters", role: "search", onsubmit: (event) => event.preventDefault() }, labelled("Search", search), labelled("Phase", phase), labelled("Label", label), compare);
  const filtered = () => asked.search !== "" || asked.phase !== "" || asked.label !== "" || asked.order !== "";

  function place() {
    const told = new URLSearchParams(Object.entries(asked).filter(([, value]) => value !== "" && value !== false).map(([name, value]) => [name, String(value)]));
    return `#/${told.size ? `?${told}` : ""}`;
  }
  function ordered(order) {
    if (asked.order !== order) Object.assign(asked, { order, ascending: order === "name" || order === "phase" });
    else if (asked.ascending === (order === "name" || order === "phase")) asked.ascending = !asked.ascending;
    else Object.assign(asked, { order: "", ascending: false });
    go(place());
  }
  let typed = 0;
  form.oninput = (event) => {
    if (event.target.type === "checkbox") return;
    clearTimeout(typed);
    typed = setTimeout(() => {
      Object.assign(asked, { search: search.value.trim(), phase: phase.value, label: label.value.trim() });
      history.replaceState(null, "", place());
      begin().catch(wrong);
    }, 200);
  };

  async function more() {
    if (loading || !pager?.more) return;
    loading = true;
    const mine = pager;
    try {
      const found = await mine.next(signal);
      if (mine !== pager) return;
      entries = entries.concat(found);
      list.show(entries);
    } finally {
      if (mine === pager) loading = false;
    }
    tell();
  }
  function tell() {
    status.textContent = !entries.length ? "" : pager.more ? `${count(entries.length)}+ runs` : many(entries.length, "run");
    empty.hidden = entries.length > 0;
    list.node.hidden = entries.length === 0;
    fill(empty, filtered() ? "No runs like these." : "No runs yet. Submit one here, or on a terminal: elastic run CONFIG --providers … --remote");
  }
  async function begin() {
    const phases = asked.phase === "live" ? LIVE : asked.phase;
    pager = new Pager("/v1/runs", { search: asked.search, phase: phases, label: asked.label, order: asked.order, ascending: asked.order ? asked.ascending : "" });
    loading = true;
    const mine = pager;
    try {
      const found = await mine.next(signal);
      if (mine !== pager) return;
      entries = found;
      list.node.scrollTop = 0;
      list.show(entries);
    } finally {
      if (mine === pager) loading = false;
    }
    tell();
  }
  // What changes is told where it stands. Runs that are new come on top of an unfiltered list, and else with the next look.
  const news = new Map();
  function settle() {
    timer = 0;
    for (const [id, run] of news) {
      const at = entries.findIndex((one) => one.id === id);
      if (at >= 0 && run) entries[at] = run;
      else if (at >= 0) entries.splice(at, 1);
      else if (run && !filtered() && (entries.length === 0 || run.id > entries[0].id)) entries.unshift(run);
    }
    news.clear();
    list.show(entries);
    tell();
  }
  listen((what) => {
    if (what.kind === "anew") begin().catch(wrong);
    if (what.kind !== "run" && what.kind !== "deleted") return;
    news.set(what.run?.id ?? what.id, what.run ?? null);
    timer = timer || setTimeout(settle, NEWS_MS);
  }, signal);
  signal.addEventListener("abort", () => [timer, typed].forEach(clearTimeout));

  const wide = el("div", { className: "row" }, el("h1", { textContent: "Runs" }), status);
  fill(main, wide, form, empty, list.node);
  told();
  return begin().catch((error) => {
    if (error instanceof Refused && error.type === "invalid-request") fill(status, error.message);
    else throw error;
  });
}
