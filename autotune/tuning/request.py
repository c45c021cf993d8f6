"""Define the request of a search, and check it as far as possible without starting a process."""

# ``_of`` makes dataclass fields, which ruff does not see.
# ruff: noqa: RUF009

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autotune.core.candidate import FULLY_SHARDED, Document, Precision, Strategy
from autotune.core.ceiling import Headroom
from autotune.core.device import Device
from autotune.core.errors import InvalidRequestError
from autotune.core.option_kinds import HEADROOM
from autotune.core.options import BY_NAME as OPTION_BY_NAME
from autotune.core.options import (
    OPTUNA_SAMPLERS,
    CheckpointingChoice,
    CompileChoice,
    LeverChoice,
    Objective,
    SamplerName,
    SearchEffort,
    SwitchChoice,
)
from autotune.core.outcome import Effort
from autotune.core.placement import Placement
from autotune.core.schema import VERSION, at_least, decode, fields_of, make_record, with_version, without_version
from autotune.core.units import format_groups
from autotune.core.workload import Workload
from autotune.devices.cores import can_pin
from autotune.devices.listing import find_device
from autotune.space.levers import BY_NAME, LEVERS, Training, why_not
from autotune.space.space import Batches, choose_precisions

# Default of TrainingArguments.
DEFAULT_OPTIM = "adamw_torch_fused"
# Only peak memory matters for the largest batch, so one step is measured after the two that allocate everything.
MAX_BATCH_EFFORT = Effort(min_steps=1, max_steps=1)

# Batches of real data differ in size, so more of them are needed to represent an epoch.
DATA_EFFORT = Effort(min_steps=5, max_steps=24, max_seconds=4.0)

# Default budget of trials for Optuna's samplers. A choice.
_FOREIGN_TRIALS = 32

_STUDY_NAME = re.compile(r"[A-Za-z0-9_+=@][A-Za-z0-9_.+=@ -]{0,99}")


def _of(option: str, *, recorded_as: str | None = None, sparse: bool = False, **default: Any) -> Any:
    """Declare a field of the request that holds a command-line option, with the option's default unless given.

    It is recorded under the option's name or ``recorded_as``; an empty string leaves it out. A ``sparse`` field is
    recorded only where it differs from its default, as in requests from before there was such an option.
    """
    said = {"option": option, "recorded_as": option if recorded_as is None else recorded_as, "sparse": sparse}
    return field(metadata=said, **(default or {"default": OPTION_BY_NAME[option].default}))


