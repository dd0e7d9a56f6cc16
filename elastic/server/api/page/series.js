// A run's series: read once, thinned, and then what is new of them. Over steps, time, tokens or dollars.
import { get } from "./data.js";

const MOST = 600;

/** The value of a rising series at a place of another one, between its neighbours. */
function between(places, values, at) {
  if (!places.length) return null;
  let [low, high] = [0, places.length - 1];
  if (at <= places[0]) return values[0];
  if (at >= places[high]) return values[high];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (places[middle] <= at) low = middle;
    else high = middle;
  }
  const span = places[high] - places[low];
  return span > 0 ? values[low] + ((values[high] - values[low]) * (at - places[low])) / span : values[high];
}

const tokensOf = (sample) => Object.values(sample.providers).reduce((sum, one) => sum + one.tokens, 0);

export class Series {
  constructor(run) {
    this.run = run;
    this.clear();
  }

  clear() {
    this.steps = [];
    this.samples = [];
    this.evaluations = [];
    this.total = 0;
    this.reached = 0;
  }

  /** Read what is new. Whole anew where it has become more than is drawn, and where the run has gone back. */
  async refresh(signal, reached) {
    if (this.total > 2 * MOST || reached < this.reached) this.clear();
    this.reached = reached;
    const query = new URLSearchParams({ samples: String(MOST), steps: String(MOST) });
    const [step, sample] = [this.steps.at(-1), this.samples.at(-1)];
    if (step) query.set("after_step", String(step.step));
    if (sample) query.set("after_s", String(sample.elapsed_s));
    const found = await get(`/v1/runs/${this.run}/metrics?${query}`, signal);
    this.steps.push(...found.steps);
    // A clock that was set back makes moments that come before earlier ones: those are not drawn.
    for (const one of found.samples) if (one.elapsed_s > (this.samples.at(-1)?.elapsed_s ?? -1)) this.samples.push(one);
    const evaluated = found.evaluations.length !== this.evaluations.length;
    this.evaluations = found.evaluations;
    this.total = Math.max(this.steps.length, this.samples.length);
    return evaluated || found.steps.length + found.samples.length > 0;
  }

  /** Where the steps are on an axis. */
  places(axis) {
    if (axis === "step") return this.steps.map((one) => one.step);
    if (axis === "time") return this.steps.map((one) => one.at_s);
    const at = this.samples.map((one) => one.elapsed_s);
    const values = this.samples.map(axis === "tokens" ? tokensOf : (one) => one.usd);
    return this.steps.map((one) => between(at, values, one.at_s) ?? one.step);
  }

  /** What the run had cost at each step's end. */
  costs() {
    const at = this.times();
    const usd = this.samples.map((one) => one.usd);
    return this.steps.map((one) => between(at, usd, one.at_s));
  }

  times() {
    return this.samples.map((one) => one.elapsed_s);
  }

  providers() {
    return [...new Set(this.samples.flatMap((one) => Object.keys(one.providers)))].sort();
  }

  /** What a provider's figures were at each moment. */
  of(provider, value) {
    return this.samples.map((one) => (one.providers[provider] ? value(one.providers[provider]) : 0));
  }

  /** What a provider asked for a GPU-hour of what it held, at each moment. */
  price(provider) {
    return this.samples.map((one) => (one.providers[provider]?.gpus ? one.providers[provider].usd_per_hour / one.providers[provider].gpus : null));
  }

  /** Tokens a second between moments, of one provider. */
  speed(provider) {
    const tokens = this.of(provider, (one) => one.tokens);
    return this.samples.map((one, n) => {
      if (n === 0) return null;
      const span = one.elapsed_s - this.samples[n - 1].elapsed_s;
      return span > 0 ? Math.max(0, tokens[n] - tokens[n - 1]) / span : null;
    });
  }
}

const own = (name) => (step) => step.trainer[name] ?? null;

/** What is drawn step by step: titles, units, and what of a step each line shows. */
export const STEP_CHARTS = [
  { title: "Reward", unit: "reward", lines: { "mean reward": (step) => step.mean_reward } },
  { title: "Success (reward above 0)", unit: "percent", lines: { success: (step) => step.success_rate } },
  { title: "Length (policy tokens)", unit: "count", lines: { mean: (step) => step.tokens_mean, longest: (step) => step.tokens_max } },
  { title: "Truncated and failed", unit: "percent", lines: { truncated: (step) => step.truncated_share, failed: (step) => step.failed_share } },
  { title: "Entropy (nats a token)", unit: "count", lines: { entropy: own("entropy") } },
  { title: "Mismatch (KL, engines against trainer)", unit: "count", lines: { all: own("mismatch_kl") }, each: "mismatch_kl/" },
  { title: "Gradient norm", unit: "count", lines: { "gradient norm": own("gradient_norm") } },
  { title: "Staleness (versions)", unit: "count", lines: { mean: (step) => step.age_mean, oldest: (step) => step.age_max } },
  { title: "Groups", unit: "count", lines: { trained: (step) => step.groups_trained, dropped: (step) => step.groups_dropped } },
  { title: "Step time", unit: "duration", lines: { step: (step) => step.duration_s } },
];

/** The lines of a chart of a run: labels and values. */
export function linesOf(said, steps) {
  const found = Object.entries(said.lines).map(([label, of]) => ({ label, values: steps.map((step) => of(step) ?? null) }));
  if (!said.each) return found;
  const names = [...new Set(steps.flatMap((step) => Object.keys(step.trainer).filter((name) => name.startsWith(said.each))))].sort().slice(0, 6);
  return [...found, ...names.map((name) => ({ label: name.slice(said.each.length), values: steps.map((step) => step.trainer[name] ?? null) }))];
}
