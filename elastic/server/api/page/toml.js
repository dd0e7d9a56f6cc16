// Sections of a configuration as TOML: what is copied from another run, to be edited.

const isTable = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const text = (value) => JSON.stringify(value).replace(/\u007f/g, "\\u007f");
const keyOf = (name) => (/^[A-Za-z0-9_-]+$/.test(name) ? name : text(name));

function valueOf(value) {
  if (typeof value === "string") return text(value);
  if (Array.isArray(value)) return `[${value.filter((one) => one !== null).map(valueOf).join(", ")}]`;
  if (isTable(value)) return `{ ${known(value).map(([name, one]) => `${keyOf(name)} = ${valueOf(one)}`).join(", ")} }`;
  return String(value);
}

/** TOML has no null: what is null is left out, as it is in a file. */
const known = (table) => Object.entries(table).filter(([, value]) => value !== null && value !== undefined);

function linesOf(table, path) {
  const plain = known(table).filter(([, value]) => !isTable(value));
  const inner = known(table).filter(([, value]) => isTable(value));
  const head = path.length && (plain.length || !inner.length) ? [`[${path.map(keyOf).join(".")}]`] : [];
  const own = [...head, ...plain.map(([name, value]) => `${keyOf(name)} = ${valueOf(value)}`)];
  return [...own, ...(own.length ? [""] : []), ...inner.flatMap(([name, value]) => linesOf(value, [...path, name]))];
}

/** The text of a TOML file with these sections. */
export const tomlOf = (sections) => `${linesOf(sections, []).join("\n").trim()}\n`;
