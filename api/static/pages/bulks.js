/**
 * Bulks, newest first, with their progress.
 * @module
 */

import { addressOf, getJson, withQuery } from "../api.js";
import { h, show } from "../dom.js";
import * as format from "../format.js";
import { watchClock } from "../live.js";
import { command, empty, errorNotice, idLink, metadataMarks, moment, number, row, shareBar, stateMark, table } from "../parts.js";
import { keepReading } from "../reading.js";
import { rewriteAddress } from "../router.js";

const LIMIT = 25;
const ENDED = new Set(["completed", "failed", "cancelled", "expired"]);

/** @param {import("../router.js").Visit} visit */
export function bulksPage({ root, query, signal }) {
  let after = query.get("after") ?? "";
  let open = false;
  const again = keepReading({
    signal,
    read: () => getJson(withQuery("v1/bulks", { limit: LIMIT, after }), signal),
    draw: (last) => {
      open = last.value?.data.some((/** @type {any} */ bulk) => !ENDED.has(bulk.state)) ?? false;
      draw(root, last, after);
    },
  });
  watchClock(() => open && again(), signal);
  root.addEventListener("click", (event) => {
    const button = event.target instanceof Element ? event.target.closest("[data-action]") : null;
    if (button === null) return;
    if (button.getAttribute("data-action") !== "again") after = button.getAttribute("data-after") ?? "";
    rewriteAddress("bulks", { after });
    again();
  });
}

/** @param {any} bulk */
export function progressBar(bulk) {
  const { lines, lines_completed: completed, lines_failed: failed, lines_cancelled: cancelled } = bulk.counts;
  const piece = (/** @type {number} */ value, /** @type {string} */ tone, /** @type {string} */ name) => ({ value, tone, title: `${format.count(value)} ${name}` });
  return shareBar("Lines", [piece(completed, "good", "completed"), piece(failed, "bad", "failed"), piece(cancelled, "idle", "cancelled")], lines);
}

/**
 * The lines that have ended, whichever way.
 * @param {any} bulk
 */
export function endedLines(bulk) {
  return bulk.counts.lines_completed + bulk.counts.lines_failed + bulk.counts.lines_cancelled;
}

/**
 * @param {HTMLElement} root
 * @param {import("../reading.js").Read<any>} last
 * @param {string} after
 */
function draw(root, { value, error }, after) {
  const heading = h("div", { class: "page-head" }, h("h1", {}, "Bulks"));
  const notice = error && errorNotice(error, { stale: value !== null && error.isPassing, retry: !error.isPassing });
  if (value === null) return show(root, heading, notice);
  const bulks = value.data;
  if (!bulks.length) return show(root, heading, notice, after === "" ? none() : empty("No older bulks", "The list ends here.", newest()));
  const columns = [
    { title: "State" }, { title: "Bulk" }, { title: "Model" }, { title: "Progress" }, { title: "Lines", number: true },
    { title: "Failed", number: true }, { title: "Items/s", number: true }, { title: "Left", number: true }, { title: "Submitted" }, { title: "Metadata" },
  ];
  const rows = bulks.map((/** @type {any} */ bulk) =>
    row(
      bulk.id,
      stateMark(bulk.paused ? "paused" : bulk.state),
      idLink(bulk.id),
      bulk.model ?? "by line",
      progressBar(bulk),
      number(`${format.count(endedLines(bulk))} / ${format.count(bulk.counts.lines)}`),
      number(format.count(bulk.counts.lines_failed)),
      number(bulk.items_per_s === null ? "–" : format.rate(bulk.items_per_s)),
      number(ENDED.has(bulk.state) ? "–" : format.duration(bulk.eta_s)),
      moment(bulk.created_at),
      metadataMarks(bulk.metadata),
    ),
  );
  const older = h("button", { type: "button", "data-action": "older", "data-after": bulks.at(-1).id, disabled: !value.has_more }, "Older");
  show(root, heading, notice, table("List of bulks, newest first", columns, rows), h("div", { class: "row" }, after !== "" && newest(), older));
}

function newest() {
  return h("div", {}, h("button", { type: "button", "data-action": "newest", "data-after": "" }, "Newest"));
}

function none() {
  const lines = command(`scorekeep bulk submit reviews.jsonl --model sentiment --url ${addressOf("").replace(/\/$/, "")}`, "submit a bulk");
  return empty("No bulks yet", "A bulk is a file of many lines under one handle; JSONL, Parquet or CSV.", lines);
}
