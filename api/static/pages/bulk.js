/**
 * One bulk while it runs and after: counts, speed, refused lines, events.
 * @module
 */

import { ApiError, getJson, send } from "../api.js";
import { h, say, show } from "../dom.js";
import { followStream } from "../following.js";
import * as format from "../format.js";
import { errorNotice, facts, metadataMarks, moment, number, row, stateMark, table } from "../parts.js";
import { keepReading } from "../reading.js";
import { endedLines, progressBar } from "./bulks.js";

const ENDED = new Set(["completed", "failed", "cancelled", "expired"]);

/** @param {import("../router.js").Visit} visit */
export function bulkPage({ root, id, signal }) {
  const path = `v1/bulks/${encodeURIComponent(id)}`;
  /** @type {ApiError | null} */
  let refused = null;
  /** @type {import("../reading.js").Read<{bulk: any, events: any[]}> | null} */
  let last = null;
  let following = false;
  const redraw = () => last && draw(root, id, last, refused);
  const again = keepReading({
    signal,
    read: async () => {
      const [bulk, events] = await Promise.all([getJson(path, signal), getJson(`${path}/events`, signal)]);
      return { bulk, events: events.data };
    },
    draw: (read) => {
      last = read;
      redraw();
      if (!following && read.value !== null && !ENDED.has(read.value.bulk.state)) follow();
    },
  });

  async function follow() {
    following = true;
    await followStream({ path: `${path}/events`, take, fail: again, signal });
    following = false;
  }
  /** @param {import("../stream.js").Message} message */
  function take(message) {
    const said = JSON.parse(message.data);
    const known = last?.value;
    if (!known) return false;
    if (message.event === "bulk.state") known.bulk = said;
    else if (!known.events.some(({ id }) => id === said.id)) known.events.push(said);
    redraw();
    return message.event === "bulk.state" && ENDED.has(said.state);
  }

  root.addEventListener("click", async (event) => {
    const button = event.target instanceof Element ? event.target.closest("[data-action]") : null;
    if (!(button instanceof HTMLButtonElement)) return;
    if (button.dataset.action === "again") return again();
    if (button.dataset.action === "cancel" && !confirm("Stop this bulk? What was scored is kept.")) return;
    button.disabled = true;
    try {
      await send(`${path}/${button.dataset.action}`, { method: "POST", signal });
      refused = null;
      say("Done.");
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      refused = error;
    }
    button.disabled = false;
    redraw();
    again();
  });
}

/**
 * @param {HTMLElement} root
 * @param {string} id
 * @param {import("../reading.js").Read<{bulk: any, events: any[]}>} last
 * @param {ApiError | null} refused
 */
function draw(root, id, { value, error }, refused) {
  const notice = error && errorNotice(error, { stale: value !== null && error.isPassing, retry: !error.isPassing });
  if (value === null) {
    return show(root, h("h1", {}, "Bulk ", h("span", { class: "mono" }, id)), notice, h("p", {}, h("a", { href: "#/bulks" }, "Back to the bulks")));
  }
  const { bulk, events } = value;
  show(root, head(bulk), notice, refused && errorNotice(refused), progress(bulk), refusals(bulk), h("div", { class: "columns" }, about(bulk), log(events)));
}

/** @param {any} bulk */
function head(bulk) {
  const ended = ENDED.has(bulk.state);
  const action = (/** @type {boolean} */ offered, /** @type {string} */ name, /** @type {string} */ text) =>
    offered && h("button", { type: "button", "data-action": name }, text);
  const runs = bulk.state === "validating" || bulk.state === "running";
  const unscored = bulk.counts.failed > 0 || bulk.counts.cancelled > 0;
  return h(
    "div",
    { class: "page-head" },
    h("h1", { class: "mono" }, bulk.id),
    stateMark(bulk.paused ? "paused" : bulk.state),
    h(
      "div",
      { class: "row" },
      h("a", { class: "button", href: `#/jobs?bulk=${bulk.id}` }, "Its jobs"),
      action(runs && !bulk.paused, "pause", "Pause"),
      action(runs && bulk.paused, "resume", "Resume"),
      action(!ended && bulk.state !== "cancelling", "cancel", "Cancel"),
      action(ended && unscored, "retry", "Retry failed items"),
      ended && h("a", { class: "button", href: `#/compare?a=${bulk.id}` }, "Compare"),
    ),
  );
}

