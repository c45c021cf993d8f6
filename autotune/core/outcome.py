"""Describe how a trial is measured and how it ended: completed with a measurement, out of memory, or failed.

A trial process returns one ``Outcome``, as a JSON document; the database stores the same document.
"""

from __future__ import annotations

import functools
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from autotune.core.candidate import Arm, Document
from autotune.core.ceiling import Ceiling
from autotune.core.schema import decode, encode, with_version, without_version


@dataclass(frozen=True, slots=True)
class Effort:
    """How many steps a trial measures. The defaults gave medians within 2 % of the median of 150 steps on an H200."""

    warmup_steps: int = 2
    """Steps run first and not counted. Two, since the first step allocates the optimizer state, so only the second
    reaches the peak memory of training."""
    min_steps: int = 3
    max_steps: int = 12
    target_spread: float = 0.01
    """Stop once half the 95 % interval is below this fraction of the median."""
    max_seconds: float = 2.0
    """Stop after this many measured seconds once two steps are measured (one, where ``max_steps`` is one)."""
    behind_step_seconds: float | None = None
    """Stop after two measured steps that take longer than this: the candidate cannot win any more."""
    max_micro_steps: int = 3
    """Micro-steps to run in place of a longer accumulation. Peak memory and time no longer change from the third on."""
    busy_steps: int = 0
    """Steps to run under the profiler after the timed ones, to measure the share of a step in which the GPU is busy.

    0 leaves it out; more than one gives the mean. The timed steps are not affected."""
    min_seconds: float = 0.0
    """Measure at least so long, if that takes no more than ``max_steps``."""


