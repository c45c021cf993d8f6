"""Measure searches over two unmodified scripts of a real size, and the batch finders of their libraries beside them.

    python studies/own_training.py --out FOLDER
    python studies/own_training.py --out FOLDER --tiny --timeout 600

The scripts are in ``studies/trainings``: a classifier of BERT-large's size with an ``Accelerator``, a language model of
GPT-2's size with Lightning. For each, whole processes in turn, imports included:

- ``search``: ``autotune search --effective-batch 64 --memory-limit 24GiB -- python SCRIPT``;
- ``by hand``: the script with the flags of ``autotune export --format cli``, its own clock around the steps after the
  first five;
- ``finder``: the script with its library's finder (``find_executable_batch_size``, ``Tuner.scale_batch_size``), which
  trains on at the same effective batch with what it found; in bf16, which a finder has to be told, and, as far as
  ``--seconds`` allow, in the script's own precision.

The allocator of all may reserve as much as that of a trial. ``FOLDER/own_training.json`` is written after each process.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TRAININGS = ROOT / "studies" / "trainings"
EFFECTIVE_BATCH = 64
_LAST_WORDS = 2000
_TINY = ("--hidden_size", "64", "--layers", "2", "--max_length", "32", "--texts", "256")


@dataclass(frozen=True)
class Training:
    """A script, its library's finder, and how it is told what."""

    name: str
    script: str
    finder: tuple[str, ...]
    steps: str
    bf16: tuple[str, ...]


TRAININGS_TO_RUN = (
    Training(
        "accelerate",
        "accelerate_classifier.py",
        ("--auto_find_batch_size",),
        "--max_train_steps",
        ("--mixed_precision", "bf16"),
    ),
    Training(
        "lightning",
        "lightning_language_model.py",
        ("--scale_batch_size", "power"),
        "--max_steps",
        ("--precision", "bf16-mixed"),
    ),
)


