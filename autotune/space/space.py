"""Define the search space: arms (configurations without batch), per-device batches, and data loader settings."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

from autotune.core.candidate import PRECISIONS, Arm, Candidate, Precision
from autotune.core.errors import DeviceError, InvalidRequestError
from autotune.core.options import CheckpointingChoice, LeverChoice
from autotune.core.outcome import Effort, Measurement
from autotune.core.units import format_groups
from autotune.core.workload import Workload
from autotune.space.arms import changed, excluding, without
from autotune.space.levers import LENGTH_MULTIPLE, LEVERS, PRECISION_PREFERENCE, ROW_MULTIPLE

LOADER_BOUND = 0.1
"""Other data loader settings are tried where a step waits for data for a larger share of its time. A choice."""

# Default of torch's DataLoader: batches that each worker prepares ahead.
DEFAULT_PREFETCH_FACTOR = 2
_MORE_PREFETCH = 4
_FEWEST_WORKERS = 2


@cache
def plain_loader(arm: Arm) -> Arm:
    """Return an arm with the default data loader settings, which leaves its computation and memory unchanged."""
    return dataclasses.replace(arm, dataloader_num_workers=0, dataloader_prefetch_factor=None)


def waits_for_data(measured: Measurement) -> float:
    """Return the share of a step's time that is spent waiting for data."""
    return (measured.data_seconds or 0.0) / measured.step_seconds


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def next_loader(
    best: Candidate, measured: Measurement | None, tried: Collection[Candidate], cores: int, own_workers: int = 0
) -> Candidate | None:
    """Return the best candidate with the data loader setting to try next.

    ``None`` if it waits for at most ``LOADER_BOUND`` of a step, or no untried setting is left. Workers are doubled up
    to the number of cores: a caller passes the faster candidate as ``best``. Then more batches are prefetched. An arm
    without workers loads with ``own_workers``, which the user's own code sets.
    """
    if measured is None or waits_for_data(measured) <= LOADER_BOUND:
        return None
    arm = best.arm
    workers = arm.dataloader_num_workers or own_workers
    variants = [dataclasses.replace(arm, dataloader_num_workers=max(_FEWEST_WORKERS, 2 * workers))]
    if arm.dataloader_num_workers:
        variants.append(dataclasses.replace(arm, dataloader_prefetch_factor=_MORE_PREFETCH))
    for variant in variants:
        candidate = dataclasses.replace(best, arm=variant)
        if variant.dataloader_num_workers <= cores and candidate not in tried:
            return candidate
    return None


def patience(effort: Effort, arm: Arm) -> Effort:
    """Return an effort (the limits of a measurement) with more steps for an arm with data loader workers.

    Workers deliver batches in bursts, so that the mean of few steps says little.
    """
    if not arm.dataloader_num_workers:
        return effort
    return dataclasses.replace(
        effort,
        min_steps=max(effort.min_steps, 2 * arm.dataloader_num_workers),
        max_steps=max(effort.max_steps, 4 * arm.dataloader_num_workers),
        max_seconds=2 * effort.max_seconds,
    )


def batches_ahead(arm: Arm) -> int:
    """Return how many micro-batches an arm's data loader workers may have prefetched at most."""
    return arm.dataloader_num_workers * (arm.dataloader_prefetch_factor or DEFAULT_PREFETCH_FACTOR)


DEFAULT_MULTIPLE = 8
# Tried one after another where no batch of the default multiple is possible or fits.
FALLBACK_MULTIPLES = (4, 2, 1)
# Between multiples of 8 that are farther apart than this factor, even batches are tried with them. A choice.
_FAR = 4
# Largest batch to try where no effective batch limits it; far larger than is useful. A choice.
LARGEST_FREE_BATCH = 65536


