"""The proof: a stock ``Trainer`` in a process of its own against what a study promises of its winner.

``verify`` compares speed and memory, ``compare_losses`` in ``autotune.verify.loss`` the training itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from autotune.core.candidate import Document
from autotune.core.dataset_spec import facts_in
from autotune.core.errors import InvalidRequestError, PromiseMissedError, TrialServerError
from autotune.core.units import MIB, format_bytes, format_count, format_rate, format_spread
from autotune.core.workload import Workload
from autotune.estimate.bottleneck import what_limits
from autotune.execution import TrialServer
from autotune.execution.oneshot import run_fresh
from autotune.space.training_arguments import EVALUATION_BATCH
from autotune.verify.comparison import Interval, Verdict, compare, mean_speed, slack
from autotune.verify.target import Subject

DEFAULT_STEPS = 100
LEAST_STEPS = 20
MEMORY_TOLERANCE = 0.02
# A CPU's peak is resident memory: a process that was not forked reads libraries and keeps pages of its own.
CPU_SLACK_BYTES = 96 * MIB
# Imports took 10 s on a cold disk; evaluating and writing a checkpoint of a few GiB may take minutes.
_START_SECONDS = 900.0
_MOST_TIMES_SLOWER = 20


@dataclass(frozen=True, repr=False)
class Verification:
    """What a stock run showed, beside what was promised."""

    subject: Subject
    steps: int
    obtained: Document
    """The answer of ``autotune.worker.verify.stock``."""

    def __str__(self) -> str:
        """What came of it in a line, for a notebook."""
        promised, obtained = self.promise.mean, self.samples_per_second or 0.0
        verdict = "; ".join(self.misses()) or self.verdict().replace("_", " ")
        return (
            f"{self.subject.report.study.name}: {format_rate(obtained)} samples/s of {format_rate(promised)} promised, "
            f"peak {format_bytes(self.training_peak_bytes or 0)} of {format_bytes(self.promised_peak_bytes)}: {verdict}"
        )

    # What it is made of has a whole study in it.
    __repr__ = __str__

    @property
    def samples_per_second(self) -> float | None:
        """Of the training steps alone; ``None`` where the run did not end well."""
        return self._total("samples") / self._total("seconds") if self.stretches else None

    @property
    def stretches(self) -> list[Document]:
        """Of each timed stretch ``steps``, ``samples``, ``seconds``, ``new_shapes``."""
        stretches: list[Document] = self.obtained.get("stretches", [])
        return stretches

    def _total(self, what: str) -> float:
        return float(sum(stretch[what] for stretch in self.stretches))

    @property
    def steps_timed(self) -> int:
        """Optimizer steps in the stretches."""
        return int(self._total("steps"))

    @property
    def samples_timed(self) -> int:
        """Samples in them; the last step of an epoch may have fewer than the others."""
        return int(self._total("samples"))

    @property
    def new_shapes(self) -> int:
        """Padded lengths that came for the first time in them."""
        return int(self._total("new_shapes"))

    @property
    def promise(self) -> Interval:
        """What was promised of the steps that were timed: padded lengths that came for the first time take longer."""
        promise = self.subject.promise
        if not self.samples_timed:
            return promise
        seconds = self.samples_timed / promise.mean
        return promise.scaled(seconds / (seconds + self._new_seconds(self.new_shapes)))

    @property
    def speed(self) -> Interval | None:
        """The run's mean speed with its own interval, new lengths aside; ``None`` where the run did not end well."""
        if self.samples_per_second is None:
            return None
        each: list[float] = []
        for stretch in self.stretches:
            seconds = float(stretch["seconds"])
            # What new lengths cost differs; no stretch is mostly that.
            each.append(stretch["samples"] / max(seconds - self._new_seconds(stretch["new_shapes"]), seconds / 2))
        return mean_speed(self.samples_per_second, each)

    def _new_seconds(self, new_shapes: int) -> float:
        """What so many new lengths cost by what the search saw, nothing where it saw nothing."""
        return new_shapes * (self.subject.promised.new_length_seconds or 0.0)

    @property
    def judges_allocated(self) -> bool:
        """Whether what is reserved depends on more than the training: where segments expand, or lengths differ.

        The allocator keeps what batches of every length have left, up to its cap.
        """
        return self.subject.has_data or self.subject.best.candidate.arm.expandable_segments

    @property
    def training_peak_bytes(self) -> int | None:
        """What is judged: peak reserved of the steps, or peak allocated; see ``judges_allocated``."""
        return self.peak_bytes("allocated" if self.judges_allocated else "reserved")

    def peak_bytes(self, kind: Literal["allocated", "reserved"]) -> int | None:
        """Of the steps: before the evaluation, and later if it then grew beyond that of the save."""
        peaks = self.obtained.get("peak_bytes")
        if not peaks:
            return None
        which = 0 if kind == "allocated" else 1
        before, end = int(peaks.get("before", peaks["end"])[which]), int(peaks["end"][which])
        return end if end > int(peaks.get("save", peaks["end"])[which]) else before

    @property
    def promised_peak_bytes(self) -> int:
        """What it is compared with."""
        promised = self.subject.promised
        return promised.peak_allocated_bytes if self.judges_allocated else promised.peak_reserved_bytes

    @property
    def slack_bytes(self) -> int:
        """What a peak may be higher besides, for the libraries of a process of its own."""
        return CPU_SLACK_BYTES if self.subject.placement.kind == "cpu" else 0

    @property
    def most_bytes(self) -> int:
        """What a training peak may reach without being a miss."""
        return round(self.promised_peak_bytes * (1 + MEMORY_TOLERANCE)) + self.slack_bytes

    def misses(self) -> list[str]:
        """What was promised and not kept, each in a sentence; empty where all was."""
        if self.obtained["state"] == "out_of_memory":
            return [f"memory ran out during {_DURING[self.obtained['during']]}: {self.obtained['message']}"]
        found = self._too_slow()
        peak = self.training_peak_bytes or 0
        if peak > self.most_bytes:
            found.append(
                f"a peak of {format_bytes(peak)} is {peak / self.promised_peak_bytes - 1:.1%} above "
                f"the promised {format_bytes(self.promised_peak_bytes)}"
            )
        if self.obtained["loss_problem"]:
            found.append(str(self.obtained["loss_problem"]))
        return found

    def _too_slow(self) -> list[str]:
        """The missed speed in a sentence; nothing where it was not missed."""
        promise, speed = self.promise, self.speed
        if speed is None or compare(promise, speed) != "missed":
            return []
        return [
            f"{_rate(speed)} samples/s are {1 - speed.mean / promise.mean:.1%} below the promised "
            f"{format_rate(promise.mean)}, and below the {_ends(promise)} that were promised of a next run"
        ]

    def verdict(self) -> Verdict:
        """Return whether what was promised was kept, as far as the two intervals can tell."""
        if self.misses() or self.speed is None:
            return "missed"
        return compare(self.promise, self.speed)

    def verdict_line(self) -> str:
        """Say in a sentence what came of a run without a miss, and how much that says."""
        speed = self.speed
        if speed is None or self.verdict() != "cannot_tell":
            return "kept: a stock Trainer does what was promised"
        return "cannot tell: " + "; ".join(self.why())

    def why(self) -> list[str]:
        """Say why the speeds do not agree, or why nobody can tell whether they do; empty where the promise was kept."""
        promise, speed = self.promise, self.speed
        if speed is None or compare(promise, speed) == "kept":
            return []
        found = []
        open_share = slack(promise, speed)
        if compare(promise, speed) == "cannot_tell":
            if speed.mean < promise.low:
                found.append(f"{_rate(speed)} samples/s lie below the promised {_ends(promise)}, but reach into them")
            else:
                found.append(f"a run that is slower by {open_share:.0%} would not have been refuted")
        if 1 - promise.low / promise.mean >= speed.high / speed.mean - 1:
            found.append(f"the promise is wide, ± {promise.relative_half_width:.1%}: {self._why_promise_is_wide()}")
        else:
            found.append(f"the run is noisy, ± {speed.relative_half_width:.1%}: its own steps differ by that much")
        if not self._is_host_bound:
            return found
        return [*found, "the step is host-bound, and such steps differ between processes (--cpu-affinity helps some)"]

    @property
    def _is_host_bound(self) -> bool:
        return what_limits(self.subject.promised).kind == "host"

    def _why_promise_is_wide(self) -> str:
        processes, busy = self.subject.processes, self.subject.promised.gpu_busy_share
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
        """What to do about them."""
        batch = self.subject.best.candidate.per_device_train_batch_size
        if self.obtained.get("during") == "evaluate" and self.subject.arguments.get(EVALUATION_BATCH) != batch:
            return f"give it {EVALUATION_BATCH}={batch}: a batch of the training's size needs less than training on it"
        how = "on an idle machine" if misses == self._too_slow() else "with more --headroom, on an idle machine"
        return f"search again {how}; autotune devices shows who else is there"


