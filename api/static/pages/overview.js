/**
 * The first page: is it well, what waits, who works, how fast.
 * @module
 */

import { columns } from "../charts.js";
import { h, show } from "../dom.js";
import * as format from "../format.js";
import { watch } from "../live.js";
import { command, empty, errorNotice, number, row, stateMark, table } from "../parts.js";

/** @typedef {import("../router.js").Visit} Visit */
/** @typedef {"jobs" | "items" | "tokens"} Measure */

const OLD_S = 60;

/** @param {Visit} visit */
export function overviewPage({ root, signal }) {
  /** @type {Measure} */
  let measure = "items";
  /** @type {import("../live.js").Live | null} */
  let last = null;
  root.addEventListener("change", (event) => {
    const input = /** @type {HTMLInputElement} */ (event.target);
    if (input.name !== "measure") return;
    measure = /** @type {Measure} */ (input.value);
    if (last) draw(last);
  });

  /** @param {import("../live.js").Live} live */
  function draw(live) {
    last = live;
    const heading = h("h1", {}, "Overview");
    const notice = live.error && errorNotice(live.error, { stale: live.overview !== null });
    const away = live.status === "away" && errorNotice({ message: "The database does not answer." }, { stale: live.overview !== null });
    if (live.overview === null) {
      const waiting = !live.error && !away && h("p", { class: "muted" }, "Reading the overview …");
      return show(root, heading, notice, away, waiting);
    }
    const overview = live.overview;
    show(root, heading, notice, away, attention(overview), tiles(overview), throughput(overview.throughput, measure), queue(overview.models), workers(overview.workers));
  }
  watch(draw, signal);
}

/** @param {any} overview */
function attention(overview) {
  const lines = [];
  for (const model of overview.models) {
    if (model.state === "failed") lines.push([`Model ${model.id} cannot be served: `, model.reason ?? "it could not be loaded"]);
    if (model.state === null) lines.push([`Jobs wait for ${model.id}: `, model.reason ?? ""]);
    for (const lane of model.lanes) {
      if (lane.oldest_age_s > OLD_S && lane.lane !== "bulk") {
        lines.push([`The oldest ${lane.lane} job of ${model.id} has waited ${format.duration(lane.oldest_age_s)}. `, ""]);
      }
    }
  }
  const silent = overview.workers.filter((/** @type {any} */ worker) => !worker.alive).length;
  if (silent) lines.push([`${format.counted(silent, "worker")} stopped answering. `, "Jobs that they held run elsewhere once their leases end."]);
  if (overview.deliveries.dead) lines.push([`${format.counted(overview.deliveries.dead, "webhook")} given up. `, "They can be sent again from their job's page."]);
  if (!lines.length) return null;
  return h(
    "section",
    { class: "notice warn", "aria-label": "Needs attention" },
    h("ul", { class: "plain" }, lines.map(([what, why]) => h("li", {}, h("strong", {}, what), why))),
  );
}

/** @param {any} overview */
function tiles(overview) {
  const lanes = overview.models.flatMap((/** @type {any} */ model) => model.lanes);
  const sum = (/** @type {string} */ name) => lanes.reduce((/** @type {number} */ total, /** @type {any} */ lane) => total + lane[name], 0);
  const oldest = Math.max(0, ...lanes.map((/** @type {any} */ lane) => lane.oldest_age_s));
  const waiting = sum("waiting");
  const alive = overview.workers.filter((/** @type {any} */ worker) => worker.alive).length;
  const { jobs, items, slot_s: slotS } = overview.throughput;
  const minute = (/** @type {number[]} */ values) => values.slice(-1 - 60 / slotS, -1).reduce((total, value) => total + value, 0);
  const { pending, overdue_s: overdue } = overview.deliveries;
  return h(
    "dl",
    { class: "tiles" },
    tile("Waiting", format.counted(waiting, "job"), `${format.count(sum("tokens"))} tokens`),
    tile("Oldest", waiting ? format.duration(oldest) : "–", waiting ? "in the queue" : "nothing waits"),
    tile("Running", format.counted(sum("running"), "job"), `on ${format.counted(alive, "worker")}`),
    tile("Last minute", format.counted(minute(jobs), "job"), `${format.rate(minute(items) / 60)} items/s`),
    tile("Webhooks", format.count(pending), pending ? (overdue > 0 ? `pending, late by ${format.duration(overdue)}` : "pending") : "none pending"),
  );
}

/**
 * @param {string} name
 * @param {string} value
 * @param {string} more
 */
