/**
 * Two jobs or two bulks held against each other: receipts, differences, ranks.
 * @module
 */

import { ApiError, getJson } from "../api.js";
import { bar, scaleOf } from "../charts.js";
import { h, show } from "../dom.js";
import * as format from "../format.js";
import { empty, errorNotice, facts, idLink, number, table } from "../parts.js";
import { itemsOf, nameOf, textOf } from "../results.js";
import { rewriteAddress } from "../router.js";

/** @typedef {{labels: string[], items: (string | number[])[]}} About */

const MOST_TEXTS = 2000;
const MOST_LABELS = 6;

/** @param {import("../router.js").Visit} visit */
export function comparePage({ root, query, signal }) {
  const result = h("div", { class: "stack" });
  const field = (/** @type {string} */ name, /** @type {string} */ title) =>
    h("label", { class: "field" }, title, h("input", { name, value: query.get(name) ?? "", list: "known-ids", placeholder: "job_… or blk_…", autocomplete: "off", spellcheck: "false", class: "mono" }));
  const form = /** @type {HTMLFormElement} */ (
    h("form", { class: "filters", "aria-label": "What to compare" }, field("a", "First (a)"), field("b", "Second (b)"), h("button", { type: "submit", class: "primary" }, "Compare"), h("datalist", { id: "known-ids" }))
  );
  show(root, h("h1", {}, "Compare"), form, result);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    run();
  });
  suggest(form, signal);

  async function run() {
    const values = new FormData(form);
    const a = String(values.get("a")).trim();
    const b = String(values.get("b")).trim();
    rewriteAddress("compare", { a, b });
    if (a === "" || b === "") return show(result, start());
    const kinds = [kindOf(a), kindOf(b)];
    if (kinds[0] !== kinds[1]) return show(result, errorNotice({ message: "Compare two jobs, or two bulks: these are one of each." }));
    show(result, h("p", { class: "muted" }, "Comparing …"));
    try {
      const path = `v1/${kinds[0]}/${encodeURIComponent(a)}/compare/${encodeURIComponent(b)}`;
      const comparison = await getJson(path, signal);
      const about = kinds[0] === "jobs" ? await readAbout(`v1/jobs/${encodeURIComponent(a)}`, signal) : { labels: [], items: [] };
      show(result, differences(comparison, about));
    } catch (error) {
      if (signal.aborted) return;
      if (!(error instanceof ApiError)) throw error;
      show(result, errorNotice(error));
    }
  }
  run();
}

/**
 * What the columns and the items of a job are.
 * @param {string} path
 * @param {AbortSignal} signal
 * @returns {Promise<About>}
 */
async function readAbout(path, signal) {
  const { labels, scores } = await getJson(`${path}/scores`, signal);
  const request = scores.length <= MOST_TEXTS ? await getJson(`${path}/request`, signal) : null;
  return { labels: labels.map(nameOf), items: itemsOf(request) ?? [] };
}

/** @param {string} id */
function kindOf(id) {
  return id.startsWith("blk_") ? "bulks" : "jobs";
}

/**
 * Offer the latest ids to choose from.
 * @param {HTMLFormElement} form
 * @param {AbortSignal} signal
 */
async function suggest(form, signal) {
  try {
    const [jobs, bulks] = await Promise.all([getJson("v1/jobs?state=succeeded&limit=25", signal), getJson("v1/bulks?limit=10", signal)]);
    const list = form.querySelector("datalist");
    const options = [...jobs.data, ...bulks.data].map((/** @type {any} */ one) => h("option", { value: one.id, label: `${one.model ?? "bulk"}, ${format.moment(one.created_at)}` }));
    if (list) show(list, options);
  } catch (error) {
    if (!signal.aborted && !(error instanceof ApiError)) throw error; // an id can still be typed
  }
}

function start() {
  return empty("Choose two", "Two jobs are compared item by item, two bulks line by line. Tick two in the list of jobs, or paste their ids above.", h("p", {}, h("a", { href: "#/jobs" }, "Open the jobs")));
}

