// Kinds of providers: what the caller's living runs have of each, what is shared, and what can be said of each.
import { action, edit } from "./actions.js";
import { get, listed, may } from "./data.js";
import { button, el, fill, labelled, section, soft } from "./dom.js";
import { listen } from "./live.js";
import { offersOver } from "./offers.js";
import { reading, table } from "./tables.js";
import { ENDED, count, many, usd } from "./units.js";

const REFRESH_MS = 5000;

function settingsOf(kind) {
  const said = Object.entries(kind.settings.properties ?? {});
  if (!said.length) return soft("What it needs is not installed here.");
  return el("details", {}, el("summary", { textContent: many(said.length, "setting") }), el("dl", {}, said.map(([name, one]) => [el("dt", {}, el("code", { textContent: name })), el("dd", { textContent: [one.description, one.default === undefined ? "" : `default ${JSON.stringify(one.default)}`].filter(Boolean).join("; ") || one.type || "–" })])));
}

async function capacity(kind, refresh) {
  const done = await action({
    title: `GPUs of ${kind.id}`,
    says: ["All runs of the server share so many, by their projects' weights. A lowered number drains what exceeds a run's share. Empty: nobody need share."],
    fields: [{ name: "gpus", label: "GPUs for all runs together", type: "number", min: 0, step: 1, value: kind.gpus ?? "" }],
    verb: "Set",
    act: ({ gpus }, key) => edit(`/v1/providers/${kind.id}`, { gpus }, key),
  });
  if (done) await refresh();
}

export function showProviders(main, { signal, wrong }) {
  let timer = 0;
  const columns = [
    { title: "Kind", of: (kind) => kind.id },
    { title: "Runs", number: true, of: (kind) => count(kind.runs) },
    { title: "Ready", number: true, of: (kind) => count(kind.ready) },
    { title: "Booting", number: true, of: (kind) => count(kind.booting) },
    { title: "Preempted", number: true, of: (kind) => count(kind.preemptions) },
    { title: "$/hour", number: true, of: (kind) => usd(kind.usd_per_hour) },
    { title: "Shared GPUs", number: true, of: (kind) => (kind.gpus === null ? "no limit" : count(kind.gpus)) },
    { title: "", head: el("span", { className: "hidden", textContent: "Actions" }), of: (kind) => may("server:write") && button("Capacity", () => capacity(kind, refresh).catch(wrong)) },
    { title: "Settings", wide: true, of: settingsOf },
  ];
  const kinds = table(columns, { label: "Providers", empty: "No provider is installed.", id: "providers" });
  const holding = table([
    { title: "Run", of: ([run]) => [el("a", { href: `#/runs/${run.id}/workers`, textContent: run.name, title: run.id }), el("span", { className: "soft", textContent: ` …${run.id.slice(-6)}` })] },
    { title: "Provider", of: ([, name]) => name },
    { title: "GPUs", number: true, of: ([, , one]) => count(one.gpus) },
    { title: "Ready", number: true, of: ([, , one]) => count(one.ready) },
    { title: "Preempted", number: true, of: ([, , one]) => count(one.preemptions) },
    { title: "$/GPU-hour now", number: true, of: ([, , one]) => usd(one.gpus ? one.usd_per_hour / one.gpus : null) },
    { title: "Tokens", number: true, of: ([, , one]) => count(one.tokens) },
    { title: "Cost", number: true, of: ([, , one]) => usd(one.usd) },
    { title: "Tokens for a dollar", number: true, of: ([, , one]) => (one.usd > 0 ? count(one.tokens / one.usd) : one.tokens ? "free" : "–") },
  ], { label: "What runs have", empty: "No living run has anything of a provider.", id: "held" });
  const more = soft();
  const offers = offersOver(signal);
  const problem = el("div");
  const chosen = el("select", { id: "offered" });
  const offered = section("Offers over time", el("p", {}, labelled("Of run", chosen)), problem, offers.node);
  offered.hidden = true;
  let living = [];
  const showOffers = () => reading(problem, async () => {
    const run = living.find((one) => one.id === chosen.value);
    if (run) await offers.show(run.id, run.figures.elapsed_s);
    problem.replaceChildren();
  });
  chosen.onchange = () => showOffers().catch(wrong);
  fill(main, el("h1", { textContent: "Providers" }), kinds.node, section("What living runs have for their money", holding.node, more), offered, soft("What each lease gave for its money, why it ended, and what was offered to runs that are over stands with each run, under Workers."));

  function choose(runs) {
    const before = chosen.value;
    if (runs.map((one) => one.id).join() !== living.map((one) => one.id).join()) {
      fill(chosen, runs.map((one) => el("option", { value: one.id, textContent: `${one.name} …${one.id.slice(-6)}` })));
      if (runs.some((one) => one.id === before)) chosen.value = before;
    }
    living = runs;
    offered.hidden = runs.length === 0;
  }
  async function refresh() {
    const [found, runs] = await Promise.all([get("/v1/providers", signal), listed("/v1/runs", { phase: ["starting", "running", "restarting", "stopping"] }, signal, 200)]);
    kinds.show(found.data);
    holding.show(runs.data.filter((run) => !ENDED.has(run.phase)).flatMap((run) => Object.entries(run.figures.providers).map(([name, one]) => [run, name, one])));
    choose(runs.data.filter((run) => !ENDED.has(run.phase)));
    await showOffers();
    fill(more, runs.more ? "Older runs are not shown." : "");
  }
  // A list of settings that is open stays as it is.
  listen((what) => {
    if (what.kind === "lost" || what.kind === "up" || timer) return;
    timer = setTimeout(() => {
      timer = 0;
      if (!document.hidden && !main.querySelector("details[open], dialog[open]")) refresh().catch(wrong);
    }, REFRESH_MS);
  }, signal);
  signal.addEventListener("abort", () => clearTimeout(timer));
  return refresh();
}
