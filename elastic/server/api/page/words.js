// Events of runs in words, and what a run waits for.
import { count, duration, many, usd } from "./units.js";

const NS = 1e9;
const seconds = (ns) => duration(ns / NS);
const due = (event, ns) => (ns === null || ns === undefined ? "" : ` in ${duration(Math.max(0, ns / NS - event.data.at_s))}`);
const because = (reason) => (reason ? `: ${reason}` : "");

const LEASE_ENDS = { preempted: "was preempted", expired: "ended by its time", released: "was given back", lost: "was lost", failed: "failed" };

const WORDS = {
  "lease.granted": ({ data }, event) => `Lease ${data.lease} is granted for ${data.workers.join(", ")}${data.expires_at_ns ? `, until${due(event, data.expires_at_ns)}` : ""}`,
  "lease.refused": ({ data }) => `Lease ${data.lease} is ${data.withdrawn ? "taken back" : "refused"}${because(data.reason)}`,
  "lease.notice": ({ data }, event) => `Lease ${data.lease} will be taken away${due(event, data.deadline_ns)}${because(data.reason)}`,
  "lease.repriced": ({ data }) => `Each worker of lease ${data.lease} has cost ${usd(data.usd)}, and costs ${usd(data.usd_per_gpu_hour)} a GPU-hour`,
  "strays.billed": ({ data }) => `${data.provider} bills ${usd(data.usd)} for what no lease had`,
  "offer.changed": ({ data }) => `${data.offer?.provider ?? "A provider"} offers something else`,
  "worker.joined": ({ data }) => `Worker ${data.worker} joins${data.epoch > 1 ? ` again, epoch ${data.epoch}` : ""}${data.weights_version === null ? "" : ` with version ${data.weights_version}`}`,
  "worker.disconnected": ({ data }) => `Worker ${data.worker} ${data.goodbye ? "says goodbye" : "is not connected any more"}`,
  "worker.barred": ({ data }) => `Worker ${data.worker} is barred${because(data.cause)}`,
  "worker.slept": ({ data }) => `Worker ${data.worker} sleeps`,
  "worker.awoke": ({ data }) => `Worker ${data.worker} is awake`,
  "weights.applied": ({ data }) => `Worker ${data.worker} serves version ${data.version}`,
  "weights.failed": ({ data }) => `Worker ${data.worker} cannot load version ${data.version}${because(data.reason)}`,
  "weights.published": ({ data }) => `The trainer publishes version ${data.version}${data.unusable?.length ? `; no gradient came from ${many(data.unusable.length, "group")}${because(data.reason)}` : ""}`,
  "trajectory.finished": ({ data }) => `Trajectory ${data.trajectory} ends with reward ${count(data.reward)} after ${many(data.tokens, "token")}`,
  "trajectory.failed": ({ data }) => `Trajectory ${data.trajectory} failed${because(data.cause)}`,
  "reward.failed": ({ data }) => `Attempt ${data.attempt} to score trajectory ${data.trajectory} failed${because(data.cause)}${data.retry_helps ? "; it is tried again" : ""}`,
  "group.trained": ({ data }) => `Group ${data.group} is trained on`,
  "trainer.failed": ({ data }) => `The trainer failed${because(data.error)}`,
  "version.offered": ({ data }) => `A version is offered${because(data.label)}`,
  "version.refused": ({ data }) => `Version ${data.version} is refused${because(data.reason)}`,
  "turns.held": ({ data }) => (data.held ? "Turns that wait are held" : "Turns are no longer held"),
  "permit.granted": () => "The trainer may compute on the shared device",
  "permit.recalled": () => "The trainer is to give way on the shared device",
  "permit.ended": ({ data }) => `Others compute on the shared device${because(data.cause)}`,
  "stop.requested": ({ data }) => `The run is to end${because(data.reason)}`,
  "stop.commanded": ({ data }) => (data.undone ? "An order to stop was undone" : `The run is told to stop${because(data.reason)}`),
  "cap.set": ({ data }) => (data.gpus === null ? `No cap on ${data.provider} any more` : `${data.provider} is capped at ${data.gpus} GPUs`),
  "budget.set": ({ data }) => (data.usd === null ? "The run has no budget any more" : `The budget is ${usd(data.usd)}`),
  "budget.exhausted": ({ data }) => `The budget has come to its end${because(data.cause)}`,
  "cost.carried": ({ data }) => `Earlier processes of the run have cost ${usd(data.nano_usd / 1e9)}`,
  "evaluations.carried": () => "Evaluations of earlier processes are carried over",
  "run.resumed": () => "A new process goes on from the journal",
  "run.suspended": ({ data }) => `The machine was suspended for ${seconds(data.for_ns)}`,
};

/** What an event says; one of a kind that is not known here says its own name and fields. */
export function inWords(event) {
  try {
    const known = WORDS[event.event];
    if (known) return known(event, event);
    const end = /^lease\.(.+)$/.exec(event.event);
    if (end) return `Lease ${event.data.lease} ${LEASE_ENDS[end[1]] ?? `ended: ${end[1]}`}${because(event.data.fault || event.data.detail)}`;
  } catch {
    // One whose fields are not as they were when this was written is told as it is.
  }
  const { at_s: _, ...fields } = event.data;
  return `${event.event} ${JSON.stringify(fields)}`;
}

const SERIOUS = /^(lease\.(preempted|lost|failed|expired|notice|refused)|worker\.barred|.*\.failed|budget\.exhausted|version\.refused)$/;
export const isSerious = (event) => SERIOUS.test(event.event);

const TRAINER = {
  absent: "The trainer starts.",
  awake: "The trainer generates.",
  resting: "The trainer hands its responses over.",
  asleep: "The trainer takes groups as they finish.",
  waking: "The trainer wakes.",
};

/** What a run waits for now, each wait by its name: {name, text}. */
export function waitsOf(run) {
  const { figures, conditions, phase } = run;
  const found = conditions.filter((one) => (one.type !== "Ended" && one.status !== "True") || (one.type === "Ended" && one.status === "True")).map((one) => ({ name: one.type, text: `${one.reason}. ${one.message}` }));
  found.push(...(figures.conditions ?? []).map((one) => ({ name: one.type, text: one.message })));
  if (["stopped", "finished", "failed"].includes(phase)) return found;
  if (TRAINER[figures.trainer]) found.push({ name: "Trainer", text: TRAINER[figures.trainer] });
  const booting = Object.entries(figures.providers).filter(([, one]) => one.booting);
  if (booting.length) found.push({ name: "WorkersBoot", text: `On their way: ${booting.map(([name, one]) => `${one.booting} of ${name}`).join(", ")}.` });
  if (figures.queued_turns) found.push({ name: "TurnsQueued", text: `Turns that wait for a worker with room for them: ${count(figures.queued_turns)}.` });
  if (figures.trajectories_running) found.push({ name: "TrajectoriesRun", text: `Trajectories under way: ${count(figures.trajectories_running)}.` });
  return found;
}