HOST_BOUND = 0.9
"""A step in which the GPU is busy for a smaller share than this is host-bound or data-bound.

Of nine steps on an H200 whose host has slow cores, two that filled the GPU had 0.92 (bert-large, bf16, 32 × 2) and 0.89
(tf32, 8 × 8). Those with less work in each kernel had 0.84 down to 0.18."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one trial process measured. Times are of one whole optimizer step of the candidate."""

    step_seconds: float
    """Mean of the measured steps. Slow steps are among them. Where not all
    micro-steps were run, the time of the missing ones is added.

    Of batches that differ in length: the mean step of the run, with what its new shapes take."""
    step_seconds_each: tuple[float, ...]
    """Every measured step in order, without warm-up steps and those of new shapes; missing micro-steps are added as in
    ``step_seconds``."""
    relative_spread: float
    """Half the 95 % interval of ``step_seconds``, relative to it; 0 where only one step was measured."""
    samples_per_second: float
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    warmup_step_seconds: tuple[float, ...] = ()
    """Warm-up steps as they were run, without adding missing micro-steps."""
    micro_steps_run: int = 1
    """Micro-steps run in each step; fewer than the candidate's where the missing ones were added."""
    micro_batch_bytes: int | None = None
    """Bytes that the inputs of one micro-step take on the device.

    The Trainer moves the inputs of all micro-steps to the device at once. The peaks count them even where micro-steps
    were left out. ``None`` in records of versions that did not count them."""
    optimizer_seconds: float | None = None
    data_seconds: float | None = None
    """Time between two steps spent waiting for data, included in ``step_seconds``."""
    saving_seconds: float | None = None
    """Time of a step that the user's own code spends in ``torch.save``, which no other figure includes."""
    evaluation_seconds: float | None = None
    """Time of a validation, or of samples that are made, within the loop; no other figure includes it, but the peaks.
    ``None`` where none was seen."""
    evaluates_every: int | None = None
    """Steps from one evaluation to the next; ``None`` where fewer than two were seen, or the distances differ."""
    growth_bytes: int | None = None
    """Bytes by which the memory that is held after a step still grew with each as the trial ended; ``None`` where it
    did not."""
    device_used_bytes: int | None = None
    """Memory in use on the whole device after the last step, by all processes, as NVML reports it."""
    context_bytes: int | None = None
    """Device memory of the trial's process that torch's allocator did not reserve: the CUDA context."""
    allocation_retries: int | None = None
    train_loss: float | None = None
    skipped_steps: int | None = None
    """Steps, warm-up and measured, whose update fp16's gradient scaler skipped; 0 without a scaler."""
    tokens_per_sample: float | None = None
    """Mean tokens of a sample that went into the model as ``input_ids``, without those that its ``attention_mask``
    leaves out; ``None`` where none were seen. Shown for the user's own code: those of a model by name are known."""
    divides_loss: bool = False
    """Whether the Trainer had to be told to divide the loss by the accumulation (``autotune.training.loss``)."""
    stock_settings: tuple[tuple[str, int], ...] = ()
    """Settings of transformers that do the same as levers which autotune applies (``autotune.training.batches``)."""
    trained_tensors: int | None = None
    """Parameters of the model that had a gradient in an update before the timed steps; ``None`` where none was seen."""
    untrained: tuple[str, ...] = ()
    """Names of parameters that require a gradient and had none in any of them: as many as a note names."""
    untrained_tensors: int = 0
    joules_per_sample: float | None = None
    """Mean power of the whole device while steps were measured (from NVML's energy counter), times seconds a sample."""
    compile_seconds: float | None = None
    """Extra time of the warm-up steps, compared with as many measured ones, where ``torch.compile`` compiles in
    them."""
    steady_error: float | None = None
    """Standard error of the mean step whose shapes were all seen before, over ``step_seconds``, which is noise: of
    batches that differ in length, what their lengths do not explain. ``None`` in records of versions without it."""
    steady_step_seconds: float | None = None
    """Mean step of the run once all its shapes were seen; ``step_seconds`` has those that are new in it."""
    new_shape_seconds: float | None = None
    """Extra time of the first step with a shape that is new to the process (kernels are chosen, compiled, loaded).

    ``None`` where no shape was new."""
    shapes_seen: int | None = None
    """Shapes of batches that the trial met; ``None`` where batches are not seen."""
    run_shapes: int | None = None
    """Micro-steps of the run with a shape that is new to a process, by the lengths of the samples; ``None`` where these
    are not known."""
    epoch_shapes: int | None = None
    """New shapes of the first epoch; see ``run_shapes``."""
    new_shapes_in_steps: tuple[tuple[int, int], ...] = ()
    """Pairs of a number of first steps of the run and the number of new shapes in these steps."""
    run_steps: int | None = None
    """Optimizer steps of the run that ``samples_per_second`` is of: an epoch, or what the training asks for."""
    run_epochs: float | None = None
    """Epochs of that run; ``None`` where the training says its steps, and where nothing is known of it."""
    batches_vary: bool = False
    """Whether batches may differ in length, which ``relative_spread`` allows for."""
    worst_batch_tokens: int | None = None
    """Tokens of a row of the largest batch that the user's data can make, with padding: of a sample, or of all samples
    of the batch where they come in one row. The warm-up steps train on such batches."""
    worst_batch_step_seconds: float | None = None
    """Time of a step on the largest batches, as it was run."""
    worst_batch_peak_allocated_bytes: int | None = None
    worst_batch_peak_reserved_bytes: int | None = None
    """Peak memory after the steps on the largest batches; the other peaks are those of the whole trial."""

    gpu_busy_share: float | None = None
    """Seconds of a step during which the GPU executes at least one kernel or copy, over ``step_seconds``.

    Measured in a profiled step after the timed ones; missing micro-steps are added as in ``step_seconds``. Above 0, at
    most 1. ``None`` where it was not asked for, on a CPU, or where the profiler gave no answer."""
    gpu_seconds_by_kind: tuple[tuple[str, float], ...] | None = None
    """Seconds of a step for which the GPU executes each kind of work, by the names of its kernels, the longest first.

    From the same profiled step as ``gpu_busy_share``. ``None`` where that is, and in records of versions without it."""
    host_bytes_to_build: int | None = None
    """Most memory of the host that the trial's first process had held when its model was built, its libraries included.
    ``None`` for the user's own code, and where the kernel does not tell."""
    sample_flops: tuple[float, float] | None = None
    """Arithmetic of a sample of mean length without padding: of its forward pass, and of both passes.

    ``None`` where it was not counted: for the user's own code, where code is compiled or kernels are not torch's."""
    core_wait_share: float | None = None
    """Share of the measured steps' time in which a thread of the trial was ready, and other processes had its core.

    Of the thread, and the rank, that waited longest. ``None`` where the kernel does not tell."""
    cpu_core: int | None = None
    """The core that the process was pinned to; ``None`` where it was not pinned."""

    ranks: int = 1
    """Processes that trained together. Times are those of the slowest, peaks those of the largest, samples and joules
    those of all."""
    micro_step_seconds: float | None = None
    """Median time of a micro-step that adds to gradients without exchanging them; ``None`` where fewer than three
    micro-steps were run, and for one rank."""

    @property
    def steady_share(self) -> float:
        """The run's speed divided by its speed once all batch shapes were seen; at most 1."""
        return (self.steady_step_seconds or self.step_seconds) / self.step_seconds

    @property
    def steady_samples_per_second(self) -> float:
        """Samples per second once all batch shapes were seen."""
        return self.samples_per_second / self.steady_share

    @property
    def first_epoch_samples_per_second(self) -> float:
        """Samples per second in the first epoch, or in the whole run where that is shorter."""
        if self.run_epochs is None or self.run_epochs <= 1 or not self.run_steps or self.epoch_shapes is None:
            return self.samples_per_second
        steps_of_epoch = self.run_steps / self.run_epochs
        shape_seconds = (self.new_shape_seconds or 0.0) * self.epoch_shapes / steps_of_epoch
        step_seconds = self.steady_share * self.step_seconds + shape_seconds
        return self.samples_per_second * self.step_seconds / step_seconds

    def at_speed(self, samples_per_second: float) -> Measurement:
        """Return the measurement at another speed, with its step times changed by the same factor."""
        factor = self.samples_per_second / samples_per_second
        steady = self.steady_step_seconds
        return replace(
            self,
            samples_per_second=samples_per_second,
            step_seconds=self.step_seconds * factor,
            steady_step_seconds=None if steady is None else steady * factor,
        )

    @property
    def known_spread(self) -> float | None:
        """Half the 95 % interval of the step time, relative to it; ``None`` where only one step was timed."""
        return self.relative_spread if len(self.step_seconds_each) > 1 else None

    @property
    def step_deviation(self) -> float:
        """Relative standard deviation of the measured steps; 0 with one step, or where batches differ in length."""
        if len(self.step_seconds_each) < 2 or self.batches_vary:
            return 0.0
        return statistics.stdev(self.step_seconds_each) / statistics.fmean(self.step_seconds_each)

    def judged_bytes(self, arm: Arm) -> int:
        """Return the peak memory that is compared with the line (the most that a feasible trial may reserve).

        This is peak reserved memory. With expandable segments it is peak allocated memory, since reserved memory may
        read 17 % too high there. Such a trial may reserve no more than the line, so completing proves that it fits.
        """
        return self.peak_allocated_bytes if arm.expandable_segments else self.peak_reserved_bytes

    def excess_bytes(self, arm: Arm, ceiling: Ceiling) -> int:
        """Return by how many bytes the trial exceeds its memory limit; 0 or less where it fits."""
        return ceiling.excess_bytes(self.judged_bytes(arm), self.context_bytes)

    def fits(self, arm: Arm, ceiling: Ceiling) -> bool:
        """Return whether a trial of this arm with these peaks stayed within its memory limit."""
        return self.excess_bytes(arm, ceiling) <= 0


