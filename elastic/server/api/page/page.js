// The page of the control API: no library, no build. Everything shown is text; nothing that the server sends is markup.
"use strict";

const VERSION = document.querySelector('meta[name="elastic-version"]').content;
const LIST_EVERY_MS = 2000;
const ENDED = new Set(["stopped", "finished", "failed"]);
const main = document.getElementById("main");
const notice = document.getElementById("notice");
let me = null;
let provider = null;
let stale = false; // Until it is loaded anew.
const REFUSED = {
  "sign-in-refused": "The sign-in did not hold. Sign in again, in one browser and within ten minutes.",
  "no-membership": "You are a member of no project yet. Ask a project's admin to add you.",
  "issuer-unavailable": "The identity provider does not answer. Try again, or sign in with a key.",
};
let leave = () => {};

function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) made[name] = value;
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function say(text, action = null) {
  if (!text && stale) return;
  notice.replaceChildren(text, ...(action ? [" ", action] : []));
  notice.hidden = !text;
}

function sayStale(text) {
  stale = true;
  say(text, el("button", { textContent: "Reload", onclick: () => location.reload() }));
}

class Refused extends Error {
  constructor(problem) {
    super(problem.detail || problem.title || "the server refused");
    this.problem = problem;
  }
}

async function ask(method, path, { body, key } = {}) {
  const headers = {};
  if (body !== undefined) headers["content-type"] = "application/json";
  if (key) headers.authorization = `Bearer ${key}`;
  else if (method !== "GET" && me) headers["x-csrf-token"] = me.csrf_token;
  if (method === "POST") headers["idempotency-key"] = randomKey();
  let answer;
  try {
    answer = await fetch(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
  } catch {
    throw new Refused({ type: "unreachable", detail: "The server does not answer. Runs go on; this page tries again." });
  }
  if (answer.ok) return answer.status === 204 ? null : answer.json();
  const problem = await answer.json().catch(() => ({ type: "", detail: `status ${answer.status}` }));
  throw new Refused(problem);
}

function randomKey() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

// What went wrong, told once. True where the page cannot go on as it is.
function tell(error) {
  if (!(error instanceof Refused)) throw error;
  const type = error.problem.type;
  if (type === "/problems/unauthenticated") {
    me = null;
    showSignIn("Your session is over. Sign in again.");
    return true;
  }
  if (type === "/problems/stale-page") sayStale("This page is stale: it was opened before you signed in anew. Nothing was changed.");
  else say([error.message, ...(error.problem.errors || []).map((one) => `${one.pointer}: ${one.detail}`)].join("\n"));
  return false;
}

async function checkVersion() {
  const info = await ask("GET", "/v1");
  provider = info.sign_in ?? null;
  if (info.version !== VERSION) sayStale(`The server is now of version ${info.version}; this page is of ${VERSION}.`);
}

const percent = (share) => (share === null || share === undefined ? "–" : `${(100 * share).toFixed(0)} %`);
const signed = (number) => (number === null || number === undefined ? "–" : number.toFixed(3).replace("-", "−"));
const dollars = (usd) => `$${usd.toFixed(usd < 100 ? 2 : 0)}`;
const count = (number) => Math.round(number).toLocaleString("en");
const workers = (figures) => Object.values(figures.providers).reduce((sum, one) => sum + one.ready, 0);
const phaseOf = (run) => el("span", { className: `phase ${run.phase}`, textContent: run.phase });
const success = (figures) => percent(figures.last_success_rate ?? figures.success_rate);
const evaluation = (found) => {
  if (!found) return "";
  const told = Object.entries(found.metrics).map(([name, one]) => `${name} ${signed(one.mean)}${one.error === null ? "" : ` ± ${signed(one.error)}`}`);
  const best = found.best_version === null ? "" : `; best: version ${found.best_version}`;
  return `Evaluation of version ${found.version}: ${told.join(", ") || "no episode finished"}${found.timed_out ? " (timed out)" : ""}${best}`;
};
const meanReward = (figures) => signed(figures.last_mean_reward ?? figures.mean_reward);

function showSignIn(text = "") {
  leave();
  leave = () => {};
  document.getElementById("sign-out").hidden = true;
  document.getElementById("who").textContent = "";
  project.hidden = true;
  say(text);
  const input = el("input", { type: "password", id: "key", placeholder: "elastic_…", autocomplete: "off", required: true });
  input.setAttribute("aria-label", "Key");
  const form = el("form", { id: "sign-in" }, input, el("button", { className: "first", textContent: "Sign in" }));
  form.onsubmit = async (event) => {
    event.preventDefault();
    try {
      me = await ask("POST", "/v1/session", { key: input.value.trim() });
    } catch (error) {
      say(error.message);
      return;
    }
    input.value = "";
    say("");
    signedIn();
  };
  const refused = /^#\/refused\/([a-z-]+)$/.exec(location.hash);
  if (refused && !text) say(REFUSED[refused[1]] ?? "The sign-in came to nothing.");
  const back = refused ? "" : location.hash.slice(1);
  const link = provider && el("a", { id: "sign-in-with", href: `/v1/session/oidc?next=${encodeURIComponent(back)}`, textContent: `Sign in with ${provider}` });
  main.replaceChildren(
    el("h1", { textContent: "Sign in" }),
    ...(link ? [el("p", {}, link)] : []),
    form,
    el("p", { className: "soft", textContent: "With a key: the one that elastic serve printed once, or one that an admin made." }),
  );
  input.focus();
}

function signedIn() {
  document.getElementById("who").textContent = `${me.name}, ${me.role}`;
  project.replaceChildren(...me.memberships.map((one) => el("option", { value: one.project, textContent: one.project_name, selected: one.project === me.project })));
  project.hidden = me.key !== null || me.memberships.length < 2;
  document.getElementById("sign-out").hidden = false;
  route();
}

const project = document.getElementById("project");
project.onchange = async () => {
  try {
    me = await ask("PUT", "/v1/session", { body: { project: project.value } });
    signedIn();
  } catch (error) {
    tell(error);
  }
};

document.getElementById("sign-out").onclick = async () => {
  try {
    await ask("DELETE", "/v1/session");
    me = null;
    showSignIn("You have signed out.");
  } catch (error) {
    tell(error);
  }
};

function route() {
  leave();
  leave = () => {};
  if (!me) return;
  const run = /^#\/runs\/(run_[0-9A-Z]+)$/.exec(location.hash);
  const trajectory = /^#\/runs\/(run_[0-9A-Z]+)\/trajectories\/(e?[0-9]+\/[0-9]+\/[0-9]+)$/.exec(location.hash);
  const login = /^#\/login\/([0-9a-f]{64})\/([A-Za-z0-9][A-Za-z0-9._-]{0,63})$/.exec(location.hash);
  if (run) showRun(run[1]);
  else if (trajectory) showTrajectory(trajectory[1], trajectory[2]);
  else if (login) showLogin(login[1], login[2]);
  else showRuns();
}

// A terminal that waits for a key: it has made the secret, and lets in whoever confirms here.
function showLogin(digest, name) {
  const allow = el("button", { id: "allow", className: "first", textContent: "Allow" });
  allow.onclick = async () => {
    allow.disabled = true;
    try {
      await ask("POST", "/v1/me/keys", { body: { name, sha256: digest } });
      main.replaceChildren(el("h1", { textContent: "The terminal is logged in" }), el("p", { textContent: "Its key ends after 90 days, or with your membership." }));
    } catch (error) {
      tell(error);
      allow.disabled = false;
    }
  };
  main.replaceChildren(
    el("h1", { textContent: "Log a terminal in?" }),
    el("p", {}, "A terminal on ", el("b", { textContent: name }), " asks to act as ", el("b", { textContent: me.name }), ". It must show the code"),
    el("p", { id: "code", className: "value", textContent: `${digest.slice(0, 4)}-${digest.slice(4, 8)}`.toUpperCase() }),
    el("p", {}, "Allow it only if you have begun this yourself. ", allow),
  );
}

function showRuns() {
  const heads = ["Run", "Phase", "Step", "Success", "Mean reward", "Tokens/s", "Cost", "Workers", "Begun"];
  const body = el("tbody");
  const table = el(
    "table",
    { id: "runs" },
    el("thead", {}, el("tr", {}, ...heads.map((head, n) => el("th", { textContent: head, className: n > 1 && n < 8 ? "number" : "" })))),
    body,
  );
  const empty = el("p", { className: "soft", textContent: "No runs yet. Submit one: elastic run CONFIG --providers … --remote", hidden: true });
  const more = el("button", { textContent: "Older runs", hidden: true });
  main.replaceChildren(el("h1", { textContent: "Runs" }), table, empty, el("p", {}, more));
  let limit = 25;
  let timer = 0;
  let left = false;
  const number = (text) => el("td", { className: "number", textContent: text });
  async function refresh() {
    clearTimeout(timer);
    try {
      const page = await ask("GET", `/v1/runs?limit=${limit}`);
      if (left) return;
      body.replaceChildren(
        ...page.data.map((run) =>
          el(
            "tr",
            {},
            el("td", {}, el("a", { href: `#/runs/${run.id}`, textContent: run.name }), " ", el("span", { className: "soft", textContent: `…${run.id.slice(-6)}` })),
            el("td", {}, phaseOf(run)),
            number(`${run.figures.step}/${run.figures.steps}`),
            number(success(run.figures)),
            number(meanReward(run.figures)),
            number(count(ENDED.has(run.phase) ? 0 : run.figures.tokens_per_s)),
            number(dollars(run.figures.usd)),
            number(String(ENDED.has(run.phase) ? 0 : workers(run.figures))),
            el("td", { textContent: run.started_at ?? "–" }),
          ),
        ),
      );
      empty.hidden = page.data.length > 0;
      more.hidden = !page.has_more || limit >= 100;
      if (notice.dataset.kind === "lost") say("");
      notice.dataset.kind = "";
    } catch (error) {
      if (left || tell(error)) return;
      notice.dataset.kind = "lost";
    }
    timer = setTimeout(refresh, LIST_EVERY_MS);
  }
  more.onclick = () => {
    limit = 100;
    refresh();
  };
  leave = () => {
    left = true;
    clearTimeout(timer);
  };
  refresh();
}

function chart(title) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  svg.setAttribute("class", "chart");
  svg.setAttribute("viewBox", "0 0 100 100");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", title);
  svg.append(line);
  const range = el("span");
  const figure = el("figure", {}, el("figcaption", {}, el("span", { textContent: title }), range), svg);
  function draw(values, top, text) {
    const points = values.filter((value) => value !== null);
    const highest = top ?? Math.max(1e-9, ...points);
    const lowest = Math.min(0, ...points);
    const step = points.length > 1 ? 98 / (points.length - 1) : 0;
    const place = (value) => (97 - 94 * ((value / 2 - lowest / 2) / (highest / 2 - lowest / 2))).toFixed(2); // Sums of some rewards are no numbers.
    line.setAttribute("points", points.map((value, n) => `${(1 + n * step).toFixed(2)},${place(value)}`).join(" "));
    range.textContent = points.length ? text(points) : "";
  }
  return { figure, draw };
}

