// What a run is: what differs from the defaults, all of it, its conditions, checkpoints and what can be taken away.
import { Pager } from "./data.js";
import { el, fill, section, soft } from "./dom.js";
import { paged, table } from "./tables.js";
import { bytes, moment } from "./units.js";

export const asText = (value) => (typeof value === "string" ? value : JSON.stringify(value));

const DIFFERENCES = [
  { title: "Key", of: ([key]) => el("code", { textContent: key }) },
  { title: "Value", wide: true, of: ([, value]) => el("code", { textContent: asText(value) }) },
];
const CONDITIONS = [
  { title: "Condition", of: (one) => one.type },
  { title: "Status", of: (one) => one.status },
  { title: "Reason", of: (one) => one.reason },
  { title: "Message", wide: true, of: (one) => one.message },
  { title: "Since", of: (one) => moment(one.lastTransitionTime) },
];

export function showConfiguration(body, { place, run, signal }) {
  const checkpoints = paged(
    [
      { title: "Version", number: true, of: (one) => el("a", { href: `${place}/checkpoints/${one.id}`, textContent: String(one.version), ariaLabel: `Download version ${one.version}` }) },
      { title: "Size", number: true, of: (one) => bytes(one.bytes) },
      { title: "Made", of: (one) => moment(one.created_at) },
    ],
    () => new Pager(`${place}/checkpoints`, {}, 20),
    { signal, label: "Checkpoints", empty: "No checkpoints yet.", id: "checkpoints" },
  );
  const conditions = table(CONDITIONS, { label: "Conditions", empty: "None yet.", id: "conditions" });
  const differences = table(DIFFERENCES, { label: "Differences from the defaults", empty: "Everything is as the defaults have it.", id: "differences" });
  differences.show(Object.entries(run.differences ?? {}));
  const about = `Submitted ${moment(run.created_at)} by ${run.created_by_name || run.created_by}, begun ${moment(run.started_at)}, ended ${moment(run.ended_at)}; restarted ${run.restarts} of ${run.max_restarts} times without a new step.`;
  fill(
    body,
    soft(about),
    section("What differs from the defaults", differences.node),
    el("details", {}, el("summary", { textContent: "The whole configuration" }), el("pre", { className: "log", tabIndex: 0, ariaLabel: "Configuration", textContent: JSON.stringify(run.config, null, 2) })),
    section("Conditions", conditions.node),
    section("Checkpoints", checkpoints.node, soft("On the server's machine, ", el("code", { textContent: `elastic export ${run.id} --directory HOME/runs -o policy` }), " makes a Hugging Face directory of the newest one.")),
    section("Take away", el("ul", { className: "links" }, [["Report", "report?format=html"], ["Report as Markdown", "report?format=markdown"], ["Report as JSON", "report"], ["Series as JSON", "metrics"]].map(([text, path]) => el("li", {}, el("a", { href: `${place}/${path}`, textContent: text }))))),
  );
  return { ready: checkpoints.refresh(), show: (now) => conditions.show(now.conditions) };
}