@dataclass(frozen=True)
class SearchRequest:
    """Everything that determines the result of a search, except the state of the machine."""

    workload: Workload
    device: Device
    """The device of rank 0."""
    others: tuple[Device, ...] = field(default=(), kw_only=True)
    """The devices of further ranks, which train together with the first."""
    beside: tuple[Device, ...] = field(default=(), kw_only=True)
    """Further devices, each of which runs trials of one rank at the same time as ``device``."""
    effective_batch: int | None = _of("effective_batch")
    effective_tokens: int | None = _of("effective_tokens", recorded_as="")
    """The effective batch in tokens, where the user gave it so; only for messages."""
    memory_limit_bytes: int | None = _of("memory_limit", recorded_as="memory_limit_bytes")
    """``None`` means all memory of the device."""
    headroom: Headroom = _of("headroom", default_factory=Headroom)
    world_size: int = _of("world_size")
    precisions: tuple[Precision, ...] | None = _of("precision")
    """``None`` means all that the device has."""
    gradient_checkpointing: CheckpointingChoice = _of("gradient_checkpointing")
    strategies: tuple[Strategy, ...] | None = _of("strategy", sparse=True)
    """How several ranks share the model; ``None`` means every way that this model and device can."""
    context_parallel: int = _of("context_parallel", sparse=True)
    """Ranks that share each sample."""
    attn_implementations: tuple[str, ...] | None = _of("attn", recorded_as="attn_implementation")
    """``None`` means sdpa where the model has it, else eager, as transformers chooses."""
    experts_implementations: tuple[str, ...] | None = _of("experts", recorded_as="experts_implementation", sparse=True)
    """``None`` leaves it to transformers."""
    optims: tuple[str, ...] = _of("optim", default=(DEFAULT_OPTIM,))
    expandable_segments: LeverChoice = _of("expandable_segments", sparse=True, default="off")
    """``auto`` tries it where memory keeps the best arm from a larger batch."""
    torch_compile: CompileChoice = _of("torch_compile", sparse=True)
    cuda_graphs: LeverChoice = _of("cuda_graphs", sparse=True)
    partial_checkpointing: str = _of("partial_checkpointing", sparse=True)
    """``auto``, ``off`` or a number of layers."""
    offload_activations: SwitchChoice = _of("offload_activations", sparse=True)
    uncached_casts: LeverChoice = _of("uncached_casts", sparse=True)
    length_multiple: str = _of("length_multiple", sparse=True)
    """``auto``, ``off`` or a number of tokens."""
    unpadded: LeverChoice = _of("unpadded", sparse=True)
    padding_free: LeverChoice = _of("padding_free", sparse=True, default="off")
    fused_loss: LeverChoice = _of("fused_loss", sparse=True)
    sparse_prediction: LeverChoice = _of("sparse_prediction", sparse=True)
    cudnn_attention: LeverChoice = _of("cudnn_attention", sparse=True)
    non_blocking: LeverChoice = _of("non_blocking", sparse=True)
    float8: SwitchChoice = _of("float8", sparse=True)
    liger: LeverChoice = _of("liger", sparse=True)
    cpu_affinity: LeverChoice = _of("cpu_affinity", sparse=True)
    """``auto`` tries it with the best candidate if that is host-bound."""
    any_order: bool = _of("any_order", sparse=True)
    """Whether the order of the samples is a lever."""
    batch_multiple: int | None = _of("batch_multiple")
    objective: Objective = _of("objective")
    search_effort: SearchEffort = _of("effort", sparse=True, default="quick")
    """``quick`` ends at the first answer, as searches did before there was such an option; ``default`` goes on with
    levers that are ``auto``."""
    trials: int | None = _of("trials")
    """Most trials; ``None`` means no limit."""
    time_budget_seconds: float | None = _of("time_budget", recorded_as="time_budget_seconds")
    trial_timeout_seconds: float | None = _of("trial_timeout", recorded_as="trial_timeout_seconds")
    """``None`` means a limit that grows with the model and the batch."""
    measure_baseline: bool = _of("baseline", recorded_as="measure_baseline")
    fresh: bool = _of("fresh")
    """Measure everything again, instead of reusing trials of earlier studies."""
    unprotected: bool = _of("unprotected", sparse=True)
    """Let the user's own code write to their files."""
    tolerance: float = _of("tolerance", sparse=True)
    """Relative gain in speed that is not worth a trial."""
    sampler: SamplerName = _of("sampler")
    seed: int = _of("seed")
    study: str | None = _of("study", recorded_as="")
    """The study's name; ``None`` generates one."""
    is_at_hand: bool = True
    """Whether the devices are here. What is only predicted for others needs no optional packages."""

    def __post_init__(self) -> None:
        """Raise ``InvalidRequestError`` for impossible values, ``DeviceError`` for devices that are not alike."""
        if self.trials is not None and self.trials < 1:
            raise InvalidRequestError(f"--trials {self.trials} leaves nothing to run", "use 1 or more")
        if self.study is not None:
            check_study_name(self.study)
        if self.context_parallel != 1 and (self.context_parallel < 1 or self.ranks % self.context_parallel):
            raise InvalidRequestError(
                f"--context-parallel {self.context_parallel} does not divide the number of GPUs that are trained on, "
                f"{self.ranks}",
                "use a divisor of --gpus" if self.ranks > 1 else "add --gpus 2, or leave it out",
            )
        groups = self.ranks // self.context_parallel
        if self.others and self.world_size != groups:
            raise InvalidRequestError(
                f"--world-size {self.world_size} is not the {format_groups(groups, self.context_parallel, 'GPUs')} "
                "that are trained on",
                "leave it out",
            )
        # Making a placement raises for devices that do not train alike.
        _ = self.placement, Placement.of(self.device, *self.beside)

    @property
    def ranks(self) -> int:
        """Number of processes that train together in a trial."""
        return 1 + len(self.others)

    @property
    def asked_strategies(self) -> tuple[Strategy, ...] | None:
        """The strategies that the options request: those named, and FSDP for context parallelism."""
        if self.strategies is None and self.context_parallel > 1:
            return FULLY_SHARDED
        return self.strategies

    @property
    def placement(self) -> Placement:
        """The devices of a trial."""
        return Placement.of(self.device, *self.others)

    @property
    def slots(self) -> tuple[Placement, ...]:
        """The placements of concurrent trials; a single one without devices ``beside`` the first."""
        return self.placement, *(Placement.of(device) for device in self.beside)

    @property
    def devices(self) -> tuple[Device, ...]:
        """Every device that the search uses, one for each rank or slot."""
        return self.device, *self.others, *self.beside

    def with_current_memory(self) -> SearchRequest:
        """Return the request with its devices as they are now, such as with their current free memory."""
        device, *further = (find_device(device.uuid) for device in self.devices)
        count = len(self.others)
        return replace(self, device=device, others=tuple(further[:count]), beside=tuple(further[count:]))

    @property
    def least_free_bytes(self) -> int:
        """Free memory of the device with the least."""
        return min(slot.least_free_bytes for slot in self.slots)

    @property
    def reachable_bytes(self) -> int:
        """Memory that a trial could have on each device: the free memory, or the limit where that is lower."""
        free_bytes, limit_bytes = self.least_free_bytes, self.memory_limit_bytes
        return free_bytes if limit_bytes is None else min(limit_bytes, free_bytes)

    @property
    def most_trials(self) -> int | None:
        """The largest number of trials; ``None``: no limit. Optuna's samplers never finish, so they always have one."""
        return _FOREIGN_TRIALS if self.trials is None and self.sampler in OPTUNA_SAMPLERS else self.trials

    @property
    def batches(self) -> Batches:
        """The batch sizes and accumulations to search. Raises ``InvalidRequestError`` where they are impossible."""
        data = self.workload.data
        samples = data.facts.samples if data is not None and data.facts is not None else None
        tokens = self.workload.seq_len if self.effective_tokens is not None else None
        return Batches(
            self.effective_batch, self.world_size, self.batch_multiple, samples, sample_tokens=tokens,
            shared_by=self.context_parallel,
        )  # fmt: skip

    @property
    def chosen_precisions(self) -> tuple[Precision, ...]:
        """The precisions to search. Raises an error where the device or the weights do not support them."""
        device = self.device
        return choose_precisions(self.precisions, device.precisions, f"{device.label} ({device.name})", self.workload)

    @property
    def effort(self) -> Effort:
        """How long each trial measures."""
        if self.objective == "max-batch":
            return MAX_BATCH_EFFORT
        source = self.workload.source
        varies = source is not None and source.interface.lengths is not None and source.interface.lengths.vary
        return DATA_EFFORT if varies or self.workload.data is not None else Effort()

    def document(self) -> Document:
        """Return the request as JSON-ready data. Equal documents and environments mean equal searches."""
        document = with_version({"model": self.workload.model})
        for each in recorded_fields():
            value = getattr(self, each.name)
            if isinstance(value, Headroom):
                document |= {"headroom_fraction": value.fraction, "headroom_bytes": value.size_bytes}
            elif not (each.metadata["sparse"] and value == each.default):
                document[each.metadata["recorded_as"]] = list(value) if isinstance(value, tuple) else value
        if self.others:
            document["ranks"] = self.ranks
        return document | ({"data_at": self.workload.data.place()} if self.workload.data else {})

    @property
    def wants_baseline(self) -> bool:
        """Whether the baseline is measured, as the reference for speed-ups."""
        return self.measure_baseline and self.objective == "throughput"

    @property
    def goes_on(self) -> bool:
        """Whether the search tries ``auto`` levers after its first answer."""
        is_ours = self.sampler == "autotune" and self.objective == "throughput"
        return self.search_effort == "default" and is_ours and self.device.kind == "cuda"

    def settings(self) -> dict[str, Any]:
        """Return the settings of levers that are ``on`` or have a number, which every arm has."""
        chosen: dict[str, Any] = {}
        for row in LEVERS:
            # For a setting that is on by default, the lever is to turn it off.
            chosen_word = "off" if row.values[:1] == (True,) else "on"
            choice = getattr(self, row.option) if row.option else None
            if choice == chosen_word:
                chosen[row.name] = row.values[1]
            elif isinstance(choice, str) and choice.isdigit():
                chosen[row.name] = int(choice)
        if self.torch_compile == "layers":
            chosen |= {"torch_compile": True, "regional_compilation": True}
        if self.objective == "max-batch":
            # Compiling does not change the largest batch that fits.
            chosen.pop("torch_compile", None)
            chosen.pop("regional_compilation", None)
        if self.workload.data is not None and self.workload.data.packing:
            chosen["padding_free"] = True
        return chosen

    def late_settings(self, layers: int | None) -> frozenset[str]:
        """Return the names of the levers that only the best candidates get, after the search's first answer.

        ``layers`` is the number of layers that can use gradient checkpointing, ``None`` where unknown.
        """
        late = {"cpu_affinity"} if self.pins == "auto" else set()
        if not self.goes_on:
            return frozenset(late)
        as_it_is = Training.of(self.workload, self.device.kind, self.ranks, layers)
        padded_to_few_lengths = as_it_is
        if self.length_multiple == "auto" and why_not(BY_NAME["length_multiple"], as_it_is) is None:
            late.add("length_multiple")
        if "length_multiple" in late or self.length_multiple.isdigit():
            padded_to_few_lengths = replace(as_it_is, shapes_vary=False)
        for row in LEVERS:
            if row.name == "length_multiple" or (row.name == "cudnn_attention" and not as_it_is.shapes_vary):
                continue
            choice = getattr(self, row.option) if row.option else "auto"
            has_prior = row.prior is not None and (row.option or not row.part_of)
            # An option that is ``True``, as for another order of samples, allows a lever for lengths as they are.
            training = as_it_is if choice is True else padded_to_few_lengths
            if has_prior and choice in ("auto", True) and why_not(row, training) is None:
                late.add(row.name)
        source = self.workload.source
        if source is not None and source.framework != "trainer":
            late.discard("torch_compile")
        return frozenset(late)

    def untried_resorts(self) -> list[str]:
        """Return the names of memory-saving levers that this training supports and the search does not try itself."""
        training, tried = Training.of(self.workload, self.device.kind, self.ranks), self.late_settings(None)
        untried = []
        for row in (*(row for row in LEVERS if row.is_resort), BY_NAME["offload_activations"]):
            is_on = getattr(self, row.option or "") == "on"
            is_idle = row.part_of == "gradient_checkpointing" and self.gradient_checkpointing == "off"
            if row.name not in tried and not is_on and not is_idle and why_not(row, training) is None:
                untried.append(row.name)
        return untried

    def why_not_pinned(self) -> str | None:
        """Return why a trial cannot be pinned to one core; ``None`` where it can."""
        if self.device.kind == "cpu":
            return "a training on the CPU needs all its cores"
        if (processes := max(self.world_size, self.ranks)) > 1:
            return f"each of the {processes} processes of a training would need a core of its own"
        if self.beside:
            return "trials that run at the same time would share the core"
        return None if can_pin() else "this system does not let a process choose its cores"

    @property
    def pins(self) -> LeverChoice:
        """Return the effective ``cpu_affinity``; the largest batch that fits does not depend on it."""
        return "off" if self.objective == "max-batch" or self.why_not_pinned() else self.cpu_affinity


