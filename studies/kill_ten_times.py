"""Kills a search ten times at random moments, its controller and its trials in turn, and resumes it each time.

    python studies/kill_ten_times.py --output FILE --model bert-large-uncased --effective-batch 64 --memory-limit 24GiB
    python studies/kill_ten_times.py --kills 2 --model bert-tiny --seq-len 16 --effective-batch 16 --device cpu

Options other than ``--kills``, ``--seed`` and ``--output`` are those of ``autotune search``.

First the same search is run undisturbed. Then one is killed with SIGKILL and taken up with ``autotune resume`` until
the kills are spent; one that ends before that is followed by another. The record says of each kill what it met and how
many processes and bytes of GPU memory stayed behind, and of each search whether its winner is the undisturbed one's.
A candidate's trial is killed once at most: one that is killed twice is given up, as a failure of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MARK = "AUTOTUNE_KILL_MARK"
# What the driver rounds; a process that stayed would hold a CUDA context of some hundred MiB.
SLACK_BYTES = 64 * 1024**2


class Bench:
    """A database in a folder of its own, and the searches that are run into it."""

    def __init__(self, folder: Path, options: list[str], seed: int) -> None:
        self.database = folder / "studies.db"
        self.options = options
        self.random = random.Random(seed)
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.environment = {**os.environ, "PYTHONPATH": path, MARK: str(folder)}
        self.mark = f"{MARK}={folder}\0".encode()

    def autotune(self, *words: str) -> list[str]:
        """The words of a command over this database."""
        return [sys.executable, "-m", "autotune", *words, "--storage", str(self.database)]

    def start(self, study: str) -> subprocess.Popen[bytes]:
        """A search, or what goes on with it; its output goes to this process's stderr."""
        begin = ["search", *self.options, "--fresh", "--study", study]
        words = begin if self.rows(study) is None else ["resume", study]
        print("$ autotune", *words, file=sys.stderr, flush=True)
        return subprocess.Popen(self.autotune(*words), env=self.environment, stdout=sys.stderr)

    def document(self, study: str) -> dict[str, Any]:
        """What ``autotune show --json`` says."""
        shown = subprocess.run(self.autotune("show", study, "--json"), env=self.environment, capture_output=True)
        found: dict[str, Any] = json.loads(shown.stdout)
        return found

    def rows(self, study: str) -> list[tuple[str, str, str, str]] | None:
        """Id, candidate, stage and state of each trial; ``None`` where the study is not recorded."""
        if not self.database.exists():
            return None
        query = "SELECT id FROM autotune_studies WHERE name = ?"
        trials = "SELECT id, candidate, stage, state FROM autotune_trials WHERE study_id = ? ORDER BY number"
        with contextlib.closing(sqlite3.connect(self.database, timeout=60)) as connection:
            found = connection.execute(query, (study,)).fetchone()
            return connection.execute(trials, found).fetchall() if found else None

    def processes(self) -> list[int]:
        """Every process that was started here and lives."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX" and self.mark in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return found

    def trial_process(self) -> int | None:
        """The process of the running trial: the one that writes a trial's log."""
        for pid in self.processes():
            with contextlib.suppress(OSError):
                if Path(os.readlink(f"/proc/{pid}/fd/1")).name.startswith("trial-"):
                    return pid
        return None

    def used_bytes(self) -> int | None:
        """Memory in use on the first device, by all processes."""
        words = [sys.executable, "-m", "autotune", "devices", "--json"]
        listed = subprocess.run(words, env={**self.environment, MARK: ""}, capture_output=True)
        device = json.loads(listed.stdout)["devices"][0]
        return device["memory_used_bytes"] if device["kind"] == "cuda" else None

    def left_behind(self, idle_bytes: int | None) -> tuple[int, int | None]:
        """Processes, and bytes of GPU memory beyond the idle ones, that are there ten seconds later at most."""
        deadline = time.monotonic() + 10
        while True:
            processes, used = len(self.processes()), self.used_bytes()
            more = None if used is None or idle_bytes is None else max(0, used - idle_bytes)
            if (not processes and (more or 0) <= SLACK_BYTES) or time.monotonic() > deadline:
                return processes, more
            time.sleep(0.2)


