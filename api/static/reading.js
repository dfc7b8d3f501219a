/**
 * Reading something again and again without losing what was read last.
 * @module
 */

import { ApiError } from "./api.js";
import { keys } from "./key.js";
import { sleep } from "./live.js";

/**
 * @template T
 * @typedef {{value: T | null, error: ApiError | null}} Read
 */

const AGAIN_MS = 2000;

/**
 * Read now, and whenever the returned function is called; never twice at once. What fails because
 * the service is away is tried again by itself; `draw` is told of both.
 * @template T
 * @param {{read: () => Promise<T>, draw: (read: Read<T>) => void, signal: AbortSignal}} options
 * @returns {() => void} ask for it anew
 */
export function keepReading({ read, draw, signal }) {
  /** @type {Read<T>} */
  const last = { value: null, error: null };
  let reading = false;
  let wanted = false;

  async function run() {
    wanted = true;
    if (reading) return;
    reading = true;
    while (wanted && !signal.aborted) {
      wanted = false;
      try {
        last.value = await read();
        last.error = null;
      } catch (error) {
        if (signal.aborted) return;
        if (!(error instanceof ApiError)) throw error;
        last.error = error;
      }
      if (signal.aborted) return;
      draw(last);
      if (last.error?.isPassing) {
        await sleep(AGAIN_MS, signal);
        wanted = true;
      }
    }
    reading = false;
  }

  keys.addEventListener("change", run, { signal });
  run();
  return run;
}