@functools.cache
def recorded_fields() -> tuple[dataclasses.Field[Any], ...]:
    """Return the fields of a request that its JSON has, with the names that ``_of`` put in their metadata."""
    return tuple(each for each in dataclasses.fields(SearchRequest) if each.metadata.get("recorded_as"))


def request_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a ``SearchRequest`` with the values of the options that have one."""
    option_of = {each.name: each.metadata["option"] for each in dataclasses.fields(SearchRequest) if each.metadata}
    return {field: options[option] for field, option in option_of.items() if options.get(option) is not None}


@functools.cache
def recorded_type() -> type[Any]:
    """Make the msgspec type that a recorded request's JSON is decoded to, from the fields of ``SearchRequest``."""
    fields: list[tuple[Any, ...]] = [
        ("schema_version", int, VERSION),
        ("model", str, ""),
        ("data_at", dict[str, str | None] | None, None),
        ("ranks", int, 1),
    ]
    for each in recorded_fields():
        kind, default = OPTION_BY_NAME[each.metadata["option"]].kind, each.default
        if kind is HEADROOM:
            fields += [
                ("headroom_fraction", at_least(float, 0), Headroom().fraction),
                ("headroom_bytes", at_least(int, 0) | None, None),
            ]
            continue
        values = at_least(kind.json, kind.least)
        fields.append((each.metadata["recorded_as"], values | None if default is None else values, default))
    return make_record("RecordedRequest", fields)


