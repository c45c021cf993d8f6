"""Declare every option of a search once: its name, its kind of value, its help, its name in JSON.

The command line, the checks of ``autotune.search``, the JSON of a recorded request and the reference pages are made
from ``OPTIONS``. To add an option, add its name to a group below, with the type of its values in Python and its
``Option``, and the field of ``SearchRequest`` where a search records it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, Final, Literal, TypedDict, get_args, get_origin, get_type_hints

from autotune.core.candidate import PRECISIONS, STRATEGIES
from autotune.core.ceiling import DEFAULT_HEADROOM_FRACTION, Headroom
from autotune.core.option_kinds import (
    BYTES,
    COUNT,
    COUNTS,
    DATASET,
    FLAG,
    GIVEN_LEVERS,
    GPUS,
    HEADROOM,
    LAYERS,
    LEVERS,
    LOOP,
    MODEL,
    NUMBER,
    PATH,
    SCRIPT,
    SECONDS,
    SEED,
    SHARE,
    TEXT,
    TOKENIZER,
    TRAINER,
    WORDS,
    Kind,
    choice,
    words,
    words_or_auto,
)  # fmt: skip
from autotune.core.workload import TASKS, DTypeName, PeftName, QuantizeName, Task

LeverChoice = Literal["auto", "on", "off"]
CompileChoice = Literal["auto", "on", "layers", "off"]
SwitchChoice = Literal["on", "off"]
CheckpointingChoice = Literal["auto", "on", "off"]
Objective = Literal["throughput", "max-batch"]
SearchEffort = Literal["quick", "default"]
SamplerName = Literal["autotune", "grid", "tpe", "random"]
OPTUNA_SAMPLERS: Final[tuple[SamplerName, ...]] = ("tpe", "random")
"""Names of Optuna's samplers, which know nothing of memory and never finish by themselves."""

SEARCH, PREDICT, VERIFY = ("search",), ("predict",), ("verify",)
BOTH = ("search", "predict")
ADVISE, PREDICTED, ALL = ("advise",), ("predict", "advise"), ("search", "predict", "advise")
BUDGET = ("search", "resume")
STORED = (
    "search", "predict", "advise", "resume", "verify", "show", "studies", "report", "export", "run", "dashboard", "db",
    "serve", "token", "doctor", "mcp",
)  # fmt: skip
JSON = (
    "search", "predict", "advise", "resume", "verify", "show", "studies", "devices", "models", "queue", "follow",
    "doctor",
)  # fmt: skip

USUAL: Mapping[str, str] = {
    "model": "A name (autotune models), a folder or a hub name.",
    "trainer": "Your own Trainer: build(overrides) returns it.",
    "loop": "Your own loop: train(config) trains.",
    "effective_batch": "Samples of an optimizer step [default: any].",
    "seq_len": "Tokens of a sample [default: at most 512].",
    "dataset": "Your samples [default: synthetic ones].",
    "tokenizer": "Tokenizer or processor [default: the model's].",
    "device": "cuda:0, cpu, … [default: the first GPU].",
    "gpus": "Several GPUs together: 2, all or 0,1.",
    "memory_limit": "Use only so much memory, e.g. 24GiB.",
    "precision": "E.g. bf16,tf32 [default: all there are].",
    "gradient_checkpointing": "auto: try with and without.",
    "attn": "Attention, e.g. sdpa,eager.",
    "optim": "Optimizers, as TrainingArguments.optim.",
    "peft": "Train LoRA adapters.",
    "quantize": "Quantize the frozen weights.",
    "lever": "What may make it faster; --help-all lists them.",
    "levers": "off: only those named by --lever.",
    "objective": "The fastest, or the largest batch.",
    "effort": "quick: stop at the first answer.",
    "trials": "Run at most N trials.",
    "time_budget": "Start no trial that ends later, e.g. 5m.",
    "gpu": "GPUs by name, e.g. rtx-3090,a100-80gb.",
    "verify": "Check the result with a stock Trainer.",
    "dry_run": "Show what would be tried; write nothing.",
    "fresh": "Reuse nothing of earlier searches.",
    "study": "Name of the study; an existing one goes on.",
    "storage": "Database [default: studies/autotune.db].",
    "as_json": "Print one JSON document.",
}
"""The options that ``--help`` of a search shows, in one line each; ``--help-all`` shows all, and says more."""

