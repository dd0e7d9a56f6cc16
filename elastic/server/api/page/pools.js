// Pools that jobs share: who computes where, who waits for what, where time went, and the bill of each job.
import { OF_NODES, accountKeys, accountsBar } from "./accounts.js";
import { action } from "./actions.js";
import { Pager, ask, get, may } from "./data.js";
import { button, el, fill, section, soft } from "./dom.js";
import { poolLanes } from "./pool_lanes.js";
import { paged, table } from "./tables.js";
import { NONE, clock, count, duration, percent, usd } from "./units.js";

const EVERY_MS = 2000;
const GOES_ON = /^(submitted|profiling|queued|placed|running)$/;

const idle = (accounts) => {
  const all = Object.values(accounts).reduce((sum, one) => sum + one, 0);
  return all ? (accounts.idle ?? 0) / all : null;
};

const nodesOf = (named, drain) => [
  { title: "Node", of: (one) => one.name },
  { title: "Phase", of: (one) => one.phase },
  { title: "Site", of: (one) => one.site || NONE },
  { title: "$/GPU-hour", number: true, of: (one) => usd(one.usd_per_gpu_hour) },
  { title: "Group", of: (one) => one.group ?? NONE },
  { title: "Job now", of: (one) => (one.job === null ? NONE : named(one.job)) },
  { title: "Does", of: (one) => (one.draining ? `${one.account}, draining` : one.account) },
  { title: "Bubbles", number: true, of: (one) => percent(idle(one.accounts_s)) },
  { title: "Where its time went", wide: true, of: (one) => accountsBar(one.accounts_s) },
  { title: "", head: el("span", { className: "hidden", textContent: "Actions" }), of: (one) => may("server:write") && one.joined && !one.draining && drain(one) },
];
const groupsOf = (named) => [
  { title: "Group", of: (one) => one.name },
  { title: "Cycle", number: true, of: (one) => duration(one.cycle_s) },
  { title: "At most", number: true, of: (one) => duration(one.limit_s) },
  { title: "$/hour", number: true, of: (one) => usd(one.usd_per_hour) },
  { title: "Nodes", wide: true, of: (one) => `${one.rollout.join(", ")} for rollouts, ${one.train.join(", ")} for training` },
  { title: "Jobs", wide: true, of: (one) => one.members.map((job) => el("span", { className: "job" }, named(job))) },
];
const permitsOf = (named) => [
  { title: "Job", of: (one) => named(one.job) },
  { title: "Phase", of: (one) => one.phase },
  { title: "Nodes", wide: true, of: (one) => one.nodes.join(", ") },
  { title: "Since", number: true, of: (one) => clock(one.since_s) },
  { title: "Ends within", number: true, of: (one) => `${duration(Math.max(0, one.left_s))}${one.recalled ? ", recalled" : ""}` },
];
const WAITS = [
  { title: "What waits", of: (one) => one.key },
  { title: "For what", wide: true, of: (one) => one.what },
  { title: "Since", number: true, of: (one) => clock(one.since_s) },
  { title: "At most for", number: true, of: (one) => duration(Math.max(0, one.left_s)) },
];

function jobsOf(pool, named, { signal, wrong }) {
  const act = async (said) => {
    try {
      if (await action(said)) await list.refresh();
    } catch (error) {
      wrong(error);
    }
  };
  const at = (one, what) => `/v1/pools/${pool}/jobs/${encodeURIComponent(one.id)}/${what}`;
  const cancel = (one) => button("Cancel", () => act({ title: `Cancel ${one.id}?`, says: [`It is at step ${one.steps_done} of ${one.steps}, and has cost ${usd(one.usd)}. Everything of it ends now.`], verb: "Cancel it", danger: true, act: (_, key) => ask("POST", at(one, "cancel"), { idempotencyKey: key }) }));
  const again = (one) => button("Resubmit", () => act({ title: `Resubmit ${one.id}?`, says: ["It goes on from its last checkpoint, as a new arrival."], verb: "Resubmit", act: (_, key) => ask("POST", at(one, "resubmit"), { idempotencyKey: key }) }));
  const columns = [
    { title: "Job", of: (one) => named(one.id) },
    { title: "State", of: (one) => one.state },
    { title: "Why", wide: true, of: (one) => (one.queue_place === null ? one.reason : `number ${one.queue_place} in the queue: ${one.reason}`) },
    { title: "Step", number: true, of: (one) => `${one.steps_done}/${one.steps}` },
    { title: "Slowdown", number: true, of: (one) => `${one.planned_slowdown === null ? NONE : one.planned_slowdown.toFixed(2)} of ${one.slo.toFixed(2)}` },
    { title: "Group", of: (one) => one.group ?? NONE },
    { title: "Moves", number: true, of: (one) => count(one.moves) },
    { title: "Bill", number: true, of: (one) => usd(one.usd) },
    { title: "Alone", number: true, of: (one) => (one.steps_done ? usd(one.usd_alone) : NONE) },
    { title: "Its leaving saves", number: true, of: (one) => `${usd(one.saved_if_left_usd_per_hour)}/h` },
    { title: "", head: el("span", { className: "hidden", textContent: "Actions" }), of: (one) => may("runs:write") && (GOES_ON.test(one.state) ? cancel(one) : one.state === "failed" ? again(one) : null) },
  ];
  const list = paged(columns, () => new Pager(`/v1/pools/${pool}/jobs`, {}, 50), { signal, label: "Jobs", empty: "No jobs yet: submit one here, or by elastic jobs submit CONFIG.", id: "jobs" });
  return list;
}

