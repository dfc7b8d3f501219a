/**
 * Server-sent events over `fetch`: unlike `EventSource` it can send the key's header.
 * @module
 */

import { send } from "./api.js";

/** @typedef {{event: string, data: string, id: string}} Message */

/**
 * Yield the messages of a stream until it ends. Raises what `send` raises.
 * @param {string} path
 * @param {{signal?: AbortSignal, lastId?: string}} [options]
 * @returns {AsyncGenerator<Message>}
 */
export async function* readMessages(path, { signal, lastId = "" } = {}) {
  /** @type {Record<string, string>} */
  const headers = { Accept: "text/event-stream" };
  if (lastId !== "") headers["Last-Event-ID"] = lastId;
  const answer = await send(path, { headers, signal });
  if (answer.body === null || answer.status === 204) return;
  const reader = answer.body.getReader();
  const decoder = new TextDecoder();
  let text = "";
  try {
    while (true) {
      const { value, done } = await reader.read();
      if (done) return;
      text += decoder.decode(value, { stream: true });
      const blocks = text.split("\n\n");
      text = blocks.pop() ?? "";
      for (const block of blocks) {
        const message = parseBlock(block);
        if (message !== null) yield message;
      }
    }
  } finally {
    await reader.cancel().catch(() => undefined); // it may have ended already
  }
}

/**
 * Read the lines of one message; a comment is none.
 * @param {string} block
 * @returns {Message | null}
 */
function parseBlock(block) {
  const message = { event: "message", data: "", id: "" };
  let said = false;
  for (const line of block.split("\n")) {
    const colon = line.indexOf(":");
    if (colon <= 0) continue;
    const name = line.slice(0, colon);
    const value = line.slice(colon + 1).replace(/^ /, "");
    if (name === "event" || name === "id") message[name] = value;
    if (name === "data") {
      message.data += (said ? "\n" : "") + value;
      said = true;
    }
  }
  return said ? message : null;
}
