// A run, or a job of a pool, is submitted: checked first, with what it would hold and cost; then for good.
import { Refused, ask, get, newKey } from "./data.js";
import { button, el, fill, labelled, section, soft, withCode } from "./dom.js";
import { labelsAsText, labelsOf } from "./labels.js";
import { asText } from "./run_configuration.js";
import { table } from "./tables.js";
import { tomlOf } from "./toml.js";
import { count, duration, usd } from "./units.js";

const EXAMPLE = { run: { name: "frozenlake", steps: 100 }, model: { checkpoint: "policy" }, providers: { spot: { trace: "rlboost-a", max_workers: 2 } } };
const JOB = { slo: 2, rollout_memory_gb: 1, train_memory_gb: 1, plan: { rollout_s: 10, train_s: 10 } };

const ACQUIRES = [
  { title: "Provider", of: (one) => one.provider },
  { title: "Workers at most", number: true, of: (one) => count(one.max_workers) },
  { title: "GPUs each", number: true, of: (one) => count(one.gpus_per_worker) },
  { title: "$/GPU-hour", number: true, of: (one) => (one.usd_per_gpu_hour === null ? "only its vendor says" : usd(one.usd_per_gpu_hour)) },
  { title: "$/hour at most", number: true, of: (one) => usd(one.usd_per_hour_max) },
];

/** Values by their keys, such as run.steps, as the sections of a configuration. */
export function sectionsOf(differences) {
  const found = {};
  for (const [key, value] of Object.entries(differences)) {
    const names = key.split(".");
    const last = names.pop();
    let place = found;
    for (const name of names) place = Object.hasOwn(place, name) ? place[name] : (place[name] = {});
    place[last] = value;
  }
  return found;
}

const names = (text) => text.split(",").map((one) => one.trim()).filter(Boolean);

/** What is written as the sections of a configuration: TOML as it stands, or JSON. */
function configOf(text) {
  if (!text.trim().startsWith("{")) return text;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Refused({ detail: `The configuration is no JSON: ${error.message}` });
  }
}

/** What a run would do, in lines and a table. */
function runWould(would, asked) {
  const acquires = table(ACQUIRES, { label: "What it would acquire", empty: "It acquires nothing besides its trainer." });
  acquires.show(would.would_acquire);
  const lines = [
    `It would run for ${would.config.run.steps} steps as ${would.config.run.name}.`,
    `It would cost ${usd(would.usd_per_hour_max)} an hour at most${asked.budget_usd === undefined ? ", without a budget" : `, and ${usd(asked.budget_usd)} in all`}.`,
    would.would_call ? `It would call functions: ${asText(would.would_call)}.` : "",
    ...would.warnings,
  ];
  return [lines, acquires.node];
}

const REFUSALS = [
  { title: "Group", of: (one) => one.group },
  { title: "Why not there", wide: true, of: (one) => one.reason },
  { title: "It needs", number: true, of: (one) => count(one.needed) },
  { title: "Allowed", number: true, of: (one) => count(one.allowed) },
];

/** Where a job would go. */
function jobWould(would) {
  const { placement } = would;
  const refusals = table(REFUSALS, { label: "Groups that cannot take it", empty: "No group refuses it." });
  refusals.show(would.refusals);
  const fresh = placement && [[placement.new_rollout, "rollout"], [placement.new_train, "training"]].filter(([number]) => number).map(([number, kind]) => `${number} ${kind}`).join(" and ");
  const lines = placement
    ? [
        `It would go to ${placement.group === null ? "a new group" : `group ${placement.group}`}${fresh ? `, with ${fresh} nodes more` : ""}.`,
        `That costs ${usd(placement.usd_per_hour)} an hour more; its cycle would be ${duration(placement.cycle_s)}, its slowdown ${placement.planned_slowdown.toFixed(2)} of ${would.slo.toFixed(2)}.`,
      ]
    : [`It would wait in the queue: ${would.why}`];
  return [lines, refusals.node];
}