_DURING = {"train": "training", "evaluate": "the evaluation", "save": "the checkpoint's saving", "": "the start"}


def _rate(speed: Interval) -> str:
    return f"{format_rate(speed.mean)}{format_spread(speed.relative_half_width)}"


def _ends(interval: Interval) -> str:
    return f"{format_rate(interval.low)} to {format_rate(interval.high)}"


def check_steps(steps: int) -> None:
    """``InvalidRequestError`` where so many are too few."""
    if steps < LEAST_STEPS:
        raise InvalidRequestError(
            f"--steps {steps} are too few to tell a speed after the warm-up", f"use {LEAST_STEPS} or more"
        )


def verify(subject: Subject, steps: int, log_path: Path) -> Verification:
    """Run the stock process; ``TrialServerError`` where it fails for another reason than memory."""
    check_steps(steps)
    timeout_seconds = _START_SECONDS + _MOST_TIMES_SLOWER * steps * subject.promised.step_seconds
    folder = _data_folder(subject, log_path.parent.parent)
    job = subject.job(steps, evaluates=True, data_folder=str(folder) if folder else None)
    obtained = run_fresh(
        "autotune.worker.verify.stock", job, subject.placement, log_path, timeout_seconds, subject.variables
    )
    if obtained["state"] == "failed":
        raise TrialServerError(f"the stock run failed: {obtained['message']}", f"its log is {log_path}")
    return Verification(subject, steps, obtained)