TRAINED, DATA, DEVICE = "What is trained", "Your data", "On what"
TRIED, HOW, WHERE = "What is tried", "How it is searched", "Where it goes"
TRIED_LEVERS = "Levers (--lever NAME=VALUE)"

_FROM_TYPE = Kind("that of its values' type", str)


@dataclass(frozen=True)
class Option:
    """One option of the commands: in Python the parameter ``name``, on the command line ``flag`` or ``--name``.

    It is declared in the annotation of its name in a group below. ``OPTIONS`` fills in what follows from there.
    """

    help: str
    commands: tuple[str, ...] = SEARCH
    default_text: str | None = None
    """The default value as the user would write it on the command line; help shows it."""
    kind: Kind = _FROM_TYPE
    """How its values are read and checked; filled in from the annotated type where it is not given."""
    section: str = ""
    """The heading of the option in help; filled in with that of its group where it is not given."""
    name: str = ""
    """Filled in: the name that is annotated."""
    flag: str | None = None
    """The flag where it is not made of the name. ``--no-…`` turns off what is on by default."""
    metavar: str | None = None
    help_in: Mapping[str, str] = field(default_factory=dict)
    """Help that differs from ``help``, by command."""
    envvar: str | None = None
    own_code_decides: bool = False
    """Whether the user's own training code decides it, so that the option is refused beside such code."""
    is_lever: bool = False
    """Whether it is given as ``--lever NAME=VALUE``. The flag of its own, ``--name``, is understood but not shown."""

    @property
    def parameter(self) -> str:
        """The option on the command line, without a value."""
        return f"--lever {self.name}" if self.is_lever else self.own_flag

    @property
    def own_flag(self) -> str:
        """The flag of this option alone."""
        return self.flag or "--" + self.name.replace("_", "-")

    def said(self, value: Any) -> str:
        """Return the option with a value as on the command line: ``--precision bf16`` or ``--lever float8=on``."""
        return f"{self.parameter}{'=' if self.is_lever else ' '}{value}"

    @cached_property
    def default(self) -> Any:
        """The Python value of the option where the user gives none."""
        if self.kind is FLAG:
            return self.own_flag.startswith("--no-")
        if self.kind in (SCRIPT, GIVEN_LEVERS):
            return ()
        return None if self.default_text is None else self.kind.read(self.default_text)


# fmt: off
class _Model(TypedDict, total=False):
    """What a stock ``Trainer`` trains."""

    model: Annotated[str | os.PathLike[str] | None, Option(
        "Catalog name (autotune models), folder with a config.json, or hub name.", ALL, kind=MODEL,
        metavar="NAME|FOLDER",
    )]


class _OwnCode(TypedDict, total=False):
    """The user's own training code, in place of a model."""

    trainer: Annotated[str | os.PathLike[str] | Callable[[dict[str, Any]], Any] | None, Option(
        "In place of a model: train.py:build, where build(overrides: dict) returns your own Trainer.", kind=TRAINER,
        metavar="FILE:FUNCTION",
    )]
    loop: Annotated[str | os.PathLike[str] | Callable[[Any], Any] | None, Option(
        "In place of a model: train.py:train, where train(config) is a training loop of your own that goes over "
        "autotune.steps(loader).", kind=LOOP, metavar="FILE:FUNCTION",
    )]
    script: Annotated[Sequence[str | os.PathLike[str]], Option(
        "In place of a model: your own training script and its options.", ("search", "run"), kind=SCRIPT,
    )]


class _Step(TypedDict, total=False):
    """Code that an operator lists, in place of a model, and the effective batch."""

    code: Annotated[str | None, Option(
        "In place of a model, with --server: code by the name that the operator lists it under.", metavar="NAME",
    )]
    effective_batch: Annotated[int | None, Option(
        "Samples of an optimizer step: per-device batch × accumulation × world size, always exactly. Without it "
        "nothing is accumulated and any batch is tried. A Trainer or script of your own keeps its effective batch.",
        ALL,
        help_in=dict.fromkeys(
            PREDICTED,
            "Samples of an optimizer step: per-device batch × accumulation × world size, always exactly. Without it "
            "nothing is accumulated and any batch is predicted.",
        )
        | {"advise": "Samples of an optimizer step: per-device batch × accumulation × GPUs, always exactly."},
    )]


