"""Define what a search tries: a candidate (a configuration with its batch), and its arm (the same without batch).

Both are frozen values. They cross process borders and are stored as plain JSON documents.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from autotune.core.device import Precision as Precision
from autotune.core.schema import decode
from autotune.core.units import plural

PRECISIONS: tuple[Precision, ...] = ("fp32", "tf32", "fp16", "bf16")

Strategy = Literal["ddp", "fsdp", "fsdp-keep", "hybrid", "zero1", "zero2", "zero3", "zero2-offload"]
"""How several ranks share a model.

``ddp``: each has all of it, and they exchange gradients. ``fsdp`` (FSDP2): each keeps a part of weights, gradients and
optimizer state; a layer's weights are gathered for its forward pass, freed, and gathered again for its backward pass.
``fsdp-keep``: gathered weights stay until the backward pass has used them. ``hybrid``: as ``fsdp`` within groups of
ranks, each of which has all of the model, as ``HYBRID_SHARD`` of FSDP1. ``zero1``, ``zero2``, ``zero3``: stages of
DeepSpeed's ZeRO, in which each keeps a part of the optimizer state, of the gradients as well, of the weights as well.
``zero2-offload``: the optimizer state is in the host's memory, and the CPU updates the weights; also for one rank.
"""
STRATEGIES: tuple[Strategy, ...] = ("ddp", "fsdp-keep", "hybrid", "fsdp", "zero1", "zero2", "zero3", "zero2-offload")
"""In the order in which they are tried: the one with the least communication first, and DeepSpeed's after torch's."""

FULLY_SHARDED: tuple[Strategy, ...] = ("fsdp-keep", "fsdp")
"""FSDP2 that divides the model between all ranks."""
FSDP: frozenset[Strategy] = frozenset((*FULLY_SHARDED, "hybrid"))
ZERO_STAGES: dict[Strategy, int] = {"zero1": 1, "zero2": 2, "zero3": 3, "zero2-offload": 2}
"""DeepSpeed's strategies, each with its stage of ZeRO."""


