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
    """Return an arm with other values of these fields; settings that then have no effect get their defaults."""
    return _changed(arm, tuple(values.items()))


# Cached: a search asks for the same arms again and again, for all its candidates after each trial.
@cache
def _changed(arm: Arm, values: tuple[tuple[str, Any], ...]) -> Arm:
    """Compute ``changed``, with its keyword arguments as a tuple, which can be a key of the cache."""
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
    """Return an arm with one lever turned on, and with the setting without which this lever has no effect.

    ``among`` has the names of the levers that the search may use: with ``length_multiple``, rows without padding are
    filled, too. ``multiples`` are the values of ``length_multiple`` for padded batches and for filled rows, in tokens.
    """
    row = BY_NAME[name]
    # values[0] is the default: the lever is off.
    required = {row.part_of: BY_NAME[row.part_of].values[1]} if row.part_of else {}
    other = changed(arm, **required, **{name: multiples[0] if name == "length_multiple" else row.values[1]})
    if other.padding_free and name in ("padding_free", "length_multiple") and "length_multiple" in among:
        other = changed(other, length_multiple=multiples[1], unpadded=False)
    return other


def without(arm: Arm, names: Iterable[str]) -> Arm:
    """Return an arm in which the settings ``names`` have their defaults."""
    return changed(arm, **{name: _DEFAULTS[name] for name in names})


@cache
def memory_class(arm: Arm) -> Arm:
    """Return the arm that represents all arms with the same peak memory.

    It has fp16 in place of bf16, fp32 in place of tf32, and the defaults of settings on which memory does not depend.
    """
    values = {row.name: _DEFAULTS[row.name] for row in LEVERS if row.memory == "none"}
    for row in LEVERS:
        for value, representative in row.alike:
            if getattr(arm, row.name) == value:
                values[row.name] = representative
    return dataclasses.replace(arm, **values)


@cache
def prediction_class(arm: Arm) -> Arm:
    """Return the arm that represents all arms that allocate the same bytes, however the allocator reserves them."""
    reserving = {row.name: _DEFAULTS[row.name] for row in LEVERS if row.memory == "reserved"}
    return dataclasses.replace(memory_class(arm), **reserving)


# Settings that are not traced: the predicted memory with them is computed from the prediction without them.
_DERIVED = ("cuda_graphs", "length_multiple", "unpadded", "padding_free", "checkpointed_layers")


def predicted_from(arm: Arm) -> tuple[Arm, Arm]:
    """Return the two arms whose traced steps (run with fake tensors) predict the memory of an arm.

    The first is the arm without the settings that are not traced. The second has no checkpointing either: it tells what
    those layers keep that are not checkpointed.
    """
    plain = without(arm, _DERIVED)
    return plain, changed(plain, gradient_checkpointing=False)


def as_asked(arm: Arm) -> Arm:
    """Return the arm to send to a process that predicts memory, with the defaults of settings without effect on it."""
    return without(arm, [row.name for row in LEVERS if row.memory == "none"])


def arm_that_computes(arm: Arm) -> Arm:
    """Return the arm that represents all arms whose steps run the same operations, for a trace of these.

    For an arm with FSDP this is the arm with DDP: a rank runs the same operations, with a part of the weights or all.
    """
    return dataclasses.replace(
        arm, **{row.name: row.operations(getattr(arm, row.name)) for row in LEVERS if row.operations}
    )


