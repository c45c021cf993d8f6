"""Describe each setting of an arm (a configuration without its batch) in a table, with a row per field of ``Arm``.

A new lever is a field of ``Arm``, its row here, its effect in a trial, and its option. ``autotune.space.arms`` computes
from the rows what follows from an arm's settings.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from autotune.core.candidate import FSDP, STRATEGIES, Arm, Precision
from autotune.core.code_interface import CodeInterface
from autotune.core.workload import Task, Workload
from autotune.space.features import DEEPSPEED, FLASH_ATTENTION, is_state_known, optim_package

HALF: Mapping[str, Literal["bfloat16", "float16"]] = {"bf16": "bfloat16", "fp16": "float16"}
"""The dtype that each precision with 16 bits computes in."""

# Neither library has a name for TF32, which is set through torch.
ACCELERATE: dict[Precision, str] = {"fp32": "no", "tf32": "no", "bf16": "bf16", "fp16": "fp16"}
LIGHTNING: dict[Precision, str] = {"fp32": "32-true", "tf32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
OF_LIGHTNING: dict[str, Precision] = {name: precision for precision, name in LIGHTNING.items() if precision != "tf32"}
"""The precision of Lightning's names; ``32-true`` is tf32 as well, where matrix products use it."""

Memory = Literal["peak", "reserved", "none"]
"""What of a trial's memory depends on a setting.

``peak``: the bytes that are allocated. ``reserved``: only how the allocator reserves them. ``none``: nothing that
counts.
"""


@dataclass(frozen=True, slots=True)
class Training:
    """The facts about a training that decide which levers it can have."""

    device_kind: str
    ranks: int
    task: Task
    is_own_code: bool = False
    has_trainer: bool = True
    """Whether a transformers ``Trainer`` trains, be it one of the user's own."""
    pads: bool = False
    """Whether samples are padded."""
    shapes_vary: bool = False
    """Whether batches differ in length."""
    packs: bool = False
    """Whether several samples are packed in a row."""
    is_ordered: bool = False
    """Whether samples come in an order that their lengths decide."""
    is_read: bool = True
    """Whether the samples have been read, so that their lengths are known."""
    layers: int | None = None
    """How many layers of the model can recompute their activations; ``None`` where that is not known."""
    dtype: str = "float32"
    """The dtype of the weights."""
    obstacles: Mapping[str, str] = field(default_factory=dict)
    """By lever, why the user's own Trainer cannot have it, as the inspection of the user's code found."""

    @classmethod
    def of(cls, workload: Workload, device_kind: str, ranks: int, layers: int | None = None) -> Training:
        """Collect the facts about training a workload on this number of ranks, from its data or the user's own code."""
        data, source = workload.data, workload.source
        interface = source.interface if source is not None else CodeInterface()
        shapes_vary, pads = interface.shapes_vary is True, workload.padding > 0
        if data is None:
            is_ordered = interface.lengths is not None and interface.lengths.order != "random"
            is_read = source is None or interface.shapes_vary is not None
        else:
            is_ordered, is_read = data.group_by_length, data.facts is not None
            if data.facts is not None and (lengths := data.facts.lengths) is not None:
                # The lengths of a batch of the shortest samples, and of one of the longest.
                padded = {data.padded(tokens, workload.seq_len) for tokens in lengths.in_batches}
                shapes_vary |= len(padded) > 1
                pads |= len({lengths.shortest, lengths.longest, *padded}) > 1
        return cls(
            device_kind,
            ranks,
            workload.task,
            is_own_code=source is not None,
            has_trainer=source is None or source.framework == "trainer",
            pads=pads or shapes_vary,
            shapes_vary=shapes_vary,
            packs=data is not None and data.packing,
            is_ordered=is_ordered,
            is_read=is_read,
            layers=layers,
            dtype=workload.dtype,
            obstacles=interface.obstacles,
        )


Obstacle = tuple[Callable[[Training], bool], str]
"""A test whether a training cannot have a lever, and the reason: a format string, in which ``{0}`` is the training."""


