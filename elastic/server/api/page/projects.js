// Projects: what each may have and spend, and uses; its people, keys and secrets by name; who did what. For who may.
import { action, edit } from "./actions.js";
import { Pager, ask, get, may, session } from "./data.js";
import { button, el, fill, labelled, section, soft } from "./dom.js";
import { paged, reading } from "./tables.js";
import { NONE, count, duration, moment, usd } from "./units.js";

const ROLES = ["viewer", "runner", "admin"];
const DAY_S = 86_400;

const limit = (used, most, unit = count) => `${unit(used)} of ${most === null || most === undefined ? "any" : unit(most)}`;

function quotaOf(quota) {
  const { use } = quota;
  const kinds = [...new Set([...Object.keys(quota.gpus), ...Object.keys(use.gpus)])].sort();
  const lines = [
    ["Runs at once", limit(use.runs, quota.runs)],
    ["Spent", `${limit(use.usd, quota.budget_usd, usd)}${use.budget_ends_in_s === null ? "" : `; ends in ${duration(use.budget_ends_in_s)}`}`],
    ["Today", `${limit(use.usd_today, quota.usd_per_day, usd)}${use.day_ends_in_s === null ? "" : `; ends in ${duration(use.day_ends_in_s)}`}`],
    ["Over the last hour", usd(use.usd_per_hour)],
    ["Weight where one shares", String(quota.weight)],
    ...kinds.map((kind) => [`GPUs of ${kind}`, limit(use.gpus[kind] ?? 0, quota.gpus[kind])]),
    ...use.warned.map((what) => ["Nearly used", what]),
  ];
  return el("dl", { className: "facts", id: "quota" }, lines.map(([name, value]) => [el("dt", { textContent: name }), el("dd", { textContent: value })]));
}

const asker = (wrong, refresh) => async (said) => {
  try {
    if (await action(said)) await refresh();
  } catch (error) {
    wrong(error);
  }
};

function quotaActions(place, quota, act) {
  const number = (name, label, value) => ({ name, label, type: "number", min: 0, value: value ?? "" });
  return button("Change the quota", () => act({
    title: "The project's quota",
    says: ["Fewer runs at once than there are: those that were submitted last are stopped with a checkpoint and wait.", "Once a budget is used up its runs stop with a checkpoint. Empty lifts a limit."],
    fields: [number("runs", "Runs at once", quota.runs), number("usd_per_day", "Dollars a day", quota.usd_per_day), number("budget_usd", "Budget in dollars, all that its runs have cost included", quota.budget_usd), { ...number("weight", "Weight where one shares", quota.weight), required: true }, { name: "gpus", label: "GPUs: KIND=NUMBER, with commas between them", value: Object.entries(quota.gpus).map((one) => one.join("=")).join(", ") }],
    verb: "Set quota",
    act: ({ gpus, ...rest }, key) => edit(`${place}/quota`, { ...rest, gpus: Object.fromEntries(gpus.split(",").filter((one) => one.trim()).map((one) => [one.split("=")[0].trim(), Number(one.split("=")[1])])) }, key),
  }));
}

function people(place, { signal, wrong }) {
  const act = asker(wrong, () => list.refresh());
  const remove = (one) => button("Remove", () => act({ title: `Remove ${one.email ?? one.name}?`, says: ["They are out at once, sessions and keys too; runs that they submitted go on."], verb: "Remove", danger: true, act: (_, key) => ask("DELETE", `${place}/members/${one.id}`, { idempotencyKey: key }) }));
  const role = (one) => button("Role", () => act({ title: `Role of ${one.email ?? one.name}`, says: ["A viewer reads; a runner submits, stops, resumes and deletes runs; an admin makes keys and reads the audit log.", "Their keys never do more than the role allows."], fields: [{ name: "role", label: "Role", options: ROLES, value: one.role }], verb: "Set role", act: (values, key) => edit(`${place}/members/${one.id}`, values, key) }));
  const columns = [
    { title: "Person", of: (one) => one.email ?? one.name },
    { title: "Role", of: (one) => one.role },
    { title: "By", of: (one) => (one.source === "given" ? "an admin" : "the identity provider") },
    { title: "Since", of: (one) => moment(one.created_at) },
    { title: "", head: el("span", { className: "hidden", textContent: "Actions" }), of: (one) => (may("members:write") ? [role(one), " ", remove(one)] : null) },
  ];
  const list = paged(columns, () => new Pager(`${place}/members`, {}, 20), { signal, label: "People", empty: "Nobody is a member; keys alone are let in.", id: "members" });
  const add = may("members:write") && button("Add somebody", () => act({ title: "Add somebody", says: ["The first person who signs in with this address is that person from then on."], fields: [{ name: "email", label: "Address", type: "email", required: true }, { name: "role", label: "Role", options: ROLES, value: "runner" }], verb: "Add", act: (values, key) => ask("POST", `${place}/members`, { body: values, idempotencyKey: key }) }));
  return [section("People", list.node, add), list];
}

