// The shell: who has signed in, which view a place is, and what went wrong. A view is a module; it ends with its signal.
import { Refused, ask, get, may, session } from "./data.js";
import { el, fill } from "./dom.js";
import { listen, start } from "./live.js";
import { showCompare } from "./compare.js";
import { showLogin, showSignIn } from "./login.js";
import { showPool, showPools } from "./pools.js";
import { showProjects } from "./projects.js";
import { showProviders } from "./providers.js";
import { showRun } from "./run.js";
import { showRuns } from "./runs.js";
import { showSubmit } from "./submit.js";
import { showBeside, showTrajectory } from "./trajectory.js";

const VERSION = document.querySelector('meta[name="elastic-version"]').content;
const RUN = "run_[0-9A-Z]+";
const TRAJECTORY = "e?[0-9]+/[0-9]+/[0-9]+";
const VIEWS = [
  [`/runs/(${RUN})/trajectories/(${TRAJECTORY})`, showTrajectory, "Runs"],
  [`/runs/(${RUN})/beside/(${TRAJECTORY},${TRAJECTORY})`, showBeside, "Runs"],
  [`/runs/(${RUN})(?:/(workers|trajectories|events|logs|configuration))?`, showRun, "Runs"],
  [`/compare/(${RUN}(?:,${RUN})*)`, showCompare, "Runs"],
  [`/submit(?:/(${RUN}))?`, showSubmit, "Submit"],
  ["/pools/([A-Za-z0-9][A-Za-z0-9._-]*)", showPool, "Pools"],
  ["/pools", showPools, "Pools"],
  ["/providers", showProviders, "Providers"],
  ["/projects", showProjects, "Projects"],
  ["/login/([0-9a-f]{64})/([A-Za-z0-9][A-Za-z0-9._-]{0,63})", showLogin, ""],
  ["/", showRuns, "Runs"],
  ["/refused/.*", showRuns, "Runs"],
  [".*", showNowhere, ""],
].map(([pattern, show, tab]) => [new RegExp(`^${pattern}$`), show, tab]);
const TABS = [["Runs", "#/", "runs:read"], ["Submit", "#/submit", "runs:write"], ["Pools", "#/pools", "runs:read"], ["Providers", "#/providers", "runs:read"], ["Projects", "#/projects", "projects:read"]];

const main = document.getElementById("main");
const notice = document.getElementById("notice");
const project = document.getElementById("project");
const tabs = document.getElementById("tabs");
const signOut = document.getElementById("sign-out");
let provider = null;
let stale = false; // Until it is loaded anew.
let view = new AbortController();

function say(text, action = null) {
  if (!text && stale) return;
  fill(notice, text, action && [" ", action]);
  notice.hidden = !text;
  notice.dataset.kind = "";
}

function sayStale(text) {
  stale = true;
  say(text, el("button", { type: "button", textContent: "Reload", onclick: () => location.reload() }));
}

/** What went wrong, told once. */
function wrong(error) {
  if (error.name === "AbortError") return;
  if (!(error instanceof Refused)) throw error;
  if (error.type === "unauthenticated") {
    session.me = null;
    signedOut("Your session is over. Sign in again.");
  } else if (error.type === "stale-page") sayStale("This page is stale: it was opened before you signed in anew. Nothing was changed.");
  else say(error.lines.join("\n"));
}

/** The view that was there ends, and so does what was asked in a dialog of it. */
function leave() {
  view.abort();
  for (const one of document.querySelectorAll("dialog[open]")) one.close();
}

function signedOut(text = "") {
  leave();
  signOut.hidden = true;
  tabs.hidden = true;
  project.hidden = true;
  document.getElementById("who").textContent = "";
  showSignIn(main, { provider, text, say, done: signedIn });
}

function signedIn() {
  const { me } = session;
  fill(document.getElementById("who"), `${me.name}, ${me.role}`);
  fill(project, me.memberships.map((one) => el("option", { value: one.project, textContent: one.project_name, selected: one.project === me.project })));
  project.hidden = me.key !== null || me.memberships.length < 2;
  signOut.hidden = false;
  start();
  route();
}

function route() {
  leave();
  if (!session.me) return;
  view = new AbortController();
  const [place, asked] = (location.hash.slice(1) || "/").split("?");
  const [match, show, tab] = VIEWS.map(([pattern, ...rest]) => [pattern.exec(place), ...rest]).find(([found]) => found);
  tabs.hidden = false;
  fill(tabs, TABS.filter(([, , action]) => may(action)).map(([text, href]) => el("a", { href, textContent: text, ariaCurrent: text === tab ? "page" : undefined })));
  document.title = "Elastic";
  main.replaceChildren();
  const needs = TABS.find(([text]) => text === tab)?.[2];
  const context = { signal: view.signal, parts: match.slice(1).map((one) => one ?? ""), query: new URLSearchParams(asked), wrong, go };
  main.setAttribute("aria-busy", "true");
  const { signal } = view;
  Promise.resolve(needs && !may(needs) ? showForbidden(main, needs) : show(main, context)).catch(failed).finally(() => signal.aborted || main.removeAttribute("aria-busy"));
}

/** A view that has nothing to show says so: what went wrong stands above it. */
function failed(error) {
  wrong(error);
  if (error instanceof Refused && session.me && !main.firstChild) fill(main, el("h1", { textContent: "This cannot be shown" }));
}

function showNowhere(main) {
  fill(main, el("h1", { textContent: "There is nothing at this address" }), el("p", {}, el("a", { href: "#/", textContent: "All runs" })));
}

function showForbidden(main, needs) {
  const { name, role } = session.me;
  fill(main, el("h1", { textContent: "This is not for you" }), el("p", {}, `You are signed in as ${name}, ${role}; this takes `, el("code", { textContent: needs }), ". Ask an admin of the project, or sign in with another key."));
}

function go(place) {
  if (location.hash === place) route();
  else location.hash = place;
}

async function checkVersion() {
  const info = await get("/v1");
  provider = info.sign_in ?? null;
  if (info.version !== VERSION) sayStale(`The server is now of version ${info.version}; this page is of ${VERSION}.`);
}

project.onchange = async () => {
  try {
    session.me = await ask("PUT", "/v1/session", { body: { project: project.value } });
    signedIn();
  } catch (error) {
    wrong(error);
  }
};

signOut.onclick = async () => {
  try {
    await ask("DELETE", "/v1/session");
    session.me = null;
    signedOut("You have signed out.");
  } catch (error) {
    wrong(error);
  }
};

window.addEventListener("hashchange", () => {
  say("");
  route();
  main.focus({ preventScroll: true });
  scrollTo(0, 0);
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) checkVersion().catch(() => {});
});

// The stream says that the server is away; a question says why: no session, or nobody there.
listen(async (told) => {
  if (told.kind === "up" && notice.dataset.kind === "lost") say("");
  if (told.kind !== "lost" || !session.me) return;
  try {
    await get("/v1/me");
  } catch (error) {
    wrong(error);
    if (error instanceof Refused && error.type === "unreachable") notice.dataset.kind = "lost";
  }
}, new AbortController().signal);

window.dispatchEvent(new Event("elastic-shown"));
try {
  const me = get("/v1/me");
  me.catch(() => {}); // It is heard once it is known how one signs in.
  await checkVersion();
  session.me = await me;
  if (session.me.csrf_token) signedIn();
  else signedOut();
} catch (error) {
  if (error instanceof Refused && error.type === "unauthenticated") signedOut();
  else wrong(error);
}
