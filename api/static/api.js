/**
 * Requests to our own routes, and what went wrong with them. The only module that calls `fetch`.
 * @module
 */

import { askForKey, currentKey, keyHeaders } from "./key.js";

/**
 * Why a request has no answer, in words for people.
 */
export class ApiError extends Error {
  /**
   * @param {string} message
   * @param {{status?: number, code?: string, param?: string, requestId?: string}} [facts]
   */
  constructor(message, { status = 0, code = "unreachable", param = "", requestId = "" } = {}) {
    super(message);
    this.name = "ApiError";
    this.status = status;
    this.code = code;
    this.param = param;
    this.requestId = requestId;
  }

  /** Whether trying again by itself makes sense: the service or its store is away. */
  get isPassing() {
    return this.status === 0 || this.status === 429 || this.status >= 500;
  }
}

/**
 * The address of a path such as `v1/jobs`, wherever the dashboard is mounted.
 * @param {string} path
 */
export function addressOf(path) {
  return new URL(path.replace(/^\//, ""), new URL(".", document.baseURI)).href;
}

/**
 * Send a request and return the answer; raise `ApiError` for any that is not 2xx.
 * @param {string} path
 * @param {{method?: string, body?: unknown, headers?: Record<string, string>, signal?: AbortSignal}} [options]
 * @returns {Promise<Response>}
 */
export async function send(path, { method = "GET", body, headers = {}, signal } = {}) {
  /** @type {Record<string, string>} */
  const sent = { Accept: "application/json", ...keyHeaders(), ...headers };
  if (body !== undefined) sent["Content-Type"] = "application/json";
  let answer;
  try {
    answer = await fetch(addressOf(path), {
      method,
      headers: sent,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError(`The service at ${location.host} does not answer.`);
  }
  if (answer.ok) return answer;
  const error = await describe(answer);
  if (answer.status === 401) {
    askForKey(currentKey() === "" ? "This service wants an API key" : "This key was refused");
  }
  throw error;
}

/**
 * Return the JSON of an answer.
 * @param {string} path
 * @param {AbortSignal} [signal]
 * @returns {Promise<any>}
 */
export async function getJson(path, signal) {
  const answer = await send(path, { signal });
  try {
    return await answer.json();
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError("The answer was cut off.");
  }
}

/**
 * Build a path with a query of what is not empty.
 * @param {string} path
 * @param {Record<string, string | number | null | undefined>} query
 */
export function withQuery(path, query) {
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const text = new URLSearchParams(given.map(([name, value]) => [name, String(value)])).toString();
  return text === "" ? path : `${path}?${text}`;
}

/**
 * Read the error of an answer, in the form of any of the service's families.
 * @param {Response} answer
 * @returns {Promise<ApiError>}
 */
async function describe(answer) {
  const facts = { status: answer.status, requestId: answer.headers.get("X-Request-Id") ?? "" };
  let body;
  try {
    body = await answer.json();
  } catch {
    return new ApiError(`The service answered ${answer.status} ${answer.statusText}.`, {
      ...facts,
      code: String(answer.status),
    });
  }
  const inner = typeof body?.error === "object" && body.error !== null ? body.error : body;
  const message = inner?.detail ?? inner?.message ?? inner?.title ?? `The service answered ${answer.status}.`;
  return new ApiError(String(message), {
    ...facts,
    code: String(inner?.code ?? answer.status),
    param: String(inner?.param ?? ""),
  });
}