def group_size(ranks: int) -> int | None:
    """Return how many ranks share one copy of the model under hybrid sharding; ``None`` where no equal groups exist.

    A search tries one size only: the largest, half of an even number of ranks, which needs the least memory.
    """
    return next((size for size in range(ranks // 2, 1, -1) if ranks % size == 0), None)


Document = dict[str, Any]

OWN_OPTIM = "own"
"""The value of ``optim`` where the user's code makes the optimizer and no name of transformers tells which."""


def _field_metadata(words: str | Callable[[Any], str | None] | None, *, sparse: bool = False) -> dict[str, Any]:
    """Return the metadata of a field of ``Arm``: its words in a description, and how it is recorded.

    ``words`` describe a value other than the default: a text, or a function of the whole arm. A ``sparse`` field is
    recorded only where it is not the default, so that trials from before there was such a setting compare equal.
    """
    return {"words": words, "sparse": sparse}


@dataclass(frozen=True, slots=True)
class Arm:
    """The settings of a training but for batch and accumulation, named as in ``TrainingArguments`` where possible."""

    precision: Precision = field(default="fp32", metadata=_field_metadata(lambda arm: arm.precision))
    gradient_checkpointing: bool = field(
        default=False,
        metadata=_field_metadata(
            lambda arm: (
                f"checkpointing {plural(arm.checkpointed_layers, 'layer')}"
                if arm.checkpointed_layers
                else "checkpointing"
            )
        ),
    )
    attn_implementation: str = field(default="sdpa", metadata=_field_metadata(lambda arm: arm.attn_implementation))
    optim: str = field(
        default="adamw_torch_fused", metadata=_field_metadata(lambda arm: None if arm.optim == OWN_OPTIM else arm.optim)
    )
    expandable_segments: bool = field(default=False, metadata=_field_metadata("expandable segments"))
    """A setting of CUDA's caching allocator, not of the Trainer: its segments grow, which avoids fragmentation."""
    torch_compile: bool = field(
        default=False,
        metadata=_field_metadata(
            lambda arm: (
                ("compiled by layer" if arm.regional_compilation else "compiled")
                + (f" ({arm.torch_compile_mode})" if arm.torch_compile_mode else "")
            )
        ),
    )
    use_liger_kernel: bool = field(default=False, metadata=_field_metadata("liger"))
    dataloader_num_workers: int = field(
        default=0, metadata=_field_metadata(lambda arm: f"{arm.dataloader_num_workers} loaders")
    )
    dataloader_prefetch_factor: int | None = field(
        default=None, metadata=_field_metadata(lambda arm: f"prefetch {arm.dataloader_prefetch_factor}")
    )
    cpu_affinity: bool = field(default=False, metadata=_field_metadata("pinned to one core"))
    """Run all threads of the training process on one CPU core. Data loader workers stay free."""
    strategy: Strategy | None = field(
        default=None,
        metadata=_field_metadata(lambda arm: f"{arm.strategy} × {arm.groups}" if arm.ranks > 1 else arm.strategy),
    )
    """``None`` for one rank."""
    ranks: int = 1
    """Processes that train together, each on a device of its own."""
    ddp_find_unused_parameters: bool | None = None
    """``None`` leaves it to the Trainer, which has DDP look for them unless checkpointing is on."""
    ddp_broadcast_buffers: bool | None = None
    """Whether rank 0 sends its buffers to all ranks before each forward pass; ``None`` is DDP's default, which does."""
    transformer_layer_cls_to_wrap: str | None = None
    """The layer classes that FSDP shards one by one, with commas between them; ``None`` where nothing is sharded."""
    sync_each_batch: bool = field(default=False, metadata=_field_metadata("sync each batch"))
    """Whether each micro-step reduces its gradients, so that no rank keeps whole gradients while it accumulates."""
    torch_compile_mode: str | None = field(default=None, metadata=_field_metadata(None, sparse=True))
    """``reduce-overhead`` has compiled code run as CUDA graphs; ``None`` is torch's default."""
    regional_compilation: bool = field(default=False, metadata=_field_metadata(None, sparse=True))
    """Compile one layer and use it for all, in place of the whole model."""
    checkpointed_layers: int | None = field(default=None, metadata=_field_metadata(None, sparse=True))
    """How many of the model's layers recompute their activations, evenly spread; ``None``: all."""
    offload_activations: bool = field(default=False, metadata=_field_metadata("offloaded", sparse=True))
    """What checkpointing keeps of each layer, its input, waits in the host's memory for the backward pass."""
    uncached_casts: bool = field(default=False, metadata=_field_metadata("uncached casts", sparse=True))
    """Autocast keeps no 16-bit copies of the weights until the end of the forward pass."""
    cuda_graphs: bool = field(default=False, metadata=_field_metadata("CUDA graphs", sparse=True))
    """Forward and backward passes are captured once as CUDA graphs and replayed, without a compiler."""
    length_multiple: int | None = field(
        default=None, metadata=_field_metadata(lambda arm: f"lengths × {arm.length_multiple}", sparse=True)
    )
    """Batches of text are padded to multiples of so many tokens."""
    unpadded: bool = field(default=False, metadata=_field_metadata("no mask", sparse=True))
    """No attention mask is passed, since no sample is padded."""
    experts_implementation: str | None = field(
        default=None, metadata=_field_metadata(lambda arm: f"experts {arm.experts_implementation}", sparse=True)
    )
    """How the products of a mixture of experts are computed; ``None`` is transformers' own choice."""
    padding_free: bool = field(default=False, metadata=_field_metadata("padding-free", sparse=True))
    """The samples of a batch come in one row, each attending to itself alone, so that none is padded."""
    fused_loss: bool = field(default=False, metadata=_field_metadata("fused loss", sparse=True))
    """The loss of a causal language model is computed in parts, so that its logits never exist as a whole."""
    sparse_prediction: bool = field(default=False, metadata=_field_metadata("sparse prediction", sparse=True))
    """Logits of a masked language model are computed for the tokens with a label alone."""
    cudnn_attention: bool = field(default=True, metadata=_field_metadata("no cuDNN attention", sparse=True))
    """Whether attention may use cuDNN's kernels, which are compiled for each new length."""
    non_blocking: bool = field(default=False, metadata=_field_metadata("non-blocking", sparse=True))
    """The host goes on while the GPU computes: batches are copied without waiting for it, and no loss is looked at
    until it is logged."""
    float8: bool = field(default=False, metadata=_field_metadata("fp8", sparse=True))
    """Products within the layers that repeat are computed in FP8."""
    train_sampling_strategy: str | None = field(
        default=None, metadata=_field_metadata(lambda arm: f"order {arm.train_sampling_strategy}", sparse=True)
    )
    """The order of the samples, under the name of ``TrainingArguments``; ``None`` is the order that was asked for."""
    context_parallel: int = field(
        default=1, metadata=_field_metadata(lambda arm: f"context parallel × {arm.context_parallel}", sparse=True)
    )
    """Ranks that share each sample, of which each has a part of its tokens: ``cp_size`` of accelerate's
    ``ParallelismConfig``."""
    dp_shard_size: int | None = field(default=None, metadata=_field_metadata(None, sparse=True))
    """With ``hybrid``, the number of ranks of a group, between which the model is divided; accelerate's name."""

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 shards the model, so that each rank holds only a part of it."""
        return self.strategy in FSDP

    @property
    def sharing(self) -> int:
        """Number of ranks between which FSDP2 shards the model."""
        return self.dp_shard_size or self.ranks

    @property
    def groups(self) -> str:
        """Number of ranks in words: ``4``, or with hybrid sharding ``2 × 2``, which is groups × ranks of a group."""
        return f"{self.ranks // self.sharing} × {self.sharing}" if self.dp_shard_size else str(self.ranks)

    @property
    def data_parallel(self) -> int:
        """Number of groups of ranks with different samples; the ranks of a group share theirs."""
        return self.ranks // self.context_parallel

    @property
    def zero_stage(self) -> int | None:
        """The stage of DeepSpeed's ZeRO; ``None`` without DeepSpeed."""
        return ZERO_STAGES.get(self.strategy) if self.strategy else None

    @property
    def offloads_optimizer(self) -> bool:
        """Whether the optimizer state is in the host's memory."""
        return self.strategy == "zero2-offload"

    @property
    def needs_launcher(self) -> bool:
        """Whether training needs a launcher such as ``torchrun``, as several ranks and DeepSpeed do."""
        return self.ranks > 1 or self.zero_stage is not None

    def describe(self) -> str:
        """Return the precision and all settings that are not defaults, in words: ``bf16, checkpointing, adafactor``."""
        described = [
            words if isinstance(words, str) else words(self)
            for name, default, words in _WORDS
            if name == "precision" or getattr(self, name) != default
        ]
        return ", ".join(filter(None, described))


_WORDS = [(f.name, f.default, f.metadata["words"]) for f in dataclasses.fields(Arm) if f.metadata.get("words")]
_SPARSE = {f.name: f.default for f in dataclasses.fields(Arm) if f.metadata.get("sparse")}

OF_RANKS = (
    "strategy", "ranks", "ddp_find_unused_parameters", "ddp_broadcast_buffers", "transformer_layer_cls_to_wrap",
    "sync_each_batch",
)  # fmt: skip
"""The fields of an arm that only several ranks have."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A configuration that a trial can run: an arm with a batch and accumulation, both per device."""

    arm: Arm
    per_device_train_batch_size: int
    gradient_accumulation_steps: int = 1

    @property
    def samples_per_step(self) -> int:
        """Samples of one optimizer step, over all ranks."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * self.arm.data_parallel

    @property
    def accumulates(self) -> bool:
        """Whether gradients are accumulated. They then outlive a micro-step, which raises peak memory."""
        return self.gradient_accumulation_steps > 1

    def describe(self) -> str:
        """Return batch × accumulation and the arm: ``32 × 2 bf16, checkpointing``."""
        return f"{self.per_device_train_batch_size} × {self.gradient_accumulation_steps}  {self.arm.describe()}"

    def parameters(self) -> Document:
        """Return all settings in one flat dictionary, under the names that records, Optuna and ``--json`` share."""
        return {
            "per_device_train_batch_size": self.per_device_train_batch_size,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            **dataclasses.asdict(self.arm),
        }

    def recorded_parameters(self) -> Document:
        """Return ``parameters`` as they are stored: equal to records of versions that had fewer settings.

        Settings of several ranks are left out where there is one rank (which has a strategy only where it offloads),
        and settings that came later (``_SPARSE``) where they have their default.
        """
        names = OF_RANKS if self.arm.ranks == 1 and self.arm.strategy is None else ()
        return {
            name: value
            for name, value in self.parameters().items()
            if name not in names and not (name in _SPARSE and value == _SPARSE[name])
        }

    @classmethod
    def from_parameters(cls, parameters: Document) -> Candidate:
        """Return the candidate of a stored document, unknown keys ignored. Raises ``KeyError`` or ``ValueError``."""
        names = [f.name for f in dataclasses.fields(Arm)]
        return cls(
            decode({name: parameters[name] for name in names if name in parameters}, Arm),
            int(parameters["per_device_train_batch_size"]),
            int(parameters["gradient_accumulation_steps"]),
        )
