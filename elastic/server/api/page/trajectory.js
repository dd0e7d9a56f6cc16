// A trajectory: what was said, and its tokens by version and log-probability; one, or two side by side.
import { Refused, get } from "./data.js";
import { button, el, fill, soft } from "./dom.js";
import { endOf, partsOf } from "./trajectories.js";
import { count, many, reward } from "./units.js";

const LIKELY = [-0.1, -0.7, -2.3, -4.6];
const TOKENS_SHOWN = 4000;
const MESSAGES_SHOWN = 200;
const VERSIONS_SHOWN = 20;
const likelihood = (logprob) => `p${LIKELY.filter((least) => logprob < least).length}`;

function tokensOf(context, message, by) {
  const shown = Math.min(message.tokens, TOKENS_SHOWN);
  const first = context.versions.slice(message.start, message.start + shown).reduce((least, one) => Math.min(least, one), Infinity);
  const spans = Array.from({ length: shown }, (_, n) => {
    const at = message.start + n;
    const style = by === "version" ? `v${(context.versions[at] - first) % 5}` : likelihood(context.logprobs[at]);
    return el("span", { className: `token ${style}`, textContent: context.pieces ? context.pieces[at] : ` ${context.token_ids[at]}`, title: `token ${context.token_ids[at]}, version ${context.versions[at]}, log-probability ${context.logprobs[at].toFixed(3)}` });
  });
  const left = message.tokens - shown;
  const versions = [...new Set(context.versions.slice(message.start, message.start + shown))].sort((a, b) => a - b);
  const key = by === "version" && soft("Underlined by version: ", versions.slice(0, VERSIONS_SHOWN).map((one) => [el("span", { className: `token v${(one - first) % 5}`, textContent: String(one) }), " "]), versions.length > VERSIONS_SHOWN ? "…" : null);
  return el("div", { className: "said" }, key, spans, left ? el("span", { className: "soft", textContent: ` … ${count(left)} more tokens are not shown` }) : null);
}

function aboutOf(context, message) {
  if (!message.by_policy || !message.tokens) return "";
  const range = [message.start, message.start + message.tokens];
  const distinct = [...new Set(context.versions.slice(...range))];
  const mean = context.logprobs.slice(...range).reduce((sum, one) => sum + one, 0) / message.tokens;
  return `${many(message.tokens, "token")} of version${distinct.length > 1 ? "s" : ""} ${distinct.slice(0, 8).join(", ")}, mean log-probability ${mean.toFixed(2).replace("-", "−")}`;
}

function messageOf(context, message) {
  const head = el("header", {}, el("b", { textContent: message.role }), el("span", { className: "soft", textContent: aboutOf(context, message) }));
  const text = el("div", { className: "content" });
  const plain = () => [
    message.reasoning ? el("details", { open: true }, el("summary", { textContent: "Reasoning" }), el("div", { className: "said soft", textContent: message.reasoning })) : null,
    message.content ? el("div", { className: "said", textContent: message.content }) : null,
    message.tool_calls.map((call) => el("div", { className: "said call", textContent: `${call.name}(${call.arguments})` })),
  ];
  const views = message.by_policy ? { Text: plain, Tokens: () => tokensOf(context, message, "likelihood"), Versions: () => tokensOf(context, message, "version") } : { Text: plain };
  const show = (name) => {
    fill(text, views[name]());
    for (const one of head.querySelectorAll("button")) one.setAttribute("aria-pressed", String(one.textContent === name));
  };
  if (message.by_policy) head.append(el("span", { className: "choice", role: "group", ariaLabel: "Show" }, Object.keys(views).map((name) => button(name, () => show(name)))));
  show(context.messages ? "Text" : "Tokens");
  return el("article", { className: `message ${message.by_policy ? "policy" : ""}`, ariaLabel: message.role }, head, text);
}

