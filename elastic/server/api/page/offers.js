// What providers have offered a run over time: at which price, and how much of it there was to be had.
import { chart, providerColours, styleOf } from "./charts.js";
import { listed } from "./data.js";
import { el, fill, soft } from "./dom.js";
import { count, usd } from "./units.js";

/** The value that holds at each of these moments: that of the last change. */
function held(times, moments, value) {
  let last = -1;
  return times.map((at) => {
    while (last + 1 < moments.length && moments[last + 1].at_s <= at) last += 1;
    return last < 0 ? null : value(moments[last]);
  });
}

/** Two charts; `show` reads a run's offers into them, up to that moment of it. */
export function offersOver(signal) {
  const made = (title, unit) => chart({ title, unit, axis: "time", stepped: true, sync: "offers" }, signal);
  const price = made("Asked for a GPU-hour", usd);
  const room = made("GPUs to be had besides those held", count);
  const about = soft("Reading …");
  for (const one of [price, room]) one.node.hidden = true;
  const node = el("div", {}, el("div", { className: "charts wide" }, price.node, room.node), about);

  async function show(run, until) {
    const { data } = await listed(`/v1/runs/${run}/offers`, {}, signal);
    const times = [...new Set(data.flatMap((one) => one.moments.map((moment) => moment.at_s)))].sort((a, b) => a - b);
    if (times.length && until > times.at(-1)) times.push(until);
    const colours = providerColours(data.map((one) => one.id));
    const each = (value) => data.map((one, n) => ({ label: one.id, colour: colours[one.id], dash: styleOf(n).dash, values: held(times, one.moments, (moment) => value(moment, one)) }));
    price.set(times, each((moment) => moment.usd_per_gpu_hour));
    room.set(times, each((moment, one) => moment.available * one.gpus_per_lease));
    if (signal.aborted) return;
    fill(about, data.length ? "" : "This run's journal has no offer yet.");
  }
  return { node, show };
}