// What evaluations came to by version: the mean reward, and the largest k of pass@k. Hidden where nothing was evaluated.
function evaluationCharts() {
  const charts = [chart("Evaluation: mean reward"), chart("Evaluation: passed")];
  for (const one of charts) one.figure.hidden = true;
  function draw(evaluations) {
    const names = Object.keys(evaluations.find((one) => Object.keys(one.metrics).length)?.metrics ?? {});
    const chosen = [names.find((name) => name.startsWith("avg@")), names.findLast((name) => name.startsWith("pass@"))];
    const best = evaluations.findLast((one) => one.best);
    chosen.forEach((name, n) => {
      const known = evaluations.filter((one) => one.metrics[name]);
      charts[n].figure.hidden = !known.length;
      const at = (one) => `${signed(one.metrics[name].mean)} with version ${one.version}`;
      const told = () => `${name} ${at(known.at(-1))}${best?.metrics[name] ? `, best ${at(best)}` : ""}`;
      charts[n].draw(known.map((one) => one.metrics[name].mean), n ? 1 : null, told);
    });
  }
  return { figures: charts.map((one) => one.figure), draw };
}

function tile(label) {
  const value = el("div", { className: "value", textContent: "–" });
  return { node: el("div", { className: "tile" }, el("div", { className: "label", textContent: label }), value), value };
}

