// What each node of a pool has done for which job, turn by turn: a lane a node.
import { jobSlots, swatch } from "./charts.js";
import { Refused, get } from "./data.js";
import { el, fill, soft } from "./dom.js";
import { clock } from "./units.js";

const LONGEST_S = 900;
const shortOf = (job) => (/^job_[0-9A-Z]{26}$/.test(job) ? `…${job.slice(-4)}` : job); // Ids of a day begin alike.

/** The lanes of a pool. `show` draws them at a moment of the pool; turns that are over are read as they come. `named` is a
 * job's name beside its colour, for tables. */
export function poolLanes(pool, signal) {
  const list = el("ol", { className: "lanes", id: "pool-lanes" });
  const about = soft();
  let [turns, ended, seen, slots] = [[], 0, null, new Map()];
  const colourOf = (job) => `provider-${slots.get(job)}`;
  const named = (job) => [slots.has(job) ? swatch({ colour: colourOf(job) }) : null, job];

  async function read(now, permits) {
    if (now < ended) [turns, seen] = [[], null]; // Another process of the pool counts anew.
    ended = now;
    const under = permits.map((one) => `${one.number} ${one.nodes}`).join();
    if (under === seen) return;
    try {
      const { data } = await get(`/v1/pools/${pool}/turns?after_s=${turns.at(-1)?.until_s ?? 0}`, signal);
      turns = [...turns, ...data].filter((one) => one.until_s > now - LONGEST_S);
      seen = under;
    } catch (error) {
      if (!(error instanceof Refused)) throw error; // Its process is of an older program: turns under way are shown.
    }
  }
  function lanesOf(now, nodes, permits) {
    return nodes.map(({ name, account, job }) => {
      const since = permits.find((one) => one.job === job && one.nodes.includes(name))?.since_s;
      const own = turns.filter((one) => one.node === name).map((one) => ({ from: one.since_s, to: one.until_s, account: "slice", job: one.job }));
      return { name, parts: since === undefined ? own : [...own, { from: since, to: now, account, job }] };
    });
  }
  async function show(now, nodes, permits) {
    await read(now, permits);
    const lanes = lanesOf(now, nodes, permits);
    slots = jobSlots(lanes.flatMap((one) => one.parts.map((part) => part.job)), slots);
    const begun = Math.max(0, now - LONGEST_S, Math.min(now, ...lanes.flatMap((one) => one.parts.map((part) => part.from))));
    const place = (at) => (100 * (Math.max(at, begun) - begun)) / Math.max(1, now - begun);
    const said = ({ from, to, account, job }) => `${account} for ${job}, ${clock(from)} to ${clock(to)}`;
    const partOf = (part) => {
      const band = part.account === "slice" && el("span", { className: `band fill-${colourOf(part.job)}` });
      const made = el("span", { className: `doing ${band ? "" : "account-"}${part.account}`, title: said(part) }, shortOf(part.job), band);
      made.style.left = `${place(part.from)}%`;
      made.style.width = `${place(part.to) - place(part.from)}%`;
      return made;
    };
    fill(list, lanes.map(({ name, parts }) => el("li", {}, el("span", { className: "name", textContent: name }), el("div", { className: "lane whole", ariaHidden: "true" }, parts.map(partOf)), el("span", { className: "hidden", textContent: parts.slice(-10).map(said).join("; ") || "idle" }))));
    fill(about, `From ${clock(begun)} to ${clock(now)} of the pool's time, each job's turns in its colour; what was before stands below as sums.`);
  }
  return { node: el("div", {}, about, list), show, named };
}
