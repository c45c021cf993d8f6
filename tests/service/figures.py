"""Measure a service in every way there is, and print one table of the figures beside the aims.

``python tests/service/figures.py`` runs, one after another: the start of a search on a warm device, the load on both
databases, connections that ask for nothing, kills during 2,000 searches, faults on both databases, and the tests with
the mark ``service``; with ``--part`` some of them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import chaos
import crowd
import faults
import first_trial
import load

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("first trial", "load", "crowd", "chaos", "faults", "tests")
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


def rows_of_crowd() -> list[Row]:
    """Crowd a service with half-sent requests, and measure how others are answered."""
    told = crowd.measure()
    aimed = [
        (name, str(told[name]), f"at most {aim:g}", verdict(told[name] <= aim)) for name, aim in crowd.AIMS.items()
    ]
    held = "half-sent requests, and files that the service may open"
    return [(held, f"{told['half-sent requests']}, {told['files that the service may open']}", "", ""), *aimed]


def rows_of_chaos() -> list[Row]:
    """Kill a service and its searches, and count what was lost."""
    told = chaos.measure(None)
    return [
        (
            f"kills: {name}",
            str(value),
            "0" if name in chaos.BAD else "",
            verdict(value == 0) if name in chaos.BAD else "",
        )
        for name, value in told.items()
    ]


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
    parser.add_argument("--part", action="append", choices=PARTS, help="What to measure [default: everything].")
    given = parser.parse_args()
    databases = given.database or ["sqlite", "postgresql"]
    measures: dict[str, Callable[[], list[Row]]] = {
        "first trial": rows_of_first_trials,
        "load": lambda: rows_of_load(databases),
        "crowd": rows_of_crowd,
        "chaos": rows_of_chaos,
        "faults": lambda: [
            row
            for name in databases
            for row in rows_of_faults(name, given.faults if name == "sqlite" else given.faults // 3, given.seed)
        ],
        "tests": lambda: [row_of_tests()],
    }
    began = time.monotonic()
    rows = [row for part in given.part or PARTS for row in measures[part]()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print(f"{(time.monotonic() - began) / 60:.0f} minutes, load average {os.getloadavg()[1]:.1f} at the end")
    # Times depend on what else the machine does; what was lost does not.
    raise SystemExit(any(row[3] == "MISSED" and row[2] in ("0", "passed") for row in rows))


if __name__ == "__main__":
    main()
