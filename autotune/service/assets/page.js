"use strict";
// Keeps a page current: its parts are rendered by the service, and fetched again when an event says so.

const byId = (id) => document.getElementById(id);

async function refresh(part) {
  const answer = await fetch(part.dataset.part, { headers: { "X-Part": "1" } });
  if (answer.ok) part.innerHTML = await answer.text();
  if (answer.status === 401) location.href = "/";
}

function refreshSoon() {
  if (refreshSoon.timer) return;
  refreshSoon.timer = setTimeout(() => {
    refreshSoon.timer = null;
    for (const part of document.querySelectorAll("[data-part]")) refresh(part);
  }, 150);
}

function addLine(told) {
  const lines = byId("lines");
  if (!lines) return;
  const line = document.createElement("span");
  if (told.style) line.className = told.style;
  line.textContent = told.text + "\n";
  const atEnd = lines.scrollTop + lines.clientHeight >= lines.scrollHeight - 20;
  lines.append(line);
  if (atEnd) lines.scrollTop = lines.scrollHeight;
}

function listen(place) {
  const source = new EventSource(place.dataset.events), lost = byId("lost"), now = byId("now");
  source.onopen = () => { lost.hidden = true; };
  source.onerror = () => { if (!place.dataset.ended) lost.hidden = false; };
  for (const kind of ["changed", "state", "study", "trial_begins", "trial"]) source.addEventListener(kind, refreshSoon);
  source.addEventListener("line", (event) => addLine(JSON.parse(event.data)));
  source.addEventListener("status", (event) => {
    const told = JSON.parse(event.data);
    if (now) now.textContent = [told.running, told.best].filter(Boolean).join("; ");
  });
  source.addEventListener("state", (event) => {
    if (!["finished", "failed", "cancelled"].includes(JSON.parse(event.data).state)) return;
    place.dataset.ended = "1";
    if (now) now.textContent = "";
    source.close();
  });
  addEventListener("pagehide", () => source.close());
}

async function showCommand(form) {
  const asked = new URLSearchParams(new FormData(form));
  const answer = await fetch("/command?" + asked);
  byId("command").textContent = await answer.text();
}

async function copy(button) {
  const text = byId(button.dataset.copy).textContent, before = button.textContent;
  try { await navigator.clipboard.writeText(text); button.textContent = "Copied"; }
  catch { getSelection().selectAllChildren(byId(button.dataset.copy)); button.textContent = "Selected: press Ctrl-C"; }
  setTimeout(() => { button.textContent = before; }, 2000);
}

async function showLog(form) {
  const place = byId("log");
  place.hidden = false;
  place.textContent = "loading …";
  const answer = await fetch(form.dataset.log + encodeURIComponent(new FormData(form).get("number")) + "/log");
  place.textContent = answer.ok ? await answer.text() || "the log is empty" : (await answer.json()).detail;
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-copy]");
  if (button) copy(button);
});
document.addEventListener("submit", (event) => {
  if (event.target.dataset.log) { event.preventDefault(); showLog(event.target); }
});

const signIn = byId("sign-in"), given = new URLSearchParams(location.hash.slice(1)).get("token");
if (given) history.replaceState(null, "", location.pathname);
if (signIn && given) { signIn.elements.token.value = given; signIn.requestSubmit(); }
const form = document.querySelector("form.search[action=\"/searches\"]");
if (form) { form.addEventListener("input", () => showCommand(form)); showCommand(form); }
for (const place of document.querySelectorAll("[data-events]")) listen(place);
