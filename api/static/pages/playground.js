/**
 * A request put together by hand: sent, its scores shown, and the same in `curl` and Python.
 * @module
 */

import { ApiError, getJson, send } from "../api.js";
import { h, say, show } from "../dom.js";
import * as format from "../format.js";
import { keys } from "../key.js";
import { command, empty, errorNotice, idLink, stateMark } from "../parts.js";
import { results } from "../results.js";
import { curlOf, pythonOf } from "../snippets.js";

const EXAMPLE = "I loved every minute.\nA waste of money.";

/** @param {import("../router.js").Visit} visit */
export function playgroundPage({ root, signal }) {
  /** @type {any[]} */
  let models = [];
  const form = /** @type {HTMLFormElement} */ (h("form", { class: "form panel", "aria-label": "Request" }));
  const answer = h("div", { class: "stack", "aria-live": "polite" });
  const code = h("div", { class: "stack" });
  show(root, h("h1", {}, "Playground"), h("div", { class: "columns" }, h("div", { class: "stack" }, form, code), answer));
  fillForm(form, models);
  show(answer, empty("Nothing sent yet", "The scores appear here. Each request becomes a job, which is kept."));

  const refresh = () => showCode(code, form, models);
  form.addEventListener("input", (event) => {
    if (event.target instanceof HTMLSelectElement && event.target.name === "model") fillForm(form, models);
    refresh();
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    ask(form, answer, bodyOf(form, models), signal);
  });
  keys.addEventListener("change", load, { signal });
  load();

  async function load() {
    try {
      models = (await getJson("v1/models", signal)).data;
      fillForm(form, models);
    } catch (error) {
      if (signal.aborted) return;
      if (!(error instanceof ApiError)) throw error;
      show(answer, errorNotice(error));
    }
    refresh();
  }
}

/**
 * @param {HTMLFormElement} form
 * @param {any[]} models
 */
function chosen(form, models) {
  const name = new FormData(form).get("model");
  return models.find((model) => model.id === name) ?? models.find((model) => model.state === "ready") ?? models[0] ?? null;
}

/**
 * @param {HTMLFormElement} form
 * @param {any[]} models
 */
function fillForm(form, models) {
  const model = chosen(form, models);
  const isCausal = model?.description?.path === "causal";
  const told = model?.description?.instruction;
  const options = models.map((one) => h("option", { value: one.id, selected: one.id === model?.id }, one.state === "ready" ? one.id : `${one.id} (${one.state})`));
  show(
    form,
    h("label", { class: "field", "data-key": "model" }, "Model", h("select", { name: "model" }, options)),
    model && model.state !== "ready" && h("p", { class: "warn-text" }, `${model.id} is ${model.state}: the job waits until it is served.`),
    h("label", { class: "field", "data-key": "query" }, isCausal ? "Query: what stands before each item" : "Query (optional): shared by all items", h("textarea", { name: "query", rows: 2, spellcheck: "false" })),
    typeof told === "string" && h("label", { class: "field", "data-key": "instruction" }, "Instruction: the task (optional)", h("textarea", { name: "instruction", rows: 2, maxlength: 4096, placeholder: told })),
    h("label", { class: "field", "data-key": "items" }, "Items, one on each line", h("textarea", { name: "items", rows: 6, required: true }, EXAMPLE)),
    isCausal && h("label", { class: "field", "data-key": "labels" }, "Labels, separated by | (spaces count)", h("input", { name: "labels", value: " Yes| No", autocomplete: "off" })),
    h(
      "div",
      { class: "pair", "data-key": "options" },
      h("label", { class: "tick" }, h("input", { type: "checkbox", name: "apply_softmax", checked: true }), "Softmax"),
      h("label", { class: "tick" }, h("input", { type: "checkbox", name: "return_pooled_hidden_states" }), "Keep hidden states"),
    ),
    h("div", { class: "row", "data-key": "send" }, h("button", { type: "submit", class: "primary" }, "Score")),
  );
}

/**
 * The request's body, without what is empty.
 * @param {HTMLFormElement} form
 * @param {any[]} models
 * @returns {Record<string, unknown>}
 */
function bodyOf(form, models) {
  const values = new FormData(form);
  const text = (/** @type {string} */ name) => String(values.get(name) ?? "");
  /** @type {Record<string, unknown>} */
  const body = { items: text("items").split("\n").filter((line) => line.trim() !== "") };
  const model = chosen(form, models);
  if (model) body.model = model.id;
  if (text("query").trim() !== "") body.query = text("query");
  if (text("instruction").trim() !== "") body.instruction = text("instruction");
  if (values.has("labels")) body.labels = text("labels").split("|").filter((label) => label !== "");
  if (values.has("apply_softmax")) body.apply_softmax = true;
  if (values.has("return_pooled_hidden_states")) body.return_pooled_hidden_states = true;
  return body;
}

/**
 * @param {HTMLElement} code
 * @param {HTMLFormElement} form
 * @param {any[]} models
 */
function showCode(code, form, models) {
  const body = bodyOf(form, models);
  show(
    code,
    h("section", { "aria-labelledby": "curl" }, h("h2", { id: "curl" }, "curl"), command(curlOf("v1/score", body), "the request as curl")),
    h("section", { "aria-labelledby": "python" }, h("h2", { id: "python" }, "Python"), command(pythonOf(body), "the request as Python")),
  );
}

/**
 * @param {HTMLFormElement} form
 * @param {HTMLElement} answer
 * @param {Record<string, unknown>} body
 * @param {AbortSignal} signal
 */
async function ask(form, answer, body, signal) {
  const button = /** @type {HTMLButtonElement} */ (form.querySelector("button[type=submit]"));
  button.disabled = true;
  const startedAt = performance.now();
  try {
    const response = await send("v1/score", { method: "POST", body, signal });
    const tookS = (performance.now() - startedAt) / 1000;
    const id = (response.headers.get("Location") ?? "").split("/").at(-1) ?? "";
    const job = await getJson(`v1/jobs/${id}`, signal);
    if (response.status === 202) {
      show(answer, h("div", { class: "panel stack" }, h("p", {}, stateMark(job.state), " It takes longer than a request may wait; it goes on as a job."), idLink(id, { full: true })));
      return;
    }
    const scores = await getJson(`v1/jobs/${id}/scores`, signal);
    show(answer, outcome(job, scores, body, tookS));
    say("The scores have arrived.");
  } catch (error) {
    if (signal.aborted) return;
    if (!(error instanceof ApiError)) throw error;
    show(answer, errorNotice(error));
  } finally {
    button.disabled = false;
  }
}

/**
 * @param {any} job
 * @param {any} scores
 * @param {Record<string, unknown>} body
 * @param {number} tookS
 */
function outcome(job, scores, body, tookS) {
  return h(
    "div",
    { class: "stack" },
    h(
      "div",
      { class: "panel spread" },
      h("span", {}, stateMark(job.state), " ", idLink(job.id)),
      h("span", { class: "muted" }, `${format.duration(tookS)} · ${format.counted(scores.usage.prompt_tokens, "token")}`),
    ),
    scores.warnings.map((/** @type {string} */ text) => h("p", { class: "notice warn" }, text)),
    results(body, scores, { shown: job.counts.total, job }),
  );
}
