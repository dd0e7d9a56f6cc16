// Labels of runs as one line of text, and back: a comma within a value has a backslash before it.

const WRITTEN = { "\\": "\\\\", ",": "\\,", "\n": "\\n", "\r": "\\r" };
const READ = { n: "\n", r: "\r" };

export const labelsAsText = (labels) => Object.entries(labels).map(([name, value]) => `${name}=${value.replace(/[\\,\n\r]/g, (mark) => WRITTEN[mark])}`).join(", ");

export function labelsOf(text) {
  const parts = (text.match(/(?:\\[^]|[^\\,])+/g) ?? []).map((one) => one.trim()).filter(Boolean);
  return Object.fromEntries(parts.map((one) => {
    const [name, ...rest] = one.split("=");
    return [name.trim(), rest.join("=").trim().replace(/\\([^])/g, (_, mark) => READ[mark] ?? mark)];
  }));
}
