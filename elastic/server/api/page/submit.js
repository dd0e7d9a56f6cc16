// A run is submitted: checked first, with what it would hold and cost; then for good.
import { Refused, ask, get, newKey } from "./data.js";
import { button, el, fill, labelled, section, soft } from "./dom.js";
import { asText } from "./run_configuration.js";
import { table } from "./tables.js";
import { count, usd } from "./units.js";

const EXAMPLE = { run: { name: "frozenlake", steps: 100 }, model: { checkpoint: "policy" }, providers: { spot: { trace: "rlboost-a", max_workers: 2 } } };

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

const pairs = (text) => Object.fromEntries(text.split(",").map((one) => one.trim()).filter(Boolean).map((one) => [one.split("=")[0].trim(), one.split("=").slice(1).join("=").trim()]));
const names = (text) => text.split(",").map((one) => one.trim()).filter(Boolean);

export async function showSubmit(main, { signal, parts: [like], wrong, go }) {
  const former = like ? await get(`/v1/runs/${like}`, signal) : null;
  const config = el("textarea", { id: "config", spellcheck: false, value: JSON.stringify(former ? sectionsOf(former.differences) : EXAMPLE, null, 2) });
  const providers = el("input", { id: "providers", value: (former?.providers ?? ["spot"]).join(", ") });
  const labels = el("input", { id: "labels", value: former ? Object.entries(former.labels).map((one) => one.join("=")).join(", ") : "", placeholder: "team=agents" });
  const budget = el("input", { id: "budget", type: "number", min: 0, step: "any", value: former?.budget_usd ?? "" });
  const found = el("div", { id: "found", ariaLive: "polite" });
  let [checkedBody, key] = ["", ""];

  function body() {
    let sections;
    try {
      sections = JSON.parse(config.value);
    } catch (error) {
      throw new Refused({ detail: `The configuration is no JSON: ${error.message}` });
    }
    const own = budget.value === "" ? {} : { budget_usd: Number(budget.value) };
    return { config: sections, providers: names(providers.value), labels: pairs(labels.value), ...own };
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
      const made = await ask("POST", "/v1/runs", { body: JSON.parse(checkedBody), idempotencyKey: key });
      go(`#/runs/${made.id}`);
    } catch (error) {
      refused(error);
    }
  }, { id: "submit", className: "first", hidden: true });
  const check = button("Check", async () => {
    submit.hidden = true;
    try {
      const asked = body();
      const would = await ask("POST", "/v1/runs/dry-run", { body: asked });
      [checkedBody, key] = [JSON.stringify(asked), newKey()];
      show(would, asked);
      submit.hidden = false;
    } catch (error) {
      refused(error);
    }
  }, { id: "check", className: "first" });

  function show(would, asked) {
    const acquires = table(ACQUIRES, { label: "What it would acquire", empty: "It acquires nothing besides its trainer." });
    acquires.show(would.would_acquire);
    fill(
      found,
      section(
        "What it would do",
        el("ul", { className: "says" }, [
          `It would run for ${would.config.run.steps} steps as ${would.config.run.name}.`,
          `It would cost ${usd(would.usd_per_hour_max)} an hour at most${asked.budget_usd === undefined ? ", without a budget" : `, and ${usd(asked.budget_usd)} in all`}.`,
          would.would_call ? `It would call functions: ${asText(would.would_call)}.` : "",
          ...would.warnings,
        ].filter(Boolean).map((line) => el("li", { textContent: line }))),
        acquires.node,
      ),
    );
  }
  // What was checked is what is submitted.
  const form = el("form", { onsubmit: (event) => event.preventDefault(), oninput: () => {
    submit.hidden = true;
    found.replaceChildren();
  } }, el("label", { className: "above" }, el("span", { textContent: "Configuration: the sections of a configuration file, as JSON" }), config), el("div", { className: "filters" }, labelled("Providers", providers), labelled("Labels", labels), labelled("Budget in dollars", budget)));
  if (!signal.aborted) fill(main, el("h1", { textContent: former ? `A run like ${former.name}` : "Submit a run" }), soft("It is checked first: nothing is started or kept before you submit it."), form, el("p", { className: "buttons" }, check, submit), found);
}