def request_from_document(
    document: Document, workload: Workload, device: Device, study: str, others: tuple[Device, ...] = ()
) -> SearchRequest:
    """Return the request of a document from ``SearchRequest.document``.

    ``others`` are the devices of further ranks, as many as the document has. Raises ``ValueError`` for a malformed
    document, and ``InvalidRequestError`` for impossible values.
    """
    kind, document = recorded_type(), without_version(document)
    names = set(kind.__struct_fields__)
    # Unknown options of a later autotune are left out where they are off, which has no effect; else decoding fails.
    known = {name: value for name, value in document.items() if name in names or value not in (None, False)}
    recorded = fields_of(decode(known, kind))
    if recorded["ranks"] != 1 + len(others):
        raise ValueError(f"it has {recorded['ranks']} ranks, and {1 + len(others)} devices were found for them")
    headroom = Headroom(recorded.pop("headroom_fraction"), recorded.pop("headroom_bytes"))
    keys = {each.name: each.metadata["recorded_as"] for each in recorded_fields()}
    fields = {name: recorded[key] for name, key in keys.items() if key in recorded}
    return SearchRequest(workload=workload, device=device, others=others, study=study, headroom=headroom, **fields)


# Fields in which a request may differ from the study that it continues: a larger budget, a later version.
_MAY_DIFFER = frozenset({
    "effort", "trials", "time_budget_seconds", "trial_timeout_seconds", "fresh", "unprotected", "schema_version",
})  # fmt: skip


