"""Verify speed and memory: run a stock ``Trainer`` in a fresh process, and compare it with a study's promise.

``autotune.verify.loss`` compares the training itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from autotune.core.ceiling import LARGE_GRADIENTS
from autotune.core.dataset_spec import facts_in
from autotune.core.errors import InvalidRequestError, PromiseMissedError, TrialServerError
from autotune.core.real_training import RunState, StockResult
from autotune.core.units import MIB, format_bytes, format_count, format_rate, format_seconds
from autotune.estimate.pooling import replays_graphs
from autotune.execution import TrialServer
from autotune.execution.oneshot import run_fresh
from autotune.results.wording import counted_in, rate_unit
from autotune.space.training_arguments import EVALUATION_BATCH
from autotune.tuning.exclusive import Wait, take_devices
from autotune.verify.target import (
    Interval,
    Target,
    Verdict,
    compare,
    describe_ends,
    describe_speed,
    mean_speed,
    slack,
)

LEAST_STEPS, _USUAL_STEPS = 10, 100
# Where no number is given, a stock run takes this long at the promised speed, between those numbers of steps. A choice.
_USUAL_SECONDS = 120.0
MEMORY_TOLERANCE = 0.02
# A CPU's peak is resident memory: a fresh process, unlike a forked one, reads libraries and has pages of its own.
CPU_SLACK_BYTES = 96 * MIB
# Imports took 10 s on a cold disk. Evaluating and writing a checkpoint of a few GiB may take minutes.
_START_SECONDS = 900.0
_MOST_TIMES_SLOWER = 20
_DURING = {"train": "training", "evaluate": "the evaluation", "save": "the checkpoint's saving", "": "the start"}


@dataclass(frozen=True, repr=False)
class Verification:
    """The measurements of a stock run, timed in stretches of some steps, compared with what was promised."""

    target: Target
    steps: int
    obtained: StockResult
    """What ``autotune.worker.verify.stock`` measured."""

    def __str__(self) -> str:
        """Return the result in one line, for a notebook."""
        verdict = "; ".join(self.misses()) or self.verdict().replace("_", " ")
        return (
            f"{self.target.report.study.name}: {format_rate(self.samples_per_second or 0.0)} {self.rate_unit} of "
            f"{format_rate(self.promise.mean)} promised, peak {format_bytes(self.training_peak_bytes or 0)} of "
            f"{format_bytes(self.promised_peak_bytes)}: {verdict}"
        )

    # The default representation would print a whole study.
    __repr__ = __str__

    @property
    def rate_unit(self) -> str:
        """The unit of speeds."""
        return rate_unit(self.target.report.workload)

    @property
    def samples_per_second(self) -> float | None:
        """Speed of the training steps alone; ``None`` where the run failed."""
        stretches = self.obtained.stretches
        return self.samples_timed / sum(stretch.seconds for stretch in stretches) if stretches else None

    @property
    def steps_timed(self) -> int:
        """Number of optimizer steps in the timed stretches."""
        return sum(stretch.steps for stretch in self.obtained.stretches)

    @property
    def samples_timed(self) -> int:
        """Number of samples in the timed stretches; the last step of an epoch may have fewer than other steps."""
        return sum(stretch.samples for stretch in self.obtained.stretches)

    @property
    def new_shapes(self) -> int:
        """Number of padded lengths in the timed stretches that were new to the GPU."""
        return sum(stretch.new_shapes for stretch in self.obtained.stretches)

    @property
    def steady_promise(self) -> Interval:
        """The promised speed of steps whose padded lengths the GPU already knows."""
        return self.target.promise.scaled(1 / self.target.promised.steady_share)

    @property
    def promise(self) -> Interval:
        """The promised speed of the timed steps, with the extra time of as many new padded lengths as they had."""
        promise = self.steady_promise
        if not self.samples_timed:
            return promise
        seconds = self.samples_timed / promise.mean
        return promise.scaled(seconds / (seconds + self._new_seconds(self.new_shapes)))

    @property
    def speed(self) -> Interval | None:
        """The run's mean speed with its interval; ``None`` where the run failed.

        The mean includes the extra time of new lengths, as ``promise`` does. The width of the interval is from the
        speeds of the stretches without that time, which differs between stretches for a known reason.
        """
        if self.samples_per_second is None:
            return None
        # The extra time of new lengths varies, so no more than half of a stretch is taken for it.
        stretch_speeds = [
            each.samples / max(each.seconds - self._new_seconds(each.new_shapes), each.seconds / 2)
            for each in self.obtained.stretches
        ]
        return mean_speed(self.samples_per_second, stretch_speeds)

    def _new_seconds(self, new_shapes: int) -> float:
        """Return the extra time of new lengths, as measured in the search; 0 where not measured."""
        return new_shapes * (self.target.promised.new_shape_seconds or 0.0)

    @property
    def judges_allocated(self) -> bool:
        """Whether peak allocated memory is compared, instead of reserved memory.

        Reserved memory depends on more than the training with expandable segments, with batches of different lengths
        (the allocator keeps freed blocks of every length, up to its cap), and with CUDA graphs, whose pool is filled in
        an order that a cold compiler cache changes: ModernBERT reserved 14.1 and 15.5 GiB with the same peak allocated
        (H200, 23 November 2026).
        """
        arm = self.target.best.candidate.arm
        return self.target.has_data or arm.expandable_segments or replays_graphs(arm)

    @property
    def training_peak_bytes(self) -> int | None:
        """The compared peak of the steps: reserved or allocated memory, see ``judges_allocated``."""
        return self.peak_bytes("allocated" if self.judges_allocated else "reserved")

    def peak_bytes(self, kind: Literal["allocated", "reserved"]) -> int | None:
        """Return the peak memory of the training steps alone; ``None`` where the run failed.

        The recorded peak is the largest so far. Where it rose after the pauses (evaluation and checkpoint), training
        steps reached the last value. Otherwise the pauses may have, and the peak before them is returned.
        """
        peaks = {moment: int(getattr(peak, kind)) for moment, peak in self.obtained.peak_bytes.items()}
        if not peaks:
            return None
        at_end = peaks["end"]
        # A run without an evaluation has no pauses, and its last peak alone.
        after_pauses = peaks.get("save", peaks.get("evaluate", at_end))
        return at_end if at_end > after_pauses else peaks.get("before", at_end)

    @property
    def promised_peak_bytes(self) -> int:
        """The promised peak to compare with: of reserved or allocated memory, see ``judges_allocated``."""
        promised = self.target.promised
        return promised.peak_allocated_bytes if self.judges_allocated else promised.peak_reserved_bytes

    @property
    def slack_bytes(self) -> int:
        """Bytes by which a peak on a CPU may be higher: a fresh process has libraries and pages of its own."""
        return CPU_SLACK_BYTES if self.target.placement.kind == "cpu" else 0

    @property
    def most_bytes(self) -> int:
        """Largest training peak that keeps the promise. A step may hold a second set of DDP's gradient buckets."""
        is_ddp = self.target.promised.ranks > 1 and self.target.best.candidate.arm.strategy == "ddp"
        spare_bytes = round(LARGE_GRADIENTS * self.target.report.ceiling.cap_bytes) if is_ddp else 0
        return round(self.promised_peak_bytes * (1 + MEMORY_TOLERANCE)) + self.slack_bytes + spare_bytes

    def misses(self) -> list[str]:
        """Return a sentence for each broken promise; an empty list without any."""
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
        """Return a sentence where the speed was missed; an empty list where it was reached."""
        promise, speed = self.promise, self.speed
        if speed is None or compare(promise, speed) != "missed":
            return []
        return [
            f"{describe_speed(speed)} {self.rate_unit} are {1 - speed.mean / promise.mean:.1%} below the promised "
            f"{format_rate(promise.mean)}, and below the {describe_ends(promise)} that were promised of a next run"
        ]

    def verdict(self) -> Verdict:
        """Return whether the promise was kept, as far as the intervals of both speeds allow to decide."""
        if self.misses() or self.speed is None:
            return "missed"
        return compare(self.promise, self.speed)

    def why(self) -> str | None:
        """Return why the intervals cannot tell, or by how much the run is faster; ``None`` for any other verdict."""
        promise, speed = self.promise, self.speed
        if speed is None or (verdict := compare(promise, speed)) in ("kept", "missed"):
            return None
        obtained, promised = f"{describe_speed(speed)} {self.rate_unit}", describe_ends(promise)
        if verdict == "faster":
            too_low = 1 - promise.mean / speed.mean
            return f"{obtained} lie above the promised {promised}; the search measured {too_low:.0%} too low"
        if speed.mean < promise.low:
            return f"{obtained} lie below the promised {promised}, but reach into them"
        return f"the intervals are too wide: a run {slack(promise, speed):.0%} slower would go unnoticed"

    def check(self) -> None:
        """Raise ``PromiseMissedError`` where a promise was broken."""
        misses, batch = self.misses(), self.target.best.candidate.per_device_train_batch_size
        if not misses:
            return
        # Where speed alone was missed, memory needs no more headroom.
        how = "on an idle machine" if misses == self._too_slow() else "with more --headroom, on an idle machine"
        hint = f"search again {how}; autotune devices shows other processes"
        if self.obtained.during == "evaluate" and self.target.arguments.get(EVALUATION_BATCH) != batch:
            hint = f"give it {EVALUATION_BATCH}={batch}: a batch of the training's size needs less than training on it"
        raise PromiseMissedError("; ".join(misses), hint)