// Texts of trajectories are anybody's: what would steer or reorder is made visible.
const visible = (text) => text.replace(/[\p{Cc}\p{Cf}\p{Cs}]/gu, (mark) => (mark === "\n" || mark === "\t" ? mark : "\ufffd"));
const parts = (rewards) => Object.entries(rewards).map(([name, value]) => `${visible(name)} ${value.toPrecision(3)}`).join(", ");
const ended = (one) => [one.reward === null ? visible(one.cause) || "no reward" : one.cause ? visible(one.cause) : "", one.truncated ? "truncated" : ""].filter(Boolean).join(", ");

// What the policy did: a page of trajectories, the newest or the best or the worst first, and what is asked of them.
function trajectoriesOf(id) {
  const named = (label, control) => el("label", {}, `${label} `, control);
  const order = el("select", { id: "order" }, ...["newest", "best", "worst"].map((one) => el("option", { value: one, textContent: one })));
  const step = el("input", { id: "of-step", type: "number", min: "0", size: 6 });
  const group = el("input", { id: "of-group", size: 8, placeholder: "3/0" });
  const truncated = el("input", { id: "truncated", type: "checkbox" });
  const failed = el("input", { id: "failed", type: "checkbox" });
  const evaluation = el("input", { id: "of-evaluations", type: "checkbox" });
  const form = el("form", { className: "filters" }, named("Order", order), named("Step", step), named("Group", group), named("Truncated", truncated), named("Failed", failed), named("Evaluations", evaluation));
  const body = el("tbody");
  const empty = el("p", { className: "soft", textContent: "No such trajectories." });
  const more = el("button", { textContent: "More" });
  const heads = ["Trajectory", "Reward", "Parts", "Turns", "Tokens", "End"];
  const head = el("thead", {}, el("tr", {}, ...heads.map((one, n) => el("th", { textContent: one, className: [1, 3, 4].includes(n) ? "number" : "" }))));
  let last = "";
  let asked = 0;
  async function load(after = "") {
    const mine = ++asked;
    const query = new URLSearchParams({ limit: "20", order: order.value });
    if (step.value) query.set("step", step.value);
    if (group.value.trim()) query.set("group", group.value.trim());
    if (truncated.checked) query.set("truncated", "true");
    if (failed.checked) query.set("failed", "true");
    if (evaluation.checked) query.set("evaluation", "true");
    if (after) query.set("starting_after", after);
    const page = await ask("GET", `/v1/runs/${id}/trajectories?${query}`);
    if (mine !== asked) return;
    const rows = page.data.map((one) =>
      el(
        "tr",
        {},
        el("td", {}, el("a", { href: `#/runs/${id}/trajectories/${one.id}`, textContent: one.id })),
        el("td", { className: "number", textContent: signed(one.reward) }),
        el("td", { className: "wide", textContent: parts(one.rewards) }),
        el("td", { className: "number", textContent: String(one.turns) }),
        el("td", { className: "number", textContent: count(one.policy_tokens) }),
        el("td", { className: "wide", textContent: ended(one) }),
      ),
    );
    if (after) body.append(...rows);
    else body.replaceChildren(...rows);
    last = page.data.at(-1)?.id ?? "";
    empty.hidden = body.children.length > 0;
    more.hidden = !page.has_more;
  }
  form.onsubmit = (event) => event.preventDefault();
  form.onchange = () => load().catch(tell);
  more.onclick = () => load(last).catch(tell);
  const node = el("section", { id: "trajectories" }, el("h2", { textContent: "Trajectories" }), form, el("table", {}, head, body), empty, el("p", {}, more));
  return { node, refresh: () => (body.children.length > 20 ? undefined : load()) };
}

