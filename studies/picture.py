"""Draw the charts of the README and of what levers gain, light and dark.

    python studies/picture.py [FOLDER]

Needs matplotlib (``pip install 'traintune[plot]'``). The first chart compares the speed with the winner and with an
informed user's settings: scripts on texts of different lengths, then samples of one length. The second has a search
that was recorded whole, and the same candidates measured one by one. The third has the trials of recorded searches
with levers. Writes ``gains-light.svg``, ``search-light.svg``, ``levers-light.svg`` and their dark versions to the
folder, by default ``docs/images``. The files are the same on every run, so that only new data changes them.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.patches
from matplotlib import pyplot
from recorded_steps import ROOT, RUNS, read_lines

SEARCH = RUNS / "bert-large-uncased_h200_24GiB_search.json"
GRID = ROOT / "tests" / "landscapes" / "bert-large-uncased_h200_cap23.5GiB_effective64.jsonl"
LEVERS = RUNS / "h200_levers.jsonl"
TEXTS = RUNS / "texts.jsonl"
PRECISIONS = ("bf16", "fp16", "tf32", "fp32")
BATCHES = (8, 16, 32, 64)
# Out-of-memory marks stand below zero, one row each, so that they do not cover one another.
OUT_OF_MEMORY_AT = -14.0


@dataclass(frozen=True)
class Theme:
    """The colours of one version."""

    name: str
    text: str
    faint: str
    colours: dict[str, str]


# Okabe and Ito's palette, told apart with every kind of colour vision; lighter versions on dark ground.
THEMES = (
    Theme("light", "#24292f", "#d0d7de", {"bf16": "#0072b2", "fp16": "#009e73", "tf32": "#d55e00", "fp32": "#7a5195"}),
    Theme("dark", "#e6edf3", "#3d444d", {"bf16": "#56b4e9", "fp16": "#2fcf9f", "tf32": "#f0904d", "fp32": "#c49ae0"}),
)


def main() -> None:
    """Draw both versions."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images"
    grid = [row for row in read_lines(GRID)[1:] if row["attn_implementation"] == "sdpa"]
    search = json.loads(SEARCH.read_text(encoding="utf-8"))
    searches, texts = read_lines(LEVERS), read_lines(TEXTS)
    for theme in THEMES:
        with pyplot.rc_context(_settings(theme)):
            draw_gains(theme, texts, _last_searches(searches), folder / f"gains-{theme.name}.svg")
            draw(theme, grid, search, folder / f"search-{theme.name}.svg")
            draw_levers(theme, searches, folder / f"levers-{theme.name}.svg")


def draw(theme: Theme, grid: list[dict[str, Any]], search: dict[str, Any], file: Path) -> None:
    """Draw one version of the search."""
    figure, axes = pyplot.subplots(figsize=(8.4, 4.6), layout="constrained")
    for precision in PRECISIONS:
        for checkpointing in (False, True):
            arm = (precision, checkpointing)
            _draw_arm(axes, theme, [row for row in grid if (row["precision"], row["gradient_checkpointing"]) == arm])
    for trial in search["trials"]:
        _draw_trial(axes, theme, trial, is_best=trial["number"] == search["best"]["number"])
    _dress(axes, theme, grid, search)
    _save(figure, file)


def _settings(theme: Theme) -> dict[str, Any]:
    return {
        "svg.hashsalt": "autotune",
        "svg.fonttype": "path",
        "font.size": 11,
        "text.color": theme.text,
        "axes.edgecolor": theme.faint,
        "axes.labelcolor": theme.text,
        "xtick.color": theme.text,
        "ytick.color": theme.text,
    }


def _save(figure: Any, file: Path) -> None:
    figure.savefig(file, transparent=True, metadata={"Date": None})
    pyplot.close(figure)


