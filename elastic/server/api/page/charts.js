// Charts on uPlot: lines or areas over one axis, a legend with the values under the cursor, words for who sees no picture.
import { el, fill } from "./dom.js";
import { NONE, clock, count } from "./units.js";

const HEIGHT = 190;
const WHOLE = new Set(["step", "version", "tokens"]);
const STEPS = Array.from({ length: 15 }, (_, power) => [1, 2, 5].map((one) => one * 10 ** power)).flat();
const TIMES_S = [...[1, 2, 5, 10, 15, 30].flatMap((one) => [one, 60 * one]), ...[1, 2, 3, 6, 12].map((one) => 3600 * one), ...[1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].map((one) => 86_400 * one)].sort((a, b) => a - b);
const LARGEST = 1e100; // Beyond it sums within the library are no numbers.
export const DASHES = [[], [6, 3], [2, 3], [9, 3, 2, 3], [12, 4], [1, 4]];
const drawn = new Set();
const dark = window.matchMedia("(prefers-color-scheme: dark)");
dark.addEventListener("change", () => drawn.forEach((one) => one.redraw()));
const colourOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

const KNOWN = ["trainer", "reserved", "serving", "spot", "serverless", "ray"];
const COLOURS = 9;

const fnv1a = (text) => new TextEncoder().encode(text).reduce((found, byte) => Math.imul(found ^ byte, 0x01000193) >>> 0, 0x811c9dc5);

/** Give each name a slot by its letters: one of these that is free yet, else one of the others, else one that is shared. */
function assign(slots, names, these, others = []) {
  for (const name of [...new Set(names)].filter((one) => !slots.has(one)).sort()) {
    const first = fnv1a(name) % these.length;
    const wished = [...these.slice(first), ...these.slice(0, first), ...others];
    const taken = new Set(slots.values());
    slots.set(name, wished.find((slot) => !taken.has(slot)) ?? wished[0]);
  }
}

const SLOTS = [...Array(COLOURS).keys()];

/** The colours of providers, the same as in reports (`charts.provider_classes`): others have theirs by their names. */
export function providerColours(names) {
  const slots = new Map(names.filter((name) => KNOWN.includes(name)).map((name) => [name, KNOWN.indexOf(name)]));
  assign(slots, names, SLOTS.slice(KNOWN.length), SLOTS.slice(0, KNOWN.length));
  return Object.fromEntries(names.map((name) => [name, `provider-${slots.get(name)}`]));
}

/** Slots of colours for jobs by name; a job keeps the one that it had `before`. */
export function jobSlots(jobs, before) {
  const slots = new Map([...before].filter(([job]) => jobs.includes(job)));
  assign(slots, jobs, SLOTS);
  return slots;
}

/** A colour and a dash for one of several alike: nothing is told by colour alone. */
export const styleOf = (place) => ({ colour: `provider-${[2, 5, 4, 1, 3, 6, 8, 7, 0][place % COLOURS]}`, dash: DASHES[place % DASHES.length] });

const held = (value) => (typeof value !== "number" || Number.isNaN(value) ? null : Math.max(-LARGEST, Math.min(LARGEST, value)));

export const AXES = {
  step: { title: "step", unit: count },
  time: { title: "time since the run began", unit: clock },
  tokens: { title: "tokens", unit: count },
  usd: { title: "dollars", unit: (value) => `$${count(value)}` },
  version: { title: "weights version", unit: count },
};

class Chart {
  constructor({ title, unit = count, axis = "step", stacked = false, stepped = false, sync = "" }) {
    Object.assign(this, { title, unit, axis, stacked, stepped, sync, plot: null, series: [], data: [[]], marks: [] });
    this.place = el("div", { className: "plot", role: "img", tabIndex: 0 });
    this.legend = el("ul", { className: "legend" });
    this.axisTitle = el("span", { className: "axis" });
    this.node = el("figure", { className: "chart" }, el("figcaption", {}, el("b", { textContent: title }), this.axisTitle), this.place, this.legend);
    this.place.onkeydown = (event) => this.step(event);
    this.sized = new ResizeObserver(() => this.resize());
    this.sized.observe(this.place);
    drawn.add(this);
  }

  /** Show series over these values: each {label, colour, dash, values}. `marks` are values of x with what happened there. */
  set(xs, series, { axis = this.axis, marks = [] } = {}) {
    const told = series.filter((one) => one.values.some((value) => value !== null && value !== undefined));
    this.node.hidden = told.length === 0 || xs.length === 0;
    const shape = JSON.stringify([axis, told.map((one) => [one.label, one.colour, one.dash])]);
    this.axis = axis;
    this.marks = marks;
    this.series = told.map((one) => ({ ...one, values: one.values.map(held) }));
    this.data = [xs, ...this.drawnValues()];
    this.axisTitle.textContent = `over ${AXES[axis].title}`;
    if (this.node.hidden) return;
    if (shape !== this.shape || !this.plot) {
      this.shape = shape;
      this.redraw();
    } else this.plot.setData(this.data);
    this.tell(null);
    this.place.setAttribute("aria-label", this.words());
  }

