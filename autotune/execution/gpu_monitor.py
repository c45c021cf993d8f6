"""Watch other processes on the GPUs while trials run: wait for free memory, and mark disturbed trials."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from autotune.core.device import Device
from autotune.core.errors import DeviceError
from autotune.core.measured_steps import LEAST_CORE_WAIT, accepts_noise
from autotune.core.messages import Progress
from autotune.core.outcome import HOST_BOUND, Completed, Failed, Outcome, OutOfMemory
from autotune.core.units import format_bytes
from autotune.devices.lock import Mark, Presence, had_company
from autotune.devices.nvml import Condition, current_session
from autotune.execution.executor import Executor, TrialJob

# NVML takes a few milliseconds a reading; five in a second show any slowdown that lasts.
_INTERVAL_SECONDS = 0.2
# Drivers round the memory that processes hold; a smaller change is not due to a process.
_SLACK_BYTES = 64 * 1024**2
# The driver takes back the memory of a process a moment after its end. For the memory of a neighbour (a process of
# somebody else's on the GPU) a search waits longer, once.
_RETURN_SECONDS = 5.0
_NEIGHBOUR_SECONDS = 60.0
# A neighbour that computes less than this in per cent of the GPU's time costs no more than the noise of a measurement.
_BUSY_PER_CENT = 5
# A desktop's compositor and its windows draw all the time, as they will beside the training. A game takes more.
_DRAWING_PER_CENT = 25
# Clocks of trials under the same power cap differed by a few per cent; a fifth less has another cause.
_CLOCK_DROP = 0.8
_FEWEST_SAMPLES = 4


class LocalProcesses(Executor, Protocol):
    """An executor whose trials are processes of this host."""

    def pids_of(self, trial_id: str) -> frozenset[int]:
        """Return the process ids of a running trial."""


class WatchedExecutor:
    """An executor around another that looks at the GPUs of a trial before, during and after it.

    It reads NVML from this process alone. A trial is submitted once the memory that it may reserve is free, or when
    waiting for that has lasted long enough. A trial that waited for cores is marked as disturbed, and repeated.

    ``presence`` is for a CPU, which several searches may use. A measurement while another search used the CPU is marked
    as disturbed, too. It is not repeated, since the other search may last longer than this one, but no later search
    reuses it.
    """

    def __init__(
        self,
        executor: LocalProcesses,
        context_bytes: int,
        note: Callable[[str], None],
        is_ending: Callable[[], bool] = lambda: False,
        presence: Presence | None = None,
    ) -> None:
        """Watch trials with ``context_bytes`` beside their allocator's cap; once ``is_ending``, await no memory."""
        self._executor, self.slots, self._presence = executor, executor.slots, presence
        self._context_bytes, self._note, self._is_ending = context_bytes, note, is_ending
        self._patience_seconds = _NEIGHBOUR_SECONDS
        self._clocks = _Clocks(note)
        self._watches: dict[str, list[_Watch]] = {}
        self._marks: dict[str, Mark] = {}

    def submit(self, job: TrialJob) -> str:
        """Wait for free memory, then submit and watch the trial. Raises ``DeviceError`` for a lost GPU."""
        # A mark says how much other searches used the CPU until then; that of the trial's end is compared with it.
        if self._presence is not None:
            self._marks[job.trial_id] = self._presence.mark()
        needed_bytes = job.cap_bytes + self._context_bytes
        placement = job.placement or self.slots[0]
        gpus = {device.uuid: device for device in placement.devices if device.kind == "cuda"}
        for gpu in gpus.values():
            # Every GPU is checked first: waiting for memory on one of them may take a minute.
            _check_is_there(gpu, current_session().condition(gpu.uuid))
        ready = [(gpu, self._await_memory(gpu, needed_bytes)) for gpu in gpus.values()]
        self._watches[job.trial_id] = [
            _Watch(gpu, before, needed_bytes, lambda: self._executor.pids_of(job.trial_id))
            for gpu, before in ready
            if before is not None
        ]
        return self._executor.submit(job)

    def wait(self) -> tuple[str, Progress | Outcome]:
        """Return the next report of a trial, an outcome with what disturbed the trial; see ``Executor.wait``."""
        trial_id, report = self._executor.wait()
        return trial_id, report if isinstance(report, Progress) else _with_cpu_contention(self._judge(trial_id, report))

    def _judge(self, trial_id: str, outcome: Outcome) -> Outcome:
        """Stop watching an ended trial, and return its outcome with what other processes did to it."""
        watches = self._watches.pop(trial_id, [])
        for watch in watches:
            watch.stop()
        for watch in watches:
            outcome = watch.judge(outcome, self._clocks)
        mark = self._marks.pop(trial_id, None)
        if mark is None or self._presence is None or not isinstance(outcome, Completed):
            return outcome
        if not had_company(mark, self._presence.mark()):
            return outcome
        disturbed = (*outcome.disturbed, "another search used this CPU")
        return dataclasses.replace(outcome, disturbed=disturbed, run_again=False)

    def close(self) -> None:
        """Stop watching, and end all trials; see ``Executor.close``."""
        for watches in self._watches.values():
            for watch in watches:
                watch.stop()
        self._watches.clear()
        self._marks.clear()
        self._executor.close()

    def _await_memory(self, gpu: Device, needed_bytes: int) -> Condition | None:
        """Wait until a trial's memory is free on a GPU, or as long as allowed; return the GPU's last state.

        Waits ``_RETURN_SECONDS`` and then, with a note to the user, ``_NEIGHBOUR_SECONDS``. After one such long wait in
        vain, later waits are short. ``None`` where NVML tells no state. Raises ``DeviceError`` for a lost GPU.
        """
        deadline = time.monotonic() + _RETURN_SECONDS
        is_long_wait = False
        while True:
            now = current_session().condition(gpu.uuid)
            _check_is_there(gpu, now)
            if now is None or not _lacks_memory(now, needed_bytes) or self._is_ending():
                return now
            if time.monotonic() >= deadline:
                if is_long_wait or self._patience_seconds <= _RETURN_SECONDS:
                    self._patience_seconds = _RETURN_SECONDS
                    return now
                missing = format_bytes(needed_bytes - (now.free_bytes or 0))
                seconds = f"{self._patience_seconds:.0f} s"
                self._note(f"waiting up to {seconds} for {missing} that other processes hold on {gpu.label}")
                is_long_wait = True
                deadline = time.monotonic() + self._patience_seconds
            time.sleep(_INTERVAL_SECONDS)


