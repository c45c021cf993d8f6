"""Describe a rehearsal: what a long run does beyond the steps that trials measure, done once with the winner.

That is an evaluation, a step on the longest samples, a checkpoint, and memory of the host in all processes. A part
that takes long is run at several sizes, from which the whole is extrapolated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from autotune.core.candidate import Candidate
from autotune.core.placement import RankDevices
from autotune.core.units import format_bytes, format_seconds, plural

NOISE_BYTES = 2**20
"""Growth between two sizes of an evaluation that says nothing: a process's resident memory differs by some hundred KiB
from run to run. A choice."""


@dataclass(frozen=True, slots=True)
class RehearsalWork:
    """The work of a rehearsal, whose result is a ``Rehearsal``."""

    candidate: Candidate
    devices: RankDevices
    cap_bytes: int
    line_bytes: int
    """The limit below which the device's peak should stay."""
    seed: int
    host_bytes: int | None = None
    """Host memory that the processes may hold; ``None`` on a CPU, where the device's memory is the host's."""
    seconds: float = 10.0
    """About how long each part may take."""
    unmodified: bool = False
    """Keep the settings of the user's own code."""
    world_size: int = 1
    """Devices among which a real run divides its batches."""
    data_folder: str | None = None
    """The folder of a dataset that was read, for a model by name; ``None`` without one."""
    evaluation_batch: int | None = None
    """``per_device_eval_batch_size``, in place of the training's own."""


@dataclass(frozen=True, slots=True)
class Part:
    """The measured memory and time of some batches of an evaluation."""

    batches: int
    device_bytes: int
    """Peak of the device, weights and optimizer states included; the largest of several devices."""
    host_bytes: int
    """Peak of the training's process in the host's memory; of several ranks together."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Whole:
    """An evaluation over all of its samples."""

    device_bytes: int
    host_bytes: int
    seconds: float
    kept_bytes: int
    """Outputs of all samples that device or host keeps until the metrics are computed."""


def extrapolated(small: Part, large: Part, batches: int, flushed_after: int | None) -> Whole:
    """Extrapolate memory and time of a whole evaluation of ``batches`` from two measured parts.

    ``flushed_after``: number of batches after which outputs move from the device to the host.
    """
    added_batches = large.batches - small.batches

    def peak_after(count: int, low: int, high: int) -> int:
        """Return the peak after ``count`` batches, on the line through the peaks of the small and the large part."""
        slope = (high - low) / added_batches if added_batches > 0 and high - low > NOISE_BYTES else 0.0
        return max(low, high, round(high + slope * (count - large.batches)))

    held_on_device = min(batches, flushed_after or batches)
    device = peak_after(held_on_device, small.device_bytes, large.device_bytes)
    host = peak_after(batches, small.host_bytes, large.host_bytes)
    # The difference of both parts leaves out what only the first batches take, such as compiling.
    batch_seconds = (
        (large.seconds - small.seconds) / added_batches if added_batches > 0 else large.seconds / large.batches
    )
    seconds = large.seconds + max(0.0, batch_seconds) * (batches - large.batches)
    kept = max(device - large.device_bytes, host - large.host_bytes, 0)
    return Whole(device, host, seconds, kept)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Memory and time of the training's evaluation, and settings with which it fits."""

    batch: int
    """The training's own ``per_device_eval_batch_size``."""
    samples: int | None
    """Of the largest evaluation set; ``None`` where it has no length."""
    batches_run: int
    whole: Whole | None
    """With this batch, over all samples; ``None`` where the first batch is out of memory."""
    fits: bool
    settings: dict[str, int] = field(default_factory=dict)
    """Settings with which it fits, by field of ``TrainingArguments``; empty where it fits, or where nothing helps."""
    with_settings: Whole | None = None
    """The evaluation with ``settings``, over all samples."""
    left_bytes: int = 0
    """Device memory that an evaluation leaves behind, as by a copy of the weights: later steps need that much more."""
    of_loop: bool = False
    """Whether a loop of the user's own evaluates: ``settings`` are then arguments of its ``DataLoader``."""
    of_training_data: bool = False
    """Whether some samples of the training were evaluated, since no evaluation set is known."""
    loader_key: str | None = None
    """The line that makes a loop's ``DataLoader``, and its number there; ``None`` where its batch cannot be changed."""


