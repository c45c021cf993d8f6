"""Declare every option of a search once: its name, its kind of value, its help, its name in JSON.

The command line, the checks of ``autotune.search``, the JSON of a recorded request and the reference pages are made
from ``OPTIONS``. To add an option, add an ``Option`` here, its type in ``SearchOptions`` of ``api.py`` and, where a
search records it, the field of ``SearchRequest``; tests compare those with this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Literal, get_args

from autotune.core.candidate import PRECISIONS, STRATEGIES
from autotune.core.ceiling import DEFAULT_HEADROOM_FRACTION, Headroom
from autotune.core.option_kinds import (
    BYTES,
    COUNT,
    COUNTS,
    DATASET,
    FLAG,
    GPUS,
    HEADROOM,
    LAYERS,
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
from autotune.core.workload import DTYPES, TASKS, PeftName, QuantizeName

LeverChoice = Literal["auto", "on", "off"]
SwitchChoice = Literal["on", "off"]
CheckpointingChoice = Literal["auto", "on", "off"]
Objective = Literal["throughput", "max-batch"]
SearchEffort = Literal["quick", "default"]
SamplerName = Literal["autotune", "grid", "tpe", "random"]
OPTUNA_SAMPLERS: Final[tuple[SamplerName, ...]] = ("tpe", "random")
"""Names of Optuna's samplers, which know nothing of memory and never finish by themselves."""

LEVER = choice(*get_args(LeverChoice))

SEARCH, PREDICT, VERIFY = ("search",), ("predict",), ("verify",)
BOTH = ("search", "predict")
ADVISE, PREDICTED, ALL = ("advise",), ("predict", "advise"), ("search", "predict", "advise")
BUDGET = ("search", "resume")
STORED = (
    "search",
    "predict",
    "advise",
    "resume",
    "verify",
    "show",
    "studies",
    "report",
    "export",
    "run",
    "dashboard",
    "db",
    "serve",
    "token",
)
JSON = (
    "search", "predict", "advise", "resume", "verify", "show", "studies", "devices", "models", "queue", "follow",
)  # fmt: skip

TRAINED, DATA, DEVICE = "What is trained", "Your data", "On what"
TRIED, HOW, WHERE = "What is tried", "How it is searched", "Where it goes"


@dataclass(frozen=True)
class Option:
    """One option: the parameter ``name`` in Python, and on the command line ``--name`` with dashes or ``flag``."""

    name: str
    kind: Kind
    help: str
    section: str
    """The heading that it stands under in help."""
    commands: tuple[str, ...] = SEARCH
    default_text: str | None = None
    """The default as it is written on the command line, and shown there."""
    flag: str | None = None
    """On the command line, where that is not made of the name. ``--no-…`` is a flag that is on by default."""
    metavar: str | None = None
    help_in: Mapping[str, str] = field(default_factory=dict)
    """Other help, by command."""
    envvar: str | None = None
    in_function: bool = True
    """Whether ``autotune.search`` has it, where ``search`` has it."""
    own_code_decides: bool = False
    """Whether the user's own training code decides it, so that the option is refused beside such code."""
    request_field: str | None = None
    """The field of ``SearchRequest`` that holds it."""
    recorded_as: str | None = None
    """Its name in the JSON of a request, where that is not the field's; empty where it is not recorded."""
    sparse: bool = False
    """Left out of the JSON where it has its default, as in requests from before there was such an option."""

    @property
    def parameter(self) -> str:
        """How it is written on the command line."""
        return self.flag or "--" + self.name.replace("_", "-")

    @cached_property
    def default(self) -> Any:
        """The value where nothing is given."""
        if self.kind is FLAG:
            return self.parameter.startswith("--no-")
        if self.kind is SCRIPT:
            return ()
        return None if self.default_text is None else self.kind.read(self.default_text)

    @property
    def key(self) -> str:
        """Its name in the JSON of a request; empty where it is not recorded."""
        return (self.request_field or "") if self.recorded_as is None else self.recorded_as