class _Workload(TypedDict, total=False):
    """How the model is trained."""

    effective_tokens: Annotated[int | None, Option(
        "The same in tokens, in place of --effective-batch: a multiple of --seq-len.", ALL,
    )]
    task: Annotated[Task | None, Option(f"One of {', '.join(TASKS)} [default: from the architecture in config.json].",
        ALL, kind=choice(*TASKS), metavar="TASK",
    )]
    seq_len: Annotated[int | None, Option("Tokens in a sample [default: 512 or the model's maximum].", ALL)]
    images: Annotated[int | None, Option(
        "Images in each sample of image-text-to-text, tiles of larger ones counted [default: 1].", ALL,
    )]
    image_size: Annotated[int | None, Option(
        "Pixels of each side of the images [default: the model's, else about 448].", ALL, metavar="PIXELS",
    )]
    padding: Annotated[float | str, Option("Share of each text sample that is padding, masked by the attention_mask.",
        ALL, "0", kind=SHARE,
    )]
    dtype: Annotated[DTypeName | None, Option(
        "Dtype of the stored weights; --precision is that of autocast [default: float32; with --peft bfloat16 where "
        "the device has it, else float16 in its place, or that of the config].", ALL,
    )]
    pretrained: Annotated[bool, Option("Load pretrained weights; speed and memory do not depend on them.")]
    peft: Annotated[PeftName | None, Option("Train LoRA adapters on all linear layers, with the weights frozen.", ALL)]
    lora_rank: Annotated[int | None, Option("Rank of the LoRA adapters [default: 16].", ALL)]
    lora_alpha: Annotated[int | None, Option("Their alpha [default: twice the rank].", ALL)]
    lora_dropout: Annotated[float | str | None, Option("Dropout before them [default: 0].", ALL, kind=SHARE)]
    lora_targets: Annotated[str | Sequence[str] | None, Option(
        "Names of the layers that get them [default: all linear layers but the head].", ALL,
    )]
    dora: Annotated[bool, Option("Weight-decomposed adapters (DoRA).", ALL)]
    rslora: Annotated[bool, Option("Scale adapters by the root of their rank (rsLoRA).", ALL)]
    quantize: Annotated[QuantizeName | None, Option(
        "Quantize the frozen weights with bitsandbytes: 4bit is nf4 with double quantization.", ALL,
    )]


class _Data(TypedDict, total=False):
    """The user's dataset, and how it becomes batches."""

    dataset: Annotated[str | os.PathLike[str] | None, Option(
        "Your samples: jsonl, csv, parquet, a folder of images or from save_to_disk, NAME[:CONFIG] on the hub "
        "[default: synthetic samples].", kind=DATASET, metavar="FILE|FOLDER|NAME",
    )]
    split: Annotated[str | None, Option("Split of the dataset [default: train].", metavar="NAME")]
    text_column: Annotated[str | Sequence[str] | None, Option(
        "Column of the text, two for pairs [default: text, sentence or the only one; with images also messages].",
    )]
    label_column: Annotated[str | None, Option(
        "Column of classes or numbers, or of target texts for seq2seq [default: label, labels or target].",
        metavar="NAME",
    )]
    image_column: Annotated[str | None, Option("Column of the images [default: image, images or img].", metavar="NAME")]
    tokenizer: Annotated[str | os.PathLike[str] | None, Option(
        "Tokenizer, or processor of images and text: a folder or a hub name [default: the model's own].",
        kind=TOKENIZER, metavar="FOLDER|NAME",
    )]
    pad_to_max_length: Annotated[bool, Option(
        "Pad to --seq-len [default: to the longest of a batch, as DataCollatorWithPadding does].",
    )]
    pad_to_multiple_of: Annotated[int | None, Option("Pad further, to a multiple of N tokens.")]
    group_by_length: Annotated[bool, Option(
        "Make batches of samples of similar lengths (train_sampling_strategy=group_by_length).",
    )]
    packing: Annotated[bool, Option(
        "Pack the samples of a causal language model in rows of at most --seq-len tokens, each whole. Batches are then "
        "counted in rows, which changes how many samples a step has.",
    )]