export async function showSubmit(main, { signal, parts: [like], query, wrong, go }) {
  const [former, pools, example] = await Promise.all([like ? get(`/v1/runs/${like}`, signal) : null, get("/v1/pools", signal), like ? null : get("/v1/runs/example", signal)]);
  if (signal.aborted) return;
  const pooled = pools.data.find((one) => one.id === query.get("pool"))?.id ?? "";
  const sections = former ? sectionsOf(former.differences) : (example.submission?.config ?? EXAMPLE);
  const config = el("textarea", { id: "config", spellcheck: false, value: tomlOf(pooled && !sections.job ? { ...sections, job: JOB } : sections) });
  const where = el("select", { id: "where" }, [["", "as a run of its own"], ...pools.data.map(({ id }) => [id, `as a job of pool ${id}`])].map(([value, text]) => el("option", { value, textContent: text, selected: value === pooled })));
  const providers = el("input", { id: "providers", value: (former?.providers ?? example.submission?.providers ?? ["spot"]).join(", ") });
  const labels = el("input", { id: "labels", value: labelsAsText(former?.labels ?? {}), placeholder: "team=agents" });
  const budget = el("input", { id: "budget", type: "number", min: 0, step: "any", value: former?.budget_usd ?? "" });
  const ofRuns = [labelled("Labels", labels), labelled("Budget in dollars", budget)];
  const found = el("div", { id: "found", ariaLive: "polite" });
  let [checked, key] = [null, ""];

  /** Where it is asked for, and with what. */
  function asked() {
    const own = where.value || budget.value === "" ? {} : { budget_usd: Number(budget.value) };
    const body = { config: configOf(config.value), providers: names(providers.value), ...(where.value ? {} : { labels: labelsOf(labels.value) }), ...own };
    return { pool: where.value, place: where.value ? `/v1/pools/${where.value}/jobs` : "/v1/runs", body };
  }
  const refused = (error) => {
    if (!(error instanceof Refused) || ["unauthenticated", "stale-page"].includes(error.type)) {
      wrong(error);
      return;
    }
    fill(found, el("p", { className: "wrong", role: "alert" }, error.lines.map((line) => el("span", { textContent: line }))));
  };
  const submit = button("Submit", async () => {
    try {
      const made = await ask("POST", checked.place, { body: checked.body, idempotencyKey: key });
      go(checked.pool ? `#/pools/${checked.pool}` : `#/runs/${made.id}`);
    } catch (error) {
      refused(error);
    }
  }, { id: "submit", className: "first", hidden: true });
  const check = button("Check", async () => {
    submit.hidden = true;
    try {
      const now = asked();
      const would = await ask("POST", `${now.place}/dry-run`, { body: now.body });
      [checked, key] = [now, newKey()];
      const [lines, more] = now.pool ? jobWould(would) : runWould(would, now.body);
      fill(found, section("What it would do", el("ul", { className: "says" }, lines.filter(Boolean).map((line) => el("li", { textContent: line }))), more));
      submit.hidden = false;
    } catch (error) {
      refused(error);
    }
  }, { id: "check", className: "first" });

  // What was checked is what is submitted.
  function changed() {
    for (const one of ofRuns) one.hidden = where.value !== "";
    submit.hidden = true;
    found.replaceChildren();
  }
  changed();
  const form = el("form", { onsubmit: (event) => event.preventDefault(), oninput: changed }, el("label", { className: "above" }, el("span", { textContent: "Configuration: the text of a configuration file (TOML), or its sections as JSON" }), config), el("div", { className: "filters" }, pools.data.length ? labelled("Submit it", where) : null, labelled("Providers", providers), ofRuns));
  fill(main, el("h1", { textContent: former ? `A run like ${former.name}` : "Submit a run" }), soft("It is checked first: nothing is started or kept before you submit it."), example && soft(withCode(example.says)), form, el("p", { className: "buttons" }, check, submit), found);
}
