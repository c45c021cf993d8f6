"""Describe how a trial is measured and how it ended: completed with a measurement, out of memory, or failed.

A trial process returns one ``Outcome``, as a JSON document; the database stores the same document.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from autotune.core.candidate import Arm, Document
from autotune.core.ceiling import Ceiling


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure. The defaults gave medians within 2 % of 150 steps' on an H200."""

    warmup_steps: int = 2
    """Dropped; the first has no optimizer state yet, so memory is believed only after two."""
    min_steps: int = 3
    max_steps: int = 12
    target_spread: float = 0.01
    """Stop once half the 95 % interval is below this fraction of the median."""
    max_seconds: float = 2.0
    """Measure no longer than this once two steps are measured (one, where ``max_steps`` is one)."""
    behind_step_seconds: float | None = None
    """A candidate whose first two measured steps take longer than this cannot win: they say enough."""
    max_micro_steps: int = 3
    """Micro-steps run in place of a longer accumulation; the third is like all that follow."""
    busy_steps: int = 0
    """Run one more step under the profiler afterwards, to learn for how much of it the GPU computes; 0 leaves it out.

    More than one step is allowed and gives the mean. The timed steps are not affected."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one trial process saw. Times are of one whole optimizer step of the candidate."""

    step_seconds: float
    """Mean over the measured steps, less one of five or more that was delayed; micro-steps left out are added up.

    With the user's own data, whose batches differ: the mean step of an epoch."""
    step_seconds_each: tuple[float, ...]
    """Every measured step, warm-up dropped, in order; scaled as ``step_seconds`` is."""
    relative_spread: float
    """Half the 95 % interval of ``step_seconds`` over it; 0 says one step only."""
    samples_per_second: float
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    warmup_step_seconds: tuple[float, ...] = ()
    """Steps that were dropped, as they were run (never scaled)."""
    micro_steps_run: int = 1
    """Micro-steps in each step that was run; fewer than the candidate's when added up."""
    micro_batch_bytes: int | None = None
    """What the inputs of one micro-step take on the device; those of all micro-steps are there at once, and counted in
    the peaks even where micro-steps were left out. ``None`` in records of versions that did not count them."""
    optimizer_seconds: float | None = None
    data_seconds: float | None = None
    """Waiting for data between two steps, within ``step_seconds``."""
    device_used_bytes: int | None = None
    """What NVML says the whole device had in use after the last step, all processes."""
    context_bytes: int | None = None
    """What the trial's process held on the device beside what its allocator reserved: the CUDA context."""
    peak_reserved_first_step_bytes: int | None = None
    allocation_retries: int | None = None
    train_loss: float | None = None
    skipped_steps: int | None = None
    """Of warm-up and measured steps, those whose update fp16's gradient scaler left out; 0 without a scaler."""
    joules_per_sample: float | None = None
    """Mean power of the whole device while steps were measured, as NVML counts it, times seconds a sample."""
    compile_seconds: float | None = None
    """What the dropped steps took beyond as many others, where something is compiled in them; from an empty cache."""
    new_length_seconds: float | None = None
    """What a GPU takes longer for each padded length that comes for the first time (kernels are chosen, built, loaded).

    It is in none of the other figures. ``None`` where no length was new."""
    epoch_lengths: int | None = None
    """Different padded lengths of an epoch's batches."""

    worst_batch_tokens: int | None = None
    """Padded length of the largest batches that the user's data can make, which the warm-up steps were fed."""
    worst_batch_step_seconds: float | None = None
    """Of a step of them, as it was run."""
    worst_batch_peak_allocated_bytes: int | None = None
    worst_batch_peak_reserved_bytes: int | None = None
    """Peaks after those steps; the other peaks are of the whole trial."""

    gpu_busy_share: float | None = None
    """Seconds of a step during which the GPU executes at least one kernel or copy, over ``step_seconds``.

    From a profiled step after the timed ones, with micro-steps that were left out added up as in ``step_seconds``.
    Above 0, at most 1. ``None`` where it was not asked for, on a CPU, or where the profiler gave no answer."""
    gpu_busy_cost_seconds: float | None = None
    """What learning it took: the profiled steps, and starting, ending and reading the profiler."""
    cpu_core: int | None = None
    """The core that the process was pinned to; ``None`` where it was free."""

    @property
    def known_spread(self) -> float | None:
        """``relative_spread``; ``None`` where a single step was timed, of which no spread is known."""
        return self.relative_spread if len(self.step_seconds_each) > 1 else None

    def judged_bytes(self, arm: Arm) -> int:
        """What is compared with the line: peak reserved bytes, or where segments expand peak allocated ones.

        Reserved bytes may read 17 % too high there, so such a trial has the line itself for a cap: that it
        ran is what proves that it fits.
        """
        return self.peak_allocated_bytes if arm.expandable_segments else self.peak_reserved_bytes

    def fits(self, arm: Arm, ceiling: Ceiling) -> bool:
        """Whether the trial stayed under the ceiling's line, and with its CUDA context within what is reachable."""
        return ceiling.fits(self.judged_bytes(arm), self.context_bytes)