class _OtherGpus(TypedDict, total=False):
    """GPUs that predictions are made for, and the job whose cost is predicted."""

    gpu: Annotated[str | Sequence[str] | None, Option("GPUs by name, e.g. rtx-3090,v100-16gb,a100-80gb.", PREDICTED,
        help_in={"advise": "GPUs by name, e.g. rtx-4090,l4,h100 [default: all]."},
    )]
    gpu_spec: Annotated[str | os.PathLike[str] | None, Option(
        "JSON file that describes other GPUs, to be named with --gpu.", PREDICTED, kind=PATH, metavar="FILE",
    )]
    price: Annotated[str | Sequence[str] | None, Option(
        "Prices of GPUs per hour, e.g. l4=0.70,h100=2.95 or h100=2.70EUR.", ADVISE, metavar="GPU=PRICE,…",
    )]
    prices: Annotated[str | os.PathLike[str] | None, Option("JSON file with such prices [default: dated examples].",
        ADVISE, kind=PATH, metavar="FILE",
    )]
    gpu_counts: Annotated[int | Sequence[int], Option("Numbers of GPUs that train together with DDP, e.g. 1,2,4.",
        ADVISE, "1", kind=COUNTS, flag="--gpus",
    )]
    samples: Annotated[float | str, Option("Samples of the whole training job, e.g. 1e6.", ADVISE, "1e6", kind=NUMBER,
        section=TRAINED,
    )]


class _Device(TypedDict, total=False):
    """Where trials run."""

    device: Annotated[str | None, Option("cuda:0, cpu or a GPU's UUID [default: the first GPU, else the CPU].", BUDGET,
        metavar="NAME|UUID", help_in={"resume": "Another device of the same name [default: the one it ran on]."},
    )]
    gpus: Annotated[int | str | Sequence[int | str] | None, Option(
        "Train on several GPUs together: a number, all, or a list such as 0,1 [default: one, see --device].",
        ("search", "predict", "resume"), kind=GPUS, metavar="N|all|LIST",
        help_in={
            "predict": "Number of GPUs of that kind that train together; memory is that of each [default: 1].",
            "resume": "Other GPUs of that kind: as many as a trial has, or any number with --parallel.",
        },
    )]
    parallel: Annotated[bool, Option("With --gpus: run one-GPU trials on all of them at the same time, not together.",
        BUDGET,
    )]
    memory_limit: Annotated[int | str | None, Option(
        "Search as if the device had only this much memory, e.g. 24GiB [default: all that is free].", BOTH, kind=BYTES,
        help_in={"predict": "Memory of the GPU, e.g. 24GiB [default: that of --gpu]."},
    )]
    headroom: Annotated[Headroom | float | str | None, Option(
        f"Memory to keep free below the limit, e.g. 5% or 1GiB [default: {DEFAULT_HEADROOM_FRACTION:.0%}].", ALL,
        kind=HEADROOM,
    )]
    world_size: Annotated[int, Option("Number of devices that will share the effective batch; trials still run on one.",
        BOTH, "1",
    )]
    executor: Annotated[str | None, Option(
        "Search on a node of a Ray cluster: ray://HOST:10001, or ray://auto on one of its nodes; its token is in "
        "RAY_AUTH_TOKEN.", (*BUDGET, "serve"), metavar="URL",
    )]


class _Tried(TypedDict, total=False):
    """The settings and batches that a search tries."""

    precision: Annotated[str | Sequence[str] | None, Option(
        "Precisions to try, e.g. bf16,tf32 [default: all that the device has].", ALL, kind=words(PRECISIONS),
    )]
    gradient_checkpointing: Annotated[CheckpointingChoice, Option("auto: try with and without; on: always; off: never.",
        ALL, "auto",
    )]
    strategy: Annotated[str | Sequence[str] | None, Option(
        "Ways for several GPUs to share the model: ddp, fsdp-keep, hybrid, fsdp, zero1, zero2, zero3, zero2-offload "
        "[default: all possible].", BOTH, kind=words_or_auto(STRATEGIES),
    )]
    context_parallel: Annotated[int, Option(
        "With --gpus: have so many GPUs share each sample, of which each has a part of its tokens, for long contexts. "
        "Weights are sharded with FSDP.", ("search",), "1", own_code_decides=True,
    )]
    attn: Annotated[str | Sequence[str] | None, Option(
        "Attention implementations, e.g. sdpa,eager [default: sdpa where the model has it].", ALL,
        own_code_decides=True,
    )]
    experts: Annotated[str | Sequence[str] | None, Option(
        "How a mixture of experts is computed, e.g. grouped_mm,batched_mm,eager [default: as transformers chooses].",
        own_code_decides=True,
    )]
    optim: Annotated[str | Sequence[str] | None, Option(
        "Values of TrainingArguments.optim [default: adamw_torch_fused]. Your own code keeps its own.", ALL,
        help_in=dict.fromkeys(PREDICTED, "Values of TrainingArguments.optim [default: adamw_torch_fused]."),
    )]
    batch_multiple: Annotated[int | None, Option(
        "Try only per-device batches that are multiples of N [default: 8; smaller ones where 8 does not work].", ALL,
    )]
    any_order: Annotated[bool, Option(
        "Let samples come in another order: batches of similar lengths are tried as a lever "
        "(train_sampling_strategy=group_by_length). By default the order is yours.",
    )]
    levers: Annotated[Literal["auto", "off"] | Mapping[str, Any], Option(
        "What else may make training faster. auto: each as it stands under Levers; off: only those that --lever turns "
        "on. In Python also a dict of levers and their values.", kind=LEVERS, default_text="auto",
        metavar="auto|off",
    )]


