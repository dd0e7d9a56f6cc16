// What one may do with a run, and what it will do, said before.
import { action, edit } from "./actions.js";
import { ask } from "./data.js";
import { labelsAsText, labelsOf } from "./labels.js";
import { ENDED, many, readyWorkers, usd } from "./units.js";

const over = (run) => ENDED.has(run.phase);

function holds(run) {
  const { figures } = run;
  const rate = Object.values(figures.providers).reduce((sum, one) => sum + one.usd_per_hour, 0);
  return `It is at step ${figures.step} of ${figures.steps}, holds ${many(readyWorkers(figures), "worker")} (${usd(rate)} an hour), and has cost ${usd(figures.usd)}.`;
}

const told = (show) => (run) => (run && run !== true ? show(run) : null);

async function stop({ place, run }, { show }) {
  await action({
    title: `Stop ${run.name}?`,
    says: [holds(run), "It makes a checkpoint at the end of what it does now, gives everything back, and ends as stopped.", "It can be resumed from there."],
    fields: [{ name: "force", label: "At once, without a checkpoint: what was done since the last one is done again", type: "checkbox" }],
    verb: "Stop",
    danger: true,
    act: ({ force }, idempotencyKey) => ask("POST", `${place}/stop`, { body: { force }, idempotencyKey }),
  }).then(told(show));
}

async function resume({ place, run }, { show }) {
  const finished = run.phase === "finished";
  await action({
    title: `Resume ${run.name}?`,
    says: [`It goes on from step ${run.figures.step}, from its journal or its last checkpoint, and acquires of: ${run.providers.join(", ") || "its trainer alone"}.`],
    fields: [
      { name: "steps", label: `Train up to this many steps (now ${run.figures.steps})`, type: "number", min: 1, step: 1, required: finished },
      { name: "budget_usd", label: `Budget in dollars, all that it has cost included (now ${run.budget_usd === null ? "none" : usd(run.budget_usd)})`, type: "number", min: 0 },
    ],
    verb: "Resume",
    act: ({ steps, budget_usd }, idempotencyKey) => ask("POST", `${place}/resume`, { body: { ...(steps === null ? {} : { steps }), ...(budget_usd === null ? {} : { budget_usd }) }, idempotencyKey }),
  }).then(told(show));
}

async function budget({ place, run }, { show }) {
  await action({
    title: `Budget of ${run.name}`,
    says: [holds(run), "Once what it costs if it is stopped comes to the budget, it stops with a checkpoint. A living run hears of it at once."],
    fields: [{ name: "budget_usd", label: "Budget in dollars, all that it has cost included", type: "number", min: 0, value: run.budget_usd ?? "", required: true }],
    verb: "Set budget",
    act: ({ budget_usd }, idempotencyKey) => edit(place, { budget_usd }, idempotencyKey),
  }).then(told(show));
}

async function caps({ place, run }, { show }) {
  await action({
    title: `Caps of ${run.name}`,
    says: ["The most GPUs at once, by provider. Above a cap nothing is acquired, and what exceeds it drains: its turns move, none is lost.", "0 drains the provider. Empty is no cap."],
    fields: run.providers.map((name) => ({ name, label: `${name} (holds ${run.figures.providers[name]?.gpus ?? 0})`, type: "number", min: 0, step: 1, value: run.caps[name] ?? "" })),
    verb: "Set caps",
    act: (values, idempotencyKey) => edit(place, { caps: Object.fromEntries(Object.entries(values).filter(([, gpus]) => gpus !== null)) }, idempotencyKey),
  }).then(told(show));
}

async function labels({ place, run }, { show }) {
  await action({
    title: `Labels of ${run.name}`,
    says: ["Runs are found by their labels; they change nothing of how the run goes."],
    fields: [{ name: "labels", label: "NAME=VALUE, with commas between them", value: labelsAsText(run.labels) }],
    verb: "Set labels",
    act: (values, idempotencyKey) => edit(place, { labels: labelsOf(values.labels) }, idempotencyKey),
  }).then(told(show));
}

async function remove({ id, place, run }, { go }) {
  const gone = await action({
    title: `Delete ${run.name}?`,
    says: [`${id}: its journal, trajectories, checkpoints, logs and report are gone for good.`],
    verb: "Delete",
    danger: true,
    act: (_, idempotencyKey) => ask("DELETE", place, { idempotencyKey }),
  });
  if (gone) go("#/");
}

export const RUN_ACTIONS = [
  { text: "Stop", when: (run) => !over(run) && run.phase !== "stopping", act: stop },
  { text: "Resume", when: over, act: resume },
  { text: "Budget", when: () => true, act: budget },
  { text: "Caps", when: (run) => run.providers.length > 0, act: caps },
  { text: "Labels", when: () => true, act: labels },
  { text: "Submit another", when: () => true, act: async ({ id }, { go }) => go(`#/submit/${id}`) },
  { text: "Delete", when: over, act: remove },
];
