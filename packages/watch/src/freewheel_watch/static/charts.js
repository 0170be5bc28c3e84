// This module draws curves with uPlot. A run has one line; the seeds of a group have their mean with a band from minimum to maximum.

import { clock, make, placeTip, short, ticks, write } from "./format.js";

const SECONDS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800]; // possible seconds between two ticks
const GRID = 300; // number of points of a group's mean
const COLORS = ["#159b78", "#3a7fe0", "#d9622b", "#9b4fc0", "#c29200", "#d14a83", "#4aa3b8", "#7d8a2e", "#8c5a3c", "#6b7a8f"];

export const color = (index) => COLORS[index % COLORS.length];

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Returns points of a run as ascending x and y without gaps. Of points with the same x the newest is used. */
export function line(points, x, y) {
  const xs = [], ys = [];
  for (const point of points) {
    const [at, value] = [point[x], point[y]];
    if (at === null || value === null || at === undefined || value === undefined) continue;
    const last = xs.length - 1;
    if (last >= 0 && at < xs[last]) continue;
    if (last >= 0 && at === xs[last]) ys[last] = value;
    else { xs.push(at); ys.push(value); }
  }
  return [xs, ys];
}

/** Returns the interpolated value of a line at x, or null outside of the line. */
function between([xs, ys], x) {
  if (!xs.length || x < xs[0] || x > xs[xs.length - 1]) return null;
  let [low, high] = [0, xs.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle; else high = middle;
  }
  if (low === high || xs[high] === xs[low]) return ys[high];
  return ys[low] + ((ys[high] - ys[low]) * (x - xs[low])) / (xs[high] - xs[low]);
}

/** Returns the mean, minimum and maximum of several lines over the range that all of them cover. */
export function band(lines) {
  const full = lines.filter(([xs]) => xs.length);
  if (!full.length) return [[], [], [], []];
  const first = Math.max(...full.map(([xs]) => xs[0])), last = Math.min(...full.map(([xs]) => xs[xs.length - 1]));
  if (last < first) return [[], [], [], []];
  const steps = last === first ? 0 : GRID;
  const result = [[], [], [], []];
  for (let k = 0; k <= steps; k += 1) {
    const x = steps ? first + ((last - first) * k) / steps : first;
    const values = full.map((one) => between(one, Math.min(x, last))).filter((value) => value !== null);
    if (!values.length) continue;
    result[0].push(x);
    result[1].push(values.reduce((a, b) => a + b) / values.length);
    result[2].push(Math.min(...values));
    result[3].push(Math.max(...values));
  }
  return result;
}

/** A chart in an element. `draw` takes curves {label, color, lines: [[xs, ys], ...]}; several lines are the seeds of a group.
    fromZero: the axis begins at zero. held: a value holds until the next one, and each has a marker. */
export class Chart {
  constructor(element, tip, { fromZero = false, held = false } = {}) {
    Object.assign(this, { fromZero, held });
    this.element = element;
    this.tip = tip;
    this.empty = element.appendChild(make("div", { className: "empty", textContent: "nothing yet" }));
    this.plot = null;
    this.shape = "";
    this.curves = [];
    this.pointed = false; // whether the tip belongs to this chart
    this.zoomed = false; // whether the user has chosen a part, which new points do not change
    new ResizeObserver(() => this.resize()).observe(element);
  }

  resize() {
    const [width, height] = [this.element.clientWidth, this.element.clientHeight];
    if (this.plot && width && (this.plot.width !== width || this.plot.height !== height)) this.plot.setSize({ width, height });
  }

  draw(curves, inTime) {
    const tables = [], shown = [];
    for (const curve of curves) {
      const group = curve.lines.length > 1;
      const [xs, ...columns] = group ? band(curve.lines) : curve.lines[0] ?? [[], []];
      if (!xs.length) continue;
      shown.push({ ...curve, group });
      tables.push([xs, ...columns]);
    }
    this.empty.hidden = tables.length > 0;
    if (!tables.length) { this.forget(); return; }
    const data = tables.length === 1 ? tables[0] : uPlot.join(tables);
    const shape = JSON.stringify([inTime, css("--text"), shown.map((curve) => [curve.label, curve.color, curve.group])]);
    this.curves = shown;
    if (shape !== this.shape) {
      this.forget();
      this.plot = new uPlot(this.options(shown, inTime), data, this.element);
      this.plot.over.addEventListener("dblclick", () => { this.zoomed = false; });
      this.shape = shape;
    } else if (this.zoomed) {
      const { min, max } = this.plot.scales.x;
      this.plot.setData(data, false);
      this.plot.setScale("x", { min, max });
    } else {
      this.plot.setData(data);
    }
  }