@dataclass(frozen=True, slots=True)
class LongestBatch:
    """A training step on a batch of the longest samples of the training data."""

    samples: int
    tokens: int
    """Of its longest sample."""
    peak_bytes: int | None
    """Peak of a micro-step on it; ``None`` where it is out of memory."""
    fits: bool
    read: int
    """Samples whose length was read."""
    of: int
    """Samples of the data."""


@dataclass(frozen=True, slots=True)
class Saving:
    """What writing a checkpoint takes."""

    device_bytes: int | None
    """Peak while it was written; ``None`` where it is out of memory."""
    host_bytes: int | None
    """Of all ranks; with FSDP, rank 0 gathers all weights, then the whole state of the optimizer."""
    seconds: float
    fits: bool
    ranks: int = 1
    host_limit_bytes: int | None = None
    is_computed: bool = False
    """Whether it was too large to be written here, and its needs were computed from the sizes of what is gathered."""


@dataclass(frozen=True, slots=True)
class HostUse:
    """Memory of the host that all processes of the training hold together, data loader workers included."""

    most_bytes: int
    growth_bytes: int | None
    """By how much it still grew in each of the last steps; ``None`` where it did not."""
    processes: int
    limit_bytes: int
    steps: int | None
    """Of an epoch; ``None`` where that is not known."""
    copied_bytes: int
    """The most by which it can grow as data loader workers copy the pages that they share with the training's process:
    all that this held when they were forked."""

    @property
    def steps_left(self) -> int | None:
        """The number of steps until the host's limit; ``None`` where memory does not grow that far.

        It grows until the epoch ends, or until everything is copied.
        """
        if not self.growth_bytes or self.steps is None:
            return None
        free_bytes = max(0, self.limit_bytes - self.most_bytes)
        largest_growth_bytes = min(self.copied_bytes, self.growth_bytes * self.steps)
        return free_bytes // self.growth_bytes if free_bytes < largest_growth_bytes else None