class _Levers(TypedDict, total=False):
    """What may make training faster, each given as ``--lever NAME=VALUE``."""

    expandable_segments: Annotated[LeverChoice | None, Option(
        "Expandable segments of CUDA's allocator. auto: try them where memory limits the best; on: always; off: never "
        "[default: auto on one GPU where levers are searched, else off; on where PYTORCH_ALLOC_CONF says so].",
    )]
    torch_compile: Annotated[CompileChoice, Option(
        "auto: try it on the best candidates once there is a first answer, where the gain is expected to be worth its "
        "time; on: the whole model on every candidate; layers: each layer alone, on every candidate; off: never.",
        default_text="auto",
    )]
    cuda_graphs: Annotated[LeverChoice, Option(
        "Forward and backward passes as CUDA graphs, without a compiler. auto, on, off: as torch_compile.",
        default_text="auto",
    )]
    partial_checkpointing: Annotated[int | str, Option(
        "Recompute only some of the layers. auto: as many as memory asks for, once there is a first answer; a number: "
        "that many; off: all or none.", kind=LAYERS, default_text="auto",
    )]
    offload_activations: Annotated[SwitchChoice, Option(
        "With checkpointing, keep each layer's input in the host's memory until its backward pass: slower; for "
        "contexts that need it.", BOTH, default_text="off",
    )]
    length_multiple: Annotated[int | str, Option(
        "Pad batches of texts to multiples of so many tokens, so that they have few shapes. auto: as torch_compile; "
        "a number: always; off: never.", kind=LAYERS, default_text="auto",
    )]
    unpadded: Annotated[LeverChoice, Option(
        "Pass no attention mask where no sample is padded. auto, on, off: as torch_compile.", default_text="auto",
    )]
    padding_free: Annotated[LeverChoice, Option(
        "Put the samples of a batch of a causal language model in one row, so that none is padded; each attends to "
        "itself alone. auto, on, off: as torch_compile.", default_text="auto",
    )]
    uncached_casts: Annotated[LeverChoice, Option(
        "With checkpointing under autocast, keep no 16-bit copies of the weights until the end of the forward pass. "
        "auto, on, off: as torch_compile.", default_text="auto",
    )]
    fused_loss: Annotated[LeverChoice, Option(
        "Compute the loss of a causal language model without its whole logits. auto, on, off: as torch_compile.",
        BOTH, default_text="auto", help_in={"predict": "Compute the loss of a causal language model without its whole "
        "logits. auto: where nothing fits without; on: always; off: never."},
    )]
    sparse_prediction: Annotated[LeverChoice, Option(
        "Compute the logits of a masked language model for the masked tokens alone, of which searches have "
        "15 %. auto, on, off: as torch_compile.",
        default_text="auto",
    )]
    cudnn_attention: Annotated[LeverChoice, Option(
        "Attention by cuDNN's kernels, which are compiled for each new length. auto: try without where lengths differ; "
        "on: leave it to torch; off: never.", default_text="auto",
    )]
    non_blocking: Annotated[LeverChoice, Option(
        "Have the host go on while the GPU computes (accelerator_config's non_blocking, and no "
        "logging_nan_inf_filter). auto, on, off: as torch_compile.", default_text="auto",
    )]
    float8: Annotated[SwitchChoice, Option(
        "Beside bf16 or fp16, multiply in FP8 within the model's layers (torchao): another numeric, for GPUs that have "
        "it, and fast where compiled.", default_text="off",
    )]
    liger: Annotated[LeverChoice, Option("Liger kernels. auto: try with and without; on: always; off: never.",
        default_text="off", own_code_decides=True,
    )]
    cpu_affinity: Annotated[LeverChoice, Option(
        "Pin all threads to one CPU core. auto: try it on the best candidate if it is host-bound; on: always; off: "
        "never.", default_text="auto",
    )]


