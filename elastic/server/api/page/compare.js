// Several runs beside one another: their curves over one axis, and what their configurations have different.
import { chart, styleOf, swatch } from "./charts.js";
import { Refused, get } from "./data.js";
import { el, fill, labelled, section, soft } from "./dom.js";
import { listen } from "./live.js";
import { phaseOf } from "./run.js";
import { axisChoice } from "./run_charts.js";
import { asText } from "./run_configuration.js";
import { STEP_CHARTS, Series, linesOf } from "./series.js";
import { table } from "./tables.js";
import * as units from "./units.js";

const REFRESH_MS = 3000;

/** All places of all runs in order, and each run's values at them; null where a run has none. */
export function merged(runs) {
  const all = [...new Set(runs.flatMap((one) => one.places))].sort((a, b) => a - b);
  const at = new Map(all.map((place, n) => [place, n]));
  const values = runs.map((one) => {
    const row = new Array(all.length).fill(null);
    one.places.forEach((place, n) => {
      row[at.get(place)] = one.values[n];
    });
    return row;
  });
  return [all, values];
}

/** Keys whose values are not the same in all of them, with each one's. */
export function different(found) {
  const keys = [...new Set(found.flatMap((one) => Object.keys(one)))].sort();
  return keys.map((key) => [key, found.map((one) => (key in one ? asText(one[key]) : ""))]).filter(([, values]) => new Set(values).size > 1);
}

export function showCompare(main, { signal, parts: [ids], wrong }) {
  const wanted = [...new Set(ids.split(","))].slice(0, 8);
  const runs = [];
  const missing = el("div");
  const heads = el("div", { id: "compared" });
  const body = el("div", { className: "charts" });
  const differences = el("div", { id: "differences" });
  let axis = "step";
  let lost = [];
  let timer = 0;
  const choice = axisChoice((value) => {
    axis = value;
    draw();
  });
  const usd = { title: "Cost", unit: "usd", lines: {}, cost: true };
  const charts = [...STEP_CHARTS, usd].map((said) => ({ said, chart: chart({ title: said.title, unit: units[said.unit], sync: "compare" }, signal) }));
  fill(body, charts.map((one) => one.chart.node));
  fill(main, el("div", { className: "row" }, el("h1", { textContent: "Runs compared" }), labelled("over", choice)), missing, heads, body, section("What is different", differences));

  // Runs of one name are told apart by their ids.
  const nameOf = (run) => (runs.filter((one) => one.run.name === run.name).length > 1 ? `${run.name} …${run.id.slice(-6)}` : run.name);

  function draw() {
    const bare = runs.filter(({ series }) => !series.steps.length && !series.samples.length).map(({ run }) => nameOf(run));
    fill(missing, lost.length ? soft(`These cannot be shown: ${lost.join(", ")}.`) : null, bare.length ? soft(`There are no figures yet of ${bare.join(", ")}.`) : null);
    for (const { said, chart: one } of charts) {
      const labels = said.cost ? ["cost"] : Object.keys(said.lines);
      const lines = runs.flatMap(({ run, series, place }) => {
        const own = said.cost ? [{ label: "cost", values: series.costs() }] : linesOf({ lines: said.lines }, series.steps);
        return own.map((line, n) => ({ ...line, label: labels.length > 1 ? `${nameOf(run)}: ${line.label}` : nameOf(run), colour: styleOf(place).colour, dash: styleOf(place + n).dash, places: series.places(axis) }));
      });
      const [places, values] = merged(lines);
      one.set(places, lines.map((line, n) => ({ ...line, values: values[n] })), { axis });
    }
  }

  function tell() {
    const columns = [
      { title: "Run", of: ({ run, place }) => [swatch(styleOf(place)), el("a", { href: `#/runs/${run.id}`, textContent: run.name }), el("span", { className: "soft", textContent: ` …${run.id.slice(-6)}` })] },
      { title: "Phase", of: ({ run }) => phaseOf(run) },
      { title: "Step", number: true, of: ({ run }) => `${run.figures.step}/${run.figures.steps}` },
      { title: "Reward", number: true, of: ({ run }) => units.reward(run.figures.last_mean_reward) },
      { title: "Time", number: true, of: ({ run }) => units.duration(run.figures.elapsed_s) },
      { title: "Cost", number: true, of: ({ run }) => units.usd(run.figures.usd) },
    ];
    const made = table(columns, { label: "Runs compared", id: "runs-compared" });
    made.show(runs);
    fill(heads, made.node);
    const found = different(runs.map(({ run }) => run.differences));
    const rows = table([{ title: "Key", of: ([key]) => el("code", { textContent: key }) }, ...runs.map(({ run }, n) => ({ title: `${run.name} …${run.id.slice(-6)}`, wide: true, of: ([, values]) => (values[n] === "" ? el("span", { className: "soft", textContent: "default" }) : el("code", { textContent: values[n] })) }))], { label: "Differences", empty: "Their configurations are the same.", id: "differing" });
    rows.show(found);
    fill(differences, rows.node);
  }

  async function refresh() {
    await Promise.all(runs.map(({ run, series }) => series.refresh(signal, run.figures.step).catch((error) => {
      if (!(error instanceof Refused)) throw error;
    })));
    draw();
  }

  listen((what) => {
    const one = what.kind === "run" && runs.find(({ run }) => run.id === what.run.id);
    if (!one && what.kind !== "anew") return;
    if (one) one.run = { ...one.run, ...what.run };
    timer = timer || setTimeout(() => {
      timer = 0;
      tell();
      refresh().catch(wrong);
    }, REFRESH_MS);
  }, signal);
  signal.addEventListener("abort", () => clearTimeout(timer));

  return (async () => {
    const found = await Promise.allSettled(wanted.map((id) => get(`/v1/runs/${id}`, signal)));
    lost = wanted.filter((_, n) => found[n].status === "rejected");
    for (const one of found) if (one.status === "fulfilled") runs.push({ run: one.value, series: new Series(one.value.id), place: runs.length });
    tell();
    await refresh();
  })();
}
