// One run, live: its head and figures, and a part for each of what one looks at.
import { Refused, get, may } from "./data.js";
import { el, fill, soft } from "./dom.js";
import { listen } from "./live.js";
import { RUN_ACTIONS } from "./run_actions.js";
import { showCharts } from "./run_charts.js";
import { showConfiguration } from "./run_configuration.js";
import { showEvents } from "./run_events.js";
import { showLogs } from "./run_logs.js";
import { showWorkers } from "./run_workers.js";
import { showTrajectories } from "./trajectories.js";
import { ENDED, count, duration, many, percent, readyWorkers, reward, usd } from "./units.js";
import { waitsOf } from "./words.js";

const PARTS = {
  "": ["Overview", showCharts],
  workers: ["Workers", showWorkers],
  trajectories: ["Trajectories", showTrajectories],
  events: ["Events", showEvents],
  logs: ["Logs", showLogs],
  configuration: ["Configuration", showConfiguration],
};
const OF_CONFIGURATION = new Set(["trajectories", "configuration"]); // Parts that begin once it is known; others are read beside it.
const REFRESH_MS = 2000;
const PATIENCE = 4; // What takes long to read is read so many times less often than it could be.

export const phaseOf = (run) => el("span", { className: `phase ${run.phase}`, textContent: run.phase });

function forecast(run, budget) {
  if (ENDED.has(run.phase) || !budget) return "";
  const rate = budget.usd_per_hour ? `${usd(budget.usd_per_hour)} an hour` : "";
  if (budget.ends_in_s !== null) return `${rate}; the budget ends in ${duration(budget.ends_in_s)}`;
  const { step, steps, elapsed_s: elapsed } = run.figures;
  const left = step > 0 ? (elapsed / step) * (steps - step) : null;
  return left !== null && budget.usd_per_hour ? `${rate}; about ${usd(budget.usd + (budget.usd_per_hour * left) / 3600)} at step ${steps}` : rate;
}

function tilesOf(run, budget) {
  const { figures } = run;
  const over = ENDED.has(run.phase);
  const providers = Object.values(figures.providers);
  const deaths = providers.reduce((sum, one) => sum + one.deaths, 0);
  const left = figures.step > 0 && !over ? duration((figures.elapsed_s / figures.step) * (figures.steps - figures.step)) : "";
  return [
    ["Step", `${figures.step}/${figures.steps}`, left && `about ${left} left`],
    ["Mean reward", reward(figures.last_mean_reward ?? figures.mean_reward), figures.last_mean_reward === null ? "so far" : "of the last step"],
    ["Success", percent(figures.last_success_rate ?? figures.success_rate), "rewards above 0"],
    ["Tokens/s", count(over ? 0 : figures.tokens_per_s), `${count(figures.trajectories_running)} trajector${figures.trajectories_running === 1 ? "y" : "ies"}`],
    ["Workers", String(over ? 0 : readyWorkers(figures)), `${providers.reduce((sum, one) => sum + one.booting, 0)} booting`],
    ["Cost", usd(figures.usd) + (run.budget_usd === null ? "" : ` of ${usd(run.budget_usd)}`), forecast(run, budget)],
    ["Preemptions", count(figures.preemptions), `${many(deaths, "death")}, ${providers.reduce((sum, one) => sum + one.replaced, 0)} replaced`],
    ["Queued turns", count(figures.queued_turns), figures.elapsed_s ? `after ${duration(figures.elapsed_s)}` : ""],
  ];
}

const tile = ([label, value, note]) => el("div", { className: "tile" }, el("div", { className: "label", textContent: label }), el("div", { className: "value", textContent: value }), el("div", { className: "note", textContent: note }));

const evaluationWords = (found) => {
  if (!found) return "";
  const told = Object.entries(found.metrics).map(([name, one]) => `${name} ${reward(one.mean)}${one.error === null ? "" : ` ± ${reward(one.error)}`}`);
  const best = found.best_version === null ? "" : `; best: version ${found.best_version}`;
  return `Evaluation of version ${found.version}: ${told.join(", ") || "no episode finished"}${found.timed_out ? " (timed out)" : ""}${best}`;
};