const LIKELY = [-0.1, -0.7, -2.3, -4.6];
const likelihood = (logprob) => `p${LIKELY.filter((least) => logprob < least).length}`;
const TOKENS_SHOWN = 4000;

function tokensOf(context, message) {
  const shown = Math.min(message.tokens, TOKENS_SHOWN);
  const spans = Array.from({ length: shown }, (_, n) => {
    const at = message.start + n;
    const text = context.pieces ? visible(context.pieces[at]) : ` ${context.token_ids[at]}`;
    const made = el("span", { className: `token ${likelihood(context.logprobs[at])}`, textContent: text });
    made.title = `token ${context.token_ids[at]}, version ${context.versions[at]}, log-probability ${context.logprobs[at].toFixed(3)}`;
    return made;
  });
  const left = message.tokens - shown;
  return el("div", { className: "said" }, ...spans, left ? el("span", { className: "soft", textContent: ` … ${count(left)} more tokens are not shown` }) : null);
}

function messageOf(context, message) {
  const node = el("article", { className: `message ${message.by_policy ? "policy" : ""}` });
  const about = [];
  if (message.by_policy && message.tokens) {
    const range = [message.start, message.start + message.tokens];
    const versions = context.versions.slice(...range);
    const mean = context.logprobs.slice(...range).reduce((sum, one) => sum + one, 0) / message.tokens;
    const distinct = [...new Set(versions)];
    about.push(`${count(message.tokens)} tokens of version${distinct.length > 1 ? "s" : ""} ${distinct.join(", ")}`, `mean log-probability ${mean.toFixed(2)}`);
  }
  const head = el("header", {}, el("b", { textContent: visible(message.role) }), el("span", { className: "soft", textContent: about.join(", ") }));
  const text = el("div", {});
  const plain = () => [
    message.reasoning ? el("details", { open: true }, el("summary", { textContent: "Reasoning" }), el("div", { className: "said soft", textContent: visible(message.reasoning) })) : null,
    message.content ? el("div", { className: "said", textContent: visible(message.content) }) : null,
    ...message.tool_calls.map((call) => el("div", { className: "said call", textContent: `${visible(call.name)}(${visible(call.arguments)})` })),
  ].filter(Boolean);
  text.append(...plain());
  if (message.by_policy) {
    const button = el("button", { textContent: "Tokens" });
    button.onclick = () => {
      const tokens = button.textContent === "Tokens";
      button.textContent = tokens ? "Text" : "Tokens";
      text.replaceChildren(...(tokens ? [tokensOf(context, message)] : plain()));
    };
    head.append(button);
  }
  node.append(head, text);
  return node;
}

