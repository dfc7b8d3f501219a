/**
 * Jobs, newest first: filters, pages, and two to compare.
 * @module
 */

import { getJson, withQuery } from "../api.js";
import { byId, h, say, show } from "../dom.js";
import * as format from "../format.js";
import { watch, watchWork } from "../live.js";
import { command, empty, errorNotice, idLink, metadataMarks, moment, number, row, stateMark, table } from "../parts.js";
import { keepReading } from "../reading.js";
import { rewriteAddress } from "../router.js";
import { curlOf } from "../snippets.js";

const STATES = ["queued", "running", "succeeded", "partial", "failed", "cancelled", "expired"];
const SIZES = ["50", "200", "1000"];
const TYPING_MS = 300;
const BULK_ID = /^blk_[0-9a-f]{32}$/;
const NAMES = ["state", "model", "bulk", "key", "value", "limit"];

/** @param {import("../router.js").Visit} visit */
export function jobsPage({ root, query, signal }) {
  const wanted = Object.fromEntries(NAMES.map((name) => [name, query.get(name) ?? ""]));
  /** @type {string[]} the cursors of the pages before this one; the first page has none */
  let cursors = query.get("cursor") ? ["", query.get("cursor") ?? ""] : [""];
  /** @type {Set<string>} */
  const chosen = new Set();
  const results = h("div", { class: "stack" });
  show(root, h("div", { class: "page-head" }, h("h1", {}, "Jobs")), filters(wanted), results);

  const again = keepReading({
    signal,
    read: () => getJson(listPath(wanted, cursors.at(-1) ?? ""), signal),
    draw: (last) => draw(results, last, { wanted, cursors, chosen }),
  });
  watchWork(() => cursors.length === 1 && again(), signal);
  watch(({ overview }) => fillModels(overview), signal);

  /** @param {string[]} to */
  function turn(to) {
    cursors = to;
    rewriteAddress("jobs", { ...wanted, cursor: cursors.at(-1) ?? "" });
    again();
  }
  let typing = 0;
  root.addEventListener("input", (event) => {
    const input = /** @type {HTMLInputElement} */ (event.target);
    if (input.name in wanted) {
      wanted[input.name] = input.value.trim();
      clearTimeout(typing);
      if (isWhole(wanted)) typing = setTimeout(() => turn([""]), input.localName === "select" ? 0 : TYPING_MS);
    } else if (input.name === "chosen") {
      if (input.checked) chosen.add(input.value);
      else chosen.delete(input.value);
      showChoice(chosen);
    }
  });
  signal.addEventListener("abort", () => clearTimeout(typing));
  root.addEventListener("submit", (event) => event.preventDefault());
  root.addEventListener("click", (event) => {
    const action = event.target instanceof Element ? event.target.closest("[data-action]") : null;
    const page = results.dataset.next ?? "";
    if (action?.getAttribute("data-action") === "older") turn([...cursors, page]);
    if (action?.getAttribute("data-action") === "newer") turn(cursors.slice(0, -1));
    if (action?.getAttribute("data-action") === "again") again();
    if (action?.getAttribute("data-action") === "clear") location.hash = "#/jobs";
  });
}

/**
 * Whether what was typed can be asked for: an id to its end, a key with its value.
 * @param {Record<string, string>} wanted
 */
function isWhole(wanted) {
  return (wanted.bulk === "" || BULK_ID.test(wanted.bulk)) && (wanted.key === "") === (wanted.value === "");
}

/**
 * @param {Record<string, string>} wanted
 * @param {string} cursor
 */
function listPath(wanted, cursor) {
  const { key, value, limit, state, model, bulk } = wanted;
  const metadata = key && value ? { [`metadata.${key}`]: value } : {};
  return withQuery("v1/jobs", { state, model, bulk, ...metadata, limit: limit || "50", cursor });
}

/** @param {Record<string, string>} wanted */
function filters(wanted) {
  const option = (/** @type {string} */ value, /** @type {string} */ text, /** @type {string} */ now) =>
    h("option", { value, selected: value === now }, text);
  return h(
    "form",
    { class: "filters", role: "search", "aria-label": "Filter jobs" },
    h("label", { class: "field" }, "State", h("select", { name: "state" }, option("", "any", wanted.state), STATES.map((state) => option(state, state, wanted.state)))),
    h("label", { class: "field" }, "Model", h("input", { name: "model", value: wanted.model, list: "known-models", placeholder: "any", autocomplete: "off" })),
    h("datalist", { id: "known-models" }),
    h("label", { class: "field" }, "Bulk", h("input", { name: "bulk", value: wanted.bulk, placeholder: "blk_…", autocomplete: "off" })),
    h("label", { class: "field" }, "Metadata key", h("input", { name: "key", value: wanted.key, placeholder: "any", autocomplete: "off" })),
    h("label", { class: "field" }, "Metadata value", h("input", { name: "value", value: wanted.value, placeholder: "any", autocomplete: "off" })),
    h("label", { class: "field" }, "Rows", h("select", { name: "limit" }, SIZES.map((size) => option(size, size, wanted.limit || "50")))),
  );
}