def check_steps(steps: int | None) -> None:
    """Raise ``InvalidRequestError`` for too few steps to measure a speed."""
    if steps is not None and steps < LEAST_STEPS:
        raise InvalidRequestError(
            f"--steps {steps} are too few to tell a speed after the warm-up", f"use {LEAST_STEPS} or more"
        )


def steps_of(target: Target, asked: int | None) -> int:
    """Return a stock run's number of steps: ``asked`` (checked by ``check_steps``), else those of a usual time."""
    check_steps(asked)
    steps_in_time = int(_USUAL_SECONDS / target.promised.step_seconds)
    return asked if asked is not None else max(LEAST_STEPS, min(steps_in_time, _USUAL_STEPS))


def verify(
    target: Target,
    steps: int | None,
    log_path: Path,
    *,
    wait: Wait | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> Verification:
    """Train the target in a stock process, and return its measurements beside the promise.

    Raises ``TrialServerError`` where the process fails for a reason other than memory, and ``DeviceError`` where a
    search runs on the GPU. With ``wait``, which gets the reason, this waits for that search; ``note`` gets remarks.
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
    return Verification(target, steps, obtained)


def _data_folder(target: Target, logs: Path) -> Path | None:
    """Return the folder of the study's dataset, which a server prepares again if it is gone; ``None`` without one."""
    workload = target.workload
    if workload.data is None:
        return None
    folder = workload.data_folder(logs)
    if facts_in(folder) is None:
        with TrialServer(target.placement, workload, logs / target.report.study.name) as runner:
            runner.read_data(folder)
    return folder


def notes(verification: Verification) -> Iterator[str]:
    """Yield sentences on what limits the comparison: other package versions, unsaved checkpoints, new lengths, …"""
    target, obtained = verification.target, verification.obtained
    recorded = target.report.environment["packages"]
    changed = [
        f"{name} {recorded.get(name) or 'none'}, now {now or 'none'}"
        for name, now in obtained.packages.items()
        if recorded.get(name) != now
    ]
    if changed:
        yield f"the study was measured with {'; '.join(changed)}"
    if (unsaved := obtained.unsaved_bytes) is not None:
        yield f"no checkpoint was written, which takes about {format_bytes(unsaved)}"
    if verification.new_shapes and target.promised.new_shape_seconds:
        yield (
            f"{format_count(verification.new_shapes)} padded lengths were new to the GPU in these steps; the promise "
            f"allows for their extra time ({format_rate(verification.steady_promise.mean)} without it)"
        )
    reserved, line_bytes = verification.peak_bytes("reserved") or 0, target.report.ceiling.line_bytes
    has_graphs = replays_graphs(target.best.candidate.arm)
    if (has_graphs or target.has_data) and reserved > line_bytes:
        what, until = "batches of other lengths", "under its cap it frees that"
        if has_graphs:
            what, until = "CUDA graphs", "their pool is kept while the training lasts"
        yield (
            f"the allocator kept {format_bytes(reserved)} reserved for {what}, above the {format_bytes(line_bytes)} "
            f"that leave the headroom; {until}"
        )
    peak = verification.training_peak_bytes or 0
    if verification.slack_bytes and peak > verification.promised_peak_bytes * (1 + MEMORY_TOLERANCE):
        yield f"on a CPU a fresh process may use {format_bytes(verification.slack_bytes)} more than a forked one"
    if obtained.skipped_steps:
        yield f"fp16's gradient scaler skipped {obtained.skipped_steps} updates at the start"


def verification_lines(verification: Verification) -> list[str]:
    """Return the lines of ``autotune verify``: a table of promised and measured values, notes, and the verdict."""
    target, obtained = verification.target, verification.obtained
    word = counted_in(target.report.workload)
    promised, promise, speed = target.promised, verification.promise, verification.speed
    peak = verification.training_peak_bytes
    # Both ends of a lopsided interval take more room.
    width = max(18, *(len(describe_speed(each)) for each in (promise, speed) if each is not None))
    lines = [f"{'':9} {'promised':>{width}} {'obtained':>{width}}"]
    if speed is not None and peak is not None:
        lines += [
            f"{verification.rate_unit:9} {describe_speed(promise):>{width}} {describe_speed(speed):>{width}}  "
            f"{speed.mean / promise.mean - 1:+.1%}",
            f"{'in use' if verification.judges_allocated else 'peak':9} "
            f"{format_bytes(verification.promised_peak_bytes):>{width}} {format_bytes(peak):>{width}}  "
            f"{peak / verification.promised_peak_bytes - 1:+.1%}",
        ]
        peaks, seconds = obtained.peak_bytes, obtained.pause_seconds
        kind = "allocated" if verification.judges_allocated else "reserved"
        for what, name in (("evaluate", f"evaluation at batch {obtained.evaluation_batch_size}"), ("save", "save")):
            if what in peaks:
                took = format_seconds(seconds[what])
                lines.append(f"  by the end of the {name}: {format_bytes(getattr(peaks[what], kind))}; it took {took}")
        if obtained.joules_per_sample is not None:
            joules = promised.joules_per_sample
            before = f", {joules:.3g} J promised" if joules is not None else ""
            lines.append(f"  {obtained.joules_per_sample:.3g} J a {word}{before}")
        lines.append(f"  {verification.steps_timed} steps, {verification.samples_timed:,} {word}s, were timed")
    lines += [f"  note: {note}" for note in notes(verification)]
    if verification.misses():  # ``check`` raises them as an error.
        return lines
    words = {"cannot_tell": "cannot tell", "faster": "faster than promised"}.get(verification.verdict())
    return [*lines, f"{words}: {verification.why()}" if words else "kept: a stock Trainer does what was promised"]


@dataclass(frozen=True, slots=True)
class PromisedDocument:
    """What the study promises of the winner's next run."""

    samples_per_second: float
    samples_per_second_with_new_lengths: float
    """With the extra time of padded lengths new to the GPU in the verified steps; the interval is around this."""
    samples_per_second_low: float
    samples_per_second_high: float
    relative_half_width: float
    processes_measured: int
    gpu_busy_share: float | None
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    joules_per_sample: float | None


@dataclass(frozen=True, slots=True)
class ObtainedDocument:
    """What a stock ``Trainer`` did in the run that verifies the promise."""

    state: RunState
    message: str | None
    """Why it failed."""
    samples_per_second: float | None
    samples_per_second_low: float | None
    samples_per_second_high: float | None
    """``None`` where a single stretch was timed, whose interval is unbounded."""
    relative_half_width: float | None
    samples_per_second_each: list[float]
    """Of each timed stretch."""
    measured_steps: int
    measured_samples: int
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    """Of the training steps alone."""
    peak_reserved_with_evaluation_bytes: int | None
    peak_reserved_with_save_bytes: int | None
    peak_reserved_at_the_end_bytes: int | None
    evaluation_seconds: float | None
    save_seconds: float | None
    evaluation_batch_size: int | None
    joules_per_sample: float | None
    skipped_steps: int | None
    new_lengths: int
    """Padded lengths that were new to the GPU."""


@dataclass(frozen=True, slots=True)
class VerificationDocument:
    """A verification of speed and memory."""

    study: str
    model: str
    device: str
    candidate: Any
    """The winner."""
    steps: int
    verdict: Verdict
    why: list[str]
    """Why the intervals cannot tell, or how the run is faster; empty where the promise was kept or missed."""
    kept: bool
    misses: list[str]
    """The promises that were not kept, each in a sentence."""
    promised: PromisedDocument
    obtained: ObtainedDocument
    samples_per_second_ratio: float | None
    peak_ratio: float | None
    peak_judged: Literal["allocated", "reserved"]
    """Which peak is compared with what was promised."""
    peak_reserved_ratio: float | None
    slack: float | None
    """The largest relative slow-down that the run would not refute."""
    memory_tolerance: float
    memory_slack_bytes: int
    cap_bytes: int | None
    notes: list[str]


def verification_document(verification: Verification) -> VerificationDocument:
    """Return the comparison as ``--json`` prints it, with ``None`` for missing measurements."""
    target, obtained = verification.target, verification.obtained
    promised, promise, speed = target.promised, verification.promise, verification.speed
    peak = verification.training_peak_bytes
    peaks = {name: peak.reserved for name, peak in obtained.peak_bytes.items()}
    reserved = verification.peak_bytes("reserved")
    return VerificationDocument(
        study=target.report.study.name,
        model=target.report.workload["model"],
        device=target.placement.name,
        candidate=target.best.candidate.parameters(),
        steps=verification.steps,
        verdict=verification.verdict(),
        why=[why] if (why := verification.why()) is not None else [],
        kept=verification.verdict() in ("kept", "faster"),
        misses=verification.misses(),
        promised=PromisedDocument(
            samples_per_second=target.promise.mean,
            samples_per_second_with_new_lengths=promise.mean,
            samples_per_second_low=promise.low,
            samples_per_second_high=promise.high,
            relative_half_width=promise.relative_half_width,
            processes_measured=target.processes,
            gpu_busy_share=promised.gpu_busy_share,
            peak_allocated_bytes=promised.peak_allocated_bytes,
            peak_reserved_bytes=promised.peak_reserved_bytes,
            joules_per_sample=promised.joules_per_sample,
        ),
        obtained=ObtainedDocument(
            state=obtained.state,
            message=obtained.message,
            samples_per_second=speed.mean if speed else None,
            samples_per_second_low=speed.low if speed else None,
            samples_per_second_high=_finite(speed.high) if speed else None,
            relative_half_width=_finite(speed.relative_half_width) if speed else None,
            samples_per_second_each=[stretch.samples / stretch.seconds for stretch in obtained.stretches],
            measured_steps=verification.steps_timed,
            measured_samples=verification.samples_timed,
            peak_allocated_bytes=verification.peak_bytes("allocated"),
            peak_reserved_bytes=reserved,
            peak_reserved_with_evaluation_bytes=peaks.get("evaluate"),
            peak_reserved_with_save_bytes=peaks.get("save"),
            peak_reserved_at_the_end_bytes=peaks.get("end"),
            evaluation_seconds=obtained.pause_seconds.get("evaluate"),
            save_seconds=obtained.pause_seconds.get("save"),
            evaluation_batch_size=obtained.evaluation_batch_size,
            joules_per_sample=obtained.joules_per_sample,
            skipped_steps=obtained.skipped_steps,
            new_lengths=verification.new_shapes,
        ),
        samples_per_second_ratio=speed.mean / promise.mean if speed else None,
        peak_ratio=peak / verification.promised_peak_bytes if peak else None,
        peak_judged="allocated" if verification.judges_allocated else "reserved",
        peak_reserved_ratio=reserved / promised.peak_reserved_bytes if reserved else None,
        slack=_finite(slack(promise, speed)) if speed else None,
        memory_tolerance=MEMORY_TOLERANCE,
        memory_slack_bytes=verification.slack_bytes,
        cap_bytes=target.cap_bytes,
        notes=[*notes(verification)],
    )


def _finite(value: float) -> float | None:
    """Return a number for JSON, which has no infinity; ``None`` for infinity."""
    return value if math.isfinite(value) else None
