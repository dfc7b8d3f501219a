/**
 * What several pages are built from: states, tables, facts, notices, empty states, commands to copy.
 * @module
 */

import { h, s, say } from "./dom.js";
import * as format from "./format.js";

/** @typedef {import("./dom.js").Child} Child */
/** @typedef {"good" | "bad" | "warn" | "busy" | "idle"} Tone */

/** @type {Record<string, Tone>} */
const TONES = {
  queued: "idle", running: "busy", succeeded: "good", partial: "warn", failed: "bad",
  cancelled: "idle", expired: "warn", validating: "busy", finalizing: "busy", completed: "good",
  cancelling: "warn", paused: "warn", ready: "good", loading: "busy", pending: "busy",
  delivered: "good", dead: "bad", alive: "good", silent: "bad", unserved: "warn",
};

/**
 * The colour's name of a state.
 * @param {string} state
 */
export function toneOf(state) {
  return TONES[state] ?? "idle";
}

/**
 * A state by word and colour.
 * @param {string} state
 * @param {string} [title]
 */
export function stateMark(state, title) {
  return h("span", { class: "state", "data-tone": toneOf(state), title }, state);
}

/**
 * A table with its caption for who cannot see it; it scrolls by itself where it is too wide.
 * @param {string} caption
 * @param {{title: string, number?: boolean, bare?: boolean}[]} columns
 * @param {HTMLElement[]} rows
 * @param {{className?: string}} [options]
 */
export function table(caption, columns, rows, { className = "" } = {}) {
  const heads = columns.map((column) =>
    h("th", { scope: "col", class: column.number ? "number" : null }, column.bare ? h("span", { class: "hidden" }, column.title) : column.title),
  );
  return h(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h(
      "table",
      { class: className || null },
      h("caption", { class: "hidden" }, caption),
      h("thead", {}, h("tr", {}, heads)),
      h("tbody", {}, rows),
    ),
  );
}

/**
 * @param {string} key recognises the row when it is shown again
 * @param {...(Child | Child[])} cells
 */
export function row(key, ...cells) {
  return h("tr", { "data-key": key }, cells.map((cell) => (isCell(cell) ? cell : h("td", {}, cell))));
}

/**
 * A cell of a column of numbers.
 * @param {Child | Child[]} value
 * @param {string} [title]
 */
export function number(value, title) {
  return h("td", { class: "number", title }, value);
}

/**
 * @param {Child | Child[]} cell
 * @returns {cell is HTMLTableCellElement}
 */
function isCell(cell) {
  return cell instanceof HTMLTableCellElement;
}

/**
 * Terms and their values; a null value leaves its term out.
 * @param {[string, Child | Child[]][]} pairs
 */
export function facts(pairs) {
  const given = pairs.filter(([, value]) => value !== null && value !== undefined);
  return h(
    "dl",
    { class: "facts" },
    given.map(([term, value]) => h("div", {}, h("dt", {}, term), h("dd", {}, ...[value].flat()))),
  );
}

/**
 * A moment, with all of it on hovering.
 * @param {string | null | undefined} at RFC 3339
 */
export function moment(at) {
  return at ? h("time", { datetime: at, title: at }, format.moment(at)) : "–";
}

/**
 * @param {string} id
 * @param {{full?: boolean}} [options]
 */
export function idLink(id, { full = false } = {}) {
  const kind = id.startsWith("blk_") ? "bulk" : "job";
  const text = full ? id : format.shortId(id);
  return h("a", { href: `#/${kind}/${encodeURIComponent(id)}`, class: "mono", title: id }, text);
}

/**
 * Labels that a client gave; long ones are cut by the style, whole on hovering.
 * @param {Record<string, string>} metadata
 */
export function metadataMarks(metadata) {
  return h(
    "span",
    { class: "marks" },
    Object.entries(metadata).map(([key, value]) =>
      h("span", { class: "mark", title: `${key} = ${value}` }, h("span", { class: "muted" }, key), " ", value),
    ),
  );
}

/**
 * Something to run or to paste, with a button that copies it.
 * @param {string} text
 * @param {string} name what it is, for the button's name
 */
export function command(text, name) {
  return h(
    "div",
    { class: "command" },
    h("pre", { tabindex: "0", "aria-label": name }, h("code", {}, text)),
    h("button", { type: "button", class: "quiet", "data-copy": true, "aria-label": `Copy: ${name}` }, "Copy"),
  );
}

/**
 * Nothing is here, and what to do next.
 * @param {string} title
 * @param {string} text
 * @param {...Child} next
 */
export function empty(title, text, ...next) {
  return h("div", { class: "empty" }, h("p", { class: "empty-title" }, title), h("p", {}, text), ...next);
}

/**
 * What happened, and whether what is shown below is older.
 * @param {{message: string, code?: string, requestId?: string}} error
 * @param {{stale?: boolean, retry?: boolean}} [options]
 */
export function errorNotice(error, { stale = false, retry = false } = {}) {
  const code = error.code && error.code !== "unreachable" ? ` (${error.code})` : "";
  return h(
    "div",
    { class: "notice bad", role: "alert" },
    h("p", {}, h("strong", {}, error.message), code),
    stale && h("p", {}, "Below is what was read last; it is asked for again by itself."),
    error.requestId ? h("p", { class: "muted" }, "Request ", h("code", {}, error.requestId)) : null,
    retry && h("button", { type: "button", "data-action": "again" }, "Try again"),
  );
}

/**
 * Parts of a whole as one bar.
 * @param {string} name
 * @param {{value: number, tone: string, title: string}[]} pieces
 * @param {number} total
 */
export function shareBar(name, pieces, total) {
  let x = 0;
  const bars = pieces.filter((piece) => piece.value > 0 && total > 0).map((piece) => {
    const width = (100 * piece.value) / total;
    const rect = s("rect", { x, y: 0, width, height: 8, "data-tone": piece.tone }, s("title", {}, piece.title));
    x += width;
    return rect;
  });
  const label = `${name}: ${pieces.map((piece) => piece.title).join(", ") || "nothing yet"}`;
  return s(
    "svg",
    { class: "share", viewBox: "0 0 100 8", preserveAspectRatio: "none", role: "img", "aria-label": label },
    bars,
  );
}

/** Make every `data-copy` button copy the code beside it. */
export function setUpCopying() {
  document.addEventListener("click", async (event) => {
    const button = event.target instanceof Element ? event.target.closest("[data-copy]") : null;
    const code = button?.parentElement?.querySelector("code");
    if (!button || !code) return;
    const copied = await copy(code);
    button.textContent = copied ? "Copied" : "Press Ctrl C";
    say(copied ? "Copied." : "The text is selected: press Control C.");
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
}

/**
 * Copy, or where the page may not (plain http on another machine) select, so that a key does it.
 * @param {Element} code
 */
async function copy(code) {
  try {
    await navigator.clipboard.writeText(code.textContent ?? "");
    return true;
  } catch {
    getSelection()?.selectAllChildren(code);
    return false;
  }
}
