"""What every meter promises, checked on one meter of this process.

``python meter_contract.py cpu`` or ``cuda UUID`` checks a real one: its limit on memory cannot be taken
back, so it gets a whole process.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from autotune.core.outcome import OutOfMemory
from autotune.core.units import MIB
from autotune.worker.failures import classify
from autotune.worker.trial.meter import Meter, open_meter

CAP_BYTES = 512 * MIB
# Pages that the interpreter itself touches meanwhile.
_SLACK_BYTES = 24 * MIB


def check_contract(meter: Meter, allocate: Callable[[int], Any], sleep: Callable[[float], None]) -> None:
    """Raise ``AssertionError`` where a promise is broken; ``allocate`` takes memory until its result is dropped."""
    assert isinstance(meter.device, torch.device)
    _check_energy(meter, sleep)
    _check_clock(meter, sleep)
    _check_peaks(meter, allocate)
    _check_limit(meter, allocate)
    for count in (meter.allocation_retries(), meter.device_used_bytes()):
        assert count is None or (isinstance(count, int) and count >= 0)


def _check_energy(meter: Meter, sleep: Callable[[float], None]) -> None:
    before = meter.energy_joules()
    sleep(0.2)
    after = meter.energy_joules()
    assert (before is None) == (after is None)
    assert before is None or after is None or 0 <= after - before < 1000


def _check_clock(meter: Meter, sleep: Callable[[float], None]) -> None:
    marks = [meter.mark()]
    for _ in range(2):
        sleep(0.05)
        marks.append(meter.mark())
    meter.synchronize()
    first, second = meter.seconds_between(marks[0], marks[1]), meter.seconds_between(marks[1], marks[2])
    assert 0.04 < first < 10
    assert abs(meter.seconds_between(marks[0], marks[2]) - first - second) < 0.002
    assert meter.seconds_between(marks[1], marks[1]) == 0


def _check_peaks(meter: Meter, allocate: Callable[[int], Any]) -> None:
    meter.limit(CAP_BYTES)
    meter.reset_peaks()
    before = meter.peaks()
    assert all(isinstance(peak, int) and peak >= 0 for peak in (before.allocated, before.reserved))
    held = allocate(64 * MIB)
    peaks = meter.peaks()
    assert 64 * MIB <= peaks.allocated - before.allocated < 64 * MIB + _SLACK_BYTES
    assert peaks.reserved >= peaks.allocated
    del held
    assert meter.peaks().allocated >= peaks.allocated, "what is freed was a peak all the same"
    kept = allocate(16 * MIB)
    meter.reset_peaks()
    again = meter.peaks().allocated
    assert 16 * MIB <= again < peaks.allocated - 32 * MIB, "what is still held counts, what was freed no longer"
    del kept


def _check_limit(meter: Meter, allocate: Callable[[int], Any]) -> None:
    held = allocate(CAP_BYTES // 2)
    try:
        allocate(CAP_BYTES)
    except Exception as error:
        outcome = classify(error, during="train", on_cpu=meter.device.type == "cpu")
        assert isinstance(outcome, OutOfMemory), outcome
        assert outcome.where == "device"
    else:
        raise AssertionError("an allocation beyond the cap went through")
    assert CAP_BYTES // 2 <= meter.peaks().reserved <= CAP_BYTES
    del held
    allocate(CAP_BYTES // 2)


def main() -> None:
    """Check the real meter that the command line names."""
    kind = sys.argv[1]
    meter = open_meter(kind, sys.argv[2] if kind == "cuda" else "cpu")
    check_contract(meter, lambda size: torch.ones(size, dtype=torch.uint8, device=meter.device), time.sleep)
    print("kept")


if __name__ == "__main__":
    main()
