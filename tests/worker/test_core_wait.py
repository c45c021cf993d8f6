"""Test that a trial knows of the cores that other processes had."""

import os
import subprocess
import sys
from time import process_time

from autotune.worker.trial.cores import CoreWait


def test_busy_processes_of_others_are_seen() -> None:
    spinning = [sys.executable, "-c", "while True: pass"]
    # As a trial's worker is: what the other tests' processes reap meanwhile would count as this group's.
    group = os.getpgrp()
    os.setpgid(0, 0)
    others = [subprocess.Popen(spinning, process_group=0) for _ in range(3 * len(os.sched_getaffinity(0)))]
    try:
        wait = CoreWait()
        wait.read()
        began = process_time()
        while process_time() < began + 0.1:
            pass
        wait.add()
        share = wait.share()
    finally:
        for other in others:
            other.kill()
            other.wait()
        os.setpgid(0, group)
    # Each core is shared by four.
    assert share is None or share > 0.3
    assert share is not None or not os.path.exists("/proc/self/schedstat")
