"""Run ``autotune serve`` or ``autotune agent`` with a stand-in for its trials, short leases and a clock that can jump.

``python tests/service/disturbed.py FOLDER serve …``. The leases last 3 seconds, since each fault may cost one. The time
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
    from autotune.cli.main import main as run

    leases.LEASE_SECONDS = queue.LEASE_SECONDS = LEASE_SECONDS
    # Jobs lose more agents here than any does by chance.
    queue.MOST_ATTEMPTS = 1000
    for function in (queue.Queue.claim, leases.Leases.take, leases.Leases.renew):
        if function.__defaults__:
            function.__defaults__ = (LEASE_SECONDS,)
    import autotune.service.agent as agent

    agent._HEARTBEAT_SECONDS = LEASE_SECONDS / 6
    if sys.argv[2] == "serve":
        import autotune.service.server as server

        server._SWEEP_SECONDS = 0.5
    interpreter = Path(sys.argv[1], "python")
    if interpreter.exists():
        sys.executable = str(interpreter)
    run(sys.argv[2:])


if __name__ == "__main__":
    main()
