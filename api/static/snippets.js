/**
 * A request as `curl` and as Python: what the page would send, ready to be pasted.
 * @module
 */

import { addressOf } from "./api.js";
import { currentKey } from "./key.js";

/**
 * @param {string} path
 * @param {Record<string, unknown>} body
 */
export function curlOf(path, body) {
  const lines = [`curl -s ${quote(addressOf(path))}`, "-H 'Content-Type: application/json'"];
  if (currentKey() !== "") lines.push('-H "Authorization: Bearer $SCOREKEEP_KEY"');
  lines.push(`-d ${quote(JSON.stringify(body))}`);
  return lines.join(" \\\n  ");
}

/**
 * @param {Record<string, unknown>} body a request of `POST /v1/score`
 */
export function pythonOf(body) {
  const { items, ...options } = body;
  const key = currentKey() === "" ? "" : ', api_key=os.environ["SCOREKEEP_KEY"]';
  const wanted = Object.entries(options).map(([name, value]) => `        ${name}=${literal(value)},\n`);
  return [
    ...(key ? ["import os", ""] : []),
    "from scorekeep import Client",
    "",
    `with Client(${literal(addressOf("").replace(/\/$/, ""))}${key}) as client:`,
    "    scores = client.score(",
    `        ${list(/** @type {unknown[]} */ (items))},`,
    `${wanted.join("")}    )`,
    "    print(scores.labels, scores.scores)",
  ].join("\n");
}

/** @param {unknown[]} items */
function list(items) {
  if (items.length < 2) return literal(items);
  return `[\n${items.map((item) => `            ${literal(item)},\n`).join("")}        ]`;
}

/**
 * A value as Python spells it.
 * @param {unknown} value
 * @returns {string}
 */
function literal(value) {
  if (value === true) return "True";
  if (value === false) return "False";
  if (value === null) return "None";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  return JSON.stringify(value);
}

/**
 * A word for a POSIX shell, whatever is in it.
 * @param {string} text
 */
function quote(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}
