// What the policy did: a page of trajectories, the newest or the best or the worst first, what is asked of them, and
// where one says something.
import { Pager, SearchPager } from "./data.js";
import { button, el, fill, labelled } from "./dom.js";
import { paged } from "./tables.js";
import { count, reward } from "./units.js";

export const partsOf = (values) => Object.entries(values).map(([name, value]) => `${name} ${value.toPrecision(3)}`).join(", ");
export const endOf = (one) => [one.reward === null ? one.cause || "no reward" : one.cause, one.truncated ? "truncated" : ""].filter(Boolean).join(", ");

export function showTrajectories(body, view) {
  const { id, place, run, signal, wrong } = view;
  const number = (name, hint) => el("input", { id: name, type: "number", step: "any", size: 7, placeholder: hint });
  const order = el("select", { id: "order" }, ["newest", "best", "worst"].map((one) => el("option", { value: one, textContent: one })));
  const step = el("input", { id: "of-step", type: "number", min: "0", size: 6 });
  const group = el("input", { id: "of-group", size: 8, placeholder: "3/0" });
  const named = (run.config.environments ?? []).map((one) => one.name);
  const environment = el("select", { id: "environment" }, el("option", { value: "", textContent: "all" }), named.map((one) => el("option", { value: one, textContent: one })));
  const [least, most] = [number("reward-min", "least"), number("reward-max", "most")];
  const box = (name) => el("input", { id: name, type: "checkbox" });
  const [truncated, failed, evaluation] = [box("truncated"), box("failed"), box("of-evaluations")];
  const jump = el("input", { id: "jump", placeholder: "3/0/2", size: 8, pattern: "e?[0-9]+/[0-9]+/[0-9]+", title: "a trajectory, such as 3/0/2, or e10/0/2 of an evaluation" });
  const said = el("input", { id: "said", type: "search", maxLength: 200, placeholder: "what somebody says" });
  const chosen = new Set();
  const beside = button("Side by side", () => (location.hash = `#/runs/${id}/beside/${[...chosen].join(",")}`), { hidden: true, id: "beside" });
  const form = el("form", { className: "filters", role: "search" },
    labelled("Said", said), labelled("Order", order), labelled("Step", step), labelled("Group", group), named.length > 1 ? labelled("Environment", environment) : null,
    labelled("Reward from", least), labelled("to", most), labelled("Truncated", truncated), labelled("Failed", failed), labelled("Evaluations", evaluation), labelled("Go to", jump), el("button", { type: "submit", textContent: "Go" }), beside);

  const choose = (one) => el("input", { type: "checkbox", checked: chosen.has(one.id), ariaLabel: `Show ${one.id} beside another`, onchange: (event) => {
    if (event.target.checked) chosen.add(one.id);
    else chosen.delete(one.id);
    beside.hidden = chosen.size !== 2;
  } });
  const choice = () => ({ title: "", head: el("span", { className: "hidden", textContent: "Side by side" }), of: choose });
  const columns = [
    choice(),
    { title: "Trajectory", of: (one) => el("a", { href: `#/runs/${id}/trajectories/${one.id}`, textContent: one.id }) },
    { title: "Reward", number: true, of: (one) => reward(one.reward) },
    { title: "Parts", wide: true, of: (one) => partsOf(one.rewards) },
    { title: "Turns", number: true, of: (one) => count(one.turns) },
    { title: "Tokens", number: true, of: (one) => count(one.policy_tokens) },
    { title: "Environment", of: (one) => one.environment || "–" },
    { title: "End", wide: true, of: (one) => endOf(one) },
  ];
  const passage = (one) => el("div", { className: "passage" }, el("b", { textContent: one.branch ? `${one.role}, branch ${one.branch}` : one.role }), " ", one.before, el("mark", { textContent: one.found }), one.after);
  const withPassages = [choice(), ...columns.slice(1, 3), { title: "Said", wide: true, of: (one) => one.passages.map(passage) }, columns.at(-2)];
  const query = () => ({ order: order.value, step: step.value, group: group.value.trim(), environment: environment.value, reward_min: least.value, reward_max: most.value, truncated: truncated.checked, failed: failed.checked, evaluation: evaluation.checked });
  const all = paged(columns, () => new Pager(`${place}/trajectories`, query(), 20), { signal, label: "Trajectories", empty: "No such trajectories.", id: "trajectories" });
  const found = paged(withPassages, () => new SearchPager(`${place}/trajectory-search`, { ...query(), text: said.value.trim() }, 20), { signal, label: "Trajectories that say it", empty: "None of these says it.", id: "found" });
  let list = all;
  async function show() {
    list = said.value.trim() ? found : all;
    all.node.hidden = list !== all;
    found.node.hidden = list !== found;
    await list.refresh();
  }
  form.onsubmit = (event) => {
    event.preventDefault();
    if (jump.value.trim()) location.hash = `#/runs/${id}/trajectories/${jump.value.trim()}`;
  };
  form.onchange = (event) => {
    if (event.target !== jump) show().catch(wrong);
  };
  fill(body, form, all.node, found.node);
  const ready = show();
  let seen = run.figures.step;
  return {
    ready,
    // A list that one has read on in, or chosen from, stays as it is.
    refresh: async () => {
      if (view.run.figures.step === seen || list === found || list.body.children.length > 20 || chosen.size) return;
      seen = view.run.figures.step;
      await list.refresh();
    },
  };
}
