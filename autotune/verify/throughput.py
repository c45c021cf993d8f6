"""Verify speed and memory: run a stock ``Trainer`` in a fresh process, and compare it with a study's promise.

``autotune.verify.loss`` compares the training itself.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from autotune.core.ceiling import LARGE_GRADIENTS
from autotune.core.dataset_spec import facts_in
from autotune.core.errors import InvalidRequestError, PromiseMissedError, TrialServerError
from autotune.core.units import MIB, format_bytes, format_count, format_rate, format_seconds, plural
from autotune.core.verification import StockResult
from autotune.estimate.bottleneck import what_limits
from autotune.estimate.pooling import replays_graphs
from autotune.execution import TrialServer
from autotune.execution.oneshot import run_fresh
from autotune.results.wording import rate_unit
from autotune.space.training_arguments import EVALUATION_BATCH
from autotune.tuning.exclusive import Wait, take_devices
from autotune.verify.again import Again, Finding, NotMeasured, conclusion, find, hint_of, measure_again
from autotune.verify.comparison import (
    Interval,
    Verdict,
    compare,
    describe_ends,
    describe_speed,
    describe_width,
    mean_speed,
    slack,
)
from autotune.verify.target import Target

LEAST_STEPS, _USUAL_STEPS = 10, 100
# Where no number is given, a stock run takes this long at the promised speed, between those numbers of steps. A choice.
_USUAL_SECONDS = 120.0
MEMORY_TOLERANCE = 0.02
# A CPU's peak is resident memory: a fresh process, unlike a forked one, reads libraries and has pages of its own.
CPU_SLACK_BYTES = 96 * MIB
# Imports took 10 s on a cold disk. Evaluating and writing a checkpoint of a few GiB may take minutes.
_START_SECONDS = 900.0
_MOST_TIMES_SLOWER = 20
# From this multiple of the median seconds a sample on, a stretch is told as a stall. A choice.
_STALL = 3.0


@dataclass(frozen=True, repr=False)
class Verification:
    """The measurements of a stock run, compared with what was promised."""

    target: Target
    steps: int
    obtained: StockResult
    """What ``autotune.worker.verify.stock`` measured."""
    again: Again | NotMeasured | None = None
    """The winner's trial measured once more after the run; ``None`` where nobody asked for that."""

    def __str__(self) -> str:
        """Return the result in one line, for a notebook."""
        promised, obtained = self.promise.mean, self.samples_per_second or 0.0
        verdict = "; ".join(self.misses()) or self.verdict().replace("_", " ")
        peak, most = format_bytes(self.training_peak_bytes or 0), format_bytes(self.promised_peak_bytes)
        return (
            f"{self.target.report.study.name}: {format_rate(obtained)} {self.rate_unit} of {format_rate(promised)} "
            f"promised, peak {peak} of {most}: {verdict}" + "".join(f"; {line}" for line in self.again_lines())
        )

    # The default representation would print a whole study.
    __repr__ = __str__

    @property
    def rate_unit(self) -> str:
        """What speeds are counted in."""
        return rate_unit(self.target.report.workload)

    @property
    def samples_per_second(self) -> float | None:
        """Speed of the training steps alone; ``None`` where the run failed."""
        stretches = self.obtained.stretches
        return self.samples_timed / sum(stretch.seconds for stretch in stretches) if stretches else None

    @property
    def steps_timed(self) -> int:
        """Number of optimizer steps in the stretches."""
        return sum(stretch.steps for stretch in self.obtained.stretches)

    @property
    def samples_timed(self) -> int:
        """Number of samples in them; the last step of an epoch may have fewer than the others."""
        return sum(stretch.samples for stretch in self.obtained.stretches)

    @property
    def new_shapes(self) -> int:
        """Number of padded lengths in them that were new to the GPU."""
        return sum(stretch.new_shapes for stretch in self.obtained.stretches)

    @property
    def promise(self) -> Interval:
        """The promised speed of the timed steps: padded lengths that are new to the GPU take extra time."""
        promise = self.target.promise
        if not self.samples_timed:
            return promise
        seconds = self.samples_timed / promise.mean
        return promise.scaled(seconds / (seconds + self._new_seconds(self.new_shapes)))

    @property
    def speed(self) -> Interval | None:
        """The run's mean speed with its interval, without the extra time of new lengths.

        ``None`` where the run failed.
        """
        if self.samples_per_second is None:
            return None
        each: list[float] = []
        for stretch in self.obtained.stretches:
            seconds = stretch.seconds
            # The extra time of new lengths varies, so it is never taken for most of a stretch.
            each.append(stretch.samples / max(seconds - self._new_seconds(stretch.new_shapes), seconds / 2))
        return mean_speed(self.samples_per_second, each)

    @property
    def measured_again(self) -> Again | None:
        """The winner's trial measured again; ``None`` where that was not done, or gave no result."""
        return self.again if isinstance(self.again, Again) else None

    @property
    def speed_of_again(self) -> Interval | None:
        """Speed that the repeated trial promises of the timed steps, with the extra time of their new lengths."""
        again = self.measured_again
        return again.speed.scaled(self.promise.mean / self.target.promise.mean) if again is not None else None

    @property
    def finding(self) -> Finding | None:
        """What the repeated trial shows, beside the promise and the run; ``None`` without one."""
        again, speed = self.speed_of_again, self.speed
        return find(self.promise, speed, again) if again is not None and speed is not None else None

    def again_lines(self) -> list[str]:
        """Say what the repeated trial measured and shows, or why there is none; empty where nobody asked for it."""
        if isinstance(self.again, NotMeasured):
            return [f"the winner's trial could not be measured again: {self.again.why}"]
        again, scaled, speed, finding = self.measured_again, self.speed_of_again, self.speed, self.finding
        if again is None or scaled is None or speed is None or finding is None:
            return []
        promise = self.target.promise
        lines = [
            f"measured again just now as in the search: {describe_speed(again.speed)} {self.rate_unit}, "
            f"{_compared(again.speed.mean / promise.mean)} the search's {format_rate(promise.mean)}",
            f"the stock run is {_compared(speed.mean / scaled.mean)} that",
        ]
        machine, run = conclusion(finding, self._where, has_changed=bool(self.changed_packages()))
        lines = [line + (f": {told}" if told else "") for line, told in zip(lines, (machine, run), strict=True)]
        return [*lines, *(f"this trial was disturbed: {why}" for why in again.disturbed)]

    @property
    def _where(self) -> str:
        """What is slow where the run and the repeated trial are."""
        return "this host" if self._is_host_bound else "this machine"

    def changed_packages(self) -> list[str]:
        """Name the libraries whose versions are not those of the search, each with both versions."""
        recorded = self.target.report.environment["packages"]
        return [
            f"{name} {version or 'none'}, now {now or 'none'}"
            for name, now in self.obtained.packages.items()
            if (version := recorded.get(name)) != now
        ]

    def _new_seconds(self, new_shapes: int) -> float:
        """Return the extra time of new lengths, as the search measured it; 0 where it did not."""
        return new_shapes * (self.target.promised.new_length_seconds or 0.0)

    @property
    def judges_allocated(self) -> bool:
        """Whether peak allocated memory is compared, since reserved memory does not depend on the training alone.

        That is so with expandable segments, with batches of different lengths (the allocator keeps freed blocks of
        every length, up to its cap), and with CUDA graphs, whose pool is filled in an order that a cold compiler cache
        changes: ModernBERT reserved 14.1 and 15.5 GiB with the same peak allocated (H200, 23 November 2026).
        """
        arm = self.target.best.candidate.arm
        return self.target.has_data or arm.expandable_segments or replays_graphs(arm)

    @property
    def training_peak_bytes(self) -> int | None:
        """The peak that is compared: reserved or allocated memory of the steps, see ``judges_allocated``."""
        return self.peak_bytes("allocated" if self.judges_allocated else "reserved")

    def peak_bytes(self, kind: Literal["allocated", "reserved"]) -> int | None:
        """Return the steps' peak before the evaluation, or the later one if that exceeds the checkpoint's."""
        peaks = self.obtained.peak_bytes
        if not peaks:
            return None
        last = peaks["end"]
        before, save, end = (getattr(peak, kind) for peak in (peaks.get("before", last), peaks.get("save", last), last))
        return int(end if end > save else before)

    @property
    def promised_peak_bytes(self) -> int:
        """The promised peak that it is compared with."""
        promised = self.target.promised
        return promised.peak_allocated_bytes if self.judges_allocated else promised.peak_reserved_bytes

    @property
    def slack_bytes(self) -> int:
        """Bytes that a peak may be higher for the libraries of a fresh process."""
        return CPU_SLACK_BYTES if self.target.placement.kind == "cpu" else 0

    @property
    def most_bytes(self) -> int:
        """Largest training peak that keeps the promise; one step may hold a second set of DDP's gradient buckets."""
        is_ddp = self.target.promised.ranks > 1 and self.target.best.candidate.arm.strategy == "ddp"
        spare_bytes = round(LARGE_GRADIENTS * self.target.report.ceiling.cap_bytes) if is_ddp else 0
        return round(self.promised_peak_bytes * (1 + MEMORY_TOLERANCE)) + self.slack_bytes + spare_bytes

    def misses(self) -> list[str]:
        """Return the promises that were not kept, each in a sentence; empty where all were."""
        if self.obtained.state == "out_of_memory":
            return [f"memory ran out during {_DURING[self.obtained.during or '']}: {self.obtained.message}"]
        problems = self._too_slow()
        peak = self.training_peak_bytes or 0
        if peak > self.most_bytes:
            problems.append(
                f"a peak of {format_bytes(peak)} is {peak / self.promised_peak_bytes - 1:.1%} above "
                f"the promised {format_bytes(self.promised_peak_bytes)}"
            )
        if self.obtained.loss_problem:
            problems.append(self.obtained.loss_problem)
        return problems

    def _too_slow(self) -> list[str]:
        """Say that the speed was missed; empty where it was not."""
        promise, speed = self.promise, self.speed
        if speed is None or compare(promise, speed) != "missed":
            return []
        return [
            f"{describe_speed(speed)} {self.rate_unit} are {1 - speed.mean / promise.mean:.1%} below the promised "
            f"{format_rate(promise.mean)}, and below the {describe_ends(promise)} that were promised of a next run"
        ]

    def verdict(self) -> Verdict:
        """Return whether the promise was kept, as far as the two intervals can tell."""
        if self.misses() or self.speed is None:
            return "missed"
        return compare(self.promise, self.speed)

    def verdict_line(self) -> str:
        """Say the result of a run without a miss in one sentence, and how certain it is."""
        match self.verdict():
            case "cannot_tell":
                return "cannot tell: " + "; ".join(self.why())
            case "faster":
                return "faster than promised: " + "; ".join(self.why())
            case _:
                return "kept: a stock Trainer does what was promised"

    def why(self) -> list[str]:
        """Say why the speeds differ, or why the intervals cannot tell; empty where the promise was kept."""
        promise, speed = self.promise, self.speed
        if speed is None or compare(promise, speed) == "kept":
            return []
        if compare(promise, speed) == "faster":
            above = speed.mean / promise.mean - 1
            return [
                f"{describe_speed(speed)} {self.rate_unit} lie above the promised {describe_ends(promise)}; the search "
                f"measured {above / (1 + above):.0%} too low, and what it compared may be as uncertain"
            ]
        lines = []
        open_share = slack(promise, speed)
        if compare(promise, speed) == "cannot_tell":
            if speed.mean < promise.low:
                promised = describe_ends(promise)
                lines.append(
                    f"{describe_speed(speed)} {self.rate_unit} lie below the promised {promised}, but reach into them"
                )
            else:
                lines.append(f"the intervals are too wide: a run {open_share:.0%} slower would go unnoticed")
        if 1 - promise.low / promise.mean >= speed.high / speed.mean - 1:
            lines.append(f"the promise is wide{describe_width(promise, self.rate_unit)}: {self._why_promise_is_wide()}")
        else:
            lines.append(f"the run is noisy{describe_width(speed, self.rate_unit)}: {self._why_run_is_noisy()}")
        if not self._is_host_bound:
            return lines
        return [*lines, "the step is host-bound, and such steps differ between processes (--cpu-affinity helps some)"]

    def _why_run_is_noisy(self) -> str:
        each = [stretch.seconds / stretch.samples for stretch in self.obtained.stretches]
        usual = statistics.median(each)
        stalls = [stretch for stretch in self.obtained.stretches if stretch.seconds > _STALL * usual * stretch.samples]
        if not stalls:
            return "its own steps differ by that much"
        stall = max(stalls, key=lambda stretch: stretch.seconds)
        times, expected = "once" if len(stalls) == 1 else f"{len(stalls)} times", usual * stall.samples
        return (
            f"it stood still {times}, {plural(stall.steps, 'step')} took {format_seconds(stall.seconds)} where "
            f"such steps take {format_seconds(expected)}; give --steps more, or verify again"
        )

    @property
    def _is_host_bound(self) -> bool:
        return what_limits(self.target.promised).kind == "host"

    def _why_promise_is_wide(self) -> str:
        processes, busy = self.target.processes, self.target.promised.gpu_busy_share
        if self._is_host_bound and busy is not None:
            return f"the GPU computes {busy:.0%} of a step, the rest waits for the host"
        if processes == 1:
            return "one process was measured"
        return f"the {processes} measured processes differ"

    def check(self) -> None:
        """Raise ``PromiseMissedError`` where a promise was not kept."""
        misses = self.misses()
        if misses:
            raise PromiseMissedError("; ".join(misses), self._hint(misses))

    def _hint(self, misses: list[str]) -> str:
        """Return what to do about the misses."""
        batch = self.target.best.candidate.per_device_train_batch_size
        if self.obtained.during == "evaluate" and self.target.arguments.get(EVALUATION_BATCH) != batch:
            return f"give it {EVALUATION_BATCH}={batch}: a batch of the training's size needs less than training on it"
        finding = self.finding
        if finding is not None and misses == self._too_slow():
            told = hint_of(finding, self._where, has_changed=bool(self.changed_packages()))
            if told is not None:
                return told
        how = "on an idle machine" if misses == self._too_slow() else "with more --headroom, on an idle machine"
        return f"search again {how}; autotune devices shows other processes"


