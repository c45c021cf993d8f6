"""Run ``autotune serve``, or the process of its searches, with a stand-in for its trials and a clock that can jump.

``python tests/service/disturbed.py FOLDER serve …`` and ``… FOLDER child DEVICE``. The leases last 3 seconds. The time
of day is off by the seconds that are written in ``FOLDER/clock``.
"""

from __future__ import annotations

import contextlib
import sys
from datetime import datetime, timedelta
from pathlib import Path

import autotune.store.records as records

LEASE_SECONDS = 3.0
true_now = records.now


def shifted_now() -> datetime:
    """The time of day, as wrong as the file says."""
    with contextlib.suppress(OSError, ValueError):
        return true_now() + timedelta(seconds=float(Path(sys.argv[1], "clock").read_text()))
    return true_now()


def main() -> None:
    """Run the command."""
    # Before anything else imports it by name.
    records.now = shifted_now
    import autotune.store.leases as leases
    import autotune.store.queue as queue

    leases.LEASE_SECONDS = LEASE_SECONDS
    # Jobs lose more processes here than any does by chance.
    queue.MOST_LOSSES = 1000
    for function in (leases.Leases.take, leases.Leases.renew):
        if function.__defaults__:
            function.__defaults__ = (LEASE_SECONDS,)
    interpreter = Path(sys.argv[1], "python")
    if interpreter.exists():
        sys.executable = str(interpreter)
    if sys.argv[2] == "child":
        from autotune.engine.child import main as search

        search(int(sys.argv[3]), sys.argv[4])
        return
    import autotune.engine.local as local
    from autotune.cli.main import main as run

    local._LONGEST_PAUSE_SECONDS = local._FIRST_PAUSE_SECONDS
    run(sys.argv[2:])


if __name__ == "__main__":
    main()