/** Keys at a place, each of which may be revoked and others made by who `may` it. */
function keyList({ signal, wrong }, { place, query = {}, further = [], may: writes, title, empty, id, made }) {
  const act = asker(wrong, () => list.refresh());
  const revoke = (one) => button("Revoke", () => act({ title: `Revoke ${one.name}?`, says: ["It opens nothing from now on; sessions and streams that were begun with it end."], verb: "Revoke", danger: true, act: (_, key) => ask("DELETE", `${place}/${one.id}`, { idempotencyKey: key }) }));
  const columns = [
    { title: "Key", of: (one) => one.name },
    { title: "Begins", of: (one) => el("code", { textContent: one.hint }) },
    { title: "Role", of: (one) => (one.project === null ? `${one.role} of the server` : one.role) },
    { title: "Of", of: (one) => (one.member ? "a person" : one.project === null ? "the server" : "the project") },
    ...further,
    { title: "Limited to", wide: true, of: (one) => one.scopes.join(", ") },
    { title: "Expires", of: (one) => moment(one.expires_at) },
    { title: "", head: el("span", { className: "hidden", textContent: "Actions" }), of: (one) => (one.revoked_at ? `revoked ${moment(one.revoked_at)}` : writes && revoke(one)) },
  ];
  const list = paged(columns, () => new Pager(place, query, 20), { signal, label: title, empty, id });
  const make = writes && button("Make a key", () => act({
    title: "Make a key",
    says: made.says,
    fields: [{ name: "name", label: "Name", required: true }, { name: "role", label: "Role", options: made.roles, value: made.roles.includes("runner") ? "runner" : made.roles[0] }, made.days],
    verb: "Make",
    act: ({ days, ...values }, key) => ask("POST", place, { body: { ...values, ...made.body, ...(days === null ? {} : { expires_in_s: days * DAY_S }) }, idempotencyKey: key }),
    shows: (one) => [el("h2", { textContent: `The key ${one.name}` }), el("p", { textContent: one.secret ? "Copy it now: nobody can show it again." : "Its secret was told once, and is not told again. Where it did not reach you, revoke this key and make another." }), el("p", {}, el("code", { id: "secret", textContent: one.secret ?? "" }))],
  }));
  return [section(title, list.node, make), list];
}

/** Keys of a project, or of the whole server where `project` is empty. `further` are more columns. */
const keys = (project, further, context) => keyList(context, {
  place: "/v1/keys", query: { project }, further, may: may("keys:write"), title: "Keys", empty: "No keys.", id: "keys",
  made: {
    says: [`It is the ${project ? "project" : "server"}'s own, for programs, and outlives the person who made it. Its secret is shown once.`],
    roles: ROLES,
    body: session.me.project !== null ? {} : project ? { project } : { server_wide: true },
    days: { name: "days", label: "Days until it expires; empty: never", type: "number", min: 1, step: 1, value: 90 },
  },
});

const ownKeys = (context) => keyList(context, {
  place: "/v1/me/keys", may: may("me:write"), title: "Your own keys", empty: "No keys of yours: elastic api login makes one for a terminal.", id: "own-keys",
  made: {
    says: ["It is yours, does what you may do in this project, and ends with your membership. Its secret is shown once."],
    roles: ROLES.slice(0, ROLES.indexOf(session.me.role) + 1),
    body: {},
    days: { name: "days", label: "Days until it expires", type: "number", min: 1, max: 366, step: 1, value: 90, required: true },
  },
});

