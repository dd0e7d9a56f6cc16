// What a person does: said first, with what it will do; then asked of the server, once.
import { Refused, ask, newKey } from "./data.js";
import { button, el, fill, labelled } from "./dom.js";

/** A field of a dialog: {name, label, type, value, options, min, max, step, required, hint}. */
function controlOf(field) {
  const value = field.value ?? "";
  const told = { name: field.name, id: `of-${field.name}`, required: field.required ?? false };
  if (field.options) return el("select", told, field.options.map((one) => el("option", { value: one.value ?? one, textContent: one.text ?? one, selected: (one.value ?? one) === value })));
  if (field.type === "checkbox") return el("input", { ...told, type: "checkbox", checked: Boolean(value) });
  return el("input", { ...told, type: field.type ?? "text", value: String(value), min: field.min, max: field.max, step: field.step ?? (field.type === "number" ? "any" : undefined), placeholder: field.hint, autocomplete: "off" });
}

function valuesOf(controls) {
  return Object.fromEntries(controls.map(([field, control]) => {
    if (field.type === "checkbox") return [field.name, control.checked];
    const text = control.value.trim();
    return [field.name, field.type === "number" ? (text === "" ? null : Number(text)) : text];
  }));
}

/**
 * A dialog that says what will be done, and does it. `says` are lines, `act` gets the fields' values and the idempotency
 * key, which stays the same however often one tries: what was carried out is not carried out again. Resolves with what
 * `act` gives, or null where it was given up; rejects where nobody is signed in any more.
 */
export function action({ title, says = [], fields = [], verb, danger = false, act, shows }) {
  return new Promise((resolve, reject) => {
    const wrong = el("p", { className: "wrong", role: "alert", hidden: true });
    const form = el("form", { method: "dialog" });
    const controls = fields.map((field) => [field, controlOf(field)]); // Names of providers are names of fields, and may be a form's own.
    const given = { key: newKey(), said: "" };
    const go = el("button", { type: "submit", className: danger ? "danger" : "first", textContent: verb });
    const dialog = el("dialog", { ariaLabel: title });
    let result = null;
    form.onsubmit = async (event) => {
      event.preventDefault();
      go.disabled = true;
      wrong.hidden = true;
      try {
        const values = valuesOf(controls);
        if (given.said && given.said !== JSON.stringify(values)) given.key = newKey(); // Another request than before.
        given.said = JSON.stringify(values);
        result = (await act(values, given.key)) ?? true;
        if (shows) await showResult(dialog, shows(result));
        dialog.close();
      } catch (error) {
        if (!(error instanceof Refused)) throw error;
        if (error.type === "unauthenticated") {
          reject(error);
          dialog.close();
          return;
        }
        fill(wrong, error.lines.map((line) => el("span", { textContent: line })));
        wrong.hidden = false;
      } finally {
        go.disabled = false;
      }
    };
    form.append(
      el("h2", { textContent: title }),
      el("ul", { className: "says" }, says.map((line) => el("li", { textContent: line }))),
      ...controls.map(([field, control]) => (field.type === "checkbox" ? el("label", { className: "check" }, control, el("span", { textContent: field.label })) : labelled(field.label, control))),
      wrong,
      el("p", { className: "buttons" }, go, button("Cancel", () => dialog.close())),
    );
    dialog.append(form);
    dialog.onclose = () => {
      dialog.remove();
      resolve(result);
    };
    document.body.append(dialog);
    dialog.showModal();
  });
}

/** What is shown once, such as a secret, until it is closed. */
function showResult(dialog, nodes) {
  return new Promise((resolve) => {
    fill(dialog, nodes, el("p", { className: "buttons" }, button("Close", resolve, { className: "first" })));
    dialog.addEventListener("cancel", resolve, { once: true });
  });
}

/** An edit of what is there: with the ETag of what was read just now. */
export async function edit(place, body, idempotencyKey) {
  const answer = await ask("GET", place, { raw: true });
  return ask("PATCH", place, { body, idempotencyKey, ifMatch: answer.headers.get("etag") });
}
