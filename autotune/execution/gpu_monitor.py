"""Watch what others do to a device while trials run: trials wait for a GPU's memory, and are marked where disturbed."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from autotune.core.errors import DeviceError
from autotune.core.outcome import Completed, Failed, Outcome, OutOfMemory
from autotune.core.units import format_bytes
from autotune.devices import Condition, Device, busy_pids, device_condition
from autotune.devices.presence import Presence, had_company
from autotune.execution.executor import Progress, TrialJob

# NVML takes a few milliseconds a reading; five in a second show any slowdown that lasts.
_INTERVAL_SECONDS = 0.2
# Drivers round what processes hold; less than this is nobody's doing.
_SLACK_BYTES = 64 * 1024**2
# The driver takes back the memory of a process a moment after its end. A neighbour is waited for longer, once.
_RETURN_SECONDS = 5.0
_NEIGHBOUR_SECONDS = 60.0
# A neighbour that computes less than this in per cent of the GPU's time costs no more than the noise of a measurement.
_BUSY_PER_CENT = 5
# Clocks of trials under the same power cap differed by a few per cent; a fifth less is another machine.
_CLOCK_DROP = 0.8
_FEWEST_SAMPLES = 4


class TrialRunner(Protocol):
    """Whatever runs trials."""

    def run(self, job: TrialJob, progress: Progress) -> Outcome:
        """Run one trial to its end."""


class OwnedRunner(TrialRunner, Protocol):
    """A runner that says which process its trial is."""

    @property
    def trial_pid(self) -> int | None:
        """The process of the running trial."""


class WatchedRunner:
    """A runner around another that looks at the GPU before, during and after each trial, from this process alone."""

    def __init__(
        self,
        runner: OwnedRunner,
        device: Device,
        context_bytes: int,
        note: Callable[[str], None],
        is_ending: Callable[[], bool] = lambda: False,
    ) -> None:
        self._runner = runner
        self._device = device
        self._context_bytes = context_bytes
        self._note = note
        self._is_ending = is_ending
        self._patience_seconds = _NEIGHBOUR_SECONDS
        self._best_clock_mhz = 0

    def run(self, job: TrialJob, progress: Progress) -> Outcome:
        """Run one trial to its end; ``DeviceError`` where the GPU is lost before it begins."""
        needed_bytes = job.cap_bytes + self._context_bytes
        before = self._await_memory(needed_bytes)
        if before is None:
            return self._runner.run(job, progress)
        started = time.time()
        with _Samples(self._device.uuid, self._runner) as samples:
            outcome = self._runner.run(job, progress)
        others = samples.newcomers(before.pids)
        after = device_condition(self._device.uuid) or before
        match outcome:
            case Failed(reason="error" | "killed" | "lost" | "timeout"):
                return _with_lost_device(outcome, before, after)
            case OutOfMemory(where="device"):
                why = [*self._missing(before, after, needed_bytes), *_came(others)]
                return dataclasses.replace(outcome, disturbed=tuple(why))
            case Completed():
                busy = busy_pids(self._device.uuid, started)
                neighbours = {pid: share for pid, share in busy.items() if pid in before.pids | others}
                why = [*_came(others - neighbours.keys()), *_computed(neighbours), *self._slowed(samples.taken)]
                return dataclasses.replace(outcome, disturbed=tuple(why))
        return outcome

    def _await_memory(self, needed_bytes: int) -> Condition | None:
        """The GPU as it is once a trial's memory is free, or when nobody cares to wait any longer."""
        deadline = time.monotonic() + _RETURN_SECONDS
        told = False
        while True:
            now = device_condition(self._device.uuid)
            if now is not None and now.is_lost:
                raise DeviceError(
                    f"{self._device.label} ({self._device.name}) is lost",
                    "reset it (nvidia-smi --gpu-reset) or start the machine again, then autotune resume goes on",
                )
            if now is None or not _is_short(now, needed_bytes):
                return now
            if time.monotonic() >= deadline or self._is_ending():
                if told or self._patience_seconds <= _RETURN_SECONDS:
                    self._patience_seconds = _RETURN_SECONDS
                    return now
                missing = format_bytes(needed_bytes - (now.free_bytes or 0))
                self._note(
                    f"waiting up to {self._patience_seconds:.0f} s for {missing} that other processes hold "
                    f"on {self._device.label}"
                )
                told = True
                deadline = time.monotonic() + self._patience_seconds
            time.sleep(_INTERVAL_SECONDS)

    def _missing(self, before: Condition, after: Condition, needed_bytes: int) -> list[str]:
        """Why less was free than a trial may reserve, before it or after it, its own memory being back."""
        deadline = time.monotonic() + _RETURN_SECONDS
        while _is_short(after, needed_bytes) and time.monotonic() < deadline:
            time.sleep(_INTERVAL_SECONDS)
            after = device_condition(self._device.uuid) or before
        missing = [needed_bytes - (c.free_bytes or 0) for c in (before, after) if _is_short(c, needed_bytes)]
        return [f"other processes held {format_bytes(max(missing))} of what a trial may reserve"] if missing else []

    def _slowed(self, samples: list[Condition]) -> list[str]:
        """What throttled the GPU while the trial ran."""
        words = dict.fromkeys(word for sample in samples for word in sample.slowdowns)
        hottest = max((s.temperature_celsius for s in samples if s.temperature_celsius is not None), default=None)
        found = [f"{word} at {hottest} °C" if hottest is not None else word for word in words]
        clock = max((sample.sm_clock_mhz or 0 for sample in samples), default=0)
        is_capped = any(sample.is_power_capped for sample in samples)
        if (
            not found
            and not is_capped
            and len(samples) >= _FEWEST_SAMPLES
            and clock < _CLOCK_DROP * self._best_clock_mhz
        ):
            found.append(f"clocks of {clock} MHz, not {self._best_clock_mhz} MHz as before")
        self._best_clock_mhz = max(self._best_clock_mhz, clock)
        return found