@dataclass(frozen=True, slots=True)
class Prior:
    """The expected effect of a lever on the time of a step, before this search has measured it. A factor of 1: none."""

    called: str
    """The name of the lever in the messages of a search."""
    source: str
    """Where the figures come from."""
    host: float = 1.0
    """Factor on the host's time for a step."""
    passing: float = 1.0
    """Factor on the GPU's time for operations that are limited by memory traffic. Compiling ten trainings
    whose shares of such time are predicted left 0.1 to 0.5 of it, 0.3 in the median (H200, 23 and 24 November 2026)."""
    computing: float = 1.0
    """Factor on the GPU's other time."""
    seconds: float = 0.0
    """Seconds that a trial takes in addition, mostly to compile."""
    is_unmasked: bool = False
    """Whether it is tried without an attention mask where no sample is padded: what traces a step makes the mask
    explicit, which keeps attention from its fast kernel."""
    accumulates: bool = True
    """Whether it is tried on a step of several micro-steps."""


@dataclass(frozen=True, slots=True)
class Lever:
    """One setting of an arm, with its values and its effects on memory, speed and operations. A row of ``LEVERS``."""

    name: str
    """The field of ``Arm``, where its type and its default are found."""
    values: tuple[Any, ...] = (False, True)
    """The values that a search chooses among, the preferred one first; none where they follow from something else."""
    part_of: str | None = None
    """The setting without which this one has no effect: where that setting has its default, so has this one."""
    is_idle: Callable[[Arm], bool] | None = None
    """Whether it has no effect beside the other settings of an arm, so that it has its default there."""
    argument: str | None = None
    """The field of ``TrainingArguments`` with the same value, which is set where that is not the default."""
    is_always_set: bool = False
    """Whether ``argument`` is set also where it is the default, so that training runs as it was measured."""
    memory: Memory = "peak"
    alike: tuple[tuple[Any, Any], ...] = ()
    """Pairs of values with the same peak memory; the second represents both in ``arms.memory_class``."""
    saving: Callable[[Arm], float] | None = None
    """A number that is larger the more memory the setting saves an arm; ``None`` where no value is known to save."""
    operations: Callable[[Any], Any] | None = None
    """For a value, the one whose traced step stands for its operations; ``None``: each value has its own."""
    never_slower: Callable[[Arm], Any] | None = None
    """The value with which an arm is never slower at the same batch."""
    preference: int | None = None
    """Which of two equally fast arms to prefer is decided setting by setting, in ascending order of this number."""
    inconvenience: Callable[[Any], int] | None = None
    """A number that is larger the less a value is preferred; ``None``: its index in ``values``."""
    package: Callable[[Any], str | None] | None = None
    """The optional package that a value needs."""
    is_traced: Callable[[Any], bool] | None = None
    """Whether a trace with fake tensors shows the operations that run with a value; ``None``: it does for each."""
    excludes: tuple[str, ...] = ()
    """Other settings that have to be at their defaults beside it."""
    is_applied: bool = False
    """Whether it is a keyword argument of ``autotune.training.apply``."""
    obstacles: tuple[Obstacle, ...] = ()
    """Why a training cannot have it; the first that applies is told."""
    option: str | None = None
    """The option for a lever that a search with ``auto`` tries on its best candidates only; else ``None``."""
    prior: Prior | None = None
    """Its expected effect. A lever with a prior is tried on the best candidates once a search has its first answer."""
    stands_in_for: str | None = None
    """A better setting for the same end: this lever is only tried where a training cannot have that setting."""
    is_resort: bool = False
    """Whether all arms are tried with it as a last resort, where none fits in memory without it."""
    is_optunas: bool = False
    """Whether it is a parameter in Optuna's study even where all arms of a search have the same value."""


def faster_precision(arm: Arm) -> Precision:
    """Return a precision that is never slower than the arm's; the arm's own where no other is known to be.

    fp32 computes on slower units than tf32, and fp16 is bf16 with loss scaling on top. That bf16 is faster than tf32 is
    only certain where it costs no casts in autocast: under FSDP and ZeRO, which also exchange half the bytes.
    """
    if arm.precision == "tf32" and (arm.is_sharded or arm.zero_stage is not None):
        return "bf16"
    faster: dict[Precision, Precision] = {"fp32": "tf32", "fp16": "bf16"}
    return faster.get(arm.precision, arm.precision)


def _less_communication(arm: Arm) -> Any:
    """Return a strategy that communicates less than the arm's; the arm's own where none is known.

    ``fsdp`` frees weights after the forward pass and gathers them again; ``fsdp-keep`` keeps them. ZeRO-3
    gathers weights in both passes, and ZeRO-2 once after the update.
    """
    return {"fsdp": "fsdp-keep", "zero3": "zero2"}.get(arm.strategy or "", arm.strategy)


