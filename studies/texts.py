"""Measure what a search gives a script that trains on texts of different lengths, by the script's own clock.

    python studies/texts.py --json FILE [--only NAME,…] [--rounds N] [--clock-seconds S]
    python studies/texts.py --json FILE --try

For each workload of ``texts_script.py``: the script as an informed user runs it (bf16, the largest batch that fits,
padded to the longest), then ``autotune search`` of the same command, then ``autotune run`` of the winner. The training
is one of three epochs. Speeds are those of its steps 100 to 400, or until enough seconds have passed; then it ends. One
JSON line a workload and round is appended as soon as it is done. ``--rounds 2`` repeats search and run, so that each
workload has two promises. ``--promises`` leaves out the informed user's run. ``--try`` takes small models on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.core.candidate import Document

_SCRIPT = str(Path(__file__).with_name("texts_script.py"))
_LONGEST_SECONDS = 280.0
_LAST_WORDS = 1500


@dataclass(frozen=True)
class Case:
    """An effective batch, what an informed user sets, and what the search is asked for."""

    effective_batch: int
    informed: tuple[str, ...]
    search: tuple[str, ...] = ()


def _informed(batch: int, accumulation: int, *more: str) -> tuple[str, ...]:
    return (
        "--per_device_train_batch_size", str(batch), "--gradient_accumulation_steps", str(accumulation), "--bf16",
        "True", *more,
    )  # fmt: skip


CASES = {
    "bert-base": Case(32, _informed(32, 1)),
    "qwen-0.5b": Case(16, _informed(8, 2), ("--memory-limit", "40GiB")),
    "roberta-base": Case(32, _informed(32, 1), ("--memory-limit", "40GiB")),
    "t5-base": Case(32, _informed(32, 1), ("--memory-limit", "40GiB")),
    "llama-1b": Case(16, _informed(4, 4), ("--memory-limit", "40GiB")),
    "llama-8b-lora": Case(16, _informed(2, 8, "--gradient_checkpointing", "True"), ("--memory-limit", "24GiB")),
    "gpt2": Case(32, _informed(16, 2), ("--memory-limit", "40GiB")),
    "modernbert-base": Case(32, _informed(32, 1), ("--memory-limit", "40GiB")),
    "deberta-v3-base": Case(32, _informed(32, 1), ("--memory-limit", "40GiB")),
    "bart-base": Case(32, _informed(32, 1), ("--memory-limit", "40GiB")),
}
TRIED = {
    "gpt2-small": Case(16, _informed(8, 2)[:4]),
    "modernbert-small": Case(16, _informed(16, 1)[:4]),
    "deberta-small": Case(16, _informed(16, 1)[:4]),
    "bart-small": Case(16, _informed(16, 1)[:4]),
    "bert-small": Case(16, _informed(16, 1)[:4]),
    "qwen-small": Case(16, _informed(8, 2)[:4]),
}


def _finish(words: Sequence[str], folder: Path) -> Document:
    """Run a command; return how it ended, how long it took, and what it printed."""
    started = time.monotonic()
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder)
    try:
        out, err = process.communicate(timeout=_LONGEST_SECONDS)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            out, err = process.communicate(timeout=40)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
    return {
        "words": list(words)[1:],
        "exit_code": process.returncode,
        "seconds": round(time.monotonic() - started, 1),
        "out": out,
        "err": err[-_LAST_WORDS:],
    }


def _speed(done: Document) -> Document | None:
    """Return what the script printed of its speed."""
    lines = [line[6:] for line in done.pop("out").splitlines() if line.startswith("SPEED ")]
    return json.loads(lines[-1]) if lines else None


def measure(name: str, case: Case, folder: Path, options: argparse.Namespace) -> Iterator[Document]:
    """Yield a record for each round, as soon as its run has ended."""
    training = ["--workload", name, "--output_dir", str(folder / "out"), "--save_strategy", "no", "--report_to", "none",
                "--clock_seconds", str(options.clock_seconds), "--clock_from", str(options.steps // 4), "--clock_to",
                str(options.steps), "--logging_steps", "50", "--disable_tqdm", "True"]  # fmt: skip
    python = [sys.executable, _SCRIPT, *training]
    informed: Document = {"speed": None}
    if not options.promises:
        informed = _finish([*python, *case.informed], folder)
        informed["speed"] = _speed(informed)
    for number in range(options.rounds):
        tool, study = [sys.executable, "-m", "autotune"], f"{name}-{number}"
        storage = ["--storage", str(folder / "texts.db")]
        # Each search is a first one: nothing is reused, and its compiled code is its own.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / f"inductor-{number}")
        search = _finish(
            [*tool, "search", "--study", study, *storage, "--fresh", "--json", "--effective-batch",
             str(case.effective_batch), *case.search, "--", *python, *case.informed],
            folder,
        )  # fmt: skip
        found = json.loads(search.pop("out") or "null")
        run = _finish([*tool, "run", study, *storage, "--", *python], folder)
        run["speed"] = _speed(run)
        yield {"workload": name, "round": number, "informed": informed, "search": search, "run": run, "found": found,
               **_summary(informed, search, found, run)}  # fmt: skip


def _summary(informed: Document, search: Document, found: Any, run: Document) -> Document:
    before, after = informed["speed"], run["speed"]
    best = (found or {}).get("best") or {}
    trials = (found or {}).get("trials") or []
    states = [trial["state"] for trial in trials]
    return {
        "ratio": round(after["samples_per_second"] / before["samples_per_second"], 3) if before and after else None,
        "told": {
            key: value for key, value in best.items() if "second" in key or key in ("describe", "arm", "settings")
        },
        "search_seconds": search["seconds"],
        "trials": len(trials),
        "states": {state: states.count(state) for state in set(states)},
    }


def _host_seconds() -> float:
    """Return how long five million additions take: hosts differ by 4 ×."""
    started = time.perf_counter()
    total = 0
    for number in range(5_000_000):
        total += number
    return round(time.perf_counter() - started, 3)


def main() -> None:
    """Measure the cases that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True, type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--rounds", default=1, type=int)
    parser.add_argument("--steps", default=400, type=int)
    parser.add_argument("--clock-seconds", default=30.0, type=float)
    parser.add_argument("--promises", action="store_true")
    parser.add_argument("--try", dest="tries", action="store_true")
    options = parser.parse_args()
    cases = TRIED if options.tries else CASES
    ratios = []
    for name, case in cases.items():
        if options.only and name not in options.only.split(","):
            continue
        with tempfile.TemporaryDirectory() as folder:
            for record in measure(name, case, Path(folder), options):
                record |= {"host_seconds": _host_seconds(), "date": time.strftime("%Y-%m-%d")}
                with options.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")
                shown = {
                    key: record[key] for key in ("workload", "round", "ratio", "search_seconds", "trials", "states")
                }
                print(json.dumps(shown), flush=True)
                ratios += [record["ratio"]] if record["ratio"] else []
    if ratios:
        print(f"geometric mean {statistics.geometric_mean(ratios):.2f}")


if __name__ == "__main__":
    main()
