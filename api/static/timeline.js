/**
 * What happened to a job and when; and its webhooks, attempt by attempt.
 * @module
 */

import { h } from "./dom.js";
import * as format from "./format.js";
import { moment, stateMark, toneOf } from "./parts.js";

/** @typedef {{at: string, what: import("./dom.js").Child[], tone: string}} Moment */

/**
 * @param {any} job
 * @param {any[]} log
 */
export function timeline(job, log) {
  const moments = [
    { at: job.created_at, what: ["Submitted"], tone: "idle" },
    job.started_at && { at: job.started_at, what: [job.attempt > 1 ? `Taken by a worker, attempt ${job.attempt}` : "Taken by a worker"], tone: "busy" },
    job.cancel_requested_at && { at: job.cancel_requested_at, what: ["Asked to stop"], tone: "warn" },
    job.finished_at && { at: job.finished_at, what: ["Ended as ", stateMark(job.state)], tone: toneOf(job.state) },
    ...log.flatMap((delivery) => delivery.attempts.map((/** @type {any} */ attempt) => attemptMoment(delivery, attempt))),
  ].filter(Boolean);
  moments.sort((a, b) => Date.parse(a.at) - Date.parse(b.at));
  const steps = moments.map((/** @type {Moment} */ { at, what, tone }, index) => {
    const since = index ? format.between(moments[index - 1].at, at) : null;
    return h(
      "li",
      { "data-tone": tone },
      moment(at),
      h("span", { class: "what" }, what),
      h("span", { class: "muted" }, since === null ? "" : `+${format.duration(since)}`),
    );
  });
  return h("section", { "aria-labelledby": "timeline" }, h("h2", { id: "timeline" }, "Timeline"), h("div", { class: "panel" }, h("ol", { class: "timeline" }, steps)));
}

/**
 * @param {any} delivery
 * @param {any} attempt
 * @returns {Moment}
 */
function attemptMoment(delivery, attempt) {
  const taken = attempt.status >= 200 && attempt.status < 300;
  return { at: attempt.at, what: [`Webhook to ${hostOf(delivery.url)}: ${attempt.status ?? attempt.error ?? "failed"}`], tone: taken ? "good" : "bad" };
}

/** @param {any[]} log */
export function deliveries(log) {
  if (!log.length) return null;
  const entries = log.map((delivery) =>
    h(
      "article",
      { class: "panel stack", "data-key": delivery.id },
      h(
        "div",
        { class: "spread" },
        h("span", {}, stateMark(delivery.state, delivery.reason ?? undefined), " ", h("strong", {}, delivery.type)),
        delivery.state !== "pending" && h("button", { type: "button", "data-action": "redeliver", "data-path": `v1/deliveries/${delivery.id}/redeliver` }, "Send again"),
      ),
      h(
        "dl",
        { class: "list" },
        pair("To", delivery.url),
        delivery.reason && pair("Given up", delivery.reason),
        delivery.next_attempt_at && pair("Next attempt", moment(delivery.next_attempt_at)),
        delivery.attempts.map((/** @type {any} */ attempt) =>
          pair(`Attempt ${attempt.attempt}`, [
            moment(attempt.at), ` · ${attempt.status ?? attempt.error} · ${format.duration(attempt.latency_s)}`,
            attempt.answer ? `\n${attempt.answer}` : "",
          ]),
        ),
      ),
    ),
  );
  return h("section", { "aria-labelledby": "deliveries" }, h("h2", { id: "deliveries" }, "Deliveries"), entries);
}

/**
 * @param {string} term
 * @param {import("./dom.js").Child | import("./dom.js").Child[]} value
 */
function pair(term, value) {
  return h("div", {}, h("dt", {}, term), h("dd", {}, ...[value].flat()));
}

/** @param {string} url */
function hostOf(url) {
  try {
    return new URL(url).host;
  } catch {
    return url;
  }
}