def _checkpointed(arm: Arm) -> float:
    """Return how many layers recompute their activations; infinity stands for all layers, whose number is not known."""
    return (arm.checkpointed_layers or math.inf) if arm.gradient_checkpointing else 0


def _without_trainer(reason: str) -> Obstacle:
    """Return the obstacle that a training has no transformers ``Trainer``, with the reason why a lever needs one."""
    return lambda t: not t.has_trainer, reason


def _without_gpu(missing_part: str) -> Obstacle:
    """Return the obstacle that a training does not run on a GPU, whose ``missing_part`` (CUDA graphs, say) it needs."""
    return lambda t: t.device_kind != "cuda", f"{{0.device_kind}} has no {missing_part}"


_ON_SEVERAL_GPUS: Obstacle = (lambda t: t.ranks > 1, "it is searched on one GPU")
_OWN_BATCHES = _without_trainer("only a Trainer's batches are changed")
_OWN_LOSS = _without_trainer("your own loop computes its loss")

LENGTH_MULTIPLE = 64
"""Batches are padded to multiples of this many tokens: few shapes, and 3 to 6 % more tokens at 512 to 1,024 (H100,
25 November 2026)."""
ROW_MULTIPLE = 1024
"""Rows are filled to multiples of this many tokens: five or six shapes of 16 samples of up to 1,024 (25 November
2026)."""
EXPERTS = ("grouped_mm", "batched_mm", "eager")
"""How transformers computes a mixture of experts without further packages: all by one kernel, a copy of the weights for
each token, or one after the other."""
_PLAIN_ATTENTIONS = ("sdpa", "eager")

# Among precisions of equal speed: bf16 needs no loss scaling.
PRECISION_PREFERENCE: tuple[Precision, ...] = ("bf16", "fp16", "tf32", "fp32")