_DATA: dict[str, Any] = {"section": DATA, "own_code_decides": True}

OPTIONS: tuple[Option, ...] = (
    Option(
        "model", MODEL, "Catalog name (autotune models), folder with a config.json, or hub name.", TRAINED, ALL,
        metavar="NAME|FOLDER", own_code_decides=True,
    ),
    Option(
        "trainer", TRAINER,
        "In place of a model: train.py:build, where build(overrides: dict) returns your own Trainer.", TRAINED,
        metavar="FILE:FUNCTION",
    ),
    Option(
        "loop", LOOP,
        "In place of a model: train.py:train, where train(config) is a training loop of your own that goes over "
        "autotune.steps(loader).", TRAINED, metavar="FILE:FUNCTION",
    ),
    Option(
        "script", SCRIPT, "In place of a model: your own training script and its options.", TRAINED, ("search", "run"),
    ),
    Option(
        "code", TEXT, "In place of a model, with --server: code by the name that the operator lists it under.", TRAINED,
        metavar="NAME", in_function=False,
    ),
    Option(
        "effective_batch", COUNT,
        "Samples of an optimizer step: per-device batch × accumulation × world size, always exactly. Without it "
        "nothing is accumulated and any batch is tried. A Trainer or script of your own keeps its effective batch.",
        TRAINED, ALL, request_field="effective_batch",
        help_in=dict.fromkeys(
            PREDICTED,
            "Samples of an optimizer step: per-device batch × accumulation × world size, always exactly. Without it "
            "nothing is accumulated and any batch is predicted.",
        )
        | {"advise": "Samples of an optimizer step: per-device batch × accumulation × GPUs, always exactly."},
    ),
    Option(
        "effective_tokens", COUNT, "The same in tokens, in place of --effective-batch: a multiple of --seq-len.",
        TRAINED, BOTH, own_code_decides=True,
    ),
    Option(
        "task", choice(*TASKS),
        f"One of {', '.join(TASKS)} [default: from the architecture in config.json].", TRAINED, ALL,
        metavar="TASK", own_code_decides=True,
    ),
    Option("seq_len", COUNT, "Tokens in a sample [default: 512 or the model's maximum].", TRAINED, ALL,
           own_code_decides=True),
    Option(
        "images", COUNT, "Images in each sample of image-text-to-text, tiles of larger ones counted [default: 1].",
        TRAINED, ALL, own_code_decides=True,
    ),
    Option(
        "image_size", COUNT, "Pixels of each side of the images [default: the model's, else about 448].", TRAINED, ALL,
        own_code_decides=True, metavar="PIXELS",
    ),
    Option(
        "padding", SHARE, "Share of each text sample that is padding, masked by the attention_mask.", TRAINED, ALL,
        "0", own_code_decides=True,
    ),
    Option(
        "dtype", choice(*DTYPES),
        "Dtype of the stored weights; --precision is that of autocast [default: float32; with --peft bfloat16 where "
        "the device has it, else that of the config].", TRAINED, ALL, own_code_decides=True,
    ),
    Option(
        "pretrained", FLAG, "Load pretrained weights; speed and memory do not depend on them.", TRAINED,
        own_code_decides=True,
    ),
    Option(
        "peft", choice(*get_args(PeftName)),
        "Train LoRA adapters on all linear layers, with the weights frozen.", TRAINED,
        ALL, own_code_decides=True,
    ),
    Option("lora_rank", COUNT, "Rank of the LoRA adapters [default: 16].", TRAINED, ALL, own_code_decides=True),
    Option("lora_alpha", COUNT, "Their alpha [default: twice the rank].", TRAINED, ALL, own_code_decides=True),
    Option("lora_dropout", SHARE, "Dropout before them [default: 0].", TRAINED, ALL, own_code_decides=True),
    Option(
        "lora_targets", WORDS, "Names of the layers that get them [default: all linear layers but the head].", TRAINED,
        ALL, own_code_decides=True,
    ),
    Option("dora", FLAG, "Weight-decomposed adapters (DoRA).", TRAINED, ALL, own_code_decides=True),
    Option(
        "rslora", FLAG, "Scale adapters by the root of their rank (rsLoRA).", TRAINED, ALL, own_code_decides=True
    ),
    Option(
        "quantize", choice(*get_args(QuantizeName)),
        "Quantize the frozen weights with bitsandbytes: 4bit is nf4 with double quantization.", TRAINED, ALL,
        own_code_decides=True,
    ),
    Option(
        "dataset", DATASET,
        "Your samples: jsonl, csv, parquet, a folder of images or from save_to_disk, NAME[:CONFIG] on the hub "
        "[default: synthetic samples].", metavar="FILE|FOLDER|NAME", **_DATA,
    ),
    Option("split", TEXT, "Split of the dataset [default: train].", metavar="NAME", **_DATA),
    Option("text_column", WORDS, "Column of the text, two for pairs [default: text, sentence or the only one].",
           **_DATA),
    Option(
        "label_column", TEXT,
        "Column of classes or numbers, or of target texts for seq2seq [default: label, labels or target].",
        metavar="NAME", **_DATA,
    ),
    Option("image_column", TEXT, "Column of the images [default: image or img].", metavar="NAME", **_DATA),
    Option("tokenizer", TOKENIZER, "Tokenizer: a folder or a hub name [default: the model's own].",
           metavar="FOLDER|NAME", **_DATA),
    Option(
        "pad_to_max_length", FLAG,
        "Pad to --seq-len [default: to the longest of a batch, as DataCollatorWithPadding does].", **_DATA,
    ),
    Option("pad_to_multiple_of", COUNT, "Pad further, to a multiple of N tokens.", **_DATA),
    Option("group_by_length", FLAG,
        "Make batches of samples of similar lengths (train_sampling_strategy=group_by_length).", **_DATA),
    Option(
        "packing", FLAG,
        "Pack the samples of a causal language model in rows of at most --seq-len tokens, each whole. Batches are then "
        "counted in rows, which changes how many samples a step has.", **_DATA,
    ),
    Option("gpu", WORDS, "GPUs by name, e.g. rtx-3090,v100-16gb,a100-80gb.", DEVICE, PREDICTED,
           help_in={"advise": "GPUs by name, e.g. rtx-4090,l4,h100 [default: all]."}),
    Option(
        "gpu_spec", PATH, "JSON file that describes other GPUs, to be named with --gpu.", DEVICE, PREDICTED,
        metavar="FILE",
    ),
    Option(
        "price", WORDS, "Prices of GPUs per hour, e.g. l4=0.70,h100=2.95 or h100=2.70EUR.", DEVICE, ADVISE,
        metavar="GPU=PRICE,…",
    ),
    Option("prices", PATH, "JSON file with such prices [default: dated examples].", DEVICE, ADVISE, metavar="FILE"),
    Option(
        "gpu_counts", COUNTS, "Numbers of GPUs that train together with DDP, e.g. 1,2,4.", DEVICE, ADVISE, "1",
        flag="--gpus",
    ),
    Option("samples", NUMBER, "Samples of the whole training job, e.g. 1e6.", TRAINED, ADVISE, "1e6"),
    Option(
        "device", TEXT, "cuda:0, cpu or a GPU's UUID [default: the first GPU, else the CPU].", DEVICE,
        BUDGET, metavar="NAME|UUID",
        help_in={"resume": "Another device of the same name [default: the one it ran on]."},
    ),
    Option(
        "gpus", GPUS,
        "Train on several GPUs together: a number, all, or a list such as 0,1 [default: one, see --device].",
        DEVICE, ("search", "predict", "resume"), metavar="N|all|LIST",
        help_in={
            "predict": "Number of GPUs of that kind that train together; memory is that of each [default: 1].",
            "resume": "Other GPUs of that kind: as many as a trial has, or any number with --parallel.",
        },
    ),
    Option(
        "parallel", FLAG,
        "With --gpus: run one-GPU trials on all of them at the same time, not together.", DEVICE, BUDGET,
    ),
    Option(
        "memory_limit", BYTES,
        "Search as if the device had only this much memory, e.g. 24GiB [default: all that is free].", DEVICE, BOTH,
        help_in={"predict": "Memory of the GPU, e.g. 24GiB [default: that of --gpu]."},
        request_field="memory_limit_bytes",
    ),
    Option(
        "headroom", HEADROOM,
        f"Memory to keep free below the limit, e.g. 5% or 1GiB [default: {DEFAULT_HEADROOM_FRACTION:.0%}].",
        DEVICE, ALL, request_field="headroom",
    ),
    Option("world_size", COUNT,
        "Number of devices that will share the effective batch; trials still run on one.", DEVICE, BOTH, "1",
           request_field="world_size"),
    Option(
        "precision", words(PRECISIONS),
        "Precisions to try, e.g. bf16,tf32 [default: all that the device has].", TRIED, ALL,
        request_field="precisions", recorded_as="precision",
    ),
    Option(
        "gradient_checkpointing", choice(*get_args(CheckpointingChoice)),
        "auto: try with and without; on: always; off: never.", TRIED, ALL,
        "auto", request_field="gradient_checkpointing",
    ),
    Option(
        "strategy", words_or_auto(STRATEGIES),
        "Ways for several GPUs to share the model: ddp, fsdp-keep, fsdp, zero1, zero2, zero3, zero2-offload "
        "[default: all possible].",
        TRIED, BOTH,
        request_field="strategies", recorded_as="strategy", sparse=True,
    ),
    Option(
        "attn", WORDS, "Attention implementations, e.g. sdpa,eager [default: sdpa where the model has it].", TRIED, ALL,
        own_code_decides=True, request_field="attn_implementations", recorded_as="attn_implementation",
    ),
    Option(
        "experts", WORDS,
        "How a mixture of experts is computed, e.g. grouped_mm,batched_mm,eager [default: as transformers chooses].",
        TRIED, own_code_decides=True, request_field="experts_implementations", recorded_as="experts_implementation",
        sparse=True,
    ),
    Option(
        "optim", WORDS,
        "Values of TrainingArguments.optim [default: adamw_torch_fused]. Your own code keeps its own.", TRIED, ALL,
        help_in=dict.fromkeys(PREDICTED, "Values of TrainingArguments.optim [default: adamw_torch_fused]."),
        request_field="optims", recorded_as="optim",
    ),
    Option(
        "expandable_segments", LEVER,
        "Expandable segments of CUDA's allocator. auto: try them where memory limits the best; on: always; off: never "
        "[default: off, or on where PYTORCH_ALLOC_CONF says so].", TRIED,
        request_field="expandable_segments", sparse=True,
    ),
    Option(
        "torch_compile", LEVER,
        "auto: try it on the best candidates once there is a first answer, where the gain is expected to be worth its "
        "time; on: on every candidate; off: never.", TRIED, default_text="auto",
        request_field="torch_compile", sparse=True,
    ),
    Option(
        "cuda_graphs", LEVER,
        "Forward and backward passes as CUDA graphs, without a compiler. auto, on, off: as --torch-compile.", TRIED,
        default_text="auto", request_field="cuda_graphs", sparse=True,
    ),
    Option(
        "partial_checkpointing", LAYERS,
        "Recompute only some of the layers. auto: as many as memory asks for, once there is a first answer; a number: "
        "that many; off: all or none.", TRIED,
        default_text="auto", request_field="partial_checkpointing", sparse=True,
    ),
    Option(
        "unpadded", LEVER,
        "Pass no attention mask where no sample is padded. auto, on, off: as --torch-compile.", TRIED,
        default_text="auto", request_field="unpadded", sparse=True,
    ),
    Option(
        "padding_free", choice(*get_args(SwitchChoice)),
        "Put the samples of a batch of a causal language model in one row, so that none is padded; each attends to "
        "itself alone. Your own batches differ in length then.", TRIED, default_text="off",
        request_field="padding_free", sparse=True,
    ),
    Option(
        "fused_loss", LEVER,
        "Compute the loss of a causal language model without its whole logits. auto, on, off: as --torch-compile.",
        TRIED, default_text="auto", request_field="fused_loss", sparse=True,
    ),
    Option(
        "liger", LEVER, "Liger kernels. auto: try with and without; on: always; off: never.", TRIED, default_text="off",
        own_code_decides=True, request_field="liger", sparse=True,
    ),
    Option(
        "cpu_affinity", LEVER,
        "Pin all threads to one CPU core. auto: try it on the best candidate if it is host-bound; on: always; "
        "off: never.", TRIED,
        default_text="auto", request_field="cpu_affinity", sparse=True,
    ),
    Option(
        "batch_multiple", COUNT,
        "Try only per-device batches that are multiples of N [default: 8; smaller ones where 8 does not work].",
        TRIED, ALL, request_field="batch_multiple",
    ),
    Option(
        "objective", choice(*get_args(Objective)),
        "Find the most samples a second, or the largest batch that fits.", HOW,
        default_text="throughput", request_field="objective",
    ),
    Option(
        "effort", choice(*get_args(SearchEffort)),
        "quick: stop at the first answer, of batch, accumulation, checkpointing and precision; default: go on with "
        "what may make it faster, on a GPU.", HOW, default_text="default", request_field="search_effort",
        recorded_as="effort", sparse=True,
    ),
    Option(
        "trials", COUNT, "Run at most N trials.", HOW, BUDGET, request_field="trials",
        help_in={"resume": "Run at most N trials, including those already recorded [default: as before]."},
    ),
    Option(
        "time_budget", SECONDS, "Start no trial after this long, e.g. 5m.", HOW, BUDGET,
        help_in={"resume": "Start no trial after this long, including the time already spent [default: as before]."},
        request_field="time_budget_seconds",
    ),
    Option(
        "trial_timeout", SECONDS, "Time limit of one trial [default: 3m, and more for large models].", HOW, BUDGET,
        help_in={"resume": "Time limit of one trial [default: as before]."}, request_field="trial_timeout_seconds",
    ),
    Option(
        "baseline", FLAG, "Do not measure the TrainingArguments defaults for comparison.", HOW, flag="--no-baseline",
        request_field="measure_baseline",
    ),
    Option("verify", FLAG, "At the end, check the result with a stock Trainer, as autotune verify does.", HOW),
    Option("steps", COUNT, "Optimizer steps of the stock run.", HOW, VERIFY, "100"),
    Option(
        "again", FLAG, "Measure the winner's trial again after the stock run, also where the promise is kept.", HOW,
        VERIFY,
    ),
    Option(
        "fresh", FLAG, "Measure everything again; reuse nothing of earlier searches.", HOW,
        request_field="fresh",
    ),
    Option(
        "unprotected", FLAG,
        "Search your own code with nothing between it and your files: it writes, renames and deletes as it would by "
        "itself, in every trial.", HOW, request_field="unprotected", sparse=True,
    ),
    Option(
        "tolerance", SHARE,
        "Smallest relative gain in samples/s that is worth a trial. Of candidates this close to the fastest, the "
        "simplest wins.", HOW,
        default_text="0.01", request_field="tolerance", sparse=True,
    ),
    Option(
        "sampler", choice(*get_args(SamplerName)),
        "What proposes candidates: autotune's own policy, or a sampler of Optuna.", HOW, default_text="autotune",
        request_field="sampler",
    ),
    Option("seed", SEED,
        "Seed of the sampler, the random weights and the data.", HOW, default_text="42", request_field="seed"),
    Option(
        "study", TEXT,
        "Name of the study; an existing one is continued [default: from the model and the effective batch].",
        WHERE, metavar="NAME", request_field="study", recorded_as="",
    ),
    Option("all_batches", FLAG, "Show every batch, not only the fastest that fits.", WHERE, PREDICT, flag="--all"),
    Option("anatomy", FLAG, "Show what each peak and each step consists of.", WHERE, PREDICT),
    Option(
        "storage", PATH, "SQLite file or SQLAlchemy URL of the database of studies; also AUTOTUNE_STORAGE.", WHERE,
        STORED, "studies/autotune.db", metavar="FILE|URL", envvar="AUTOTUNE_STORAGE",
    ),
    Option(
        "server", TEXT, "URL of a service that runs the search, from autotune serve; its token is in AUTOTUNE_TOKEN.",
        WHERE, (
            "search", "resume", "predict", "advise", "verify", "show", "report", "export", "queue", "follow", "cancel",
        ), metavar="URL", envvar="AUTOTUNE_SERVER",
        help_in={"predict": "URL of a service that predicts.", "advise": "URL of a service that predicts.",
                 "verify": "URL of a service that runs it.",
                 "show": "URL of a service that has the study.", "report": "URL of a service that has the study.",
                 "export": "URL of a service that has the study.", "resume": "URL of a service that has the study."},
        in_function=False,
    ),
    Option(
        "executor", TEXT,
        "Search on a node of a Ray cluster: ray://HOST:10001, or ray://auto on one of its nodes; its token is in "
        "RAY_AUTH_TOKEN.", DEVICE, (*BUDGET, "serve"), metavar="URL",
    ),
    Option("priority", SEED,
        "Priority in the queue of the service, 0 to 10.", WHERE, default_text="0", in_function=False),
    Option("wait", FLAG, "Wait while another search holds the device or the study.", WHERE, BUDGET),
    Option("as_json", FLAG, "Print one JSON document instead of text.", WHERE, JSON, flag="--json",
           in_function=False),
)  # fmt: skip