PhaseSeconds = dict[str, float]


@dataclass(frozen=True, slots=True)
class Source:
    """The earlier trial whose outcome was used in place of running a trial."""

    trial_id: str
    study: str
    number: int
    derived: bool = False
    """Whether the earlier trial was of another candidate, so that this outcome was derived from it."""

    def describe(self) -> str:
        """Return ``trial 3 of bert-64``, or ``derived from trial 3 of bert-64``."""
        return f"{'derived from ' if self.derived else ''}trial {self.number} of {self.study}"


@dataclass(frozen=True, slots=True)
class Completed:
    """The trial trained and was measured."""

    measurement: Measurement
    phase_seconds: PhaseSeconds = field(default_factory=dict)
    disturbed: tuple[str, ...] = ()
    """What disturbed the trial from outside, each in a few words. Other studies do not reuse a disturbed trial."""
    state: Literal["completed"] = "completed"
    source: Source | None = None
    """``None`` for a trial that was run by this study."""
    others_share: float | None = None
    """Share of its time for which others had the CPU or the GPU; ``None`` where that was not measured, or is small."""
    run_again: bool = True
    """Whether to run a disturbed trial again: the disturbance may be over soon."""


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """The trial needed more memory than its cap. This is a result, not an error."""

    message: str
    where: Literal["device", "host"] = "device"
    during: str = "train"
    """The phase in which it happened: ``model``, ``trainer``, ``train``."""
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    phase_seconds: PhaseSeconds = field(default_factory=dict)
    disturbed: tuple[str, ...] = ()
    """Why less memory than the cap was available. Nothing then follows for the candidate."""
    state: Literal["out_of_memory"] = "out_of_memory"
    source: Source | None = None
    """``None`` for a trial that was run by this study."""