class SharedRunner:
    """A runner around another that marks what it measured while other searches used the same device.

    For a CPU, which several searches may use. Such a measurement is not repeated, since the other search may last
    longer than this one, but no later search takes it over.
    """

    def __init__(self, runner: TrialRunner, presence: Presence) -> None:
        self._runner = runner
        self._presence = presence

    def run(self, job: TrialJob, progress: Progress) -> Outcome:
        """Run one trial to its end."""
        before = self._presence.mark()
        outcome = self._runner.run(job, progress)
        if isinstance(outcome, Completed) and had_company(before, self._presence.mark()):
            why = "another search used this CPU"
            return dataclasses.replace(outcome, disturbed=(*outcome.disturbed, why), run_again=False)
        return outcome


def _is_short(now: Condition, needed_bytes: int) -> bool:
    return now.free_bytes is not None and now.free_bytes + _SLACK_BYTES < needed_bytes


def _came(pids: frozenset[int]) -> list[str]:
    """Processes that were not there before the trial."""
    return [f"process {pid} came to the GPU" for pid in sorted(pids)]


def _computed(shares: dict[int, int]) -> list[str]:
    """Processes that computed beside the trial."""
    return [
        f"process {pid} took {share} % of the GPU" for pid, share in sorted(shares.items()) if share >= _BUSY_PER_CENT
    ]


def _with_lost_device(outcome: Failed, before: Condition, after: Condition) -> Failed:
    """The outcome with what NVML says of the GPU's own part in it."""
    errors = (after.uncorrected_errors or 0) - (before.uncorrected_errors or 0)
    if after.is_lost:
        why = "NVML says that the GPU is lost"
    elif errors > 0:
        why = f"the GPU counted {errors} uncorrectable memory errors during the trial"
    else:
        return outcome
    return dataclasses.replace(outcome, reason="device_lost", message=f"{why}; {outcome.message}")


class _Samples:
    """Readings of a GPU from a thread of their own, for as long as the block lasts."""

    def __init__(self, uuid: str, runner: OwnedRunner) -> None:
        self._uuid = uuid
        self._runner = runner
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._own: set[int] = set()
        self.taken: list[Condition] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _read(self) -> None:
        while not self._ended.wait(_INTERVAL_SECONDS):
            now = device_condition(self._uuid)
            pid = self._runner.trial_pid
            if now is not None:
                self.taken.append(now)
            if pid is not None:
                self._own.add(pid)

    def newcomers(self, before: frozenset[int]) -> frozenset[int]:
        """Processes that came while the trial ran, the trial's own left out.

        Where NVML counts processes as the host does, the trial's number is not known; it is then the
        newcomer that was there the longest.
        """
        seen = Counter(pid for sample in self.taken for pid in sample.pids if pid not in before)
        own = self._own & seen.keys() or {pid for pid, _ in seen.most_common(1)}
        return frozenset(seen.keys() - own)
