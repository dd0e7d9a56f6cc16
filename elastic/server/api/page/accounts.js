// Where a device's time went: one bar, the same accounts and colours as in reports.
import { el, svg } from "./dom.js";
import { percent } from "./units.js";

const WORKING = ["decode", "prefill", "training", "serving"];
const OF_WORKERS = ["decode", "prefill", "training", "serving", "idle", "asleep", "draining", "parked", "booting", "loading", "applying", "recompute", "switching", "lost", "unattributed"];
export const OF_NODES = ["slice", "idle", "switching", "down"];
const ACCOUNTS = [...new Set([...OF_NODES.slice(0, 1), ...OF_WORKERS, ...OF_NODES])];

/** The share of its time in which a device worked. */
export const workingShare = (accounts) => {
  const all = Object.values(accounts).reduce((sum, one) => sum + one, 0);
  return all ? WORKING.reduce((sum, name) => sum + (accounts[name] ?? 0), 0) / all : null;
};

export function accountsBar(accounts) {
  const all = Object.values(accounts).reduce((sum, one) => sum + one, 0);
  let from = 0;
  const bars = ACCOUNTS.filter((name) => accounts[name] > 0).map((name) => {
    const width = (100 * accounts[name]) / all;
    const bar = svg("rect", { x: from.toFixed(2), y: 0, width: width.toFixed(2), height: 10, class: `account-${name}` }, svg("title", {}, `${name} ${percent(accounts[name] / all)}`));
    from += width;
    return bar;
  });
  const words = ACCOUNTS.filter((name) => accounts[name] / all >= 0.005).map((name) => `${name} ${percent(accounts[name] / all)}`).join(", ");
  return svg("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", class: "accounts", role: "img", "aria-label": words || "no time yet" }, bars);
}

export const accountKeys = (names = OF_WORKERS) => el("ul", { className: "legend" }, names.map((name) => el("li", {}, el("span", { className: `swatch account-${name}`, ariaHidden: "true" }), name)));
