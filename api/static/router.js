/**
 * Pages by the address after `#`: the only place that reads it.
 * @module
 */

import { byId, h, show } from "./dom.js";

/**
 * A page fills `root`, and stops what it started when `signal` is aborted.
 * @typedef {{root: HTMLElement, id: string, query: URLSearchParams, signal: AbortSignal}} Visit
 * @typedef {(visit: Visit) => void} Page
 */

/** @type {AbortController | null} */
let leaving = null;

/**
 * Show the page of the present address, and of each that follows.
 * @param {Record<string, {title: string, page: Page}>} pages by the first word of the address; an id follows
 */
export function startRouter(pages) {
  window.addEventListener("hashchange", () => visit(pages, true));
  visit(pages, false);
}

/**
 * Put other words into the address without a new visit, so that it can be kept and shared.
 * @param {string} path such as `jobs`
 * @param {Record<string, string>} query
 */
export function rewriteAddress(path, query) {
  const given = Object.entries(query).filter(([, value]) => value !== "");
  const text = new URLSearchParams(given).toString();
  history.replaceState(null, "", `#/${path}${text === "" ? "" : `?${text}`}`);
}

/**
 * @param {Record<string, {title: string, page: Page}>} pages
 * @param {boolean} moved
 */
function visit(pages, moved) {
  const address = location.hash.replace(/^#\/?/, "");
  const [path, query = ""] = address.split("?", 2);
  const [name, id = ""] = path.split("/", 2);
  const main = byId("main");
  leaving?.abort();
  leaving = new AbortController();
  const root = h("div", { class: "page", "data-page": name || "overview" });
  main.replaceChildren(root);
  markNavigation(name);
  const found = Object.hasOwn(pages, name) ? pages[name] : null;
  document.title = `${found?.title ?? "Not found"} · Scorekeep`;
  if (found === null) {
    show(root, h("h1", {}, "There is no such page"), h("p", {}, h("a", { href: "#/" }, "Back to the overview")));
  } else {
    found.page({ root, id: decode(id), query: new URLSearchParams(query), signal: leaving.signal });
  }
  if (moved) {
    window.scrollTo(0, 0);
    main.focus({ preventScroll: true });
  }
}

/** @param {string} name */
function markNavigation(name) {
  const section = { job: "jobs", bulk: "bulks" }[name] ?? name;
  for (const link of byId("nav").querySelectorAll("a")) {
    if (link.getAttribute("href") === `#/${section}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

/** @param {string} text */
function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}