BY_NAME: Mapping[str, Option] = {option.name: option for option in OPTIONS}


def options_of(command: str) -> tuple[Option, ...]:
    """Return the options of a command, in the order of its help."""
    return tuple(option for option in OPTIONS if command in option.commands)


def names(section: str) -> tuple[str, ...]:
    """Return the names of the options under a heading."""
    return tuple(option.name for option in OPTIONS if option.section == section)


BRINGS_CODE: tuple[str, ...] = tuple(o.name for o in OPTIONS if o.kind in (TRAINER, LOOP, SCRIPT))
"""The options that name training code of the user's own."""


def json_value(value: Any) -> Any:
    """Return the value of an option as JSON has it, from which ``check_arguments`` makes the same value again."""
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, Headroom):
        return f"{value.size_bytes}B" if value.size_bytes is not None else str(value.fraction)
    return value


def check_arguments(given: Mapping[str, Any], *required: str) -> dict[str, Any]:
    """Return Python arguments as the command line has them: text parsed, paths as text, lists as tuples.

    ``None`` stays where it is the default of an option that is not ``required``. Raises ``InvalidRequestError`` for
    what is no value of its option.
    """
    return {
        name: None
        if value is None and BY_NAME[name].default is None and name not in required
        else BY_NAME[name].kind.check(name, value)
        for name, value in given.items()
    }


def request_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a ``SearchRequest`` that options say, by name; those that were not given are left out."""
    return {
        option.request_field: options[option.name]
        for option in OPTIONS
        if option.request_field is not None and options.get(option.name) is not None
    }
