/**
 * What was scored and its scores, item by item.
 * @module
 */

import { scaleOf, scoreBars } from "./charts.js";
import { h } from "./dom.js";
import * as format from "./format.js";
import { table } from "./parts.js";

const MOST_CHARACTERS = 2000;

/**
 * The section with the items of a job; none before there is something to show.
 * @param {any} request null where the texts are too many to be read
 * @param {any} scores null until there are any
 * @param {{shown: number, job: any}} view
 */
export function results(request, scores, { shown, job }) {
  const items = itemsOf(request);
  const total = job.counts.total;
  if (total === 0) return h("p", { class: "muted" }, "The job has no items.");
  const rows = Array.from({ length: Math.min(total, shown) }, (_, index) => index);
  if (items === null && scores === null) return null;
  const scale = scaleOf(scores?.scores ?? []);
  const errors = new Map((scores?.errors ?? []).map((/** @type {any} */ error) => [error.index, error]));
  const labels = (scores?.labels ?? []).map(nameOf);
  const columns = [{ title: "#" }, { title: items === null ? "Tokens" : "Item" }, { title: "Scores" }];
  const body = rows.map((index) =>
    h(
      "tr",
      { "data-key": `item ${index}` },
      h("td", { class: "index" }, String(index)),
      items === null ? h("td", {}, String(scores?.tokens?.[index]?.[1] ?? "–")) : h("td", { class: "text" }, h("p", {}, textOf(items[index]))),
      h("td", { class: "bars" }, outcome(scores, labels, scale, index, errors.get(index))),
    ),
  );
  return h(
    "section",
    { "aria-label": "Items and scores" },
    h("div", { class: "section-head" }, h("h2", {}, "Items and scores"), h("span", { class: "muted" }, `${format.count(rows.length)} of ${format.count(total)}`)),
    query(request),
    table("Items and their scores", columns, body, { className: "results" }),
    rows.length < total && h("div", {}, h("button", { type: "button", "data-action": "more" }, "Show more items")),
  );
}

/**
 * @param {any} scores
 * @param {string[]} labels
 * @param {import("./charts.js").Scale} scale
 * @param {number} index
 * @param {any} error
 */
function outcome(scores, labels, scale, index, error) {
  if (scores === null) return h("span", { class: "muted" }, "no scores");
  const row = scores.scores[index];
  if (row) return scoreBars(labels, row, scale);
  return h("p", { class: "text" }, h("span", { class: "state", "data-tone": "bad" }, error?.code ?? "failed"), ` ${error?.message ?? ""}`);
}

/** @param {any} request */
function query(request) {
  if (request?.query === undefined || request?.query === null) return null;
  return h("div", { class: "panel" }, h("span", { class: "muted" }, "Query "), textOf(request.query));
}

/**
 * The items of a request; null where there is none.
 * @param {any} request
 * @returns {(string | number[])[] | null}
 */
export function itemsOf(request) {
  if (request === null || request?.items === undefined) return null;
  return typeof request.items === "string" ? [request.items] : request.items;
}

/**
 * A text, or token ids, cut where it is very long.
 * @param {unknown} item
 */
export function textOf(item) {
  const text = typeof item === "string" ? item : JSON.stringify(item);
  return text.length <= MOST_CHARACTERS ? text : `${text.slice(0, MOST_CHARACTERS)} …`;
}

/**
 * A label as text: classes and tokens have names, token ids and sequences have none.
 * @param {unknown} label
 */
export function nameOf(label) {
  return typeof label === "string" ? label : JSON.stringify(label);
}