def _with_cpu_contention(outcome: Outcome) -> Outcome:
    """Return the outcome, marked as disturbed where other processes had the cores of a trial bound by its host."""
    if not isinstance(outcome, Completed) or accepts_noise():
        return outcome
    wait_share, busy_share = outcome.measurement.core_wait_share or 0.0, outcome.measurement.gpu_busy_share or 0.0
    if wait_share < LEAST_CORE_WAIT or busy_share >= HOST_BOUND:
        return outcome
    why = f"other processes had its cores for {wait_share:.0%} of the time"
    others_share = max(wait_share, outcome.others_share or 0.0)
    return dataclasses.replace(outcome, disturbed=(*outcome.disturbed, why), others_share=others_share)


def _check_is_there(gpu: Device, now: Condition | None) -> None:
    """Raise ``DeviceError`` where NVML says that a GPU is lost."""
    if now is not None and now.is_lost:
        raise DeviceError(
            f"{gpu.label} ({gpu.name}, {gpu.uuid}) is lost",
            "reset it (nvidia-smi --gpu-reset) or start the machine again, then autotune resume goes on",
        )


def _lacks_memory(now: Condition, needed_bytes: int) -> bool:
    return now.free_bytes is not None and now.free_bytes + _SLACK_BYTES < needed_bytes


def _newcomer_lines(pids: frozenset[int]) -> list[str]:
    """Return, for the message of a disturbed trial, a line for each process that came to the GPU during the trial."""
    return [f"process {pid} came to the GPU" for pid in sorted(pids)]


def _above_noise(shares: dict[int, int], drawing: frozenset[int]) -> dict[int, int]:
    """Return the processes that took enough of the GPU to disturb a trial; ``shares`` are per cent of its time, by pid.

    The processes of ``drawing``, which draw a desktop, may take more.
    """
    return {
        pid: share
        for pid, share in sorted(shares.items())
        if share >= (_DRAWING_PER_CENT if pid in drawing else _BUSY_PER_CENT)
    }


def _with_lost_device(outcome: Failed, gpu: Device, before: Condition, after: Condition) -> Failed:
    """Return a failed trial's outcome, with the reason ``device_lost`` where the GPU is lost or got memory errors."""
    errors = (after.uncorrected_errors or 0) - (before.uncorrected_errors or 0)
    if after.is_lost:
        why = f"NVML says that {gpu.label} is lost"
    elif errors > 0:
        why = f"{gpu.label} counted {errors} uncorrectable memory errors during the trial"
    else:
        return outcome
    return dataclasses.replace(outcome, reason="device_lost", message=f"{why}; {outcome.message}")


