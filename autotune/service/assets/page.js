"use strict";
// Keeps a page current: its parts are rendered by the service, and fetched again when an event says so.

const byId = (id) => document.getElementById(id);
const ENDED = ["finished", "failed", "cancelled"];

// Live parts. Only pieces that the service renders differently are replaced, so that focus, selection and scrolled
// tables stay where they are.
const rendered = new WeakMap();

function remember(part) {
  for (const piece of part.children) rendered.set(piece, piece.outerHTML);
}

function merge(part, html) {
  const fresh = document.createElement("template");
  fresh.innerHTML = html;
  const pieces = [...fresh.content.children], before = [...part.children];
  pieces.forEach((piece, place) => {
    const source = piece.outerHTML, old = before[place];
    if (old && rendered.get(old) === source) return;
    if (!old) part.append(piece);
    else replace(old, piece);
    rendered.set(piece, source);
  });
  for (const old of before.slice(pieces.length)) old.remove();
}

function replace(old, piece) {
  const focused = old.contains(document.activeElement) ? document.activeElement : null;
  const kept = (selector, act) => {
    const olds = [...old.querySelectorAll(selector)];
    piece.querySelectorAll(selector).forEach((now, place) => { if (olds[place]) act(olds[place], now); });
  };
  kept("details", (was, now) => { now.open = was.open; });
  const scrolled = [];
  kept(".scroll, pre", (was, now) => scrolled.push([now, was.scrollLeft, was.scrollTop]));
  old.replaceWith(piece);
  for (const [now, left, top] of scrolled) { now.scrollLeft = left; now.scrollTop = top; }
  if (!focused) return;
  const alike = [...piece.querySelectorAll(focused.tagName)].filter((now) => now.textContent === focused.textContent);
  (alike.find((now) => now.getAttribute("href") === focused.getAttribute("href")) || alike[0])?.focus({ preventScroll: true });
}

async function refresh(part) {
  let answer;
  try { answer = await fetch(part.dataset.part); } catch { return showLost(true); }
  if (answer.ok) merge(part, await answer.text());
  else if (answer.status === 401) location.href = "/";
  else showLost(true);
}

function refreshSoon() {
  if (refreshSoon.timer) return;
  refreshSoon.timer = setTimeout(() => {
    refreshSoon.timer = null;
    for (const part of document.querySelectorAll("[data-part]")) refresh(part);
  }, 150);
}

function showLost(isLost) { byId("lost").hidden = !isLost; }

// For screen readers: the last of several things that happen at once.
function say(text) {
  clearTimeout(say.timer);
  say.timer = setTimeout(() => { byId("said").textContent = text; }, 600);
}

function addLine(told) {
  const lines = byId("lines");
  if (!lines) return;
  byId("told").hidden = false;
  const line = document.createElement("span");
  if (told.style) line.className = told.style;
  line.textContent = told.text + "\n";
  const atEnd = lines.scrollTop + lines.clientHeight >= lines.scrollHeight - 20;
  lines.append(line);
  if (atEnd) lines.scrollTop = lines.scrollHeight;
}

function describe(trial) {
  const rate = trial.samples_per_second;
  const how = rate ? rate.toPrecision(4) + " samples a second" : trial.state.replaceAll("_", " ");
  return `Trial ${trial.number}, ${trial.description}: ${how}`;
}

function listen(place) {
  const source = new EventSource(place.dataset.events), now = byId("now");
  let hasEnded = false;
  const on = (kind, act) => source.addEventListener(kind, (event) => act(JSON.parse(event.data)));
  source.onopen = () => showLost(false);
  source.onerror = () => {
    if (hasEnded) return;
    showLost(true);
    // After an answer that is no stream a browser does not try again.
    if (source.readyState === EventSource.CLOSED) setTimeout(() => listen(place), 3000);
  };
  for (const kind of ["changed", "state", "study", "trial_begins", "trial"]) source.addEventListener(kind, refreshSoon);
  on("line", addLine);
  on("trial", (told) => say(describe(told)));
  on("status", (told) => { if (now) now.textContent = ["Now: " + told.running, told.best].filter(Boolean).join("; "); });
  on("state", (told) => {
    say("The search is " + told.state);
    if (!ENDED.includes(told.state)) return;
    hasEnded = true;
    if (now) now.textContent = "";
    source.close();
  });
  addEventListener("pagehide", () => source.close());
}

