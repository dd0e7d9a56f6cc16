// The curves of a run, in the order in which people read them.
import { chart, providerColours, styleOf } from "./charts.js";
import { el, fill, labelled, soft } from "./dom.js";
import { STEP_CHARTS, Series, linesOf } from "./series.js";
import { reading, table } from "./tables.js";
import * as units from "./units.js";

const AXES = { step: "steps", time: "time", tokens: "tokens", usd: "dollars" };

export function axisChoice(changed) {
  const choice = el("select", { id: "axis" }, Object.entries(AXES).map(([value, text]) => el("option", { value, textContent: text })));
  choice.onchange = () => changed(choice.value);
  return choice;
}

const PROVIDERS = [
  { title: "Provider", of: ([name]) => name },
  { title: "Ready", number: true, of: ([, one]) => units.count(one.ready) },
  { title: "Booting", number: true, of: ([, one]) => units.count(one.booting) },
  { title: "Turns", number: true, of: ([, one]) => `${one.running_turns}/${one.capacity_turns}` },
  { title: "Tokens", number: true, of: ([, one]) => units.count(one.tokens) },
  { title: "Preempted", number: true, of: ([, one]) => units.count(one.preemptions) },
  { title: "Died", number: true, of: ([, one]) => (one.deaths ? `${one.deaths}, ${one.replaced} replaced` : "0") },
  { title: "Cost", number: true, of: ([, one]) => units.usd(one.usd) },
  { title: "$/hour", number: true, of: ([, one]) => units.usd(one.usd_per_hour) },
];

/** Moments at which more preemptions or deaths are counted than before. */
function losses(samples) {
  const lost = (one) => Object.values(one.providers).reduce((sum, it) => sum + it.preemptions + it.deaths, 0);
  return samples.filter((one, n) => n > 0 && lost(one) > lost(samples[n - 1])).map((one) => ({ at: one.elapsed_s, kind: "preemption or death" }));
}

export function showCharts(body, view) {
  const { id, signal } = view;
  const series = new Series(id);
  const made = (options) => chart({ sync: "run", ...options }, signal);
  const steps = STEP_CHARTS.map((said) => ({ said, chart: made({ title: said.title, unit: units[said.unit] }) }));
  const time = (title, options) => made({ title, axis: "time", sync: "run-time", ...options });
  const speed = time("Throughput by provider (tokens/s)", { stacked: true });
  const workers = time("Workers by provider", { stacked: true });
  const cost = time("Cost", { unit: units.usd, stacked: false });
  const price = time("Price ($/GPU-hour)", { unit: units.usd });
  const load = time("Trajectories and queued turns", {});
  const evaluations = ["avg@", "pass@"].map((begin) => ({ begin, chart: chart({ title: `Evaluation: ${begin}k`, unit: units.reward, axis: "version" }, signal) }));
  const providers = table(PROVIDERS, { label: "Providers", empty: "No provider has anything of this run yet.", id: "providers" });
  const none = soft("There are no figures yet: they come with the run's first moments.");
  let axis = "step";
  const choice = axisChoice((value) => {
    axis = value;
    drawSteps();
  });
  const problem = el("div");
  fill(
    body,
    problem,
    el("div", { className: "charts wide" }, speed.node, workers.node),
    el("div", { className: "row" }, el("h2", { textContent: "Learning" }), labelled("over", choice)),
    none,
    el("div", { className: "charts" }, steps.slice(0, 2).map((one) => one.chart.node), evaluations.map((one) => one.chart.node), steps.slice(2).map((one) => one.chart.node), cost.node, price.node, load.node),
    el("h2", { textContent: "Providers" }),
    providers.node,
  );

  function drawSteps() {
    const places = series.places(axis);
    for (const { said, chart: one } of steps) one.set(places, linesOf(said, series.steps).map((line, n) => ({ ...line, ...styleOf(n) })), { axis });
  }

  function draw(run) {
    none.hidden = series.steps.length > 0;
    if (series.samples.length) fill(none, "No step has ended yet: these curves begin with the first.");
    drawSteps();
    const [times, names] = [series.times(), series.providers()];
    const colours = providerColours(names);
    const each = (values) => names.map((name, n) => ({ label: name, colour: colours[name], dash: styleOf(n).dash, values: values(name) }));
    const marks = losses(series.samples);
    speed.set(times, each((name) => series.speed(name)), { marks });
    workers.set(times, each((name) => series.of(name, (one) => one.ready)), { marks });
    const budget = run.budget_usd === null ? [] : [{ label: "budget", colour: "bad", dash: [6, 3], values: times.map(() => run.budget_usd) }];
    cost.set(times, [{ label: "all", ...styleOf(0), values: series.samples.map((one) => one.usd) }, ...budget]);
    price.set(times, each((name) => series.price(name)));
    load.set(times, [{ label: "trajectories", ...styleOf(0), values: series.samples.map((one) => one.trajectories_running) }, { label: "queued turns", ...styleOf(1), values: series.samples.map((one) => one.queued_turns) }]);
    for (const one of evaluations) drawEvaluations(one, series.evaluations);
  }

  return {
    show: (run) => providers.show(Object.entries(run.figures.providers)),
    refresh: () =>
      reading(problem, async () => {
        const news = await series.refresh(signal, view.run?.figures.step ?? 0);
        await view.known;
        series.reached = view.run.figures.step;
        problem.replaceChildren();
        if (news) draw(view.run);
      }),
  };
}

function drawEvaluations({ begin, chart: one }, found) {
  const names = [...new Set(found.flatMap((it) => Object.keys(it.metrics)))].filter((name) => name.startsWith(begin));
  const best = found.filter((it) => it.best).map((it) => ({ at: it.version, kind: "best so far" })).slice(-1);
  one.set(found.map((it) => it.version), names.map((name, n) => ({ label: name, ...styleOf(n), values: found.map((it) => it.metrics[name]?.mean ?? null) })), { axis: "version", marks: best });
}
