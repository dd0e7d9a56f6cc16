// A run's workers as lanes, like the report's: booting, ready, on notice, how each ended; and what followed each loss.
import { accountKeys, accountsBar, workingShare } from "./accounts.js";
import { providerColours, swatch } from "./charts.js";
import { Pager, listed } from "./data.js";
import { el, fill, section, svg } from "./dom.js";
import { offersOver } from "./offers.js";
import { paged, reading, table } from "./tables.js";
import { NONE, clock, count, duration, percent, usd } from "./units.js";

const MOST_LANES = 80;
const MOST_WORKERS = 100; // In one answer.
const ROW = 22;
const WIDTH = 1000;
const ENDS = { preempted: "▼", expired: "◷", lost: "✕", failed: "✕", released: "◼" };

function laneOf(worker, end, colour) {
  const x = (at) => (WIDTH * at) / Math.max(end, 1e-9);
  const closed = worker.closed_s ?? end;
  const ready = Math.min(worker.ready_s ?? closed, closed);
  const notice = Math.min(worker.notice_s ?? closed, closed);
  const bar = (from, to, style) => (to > from ? svg("rect", { x: x(from).toFixed(1), y: 4, width: Math.max(1, x(to) - x(from)).toFixed(1), height: ROW - 8, class: style }) : null);
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${ROW}`, preserveAspectRatio: "none", class: "lane", "aria-hidden": "true" }, bar(worker.opened_s, ready, "lane-booting"), bar(ready, notice, `lane-${colour}`), bar(notice, closed, "lane-notice"));
  const life = [
    `from ${clock(worker.opened_s)}`,
    worker.ready_s === null ? "never ready" : `ready after ${duration(worker.ready_s - worker.opened_s)}`,
    worker.notice_s === null ? "" : `notice at ${clock(worker.notice_s)}`,
    worker.closed_s === null ? "still there" : `until ${clock(worker.closed_s)}${worker.cause ? `, ${worker.cause}` : ""}`,
  ];
  return el("li", { title: life.filter(Boolean).join(", ") },
    el("span", { className: "name", textContent: worker.id }), picture,
    el("span", { className: worker.lost ? "end bad" : "end", textContent: worker.closed_s === null ? "●" : (ENDS[worker.cause] ?? "◼") }),
    el("span", { className: "hidden", textContent: life.filter(Boolean).join(", ") }));
}

/** Each loss with the provider's next worker, which came in its place if it came after the loss was foreseen. */
function followed(workers) {
  const losses = workers.filter((one) => one.lost || ["lost", "failed"].includes(one.cause));
  const taken = new Set();
  return losses.sort((a, b) => a.closed_s - b.closed_s).map((worker) => {
    const foreseen = worker.notice_s ?? worker.closed_s;
    const next = workers.filter((one) => one.provider === worker.provider && one.opened_s >= foreseen && !taken.has(one.id)).sort((a, b) => a.opened_s - b.opened_s)[0];
    if (next) taken.add(next.id);
    return { worker, next, foreseen };
  }).reverse();
}

const LOSSES = [
  { title: "At", number: true, of: ({ worker }) => clock(worker.closed_s) },
  { title: "Worker", of: ({ worker }) => worker.id },
  { title: "What happened", wide: true, of: ({ worker }) => `${worker.cause || "its time was over"}${worker.notice_s === null ? ", without notice" : `, ${duration(worker.closed_s - worker.notice_s)} after its notice`}` },
  { title: "What followed", wide: true, of: ({ next, foreseen }) => (next ? `${next.id} was asked for ${duration(next.opened_s - foreseen)} later${next.ready_s === null ? ", and is not ready" : `, ready ${duration(next.ready_s - foreseen)} later`}` : "No other worker of this provider has come") },
];

const WORKERS = [
  { title: "Worker", of: (one) => one.id },
  { title: "Provider", of: (one) => one.provider },
  { title: "GPUs", number: true, of: (one) => count(one.gpus) },
  { title: "Working", number: true, of: (one) => percent(workingShare(one.accounts_s)) },
  { title: "Where its time went", wide: true, of: (one) => accountsBar(one.accounts_s) },
];

/** What an hour of its GPUs has cost in which they computed; null where they never did. */
function perWorkingHour({ accounts_s: accounts, usd: cost }) {
  const hours = (workingShare(accounts) * Object.values(accounts).reduce((sum, one) => sum + one, 0)) / 3600;
  return hours > 0 ? cost / hours : null;
}

const LEASES = [
  { title: "Lease", of: (one) => one.id },
  { title: "Provider", of: (one) => one.provider },
  { title: "GPUs", number: true, of: (one) => count(one.gpus) },
  { title: "From", number: true, of: (one) => clock(one.opened_s) },
  { title: "To", number: true, of: (one) => (one.closed_s === null ? NONE : clock(one.closed_s)) },
  { title: "Cost", number: true, of: (one) => usd(one.usd) },
  { title: "Working", number: true, of: (one) => percent(workingShare(one.accounts_s)) },
  { title: "$ for a working GPU-hour", number: true, of: (one) => usd(perWorkingHour(one)) },
  { title: "End", wide: true, of: (one) => one.cause || "goes on" },
];

export function showWorkers(body, view) {
  const { id, place, signal, wrong } = view;
  const lanes = el("ol", { className: "lanes", id: "lanes" });
  const legend = el("p", { className: "soft legend" });
  const losses = table(LOSSES, { label: "Losses", empty: "No worker was lost.", id: "losses" });
  const workers = table(WORKERS, { label: "Workers", empty: "No workers yet.", id: "workers" });
  const leases = paged(LEASES, () => new Pager(`${place}/leases`, {}, 20), { signal, label: "Leases", empty: "No leases yet.", id: "leases" });
  const offers = offersOver(signal);
  const [problem, unread] = [el("div"), el("div")];
  fill(body, problem, section("Lanes", legend, lanes), section("Preemptions and deaths, and what followed", losses.node), section("Where time went", accountKeys(), workers.node), section("Leases, and what each gave for its money", leases.node), section("What providers offered", unread, offers.node));
  let begun = false;
  return {
    refresh: () =>
      reading(problem, async () => {
        const { data, more } = await listed(`${place}/workers`, {}, signal, MOST_WORKERS);
        problem.replaceChildren();
        const end = Math.max(1, ...data.map((one) => Math.max(one.closed_s ?? 0, one.opened_s + Object.values(one.accounts_s).reduce((sum, it) => sum + it, 0))));
        const colours = providerColours([...new Set(data.map((one) => one.provider))].sort());
        const shown = data.slice(0, MOST_LANES).reverse();
        fill(lanes, shown.map((one) => laneOf(one, end, colours[one.provider])));
        const left = data.length - shown.length;
        fill(legend, Object.entries(colours).map(([name, colour]) => el("span", {}, swatch({ colour }), name)), el("span", {}, swatch({ colour: "booting" }), "booting"), el("span", {}, swatch({ colour: "notice" }), "on notice"), ` ▼ preempted, ◷ its time was over, ✕ lost, ◼ given back, ● still there; 0:00 to ${clock(end)}.`, left > 0 || more ? " Older workers are not shown; their leases stand below." : "");
        losses.show(followed(data).slice(0, 100));
        workers.show(data.slice(0, 100));
        // These have a read of the journal each, which nobody waits for who looks at lanes.
        Promise.all([begun ? null : leases.refresh(), reading(unread, async () => {
          await view.known;
          await offers.show(id, view.run.figures.elapsed_s);
        })]).catch(wrong);
        begun = true;
      }),
  };
}