FailureReason = Literal[
    "error", "timeout", "killed", "lost", "device_lost", "malformed", "interrupted", "non_finite", "unavailable",
    "other_training",
]  # fmt: skip
"""``lost``: the trial server died. ``device_lost``: the GPU failed. ``interrupted``: the search itself was ended.
``unavailable``: the training cannot have a setting, at any batch. ``other_training``: with the setting it is another
training (``autotune.tuning.look``)."""

TRANSIENT: frozenset[str] = frozenset({"killed", "lost", "device_lost", "malformed"})
"""Failures that may have an outside cause, so that the candidate is tried a second time.

A timeout is not among them: it would only time out again."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The trial ended in any other way; the fields tell how."""

    reason: FailureReason
    message: str
    during: str = ""
    traceback: str = ""
    phase_seconds: PhaseSeconds = field(default_factory=dict)
    state: Literal["failed"] = "failed"


Outcome = Completed | OutOfMemory | Failed


def source_of(outcome: Outcome | None) -> Source | None:
    """Return the earlier trial that the outcome was taken from; ``None`` where the trial was run."""
    return outcome.source if isinstance(outcome, Completed | OutOfMemory) else None


_KINDS: dict[object, type[Completed] | type[OutOfMemory] | type[Failed]] = {
    "completed": Completed,
    "out_of_memory": OutOfMemory,
    "failed": Failed,
}


def outcome_document(outcome: Outcome) -> Document:
    """Return an outcome as JSON-ready data, as it is sent and stored."""
    return with_version(encode(outcome))


def outcome_from_document(document: Document) -> Outcome:
    """Return the outcome of a document from ``outcome_document``; raises ``ValueError`` where it is malformed."""
    fields = without_version(document)
    kind = _KINDS.get(fields.get("state"))
    if kind is None:
        raise ValueError(f"unknown state {fields.get('state')!r}")
    return decode(fields, kind)


# Names are those of cuBLAS, cuDNN and torch 2.6 to 2.13; no list of them is published.
_KINDS_OF_KERNELS = (
    (
        "attention_backward",
        r"(flash|fmha|mem_eff|attention).*(bwd|backward|bprop)|(bwd|backward).*(flash|fmha|attention)"
        r"|fmha_cutlassb|convert_dq|compute_dot_do|fmha_reduce_head",
    ),
    ("attention", r"flash|fmha|mem_eff|attention|_sdpa_"),
    ("convolution", r"conv|wgrad|dgrad|implicit_gemm|cudnn.*nhwc"),
    ("matrix_product", r"gemm|cutlass|nvjet|xmma|cublas|splitk|gemv|::dot"),
    ("fused_update", r"multi_tensor|fused_?adam"),
    ("normalisation_backward", r"(layer_?norm|rms_?norm|group_?norm|gamma|rowwise).*(grad|backward)|gammabeta"),
    ("normalisation", r"layer_?norm|rms_?norm|group_?norm|rowwisemoments"),
    ("softmax", r"softmax|nll_loss|cross_entropy"),
    ("dropout", r"dropout"),
    ("gather", r"embedding|index|gather|scatter|sort|radix|unique|scan"),
    ("reduction", r"reduce"),
    ("transpose", r"transpose|permute|catarray"),
    ("cast", r"copy.*(bfloat16|half).*float|copy_kernel|bfloat16_copy|_copy_"),
    ("copy", r"memcpy|copy"),
    ("fill", r"memset|fill"),
)


@functools.cache
def kind_of_kernel(name: str) -> str:
    """Return the kind of work of a GPU kernel, from its name; ``elementwise`` where no pattern matches."""
    lower = name.lower()
    return next((kind for kind, pattern in _KINDS_OF_KERNELS if re.search(pattern, lower)), "elementwise")


_MERGED_KINDS = {
    "copy": "cast",
    "transpose": "cast",
    "elementwise_cast": "elementwise",
    "gradient_accumulation": "elementwise",
    "gradient_clipping": "fused_update",
}
"""Kinds of predicted operations that the names of kernels do not tell apart, each with the kind that includes it."""


def merge_kinds(seconds: Mapping[str, float]) -> dict[str, float]:
    """Add up predicted times of kinds that kernel names cannot tell apart, to compare them with measured times."""
    merged: dict[str, float] = {}
    for kind, value in seconds.items():
        name = _MERGED_KINDS.get(kind, kind)
        merged[name] = merged.get(name, 0.0) + value
    return merged