class _Watch:
    """Readings of one GPU during one trial, taken by a thread from the start of the trial to ``stop``."""

    def __init__(
        self, gpu: Device, before: Condition, needed_bytes: int, own_pids: Callable[[], frozenset[int]]
    ) -> None:
        """Take the GPU's state ``before`` the trial, and what returns the ids of the trial's own processes."""
        self._gpu, self._before, self._needed_bytes, self._own_pids = gpu, before, needed_bytes, own_pids
        self._started_at = time.time()
        self._ended = threading.Event()
        self._conditions: list[Condition] = []
        self._own: set[int] = set()
        """The trial's own processes, as far as they were seen."""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop taking readings."""
        self._ended.set()
        self._thread.join()

    def _read(self) -> None:
        """Keep readings of the GPU, and the trial's own processes, until ``stop``."""
        while not self._ended.wait(_INTERVAL_SECONDS):
            condition = current_session().condition(self._gpu.uuid)
            if condition is not None:
                self._conditions.append(condition)
            self._own |= self._own_pids()

    def judge(self, outcome: Outcome, clocks: _Clocks) -> Outcome:
        """Return the trial's outcome with what disturbed it on this GPU, or as failed by the loss of the GPU.

        Out of memory is disturbed where other processes held memory; a completed trial where they computed, or where
        the GPU's ``clocks`` slowed down.
        """
        others = self._newcomers()
        after = current_session().condition(self._gpu.uuid) or self._before
        match outcome:
            case Failed(reason="error" | "killed" | "lost" | "timeout"):
                return _with_lost_device(outcome, self._gpu, self._before, after)
            case OutOfMemory(where="device"):
                why = (*outcome.disturbed, *self._missing(after), *_newcomer_lines(others))
                return dataclasses.replace(outcome, disturbed=why)
            case Completed():
                shares = current_session().busy_pids(self._gpu.uuid, self._started_at)
                neighbours = {pid: share for pid, share in shares.items() if pid in self._before.pids | others}
                drawing = frozenset(pid for sample in (self._before, *self._conditions) for pid in sample.drawing_pids)
                came = _newcomer_lines(others - neighbours.keys() - drawing)
                slowed = clocks.slowed(self._gpu, self._before, self._conditions)
                disturbing = _above_noise(neighbours, drawing)
                took = [f"process {pid} took {share} % of the GPU" for pid, share in disturbing.items()]
                why = (*outcome.disturbed, *came, *took, *slowed)
                others_share = min(1.0, sum(disturbing.values()) / 100) or None
                return dataclasses.replace(outcome, disturbed=why, others_share=others_share)
        return outcome

    def _newcomers(self) -> frozenset[int]:
        """Return the ids of the processes that came to the GPU during the trial, without the trial's own.

        In a container NVML may use the host's process ids, so that the trial's own are unknown. The newcomer that was
        there the longest is then taken for the trial.
        """
        seen = Counter(pid for sample in self._conditions for pid in sample.pids if pid not in self._before.pids)
        own = self._own & seen.keys() or {pid for pid, _ in seen.most_common(1)}
        return frozenset(seen.keys() - own)

    def _missing(self, after: Condition) -> list[str]:
        """Return a line for the user where other processes held memory that the trial may reserve; else an empty list.


        Waits up to ``_RETURN_SECONDS`` until the driver has taken back the trial's own memory.
        """
        deadline = time.monotonic() + _RETURN_SECONDS
        while _lacks_memory(after, self._needed_bytes) and time.monotonic() < deadline:
            time.sleep(_INTERVAL_SECONDS)
            after = current_session().condition(self._gpu.uuid) or self._before
        short = [condition for condition in (self._before, after) if _lacks_memory(condition, self._needed_bytes)]
        missing = [self._needed_bytes - (condition.free_bytes or 0) for condition in short]
        return [f"other processes held {format_bytes(max(missing))} of what a trial may reserve"] if missing else []


class _Clocks:
    """What was seen of the clocks of each GPU, by UUID, from one trial to the next, to find trials that ran slower.

    A slowdown that was there before a trial, or in the trial before as well, is how the GPU runs when it is warm. The
    training will have it too, and so would a repetition of the trial.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._best_mhz: dict[str, int] = {}
        self._slowdowns: dict[str, frozenset[str]] = {}
        self._noted: set[tuple[str, str]] = set()

    def slowed(self, gpu: Device, before: Condition, samples: Sequence[Condition]) -> list[str]:
        """Return, in words, what throttled the GPU during this trial but not before, or that its clocks dropped."""
        # A word is a reason that NVML gives for lower clocks, such as heat.
        words = dict.fromkeys(word for sample in samples for word in sample.slowdowns)
        steady = self._slowdowns.get(gpu.uuid, frozenset()) | set(before.slowdowns)
        self._slowdowns[gpu.uuid] = frozenset(words)
        for word in words:
            if word in steady and (gpu.uuid, word) not in self._noted:
                self._noted.add((gpu.uuid, word))
                self._note(f"{word} lasts on {gpu.label}: trials count as they are, and training will run so too")
        hottest = max((s.temperature_celsius for s in samples if s.temperature_celsius is not None), default=None)
        reasons = [f"{word} at {hottest} °C" if hottest is not None else word for word in words if word not in steady]
        clock = max((sample.sm_clock_mhz or 0 for sample in samples), default=0)
        best = self._best_mhz.get(gpu.uuid, 0)
        is_capped = any(sample.is_power_capped for sample in samples)
        if not words and not is_capped and len(samples) >= _FEWEST_SAMPLES and clock < _CLOCK_DROP * best:
            reasons.append(f"clocks of {clock} MHz, not {best} MHz as before")
        self._best_mhz[gpu.uuid] = max(best, clock)
        return reasons
