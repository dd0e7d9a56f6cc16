// Numbers as people read them, as the report has them: rounded to what matters, a dash where there is none.

export const NONE = "–";
const none = (value) => value === null || value === undefined || Number.isNaN(value);
const minus = (text) => text.replace("-", "−");

export function count(value) {
  if (none(value)) return NONE;
  const size = Math.abs(value);
  if (size < 10_000) return minus(Number.isInteger(value) || size >= 100 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3))));
  return scaled(value, "");
}

function scaled(value, unit) {
  for (const [scale, prefix] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= 0.9995 * scale) return minus(`${Number((value / scale).toPrecision(3))} ${prefix}${unit}`);
  }
  return minus(`${Number(value.toPrecision(3))} ${unit}`.trim());
}

/** So many of something, such as 1 worker or 2 workers. */
export const many = (value, word) => `${count(value)} ${word}${value === 1 ? "" : "s"}`;

export const bytes = (value) => (none(value) ? NONE : scaled(value, "B"));

export function percent(share) {
  if (none(share)) return NONE;
  if (share > 0 && share < 0.0005) return "< 0.1 %";
  return minus(share === 0 || share === 1 ? `${100 * share} %` : `${(100 * share).toFixed(1)} %`);
}

export function reward(value) {
  if (none(value)) return NONE;
  const size = Math.abs(value);
  return minus(size >= 1e15 ? value.toPrecision(3) : size < 100 ? value.toFixed(3) : value.toLocaleString("en", { maximumFractionDigits: 1 }));
}

export function usd(value) {
  if (none(value)) return NONE;
  if (value === 0 || Math.abs(value) >= 1) return minus(`$${value.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 })}`);
  return `$${value >= 0.001 ? value.toFixed(3) : Number(value.toPrecision(2))}`;
}

export function duration(seconds) {
  if (none(seconds)) return NONE;
  if (seconds > 0 && seconds < 0.0005) return "< 1 ms";
  if (seconds < 0.9995) return seconds === 0 ? "0 s" : minus(`${Number((1000 * seconds).toPrecision(3))} ms`);
  if (seconds < 59.95) return `${Number(seconds.toPrecision(3))} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 48 * 60) return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
  return `${Math.floor(minutes / 1440)} d ${Math.floor((minutes % 1440) / 60)} h`;
}

/** A moment of a run, since its beginning. */
export function clock(seconds) {
  if (none(seconds)) return NONE;
  const whole = Math.max(0, Math.floor(seconds));
  const [h, m, s] = [Math.floor(whole / 3600), Math.floor((whole % 3600) / 60), whole % 60];
  const two = (n) => String(n).padStart(2, "0");
  return h ? `${h}:${two(m)}:${two(s)}` : `${m}:${two(s)}`;
}

/** A moment of the calendar, in the reader's time zone; as it was told where that is none. */
export function moment(text) {
  if (!text) return NONE;
  const at = new Date(text);
  return Number.isNaN(at.getTime()) ? String(text) : at.toLocaleString("sv", { dateStyle: "short", timeStyle: "short" });
}

export const ENDED = new Set(["stopped", "finished", "failed"]);
export const readyWorkers = (figures) => Object.values(figures.providers).reduce((sum, one) => sum + one.ready, 0);
