"""Compute what follows from the settings of an arm, from the rows of the table of levers.

Which arms need the same memory, which of two is never slower, which is preferred of two that are as fast, what is
exported, and which packages are needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from functools import cache
from typing import Any

from autotune.core.candidate import Arm
from autotune.core.workload import Workload
from autotune.space.features import optim_package
from autotune.space.levers import BY_NAME, LENGTH_MULTIPLE, LEVERS, ROW_MULTIPLE

_DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Arm)}
_BY_PREFERENCE = sorted((row for row in LEVERS if row.preference is not None), key=lambda row: row.preference or 0)


def changed(arm: Arm, **values: Any) -> Arm:
    """Return an arm with other settings. Settings that have no effect beside these get their defaults."""
    return _changed(arm, tuple(values.items()))


# Cached: a search asks for the same arms again and again, for all its candidates after each trial.
@cache
def _changed(arm: Arm, values: tuple[tuple[str, Any], ...]) -> Arm:
    """Return ``changed``, with the settings as a tuple, which can be a key of the cache."""
    other = dataclasses.replace(arm, **dict(values))
    idle = [
        row.name
        for row in LEVERS
        if (row.part_of and getattr(other, row.part_of) == _DEFAULTS[row.part_of])
        or (row.is_idle and row.is_idle(other))
    ]
    return dataclasses.replace(other, **{name: _DEFAULTS[name] for name in idle})


def with_lever(
    arm: Arm, name: str, among: Collection[str], multiples: tuple[int, int] = (LENGTH_MULTIPLE, ROW_MULTIPLE)
) -> Arm:
    """Return an arm with the first value of a lever to try, and with the setting that the lever is part of.

    Rows without padding are also filled if ``length_multiple`` is ``among`` the levers. ``multiples`` has the tokens to
    pad batches to multiples of, and to fill rows to.
    """
    row = BY_NAME[name]
    whole = {row.part_of: BY_NAME[row.part_of].values[1]} if row.part_of else {}
    other = changed(arm, **whole, **{name: multiples[0] if name == "length_multiple" else row.values[1]})
    if other.padding_free and name in ("padding_free", "length_multiple") and "length_multiple" in among:
        other = changed(other, length_multiple=multiples[1], unpadded=False)
    return other


def without(arm: Arm, names: Iterable[str]) -> Arm:
    """Return an arm with the defaults of some settings."""
    return changed(arm, **{name: _DEFAULTS[name] for name in names})


@cache
def memory_class(arm: Arm) -> Arm:
    """Return the arm that represents all arms with the same peak memory: fp16 for bf16, fp32 for tf32, unpinned."""
    values = {row.name: _DEFAULTS[row.name] for row in LEVERS if row.memory == "none"}
    for row in LEVERS:
        for value, twin in row.alike:
            if getattr(arm, row.name) == value:
                values[row.name] = twin
    return dataclasses.replace(arm, **values)


@cache
def prediction_class(arm: Arm) -> Arm:
    """Return the arm that represents all arms that allocate the same bytes, however the allocator reserves them."""
    reserving = {row.name: _DEFAULTS[row.name] for row in LEVERS if row.memory == "reserved"}
    return dataclasses.replace(memory_class(arm), **reserving)


# Settings that are not traced, since their prediction follows from that of the arm without them.
_DERIVED = ("cuda_graphs", "length_multiple", "unpadded", "padding_free", "checkpointed_layers")


def predicted_from(arm: Arm) -> tuple[Arm, Arm]:
    """Return the two arms whose traced steps say what an arm needs: the arm without settings that are not traced, and
    the same without checkpointing, for its layers that recompute nothing."""
    plain = without(arm, _DERIVED)
    return plain, changed(plain, gradient_checkpointing=False)


def as_asked(arm: Arm) -> Arm:
    """Return the arm to ask a prediction for: settings on which memory does not depend have their defaults."""
    return without(arm, [row.name for row in LEVERS if row.memory == "none"])


def arm_that_computes(arm: Arm) -> Arm:
    """Return the arm whose trace has the same operations as a step of an arm.

    A rank that keeps a part of the model computes what one with all of it does, so that under FSDP it is DDP's.
    """
    return dataclasses.replace(
        arm, **{row.name: row.operations(getattr(arm, row.name)) for row in LEVERS if row.operations}
    )


@cache
def needs_at_least(arm: Arm, other: Arm) -> bool:
    """Return whether an arm needs at least as much memory as another: it saves no more, and is the same otherwise."""
    for row in LEVERS:
        if row.saving is not None:
            if row.saving(arm) > row.saving(other):
                return False
        elif getattr(arm, row.name) != getattr(other, row.name):
            return False
    return True


@cache
def never_slower(arm: Arm) -> frozenset[Arm]:
    """Return the other arms that are never slower than this one at the same batch.

    They differ in one or several settings, each of which is never slower.
    """
    arms = {arm}
    for row in LEVERS:
        if row.never_slower is not None:
            arms |= {changed(one, **{row.name: row.never_slower(one)}) for one in arms}
    return frozenset(arms - {arm})


def inconvenience(arm: Arm) -> tuple[int, ...]:
    """Return a key by which the least intrusive of several arms is the smallest.

    Preferred in this order: bf16, then fp16, then tf32; DDP; no compilation; no checkpointing; no Liger kernels;
    torch's default allocator; fewer data loader workers; no pinning to cores; no other levers (``Lever.preference``).
    """
    places: list[int] = []
    for row in _BY_PREFERENCE:
        value = getattr(arm, row.name)
        places.append(row.inconvenience(value) if row.inconvenience else row.values.index(value))
    return tuple(places)


@cache
def excluding(arm: Arm) -> str | None:
    """Return which two settings of an arm cannot be together, in words; ``None`` where all can."""
    for row in LEVERS:
        beside = [name for name in row.excludes if getattr(arm, name) != _DEFAULTS[name]]
        if beside and getattr(arm, row.name) != _DEFAULTS[row.name]:
            return f"{row.name} does not go with {beside[0]}"
    if arm.padding_free and arm.length_multiple is None and (arm.cuda_graphs or arm.torch_compile):
        return "rows of any length are neither compiled nor captured; give them a length_multiple"
    whole = next((name for name in ("padding_free", "fused_loss") if getattr(arm, name)), None)
    if whole is not None and arm.zero_stage == 3:
        return f"{whole} needs whole weights, which ZeRO-3 has divided"
    if arm.checkpointed_layers is not None and arm.is_sharded:
        return "FSDP2 checkpoints every layer that it shards, or none"
    if arm.torch_compile_mode is not None and arm.ranks > 1:
        # Its trial took a minute of four H200, for a gain that nobody measured.
        return "reduce-overhead is searched on one GPU"
    return "DeepSpeed's steps are not searched compiled" if arm.torch_compile and arm.zero_stage is not None else None


def applied_settings(arm: Arm) -> dict[str, Any]:
    """Return the arguments of ``autotune.training.apply`` that training with an arm needs."""
    return {
        row.name: getattr(arm, row.name)
        for row in LEVERS
        if row.is_applied and getattr(arm, row.name) != _DEFAULTS[row.name]
    }


def levers_of(arm: Arm, names: Collection[str]) -> frozenset[str]:
    """Return those of the settings ``names`` whose value in an arm is not the default."""
    return frozenset(name for name in names if getattr(arm, name) != _DEFAULTS[name])


def packages_of(arm: Arm) -> tuple[str, ...]:
    """Return the optional packages that an arm needs."""
    needed = (row.package(getattr(arm, row.name)) for row in LEVERS if row.package)
    return tuple(package for package in needed if package is not None)


def is_traced(arm: Arm) -> bool:
    """Return whether an arm runs only kernels of torch and transformers, which a trace with fake tensors shows."""
    return all(row.is_traced(getattr(arm, row.name)) for row in LEVERS if row.is_traced)


def why_unpredictable(arm: Arm, workload: Workload) -> str | None:
    """Return why memory cannot be predicted with fake tensors; ``None`` where it can.

    Two of the reasons: DoRA dequantizes weights by itself, and the sizes of tensors may follow from the values of
    others, as where models put images among tokens.
    """
    is_zero = arm.zero_stage is not None
    if (is_zero and arm.fused_loss) or ((is_zero or arm.is_sharded) and arm.sparse_prediction):
        return "sharded steps are traced with the model's own loss"
    if workload.quantize is not None and (workload.lora_options or {}).get("use_dora", False):
        return "how DoRA dequantizes weights is not traced"
    if workload.task == "image-text-to-text":
        return "sizes of tensors follow from the values of others"
    untraced = [row.name for row in LEVERS if row.is_traced and not row.is_traced(getattr(arm, row.name))]
    return f"what {untraced[0]}={getattr(arm, untraced[0])} runs is not traced" if untraced else None


def compiles(arm: Arm) -> bool:
    """Return whether a trial compiles in its first steps: torch.compile, or torchao, which compiles optimizer steps."""
    return arm.torch_compile or optim_package(arm.optim) == "torchao"


def trainer_fields(arm: Arm) -> dict[str, Any]:
    """Return the fields of ``TrainingArguments`` that take the value of one setting, with these values."""
    return {
        row.argument: getattr(arm, row.name)
        for row in LEVERS
        if row.argument and (row.is_always_set or getattr(arm, row.name) != _DEFAULTS[row.name])
    }
