/**
 * Numbers, durations, sizes and moments as people read them.
 * @module
 */

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const SHORT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const TIME = new Intl.DateTimeFormat("en-GB", { timeStyle: "medium" });
const HOUR = new Intl.DateTimeFormat("en-GB", { timeStyle: "short" });
const DAY = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });

/**
 * `12,345`, and `1.2M` from a million on.
 * @param {number} value
 */
export function count(value) {
  return value < 1e6 ? WHOLE.format(value) : SHORT.format(value);
}

/**
 * `1 job`, `2 jobs`.
 * @param {number} value
 * @param {string} one
 */
export function counted(value, one) {
  return `${count(value)} ${one}${value === 1 ? "" : "s"}`;
}

/**
 * A rate: one decimal while it is small.
 * @param {number} value
 */
export function rate(value) {
  return value >= 100 || Number.isInteger(value) ? count(Math.round(value)) : value.toFixed(1);
}

/**
 * `340 ms`, `2.5 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`.
 * @param {number | null | undefined} seconds
 */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return pair(whole, 60, "min", "s");
  if (whole < 86400) return pair(Math.round(whole / 60), 60, "h", "min");
  return pair(Math.round(whole / 3600), 24, "d", "h");
}

/**
 * @param {number} value
 * @param {number} base
 * @param {string} large
 * @param {string} small
 */
function pair(value, base, large, small) {
  const rest = value % base;
  return `${Math.floor(value / base)} ${large}${rest ? ` ${rest} ${small}` : ""}`;
}

/**
 * `340 MB`, `1.2 GB`: powers of ten.
 * @param {number | null | undefined} size
 */
export function bytes(size) {
  if (size === null || size === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let value = size;
  let unit = 0;
  while (value >= 999.5 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${value < 9.95 && unit > 0 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

/**
 * Four significant digits; small numbers in full rather than as zero.
 * @param {number | null} value
 */
export function score(value) {
  if (value === null) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 0.0001 || size >= 1e6) return value.toExponential(2);
  return value.toFixed(size < 0.01 ? 5 : size < 100 ? 4 : 1);
}

/**
 * The time of day, with the day where it is not today.
 * @param {string} moment RFC 3339
 */
export function moment(moment) {
  const date = new Date(moment);
  const time = TIME.format(date);
  return date.toDateString() === new Date().toDateString() ? time : `${DAY.format(date)} ${time}`;
}

/**
 * The time of day to the minute.
 * @param {number} milliseconds since 1970
 */
export function hour(milliseconds) {
  return HOUR.format(new Date(milliseconds));
}

/**
 * The seconds between two moments; null where one is missing.
 * @param {string | null | undefined} start
 * @param {string | null | undefined} end
 */
export function between(start, end) {
  if (!start || !end) return null;
  return Math.max(0, (Date.parse(end) - Date.parse(start)) / 1000);
}

/**
 * The first characters of an id, enough to tell two apart: ids begin with their time.
 * @param {string} id
 */
export function shortId(id) {
  return id.length <= 18 ? id : `${id.slice(0, 8)}…${id.slice(-6)}`;
}