/** @param {any} bulk */
function progress(bulk) {
  const { counts } = bulk;
  const done = endedLines(bulk);
  const share = counts.lines ? `${Math.floor((100 * done) / counts.lines)} %` : "–";
  const ended = ENDED.has(bulk.state);
  return h(
    "div",
    { class: "panel stack" },
    h("div", { class: "spread" }, h("strong", {}, `${format.count(done)} of ${format.counted(counts.lines, "line")} · ${share}`), h("span", { class: "muted" }, ended ? `took ${format.duration(format.between(bulk.started_at, bulk.finished_at))}` : bulk.eta_s === null ? "" : `about ${format.duration(bulk.eta_s)} left`)),
    progressBar(bulk),
    facts([
      ["Items scored", format.count(counts.scored)],
      ["From the cache", format.count(counts.from_cache)],
      ["Items failed", format.count(counts.failed)],
      ["Items cancelled", format.count(counts.cancelled)],
      ["Tokens", format.count(counts.tokens)],
      ["Speed", bulk.items_per_s === null ? "–" : `${format.rate(bulk.items_per_s)} items/s`],
    ]),
  );
}

/** @param {any} bulk */
function refusals(bulk) {
  if (!bulk.errors.length) return null;
  const columns = [{ title: "Line", number: true }, { title: "Code" }, { title: "Field" }, { title: "Why" }];
  const rows = bulk.errors.map((/** @type {any} */ error, /** @type {number} */ index) =>
    row(`${index}`, number(error.line ?? "–"), error.code, error.param ?? "–", h("td", { class: "text" }, error.message)),
  );
  return h("section", { "aria-labelledby": "refusals" }, h("h2", { id: "refusals" }, "Refused"), table("Lines that were refused", columns, rows));
}

/** @param {any} bulk */
function about(bulk) {
  return h(
    "section",
    { "aria-labelledby": "about" },
    h("h2", { id: "about" }, "About"),
    h(
      "div",
      { class: "panel" },
      facts([
        ["Model", bulk.model ?? "by line"],
        ["Source", h("span", { class: "mono" }, sourceOf(bulk.source))],
        ["Cache", bulk.cache],
        ["Hidden states", bulk.hidden_states ? "kept" : "not kept"],
        ["Submitted", moment(bulk.created_at)],
        ["Started", moment(bulk.started_at)],
        ["Ended", moment(bulk.finished_at)],
        ["Metadata", Object.keys(bulk.metadata).length ? metadataMarks(bulk.metadata) : null],
      ]),
    ),
  );
}

/**
 * Where the lines came from: a file, an address, or what was scored before.
 * @param {Record<string, unknown>} source
 */
function sourceOf(source) {
  const given = Object.entries(source).filter(([, value]) => value !== null);
  return given.map(([name, value]) => `${name} ${typeof value === "string" ? value : JSON.stringify(value)}`).join(", ") || "–";
}

/** @param {any[]} events */
function log(events) {
  if (!events.length) return null;
  const tones = { "batch.completed": "good", "batch.failed": "bad", "batch.cancelled": "warn", "batch.expired": "warn" };
  const steps = events.slice(-30).map((event) =>
    h(
      "li",
      { "data-key": event.id, "data-tone": tones[/** @type {keyof typeof tones} */ (event.type)] ?? "busy" },
      moment(event.timestamp),
      h("span", { class: "what" }, event.type),
      h("span", { class: "muted" }, `${format.count(event.data.scored ?? 0)} scored`),
    ),
  );
  return h("section", { "aria-labelledby": "events" }, h("h2", { id: "events" }, "Events"), h("div", { class: "panel" }, h("ol", { class: "timeline" }, steps)));
}