@cache
def needs_at_least(arm: Arm, other: Arm) -> bool:
    """Return whether ``arm`` certainly needs at least as much memory as ``other``.

    That is so where they differ in memory-saving settings only, and ``arm`` saves no more by any of them.
    """
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

    Such an arm differs in one or several settings, whose new values are each known to be never slower.
    """
    arms = {arm}
    for row in LEVERS:
        if row.never_slower is not None:
            # From all arms so far, so that every combination of settings is reached.
            arms |= {changed(one, **{row.name: row.never_slower(one)}) for one in arms}
    return frozenset(arms - {arm})


def inconvenience(arm: Arm) -> tuple[int, ...]:
    """Return a sort key for equally fast arms; the arm that intrudes least on a training has the smallest.

    Preferred in this order: bf16, then fp16, then tf32; DDP; no compilation; no checkpointing; no Liger kernels;
    torch's default allocator; fewer data loader workers; no pinning to cores; no other levers (``Lever.preference``).
    """
    ranking: list[int] = []
    for row in _BY_PREFERENCE:
        value = getattr(arm, row.name)
        ranking.append(row.inconvenience(value) if row.inconvenience else row.values.index(value))
    return tuple(ranking)


@cache
def excluding(arm: Arm) -> str | None:
    """Return why two settings of an arm cannot be used together, as a sentence; ``None`` where all settings can."""
    for row in LEVERS:
        excluded = [name for name in row.excludes if getattr(arm, name) != _DEFAULTS[name]]
        if excluded and getattr(arm, row.name) != _DEFAULTS[row.name]:
            return f"{row.name} does not go with {excluded[0]}"
    if arm.padding_free and arm.length_multiple is None and (arm.cuda_graphs or arm.torch_compile):
        return "rows of any length are neither compiled nor captured; give them a length_multiple"
    needs_whole_weights = next((name for name in ("padding_free", "fused_loss") if getattr(arm, name)), None)
    if needs_whole_weights is not None and arm.zero_stage == 3:
        return f"{needs_whole_weights} needs whole weights, which ZeRO-3 has divided"
    if arm.checkpointed_layers is not None and arm.is_sharded:
        return "FSDP2 checkpoints every layer that it shards, or none"
    if arm.torch_compile_mode is not None and arm.ranks > 1:
        # Its trial took a minute of four H200, for a gain that nobody measured.
        return "reduce-overhead is searched on one GPU"
    return "DeepSpeed's steps are not searched compiled" if arm.torch_compile and arm.zero_stage is not None else None


def applied_settings(arm: Arm) -> dict[str, Any]:
    """Return the keyword arguments of ``autotune.training.apply`` with which a training runs as an arm sets it.

    Settings at their defaults are left out.
    """
    return {
        row.name: getattr(arm, row.name)
        for row in LEVERS
        if row.is_applied and getattr(arm, row.name) != _DEFAULTS[row.name]
    }


def levers_of(arm: Arm, names: Collection[str]) -> frozenset[str]:
    """Return which of the settings ``names`` an arm has at another value than the default."""
    return frozenset(name for name in names if getattr(arm, name) != _DEFAULTS[name])


def packages_of(arm: Arm) -> tuple[str, ...]:
    """Return the optional packages that an arm needs."""
    needed = (row.package(getattr(arm, row.name)) for row in LEVERS if row.package)
    return tuple(package for package in needed if package is not None)


def is_traced(arm: Arm) -> bool:
    """Return whether an arm runs only kernels of torch and transformers, which a trace with fake tensors shows."""
    return all(row.is_traced(getattr(arm, row.name)) for row in LEVERS if row.is_traced)


def why_unpredictable(arm: Arm, workload: Workload) -> str | None:
    """Return why no step with fake tensors can predict the memory of an arm; ``None`` where one can."""
    is_zero = arm.zero_stage is not None
    # Both levers replace the model's loss. A traced step with FSDP can have the fused loss; one with ZeRO, neither.
    if (is_zero and (arm.fused_loss or arm.sparse_prediction)) or (arm.is_sharded and arm.sparse_prediction):
        return "sharded steps are traced with the model's own loss"
    if workload.quantize is not None and (workload.lora_options or {}).get("use_dora", False):
        # DoRA dequantizes weights by its own code.
        return "how DoRA dequantizes weights is not traced"
    if workload.task == "image-text-to-text":
        # Where images go among the tokens is read from the tokens' values, which fake tensors lack.
        return "sizes of tensors follow from the values of others"
    untraced = [row.name for row in LEVERS if row.is_traced and not row.is_traced(getattr(arm, row.name))]
    return f"what {untraced[0]}={getattr(arm, untraced[0])} runs is not traced" if untraced else None


def compiles(arm: Arm) -> bool:
    """Return whether a trial compiles in its first steps: by torch.compile, or in the optimizers of torchao."""
    return arm.torch_compile or optim_package(arm.optim) == "torchao"


def trainer_fields(arm: Arm) -> dict[str, Any]:
    """Return the fields of ``TrainingArguments`` whose value is that of one setting of an arm, with these values."""
    return {
        row.argument: getattr(arm, row.name)
        for row in LEVERS
        if row.argument and (row.is_always_set or getattr(arm, row.name) != _DEFAULTS[row.name])
    }