@dataclass(frozen=True, slots=True)
class LastStep:
    """An epoch's last accumulation, where it has fewer micro-batches than others and is trained wrongly."""

    batches: int
    """Micro-batches of an epoch."""
    accumulation: int
    is_made: bool
    """Whether the optimizer steps after these micro-batches. Each then counts as little as in a whole step."""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """The findings of a rehearsal; ``None`` for parts that the training lacks, or that could not be looked at."""

    evaluation: Evaluation | None = None
    longest: LongestBatch | None = None
    saving: Saving | None = None
    host: HostUse | None = None
    last_step: LastStep | None = None
    growth_bytes: int | None = None
    """By how much the device's memory still grew in each of the last steps; ``None`` where it did not."""
    peak_bytes: int | None = None
    """The device's peak in ordinary steps, before the other parts."""
    line_bytes: int | None = None
    unknown: tuple[str, ...] = ()
    """The parts that could not be looked at, each with the reason."""
    problem: str | None = None
    """Why nothing could be looked at; ``None`` where the rehearsal took place."""
    seconds: float = 0.0
    failed_rank: int | None = None
    """The rank whose error, or lack of memory, has ended all of several ranks; ``None`` without one."""

    @property
    def loader_batches(self) -> dict[str, int]:
        """The batch size that fits, by the ``loader_key`` of a validation's ``DataLoader``; empty where all fits."""
        found = self.evaluation
        if self.problem is not None or found is None or found.loader_key is None:
            return {}
        return {found.loader_key: found.settings["batch_size"]} if found.settings else {}

    @property
    def left_peak_bytes(self) -> int | None:
        """The peak memory of a step after an evaluation; ``None`` where an evaluation does not raise it."""
        left = self.evaluation.left_bytes if self.evaluation is not None else 0
        return self.peak_bytes + left if self.peak_bytes is not None and left > NOISE_BYTES else None

    @property
    def needs_less(self) -> str | None:
        """What runs out of memory with this batch but may fit with a smaller one, in words; ``None`` where all fits."""
        return None if self.problem is not None else next(self._of_batch(), None)

    @property
    def alarms(self) -> list[str]:
        """Problems that would end the run early, with advice."""
        return [] if self.problem is not None else list(self._alarms())

    def _alarms(self) -> Iterator[str]:
        """Yield ``alarms``: of evaluation, longest batch, checkpoint, growing memory and the host."""
        line = format_bytes(self.line_bytes or 0)
        if (found := self.evaluation) is not None and not found.fits:
            yield _evaluation_alarm(found, line)
        yield from (
            f"{each}, and nothing smaller was found: cut the longest samples, or search with --max-batch"
            for each in self._of_batch()
        )
        if (saved := self.saving) is not None and not saved.fits:
            yield _saving_alarm(saved, line)
        if self.growth_bytes is not None and self.line_bytes is not None:
            left = max(0, self.line_bytes - (self.peak_bytes or 0)) // self.growth_bytes
            yield (
                f"memory grows by {format_bytes(self.growth_bytes)} a step: the limit is reached after about {left:,} "
                "steps, if something is kept of each, such as a loss with its graph"
            )
        if (host := self.host) is not None and self.growth_bytes is None:
            yield from _host_alarm(host)

    def _of_batch(self) -> Iterator[str]:
        """Yield, in words, the parts that run out of memory with this batch, and may fit with a smaller one."""
        line, found = format_bytes(self.line_bytes or 0), self.evaluation
        if self.left_peak_bytes is not None and found is not None and self.left_peak_bytes > (self.line_bytes or 0):
            yield (
                f"an evaluation leaves {format_bytes(found.left_bytes)} behind, such as a copy of the weights: with it "
                f"the next step needs {format_bytes(self.left_peak_bytes)}, where {line} fit"
            )
        if (batch := self.longest) is not None and not batch.fits:
            needs = "is out of memory" if batch.peak_bytes is None else f"needs {format_bytes(batch.peak_bytes)}"
            yield (
                f"a batch of the longest samples ({batch.samples} of up to {batch.tokens:,} tokens) {needs}, where "
                f"{line} fit"
            )

    @property
    def sentences(self) -> list[str]:
        """Sentences on what works, and on what could not be checked."""
        if self.problem is not None:
            return [f"what comes after the first steps of a run was not looked at: {self.problem}"]
        lines = []
        if (found := self.evaluation) is not None and found.whole is not None and found.fits:
            needs = f"needs {format_bytes(found.whole.device_bytes)} (batches of {found.batch}"
            of = f" of {found.samples:,} samples" if found.samples is not None else ""
            lines.append(
                f"an evaluation {needs}; {found.batches_run} of the training's samples were run on each device)"
                if found.of_training_data
                else f"an evaluation{of} takes about {format_seconds(found.whole.seconds)} and {needs}; "
                f"{found.batches_run} were run)"
            )
        if (saved := self.saving) is not None and saved.ranks > 1 and saved.fits:
            lines.append(f"a checkpoint needs {_saving_bytes(saved)}")
        if (batch := self.longest) is not None and batch.fits and batch.peak_bytes is not None:
            all_read = "" if batch.read >= batch.of else f"; {batch.read:,} of {batch.of:,} samples were read"
            lines.append(
                f"a batch of the longest samples (up to {batch.tokens:,} tokens) needs "
                f"{format_bytes(batch.peak_bytes)}{all_read}"
            )
        if (last := self.last_step) is not None:
            lines.append(_last_step_sentence(last))
        return [*lines, *(f"not looked at: {each}" for each in self.unknown)]


def _saving_bytes(saved: Saving) -> str:
    """Return in words the memory that writing a checkpoint needs."""
    device = "" if saved.device_bytes is None else f"{format_bytes(saved.device_bytes)} of a device"
    host = "" if saved.host_bytes is None else f"{format_bytes(saved.host_bytes)} of the host's memory for all ranks"
    computed = " (computed, since it is too large to be written here)" if saved.is_computed else ""
    return " and ".join(filter(None, (device, host))) + computed