def differences(recorded: dict[str, Any], asked: dict[str, Any]) -> list[str]:
    """Return the differences that keep a request from continuing a recorded one: ``name: recorded, now asked``.

    Works for other documents as well; differences in nested documents are named ``outer.inner``.
    """
    changes: list[str] = []
    for key in sorted({*recorded, *asked} - _MAY_DIFFER):
        before, now = recorded.get(key), asked.get(key)
        if isinstance(before, dict) and isinstance(now, dict):
            changes += [f"{key}.{inner}" for inner in differences(before, now)]
        elif before != now:
            changes.append(f"{key}: {_shown(before)}, now {_shown(now)}")
    return changes


def _shown(value: Any) -> str:
    """Return a value in words for a message; of a dataset or the user's own code only its name."""
    if isinstance(value, dict):
        source = value.get("source") or value.get("name")
        return os.path.basename(source) or source if isinstance(source, str) and source else "given"
    if isinstance(value, list) and value:
        return ", ".join(map(str, value))
    return "not given" if value is None else repr(value)


def check_study_name(name: str) -> None:
    """Raise ``InvalidRequestError`` for a name that cannot be a folder's name or a command-line argument."""
    if not _STUDY_NAME.fullmatch(name) or name.endswith((" ", ".")):
        raise InvalidRequestError(
            f"{name[:120]!r} is not a study name", "use up to 100 letters, digits and any of _ . + = @ - or spaces"
        )