@dataclass(frozen=True)
class Batches:
    """The per-device batches to search, and the accumulation of each.

    With an effective batch, ``per-device batch × accumulation × world size`` is exactly that. Without one, the batch is
    free and accumulation is 1.
    """

    effective_batch: int | None
    world_size: int = 1
    multiple: int | None = None
    """Only multiples of this are tried; ``None`` means 8, then 4, 2 and 1."""
    samples: int | None = None
    """Number of samples in the dataset of a device, the largest possible batch. ``None`` for synthetic samples."""
    only: int | None = None
    """The one per-device batch that the user's code can be run with; ``None``: any."""
    own_accumulation: int = 1
    """Accumulation of a free batch, where the user's code has one of its own."""
    sample_tokens: int | None = None
    """Tokens of a sample, where the effective batch was given in tokens; ``None`` where it was given in samples."""
    shared_by: int = 1
    """Devices that share each sample."""

    def __post_init__(self) -> None:
        """Raise ``InvalidRequestError`` where no per-device batch is possible, naming the option to change."""
        if self.world_size < 1:
            raise InvalidRequestError(f"--world-size {self.world_size} is not a number of devices", "use 1 or more")
        if self.multiple is not None and self.multiple < 1:
            raise InvalidRequestError(f"--batch-multiple {self.multiple} is not a multiple", "use 1 or more")
        if self.effective_batch is None:
            if self.multiple is not None and self.multiple > LARGEST_FREE_BATCH:
                raise InvalidRequestError(
                    f"--batch-multiple {self.multiple} is beyond the largest batch that is tried",
                    f"use {LARGEST_FREE_BATCH} or less",
                )
            return
        if self.effective_batch < 1:
            raise InvalidRequestError(f"--effective-batch {self.effective_batch} is not a batch", "use 1 or more")
        if self.effective_batch % self.world_size:
            lower = self.effective_batch // self.world_size * self.world_size
            raise InvalidRequestError(
                f"{self.option(self.effective_batch)} cannot be shared equally by "
                f"{format_groups(self.world_size, self.shared_by)}",
                f"use {self.option(*filter(None, (lower, lower + self.world_size)))}",
            )
        if self.multiple and self._per_device % self.multiple:
            raise InvalidRequestError(
                f"no multiple of --batch-multiple {self.multiple} divides the {self._per_device} samples that a "
                f"{'device' if self.shared_by == 1 else 'group of devices'} gets of "
                f"{self.option(self.effective_batch)}",
                f"these multiples would work: {', '.join(map(str, _divisors(self._per_device)))}; "
                "or leave --batch-multiple out",
            )

    def option(self, *samples: int) -> str:
        """Return the option for one of these effective batches, in the user's unit: ``--effective-tokens 4096``."""
        unit, per_sample = ("batch", 1) if self.sample_tokens is None else ("tokens", self.sample_tokens)
        return f"--effective-{unit} {' or '.join(str(count * per_sample) for count in samples)}"

    @property
    def _per_device(self) -> int:
        """Samples per device and optimizer step."""
        assert self.effective_batch is not None
        return self.effective_batch // self.world_size

    @property
    def _shares(self) -> list[int]:
        """Per-device batches that divide the device's part of the effective batch, none larger than the dataset."""
        return [batch for batch in _divisors(self._per_device) if self._is_loaded(batch)]

    def _is_loaded(self, batch: int) -> bool:
        """Return whether the dataset has enough samples for a batch of this size."""
        return self.samples is None or batch <= self.samples

    @property
    def most(self) -> int:
        """Largest per-device batch to try where no effective batch limits it."""
        return LARGEST_FREE_BATCH if self.samples is None else min(LARGEST_FREE_BATCH, self.samples)

    def levels(self) -> tuple[int, ...]:
        """Return the multiples to search, descending. The next is used only where no batch of the one before fits."""
        if self.multiple:
            return (self.multiple,)
        return tuple(multiple for multiple in (DEFAULT_MULTIPLE, *FALLBACK_MULTIPLES) if multiple <= self.most)

    def level(self, batch: int) -> int:
        """Return the largest multiple in ``levels`` that divides a valid per-device batch.

        Even batches between distant multiples of 8 (``_between``) are tried with these, so that 8 is returned for them.
        """
        if batch in self._between:
            return DEFAULT_MULTIPLE
        return next(multiple for multiple in self.levels() if batch % multiple == 0)

    @cached_property
    def _between(self) -> tuple[int, ...]:
        """Even batches between multiples of 8 that are more than a factor of ``_FAR`` apart, which would leave a gap.

        For an effective batch of 136, whose multiples of 8 are 8 and 136, these are 68 and 34.
        """
        if self.multiple is not None or self.effective_batch is None:
            return ()
        found: list[int] = []
        multiples = [batch for batch in self._shares if batch % DEFAULT_MULTIPLE == 0]
        for small, large in itertools.pairwise(multiples):
            while large > _FAR * small:
                # Without an even batch in between, ``small`` ends the loop, and is left out below.
                large = max((b for b in self._shares if small < b < large and b % 2 == 0), default=small)
                found.append(large)
        return tuple(batch for batch in found if batch not in multiples)

    def at_level(self, multiple: int) -> tuple[int, ...]:
        """Return the per-device batches whose ``level`` is this multiple, ascending.

        With an effective batch they divide a device's share of it. A free batch (without an effective batch) has only
        the first batches to try here: powers of two times the largest multiple, and each smaller multiple itself. A
        search may try any multiple between them.
        """
        if self.only is not None:
            return (self.only,) if self.level(self.only) == multiple else ()
        if self.effective_batch is None:
            if multiple != self.levels()[0]:
                return (multiple,)
            ladder = itertools.takewhile(lambda b: b <= self.most, (multiple * 2**i for i in range(32)))
            return tuple(ladder)
        return tuple(
            b for b in self._shares if (not self.multiple or b % self.multiple == 0) and self.level(b) == multiple
        )

    @cached_property
    def every(self) -> list[int]:
        """The batches of all levels, ascending; of a free batch the first ones to try."""
        return sorted(batch for level in self.levels() for batch in self.at_level(level))

    def accumulation(self, batch: int) -> int:
        """Return the accumulation steps that go with a per-device batch."""
        return self.own_accumulation if self.effective_batch is None else self._per_device // batch

    def valid(self, batch: int) -> bool:
        """Return whether a per-device batch belongs to the space."""
        if batch < 1 or (self.multiple and batch % self.multiple) or self.only not in (None, batch):
            return False
        if self.effective_batch is None:
            return batch <= self.most
        return self._per_device % batch == 0 and self._is_loaded(batch)

    def baseline(self) -> tuple[int, int]:
        """Return batch size and accumulation of the ``TrainingArguments`` defaults, at the same effective batch.

        The default per-device batch is 8. Where 8 does not divide the effective batch, it is the largest divisor below
        8. A dataset of fewer samples limits it, too.
        """
        if self.only is not None:
            return self.only, self.accumulation(self.only)
        if self.effective_batch is None:
            return min(DEFAULT_MULTIPLE, self.most), self.own_accumulation
        batch = max(share for share in self._shares if share <= DEFAULT_MULTIPLE)
        return batch, self._per_device // batch


