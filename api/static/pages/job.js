/**
 * One job: scores as bars, timeline, deliveries, receipt.
 * @module
 */

import { ApiError, getJson, send } from "../api.js";
import { h, say, show } from "../dom.js";
import * as format from "../format.js";
import { followStream } from "../following.js";
import { watchClock, watchWork } from "../live.js";
import { errorNotice, facts, idLink, metadataMarks, moment, shareBar, stateMark } from "../parts.js";
import { keepReading } from "../reading.js";
import { results } from "../results.js";
import { deliveries, timeline } from "../timeline.js";

const ENDED = new Set(["succeeded", "partial", "failed", "cancelled", "expired"]);
const SCORED = new Set(["succeeded", "partial"]);
const MOST_TEXTS = 2000;
const FIRST_ITEMS = 100;

/** @typedef {{job: any, request: any, scores: any, deliveries: any[]}} Seen */

/** @param {import("../router.js").Visit} visit */
export function jobPage({ root, id, signal }) {
  const path = `v1/jobs/${encodeURIComponent(id)}`;
  /** @type {Partial<Seen>} what does not change is read once */
  const kept = {};
  let shown = FIRST_ITEMS;
  let following = false;
  /** @type {ApiError | null} */
  let refused = null;
  /** @type {import("../reading.js").Read<Seen> | null} */
  let last = null;

  const redraw = () => last && draw(root, id, last, { shown, refused });
  const again = keepReading({
    signal,
    read: () => readAll(path, kept, signal),
    draw: (read) => {
      last = read;
      redraw();
      if (isOpen() && !following) followOnce();
    },
  });
  watchWork(() => isOpen() && again(), signal);
  watchClock(() => isSending() && again(), signal);

  function isOpen() {
    return last !== null && last.value !== null && !ENDED.has(last.value.job.state);
  }
  function isSending() {
    return last?.error === null && last.value !== null && last.value.deliveries.some(({ state }) => state === "pending");
  }
  async function followOnce() {
    following = true;
    await followStream({
      path: `${path}/events`,
      take: (message) => {
        again();
        return message.id !== "" || ENDED.has(JSON.parse(message.data).state);
      },
      fail: again,
      signal,
    });
    following = false;
  }

  root.addEventListener("click", async (event) => {
    const button = event.target instanceof Element ? event.target.closest("[data-action]") : null;
    if (!(button instanceof HTMLButtonElement)) return;
    if (button.dataset.action === "again") return again();
    if (button.dataset.action === "more") {
      shown += FIRST_ITEMS;
      return redraw();
    }
    button.disabled = true;
    refused = await act(button.dataset.path ?? "", signal);
    button.disabled = false;
    redraw();
    again();
  });
}

/**
 * @param {string} path
 * @param {Partial<Seen>} kept
 * @param {AbortSignal} signal
 * @returns {Promise<Seen>}
 */
async function readAll(path, kept, signal) {
  const job = await getJson(path, signal);
  const log = await getJson(`${path}/deliveries?limit=50`, signal);
  if (kept.request === undefined && job.counts.total <= MOST_TEXTS) kept.request = await getJson(`${path}/request`, signal);
  const isAnother = kept.scores?.attempt !== job.attempt;
  if (SCORED.has(job.state) && isAnother) kept.scores = { ...(await getJson(`${path}/scores`, signal)), attempt: job.attempt };
  return { job, request: kept.request ?? null, scores: SCORED.has(job.state) ? kept.scores : null, deliveries: log.data };
}

/**
 * @param {string} path
 * @param {AbortSignal} signal
 * @returns {Promise<ApiError | null>}
 */
async function act(path, signal) {
  try {
    await send(path, { method: "POST", signal });
    say("Done.");
    return null;
  } catch (error) {
    if (error instanceof ApiError) return error;
    throw error;
  }
}

/**
 * @param {HTMLElement} root
 * @param {string} id
 * @param {import("../reading.js").Read<Seen>} last
 * @param {{shown: number, refused: ApiError | null}} view
 */