// The form. Its own properties may be hidden by fields of the same name, such as dataset.
async function showCommand(form) {
  const asked = new URLSearchParams(new FormData(form)), turn = showCommand.turn = (showCommand.turn || 0) + 1;
  let told;
  try { told = await (await fetch(form.getAttribute("data-command") + "?" + asked)).json(); } catch { return; }
  if (turn !== showCommand.turn) return;
  showWords(byId("command"), told.command || "");
  const note = byId("command-note"), text = told.problem || (told.note ? "It will wait: " + told.note : "");
  if (note.textContent !== text) note.textContent = text;
  note.classList.toggle("wrong", Boolean(told.problem));
  for (const field of form.querySelectorAll("input")) {
    if (field.name === told.field) field.setAttribute("aria-invalid", "true");
    else field.removeAttribute("aria-invalid");
  }
}

// An option stays on one line with its value.
function showWords(place, command) {
  place.replaceChildren(...command.split(/(?= --)/).map((words) => {
    const span = document.createElement("span");
    span.textContent = words;
    return span;
  }));
}

function showCommandSoon(form) {
  clearTimeout(showCommandSoon.timer);
  showCommandSoon.timer = setTimeout(() => showCommand(form), 120);
}

async function copy(button) {
  const place = byId(button.dataset.copy), before = button.dataset.before ||= button.textContent;
  try {
    await navigator.clipboard.writeText(place.textContent);
    button.textContent = "Copied";
  } catch {
    // Browsers offer the clipboard to pages over TLS and on this machine alone.
    for (let box = place.closest("details"); box; box = box.parentElement.closest("details")) box.open = true;
    getSelection().selectAllChildren(place);
    button.textContent = "Selected: press Ctrl-C";
  }
  say(button.textContent);
  setTimeout(() => { button.textContent = before; }, 2000);
}

async function showLog(link) {
  const place = byId("log"), dialog = byId("log-dialog");
  byId("log-title").textContent = link.dataset.log;
  place.textContent = "loading …";
  dialog.showModal();
  try {
    const answer = await fetch(link.href);
    place.textContent = answer.ok ? await answer.text() || "The log is empty." : (await answer.json()).detail;
  } catch { place.textContent = "The service does not answer."; }
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-copy]"), link = event.target.closest("[data-log]");
  if (button) copy(button);
  if (link && !event.ctrlKey && !event.metaKey) { event.preventDefault(); showLog(link); }
});
document.addEventListener("submit", (event) => {
  const button = event.target.querySelector("[data-busy]");
  if (!button) return;
  button.dataset.before ||= button.textContent;
  button.textContent = button.dataset.busy;
  // Disabled at once, it would not be sent.
  setTimeout(() => { button.disabled = true; });
});
// A page that comes back from the browser's cache is as it was left.
addEventListener("pageshow", (event) => { if (event.persisted) location.reload(); });

const signIn = byId("sign-in"), given = new URLSearchParams(location.hash.slice(1)).get("token");
if (given) history.replaceState(null, "", location.pathname);
if (signIn && given) { signIn.elements.token.value = given; signIn.requestSubmit(); }
const form = document.querySelector("form[data-command]");
if (form) { form.addEventListener("input", () => showCommandSoon(form)); showCommand(form); }
for (const part of document.querySelectorAll("[data-part]")) remember(part);
for (const place of document.querySelectorAll("[data-events]")) listen(place);
