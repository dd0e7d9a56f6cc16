// Signing in, and letting a terminal in.
import { Refused, ask, session } from "./data.js";
import { button, el, fill, labelled, soft } from "./dom.js";

const REFUSED = {
  "sign-in-refused": "The sign-in did not hold. Sign in again, in one browser and within ten minutes.",
  "no-membership": "You are a member of no project yet. Ask a project's admin to add you.",
  "issuer-unavailable": "The identity provider does not answer. Try again, or sign in with a key.",
};

/** `done` is called once somebody has signed in. */
export function showSignIn(main, { provider, text, say, done }) {
  say(text);
  const input = el("input", { type: "password", id: "key", placeholder: "elastic_…", autocomplete: "off", required: true });
  const form = el("form", { id: "sign-in" }, labelled("Key", input), el("button", { className: "first", textContent: "Sign in" }));
  form.onsubmit = async (event) => {
    event.preventDefault();
    try {
      session.me = await ask("POST", "/v1/session", { key: input.value.trim() });
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      say(error.message);
      return;
    }
    input.value = "";
    say("");
    done();
  };
  const refused = /^#\/refused\/([a-z-]+)$/.exec(location.hash);
  if (refused && !text) say(REFUSED[refused[1]] ?? "The sign-in came to nothing.");
  const back = refused ? "" : location.hash.slice(1);
  const link = provider && el("a", { id: "sign-in-with", href: `/v1/session/oidc?next=${encodeURIComponent(back)}`, textContent: `Sign in with ${provider}` });
  fill(main, el("h1", { textContent: "Sign in" }), link && el("p", {}, link), form, soft("With a key: the one that elastic serve printed once, or one that an admin made."));
  input.focus();
}

/** A terminal that waits for a key: it has made the secret, and lets in the person who confirms here. */
export function showLogin(main, { parts: [digest, name], wrong }) {
  if (session.me.member === null) {
    fill(main, el("h1", { textContent: "Log a terminal in?" }), el("p", { textContent: `You are signed in with the key ${session.me.name}, which is of no person. Sign out and in as a person; a terminal can have this key itself: ` }, el("code", { textContent: `elastic api login ${location.origin} --key` })));
    return;
  }
  const allow = button("Allow", async () => {
    try {
      await ask("POST", "/v1/me/keys", { body: { name, sha256: digest } });
      fill(main, el("h1", { textContent: "The terminal is logged in" }), el("p", { textContent: "Its key ends after 90 days, or with your membership." }));
    } catch (error) {
      wrong(error);
    }
  }, { id: "allow", className: "first" });
  fill(
    main,
    el("h1", { textContent: "Log a terminal in?" }),
    el("p", {}, "A terminal on ", el("b", { textContent: name }), " asks to act as ", el("b", { textContent: session.me.name }), ". It must show the code"),
    el("p", { id: "code", className: "value", textContent: `${digest.slice(0, 4)}-${digest.slice(4, 8)}`.toUpperCase() }),
    el("p", {}, "Allow it only if you have begun this yourself. ", allow),
  );
}