/**
 * @param {any} comparison
 * @param {About} about
 */
function differences(comparison, about) {
  const { a, b, items, identical, flips, failed } = comparison;
  return h(
    "div",
    { class: "stack" },
    h(
      "div",
      { class: "panel" },
      facts([
        ["First (a)", idLink(a)],
        ["Second (b)", idLink(b)],
        ["Items compared", format.count(items)],
        ["Identical", `${format.count(identical)}${items ? ` (${Math.round((100 * identical) / items)} %)` : ""}`],
        ["Largest difference", format.score(comparison.max_difference)],
        ["Mean difference", format.score(comparison.mean_difference)],
        ["Another best label", format.count(flips)],
        ["Without a counterpart", format.count(failed + comparison.only_in_a + comparison.only_in_b)],
        ["Rank correlation", ranks(comparison.rank_correlation, about.labels)],
      ]),
    ),
    receipt(comparison.receipt),
    changed(comparison.changed, about),
  );
}

/**
 * @param {(number | null)[]} values
 * @param {string[]} labels
 */
function ranks(values, labels) {
  if (!values.length) return "–";
  return values.map((value, index) => `${labels[index] ?? `column ${index}`} ${value === null ? "–" : value.toFixed(4)}`).join(", ");
}

/** @param {Record<string, [unknown, unknown]>} receipt */
function receipt(receipt) {
  const entries = Object.entries(receipt);
  const head = h("h2", { id: "receipts" }, "Receipts");
  if (!entries.length) return h("section", { "aria-labelledby": "receipts" }, head, h("p", { class: "panel muted" }, "They are the same: the same model, weights and parameters."));
  const text = (/** @type {unknown} */ value) => (value === null ? "–" : typeof value === "string" ? value : JSON.stringify(value));
  const rows = entries.map(([name, [a, b]]) => h("tr", { "data-key": name }, h("th", { scope: "row" }, name), h("td", { class: "text mono" }, text(a)), h("td", { class: "text mono" }, text(b))));
  return h("section", { "aria-labelledby": "receipts" }, head, table("Fields of the receipts that differ", [{ title: "Field" }, { title: "a" }, { title: "b" }], rows));
}

/**
 * @param {any[]} changes
 * @param {About} about
 */
function changed(changes, { labels, items }) {
  const head = h("h2", { id: "changed" }, "Most changed");
  if (!changes.length) return h("section", { "aria-labelledby": "changed" }, head, h("p", { class: "panel muted" }, "No score differs."));
  const scale = scaleOf(changes.flatMap((change) => [change.a, change.b]));
  const rows = changes.map((change) =>
    h(
      "tr",
      { "data-key": `${change.custom_id}/${change.item}` },
      h("td", { class: "index" }, String(change.item)),
      h("td", { class: "text" }, h("p", {}, textOf(items[change.item] ?? change.custom_id))),
      number(format.score(change.difference)),
      h("td", { class: "bars" }, pairs(change, labels, scale)),
    ),
  );
  const columns = [{ title: "#" }, { title: "Item" }, { title: "Difference", number: true }, { title: "Scores in a and in b" }];
  return h("section", { "aria-labelledby": "changed" }, head, table("Items whose scores changed most", columns, rows, { className: "results" }));
}

/**
 * For each label the score in a, and below it the one in b.
 * @param {any} change
 * @param {string[]} labels
 * @param {import("../charts.js").Scale} scale
 */
function pairs(change, labels, scale) {
  const line = (/** @type {string} */ label, /** @type {string} */ side, /** @type {number} */ value) =>
    h("div", { class: "score" }, h("span", { class: "score-label", title: label || null }, label), h("span", { class: "muted" }, side), bar(value, scale), h("span", { class: "score-value" }, format.score(value)));
  return h("div", { class: "scores pairs" }, change.a.slice(0, MOST_LABELS).flatMap((/** @type {number} */ value, /** @type {number} */ index) => [
    line(labels[index] ?? `column ${index}`, "a", value),
    line("", "b", change.b[index]),
  ]));
}
