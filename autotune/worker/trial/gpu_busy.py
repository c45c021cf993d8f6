"""Measure the share of a step in which the GPU is busy, in one more step under the profiler after the timed ones.

Kineto records every kernel, copy and memset that the GPU executes. Only CUDA activity is recorded, not torch's
operators. Profiling slows down the host but hardly the kernels. So the GPU's busy seconds are taken from the profiled
step and divided by the seconds of the timed steps.

At most two micro-steps are profiled, whatever the accumulation. One adds to existing gradients and stands for all but
the last. The other is the last one, with clipping and the optimizer. Copies to the GPU before the step begins are left
out: they are part of waiting for data, which is measured separately.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch

from autotune.core.kernel_kinds import kind_of_kernel
from autotune.worker.trial.meter import Meter

_NS = 1e-9


class Profiler:
    """Records what the GPU executes, with ``torch.profiler``: CUDA activity only."""

    _profile: Any = None

    def start(self) -> None:
        """Start recording."""
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self._profile.start()

    def stop(self) -> tuple[float | None, dict[str, float]]:
        """Wait for the device and stop; return its busy seconds, in all and by kind of work, if known."""
        profile, self._profile = self._profile, None
        profile.stop()
        return busy_seconds(device_intervals(profile)), seconds_by_kind(profile)


def device_intervals(profile: Any) -> list[tuple[int, int]] | None:
    """Return start and end, in nanoseconds, of all GPU work during ``profile``; ``None`` if unknown.

    The raw events are read, since ``profile.events()`` builds a tree of Python objects, which takes many times as long.
    They have no public name; the names used here are the same from torch 2.6 to 2.13. ``record_function`` spans only
    name a part of the program and are no work of the GPU.
    """
    try:
        return [(event.start_ns(), event.start_ns() + event.duration_ns()) for event in _on_gpu(profile)]
    except (AttributeError, TypeError):
        return None


def seconds_by_kind(profile: Any) -> dict[str, float]:
    """Return the seconds of GPU work during ``profile`` by kind; empty if unknown.

    Kernels that run at the same time are counted separately.
    """
    seconds_by_kind: dict[str, float] = {}
    try:
        for event in _on_gpu(profile):
            kind = kind_of_kernel(event.name())
            seconds_by_kind[kind] = seconds_by_kind.get(kind, 0.0) + event.duration_ns() * _NS
    except Exception as error:
        # The busy share, which decides what is tried, is known without.
        print(f"autotune: kinds of work are not known: {error}", file=sys.stderr)
        return {}
    return seconds_by_kind


def _on_gpu(profile: Any) -> list[Any]:
    events = profile.profiler.kineto_results.events()
    return [event for event in events if event.device_type().name == "CUDA" and not event.is_user_annotation()]


def busy_seconds(intervals: Iterable[tuple[int, int]] | None) -> float | None:
    """Return the seconds covered by at least one interval of nanoseconds; ``None`` without intervals."""
    total, reached = 0, None
    for start, end in sorted(intervals or ()):
        begin = start if reached is None else max(start, reached)
        total += max(0, end - begin)
        reached = end if reached is None else max(reached, end)
    return None if reached is None else total * _NS


class BusyStep:
    """Profiles parts of a step, driven by a training callback. Errors of the profiler never leave this class."""

    def __init__(self, profiler: Profiler, meter: Meter, micro_steps_run: int, micro_steps: int) -> None:
        self._profiler = profiler
        self._meter = meter
        self._run = micro_steps_run
        self._takes_all = micro_steps_run < 3
        """Whether the whole step is profiled in one part. Steps of three micro-steps and more are profiled in two."""
        self._micro_steps = micro_steps
        self._is_recording = False
        self.is_broken = False
        self._shares: list[float] = []
        self._parts: list[float] = []
        self._kinds_of_parts: list[dict[str, float]] = []
        self._kinds: list[dict[str, float]] = []

    def step_begins(self) -> None:
        """Start profiling after the step's batches have arrived."""
        self._parts, self._kinds_of_parts = [], []
        if self._takes_all:
            self._start()

    def micro_step_ends(self, number: int) -> None:
        """Start or stop profiling between micro-steps, after ``number`` of them."""
        if self._takes_all:
            return
        if number == 2:
            self.stop()
        if number in (1, self._run - 1):
            self._start()

    def step_ends(self, step_seconds: float, cost: float) -> None:
        """Record the step. ``cost`` is the size of its batches over the mean size behind ``step_seconds``."""
        self.stop()
        if self.is_broken or not self._parts or not all(part > 0 for part in self._parts):
            return
        # All parts but the last stand for as many micro-steps.
        times = [self._micro_steps - 1] * (len(self._parts) - 1) + [1]
        busy = sum(count * part for count, part in zip(times, self._parts, strict=True))
        self._shares.append(busy / cost / step_seconds)
        seconds_by_kind: dict[str, float] = {}
        for count, part in zip(times, self._kinds_of_parts, strict=True):
            for kind, seconds in part.items():
                seconds_by_kind[kind] = seconds_by_kind.get(kind, 0.0) + count * seconds / cost
        self._kinds.append(seconds_by_kind)

    @property
    def share(self) -> float | None:
        """Mean busy share of the profiled steps, above 0 and at most 1; ``None`` where the profiler failed."""
        if self.is_broken or not self._shares:
            return None
        # The kernels of a profiled step may be slightly slower than those of the timed steps.
        return min(1.0, sum(self._shares) / len(self._shares))

    @property
    def seconds_by_kind(self) -> tuple[tuple[str, float], ...] | None:
        """Mean seconds of each kind of work in the profiled steps, the longest first; ``None`` if unknown."""
        if self.is_broken or not any(self._kinds):
            return None
        names = dict.fromkeys(name for kinds in self._kinds for name in kinds)
        means = {name: sum(kinds.get(name, 0.0) for kinds in self._kinds) / len(self._kinds) for name in names}
        return tuple(sorted(means.items(), key=lambda kind: -kind[1]))

    def _start(self) -> None:
        self._guarded(self._profiler.start, starts=True)

    def stop(self) -> None:
        """Stop profiling this step."""
        if self._is_recording:
            self._guarded(self._profiler.stop, starts=False)

    def _guarded(self, act: Any, *, starts: bool) -> None:
        """Call the profiler, and give up on it after an error."""
        if self.is_broken:
            return
        # Work that was issued before belongs to the part before.
        self._meter.synchronize()
        try:
            answer = act()
        except Exception as error:
            print(f"autotune: the profiler gives no answer: {error}", file=sys.stderr)
            self.is_broken = True
            return
        self._is_recording = starts
        if not starts:
            busy, kinds = answer
            self._parts.append(busy or 0.0)
            self._kinds_of_parts.append(kinds)


def busy_step(meter: Meter, micro_steps_run: int, micro_steps: int) -> BusyStep | None:
    """Return the profiler of steps for this device; ``None`` on a CPU."""
    if meter.device.type != "cuda":
        return None
    return BusyStep(Profiler(), meter, micro_steps_run, micro_steps)
