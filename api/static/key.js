/**
 * The API key: asked for in a dialog, kept in this tab's session storage, and nowhere else.
 * @module
 */

import { byId, say } from "./dom.js";

const PLACE = "scorekeep.key";

/** Told with an event `change` when there is another key, or none. */
export const keys = new EventTarget();

/** @returns {string} the key, empty where there is none */
export function currentKey() {
  return sessionStorage.getItem(PLACE) ?? "";
}

/** @returns {Record<string, string>} the header that carries the key */
export function keyHeaders() {
  const key = currentKey();
  return key === "" ? {} : { Authorization: `Bearer ${key}` };
}

/**
 * Ask for a key, unless the dialog is open already.
 * @param {string} [why] what was refused
 */
export function askForKey(why = "") {
  const dialog = /** @type {HTMLDialogElement} */ (byId("key-dialog"));
  if (dialog.open) return;
  byId("key-title").textContent = why || "API key";
  dialog.showModal();
}

/** Make the button and the dialog work. */
export function setUpKeys() {
  const dialog = /** @type {HTMLDialogElement} */ (byId("key-dialog"));
  const input = /** @type {HTMLInputElement} */ (byId("key-input"));
  byId("key-button").addEventListener("click", () => askForKey());
  byId("key-cancel").addEventListener("click", () => dialog.close());
  byId("key-forget").addEventListener("click", () => {
    keep("");
    dialog.close();
  });
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    keep(input.value.trim());
    dialog.close();
  });
  dialog.addEventListener("close", () => (input.value = ""));
  showPresence();
}

/** @param {string} key */
function keep(key) {
  if (key === "") sessionStorage.removeItem(PLACE);
  else sessionStorage.setItem(PLACE, key);
  showPresence();
  say(key === "" ? "The key is forgotten." : "The key is used from now on.");
  keys.dispatchEvent(new Event("change"));
}

function showPresence() {
  byId("key-button").textContent = currentKey() === "" ? "Key" : "Key set";
}
