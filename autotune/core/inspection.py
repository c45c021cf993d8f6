"""Describe what an inspection finds out before a search: versions, the CUDA context, the GPU, facts about the model.

It runs in processes with torch, whose answers are sent and stored as JSON documents.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from autotune.core.candidate import Arm, Candidate
from autotune.core.code_interface import CodeInterface
from autotune.core.device import Calibration, Chip
from autotune.core.prediction import TracedStep
from autotune.core.workload import DTypeName


@dataclass(frozen=True, slots=True)
class Software:
    """The versions of the libraries that a training runs on."""

    python: str
    packages: dict[str, str | None]
    """Versions by package; ``None`` for a package that is not installed."""
    training_arguments_fields: tuple[str, ...]
    """The fields of the installed ``TrainingArguments``."""
    cuda: str | None = None
    """``None`` on a CPU, as are cuDNN and cuBLAS."""
    cudnn: int | None = None
    """As torch gives it: 91900 for 9.19.0."""
    cublas: str | None = None


@dataclass(frozen=True, slots=True)
class OwnSettings:
    """The settings with which the user's own code trains by itself."""

    arm: Arm
    per_device_train_batch_size: int | None = None
    """``None`` where it could not be found out."""
    gradient_accumulation_steps: int = 1

    def candidate(self) -> Candidate | None:
        """Return these settings as a candidate; ``None`` where the batch is not known."""
        batch = self.per_device_train_batch_size
        return Candidate(self.arm, batch, self.gradient_accumulation_steps) if batch is not None else None


@dataclass(frozen=True, slots=True)
class AfterStep:
    """What one training step showed about a model, to set up DDP; ``None`` where no step could be run."""

    unused_parameters: tuple[str, ...] | None = None
    """Trainable parameters without a gradient."""
    changed_buffers: tuple[str, ...] | None = None
    """Buffers that the step replaced or wrote to, such as running means."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What an inspection found out about a model. The fields from ``own`` on are of the user's own code."""

    class_name: str
    parameters: int
    trainable_parameters: int
    attn_implementations: tuple[str, ...]
    gradient_checkpointing: bool = False
    """Whether it can recompute activations."""
    checkpointing_layers: int | None = None
    """How many of its layers can each recompute their activations; ``None`` where they cannot be told apart."""
    layer_classes: tuple[str, ...] = ()
    """The classes of the layers that FSDP shards one by one; none where it has none."""
    sharding_error: str | None = None
    """Why accelerate cannot shard it layer by layer; ``None`` where it can, or where nobody asked."""
    unquantized_experts: int = 0
    """Number of weights that ``--quantize`` does not quantize: those of experts in one tensor, while bitsandbytes
    quantizes linear layers only; 0 without ``--quantize``."""
    after_step: AfterStep = field(default_factory=AfterStep)
    """Inspected only where several ranks train."""
    own: OwnSettings | None = None
    """``None`` for a loop, which is given its settings."""
    interface: CodeInterface = field(default_factory=CodeInterface)
    """How the code takes its settings."""
    config: dict[str, Any] = field(default_factory=dict)
    """The model's config; empty where it has none."""
    dtype: DTypeName = "float32"
    """Dtype of most of the weights."""
    samples: int | None = None
    """Samples of the training data; ``None`` for data that has no length."""
    always_checkpoints: bool = False
    """Whether the code turns checkpointing on by itself."""
    dataloader_num_workers: int = 0
    memory: tuple[TracedStep, ...] = ()
    """A traced step for each arm whose memory can be predicted."""

    @property
    def own_candidate(self) -> Candidate | None:
        """The settings of the user's own code; ``None`` where there is none, or its batch is not known."""
        return self.own.candidate() if self.own is not None else None


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a process with torch finds out about the environment and the workload."""

    software: Software
    optims: tuple[str, ...] = ()
    """Names of the optimizers that the installed transformers has."""
    context_bytes: int = 0
    """Memory of a CUDA context; 0 on a CPU."""
    model: ModelFacts | None = None
    """``None`` where the model cannot be built."""
    model_error: str | None = None
    """Why the model cannot be built."""
    model_hint: str | None = None
    """What would work, where an option of the search keeps the model from being built."""
    chip: Chip | None = None
    """``None`` on a CPU."""
    calibration: Calibration | None = None
    """``None`` on a CPU, and where it could not be measured."""
    lacks_nccl: bool = False
    """Whether several ranks are to train on GPUs, and torch was built without NCCL."""


@dataclass(frozen=True, slots=True)
class GpuWork:
    """The work of a process that uses the GPU to find out ``GpuFacts``, which no other process can."""

    device_uuid: str
    convolves: bool
    """Whether to load the kernels of convolutions as well, which take memory."""
    ranks: int = 1
    """GPUs that train together; the first is the one with the UUID."""


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """What only a process that uses the GPU can tell: the size of its CUDA context, the chip, library versions."""

    context_bytes: int
    chip: Chip
    cuda: str | None
    cudnn: int | None
    cublas: str | None
    calibration: Calibration | None = None
    """``None`` where it could not be measured."""