def _divisors(number: int) -> list[int]:
    """Return all divisors of a number, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


@dataclass(frozen=True)
class Space:
    """All candidates of one search. Arms are in the order in which they are tried."""

    arms: tuple[Arm, ...]
    batches: Batches
    baseline: Candidate | None = None
    """The ``TrainingArguments`` defaults, or the user's own settings: speed-ups are relative to these."""
    late: frozenset[str] = frozenset()
    """Levers that are tried on the best candidates only, so that no arm has them."""
    shapes_vary: bool = False
    """Whether batches differ in length in arms without ``length_multiple``."""
    multiples: tuple[int, int] = (LENGTH_MULTIPLE, ROW_MULTIPLE)
    """The values of ``length_multiple``: of batches that are padded, and of rows that are filled."""

    def plain(self, arm: Arm) -> Arm:
        """Return an arm of a candidate as it is in ``arms``: without late levers and data loader settings."""
        return without(plain_loader(arm), self.late)

    @cached_property
    def saving(self) -> Space | None:
        """The space with every memory-saving late lever in each arm, for models that do not fit otherwise.

        ``None`` where there is no such lever, or no arm can have them all.
        """
        arms = self._arms_with(self.resorts)
        return replace(self, arms=arms, late=self.late - self.resorts) if self.resorts and arms else None

    @cached_property
    def resorts(self) -> frozenset[str]:
        """The late levers that save memory, to be tried with every arm where none fits."""
        return frozenset(row.name for row in LEVERS if row.is_resort) & self.late

    @cached_property
    def saving_arms(self) -> tuple[Arm, ...]:
        """Arms with all memory-saving late levers, followed by arms with one of them; none is in ``arms``."""
        arms = [
            *self._arms_with(self.resorts),
            *(arm for name in sorted(self.resorts) for arm in self._arms_with({name})),
        ]
        return tuple(arm for arm in dict.fromkeys(arms) if arm not in self.arms)

    def _arms_with(self, names: Collection[str]) -> tuple[Arm, ...]:
        """Return every arm with the settings ``names`` turned on, except where its settings exclude one of them."""
        arms = (changed(arm, **dict.fromkeys(names, True)) for arm in self.arms)
        return tuple(arm for arm in arms if excluding(arm) is None)

    def candidate(self, arm: Arm, batch: int) -> Candidate:
        """Return the candidate of an arm at a per-device batch."""
        return Candidate(arm, batch, self.batches.accumulation(batch))

    def contains(self, candidate: Candidate) -> bool:
        """Return whether the candidate belongs to this space."""
        batch = candidate.per_device_train_batch_size
        return (
            self.plain(candidate.arm) in self.arms
            # A CUDA graph has one shape, so that batches must come in few lengths.
            and not (self.shapes_vary and candidate.arm.cuda_graphs and candidate.arm.length_multiple is None)
            and self.batches.valid(batch)
            and candidate.gradient_accumulation_steps == self.batches.accumulation(batch)
        )

    def has_arm(self, arm: Arm) -> bool:
        """Return whether the space has this arm; late levers (except those that save memory) and loaders may differ."""
        return without(plain_loader(arm), self.late - self.resorts) in self.arms