class _How(TypedDict, total=False):
    """How trials are chosen and measured."""

    objective: Annotated[Objective, Option("Find the most samples a second, or the largest batch that fits.",
        default_text="throughput",
    )]
    effort: Annotated[SearchEffort, Option(
        "quick: stop at the first answer, of batch, accumulation, checkpointing and precision; default: go on with "
        "what may make it faster, on a GPU.", default_text="default",
    )]
    trials: Annotated[int | None, Option("Run at most N trials.", BUDGET,
        help_in={"resume": "Run at most N trials, including those already recorded [default: the search's]."},
    )]
    time_budget: Annotated[float | str | None, Option(
        "Start no trial that would end later than this, e.g. 5m.", BUDGET, kind=SECONDS,
        help_in={"resume": "Start no trial after this long, including the time already spent [default: the search's]."},
    )]
    trial_timeout: Annotated[float | str | None, Option(
        "Time limit of one trial [default: 3m, and more for large models].", BUDGET, kind=SECONDS,
        help_in={"resume": "Time limit of one trial [default: the search's]."},
    )]
    baseline: Annotated[bool, Option("Do not measure the TrainingArguments defaults for comparison.",
        flag="--no-baseline",
    )]
    verify: Annotated[bool, Option("At the end, check the result with a stock Trainer, as autotune verify does.")]
    fresh: Annotated[bool, Option("Measure everything again; reuse nothing of earlier searches.")]
    unprotected: Annotated[bool, Option(
        "Search your own code with nothing between it and your files: it writes, renames and deletes as it would by "
        "itself, in every trial.",
    )]
    tolerance: Annotated[float | str, Option(
        "Smallest relative gain in samples/s that is worth a trial. Of candidates this close to the fastest, the "
        "simplest wins.", kind=SHARE, default_text="0.01",
    )]
    sampler: Annotated[SamplerName, Option("What proposes candidates: autotune's own policy, or a sampler of Optuna.",
        default_text="autotune",
    )]
    seed: Annotated[int, Option("Seed of the sampler, the random weights and the data.", kind=SEED, default_text="42")]


class _Verified(TypedDict, total=False):
    """How a result is checked."""

    steps: Annotated[int | None, Option(
        "Optimizer steps of the stock run [default: 100, or what two minutes take, 10 at least].", VERIFY,
    )]


class _Shown(TypedDict, total=False):
    """How predictions are shown."""

    all_batches: Annotated[bool, Option("Show every batch, not only the fastest that fits.", PREDICT, flag="--all")]
    anatomy: Annotated[bool, Option("Show what each peak and each step consists of.", PREDICT)]
    fail_if_not_fit: Annotated[bool, Option(
        "End with exit code 6 unless a batch is predicted to fit on every GPU that is named.", PREDICT,
    )]


class _Kept(TypedDict, total=False):
    """Where the study is recorded."""

    study: Annotated[str | None, Option(
        "Name of the study; an existing one is continued [default: from the model and the effective batch].",
        metavar="NAME",
    )]
    storage: Annotated[str | os.PathLike[str], Option(
        "SQLite file or SQLAlchemy URL of the database of studies; also AUTOTUNE_STORAGE.", STORED,
        "studies/autotune.db", kind=PATH, metavar="FILE|URL", envvar="AUTOTUNE_STORAGE",
    )]
    wait: Annotated[bool, Option("Wait while another search holds the device or the study.", BUDGET)]


