"""Hold the style sheet and the script of the HTML report; neither loads anything from elsewhere."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark;
  --page: #ffffff; --card: #f6f7f9; --text: #1a1d21; --soft: #596270; --rule: #d9dde3; --accent: #1f5fc4;
  --bad: #c02626; --good: #1d7a3d;
  --s0: #1f6fd6; --s1: #c9540a; --s2: #2b8a3e; --s3: #8f3ab5; --s4: #8a6d00; --s5: #0a7a8c; --s6: #c2255c;
  --s7: #5b6370; --bar-text: #ffffff; }
@media (prefers-color-scheme: dark) { :root {
  --page: #14171b; --card: #1d2127; --text: #e7eaee; --soft: #a3adba; --rule: #343b45; --accent: #7fb0ff;
  --bad: #ff7b72; --good: #6bd38a;
  --s0: #6ea8ff; --s1: #ff9d5c; --s2: #6cd483; --s3: #d392f0; --s4: #e6c64c; --s5: #4fcbe0; --s6: #ff86ae;
  --s7: #aab3bf; --bar-text: #14171b; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1.25rem 4rem; max-width: 60rem; background: var(--page); color: var(--text);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
h1 { margin: 0; font-size: 1.6rem; overflow-wrap: anywhere; }
h2 { margin: 2.5rem 0 .5rem; font-size: 1.15rem; }
p, li, dd, td { overflow-wrap: anywhere; }
p { margin: .5rem 0; }
ul { margin: .5rem 0; padding-left: 1.25rem; }
.soft, figcaption { color: var(--soft); font-size: .9rem; }
.answer { margin-top: 1.25rem; padding: 1rem 1.25rem; border: 1px solid var(--rule); border-radius: 10px;
  background: var(--card); }
.answer h2 { margin: 0; font-size: .95rem; font-weight: 600; color: var(--soft); }
.answer .setting { margin: .15rem 0 .75rem; font-size: 1.35rem; font-weight: 650; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(11.5rem, 1fr)); gap: .75rem 1.5rem;
  margin: 0; }
.figures dt { color: var(--soft); font-size: .85rem; }
.figures dd { margin: 0; }
.figures strong { display: block; font-size: 1.3rem; line-height: 1.3; }
.answer .details { margin: .9rem 0 0; }
figure { margin: .5rem 0 0; }
figcaption { margin-top: .5rem; }
svg { display: block; max-width: 100%; height: auto; font: 12px system-ui, -apple-system, "Segoe UI", Roboto,
  "Liberation Sans", sans-serif; }
svg text { fill: var(--text); }
svg .tick { fill: var(--soft); }
svg .label { fill: var(--soft); }
.chart-narrow { display: none; }
@media (max-width: 40rem) { .chart-wide { display: none; } .chart-narrow { display: block; }
  body { padding: 1rem .9rem 3rem; } }
.grid { stroke: var(--rule); stroke-width: 1; }
.axis { stroke: var(--soft); stroke-width: 1; }
.headroom { fill: var(--bad); opacity: .1; }
.ceiling-line { stroke: var(--bad); stroke-width: 2; }
.feasible-line { stroke: var(--bad); stroke-width: 1.2; stroke-dasharray: 4 3; }
svg .ceiling-text { fill: var(--bad); }
.full { fill: var(--s); stroke: var(--page); stroke-width: 1; }
.hollow { fill: var(--page); stroke: var(--s); stroke-width: 1.8; }
.cross { fill: none; stroke: var(--s); stroke-width: 2; }
.connection { fill: none; stroke: var(--s); stroke-width: 1.2; opacity: .45; }
.whisker { stroke: var(--s); stroke-width: 2; }
.ring { fill: none; stroke: var(--text); stroke-width: 1.8; }
.ring.baseline, .ring.expert { stroke-dasharray: 3 2.5; }
svg .point-label { font-weight: 600; paint-order: stroke; stroke: var(--page); stroke-width: 4px; }
.row.best .row-label, .row.best .row-value { font-weight: 700; }
svg .row-label, svg .row-value { paint-order: stroke; stroke: var(--page); stroke-width: 3px; }
.row-value { font-variant-numeric: tabular-nums; }
.part { stroke: var(--page); stroke-width: 1; fill: var(--s); }
svg .in-bar { fill: var(--bar-text); font-weight: 600; }
.spare { --s: var(--rule); }
svg .spare + .in-bar { fill: var(--text); }
.mark { stroke: var(--text); stroke-width: 1.5; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; margin: .4rem 0 0; padding: 0; list-style: none;
  font-size: .88rem; }
.legend li { display: flex; align-items: center; gap: .4rem; }
.legend svg { flex: none; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .88rem; width: 100%; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--rule); text-align: left; vertical-align: top; }
th { color: var(--soft); font-weight: 600; white-space: nowrap; }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.nowrap { white-space: nowrap; }
td.verdict { min-width: 11rem; }
tr.best td { font-weight: 650; }
tr.out_of_memory td.speed, tr.failed td.speed { color: var(--bad); }
.left-out { table-layout: fixed; }
.left-out summary { cursor: pointer; color: var(--accent); }
@media (max-width: 40rem) { .left-out thead { display: none; } .left-out td { display: block; padding: .3rem 0; }
  .left-out td:first-child { padding-bottom: 0; border: 0; font-weight: 600; } }
.parts { width: auto; }
.parts td, .parts th { padding: .15rem 1rem .15rem 0; border: 0; }
pre { margin: .5rem 0; padding: .8rem 1rem; overflow-x: auto; background: var(--card); border: 1px solid var(--rule);
  border-radius: 8px; font: 13px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace; }
code { font: .92em ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace; overflow-wrap: anywhere; }
pre code { font: inherit; overflow-wrap: normal; }
button { padding: .3rem .9rem; border: 1px solid var(--rule); border-radius: 6px; background: var(--card);
  color: var(--accent); font: inherit; cursor: pointer; }
""" + "".join(f".s{number} {{ --s: var(--s{number}); }}\n" for number in range(8))

# The script adds the button, so that a page without scripts has none.
SCRIPT = """
const code = document.querySelector("#export code"), button = document.createElement("button");
button.textContent = "Copy";
button.onclick = async () => {
  try { await navigator.clipboard.writeText(code.textContent); button.textContent = "Copied"; }
  catch { getSelection().selectAllChildren(code); button.textContent = "Selected: press Ctrl-C"; }
};
code.parentElement.after(button);
"""