LEVERS: tuple[Lever, ...] = (
    # Recorded peaks of precisions that are ``alike`` differ by at most 2 MiB on an H200, which is the loss scaler.
    Lever(
        "precision", PRECISION_PREFERENCE, alike=(("bf16", "fp16"), ("tf32", "fp32")),
        never_slower=faster_precision, preference=0, is_optunas=True,
    ),
    Lever(
        "gradient_checkpointing", saving=_checkpointed, never_slower=lambda arm: False, preference=3, is_optunas=True
    ),
    Lever(
        "attn_implementation", (), is_optunas=True,
        package=lambda name: "flash-attn" if name == FLASH_ATTENTION else None,
        is_traced=lambda name: name in _PLAIN_ATTENTIONS,
    ),
    Lever(
        "optim", (), argument="optim", is_always_set=True, is_optunas=True, package=optim_package,
        is_traced=is_state_known,
    ),
    Lever(
        "expandable_segments", memory="reserved", saving=lambda arm: arm.expandable_segments,
        never_slower=lambda arm: False, preference=5, is_optunas=True, option="expandable_segments",
        obstacles=(_without_gpu("allocator with expandable segments"), _ON_SEVERAL_GPUS),
        # They are never faster at the same batch, so that they are tried for more memory alone.
        prior=Prior(
            "expandable segments", "H200: 0.3 to 4.5 % more reserved than allocated; without, Qwen3-32B with QLoRA "
            "reserved 23.1 GiB for 22.3 (23 November 2026)",
        ),
    ),
    Lever(
        "torch_compile", argument="torch_compile", is_always_set=True, preference=2, is_traced=operator.not_,
        is_optunas=True, option="torch_compile",
        # Compiled whole, bert-base, distilbert, BERT-large and ViT-large were 0.96, 1.04, 1.00 and 0.82 times as fast
        # as with compiled layers, which took a half to a quarter of the time (H200, 23 November 2026).
        stands_in_for="regional_compilation",
        prior=Prior(
            "compiling",
            "H200, 23 November 2026: 1.06 × bert-base at 128 tokens, 1.2 × BERT-large, 2.2 × Qwen2.5-0.5B; 42 to 79 s, "
            "9 s with a filled cache", host=0.55, passing=0.3, seconds=60.0, is_unmasked=True,
        ),
    ),
    Lever(
        "use_liger_kernel", argument="use_liger_kernel", is_always_set=True, preference=4, is_traced=operator.not_,
        package=lambda on: "liger-kernel" if on else None, is_optunas=True,
    ),
    Lever(
        "dataloader_num_workers", (), argument="dataloader_num_workers", memory="none", preference=6, inconvenience=int
    ),
    Lever(
        "dataloader_prefetch_factor", (), part_of="dataloader_num_workers", argument="dataloader_prefetch_factor",
        memory="none",
    ),
    Lever("cpu_affinity", memory="none", preference=7),
    Lever(
        "strategy", STRATEGIES, operations=lambda name: "ddp" if name in FSDP else name,
        never_slower=_less_communication, preference=1, inconvenience=lambda name: name not in (None, "ddp"),
        package=lambda name: DEEPSPEED if Arm(strategy=name).zero_stage is not None else None,
    ),
    Lever("ranks", (), part_of="strategy"),
    # What DDP looks for or sends before a step takes no memory that counts. All arms of a search look for the same.
    Lever(
        "ddp_find_unused_parameters", (), part_of="strategy", argument="ddp_find_unused_parameters", memory="none"
    ),
    Lever("ddp_broadcast_buffers", (), part_of="strategy", argument="ddp_broadcast_buffers", memory="none"),
    Lever("transformer_layer_cls_to_wrap", (), part_of="strategy", operations=lambda classes: None),
    Lever(
        "sync_each_batch", part_of="strategy", operations=lambda on: False, never_slower=lambda arm: False
    ),
    Lever(
        "torch_compile_mode", (None, "reduce-overhead"), part_of="torch_compile", argument="torch_compile_mode",
        # Compiled layers in CUDA graphs of autotune.training were 1.1 to 1.3 × as fast on an H200 (23 November 2026).
        stands_in_for="cuda_graphs",
        # Accumulated gradients of a tied embedding are overwritten by the next run of a graph.
        prior=Prior(
            "compiling with reduce-overhead", "H200, 23 November 2026: 2.2 × bert-base at 128 tokens; 40 s",
            host=0.2, passing=0.3, seconds=60.0, is_unmasked=True, accumulates=False,
        ),
    ),
    Lever(
        "regional_compilation", part_of="torch_compile", is_applied=True,
        prior=Prior(
            "compiling by layer",
            "H200, 23 November 2026: 1.2 × BERT-large, 1.5 × Qwen2.5-0.5B; in CUDA graphs another 1.2 × bert-base and "
            "BERT-large, in the same 11 s", host=0.7, passing=0.3, seconds=11.0, is_unmasked=True,
        ),
    ),
    Lever(
        "checkpointed_layers", (), part_of="gradient_checkpointing", is_applied=True, saving=_checkpointed,
        is_traced=operator.not_, option="partial_checkpointing",
        obstacles=(
            (lambda t: t.is_own_code, "your own code decides which layers recompute"),
            (lambda t: (t.layers or 0) <= 1, "the layers of this model cannot be told apart"),
        ),
        prior=Prior(
            "checkpointing fewer layers", "H200, 23 November 2026: 1.4 × LoRA of an 8B model with every second layer"
        ),
    ),
    # Only tried where asked for by name: what the copies between GPU and host cost was not measured.
    Lever(
        "offload_activations", part_of="gradient_checkpointing", saving=lambda arm: arm.offload_activations,
        never_slower=lambda arm: False, preference=13, excludes=("torch_compile",),
        option="offload_activations",
        obstacles=(
            _without_trainer("your own loop decides where activations are kept"),
            (lambda t: t.device_kind != "cuda", "activations on {0.device_kind} are in the host's memory already"),
            _ON_SEVERAL_GPUS,
        ),
    ),
    # A checkpointed layer casts its weights again when it recomputes, so that the copies serve nothing meanwhile.
    Lever(
        "uncached_casts", part_of="gradient_checkpointing", is_idle=lambda arm: arm.precision not in HALF,
        is_applied=True, saving=lambda arm: arm.uncached_casts, preference=14,
        obstacles=(
            _without_trainer("your own loop has its own autocast"), _ON_SEVERAL_GPUS,
            (lambda t: t.dtype != "float32", "autocast does not cast {0.dtype} weights"),
        ),
        option="uncached_casts", is_resort=True,
        prior=Prior("uncached casts", "by the sizes of tensors: up to 2 bytes a parameter less memory, the same speed"),
    ),
    # Graphs keep a memory pool of their own, so that they need at least as much memory. In graphs, compiled layers of
    # bert-base were 1.39 times as fast, and of Qwen2.5-0.5B 1.04 times (H200, 28 November 2026).
    Lever(
        "cuda_graphs", is_applied=True, saving=lambda arm: -arm.cuda_graphs, preference=8, is_traced=operator.not_,
        never_slower=lambda arm: arm.cuda_graphs or arm.regional_compilation,
        excludes=("torch_compile_mode", "offload_activations", "use_liger_kernel"), option="cuda_graphs",
        obstacles=(
            _without_gpu("CUDA graphs"), _without_trainer("only the steps of a Trainer are captured"),
            (
                lambda t: t.shapes_vary,
                "batches differ in length, and a graph has one shape; with --lever length_multiple they have few",
            ),
            (lambda t: t.ranks > 1, "several ranks are not captured"),
        ),
        prior=Prior(
            "CUDA graphs", "H200, 23 November 2026: 2.3 × bert-base at 128 tokens, 1.07 × BERT-large; 1 s",
            host=0.25, seconds=2.0, is_unmasked=True,
        ),
    ),
    # More padding takes no less memory.
    Lever(
        "length_multiple", (None, LENGTH_MULTIPLE), is_applied=True, saving=lambda arm: -(arm.length_multiple or 1),
        preference=17, inconvenience=lambda multiple: multiple is not None, is_traced=lambda multiple: multiple is None,
        option="length_multiple",
        obstacles=(
            _OWN_BATCHES,
            (lambda t: t.task == "image-text-to-text", "batches of images and text are not padded further"),
            (lambda t: t.is_read and not t.shapes_vary, "batches have one length"),
        ),
        prior=Prior(
            "padding to few lengths",
            "H100, 25 November 2026, mean lengths a third of the longest: 1.32 × bert-base at 512 tokens, 1.42 × "
            "Qwen2.5-0.5B at 1,024", host=0.7, passing=0.75, computing=0.75, seconds=2.0,
        ),
    ),
    Lever(
        "unpadded", is_applied=True, saving=lambda arm: arm.unpadded, preference=9, is_traced=operator.not_,
        excludes=("length_multiple",), option="unpadded",
        obstacles=(
            _OWN_BATCHES,
            (lambda t: t.packs, "samples are packed, which are kept apart by their positions"),
            (lambda t: t.pads, "samples are padded, which the mask hides"),
        ),
        prior=Prior("passing no mask", "an estimate; compiled code and graphs need it", passing=0.97),
    ),
    # Which kernels run decides what is allocated.
    Lever(
        "experts_implementation", (None, *EXPERTS), is_applied=True, preference=12, is_traced=lambda name: name is None
    ),
    Lever(
        "padding_free", is_applied=True, saving=lambda arm: arm.padding_free, preference=11, is_traced=operator.not_,
        excludes=("unpadded", "use_liger_kernel"), option="padding_free",
        obstacles=(
            _OWN_BATCHES,
            (lambda t: t.task not in ("causal-lm", "own"), "samples of {0.task} are not put in one row"),
            (lambda t: t.is_read and not (t.pads or t.packs), "no sample is padded"),
        ),
        prior=Prior(
            "rows without padding",
            "H100, 25 November 2026: Qwen2.5-0.5B at 1,024 tokens, a third of them in the mean: 1.6 ×, and 1.8 × what "
            "few lengths give where layers are compiled and captured",
            host=0.7, passing=0.5, computing=0.5, seconds=3.0,
        ),
    ),
    Lever(
        "fused_loss", is_applied=True, saving=lambda arm: arm.fused_loss, preference=10,
        excludes=("use_liger_kernel",), option="fused_loss", is_resort=True,
        obstacles=(
            _OWN_LOSS,
            (
                lambda t: not t.is_own_code and t.task == "image-text-to-text",
                "it is not supported for models of images and text",
            ),
            (
                lambda t: not t.is_own_code and t.task != "causal-lm",
                "{0.task} has no loss over a vocabulary for every token",
            ),
        ),
        prior=Prior(
            "a fused loss", "H200, 23 November 2026: 33 % less memory for Qwen2.5-0.5B at 8 × 512 tokens; the gain in "
            "speed is an estimate", passing=0.9,
        ),
    ),
    Lever(
        "sparse_prediction", is_applied=True, saving=lambda arm: arm.sparse_prediction, preference=15,
        option="sparse_prediction",
        obstacles=(
            _OWN_LOSS, (lambda t: t.task not in ("masked-lm", "own"), "{0.task} masks no tokens")
        ),
        prior=Prior(
            "predicting masked tokens alone", "an estimate: the output layers are 29 % of the arithmetic of "
            "roberta-base at 512 tokens, of which three sixteenths are left", computing=0.75, passing=0.7,
        ),
    ),
    Lever(
        "cudnn_attention", (True, False), memory="none", is_applied=True, preference=18,
        option="cudnn_attention",
        obstacles=(
            _without_trainer("only for a Trainer; set TORCH_CUDNN_SDPA_ENABLED=0 in the environment of your own loop"),
            _without_gpu("cuDNN"),
        ),
        prior=Prior(
            "attention without cuDNN",
            "H100, 25 November 2026: an ordinary script's bert-base on texts of different lengths, steps 31 on, 1.66 ×",
            host=0.75, computing=0.93, passing=0.93,
        ),
    ),
    # By default a Trainer waits for the GPU twice: to copy a batch, and to see whether the loss of each micro-step is
    # finite before it adds it to its log.
    Lever(
        "non_blocking", memory="none", operations=lambda on: False, preference=20, option="non_blocking",
        obstacles=(
            _without_trainer("your own loop decides when it waits for the GPU"),
            _without_gpu("queue that a host could fill ahead"), _ON_SEVERAL_GPUS,
        ),
        prior=Prior(
            "not waiting for the GPU",
            "H200, 28 November 2026, compiled by layer in CUDA graphs: 1.47 × bert-base at 128 tokens, 1.15 × on "
            "texts, 1.2 × Qwen2.5-0.5B, 1.65 × GPT-2; 1.0 × without graphs", host=0.97,
        ),
    ),
    # Only tried where asked for by name: it computes in another numeric format.
    Lever(
        "float8", is_applied=True, is_idle=lambda arm: arm.precision not in HALF, preference=16,
        is_traced=operator.not_, package=lambda on: "torchao" if on else None, excludes=("use_liger_kernel",),
        option="float8",
        obstacles=(
            _without_trainer("your own loop decides how its products are computed"), _without_gpu("FP8 units"),
            _ON_SEVERAL_GPUS,
        ),
    ),
    # Only tried with --any-order, since it changes the order of the samples. The longest batch is the same.
    Lever(
        "train_sampling_strategy", (None, "group_by_length"), argument="train_sampling_strategy", memory="none",
        preference=19, excludes=("padding_free",), option="any_order",
        obstacles=(
            _without_trainer("only a Trainer orders its samples by train_sampling_strategy"),
            (lambda t: t.task == "image-text-to-text", "samples of {0.task} are not grouped by length"),
            (lambda t: t.packs, "samples are packed, so that rows have one length"),
            (lambda t: t.is_ordered, "its samples are in an order of their lengths already"),
            (lambda t: t.is_read and not t.shapes_vary, "batches have one length"),
        ),
        prior=Prior(
            "grouping by length",
            "by the lengths of 8,192 texts: a batch of 32 has 5,608 tokens in place of 15,392, padding included",
            passing=0.4, computing=0.4, seconds=2.0,
        ),
    ),
    # Ring attention exists for CUDA's kernels alone, so that no fake tensor shows what it allocates.
    Lever("context_parallel", (), part_of="strategy", is_traced=lambda count: count == 1),
    Lever("dp_shard_size", (), part_of="strategy", operations=lambda size: None),
)  # fmt: skip

BY_NAME = {row.name: row for row in LEVERS}
PRIORS = {row.name: row.prior for row in LEVERS if row.prior is not None}
"""What is expected of the levers that are tried on the best candidates."""


def why_not(row: Lever, training: Training) -> str | None:
    """Return why a training cannot have a lever, in words; ``None`` where it can."""
    reasons = (reason.format(training) for applies, reason in row.obstacles if applies(training))
    return training.obstacles.get(row.name) or next(reasons, None)
