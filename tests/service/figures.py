"""Measure a service in every way there is, and print one table of the figures beside the aims.

``python tests/service/figures.py`` runs, one after another: the start of a search on a warm device, the load on both
databases, connections that ask for nothing, kills during 2,000 searches, faults on both databases, and the tests with
the mark ``service``; with ``--part`` some of them.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "studies")]

import chaos  # noqa: E402
import crowd  # noqa: E402
import faults  # noqa: E402
import first_trial  # noqa: E402
import load  # noqa: E402
import psutil  # noqa: E402
from postgres import NoPostgresError, PostgresServer  # noqa: E402

Row = tuple[str, str, str, str]


def rows(figures: Mapping[str, object], aims: Mapping[str, float], what: str = "") -> list[Row]:
    """Return the figures beside the aims."""
    found = []
    for name, figure in figures.items():
        aim = aims.get(name)
        words = "" if aim is None else f"at most {aim:g}" if aim else "0"
        verdict = "" if aim is None else "reached" if float(str(figure)) <= aim else "MISSED"
        found.append((f"{what}: {name}" if what else name, str(figure), words, verdict))
    return found


@contextmanager
def database(kind: str, folder: Path) -> Iterator[tuple[str, PostgresServer | None]]:
    """Yield the place of an empty database, and its server where it has one.

    The PostgreSQL server waits for the disk at each commit, as it does by default.
    """
    if kind == "sqlite":
        yield str(folder / "a.db"), None
        return
    server = PostgresServer.make(durable=True)
    try:
        server.start()
        server.make_template()
        yield server.url(server.new_database()), server
    finally:
        server.close()


def rows_on(kind: str, measure: Callable[[Path, str, PostgresServer | None], Mapping[str, object]],
            aims: Mapping[str, float]) -> list[Row]:  # fmt: skip
    """Measure on a database of one kind; without a row where there is no such database here."""
    try:
        with tempfile.TemporaryDirectory() as folder, database(kind, Path(folder)) as (storage, server):
            return rows(measure(Path(folder), storage, server), aims, kind)
    except NoPostgresError as error:
        print(f"PostgreSQL is left out: {error}", file=sys.stderr)
        return []


def loaded(jobs: int, folder: Path, storage: str, server: PostgresServer | None) -> Mapping[str, object]:
    """Measure the service under load."""
    process = psutil.Process(server.process.pid) if server is not None and server.process is not None else None
    return load.measure(folder, storage, jobs, process)


def disturbed(count: int, seed: int, folder: Path, storage: str, server: PostgresServer | None) -> Mapping[str, object]:
    """Disturb a service; a third as often where its database is on a server."""
    return faults.measure(count if server is None else count // 3, folder, seed, storage, server)


def rows_of_tests() -> list[Row]:
    """Run the tests with the mark ``service``."""
    words = [sys.executable, "-m", "pytest", "-m", "service", "tests/service", "tests/store"]
    has_passed = subprocess.run(words, cwd=ROOT).returncode == 0
    return [
        (
            "tests with the mark service",
            *(("passed", "passed", "reached") if has_passed else ("failed", "passed", "MISSED")),
        )
    ]


def main() -> None:
    """Measure, and print the table; the exit code tells whether anything was lost or has failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=5000, help="Of the load.")
    parser.add_argument("--faults", type=int, default=100, help="On SQLite; a third as many on PostgreSQL.")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--gpu", action="store_true", help="Measure the first trial on the first GPU.")
    parser.add_argument("--database", action="append", choices=("sqlite", "postgresql"), help="[default: both]")
    parts = ("first trial", "load", "crowd", "chaos", "faults", "tests")
    parser.add_argument("--part", action="append", choices=parts, help="What to measure [default: everything].")
    given = parser.parse_args()
    kinds = given.database or ["sqlite", "postgresql"]
    alone = {
        "first trial": (partial(first_trial.measure, on_gpu=given.gpu), first_trial.AIMS, ""),
        "crowd": (crowd.measure, crowd.AIMS, ""),
        "chaos": (chaos.measure, chaos.AIMS, "kills"),
    }
    on_each = {
        "load": (partial(loaded, given.jobs), load.AIMS),
        "faults": (partial(disturbed, given.faults, given.seed), faults.AIMS),
    }
    began = time.monotonic()
    found: list[Row] = []
    for part in given.part or parts:
        if part in alone:
            measure, aims, what = alone[part]
            with tempfile.TemporaryDirectory() as folder:
                found += rows(measure(Path(folder)), aims, what)
        elif part in on_each:
            found += [row for kind in kinds for row in rows_on(kind, *on_each[part])]
        else:
            found += rows_of_tests()
    widths = [max(map(len, column)) for column in zip(*found, strict=True)]
    for row in found:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print(f"{(time.monotonic() - began) / 60:.0f} minutes, load average {os.getloadavg()[1]:.1f} at the end")
    # Times depend on what else the machine does; what was lost does not.
    raise SystemExit(any(row[3] == "MISSED" and row[2] in ("0", "passed") for row in found))


if __name__ == "__main__":
    main()