def _saving_alarm(saved: Saving, line: str) -> str:
    """Return the warning that writing a checkpoint needs too much memory: of the host, or of the device (``line``)."""
    needs = "is out of memory" if saved.device_bytes is None else f"needs {format_bytes(saved.device_bytes)}"
    host, limit = saved.host_bytes, saved.host_limit_bytes
    if saved.device_bytes is not None and host is not None and limit is not None and host > limit:
        cure = "save_only_model=True, or fsdp_config's state_dict_type=SHARDED_STATE_DICT, gathers less"
        return f"to write a checkpoint needs {_saving_bytes(saved)}, where {format_bytes(limit)} are free: {cure}"
    return f"to write a checkpoint {needs}, where {line} fit: save without copies of the model"


def _evaluation_alarm(found: Evaluation, line: str) -> str:
    """Return the warning that an evaluation does not fit below ``line``, with settings that do where they are known."""
    whole = found.whole
    if whole is None:
        needs = f"batches of {found.batch} are out of memory"
    else:
        needs = f"{plural(found.samples or 0, 'sample')} need {format_bytes(whole.device_bytes)}"
        if whole.kept_bytes:
            needs += f", of which {format_bytes(whole.kept_bytes)} are outputs"
        if whole.host_bytes:
            needs += f" (and {format_bytes(whole.host_bytes)} of the host)"
    alarm = f"the evaluation does not fit: {needs}, where {line} fit"
    fitting = ", ".join(f"{name}={value}" for name, value in found.settings.items())
    if found.of_loop:
        if fitting:
            sets = ", and autotune run sets it" if found.loader_key else ""
            return f"{alarm}; {fitting} of its DataLoader does{sets}"
        if whole is None:
            return f"{alarm}; have its DataLoader make smaller ones"
        cure = "compute the metrics batch by batch, or evaluate fewer samples"
        return f"{alarm}, and no smaller batch changes that: {cure}"
    if fitting:
        return f"{alarm}; {fitting} does, and is exported"
    cure = "what it makes beside its batches, such as copies of the weights, is too large"
    if whole is not None:
        cure = (
            "keep less of the outputs with preprocess_logits_for_metrics, compute the metrics batch by batch "
            "(batch_eval_metrics), or evaluate fewer samples"
        )
    return f"{alarm}, and no per_device_eval_batch_size or eval_accumulation_steps changes that: {cure}"


def _last_step_sentence(last: LastStep) -> str:
    """Return a sentence on the shorter accumulation at the end of an epoch."""
    left = last.batches % last.accumulation
    of_epoch = f"an epoch ends with an accumulation of {left} in place of {last.accumulation} micro-batches"
    if last.is_made:
        return (
            f"{of_epoch}, each weighted as in a whole step: the gradients of that step are about {left} / "
            f"{last.accumulation} as large; divide its loss by {left}"
        )
    return f"{of_epoch}, after which the optimizer does not step: have it step after the last micro-batch, too"


def _host_alarm(host: HostUse) -> Iterator[str]:
    """Yield a warning where processes of the training use too much of the host's memory."""
    held = f"{host.processes} processes of the training hold {format_bytes(host.most_bytes)}"
    if host.most_bytes > host.limit_bytes:
        limit = format_bytes(host.limit_bytes)
        yield f"{held} of the host's memory, more than {limit}: use fewer dataloader_num_workers"
    elif host.steps_left is not None:
        yield (
            f"{held} of the host's memory, {format_bytes(host.growth_bytes or 0)} more in each step: "
            f"{format_bytes(host.limit_bytes)} are reached after about {host.steps_left:,} of {host.steps:,} steps of "
            "an epoch; each process that loads data gets a copy of what it reads of Python objects, so use fewer "
            "dataloader_num_workers, or keep the data in arrays or in a datasets.Dataset"
        )