def _precisions_for_dtype(workload: Workload) -> tuple[Precision, ...]:
    """Return the precisions that make sense with the workload's weight dtype.

    16-bit weights have no float32 products for tf32, and torch's gradient scaler refuses 16-bit gradients, so fp16
    autocast needs weights that are trained in float32, as adapters are.
    """
    if workload.dtype == "float32":
        return PRECISIONS
    if workload.dtype == "bfloat16":
        return ("fp32", "bf16")
    return ("fp32", "fp16") if workload.trained_dtype == "float32" else ("fp32",)


def choose_precisions(
    asked: Sequence[Precision] | None, device_has: Sequence[Precision], device_name: str, workload: Workload
) -> tuple[Precision, ...]:
    """Return the precisions to search, the preferred first: those ``asked`` for, else all that are usable.

    Raises ``DeviceError`` for one that the device lacks, ``InvalidRequestError`` for one that the weights rule out.
    """
    usable = _precisions_for_dtype(workload)
    for precision in asked or ():
        if precision not in device_has:
            raise DeviceError(
                f"{device_name} has no {precision}", f"it has {', '.join(device_has)}; leave {precision} out"
            )
        if precision not in usable:
            is_own = workload.source is not None
            raise InvalidRequestError(
                f"--precision {precision} does not go with "
                + (f"the {workload.dtype} weights of {workload.model}" if is_own else f"--dtype {workload.dtype}"),
                f"with these weights use {' or '.join(usable)}" + ("" if is_own else ", or --dtype float32"),
            )
    wanted = asked or [p for p in device_has if p in usable]
    return tuple(p for p in PRECISION_PREFERENCE if p in wanted)


def choice_of(choice: LeverChoice) -> tuple[bool, ...]:
    """Return the values to try for ``auto``, ``on`` or ``off``, the cheaper one first."""
    return {"on": (True,), "off": (False,), "auto": (False, True)}[choice]


def choose_arms(
    precisions: Sequence[Precision],
    checkpointing: CheckpointingChoice,
    attn_implementations: Sequence[str],
    optims: Sequence[str],
    *,
    model_checkpoints: bool,
    expandable_segments: LeverChoice = "off",
    liger: LeverChoice = "off",
    experts: Sequence[str | None] = (None,),
    settings: Mapping[str, Any] | None = None,
) -> tuple[Arm, ...]:
    """Return every combination of the given values as an arm, in the order in which a search tries them.

    Arms with expandable segments come last: they are never faster at the same batch, so they are worth trying only
    where memory kept the best arm from a larger batch. Within each half, arms without checkpointing come first. The
    precision varies fastest. Every arm has the ``settings``; arms whose settings exclude each other are left out.
    Raises ``InvalidRequestError`` where no arm is left.
    """
    if checkpointing == "on" and not model_checkpoints:
        raise InvalidRequestError(
            "this model does not support gradient checkpointing", "leave --gradient-checkpointing at auto or off"
        )
    choices = choice_of(checkpointing if model_checkpoints else "off")
    arms = (
        changed(
            Arm(precision, checkpointed, attention, optim, expands, use_liger_kernel=fused),
            experts_implementation=how,
            **(settings or {}),
        )
        for expands in choice_of(expandable_segments)
        for checkpointed in choices
        for attention in attn_implementations
        for optim in optims
        for how in experts
        for fused in choice_of(liger)
        for precision in precisions
    )
    conflicts = {arm: excluding(arm) for arm in arms}
    allowed = tuple(arm for arm, conflict in conflicts.items() if conflict is None)
    if not allowed:
        raise InvalidRequestError(
            f"nothing is left to search: {next(iter(conflicts.values()))}", "turn one of the two off"
        )
    return allowed