function draw(root, id, { value, error }, { shown, refused }) {
  const notice = error && errorNotice(error, { stale: value !== null && error.isPassing, retry: !error.isPassing });
  if (value === null) {
    const list = h("p", {}, h("a", { href: "#/jobs" }, "Back to the jobs"));
    return show(root, h("h1", {}, "Job ", h("span", { class: "mono" }, id)), notice, list);
  }
  const { job, request, scores } = value;
  show(
    root,
    head(job),
    notice,
    refused && errorNotice(refused),
    job.error && h("div", { class: "notice bad" }, h("p", {}, h("strong", {}, job.error.code), ` ${job.error.message}`)),
    (job.warnings ?? []).map((/** @type {string} */ text) => h("p", { class: "notice warn" }, text)),
    summary(job),
    results(request, scores, { shown, job }),
    h(
      "div",
      { class: "columns" },
      h("div", { class: "stack" }, timeline(job, value.deliveries), deliveries(value.deliveries)),
      h("div", { class: "stack" }, fields("Request", parameters(request)), fields("Receipt", job.receipt ?? {})),
    ),
  );
}

/** @param {any} job */
function head(job) {
  const path = `v1/jobs/${job.id}`;
  const action = (/** @type {string} */ name, /** @type {string} */ text) =>
    job.links[name] && h("button", { type: "button", "data-action": name, "data-path": `${path}/${name}` }, text);
  return h(
    "div",
    { class: "page-head" },
    h("h1", { class: "mono" }, job.id),
    stateMark(job.state),
    h(
      "div",
      { class: "row" },
      action("retry", "Retry"),
      action("cancel", "Cancel"),
      SCORED.has(job.state) && h("a", { class: "button", href: `#/compare?a=${job.id}` }, "Compare"),
    ),
  );
}

/** @param {any} job */
function summary(job) {
  const { total, succeeded, failed } = job.counts;
  const progress = shareBar("Items", [
    { value: succeeded, tone: "good", title: `${succeeded} scored` },
    { value: failed, tone: "bad", title: `${failed} failed` },
  ], total);
  return h(
    "div",
    { class: "panel stack" },
    facts([
      ["Model", h("a", { href: `#/jobs?model=${encodeURIComponent(job.model)}` }, job.model)],
      ["Lane", job.priority],
      ["Items", `${format.count(total)}${failed ? `, ${format.count(failed)} failed` : ""}`],
      ["Tokens", job.usage ? `${format.count(job.usage.prompt_tokens)} (${format.count(job.usage.computed_tokens)} computed)` : "–"],
      ["Waited", format.duration(format.between(job.created_at, job.started_at))],
      ["Ran", format.duration(format.between(job.started_at, job.finished_at))],
      ["Attempt", format.count(job.attempt)],
      ["Kept", job.expires_at ? ["until ", moment(job.expires_at)] : "until you delete it"],
      ["Bulk", job.bulk && idLink(job.bulk)],
      ["Metadata", Object.keys(job.metadata).length ? metadataMarks(job.metadata) : null],
    ]),
    failed > 0 && succeeded > 0 && progress,
  );
}

/** @param {any} request */
function parameters(request) {
  if (request === null) return {};
  return Object.fromEntries(Object.entries(request).filter(([name]) => name !== "items" && name !== "metadata"));
}

/**
 * A name that may be broken after its underscores.
 * @param {string} name
 */
function breakable(name) {
  return name.split(/(?<=_)/).flatMap((part) => [part, h("wbr")]);
}

/**
 * Whatever an object holds, by name.
 * @param {string} title
 * @param {Record<string, unknown>} values
 */
function fields(title, values) {
  const entries = Object.entries(values).filter(([, value]) => value !== null && value !== "");
  if (!entries.length) return null;
  const text = (/** @type {unknown} */ value) => (typeof value === "string" ? value : JSON.stringify(value));
  return h(
    "section",
    { "aria-label": title },
    h("h2", {}, title),
    h("dl", { class: "panel list" }, entries.map(([name, value]) => h("div", {}, h("dt", {}, breakable(name)), h("dd", {}, text(value))))),
  );
}