  forget() {
    this.plot?.destroy();
    this.plot = null;
    this.shape = "";
    this.zoomed = false;
  }

  options(curves, inTime) {
    const x = inTime ? clock : short;
    const axis = { stroke: css("--soft"), grid: { stroke: css("--grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui", gap: 4 };
    const series = [{}], bands = [];
    for (const curve of curves) {
      const at = series.length;
      const held = this.held && !curve.group;
      const points = { show: held || ((plot, index) => known(plot.data[index]).length < 2), size: 6, fill: curve.color, ...(held ? { filter: changes } : {}) };
      const paths = held ? { paths: uPlot.paths.stepped({ align: 1 }) } : {};
      series.push({ label: curve.label, stroke: curve.color, width: 1.8, spanGaps: true, points, ...paths });
      if (curve.group) {
        const edge = { stroke: curve.color, width: 0, spanGaps: true, points: { show: false } };
        series.push({ label: `${curve.label}, minimum`, ...edge }, { label: `${curve.label}, maximum`, ...edge });
        bands.push({ series: [at + 2, at + 1], fill: `${curve.color}33` });
      }
    }
    return {
      width: this.element.clientWidth, height: this.element.clientHeight, series, bands,
      legend: { show: false },
      padding: [10, 8, 0, 0],
      cursor: { y: false, points: { size: 6 } },
      scales: { x: { time: false }, y: { range: (plot, least, most) => padded(this.fromZero ? Math.min(0, least) : least, most) } },
      axes: [
        { ...axis, size: 26, space: 60, ...(inTime ? { incrs: SECONDS } : {}), values: (plot, values) => values.map((value) => x(value)) },
        { ...axis, size: widest, space: 34, values: (plot, values, index, space, step) => ticks(values, step) },
      ],
      hooks: { setCursor: [(plot) => this.hover(plot, x)], setSelect: [(plot) => { this.zoomed = plot.select.width > 0; }] },
    };
  }

  hover(plot, x) {
    const { idx, left, top } = plot.cursor;
    if (idx === null || idx === undefined || left < 0) {
      if (this.pointed) this.tip.hidden = true;
      this.pointed = false;
      return;
    }
    this.pointed = true;
    const lines = [x(plot.data[0][idx])];
    let at = 1;
    for (const curve of this.curves) {
      const value = nearest(plot.data[at], idx);
      const range = curve.group ? ` (${short(nearest(plot.data[at + 1], idx))} to ${short(nearest(plot.data[at + 2], idx))})` : "";
      if (value !== null) lines.push(`${curve.label}: ${short(value)}${range}`);
      at += curve.group ? 3 : 1;
    }
    write(this.tip, lines.join("\n"));
    this.tip.hidden = false;
    const box = plot.over.getBoundingClientRect();
    placeTip(this.tip, box.left + left, box.top + top);
  }
}

/** Returns the value at an index or the last one before it. Joined curves have gaps where others have points. */
function nearest(values, index) {
  for (let at = index; at >= 0; at -= 1) if (values[at] !== null && values[at] !== undefined) return values[at];
  return null;
}

const known = (values) => values.filter((value) => value !== null && value !== undefined);

/** Returns the indices at which the value changes. */
function changes(plot, series) {
  const found = [];
  let before = null;
  plot.data[series].forEach((value, index) => {
    if (value === null || value === undefined || value === before) return;
    before = value;
    found.push(index);
  });
  return found;
}

/** Returns the room for the labels of an axis. */
const widest = (plot, labels) => Math.max(46, 12 + 6.5 * Math.max(0, ...(labels ?? []).map((label) => label.length)));

/** Returns the range of an axis. It is at least a tenth of its values, so that a small difference looks small. */
function padded(least, most) {
  if (most === null || !Number.isFinite(most)) return [0, 1];
  const span = Math.max(most - least, 0.1 * Math.max(Math.abs(least), Math.abs(most))) || 1;
  const room = (span - (most - least)) / 2 + 0.06 * span;
  return [least >= 0 && least - room < 0 ? 0 : least - room, most + room];
}
