// Keeps a page live, writes times by the reader's own clock, and helps the editor of course files. Without it the page works, and stands still.
"use strict";

// -- Times: the server writes UTC, since it knows no reader's clock.

const LONG = new Intl.DateTimeFormat([], { dateStyle: "medium", timeStyle: "short" });
const TODAY = new Intl.DateTimeFormat([], { timeStyle: "short" });
const DAY = new Intl.DateTimeFormat([], { month: "short", day: "numeric" });

function writeTimes(root) {
  for (const element of root.querySelectorAll("time[datetime]")) {
    const at = new Date(element.dateTime);
    const isToday = at.toDateString() === new Date().toDateString();
    element.textContent = (isToday ? TODAY : LONG).format(at);
  }
}

// Below a plot: round times by the reader's own clock, in place of those in UTC.
function writeTicks(group) {
  const from = group.dataset.from * 1000, to = group.dataset.to * 1000, hours = Number(group.dataset.hours);
  const last = group.querySelector(".last");
  // At the ends, where a label would be cut or meet the last one, is none.
  const margin = Math.max(6, 100 * 48 / group.ownerSVGElement.clientWidth);
  for (const old of [...group.children]) if (old !== last) old.remove();
  const at = new Date(from);
  at.setHours(0, 0, 0, 0);
  for (; at < to; at.setHours(at.getHours() + hours)) {
    const x = 100 * (at - from) / (to - from);
    if (x < margin || x > 100 - margin) continue;
    const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
    line.setAttribute("class", "grid");
    for (const [name, value] of Object.entries({ x1: `${x}%`, x2: `${x}%`, y1: 194, y2: 200 })) line.setAttribute(name, value);
    const text = document.createElementNS("http://www.w3.org/2000/svg", "text");
    text.setAttribute("x", `${x}%`);
    text.setAttribute("y", 214);
    text.textContent = (hours < 24 ? TODAY : DAY).format(at);
    group.insertBefore(line, last);
    group.insertBefore(text, last);
  }
}

// -- Parts of the page: only what differs is touched, so that focus and what is typed stay.

function sameKind(a, b) {
  return a.nodeType === b.nodeType && a.nodeName === b.nodeName && (a.id || "") === (b.id || "");
}

function copyAttributes(from, to) {
  const kept = (name) => name === "value" && to.nodeName === "INPUT";
  for (const { name, value } of from.attributes) {
    if (!kept(name) && to.getAttribute(name) !== value) to.setAttribute(name, value);
  }
  for (const { name } of [...to.attributes]) {
    if (!kept(name) && !from.hasAttribute(name)) to.removeAttribute(name);
  }
}

function morph(from, to) {
  if (from.isEqualNode(to)) return;
  if (from.nodeType !== Node.ELEMENT_NODE) {
    to.nodeValue = from.nodeValue;
    return;
  }
  copyAttributes(from, to);
  const wanted = new Set([...from.children].map((child) => child.id).filter(Boolean));
  let next = to.firstChild;
  for (const child of [...from.childNodes]) {
    // What is gone is taken out first, so that what stays is never moved: moving takes the focus away.
    while (next && next.id && next.id !== child.id && !wanted.has(next.id)) {
      const gone = next;
      next = next.nextSibling;
      gone.remove();
    }
    if (next && sameKind(child, next)) {
      const kept = next;
      next = next.nextSibling;
      morph(child, kept);
    } else {
      to.insertBefore(child, next);
    }
  }
  while (next) {
    const gone = next;
    next = next.nextSibling;
    gone.remove();
  }
}

function show(id, html) {
  const old = document.getElementById(id);
  if (!old) return;
  const fresh = old.cloneNode(false);
  fresh.innerHTML = html;
  writeTimes(fresh);
  const token = document.querySelector("meta[name=form-token]");
  for (const input of fresh.querySelectorAll("input[name=_xsrf]")) input.setAttribute("value", token ? token.content : "");
  const focused = old.contains(document.activeElement) ? document.activeElement : null;
  morph(fresh, old);
  // What had the focus is gone: go on at the heading above, and not at the top of the page.
  if (focused && !focused.isConnected) {
    const heading = old.closest("section")?.querySelector("h2");
    if (heading) {
      heading.tabIndex = -1;
      heading.focus({ preventScroll: true });
    }
  }
}

// -- The stream.

let forget = 0;

function tell(text) {
  const message = document.getElementById("message");
  const line = document.createElement("span");
  line.textContent = text;
  message.replaceChildren(line);
  clearTimeout(forget);
  forget = setTimeout(() => message.replaceChildren(), 10000);
}

function follow(address) {
  const liveness = document.getElementById("liveness");
  const stream = new EventSource(address);
  stream.onopen = () => { liveness.textContent = "Live."; };
  stream.onmessage = (event) => {
    const { parts, message } = JSON.parse(event.data);
    for (const [id, html] of Object.entries(parts)) show(id, html);
    if (message) tell(message);
  };
  stream.onerror = () => {
    liveness.textContent = "Not live: trying to reach the pool again.";
    // A refusal ends the stream for good. It may be short: the service is started again, or a login renewed.
    if (stream.readyState === EventSource.CLOSED) setTimeout(() => follow(address), 10000);
  };
}

// -- The editor of course files.

function goToLine(text, number) {
  const lines = text.value.split("\n");
  const begin = lines.slice(0, number - 1).join("\n").length + (number > 1 ? 1 : 0);
  text.focus();
  text.setSelectionRange(begin, begin + (lines[number - 1] || "").length);
  text.scrollTop = (number - 4) * (text.scrollHeight / lines.length);
}

function guardEditor(form) {
  const text = form.querySelector("textarea");
  let isUnsaved = "unsaved" in form.dataset;
  text.addEventListener("input", () => { isUnsaved = true; });
  form.addEventListener("submit", () => { isUnsaved = false; });
  addEventListener("beforeunload", (event) => { if (isUnsaved) event.preventDefault(); });
  for (const link of document.querySelectorAll("a[data-line]")) {
    link.addEventListener("click", (event) => {
      event.preventDefault();
      goToLine(text, Number(link.dataset.line));
    });
  }
}

writeTimes(document);
for (const group of document.querySelectorAll("g.ticks")) writeTicks(group);
for (const form of document.querySelectorAll("form.editor")) guardEditor(form);
if (document.body.dataset.live) follow(document.body.dataset.live);