/** @param {any} overview */
function fillModels(overview) {
  const list = document.getElementById("known-models");
  if (list && overview) show(list, overview.models.map((/** @type {any} */ model) => h("option", { value: model.id })));
}

/**
 * @param {HTMLElement} results
 * @param {import("../reading.js").Read<any>} last
 * @param {{wanted: Record<string, string>, cursors: string[], chosen: Set<string>}} view
 */
function draw(results, { value, error }, { wanted, cursors, chosen }) {
  const notice = error && errorNotice(error, { stale: value !== null && error.isPassing, retry: !error.isPassing });
  if (value === null || (error && !error.isPassing)) return show(results, notice);
  const jobs = value.data;
  results.dataset.next = value.next_cursor ?? "";
  if (!jobs.length) return show(results, notice, nothing(wanted, cursors));
  const columns = [
    { title: "Compare", bare: true }, { title: "State" }, { title: "Job" }, { title: "Model" }, { title: "Items", number: true },
    { title: "Lane" }, { title: "Submitted" }, { title: "Waited", number: true }, { title: "Ran", number: true }, { title: "Metadata" },
  ];
  show(
    results,
    notice,
    table("List of jobs, newest first", columns, jobs.map((/** @type {any} */ job) => jobRow(job, chosen))),
    h(
      "div",
      { class: "spread" },
      h("p", { class: "muted", id: "rows-shown" }, `${format.counted(jobs.length, "job")} on page ${cursors.length}`),
      h("button", { type: "button", class: "quiet", id: "compare-chosen", hidden: chosen.size !== 2 }, "Compare the two chosen"),
      h(
        "div",
        { class: "row" },
        h("button", { type: "button", "data-action": "newer", disabled: cursors.length === 1 }, "Newer"),
        h("button", { type: "button", "data-action": "older", disabled: !value.has_more }, "Older"),
      ),
    ),
  );
  byId("compare-chosen").onclick = () => (location.hash = `#/compare?${new URLSearchParams({ a: [...chosen][0], b: [...chosen][1] })}`);
}

/**
 * @param {any} job
 * @param {Set<string>} chosen
 */
function jobRow(job, chosen) {
  const { total, succeeded, failed } = job.counts;
  const done = failed ? `${format.count(succeeded)} / ${format.count(total)}` : format.count(total);
  return row(
    job.id,
    h("input", { type: "checkbox", name: "chosen", value: job.id, checked: chosen.has(job.id), "aria-label": `Compare ${job.id}` }),
    stateMark(job.state, job.error?.message),
    idLink(job.id),
    job.model,
    number(done, failed ? `${failed} items failed` : undefined),
    job.priority,
    moment(job.created_at),
    number(format.duration(format.between(job.created_at, job.started_at))),
    number(format.duration(format.between(job.started_at, job.finished_at))),
    metadataMarks(job.metadata),
  );
}

/** @param {Set<string>} chosen */
function showChoice(chosen) {
  byId("compare-chosen").hidden = chosen.size !== 2;
  if (chosen.size === 2) say("Two jobs are chosen: the button Compare the two chosen follows the table.");
}

/**
 * @param {Record<string, string>} wanted
 * @param {string[]} cursors
 */
function nothing(wanted, cursors) {
  if (cursors.length > 1) {
    return empty("No older jobs", "This page of the list is empty.", h("div", {}, h("button", { type: "button", "data-action": "newer" }, "Newer")));
  }
  if (NAMES.some((name) => name !== "limit" && wanted[name] !== "")) {
    return empty("No job fits these filters", "Widen one of them, or begin anew.", h("div", {}, h("button", { type: "button", "data-action": "clear" }, "Clear the filters")));
  }
  const example = { items: ["I loved every minute.", "A waste of money."] };
  return empty("No jobs yet", "Every scoring call becomes one. Send the first, from a terminal or from the playground:", command(curlOf("v1/jobs", example), "submit a job"), h("p", {}, h("a", { href: "#/playground" }, "Open the playground")));
}