function contextOf(context) {
  const shared = context.shared_tokens ?? 0;
  const all = context.messages ?? [{ role: "tokens", content: "", reasoning: "", tool_calls: [], by_policy: true, start: 0, tokens: context.token_ids.length }];
  const own = all.filter((one) => one.start + one.tokens > shared);
  const left = [];
  if (own.length < all.length) left.push(`${all.length - own.length} messages are as in a context above.`);
  if (context.left_out_messages) left.push(`${count(context.left_out_messages)} messages at the end are left out.`);
  if (context.left_out_tokens) left.push(`${count(context.left_out_tokens)} tokens at the end are left out.`);
  return [left.length ? el("p", { className: "soft", textContent: left.join(" ") }) : null, ...own.map((one) => messageOf(context, one))];
}

function showTrajectory(id, name) {
  let left = false;
  leave = () => {
    left = true;
  };
  const title = el("h1", {}, el("a", { href: `#/runs/${id}`, textContent: "Run" }), `Trajectory ${name}`);
  main.replaceChildren(title);
  ask("GET", `/v1/runs/${id}/trajectories/${name}`).then((found) => {
    if (left) return;
    const about = { Step: String(found.step), Reward: signed(found.reward), Turns: String(found.turns), "Policy tokens": count(found.policy_tokens), Environment: found.environment || "–" };
    const tiles = Object.entries(about).map(([label, value]) => {
      const made = tile(label);
      made.value.textContent = visible(value);
      return made.node;
    });
    const listed = [];
    if (Object.keys(found.rewards).length) listed.push(`Rewards by part: ${parts(found.rewards)}`);
    if (Object.keys(found.metrics).length) listed.push(`Metrics: ${parts(found.metrics)}`);
    if (ended(found)) listed.push(`End: ${ended(found)}`);
    if (found.no_text) listed.push(`There is no text: ${visible(found.no_text)}`);
    if (found.left_out_branches) listed.push(`${found.left_out_branches} branches are left out.`);
    const policy = (context) => [context.policy ? `policy ${visible(context.policy)}` : "", context.policy_reward === null ? "" : `reward ${signed(context.policy_reward)}`].filter(Boolean).join(", ");
    main.replaceChildren(
      title,
      el("div", { className: "tiles" }, ...tiles),
      ...listed.map((text) => el("p", { className: "soft", textContent: text })),
      found.task ? el("details", {}, el("summary", { textContent: "Task" }), el("div", { className: "said", textContent: visible(found.task) })) : "",
      el("p", { className: "legend soft" }, "Tokens by how likely they were: ", ...["at least 90 %", "50 %", "10 %", "1 %", "less"].flatMap((text, n) => [el("span", { className: `token p${n}`, textContent: text }), " "])),
      el("section", { className: "context" }, el("h2", { textContent: ["What was said", policy(found)].filter(Boolean).join(": ") }), ...contextOf(found)),
      ...found.branches.map((one) => el("section", { className: "context" }, el("h2", { textContent: [`Branch ${one.branch}`, policy(one)].filter(Boolean).join(": ") }), ...contextOf(one))),
    );
  }, tell);
}