def _data_folder(subject: Subject, logs: Path) -> Path | None:
    """Where the study's data was read into; where that is gone, it is read again, if it still is what it was."""
    workload = Workload.from_document(subject.report.workload)
    if workload.data is None:
        return None
    folder = workload.data_folder(logs)
    if facts_in(folder) is None:
        with TrialServer(subject.placement, workload, logs / subject.report.study.name) as runner:
            runner.read_data(folder)
    return folder


def notes(verification: Verification) -> list[str]:
    """What the reader should know of how far the comparison reaches."""
    found = []
    recorded = verification.subject.report.environment["packages"]
    changed = [
        f"{name} {version or 'none'}, now {now or 'none'}"
        for name, now in verification.obtained.get("packages", {}).items()
        if (version := recorded.get(name)) != now
    ]
    if changed:
        found.append(f"the study was measured with {'; '.join(changed)}")
    promised, line_bytes = verification.subject.promised, verification.subject.report.ceiling.line_bytes
    if verification.new_shapes and promised.new_length_seconds:
        found.append(
            f"{format_count(verification.new_shapes)} padded lengths came for the first time in these steps, which is "
            f"in what was promised ({format_rate(verification.subject.promise.mean)} without)"
        )
    reserved = verification.peak_bytes("reserved") or 0
    if verification.subject.has_data and reserved > line_bytes:
        found.append(
            f"the allocator kept {format_bytes(reserved)} of what batches of other lengths left, over the "
            f"{format_bytes(line_bytes)} that the headroom leaves: under its cap it gives that back"
        )
    peak = verification.training_peak_bytes or 0
    if verification.slack_bytes and peak > verification.promised_peak_bytes * (1 + MEMORY_TOLERANCE):
        found.append(
            f"on a CPU a process of its own may hold {format_bytes(verification.slack_bytes)} more than a forked one"
        )
    if verification.obtained.get("skipped_steps"):
        found.append(f"fp16's gradient scaler left out {verification.obtained['skipped_steps']} updates at the start")
    return found