class _CommandLine(TypedDict, total=False):
    """Options of the command line that ``autotune.search`` does not have."""

    server: Annotated[str | None, Option(
        "URL of a service that runs the search, from autotune serve; its token is in AUTOTUNE_TOKEN.",
        (
            "search", "resume", "predict", "advise", "verify", "show", "report", "export", "queue", "follow", "cancel",
        ),
        metavar="URL", envvar="AUTOTUNE_SERVER",
        help_in={"predict": "URL of a service that predicts.", "advise": "URL of a service that predicts.",
                 "verify": "URL of a service that runs it.",
                 "show": "URL of a service that has the study.", "report": "URL of a service that has the study.",
                 "export": "URL of a service that has the study.", "resume": "URL of a service that has the study."},
    )]
    lever: Annotated[Sequence[str], Option(
        "Turn a lever on or off, or give its value: --lever torch_compile=layers --lever cuda_graphs=off. The name "
        "alone turns it on. May be repeated.", BOTH, kind=GIVEN_LEVERS, section=TRIED, metavar="NAME[=VALUE]",
    )]
    priority: Annotated[int, Option("Priority in the queue of the service, 0 to 10.", kind=SEED, default_text="0")]
    dry_run: Annotated[bool, Option(
        "Say what would be tried, what is predicted of it, and what would be written where; nothing is trained or "
        "written.", SEARCH,
    )]
    as_json: Annotated[bool, Option("Print one JSON document instead of text.", JSON, flag="--json")]
# fmt: on


class SearchOptions(_OwnCode, _Workload, _Data, _Device, _Tried, _Levers, _How, _Kept, total=False):
    """The options of ``autotune.search`` that are given by name."""


_GROUPS: tuple[tuple[type, str, bool], ...] = (
    (_Model, TRAINED, True),
    (_OwnCode, TRAINED, False),
    (_Step, TRAINED, False),
    (_Workload, TRAINED, True),
    (_Data, DATA, True),
    (_OtherGpus, DEVICE, False),
    (_Device, DEVICE, False),
    (_Tried, TRIED, False),
    (_Levers, TRIED_LEVERS, False),
    (_How, HOW, False),
    (_Verified, HOW, False),
    (_Shown, WHERE, False),
    (_Kept, WHERE, False),
    (_CommandLine, WHERE, False),
)
"""The groups in the order of help: the heading of each, and whether the user's own training code decides it all."""

_KINDS: dict[Any, Kind] = {
    bool: FLAG, int: COUNT, int | None: COUNT, str | None: TEXT, str | Sequence[str] | None: WORDS,
}  # fmt: skip
"""The kinds of options that say only which type their values have."""


def _kind_of(values: Any) -> Kind:
    """Return the kind of an option from the annotated type of its values; a ``Literal`` gives the choices."""
    for kind in (values, *get_args(values)):
        if get_origin(kind) is Literal:
            return choice(*get_args(kind))
    return _KINDS[values]


def _declared() -> Iterator[Option]:
    """Yield the options of all groups, with what follows from the annotated types and the groups filled in."""
    for group, heading, own_code_decides in _GROUPS:
        for name, annotation in get_type_hints(group, include_extras=True).items():
            values, option = get_args(annotation)
            yield replace(
                option,
                name=name,
                kind=_kind_of(values) if option.kind is _FROM_TYPE else option.kind,
                section=option.section or heading,
                own_code_decides=option.own_code_decides or own_code_decides,
                is_lever=group is _Levers,
            )


OPTIONS: tuple[Option, ...] = tuple(_declared())

BY_NAME: Mapping[str, Option] = {option.name: option for option in OPTIONS}


def options_of(command: str) -> tuple[Option, ...]:
    """Return the options of a command, in the order of its help."""
    return tuple(option for option in OPTIONS if command in option.commands)


def names(section: str) -> tuple[str, ...]:
    """Return the names of the options in a section of the help."""
    return tuple(option.name for option in OPTIONS if option.section == section)


BRINGS_CODE: tuple[str, ...] = tuple(o.name for o in OPTIONS if o.kind in (TRAINER, LOOP, SCRIPT))
"""The options that name training code of the user's own."""


def names_of_levers(command: str = "search") -> tuple[str, ...]:
    """Return the names of the levers that a command has."""
    return tuple(option.name for option in options_of(command) if option.is_lever)


def values_of(option: Option) -> str:
    """Return the possible values of a lever in words: ``auto, on, off``."""
    return ", ".join(option.kind.choices or ("auto", "off", "a number"))