function contextOf(context) {
  const shared = context.shared_tokens ?? 0;
  const all = context.messages ?? [{ role: "tokens", content: "", reasoning: "", tool_calls: [], by_policy: true, start: 0, tokens: context.token_ids.length }];
  const own = all.filter((one) => one.start + one.tokens > shared);
  const left = [];
  if (own.length < all.length) left.push(`Not repeated: ${many(all.length - own.length, "message")} of a context above.`);
  if (context.left_out_messages) left.push(`Left out at the end: ${many(context.left_out_messages, "message")}.`);
  if (context.left_out_tokens) left.push(`Left out at the end: ${many(context.left_out_tokens, "token")}.`);
  const messages = el("div", {}, own.slice(0, MESSAGES_SHOWN).map((one) => messageOf(context, one)));
  const rest = own.slice(MESSAGES_SHOWN);
  const more = button(`Show ${rest.length} more messages`, () => {
    messages.append(...rest.splice(0, MESSAGES_SHOWN).map((one) => messageOf(context, one)));
    more.textContent = `Show ${rest.length} more messages`;
    more.hidden = rest.length === 0;
  });
  more.hidden = rest.length === 0;
  return [left.length ? soft(left.join(" ")) : null, messages, more];
}

const policyOf = (context) => [context.policy ? `policy ${context.policy}` : "", context.policy_reward === null ? "" : `reward ${reward(context.policy_reward)}`].filter(Boolean).join(", ");

function detailOf(found) {
  const about = { Step: String(found.step), Reward: reward(found.reward), Turns: String(found.turns), "Policy tokens": count(found.policy_tokens), Environment: found.environment || "–" };
  const listed = [];
  if (Object.keys(found.rewards).length) listed.push(`Rewards by part: ${partsOf(found.rewards)}`);
  if (Object.keys(found.metrics).length) listed.push(`Metrics: ${partsOf(found.metrics)}`);
  if (endOf(found)) listed.push(`End: ${endOf(found)}`);
  if (found.no_text) listed.push(`There is no text: ${found.no_text}`);
  if (found.left_out_branches) listed.push(`Branches left out: ${found.left_out_branches}`);
  return [
    el("div", { className: "tiles" }, Object.entries(about).map(([label, value]) => el("div", { className: "tile" }, el("div", { className: "label", textContent: label }), el("div", { className: "value", textContent: value })))),
    listed.map((text) => soft(text)),
    found.task ? el("details", {}, el("summary", { textContent: "Task" }), el("div", { className: "said", textContent: found.task })) : null,
    el("section", { className: "context" }, el("h2", { textContent: ["What was said", policyOf(found)].filter(Boolean).join(": ") }), contextOf(found)),
    found.branches.map((one) => el("section", { className: "context" }, el("h2", { textContent: [`Branch ${one.branch}`, policyOf(one)].filter(Boolean).join(": ") }), contextOf(one))),
  ];
}

const legend = () => el("p", { className: "key soft" }, "Tokens by how likely they were: ", ["at least 90 %", "50 %", "10 %", "1 %", "less"].map((text, n) => [el("span", { className: `token p${n}`, textContent: text }), " "]));
const crumb = (id) => el("a", { href: `#/runs/${id}/trajectories`, textContent: "Trajectories" });

async function read(id, name, signal) {
  try {
    return detailOf(await get(`/v1/runs/${id}/trajectories/${name}`, signal));
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    return soft(`This cannot be shown: ${error.message}`);
  }
}

export async function showTrajectory(main, { signal, parts: [id, name] }) {
  const title = el("h1", {}, crumb(id), `Trajectory ${name}`);
  fill(main, title);
  const shown = await read(id, name, signal);
  if (!signal.aborted) fill(main, title, legend(), shown);
}

export async function showBeside(main, { signal, parts: [id, names] }) {
  const chosen = names.split(",").slice(0, 2);
  const title = el("h1", {}, crumb(id), `Trajectories ${chosen.join(" and ")}`);
  fill(main, title);
  const shown = await Promise.all(chosen.map((name) => read(id, name, signal)));
  const columns = shown.map((nodes, n) => el("section", { className: "column", ariaLabel: chosen[n] }, el("h2", {}, el("a", { href: `#/runs/${id}/trajectories/${chosen[n]}`, textContent: chosen[n] })), nodes));
  if (!signal.aborted) fill(main, title, legend(), el("div", { className: "beside" }, columns));
}
