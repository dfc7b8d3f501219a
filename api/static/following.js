/**
 * A stream followed to its end: opened again where it broke, closed while the tab is out of sight.
 * @module
 */

import { ApiError } from "./api.js";
import { sleep } from "./live.js";
import { readMessages } from "./stream.js";

const AGAIN_MS = 2000;

/**
 * Hand every message to `take` until that answers that it was the last, or the server says that
 * nothing is left. `fail` is told why a stream cannot be read.
 * @param {{
 *   path: string,
 *   take: (message: import("./stream.js").Message) => boolean,
 *   fail: (error: ApiError) => void,
 *   signal: AbortSignal,
 * }} options
 */
export async function followStream({ path, take, fail, signal }) {
  let lastId = "";
  while (!signal.aborted) {
    await untilVisible(signal);
    const open = new AbortController();
    const close = () => (signal.aborted || document.hidden) && open.abort();
    signal.addEventListener("abort", close, { signal: open.signal });
    document.addEventListener("visibilitychange", close, { signal: open.signal });
    try {
      let said = false;
      for await (const message of readMessages(path, { signal: open.signal, lastId })) {
        said = true;
        lastId = message.id || lastId;
        if (take(message)) return;
      }
      if (!said) return;
    } catch (error) {
      if (signal.aborted) return;
      if (open.signal.aborted) continue;
      const known = error instanceof ApiError ? error : new ApiError("The stream was cut off.");
      fail(known);
      if (!known.isPassing) return;
    } finally {
      open.abort();
    }
    await sleep(AGAIN_MS, signal);
  }
}

/**
 * @param {AbortSignal} signal
 * @returns {Promise<void>}
 */
function untilVisible(signal) {
  return new Promise((resolve) => {
    const look = () => (signal.aborted || !document.hidden) && resolve();
    document.addEventListener("visibilitychange", look, { signal });
    signal.addEventListener("abort", look, { once: true });
    look();
  });
}