function showRun(id) {
  const title = el("span", { textContent: id });
  const phase = el("span");
  const act = (text, what) => {
    const button = el("button", { textContent: text, hidden: true });
    button.onclick = async () => {
      button.disabled = true;
      try {
        await what();
        say("");
      } catch (error) {
        tell(error);
      }
      button.disabled = false;
    };
    return button;
  };
  const place = `/v1/runs/${id}`;
  const stop = act("Stop", () => ask("POST", `${place}/stop`, { body: {} }).then(show));
  const resume = act("Resume", () => ask("POST", `${place}/resume`, { body: {} }).then(follow));
  const remove = act("Delete", async () => {
    if (!confirm(`Delete ${id} with its journal, checkpoints and report?`)) return;
    await ask("DELETE", place);
    location.hash = "#/";
  });
  const report = el("a", { textContent: "Report", href: `${place}/report?format=html`, target: "_blank", rel: "noopener" });
  const tiles = Object.fromEntries(["Step", "Success", "Mean reward", "Tokens/s", "Cost", "Workers", "Preemptions", "Queued turns"].map((label) => [label, tile(label)]));
  const rates = chart("Success by step");
  const speed = chart("Tokens/s");
  const evaluations = evaluationCharts();
  const cause = el("p", { className: "soft" });
  const evaluated = el("p", { id: "evaluated", className: "soft" });
  const conditions = el("tbody");
  const providers = el("tbody");
  const checkpoints = el("ol", { className: "listed", id: "checkpoints" });
  const trajectories = trajectoriesOf(id);
  const heads = (...names) => el("thead", {}, el("tr", {}, ...names.map((name) => el("th", { textContent: name }))));
  main.replaceChildren(
    el("h1", {}, title, phase, stop, resume, remove, report),
    cause,
    el("div", { className: "tiles", id: "figures" }, ...Object.values(tiles).map((one) => one.node)),
    el("div", { className: "charts" }, rates.figure, speed.figure, ...evaluations.figures),
    evaluated,
    el("h2", { textContent: "Providers" }),
    el("table", {}, heads("Provider", "Ready", "Booting", "Running turns", "Preemptions", "Deaths", "Cost", "$/hour"), providers),
    el("h2", { textContent: "Conditions" }),
    el("table", {}, heads("Condition", "Status", "Reason", "Message"), conditions),
    el("h2", { textContent: "Newest checkpoints" }),
    checkpoints,
    trajectories.node,
  );
  let stream = null;
  let left = false;
  let drawnStep = "";

  function show(run) {
    const figures = run.figures;
    const over = ENDED.has(run.phase);
    const may = me.actions.includes("runs:write");
    title.textContent = run.name;
    title.title = run.id;
    phase.replaceChildren(phaseOf(run));
    stop.hidden = !may || over || run.phase === "stopping";
    resume.hidden = !may || !over || run.phase === "finished";
    remove.hidden = !may || !over;
    cause.textContent = run.cause;
    evaluated.textContent = evaluation(figures.evaluation);
    const shown = {
      Step: `${figures.step}/${figures.steps}`,
      Success: success(figures),
      "Mean reward": meanReward(figures),
      "Tokens/s": count(over ? 0 : figures.tokens_per_s),
      Cost: dollars(figures.usd) + (run.budget_usd === null ? "" : ` of ${dollars(run.budget_usd)}`),
      Workers: String(over ? 0 : workers(figures)),
      Preemptions: String(figures.preemptions),
      "Queued turns": String(figures.queued_turns),
    };
    for (const [label, text] of Object.entries(shown)) tiles[label].value.textContent = text;
    const cells = (...texts) => el("tr", {}, ...texts.map((text) => el("td", { className: "wide", textContent: String(text) })));
    providers.replaceChildren(
      ...Object.entries(figures.providers).map(([name, one]) =>
        cells(name, one.ready, one.booting, one.running_turns, one.preemptions, one.deaths ? `${one.deaths}, ${one.replaced} replaced` : 0, dollars(one.usd), one.usd_per_hour.toFixed(2)),
      ),
    );
    conditions.replaceChildren(...run.conditions.map((one) => cells(one.type, one.status, one.reason, one.message)));
    const drawn = `${figures.step} ${figures.evaluation?.version}`;
    if (drawn !== drawnStep) {
      drawnStep = drawn;
      drawSeries();
    }
  }

  async function drawSeries() {
    try {
      const [series, kept] = await Promise.all([ask("GET", `${place}/metrics?samples=300`), ask("GET", `${place}/checkpoints?limit=5`)]);
      if (left) return;
      rates.draw(series.steps.map((one) => one.success_rate), 1, (points) => percent(points.at(-1)));
      speed.draw(series.samples.map((one) => one.tokens_per_s), null, (points) => `up to ${count(Math.max(...points))}`);
      evaluations.draw(series.evaluations);
      checkpoints.replaceChildren(...kept.data.map((one) => el("li", { textContent: `${one.created_at}  version ${one.version}  ${count(one.bytes / 1e6)} MB` })));
      await trajectories.refresh();
    } catch (error) {
      if (!(error instanceof Refused)) throw error; // A run that has not begun has no series yet.
    }
  }

  function follow() {
    if (stream) stream.close();
    stream = new EventSource(`${place}/figures`);
    stream.addEventListener("run", (event) => {
      if (notice.dataset.kind === "lost") say("");
      notice.dataset.kind = "";
      if (event.data) show(JSON.parse(event.data));
    });
    stream.addEventListener("run.ended", () => {
      stream.close();
      drawSeries();
    });
    stream.onerror = async () => {
      if (left) return;
      try {
        await ask("GET", place); // Says why: no session, no such run; or the server is away, and the stream tries again.
        if (stream.readyState === EventSource.CLOSED) setTimeout(() => left || follow(), LIST_EVERY_MS);
      } catch (error) {
        if (left || tell(error)) return;
        notice.dataset.kind = "lost";
        if (error.problem.type === "/problems/not-found") stream.close();
        else if (stream.readyState === EventSource.CLOSED) setTimeout(() => left || follow(), LIST_EVERY_MS);
      }
    };
  }
  leave = () => {
    left = true;
    if (stream) stream.close();
  };
  ask("GET", place).then((run) => {
    if (left) return;
    show(run);
    follow();
  }, tell);
}

window.addEventListener("hashchange", () => {
  say("");
  route();
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) checkVersion().catch(() => {});
});

(async () => {
  try {
    await checkVersion();
    me = await ask("GET", "/v1/me");
    if (!me.csrf_token) showSignIn();
    else signedIn();
  } catch (error) {
    if (error.problem?.type === "/problems/unauthenticated") showSignIn();
    else tell(error);
  }
})();