def verification_document(verification: Verification) -> Document:
    """As ``--json`` prints it; what was not measured is ``None``."""
    subject, obtained = verification.subject, verification.obtained
    promised, promise, speed = subject.promised, verification.promise, verification.speed
    peak = verification.training_peak_bytes
    peaks = {name: reserved for name, (_, reserved) in obtained.get("peak_bytes", {}).items()}
    reserved = verification.peak_bytes("reserved")
    return {
        "study": subject.report.study.name,
        "model": subject.report.workload["model"],
        "device": subject.placement.name,
        "candidate": subject.best.candidate.parameters(),
        "steps": verification.steps,
        "verdict": verification.verdict(),
        "why": verification.why(),
        "kept": verification.verdict() == "kept",
        "misses": verification.misses(),
        "promised": {
            "samples_per_second": subject.promise.mean,
            "samples_per_second_with_new_lengths": promise.mean,
            "samples_per_second_low": promise.low,
            "samples_per_second_high": promise.high,
            "relative_half_width": promise.relative_half_width,
            "processes_measured": subject.processes,
            "gpu_busy_share": promised.gpu_busy_share,
            "peak_allocated_bytes": promised.peak_allocated_bytes,
            "peak_reserved_bytes": promised.peak_reserved_bytes,
            "joules_per_sample": promised.joules_per_sample,
        },
        "obtained": {
            "state": obtained["state"],
            "message": obtained.get("message"),
            "samples_per_second": speed.mean if speed else None,
            "samples_per_second_low": speed.low if speed else None,
            "samples_per_second_high": _finite(speed.high) if speed else None,
            "relative_half_width": _finite(speed.relative_half_width) if speed else None,
            "samples_per_second_each": [s["samples"] / s["seconds"] for s in verification.stretches],
            "measured_steps": verification.steps_timed,
            "measured_samples": verification.samples_timed,
            "peak_allocated_bytes": verification.peak_bytes("allocated"),
            "peak_reserved_bytes": reserved,
            "peak_reserved_with_evaluation_bytes": peaks.get("evaluate"),
            "peak_reserved_with_save_bytes": peaks.get("save"),
            "peak_reserved_at_the_end_bytes": peaks.get("end"),
            "evaluation_seconds": obtained.get("pause_seconds", {}).get("evaluate"),
            "save_seconds": obtained.get("pause_seconds", {}).get("save"),
            "evaluation_batch_size": obtained.get("evaluation_batch_size"),
            "joules_per_sample": obtained.get("joules_per_sample"),
            "skipped_steps": obtained.get("skipped_steps"),
            "new_lengths": verification.new_shapes,
        },
        "samples_per_second_ratio": speed.mean / promise.mean if speed else None,
        "peak_ratio": peak / verification.promised_peak_bytes if peak else None,
        "peak_judged": "allocated" if verification.judges_allocated else "reserved",
        "peak_reserved_ratio": reserved / promised.peak_reserved_bytes if reserved else None,
        "slack": _finite(slack(promise, speed)) if speed else None,
        "memory_tolerance": MEMORY_TOLERANCE,
        "memory_slack_bytes": verification.slack_bytes,
        "cap_bytes": subject.cap_bytes,
        "notes": notes(verification),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