def winner(document: dict[str, Any]) -> dict[str, Any]:
    """The parameters that are recommended."""
    best: dict[str, Any] = document["best"]
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "precision", "gradient_checkpointing",
             "attn_implementation", "optim")  # fmt: skip
    return {name: best[name] for name in names if name in best}


def kill(bench: Bench, running: subprocess.Popen[bytes], study: str, victim: str, wait: float, met: set[str]) -> Any:
    """Kill the controller or a trial after a while; what was met, or ``None`` where the search ended before."""
    deadline = time.monotonic() + wait
    while running.poll() is None:
        time.sleep(0.01)
        if time.monotonic() < deadline:
            continue
        candidate = next((row[1] for row in bench.rows(study) or () if row[3] == "running"), None)
        if victim == "controller":
            running.kill()
            running.wait()
            return {"victim": victim, "after_seconds": round(wait, 2), "candidate": candidate and json.loads(candidate)}
        pid = bench.trial_process()
        if pid is None or candidate is None or candidate in met:
            continue
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            met.add(candidate)
            return {"victim": victim, "after_seconds": round(wait, 2), "candidate": json.loads(candidate)}
    return None


def disturb(bench: Bench, study: str, kills: int, seconds: float, idle_bytes: int | None) -> list[dict[str, Any]]:
    """One study, killed until the kills are spent or it ends; then searched to its end."""
    done: list[dict[str, Any]] = []
    met: set[str] = set()
    running = bench.start(study)
    while len(done) < kills:
        victim = ("controller", "trial")[len(done) % 2]
        before = {row[0] for row in bench.rows(study) or () if row[3] in ("completed", "out_of_memory")}
        found = kill(bench, running, study, victim, bench.random.uniform(0, 0.7 * seconds), met)
        if found is None:
            break
        now = {row[0] for row in bench.rows(study) or ()}
        found["trials_lost"] = len(before - now)
        if victim == "controller":
            found["processes_left"], found["gpu_bytes_left"] = bench.left_behind(idle_bytes)
            running = bench.start(study)
        print(f"killed the {victim} ({len(done) + 1})", file=sys.stderr, flush=True)
        done.append(found)
    running.wait()
    if running.returncode != 0:
        raise SystemExit(f"the search ended with exit code {running.returncode}")
    return done


def report(bench: Bench, study: str, undisturbed: dict[str, Any]) -> dict[str, Any]:
    """A study that ended, against the one that nothing disturbed."""
    document = bench.document(study)
    # The final measurements repeat a candidate on purpose.
    known = [(row[1], row[2]) for row in bench.rows(study) or () if row[3] in ("completed", "out_of_memory")]
    ended = [(candidate, stage) for candidate, stage in known if stage != "final"]
    return {
        "study": study,
        "winner": winner(document),
        "samples_per_second": document["best"].get("samples_per_second"),
        "same_winner": winner(document) == winner(undisturbed),
        "trials": len(document["trials"]),
        "trials_doubled": len(ended) - len(set(ended)),
        "seconds": document["seconds"],
    }


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    arguments, options = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="autotune-kills-") as folder:
        bench = Bench(Path(folder), options, arguments.seed)
        idle_bytes = bench.used_bytes()
        started = time.monotonic()
        if bench.start("undisturbed").wait() != 0:
            raise SystemExit("the undisturbed search failed")
        seconds = time.monotonic() - started
        undisturbed = bench.document("undisturbed")
        kills: list[dict[str, Any]] = []
        studies: list[dict[str, Any]] = []
        while len(kills) < arguments.kills:
            study = f"disturbed-{len(studies) + 1}"
            kills += disturb(bench, study, arguments.kills - len(kills), seconds, idle_bytes)
            studies.append({**report(bench, study, undisturbed), "kills_so_far": len(kills)})
        record = {
            "options": options,
            "environment": undisturbed["environment"],
            "undisturbed": report(bench, "undisturbed", undisturbed),
            "undisturbed_command_seconds": round(seconds, 1),
            "kills": kills,
            "disturbed": studies,
            "left_at_the_end": bench.left_behind(idle_bytes),
        }
    text = json.dumps(record, indent=1)
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text + "\n", encoding="utf-8")
    raise SystemExit(0 if all(found["same_winner"] and not found["trials_doubled"] for found in studies) else 1)


if __name__ == "__main__":
    main()