  /** Areas stand on one another: the highest sum is painted first, the others over it. */
  drawnValues() {
    if (!this.stacked) return this.series.map((one) => one.values);
    const sumFrom = (n, at) => this.series.slice(n).reduce((sum, one) => sum + (one.values[at] ?? 0), 0);
    return this.series.map((one, n) => one.values.map((_, at) => sumFrom(n, at)));
  }

  words() {
    const told = this.series.map((one) => {
      const known = one.values.filter((value) => value !== null);
      const [low, high] = known.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
      return `${one.label}: last ${this.unit(known.at(-1))}, lowest ${this.unit(low)}, highest ${this.unit(high)}`;
    });
    return `${this.title}. ${told.join("; ")}`;
  }

  options() {
    const [ink, grid] = [colourOf("muted"), colourOf("grid")];
    const axis = (unit) => ({ stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 }, font: "11px system-ui, sans-serif", values: (_, splits) => splits.map((one) => (one === null ? null : unit(one))) });
    return {
      width: Math.max(200, this.place.clientWidth),
      height: HEIGHT,
      legend: { show: false },
      cursor: { sync: this.sync ? { key: this.sync } : undefined, points: { size: 6 }, y: false },
      scales: { x: { time: false }, y: { range: (_, low, high) => rangeOf(low, high, this.stacked) } },
      axes: [{ ...axis(AXES[this.axis].unit), size: 30, incrs: this.axis === "time" ? TIMES_S : WHOLE.has(this.axis) ? STEPS : undefined }, { ...axis(this.unit), size: 58 }],
      series: [{}, ...this.series.map((one) => this.line(one))],
      hooks: { setCursor: [(plot) => this.tell(plot.cursor.idx ?? null)], draw: [(plot) => this.drawMarks(plot)] },
    };
  }

  line(one) {
    const stroke = colourOf(one.colour);
    const base = { label: one.label, stroke, width: this.stacked ? 1 : 1.75, dash: this.stacked ? undefined : one.dash, spanGaps: true, points: { show: this.data[0].length < 3 } };
    if (this.stepped) return { ...base, paths: uPlot.paths.stepped({ align: 1 }) };
    return this.stacked ? { ...base, fill: stroke } : base;
  }

  redraw() {
    this.plot?.destroy();
    this.plot = null;
    if (this.node.hidden || !this.place.isConnected) return;
    this.plot = new uPlot(this.options(), this.data, this.place);
    this.resize();
  }

  resize() {
    if (!this.plot) {
      if (!this.node.hidden && this.series.length) this.redraw();
      return;
    }
    const width = Math.max(200, this.place.clientWidth);
    if (width !== this.plot.width) this.plot.setSize({ width, height: HEIGHT });
  }

  drawMarks(plot) {
    if (!this.marks.length) return;
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.fillStyle = colourOf("bad");
    for (const mark of this.marks) {
      const x = plot.valToPos(mark.at, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.fillRect(x, bbox.top, devicePixelRatio, bbox.height);
      ctx.beginPath();
      ctx.moveTo(x - 5 * devicePixelRatio, bbox.top);
      ctx.lineTo(x + 5 * devicePixelRatio, bbox.top);
      ctx.lineTo(x, bbox.top + 8 * devicePixelRatio);
      ctx.fill();
    }
    ctx.restore();
  }

  /** The values at a place under the cursor; where there is none, the last that each line has. */
  tell(at) {
    const last = this.data[0].length - 1;
    if (last < 0) return;
    const valueOf = (values) => (at === null ? values.findLast((value) => value !== null) : values[at]);
    const items = this.series.map((one) => el("li", {}, swatch(this.stacked ? { colour: one.colour } : one), `${one.label} `, el("b", { textContent: valueOf(one.values) === null ? NONE : this.unit(valueOf(one.values)) })));
    const here = el("li", { className: "soft", textContent: `at ${AXES[this.axis].unit(this.data[0][at ?? last])}` });
    fill(this.legend, items, this.marks.length ? el("li", {}, el("span", { className: "mark", textContent: "▼" }), this.marks[0].kind) : null, here);
  }

  /** The arrow keys move the cursor from value to value. */
  step(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (!by || !this.plot) return;
    event.preventDefault();
    const last = this.data[0].length - 1;
    this.at = Math.max(0, Math.min(last, (this.at ?? last) + by));
    this.plot.setCursor({ left: this.plot.valToPos(this.data[0][this.at], "x"), top: 0 });
    this.tell(this.at);
  }

  destroy() {
    this.sized.disconnect();
    this.plot?.destroy();
    this.plot = null;
    drawn.delete(this);
  }
}

function rangeOf(low, high, stacked) {
  if (low === null || low === undefined) return [0, 1];
  const from = stacked || low >= 0 ? Math.min(0, low) : low;
  const [to, room] = [Math.max(high, stacked ? 0 : -LARGEST), (high / 2 - from / 2) * 0.1 || Math.abs(high) * 0.1 || 1];
  return [from < 0 ? from - room : from, to + room];
}

export function swatch({ colour, dash = [] }) {
  const made = el("span", { className: `swatch fill-${colour}`, ariaHidden: "true" });
  if (dash.length) made.classList.add("dashed");
  return made;
}

/** A chart that ends with its view. */
export function chart(options, signal) {
  const made = new Chart(options);
  signal.addEventListener("abort", () => made.destroy());
  return made;
}
