"""Print searches of other people's training codes, recorded with placeholders in their commands, as a table.

    python studies/other_codes.py [FILE]

A line of the file has ``kind``: ``host`` (of all lines after it), ``search`` (its command, its trials and its answer)
or ``by hand`` (a run of the answer or of the script's ``defaults`` without autotune, timed by torch's hook on optimizer
steps after three steps). Of several lines of a code the last one counts.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

from autotune.core.candidate import Document

RECORDED = Path(__file__).parent / "runs" / "h200_clients.jsonl"
WHAT = {
    "nanogpt": "nanoGPT, GPT-2, compiled",
    "timm": "timm 1.0.31, `vit_base_patch16_224`",
    "openclip": "open_clip 3.3.0, `ViT-B-32`, synthetic data",
    "litgpt": "litgpt 0.5.13, LoRA of a 1.1B model",
}
HEAD = (
    "| code | whole command | until its first trial | trials | script's start in a trial | answer "
    "| promise, samples/s | by hand | its own settings: trial, by hand | gain: trials, by hand |",
    "|---|---|---|---|---|---|---|---|---|---|",
)


def table(path: Path) -> list[str]:
    """Return the lines of the table, one for each code that has an answer."""
    searches: dict[str, Document] = {}
    by_hand: dict[tuple[str, str], Document] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["kind"] == "search" and record.get("answer"):
            searches[record["code"]] = record
        elif record["kind"] == "by hand" and "samples_per_second" in record:
            by_hand[record["code"], record["which"]] = record
    return [_row(code, found, by_hand) for code, found in searches.items()]


def _row(code: str, found: Document, by_hand: dict[tuple[str, str], Document]) -> str:
    trials = [trial for trial in found["trials"] if trial["state"] == "completed"]
    answer, own, promise = found["answer"], found["own_settings"], found["next_run"]
    candidate = f"{answer['batch']} × {answer['accumulation']} {answer['precision']}"
    spread = promise["samples_per_second_high"] / promise["samples_per_second"] - 1
    after, before = (by_hand.get((code, which)) for which in ("answer", "defaults"))
    in_trials = answer["samples_per_second"] / own["samples_per_second"] if own else None
    without = after["samples_per_second"] / before["samples_per_second"] if after and before else None
    cells = (
        WHAT[code],
        f"{found['seconds']:.0f} s",
        f"{found['seconds'] - found['search_seconds']:.0f} s",
        f"{len(trials)} in {sum(trial['seconds'] for trial in trials):.0f} s",
        f"{statistics.median(trial['phase_seconds']['script'] for trial in trials):.1f} s",
        candidate + (" checkpointing" if answer["checkpointing"] else ""),
        f"{promise['samples_per_second']:,.0f} ± {spread:.0%}",
        f"{after['samples_per_second']:,.0f} ({after['of_promise']:.3f})" if after else "–",
        f"{own['samples_per_second']:,.0f}, " + (f"{before['samples_per_second']:,.0f}" if before else "–")
        if own
        else "–",
        f"{in_trials:.2f} ×, " + (f"{without:.2f} ×" if without else "–") if in_trials else "–",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print("\n".join((*HEAD, *table(Path(sys.argv[1]) if sys.argv[1:] else RECORDED))))