PhaseSeconds = dict[str, float]


@dataclass(frozen=True, slots=True)
class Source:
    """The earlier trial that an outcome was taken from, in place of running one."""

    trial_id: str
    study: str
    number: int
    derived: bool = False
    """Whether the earlier trial was of another candidate, and what it says of this one was worked out."""

    def describe(self) -> str:
        """``trial 3 of bert-64``, or what it was derived from."""
        return f"{'derived from ' if self.derived else ''}trial {self.number} of {self.study}"


@dataclass(frozen=True, slots=True)
class Completed:
    """The trial trained and was measured."""

    measurement: Measurement
    phase_seconds: PhaseSeconds = field(default_factory=dict)
    disturbed: tuple[str, ...] = ()
    """What came from outside while it was measured, each in a few words; other studies do not reuse it then."""
    state: Literal["completed"] = "completed"
    source: Source | None = None
    """``None`` for a trial that was run."""
    run_again: bool = True
    """Whether a disturbed trial is run again: what disturbed it may be over soon."""


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """The trial asked for more than the cap. A result, not an error."""

    message: str
    where: Literal["device", "host"] = "device"
    during: str = "train"
    """The phase that was under way: ``model``, ``trainer``, ``train``."""
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    phase_seconds: PhaseSeconds = field(default_factory=dict)
    disturbed: tuple[str, ...] = ()
    """Why less than the cap was there: then nothing follows for the candidate."""
    state: Literal["out_of_memory"] = "out_of_memory"
    source: Source | None = None
    """``None`` for a trial that was run."""


FailureReason = Literal[
    "error",
    "timeout",
    "killed",
    "lost",
    "device_lost",
    "malformed",
    "interrupted",
    "non_finite",
]
"""``lost``: the trial server died. ``device_lost``: the GPU failed. ``interrupted``: the search itself was ended."""

TRANSIENT: frozenset[str] = frozenset({"killed", "lost", "device_lost", "malformed"})
"""Ends that may come from outside, so that the candidate has a second trial. A timeout would only time out again."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The trial ended in another way; the evidence stays with it."""

    reason: FailureReason
    message: str
    during: str = ""
    traceback: str = ""
    phase_seconds: PhaseSeconds = field(default_factory=dict)
    state: Literal["failed"] = "failed"


Outcome = Completed | OutOfMemory | Failed


def source_of(outcome: Outcome | None) -> Source | None:
    """The earlier trial that the outcome was taken from; ``None`` where there is none."""
    return outcome.source if isinstance(outcome, Completed | OutOfMemory) else None


def process_of(trial_id: str, outcome: Outcome) -> str:
    """Return the id of the trial whose process measured an outcome, which may be a trial of an earlier study."""
    source = source_of(outcome)
    return trial_id if source is None else source.trial_id


def distinct_processes(measured: Iterable[tuple[str, Outcome]]) -> int:
    """Count the processes that measured some outcomes, given with the ids of their trials.

    An outcome that was taken from an earlier trial counts as that trial, however often it was taken. Derived ones do
    not count: no process ran that candidate.
    """
    return len(
        {
            process_of(trial_id, outcome)
            for trial_id, outcome in measured
            if (source := source_of(outcome)) is None or not source.derived
        }
    )


def outcome_document(outcome: Outcome) -> Document:
    """An outcome as JSON-ready data."""
    return dataclasses.asdict(outcome)


def outcome_from_document(document: Document) -> Outcome:
    """The inverse of ``outcome_document``; raises ``ValueError`` on anything malformed."""
    try:
        fields = dict(document)
        if fields.get("source") is not None:
            fields["source"] = Source(**fields["source"])
        match fields.pop("state"):
            case "completed":
                measured = dict(fields.pop("measurement"))
                for name in ("step_seconds_each", "warmup_step_seconds"):
                    measured[name] = tuple(float(s) for s in measured.get(name, ()))
                fields["disturbed"] = tuple(fields.get("disturbed", ()))
                return Completed(Measurement(**measured), **fields)
            case "out_of_memory":
                fields["disturbed"] = tuple(fields.get("disturbed", ()))
                return OutOfMemory(**fields)
            case "failed":
                return Failed(**fields)
            case other:
                raise ValueError(f"unknown state {other!r}")
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"malformed outcome: {error}") from error
