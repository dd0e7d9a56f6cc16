// What is asked of the server: answers, problems, lists by cursors, events that are read up to now.

export class Refused extends Error {
  constructor(problem) {
    super(problem.detail || problem.title || "the server refused");
    this.problem = problem;
  }

  get type() {
    return String(this.problem.type ?? "").replace("/problems/", "");
  }

  /** All that was found, a line each. */
  get lines() {
    return [...new Set([this.message, ...(this.problem.errors ?? []).map((one) => `${one.pointer}: ${one.detail}`)])];
  }
}

/** Who has signed in; null where nobody has. */
export const session = { me: null };
export const may = (action) => session.me?.actions.includes(action) ?? false;

export const newKey = () => Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");

/** The answer to a request: its JSON, or with `raw` the response itself. A write under the same `idempotencyKey` is carried out once. */
export async function ask(method, path, { body, key, signal, idempotencyKey, ifMatch, raw = false } = {}) {
  const headers = {};
  if (body !== undefined) headers["content-type"] = "application/json";
  if (key) headers.authorization = `Bearer ${key}`;
  else if (method !== "GET" && session.me) headers["x-csrf-token"] = session.me.csrf_token;
  if (method !== "GET") headers["idempotency-key"] = idempotencyKey ?? newKey();
  if (ifMatch) headers["if-match"] = ifMatch;
  let answer;
  try {
    answer = await fetch(path, { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused({ type: "unreachable", detail: "The server does not answer. Runs go on; this page tries again." });
  }
  if (answer.ok) return raw ? answer : answer.status === 204 ? null : answer.json();
  const problem = await answer.json().catch(() => ({ type: "", detail: `status ${answer.status}` }));
  throw new Refused(problem);
}

export const get = (path, signal) => ask("GET", path, { signal });

/** A list that is read page by page, by its cursors. */
export class Pager {
  constructor(path, query = {}, limit = 100) {
    this.path = path;
    this.query = query;
    this.limit = limit;
    this.last = "";
    this.more = true;
    this.verb = "More";
    this.about = "";
    this.unread = false; // Whether nothing of it can be read; `about` says why.
  }

  async next(signal) {
    const query = new URLSearchParams({ limit: String(this.limit) });
    for (const [name, value] of Object.entries(this.query)) {
      for (const one of [value].flat()) if (one !== "" && one !== null && one !== undefined && one !== false) query.append(name, String(one));
    }
    if (this.last) query.set("starting_after", this.last);
    const page = await get(`${this.path}?${query}`, signal);
    this.more = page.has_more;
    this.read(page);
    return page.data;
  }

  /** Note where to go on, and what of it cannot be read. */
  read(page) {
    this.last = page.data.at(-1)?.id ?? this.last;
    const broken = (page.unreadable ?? []).filter((one) => !this.about.includes(one));
    if (broken.length) this.about = [this.about, `A part cannot be shown: ${broken.join("; ")}.`].join(" ").trim();
  }
}

/** What has a text, of a list that is searched for a while at a time. */
export class SearchPager extends Pager {
  constructor(path, query, limit) {
    super(path, query, limit);
    this.verb = "Search on";
    this.about = "Searching …";
    this.searched = this.textless = 0;
  }

  read(page) {
    this.searched += page.searched;
    this.textless += page.textless;
    this.last = page.searched_to || this.last;
    this.unread = Boolean(page.no_text);
    if (page.no_text) this.about = `Nothing can be searched: ${page.no_text}`;
    else this.about = [`${this.more ? "The first" : "All"} ${this.searched.toLocaleString("en")} of these trajectories are searched${this.more ? " so far" : ""}.`, this.textless ? `${this.textless.toLocaleString("en")} of them have no text any more.` : ""].join(" ").trim();
  }
}

/** All entries of a list, up to so many; `more` says whether there are others. */
export async function listed(path, query, signal, most = 1000) {
  const pager = new Pager(path, query);
  const data = [];
  while (pager.more && data.length < most) data.push(...(await pager.next(signal)));
  return { data, more: pager.more };
}

/** The events of a stream that are there now: id, event, data. None where a run that is over has no more. */
export async function eventsOf(path, query, signal) {
  const asked = new URLSearchParams({ ...query, follow: "false" });
  const answer = await ask("GET", `${path}?${asked}`, { signal, raw: true });
  return answer.status === 204 ? [] : parsed(await answer.text());
}

export function parsed(stream) {
  const found = [];
  for (const block of stream.split("\n\n")) {
    const one = { id: "", event: "message", data: "" };
    for (const line of block.split("\n")) {
      const at = line.indexOf(": ");
      if (at > 0) one[line.slice(0, at)] = line.slice(at + 2);
    }
    if (one.data) found.push({ ...one, data: JSON.parse(one.data) });
  }
  return found;
}