export async function showPools(main, context) {
  const { data } = await get("/v1/pools", context.signal);
  if (data.length === 1) return showPool(main, { ...context, parts: [data[0].id] });
  const list = table([
    { title: "Pool", of: (one) => el("a", { href: `#/pools/${one.id}`, textContent: one.id }) },
    { title: "Nodes", number: true, of: (one) => (one.away ? "away" : count(one.nodes.length)) },
    { title: "Groups", number: true, of: (one) => count(one.groups.length) },
    { title: "$/hour", number: true, of: (one) => usd(one.usd_per_hour) },
    { title: "So far", number: true, of: (one) => usd(one.usd) },
  ], { label: "Pools", empty: "This server has no pool: elastic serve --pool POOL.toml brings one.", id: "pools" });
  list.show(data);
  fill(main, el("h1", { textContent: "Pools" }), list.node);
  return undefined;
}

export async function showPool(main, context) {
  const { signal, parts: [name], wrong } = context;
  const about = soft();
  const made = (columns, label, empty, id) => table(columns, { label, empty, id });
  const lanes = poolLanes(name, signal);
  const drain = (node) => button("Drain", async () => {
    const done = await action({ title: `Drain ${node.name}?`, says: ["Its jobs go on elsewhere from their step's end; then the machine is let go.", "It comes back with another ticket, or is put back on the server's machine: elastic pool put-back."], verb: "Drain it", danger: true, act: (_, key) => ask("POST", `/v1/pools/${name}/nodes/${encodeURIComponent(node.name)}/drain`, { idempotencyKey: key }) });
    if (done) await refresh().catch(wrong);
  });
  const nodes = made(nodesOf(lanes.named, drain), "Nodes", "No nodes.", "nodes");
  const groups = made(groupsOf(lanes.named), "Groups", "No group: no job is placed.", "groups");
  const permits = made(permitsOf(lanes.named), "Permits", "Nobody computes now.", "permits");
  const waits = made(WAITS, "Waits", "Nothing waits.", "waits");
  const jobs = jobsOf(name, lanes.named, context);
  fill(main, el("h1", { textContent: `Pool ${name}` }), about, section("Nodes", accountKeys(OF_NODES), lanes.node, nodes.node), section("Groups that take turns", groups.node), section("Who computes", permits.node), section("What waits, and for what", waits.node), section("Jobs", may("runs:write") && el("p", {}, el("a", { href: `#/submit?pool=${encodeURIComponent(name)}`, textContent: "Submit a job" })), jobs.node));
  let [timer, seen] = [0, ""];

  async function refresh() {
    const pool = await get(`/v1/pools/${name}`, signal);
    fill(about, pool.away ? "Its process does not answer now, and is started again. What was known stands here." : `Up for ${duration(pool.now_s)}: ${usd(pool.usd)} so far, ${usd(pool.usd_per_hour)} an hour for its groups.`);
    if (pool.away) return;
    await lanes.show(pool.now_s, pool.nodes, pool.permits);
    nodes.show(pool.nodes);
    groups.show(pool.groups);
    permits.show(pool.permits);
    waits.show(pool.waits);
    const now = JSON.stringify([pool.groups, pool.permits.map((one) => one.number)]);
    if (now !== seen && jobs.body.children.length <= 50 && !document.querySelector("dialog[open]")) await jobs.refresh();
    seen = now;
  }
  async function tick() {
    if (!document.hidden) await refresh();
    if (!signal.aborted) timer = setTimeout(() => tick().catch(wrong), EVERY_MS);
  }
  signal.addEventListener("abort", () => clearTimeout(timer));
  return tick();
}