def _compared(ratio: float) -> str:
    """Return ``21.2% below``, ``3.0% above`` or ``as fast as``."""
    if abs(ratio - 1) < 0.0005:
        return "as fast as"
    return f"{1 - ratio:.1%} below" if ratio < 1 else f"{ratio - 1:.1%} above"


_DURING = {"train": "training", "evaluate": "the evaluation", "save": "the checkpoint's saving", "": "the start"}


def check_steps(steps: int | None) -> None:
    """Raise ``InvalidRequestError`` where too few steps are asked for to measure a speed."""
    if steps is not None and steps < LEAST_STEPS:
        raise InvalidRequestError(
            f"--steps {steps} are too few to tell a speed after the warm-up", f"use {LEAST_STEPS} or more"
        )


def steps_of(target: Target, asked: int | None) -> int:
    """Return how many steps a stock run has; raises ``InvalidRequestError`` for too few."""
    check_steps(asked)
    within = int(_USUAL_SECONDS / target.promised.step_seconds)
    return asked if asked is not None else max(LEAST_STEPS, min(within, _USUAL_STEPS))


def verify(
    target: Target,
    steps: int | None,
    log_path: Path,
    *,
    again: bool = False,
    wait: Wait | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> Verification:
    """Run the stock process; raises ``TrialServerError`` where it fails for a reason other than memory.

    A GPU on which a search runs is a ``DeviceError``; with ``wait`` its end is waited for. Where the speed is not as
    promised, or with ``again``, the winner's trial is then measured once more: that tells a machine that has become
    slower from a run that differs. ``note`` is told when that begins.
    """
    steps = steps_of(target, steps)
    timeout_seconds = _START_SECONDS + _MOST_TIMES_SLOWER * steps * target.promised.step_seconds
    folder = _data_folder(target, log_path.parent.parent)
    work = target.work(steps, evaluates=True, data_folder=folder)
    # Several ranks are started by torchrun itself, as a user will, not by the trial server.
    module = "autotune.worker.verify.stock" if target.placement.ranks == 1 else "autotune.worker.verify.torchrun"
    with take_devices(target.placement.devices, target.report.study.name, wait=wait, note=note):
        obtained = run_fresh(
            module,
            work,
            StockResult,
            target.placement,
            log_path,
            timeout_seconds,
            offline=work.workload.weights is None,
            variables=target.variables,
        )
        if obtained.state == "failed":
            raise TrialServerError(f"the stock run failed: {obtained.message}", f"its log is {log_path}")
        verification = Verification(target, steps, obtained)
        speed = verification.speed
        if speed is None or (compare(verification.promise, speed) == "kept" and not again):
            return verification
        return replace(verification, again=measure_again(target, log_path, note))


def _data_folder(target: Target, logs: Path) -> Path | None:
    """Return the folder of the study's prepared dataset, which is prepared again if it is gone and has not changed."""
    workload = target.workload
    if workload.data is None:
        return None
    folder = workload.data_folder(logs)
    if facts_in(folder) is None:
        with TrialServer(target.placement, workload, logs / target.report.study.name) as runner:
            runner.read_data(folder)
    return folder


def notes(verification: Verification) -> list[str]:
    """Return notes that limit the validity of the comparison."""
    notes = []
    if changed := verification.changed_packages():
        notes.append(f"the study was measured with {'; '.join(changed)}")
    promised, line_bytes = verification.target.promised, verification.target.report.ceiling.line_bytes
    if verification.new_shapes and promised.new_length_seconds:
        notes.append(
            f"{format_count(verification.new_shapes)} padded lengths were new to the GPU in these steps; the promise "
            f"allows for their extra time ({format_rate(verification.target.promise.mean)} without it)"
        )
    reserved = verification.peak_bytes("reserved") or 0
    graphed = replays_graphs(verification.target.best.candidate.arm)
    if (graphed or verification.target.has_data) and reserved > line_bytes:
        kept = f"the allocator kept {format_bytes(reserved)} reserved for"
        above = f"above the {format_bytes(line_bytes)} that leave the headroom"
        notes.append(
            f"{kept} CUDA graphs, {above}; their pool is kept while the training lasts"
            if graphed
            else f"{kept} batches of other lengths, {above}; under its cap it frees that"
        )
    peak = verification.training_peak_bytes or 0
    if verification.slack_bytes and peak > verification.promised_peak_bytes * (1 + MEMORY_TOLERANCE):
        notes.append(
            f"on a CPU a fresh process may use {format_bytes(verification.slack_bytes)} more than a forked one"
        )
    if verification.obtained.skipped_steps:
        notes.append(f"fp16's gradient scaler skipped {verification.obtained.skipped_steps} updates at the start")
    return notes