function secrets(place, { signal, wrong }) {
  const act = asker(wrong, () => list.refresh());
  const columns = [
    { title: "Variable", of: (one) => el("code", { textContent: one.id }) },
    { title: "Set", of: (one) => moment(one.updated_at) },
    { title: "", head: el("span", { className: "hidden", textContent: "Actions" }), of: (one) => may("secrets:write") && button("Delete", () => act({ title: `Delete ${one.id}?`, says: ["Processes that have it keep it until they end."], verb: "Delete", danger: true, act: (_, key) => ask("DELETE", `${place}/secrets/${one.id}`, { idempotencyKey: key }) })) },
  ];
  const list = paged(columns, () => new Pager(`${place}/secrets`, {}, 20), { signal, label: "Secrets", empty: "No secrets.", id: "secrets" });
  const put = may("secrets:write") && button("Set a secret", () => act({ title: "Set a secret", says: ["Processes of runs that begin from now on have it as a variable. Nobody reads its value again."], fields: [{ name: "name", label: "Variable", hint: "HF_TOKEN", required: true }, { name: "value", label: "Value", type: "password", required: true }], verb: "Set", act: ({ name, value }, key) => ask("PUT", `${place}/secrets/${encodeURIComponent(name)}`, { body: { value }, idempotencyKey: key }) }));
  return [section("Secrets, by name", list.node, put), list];
}

const ofWhat = ({ resource }) => {
  const run = /^\/v1\/runs\/(run_[0-9A-Z]+)/.exec(resource)?.[1];
  return run ? el("a", { href: `#/runs/${run}`, textContent: resource }) : resource;
};

function audit(project, further, { signal }) {
  const columns = [
    { title: "At", of: (one) => moment(one.at) },
    { title: "Who", of: (one) => (one.actor_name ? [one.actor_name, el("span", { className: "soft", textContent: ` …${one.actor.slice(-6)}`, title: one.actor })] : one.actor) },
    { title: "What", of: (one) => one.action },
    { title: "Of what", wide: true, of: ofWhat },
    ...further,
    { title: "Let", of: (one) => (one.status < 400 ? `yes, ${one.status}` : `no, ${one.status}`) },
  ];
  const list = paged(columns, () => new Pager("/v1/audit", { project }, 50), { signal, label: "Audit", empty: "Nothing yet.", id: "audit" });
  return [section("Who did what", list.node), list];
}

/** Everybody's keys and what everybody did, for who is of no project. */
function wholeOf(projects, context) {
  const names = new Map(projects.map((one) => [one.id, one.name]));
  const further = [{ title: "Project", of: (one) => (one.project === null ? NONE : (names.get(one.project) ?? one.project)) }];
  return {
    title: "The whole server",
    about: soft("Keys of all projects and of none, and what was done in them."),
    parts: [may("keys:read") && keys("", further, context), may("audit:read") && audit("", further, context)],
  };
}

function projectOf(chosen, context) {
  const place = `/v1/projects/${chosen.id}`;
  const quota = el("div");
  const refresh = () => reading(quota, async () => {
    const told = await get(`${place}/quota`, context.signal);
    fill(quota, quotaOf(told), may("server:write") && quotaActions(place, told, asker(context.wrong, refresh)));
  });
  return {
    title: `Project ${chosen.name}`,
    about: soft(`Its runs are processes of ${chosen.unix_user ?? "the server's own user"}; made ${moment(chosen.created_at)}.`),
    parts: [
      [section("What it may have, and uses", quota), { refresh }],
      may("members:read") && people(place, context),
      session.me.member !== null && session.me.project === chosen.id && ownKeys(context),
      may("keys:read") && keys(chosen.id, [], context),
      may("secrets:read") && secrets(place, context),
      may("audit:read") && audit(chosen.id, [], context),
    ],
  };
}

export async function showProjects(main, context) {
  const { data } = await get("/v1/projects", context.signal);
  const { me } = session;
  const whole = me.project === null && (context.query.has("whole") || data.length === 0);
  const chosen = data.find((one) => [one.id, one.name].includes(context.query.get("project"))) ?? data.find((one) => one.id === me.project) ?? data[0];
  if (!chosen && !whole) {
    fill(main, el("h1", { textContent: "Projects" }), soft("You see no project."));
    return;
  }
  const entries = data.map((one) => el("option", { value: `project=${encodeURIComponent(one.id)}`, textContent: one.name, selected: !whole && one === chosen }));
  if (me.project === null) entries.push(el("option", { value: "whole", textContent: "The whole server", selected: whole }));
  const choice = el("select", { id: "chosen", onchange: () => context.go(`#/projects?${choice.value}`) }, entries);
  const { title, about, parts } = whole ? wholeOf(data, context) : projectOf(chosen, context);
  const shown = parts.filter(Boolean);
  fill(main, el("div", { className: "row" }, el("h1", { textContent: title }), entries.length > 1 ? labelled("Of", choice) : null), about, shown.map(([node]) => node));
  await Promise.all(shown.map(([, list]) => list.refresh()));
}
