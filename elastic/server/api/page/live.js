// What runs become, as it happens: views listen here. A page that is hidden hears nothing, and looks anew once it is seen.
import { LiveStream } from "./live_stream.js";

const HERE_MS = 30_000;
const listeners = new Set();
let send = () => {};
let follows = false;

/** Call `heard` with what happens until the signal aborts: {kind: run|deleted|anew|lost|up|follow, …}. */
export function listen(heard, signal) {
  listeners.add(heard);
  signal.addEventListener("abort", () => listeners.delete(heard));
}

/** Ask for one of the few streams that pages of a browser may have beside the shared one: a page that is seen hears
 * {kind: follow, granted} whenever that changes. */
export function follow(signal) {
  follows = true;
  here();
  signal.addEventListener("abort", () => {
    follows = false;
    here();
  });
}

function tell(told) {
  if (document.hidden) return;
  for (const heard of [...listeners]) heard(told);
}

function connect() {
  if (typeof SharedWorker === "undefined") {
    const own = new LiveStream(tell);
    return ({ seen, again, follows: granted }) => {
      own.want(seen);
      if (again) own.begin();
      tell({ kind: "follow", granted });
    };
  }
  const place = "/page/live_worker.js";
  const policy = window.trustedTypes?.createPolicy("elastic", { createScriptURL: () => place });
  const worker = new SharedWorker(policy ? policy.createScriptURL(place) : place, { type: "module", name: "elastic" });
  worker.port.onmessage = (event) => tell(event.data);
  worker.port.start();
  return (told) => worker.port.postMessage(told);
}

const here = (again = false) => send({ seen: !document.hidden, again, follows });

/** Begin, or begin anew as somebody else. */
export function start() {
  if (send.started) {
    here(true);
    return;
  }
  send = connect();
  send.started = true;
  here(true);
  setInterval(here, HERE_MS);
  document.addEventListener("visibilitychange", () => {
    here();
    if (!document.hidden) tell({ kind: "anew" });
  });
  window.addEventListener("pagehide", () => send({ seen: false, follows: false }));
  window.addEventListener("pageshow", (event) => event.persisted && here());
}