class Runs:
    """Runs processes, and keeps what came of them in a file."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.file = options.out / "own_training.json"
        self.document: dict[str, Any] = {"memory_limit": options.memory_limit, "trainings": {}}
        self.began = time.monotonic()

    def run(self, label: str, *words: str, training: str) -> dict[str, Any]:
        """Run a process to its end; return its seconds, its words, and what it said where that failed."""
        folder = self.options.out / f"{training}-{label.replace(' ', '-')}"
        folder.mkdir(parents=True, exist_ok=True)
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
        found: dict[str, Any] = {"command": shlex.join(words)}
        with open(folder / "out.txt", "wb") as out, open(folder / "err.txt", "wb") as err:
            began = time.monotonic()
            process = subprocess.Popen(
                words, cwd=folder, env=environment, stdout=out, stderr=err, start_new_session=True
            )
            try:
                code: int | None = process.wait(self.options.timeout)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                code = None
            found["seconds"] = round(time.monotonic() - began, 2)
        if code != 0:
            found["error"] = f"exit code {code}: {(folder / 'err.txt').read_text(errors='replace')[-_LAST_WORDS:]}"
        kept = self.document["trainings"].setdefault(training, {})
        kept[label] = found
        self.save()
        print(f"{training}, {label}: {found['seconds']} s {found.get('error', '')}", flush=True)
        return found

    def text(self, label: str, training: str) -> str:
        """Return what a process printed."""
        out: Path = self.options.out
        return (out / f"{training}-{label.replace(' ', '-')}" / "out.txt").read_text(encoding="utf-8")

    def save(self) -> None:
        """Write what is known so far."""
        self.file.write_text(json.dumps(self.document, indent=1) + "\n", encoding="utf-8")

    def train(self, label: str, training: Training, *words: str, limit_bytes: int | None) -> None:
        """Run a script by itself, and keep the speed that it tells."""
        report = self.options.out / f"{training.name}-{label.replace(' ', '-')}.json"
        report.unlink(missing_ok=True)
        limit = () if limit_bytes is None else ("--memory_limit_bytes", str(limit_bytes))
        more = ("--report", str(report), "--effective_batch", str(EFFECTIVE_BATCH), "--started", f"{time.time():.2f}")
        found = self.run(label, *self.script(training), *words, *limit, *more, training=training.name)
        if report.exists():
            found |= json.loads(report.read_text(encoding="utf-8"))
        self.save()

    def script(self, training: Training) -> tuple[str, ...]:
        """Return the words that start a script."""
        return sys.executable, str(TRAININGS / training.script), *(_TINY if self.options.tiny else ())

    def measure(self, training: Training) -> int | None:
        """Search, export, and train by hand; return the bytes that a trial's allocator may reserve."""
        options, name = self.options, training.name
        autotune = (sys.executable, "-m", "autotune")
        stored = ("--storage", str(options.out / "autotune.db"))
        limit = () if options.tiny else ("--memory-limit", options.memory_limit)
        device = ("--device", "cpu") if options.tiny else ()
        asked = ("--effective-batch", str(EFFECTIVE_BATCH), "--study", name, *stored, *limit, *device, "--json")
        found = self.run("search", *autotune, "search", *asked, "--", *self.script(training), training=name)
        if "error" in found:
            return None
        report = json.loads(self.text("search", name))
        found["search_seconds"] = report["seconds"]
        for key in ("best", "baseline"):
            found[key] = report[key]
        found["next_run"], found["ceiling"], found["notes"] = report["next_run"], report["ceiling"], report["notes"]
        found["trials"] = [
            {
                key: trial.get(key)
                for key in (
                    "per_device_train_batch_size", "gradient_accumulation_steps", "precision", "gradient_checkpointing",
                    "state", "samples_per_second", "peak_reserved_bytes", "seconds",
                )
            }
            for trial in report["trials"]
        ]  # fmt: skip
        self.save()
        exported = self.run("export", *autotune, "export", name, *stored, "--format", "cli", training=name)
        exported["flags"] = flags = shlex.split(self.text("export", name))
        cap_bytes: int | None = report["ceiling"]["cap_bytes"]
        steps = (training.steps, str(options.steps))
        self.train("by hand", training, *flags, *steps, limit_bytes=cap_bytes)
        self.train("finder", training, *training.bf16, *training.finder, *steps, limit_bytes=cap_bytes)
        by_hand = self.document["trainings"][name]["by hand"].get("samples_per_second")
        if by_hand:
            found["promise_off"] = report["best"]["samples_per_second"] / by_hand - 1
            print(f"{name}: promised {report['best']['samples_per_second']:.1f}, by hand {by_hand:.1f} samples/s")
        self.save()
        return cap_bytes


def main() -> None:
    """Measure both scripts; then the finders in the scripts' own precision, as far as time allows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--memory-limit", default="24GiB")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps by hand, the first five not measured")
    parser.add_argument("--seconds", type=float, default=110.0, help="after so many, no further process is started")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one process")
    parser.add_argument("--only", choices=[training.name for training in TRAININGS_TO_RUN])
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU, to try this program")
    options = parser.parse_args()
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    runs = Runs(options)
    # Read once before anything is timed, so that nobody pays for a cold disk.
    warm_up = "import accelerate, lightning.pytorch, optuna, sqlalchemy, transformers.trainer"
    subprocess.run([sys.executable, "-c", warm_up], capture_output=True, check=False)
    chosen = [each for each in TRAININGS_TO_RUN if options.only in (None, each.name)]
    limits = [(each, runs.measure(each)) for each in chosen]
    for training, limit_bytes in limits:
        if time.monotonic() - runs.began < options.seconds:
            words = (*training.finder, training.steps, "8")
            runs.train("finder in the own precision", training, *words, limit_bytes=limit_bytes)
    print(f"{time.monotonic() - runs.began:.0f} s in all; {runs.file}")


if __name__ == "__main__":
    main()
