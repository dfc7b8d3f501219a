/**
 * The overview as it streams in: one stream per tab, shared by all pages, closed while hidden.
 * @module
 */

import { ApiError } from "./api.js";
import { byId } from "./dom.js";
import { keys } from "./key.js";
import { readMessages } from "./stream.js";

/** @typedef {"connecting" | "live" | "away" | "lost" | "denied" | "paused"} Status */
/** @typedef {{status: Status, overview: any, error: ApiError | null}} Live */

/** @type {Record<Status, string>} */
const WORDS = {
  connecting: "Connecting",
  live: "Live",
  away: "Database away",
  lost: "Reconnecting",
  denied: "Not allowed",
  paused: "Paused",
};
const LONGEST_PAUSE_MS = 15000;
const DENIED_MS = 5000;

/** @type {Live} */
const state = { status: "connecting", overview: null, error: null };
/** @type {Set<(live: Live) => void>} */
const listeners = new Set();
/** @type {AbortController | null} */
let running = null;

/** @returns {Live} what is known now */
export function current() {
  return state;
}

/**
 * Call `listener` at every change until the signal is aborted, and once at the start.
 * @param {(live: Live) => void} listener
 * @param {AbortSignal} signal
 */
export function watch(listener, signal) {
  listeners.add(listener);
  signal.addEventListener("abort", () => listeners.delete(listener));
  listener(state);
}

/**
 * Call `listener` when queue or counters have moved: a job was taken in, was begun or has ended.
 * @param {() => void} listener
 * @param {AbortSignal} signal
 */
export function watchWork(listener, signal) {
  let seen = signature();
  watchClock(() => {
    const now = signature();
    if (now !== seen || state.status === "denied") listener();
    seen = now;
  }, signal);
}

/**
 * Call `listener` with every overview; where the stream may not be read, every few seconds.
 * @param {() => void} listener
 * @param {AbortSignal} signal
 */
export function watchClock(listener, signal) {
  watch(({ status }) => status === "live" && listener(), signal);
  const timer = setInterval(() => state.status === "denied" && !document.hidden && listener(), DENIED_MS);
  signal.addEventListener("abort", () => clearInterval(timer));
}

function signature() {
  if (state.overview === null) return "";
  const { models, throughput } = state.overview;
  const lanes = models.flatMap((/** @type {any} */ model) => model.lanes);
  const counts = lanes.map((/** @type {any} */ lane) => `${lane.waiting}/${lane.running}`);
  return `${counts} ${throughput.last_at} ${throughput.jobs.at(-1)} ${throughput.jobs.at(-2)}`;
}

/** Begin to stream. */
export function startLive() {
  document.addEventListener("visibilitychange", () => (document.hidden ? pause() : run()));
  keys.addEventListener("change", () => run());
  run();
}

function pause() {
  running?.abort();
  running = null;
  change("paused", null);
}

async function run() {
  running?.abort();
  const controller = new AbortController();
  running = controller;
  let pauseMs = 500;
  while (!controller.signal.aborted) {
    try {
      for await (const message of readMessages("v1/overview/events", controller)) {
        pauseMs = 500;
        if (message.event === "overview") {
          state.overview = JSON.parse(message.data);
          change("live", null);
        } else if (message.event === "away") {
          change("away", null);
        }
      }
    } catch (error) {
      if (controller.signal.aborted) return;
      const known = error instanceof ApiError ? error : new ApiError("The stream was cut off.");
      if (!known.isPassing) return change("denied", known);
      change("lost", known);
    }
    await sleep(pauseMs, controller.signal);
    pauseMs = Math.min(LONGEST_PAUSE_MS, pauseMs * 2);
  }
}

/**
 * @param {Status} status
 * @param {ApiError | null} error
 */
function change(status, error) {
  const before = state.status;
  state.status = status;
  state.error = error;
  if (before !== status || byId("live").dataset.status === undefined) {
    byId("live").textContent = WORDS[status];
    byId("live").dataset.status = status;
  }
  for (const listener of listeners) listener(state);
}

/**
 * @param {number} duration_ms
 * @param {AbortSignal} signal
 * @returns {Promise<void>}
 */
export function sleep(duration_ms, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, duration_ms);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      resolve();
    });
  });
}
