/**
 * Charts in SVG: scores of an item as bars, throughput over time. Every number is also there as text.
 * @module
 */

import { h, s } from "./dom.js";
import * as format from "./format.js";

/** @typedef {{low: number, high: number}} Scale */

/**
 * The scale that fits all rows: 0 to 1 for what looks like probabilities, else with zero in it.
 * @param {(number[] | null)[]} rows
 * @returns {Scale}
 */
export function scaleOf(rows) {
  let low = 0;
  let high = 0;
  for (const row of rows) {
    for (const value of row ?? []) {
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  if (low === 0 && high <= 1) return { low: 0, high: 1 };
  return { low, high: high === low ? low + 1 : high };
}

/**
 * One item's scores: a line with name, bar and number for each label.
 * @param {string[]} labels
 * @param {number[]} row
 * @param {Scale} scale
 * @param {number} [most] how many labels are shown, the highest ones
 */
export function scoreBars(labels, row, scale, most = 6) {
  const best = row.indexOf(Math.max(...row));
  const order = row.map((_, index) => index);
  if (row.length > most) order.sort((a, b) => row[b] - row[a]);
  const lines = order.slice(0, most).map((index) =>
    h(
      "div",
      { class: "score", "data-best": row.length > 1 && index === best },
      h("span", { class: "score-label", title: labels[index] ?? `column ${index}` }, labels[index] ?? `column ${index}`),
      bar(row[index], scale),
      h("span", { class: "score-value", title: String(row[index]) }, format.score(row[index])),
    ),
  );
  const rest = row.length - lines.length;
  return h("div", { class: "scores" }, lines, rest > 0 && h("div", { class: "muted" }, `and ${format.counted(rest, "lower score")}`));
}

/**
 * A bar from zero to a value.
 * @param {number} value
 * @param {Scale} scale
 */
export function bar(value, { low, high }) {
  const place = (/** @type {number} */ at) => (100 * (at - low)) / (high - low);
  const zero = place(0);
  const end = place(value);
  return s(
    "svg",
    { class: "bar", viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" },
    s("rect", { class: "bar-back", x: 0, y: 0, width: 100, height: 10 }),
    s("rect", { class: "bar-value", x: Math.min(zero, end), y: 0, width: Math.max(0.4, Math.abs(end - zero)), height: 10 }),
    low < 0 && s("rect", { class: "bar-zero", x: Math.max(0, zero - 0.3), y: 0, width: 0.6, height: 10 }),
  );
}

/**
 * A column for each slot; the last goes on.
 * @param {string} name what is counted, such as `items`
 * @param {number[]} values by slot, oldest first
 * @param {{slotS: number, lastAt: string}} time
 */
export function columns(name, values, { slotS, lastAt }) {
  const highest = niceCeiling(Math.max(...values, 0) / slotS);
  const width = 100 / values.length;
  const last = Date.parse(lastAt);
  const bars = values.map((value, index) => {
    const height = (100 * value) / slotS / highest;
    const at = format.moment(new Date(last - (values.length - 1 - index) * slotS * 1000).toISOString());
    const text = `${at}: ${format.rate(value / slotS)} ${name}/s`;
    return s(
      "g",
      { class: index === values.length - 1 ? "unfinished" : null },
      s("rect", { class: "hit", x: index * width, y: 0, width, height: 100 }, s("title", {}, text)),
      value > 0 && s("rect", { class: "column", x: index * width + width * 0.1, y: 100 - height, width: width * 0.8, height }),
    );
  });
  const total = values.reduce((sum, value) => sum + value, 0);
  const minutes = Math.round((values.length * slotS) / 60);
  const label = `${name} in the last ${minutes} minutes: ${format.count(total)} in all, at most ${format.rate(Math.max(...values, 0) / slotS)} a second`;
  const lines = [0, 50].map((y) => s("line", { class: "grid", x1: 0, x2: 100, y1: y, y2: y }));
  return h(
    "div",
    { class: "chart" },
    h("div", { class: "chart-high" }, h("span", {}, `${format.rate(highest)}/s`), h("span", {}, `${format.rate(highest / 2)}/s`), h("span", {}, "0")),
    s("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none", role: "img", "aria-label": label }, lines, bars),
    h("div", { class: "chart-wide" }, [1, 2 / 3, 1 / 3].map((part) => h("span", {}, format.hour(last - part * minutes * 60_000))), h("span", {}, "now")),
  );
}

/**
 * The next of 1, 2, 5, 10, 20 … that is not below `value`.
 * @param {number} value
 */
export function niceCeiling(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= value * (1 - 1e-9)) ?? 10;
  return step * power;
}