/** The view of a run; `name` is the part of it that is shown. */
export function showRun(main, { signal, parts: [id, name], wrong, go }) {
  const place = `/v1/runs/${id}`;
  const title = el("h1", {}, el("span", { textContent: id }));
  const buttons = el("div", { className: "buttons", role: "group", ariaLabel: "Actions" });
  const cause = el("p", { className: "cause" });
  const tiles = el("div", { className: "tiles", id: "figures" });
  const evaluated = el("p", { id: "evaluated", className: "soft" });
  const waits = el("ul", { className: "waits", id: "waits" });
  const link = ([part, [text]]) => el("a", { href: `#/runs/${id}${part && `/${part}`}`, textContent: text, ariaCurrent: part === name ? "page" : undefined });
  const tabs = el("nav", { className: "tabs", ariaLabel: "Of this run" }, Object.entries(PARTS).map(link), el("a", { href: `${place}/report?format=html`, textContent: "Report", target: "_blank", rel: "noopener" }));
  const body = el("div", { className: "body" });
  fill(main, title, buttons, cause, tabs, name === "" ? [tiles, evaluated, waits] : null, body);
  let known; // Once the run is, parts that are read beside it go on.
  const view = { id, place, signal, wrong, run: null, budget: null, known: new Promise((resolve) => (known = resolve)) };
  let part = null;
  let [due, tookMs] = [0, 0];
  let acts = "";

  async function showBudget() {
    view.budget = await get(`${place}/budget`, signal);
    await view.known;
    fill(tiles, tilesOf(view.run, view.budget).map(tile));
  }

  async function more() {
    const began = performance.now();
    try {
      await Promise.all([name === "" ? showBudget() : null, part.refresh?.()]);
    } catch (error) {
      if (!(error instanceof Refused)) throw error; // A run that has not begun has nothing to read yet; others say so where they stand.
    } finally {
      tookMs = performance.now() - began;
    }
  }

  // What follows a change is read at most once in a while, and once more when all is over.
  function soon() {
    if (due) return;
    due = setTimeout(() => {
      due = 0;
      if (!document.hidden && !signal.aborted) more().catch(wrong);
    }, Math.max(REFRESH_MS, PATIENCE * tookMs));
  }
  signal.addEventListener("abort", () => clearTimeout(due));

  function show(run) {
    const first = view.run === null;
    view.run = { ...view.run, ...run };
    known();
    document.title = `${run.name} – Elastic`;
    const labels = Object.entries(run.labels).map(([key, value]) => el("a", { className: "tag", href: `#/?label=${encodeURIComponent(`${key}=${value}`)}`, textContent: `${key}=${value}` }));
    fill(title, el("span", { textContent: run.name, title: run.id }), phaseOf(run), labels);
    const offered = may("runs:write") ? RUN_ACTIONS.filter((one) => one.when(run)) : [];
    if (acts !== offered.map((one) => one.text).join()) {
      acts = offered.map((one) => one.text).join();
      fill(buttons, offered.map((one) => el("button", { type: "button", textContent: one.text, onclick: () => one.act(view, { go, show }).catch(wrong) })));
    }
    cause.textContent = "";
    fill(cause, run.cause);
    fill(tiles, tilesOf(view.run, view.budget).map(tile));
    fill(evaluated, evaluationWords(run.figures.evaluation));
    fill(waits, waitsOf(run).map((one) => el("li", {}, el("b", { textContent: one.name }), ` ${one.text}`)));
    part ??= PARTS[name][1](body, view);
    part.show?.(view.run);
    if (!first) soon();
  }

  async function read() {
    try {
      const found = get(place, signal);
      if (!OF_CONFIGURATION.has(name)) part ??= PARTS[name][1](body, view);
      const ahead = part && Promise.all([more(), part.ready]);
      ahead?.catch(() => {}); // It is heard below.
      show(await found);
      await (ahead ?? Promise.all([more(), part.ready]));
    } catch (error) {
      if (error instanceof Refused && error.type === "not-found") fill(main, el("h1", { textContent: "There is no such run" }), soft(`${id} was deleted, or is of another project.`));
      else wrong(error);
    }
  }
  listen((told) => {
    if (told.kind === "run" && told.run.id === id && view.run) show(told.run);
    else if (told.kind === "deleted" && told.id === id) fill(main, el("h1", { textContent: "The run was deleted" }));
    else if (told.kind === "anew") read();
  }, signal);
  return read();
}
