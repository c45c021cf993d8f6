"""Run a minimal controller: start one endless trial and wait for it, until a test kills it."""

import sys
from pathlib import Path

from run_trial import run_trial
from tiny import ENDLESS, tiny_workload

from autotune.devices.listing import find_device
from autotune.execution import TrialServer


def main() -> None:
    """``python controller.py LOG_FOLDER``; prints a line for every progress record."""
    with TrialServer(find_device("cpu"), tiny_workload("bert-tiny"), Path(sys.argv[1])) as runner:
        run_trial(
            runner,
            effort=ENDLESS,
            timeout_seconds=300,
            progress=lambda progress: print(progress.describe(), flush=True),
        )


if __name__ == "__main__":
    main()
