// What each node of a pool does, since the page began to look, and since the turns began that went on then: a lane a
// node, with the job that it was for.
import { el, fill, soft } from "./dom.js";
import { NONE, clock } from "./units.js";

const LONGEST_S = 900;

export function poolLanes() {
  const lanes = new Map(); // Each node's parts: from, to, what it did, and for which job.
  const list = el("ol", { className: "lanes", id: "pool-lanes" });
  const about = soft();
  let [begun, ended] = [null, null];

  function note(now, nodes, permits) {
    const since = (name, job) => permits.find((one) => one.job === job && one.nodes.includes(name))?.since_s ?? now;
    begun = Math.max(begun ?? Math.min(now, ...nodes.map((one) => since(one.name, one.job))), now - LONGEST_S);
    for (const name of lanes.keys()) if (!nodes.some((one) => one.name === name)) lanes.delete(name);
    for (const { name, account, job } of nodes) {
      const parts = lanes.get(name) ?? [];
      const last = parts.at(-1);
      if (last) last.to = now;
      if (!last || last.account !== account || last.job !== job) parts.push({ from: last ? now : since(name, job), to: now, account, job });
      lanes.set(name, parts.filter((one) => one.to >= begun));
    }
    ended = now;
  }
  function partOf({ from, to, account, job }) {
    const [left, right] = [from, to].map((at) => (100 * (Math.max(at, begun) - begun)) / Math.max(1, ended - begun));
    const part = el("span", { className: `doing account-${account}`, textContent: job ?? "", title: `${account}${job ? ` for ${job}` : ""}, ${clock(from)} to ${clock(to)}` });
    part.style.left = `${left}%`;
    part.style.width = `${right - left}%`;
    return part;
  }
  const said = (parts) => parts.map((one) => `${one.account}${one.job ? ` for ${one.job}` : ""} from ${clock(one.from)}`).join(", ");
  /** Note what the nodes do at this moment of the pool. */
  function show(now, nodes, permits) {
    if (ended !== null && now < ended) lanes.clear(); // Another process of the pool counts anew.
    if (!lanes.size) begun = null;
    note(now, nodes, permits);
    fill(list, [...lanes].map(([name, parts]) => el("li", {}, el("span", { className: "name", textContent: name }), el("div", { className: "lane whole", ariaHidden: "true" }, parts.map(partOf)), el("span", { className: "hidden", textContent: said(parts) || NONE }))));
    fill(about, `From ${clock(begun)} to ${clock(ended)} of the pool's time, and of turns that went on as this page was opened all; what was before stands below as sums.`);
  }
  return { node: el("div", {}, about, list), show };
}
