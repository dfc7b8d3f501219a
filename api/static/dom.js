/**
 * Elements made from data, and brought up to date in place. The only module that makes elements.
 *
 * Text goes in as text nodes: nothing that comes from a job can become markup.
 * @module
 */

/** @typedef {Node | string | number | null | undefined | false} Child */
/** @typedef {Record<string, string | number | boolean | null | undefined>} Attributes */

const SVG = "http://www.w3.org/2000/svg";

/**
 * Make an HTML element. An attribute that is null, undefined or false is left out, true is empty.
 * @param {string} tag
 * @param {Attributes} [attributes]
 * @param {...(Child | Child[])} children
 * @returns {HTMLElement}
 */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/**
 * Make an SVG element.
 * @param {string} tag
 * @param {Attributes} [attributes]
 * @param {...(Child | Child[])} children
 * @returns {SVGElement}
 */
export function s(tag, attributes = {}, ...children) {
  return fill(/** @type {SVGElement} */ (document.createElementNS(SVG, tag)), attributes, children);
}

/**
 * @template {Element} E
 * @param {E} element
 * @param {Attributes} attributes
 * @param {(Child | Child[])[]} children
 * @returns {E}
 */
function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat()) {
    if (child === null || child === undefined || child === false || child === "") continue;
    element.append(child instanceof Node ? child : String(child));
  }
  return element;
}

/**
 * Give `target` these children. Elements that stay are kept, and with them focus, scrolling and
 * what was typed; they are recognised by `data-key`, the id of their heading, or their id.
 * @param {Element} target
 * @param {...(Child | Child[])} children
 */
export function show(target, ...children) {
  const wanted = document.createDocumentFragment();
  for (const child of children.flat()) {
    if (child === null || child === undefined || child === false || child === "") continue;
    wanted.append(child instanceof Node ? child : String(child));
  }
  morphChildren(target, wanted);
}

/**
 * @param {Element} target
 * @param {Element | DocumentFragment} wanted
 */
function morphChildren(target, wanted) {
  /** @type {Map<string, Element>} */
  const keyed = new Map();
  for (const child of target.children) {
    const key = keyOf(child);
    if (key !== null) keyed.set(key, child);
  }
  const children = [...wanted.childNodes];
  const keys = new Set(children.map(keyOf));
  let place = target.firstChild;
  for (const next of children) {
    const key = keyOf(next);
    const found = key === null ? place : (keyed.get(key) ?? null);
    // What is moved loses the focus: rather take away what stands before it and goes anyway.
    while (found !== null && place !== null && place !== found && (keyOf(place) === null || !keys.has(keyOf(place)))) {
      place = removeFrom(place);
    }
    if (found === null || found.nodeName !== next.nodeName || keyOf(found) !== key) {
      // A select whose option is taken away chooses another, which then comes along chosen.
      target.insertBefore(target.nodeName === "SELECT" ? next.cloneNode(true) : next, place);
      continue;
    }
    if (found === place) place = place.nextSibling;
    else target.insertBefore(found, place);
    morph(found, next);
  }
  while (place !== null) place = removeFrom(place);
}

/**
 * Remove a node; return the one after it.
 * @param {ChildNode} node
 */
function removeFrom(node) {
  const after = node.nextSibling;
  node.remove();
  return after;
}

/**
 * What an element is recognised by.
 * @param {Node} node
 * @returns {string | null}
 */
function keyOf(node) {
  if (!(node instanceof Element)) return null;
  return node.getAttribute("data-key") ?? node.getAttribute("aria-labelledby") ?? (node.id || null);
}

/**
 * @param {Node} found
 * @param {Node} next
 */
function morph(found, next) {
  if (found.isEqualNode(next)) return;
  if (!(found instanceof Element) || !(next instanceof Element)) {
    found.nodeValue = next.nodeValue;
    return;
  }
  for (const { name } of [...found.attributes]) {
    const isTheReaders = name === "open" && found.nodeName === "DETAILS";
    if (!next.hasAttribute(name) && !isTheReaders) found.removeAttribute(name);
  }
  for (const { name, value } of next.attributes) {
    if (found.getAttribute(name) !== value) found.setAttribute(name, value);
  }
  morphChildren(found, next);
}

/**
 * Return the page's element of that id.
 * @template {HTMLElement} [E=HTMLElement]
 * @param {string} id
 * @returns {E}
 */
export function byId(id) {
  const element = document.getElementById(id);
  if (element === null) throw new Error(`the page has no element ${id}`);
  return /** @type {E} */ (element);
}

/**
 * Say something to who listens rather than looks.
 * @param {string} text
 */
export function say(text) {
  byId("said").textContent = text;
}