function tile(name, value, more) {
  return h("div", { class: "tile" }, h("dt", {}, name), h("dd", { class: "tile-value" }, value), h("dd", { class: "muted" }, more));
}

/**
 * @param {any} throughput
 * @param {Measure} measure
 */
function throughput(throughput, measure) {
  const choices = ["items", "tokens", "jobs"].map((name) =>
    h("label", {}, h("input", { type: "radio", name: "measure", value: name, checked: name === measure }), h("span", {}, name)),
  );
  return h(
    "section",
    { "aria-labelledby": "throughput" },
    h(
      "div",
      { class: "section-head" },
      h("h2", { id: "throughput" }, "Throughput"),
      h("fieldset", { class: "choice" }, h("legend", { class: "hidden" }, "Measure"), choices),
    ),
    columns(measure, throughput[measure], { slotS: throughput.slot_s, lastAt: throughput.last_at }),
  );
}

/** @param {any[]} models */
function queue(models) {
  const head = h("h2", { id: "queue" }, "Models and queue");
  if (!models.length) {
    const up = command("scorekeep up --model sentiment=path/to/checkpoint", "start everything with a model");
    return h("section", { "aria-labelledby": "queue" }, head, empty("No model is served", "Start a worker with a model, or everything on one machine:", up));
  }
  const rows = models.map((model) =>
    row(
      model.id,
      h("th", { scope: "row" }, h("a", { href: `#/jobs?model=${encodeURIComponent(model.id)}` }, model.id)),
      stateMark(model.state ?? "unserved", model.reason ?? undefined),
      ...model.lanes.map((/** @type {any} */ lane) => laneCell(lane)),
      number(format.count(model.lanes.reduce((/** @type {number} */ total, /** @type {any} */ lane) => total + lane.tokens, 0))),
      number(format.count(model.lanes.reduce((/** @type {number} */ total, /** @type {any} */ lane) => total + lane.running, 0))),
    ),
  );
  const titles = [
    { title: "Model" }, { title: "State" }, { title: "Interactive", number: true }, { title: "Normal", number: true },
    { title: "Bulk", number: true }, { title: "Tokens waiting", number: true }, { title: "Running", number: true },
  ];
  const note = h("p", { class: "muted note" }, "Lanes show the jobs that wait and the age of the oldest.");
  return h("section", { "aria-labelledby": "queue" }, head, table("Jobs that wait, by model and lane", titles, rows), note);
}

/** @param {any} lane */
function laneCell(lane) {
  if (!lane.waiting) return number(h("span", { class: "muted" }, "0"));
  const old = lane.oldest_age_s > OLD_S && lane.lane !== "bulk";
  return number([
    format.count(lane.waiting), " ",
    h("span", { class: old ? "warn-text" : "muted" }, `· ${format.duration(lane.oldest_age_s)}`),
  ]);
}

/** @param {any[]} workers */
function workers(workers) {
  const head = h("h2", { id: "workers" }, "Workers");
  if (!workers.length) {
    const start = command("scorekeep worker", "start a worker");
    return h("section", { "aria-labelledby": "workers" }, head, empty("No worker is running", "Jobs are taken and wait. Start one, with the service's settings in its environment:", start));
  }
  const rows = workers.map((worker) =>
    row(
      worker.id,
      h("th", { scope: "row" }, `${worker.host} `, h("span", { class: "muted" }, String(worker.pid))),
      stateMark(worker.alive ? "alive" : "silent"),
      worker.device || "–",
      number(format.bytes(worker.memory_bytes)),
      number(deviceMemory(worker)),
      number(format.count(worker.running)),
      number(`${Math.round(worker.heartbeat_age_s) < 60 ? `${Math.round(worker.heartbeat_age_s)} s` : format.duration(worker.heartbeat_age_s)} ago`),
      Object.entries(worker.models).map(([name, state]) => h("span", { class: "served" }, name, " ", stateMark(String(state)))),
    ),
  );
  const titles = [
    { title: "Worker" }, { title: "State" }, { title: "Device" }, { title: "Memory", number: true },
    { title: "Device memory", number: true }, { title: "Running", number: true }, { title: "Heartbeat", number: true }, { title: "Models" },
  ];
  return h("section", { "aria-labelledby": "workers" }, head, table("State, memory and heartbeat of each worker", titles, rows));
}

/** @param {any} worker */
function deviceMemory(worker) {
  if (worker.device_memory_total_bytes === null) return "–";
  return `${format.bytes(worker.device_memory_bytes)} of ${format.bytes(worker.device_memory_total_bytes)}`;
}
