"""Measure a service in every way there is, and print one table of the figures beside the aims.

``python tests/service/figures.py`` runs, one after another: the start of a search on a warm device, the load on both
databases, faults on both, and the tests with the mark ``service``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import faults
import first_trial
import load

ROOT = Path(__file__).resolve().parents[2]
WARM_SECONDS = 1.0
"""From the start of a search to its first trial, at most, on a device that is warm."""
Row = tuple[str, str, str, str]


def verdict(is_reached: bool) -> str:
    """Return how a figure compares with its aim."""
    return "reached" if is_reached else "MISSED"


def rows_of_first_trials() -> list[Row]:
    """Measure how soon a search begins."""
    found = []
    for what, model, seconds, _ in first_trial.measure():
        is_warm = what == first_trial.WARM
        aim, reached = ("at most 1 s", verdict(seconds <= WARM_SECONDS)) if is_warm else ("", "")
        found.append((f"start to first trial, {model}: {what}", f"{seconds:.2f} s", aim, reached))
    return found


def rows_of_load(databases: list[str]) -> list[Row]:
    """Measure the service under load, on each database."""
    found = []
    with load.databases(databases) as places:
        for name, (url, server) in places.items():
            told = load.measure(url, database=server)
            print(load.table({name: told}), flush=True)
            for figure, aim in load.AIMS.items():
                reached = verdict(told[figure] <= aim)
                found.append((f"{name}: {figure}", str(told[figure]), f"at most {aim}" if aim else "0", reached))
    return found


def rows_of_faults(database: str, count: int, seed: int) -> list[Row]:
    """Disturb a service, and count what was lost."""
    measure = faults.measure if database == "sqlite" else faults.measure_on_a_server
    with tempfile.TemporaryDirectory() as folder:
        told = measure(count, Path(folder) / "scene", seed)
    print(faults.table(told), flush=True)
    found: list[Row] = [(f"{database}: faults", str(sum(told["faults"].values())), str(count), "")]
    return found + [(f"{database}: {name}", str(told[name]), "0", verdict(told[name] == 0)) for name in faults.BAD]


def row_of_tests() -> Row:
    """Run the tests with the mark ``service``."""
    code = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "service", "tests/service", "tests/store"], cwd=ROOT
    ).returncode
    return ("tests with the mark service", "passed" if code == 0 else "failed", "passed", verdict(code == 0))


def main() -> None:
    """Measure, and print the table; the exit code tells whether anything was lost or has failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, default=100, help="On SQLite; a third as many on PostgreSQL.")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--database", action="append", choices=("sqlite", "postgresql"), help="[default: both]")
    given = parser.parse_args()
    databases = given.database or ["sqlite", "postgresql"]
    began = time.monotonic()
    rows = [
        *rows_of_first_trials(),
        *rows_of_load(databases),
        *(
            row
            for name in databases
            for row in rows_of_faults(name, given.faults if name == "sqlite" else given.faults // 3, given.seed)
        ),
        row_of_tests(),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print(f"{(time.monotonic() - began) / 60:.0f} minutes, load average {os.getloadavg()[1]:.1f} at the end")
    # Times depend on what else the machine does; what was lost does not.
    raise SystemExit(any(row[3] == "MISSED" and row[2] in ("0", "passed") for row in rows))


if __name__ == "__main__":
    main()