def _levers_of(described: str) -> str:
    """Return the kind of a trial by its description: ``none``, ``graphs``, ``compiled`` or ``both``."""
    compiles, graphs = "compiled" in described, "CUDA graphs" in described or "reduce-overhead" in described
    return {(0, 0): "none", (0, 1): "graphs", (1, 0): "compiled", (1, 1): "both"}[compiles, graphs]


def _last_searches(searches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the last complete search of each training, sorted by its speedup."""
    last = {found["workload"]: found for found in searches if found.get("tried")}
    return sorted(last.values(), key=lambda found: float(found["expert"]["speedup"]))


def draw_gains(theme: Theme, texts: list[dict[str, Any]], searches: list[dict[str, Any]], file: Path) -> None:
    """Draw a bar for each training: its speed with the winner over that with an informed user's settings."""
    # The last search of each script counts; one that ended with an error only where there is no other.
    told = (run for run in sorted(texts, key=lambda run: run["found"] is not None) if run["ratio"])
    own = {run["workload"]: run["ratio"] for run in told}
    own = dict(sorted(own.items(), key=lambda item: item[1]))
    one_length = {found["workload"]: float(found["expert"]["speedup"]) for found in searches}
    bars = [*one_length.items(), *own.items()]
    figure, axes = pyplot.subplots(figsize=(8.4, 0.9 + 0.3 * len(bars)), layout="constrained")
    places = [at + (at >= len(one_length)) * 0.6 for at in range(len(bars))]
    colours = [theme.colours["bf16"]] * len(one_length) + [theme.colours["tf32"]] * len(own)
    axes.barh(places, [gain for _, gain in bars], color=colours, height=0.7)
    for place, (_, gain) in zip(places, bars, strict=True):
        axes.annotate(f"{gain:.2f} ×", (gain, place), (5, 0), textcoords="offset points", va="center", fontsize=9.5)
    axes.set_yticks(places, [name for name, _ in bars])
    axes.set_xlim(0, 1.15 * max(gain for _, gain in bars))
    axes.axvline(1, color=theme.text, linewidth=1)
    axes.set_xlabel("times as fast as bf16 at the largest batch that fits")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    patch = matplotlib.patches.Patch
    handles = [
        patch(color=theme.colours["tf32"], label="texts of different lengths: a script's own clock"),
        patch(color=theme.colours["bf16"], label="samples of one length: trials, under 24 GiB of an H200"),
    ]
    axes.legend(handles=handles, frameon=False, fontsize=9, loc="lower right")
    _save(figure, file)


def draw_levers(theme: Theme, searches: list[dict[str, Any]], file: Path) -> None:
    """Draw the speed of every trial of searches with levers, over that of bf16 at the largest batch that fits."""
    kinds = {"none": "tf32", "graphs": "fp16", "compiled": "fp32", "both": "bf16"}
    words = {
        "none": "neither",
        "graphs": "CUDA graphs",
        "compiled": "compiled",
        "both": "both",
    }
    searches = _last_searches(searches)
    figure, axes = pyplot.subplots(figsize=(8.4, 1.1 + 0.42 * len(searches)), layout="constrained")
    for place, found in enumerate(searches):
        expert = found["expert"]["samples_per_second"]
        for trial in found["tried"]:
            if trial["state"] == "completed":
                colour = theme.colours[kinds[_levers_of(trial["candidate"])]]
                axes.plot(
                    [trial["samples_per_second"] / expert], [place], marker="o", color=colour, markersize=8, alpha=0.8
                )
        gain = found["expert"]["speedup"]
        axes.annotate(
            f"{gain:.2f} ×", (gain, place), (10, 0), textcoords="offset points", va="center", fontweight="bold"
        )
    axes.set_yticks(range(len(searches)), [found["workload"] for found in searches])
    axes.set_xlim(0, 3.5)
    axes.set_ylim(-0.6, len(searches) - 0.4)
    axes.axvline(1, color=theme.faint, linewidth=1)
    axes.set_xlabel("speed over bf16 at the largest batch that fits")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.set_title(f"Every trial of {len(searches)} searches on H200s limited to 24 GiB", fontsize=11.5, loc="left")
    line = matplotlib.lines.Line2D
    handles = [
        line([], [], linestyle="", marker="o", color=theme.colours[kinds[kind]], label=words[kind]) for kind in words
    ]
    axes.legend(handles=handles, frameon=False, fontsize=9, loc="lower right")
    _save(figure, file)


def _draw_arm(axes: Any, theme: Theme, rows: list[dict[str, Any]]) -> None:
    """Draw the recorded speeds of an arm by batch, and a cross for each batch that ran out of memory."""
    colour = theme.colours[rows[0]["precision"]]
    checkpointing = rows[0]["gradient_checkpointing"]
    style = (0, (4, 3)) if checkpointing else "solid"
    measured = [(r["per_device_train_batch_size"], r["samples_per_second"]) for r in rows if r["state"] == "ok"]
    over = [r["per_device_train_batch_size"] for r in rows if r["state"] == "oom"]
    axes.plot(*zip(*measured, strict=True), color=colour, linestyle=style, linewidth=1.4, alpha=0.65, marker=".")
    # Side by side at each batch: three arms run out of memory at the same one.
    shift = 1 + 0.07 * (PRECISIONS.index(rows[0]["precision"]) - 1.5)
    at = [batch * shift for batch in over]
    axes.plot(at, [OUT_OF_MEMORY_AT] * len(at), linestyle="", marker="x", color=colour, markersize=6)


def _draw_trial(axes: Any, theme: Theme, trial: dict[str, Any], *, is_best: bool) -> None:
    """Draw a trial of the search as a numbered dot."""
    batch, speed = trial["per_device_train_batch_size"], trial["samples_per_second"]
    colour = theme.colours[trial["precision"]]
    axes.plot([batch], [speed], marker="o", markersize=15 if is_best else 12, color=colour, zorder=3)
    ground = "white" if theme.name == "light" else "#0d1117"
    axes.text(batch, speed, str(trial["number"]), color=ground, ha="center", va="center_baseline", fontsize=9, zorder=4)
    if is_best:
        told = f"best: {batch} × {trial['gradient_accumulation_steps']}, {trial['precision']}, {speed:.0f} samples/s"
        axes.annotate(told, (batch, speed), (0, 14), textcoords="offset points", ha="center", fontweight="bold")


def _dress(axes: Any, theme: Theme, grid: list[dict[str, Any]], search: dict[str, Any]) -> None:
    """Set axes, title and legend of the chart of the search."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(BATCHES, [f"{batch} × {64 // batch}" for batch in BATCHES])
    axes.minorticks_off()
    axes.set_ylim(-30, 350)
    axes.set_xlim(7, 74)
    axes.set_yticks(range(0, 350, 50))
    axes.set_xlabel("per-device batch × accumulation (effective batch 64)")
    axes.set_ylabel("samples per second")
    axes.axhline(0, color=theme.faint, linewidth=0.8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    trials, seconds = len(search["trials"]), search["seconds"]
    whole = sum(row["trial_wall_seconds"] for row in grid)
    axes.set_title(
        f"BERT-large on an H200 limited to 24 GiB: {trials} trials in {seconds:.0f} s;"
        f" all {len(grid)} candidates take {whole:.0f} s",
        fontsize=11.5,
        loc="left",
    )
    line = matplotlib.lines.Line2D
    handles = [line([], [], color=theme.colours[name], label=name) for name in PRECISIONS]
    handles += [
        line([], [], color=theme.text, linestyle=(0, (4, 3)), label="with checkpointing"),
        line([], [], color=theme.text, linestyle="", marker="o", markersize=9, label="trial of the search, in order"),
        line([], [], color=theme.text, linestyle="", marker="x", label="out of memory"),
    ]
    axes.legend(handles=handles, frameon=False, fontsize=9, loc="upper left", ncols=2)


if __name__ == "__main__":
    main()
