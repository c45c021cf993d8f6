"""Turn the options of the command line and of the Python function into a workload and a request."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autotune.core.dataset_spec import DEFAULT_SPLIT, DataSpec
from autotune.core.device import Device, Precision
from autotune.core.errors import InvalidRequestError
from autotune.core.options import BY_NAME, DATA, OPTIONS, names, names_of_levers, options_of
from autotune.core.training_source import find_loop, find_script, find_trainer
from autotune.core.workload import DEFAULT_LORA_RANK, DTYPES, LORA_DEFAULTS, DTypeName, Task, Workload
from autotune.devices.listing import find_device, find_gpus
from autotune.models.catalog import find
from autotune.models.dataset_files import locate, tokenizer_content
from autotune.models.resolve import ModelSource, resolve_model
from autotune.models.tasks import check_images_fit, choose_image_side, choose_seq_len, infer_task, with_quantize_alone
from autotune.space.features import segments_expand
from autotune.tuning.allowed import check_request
from autotune.tuning.request import DEFAULT_OPTIM, SearchRequest, request_fields


def open_search(given: Mapping[str, Any]) -> SearchRequest:
    """Return the checked request of the user's options. Raises every error that can be found without a process."""
    request = request_of(given)
    check_request(request)
    return request


def request_of(given: Mapping[str, Any], devices: Sequence[Device] = ()) -> SearchRequest:
    """Return the unchecked request of the options that the user gave, with defaults for all others.

    ``devices``, one for each rank, replace the devices that the options name.
    """
    options = {**{option.name: option.default for option in options_of("search")}, **given}
    texts = (text for value in options.values() for text in (value if isinstance(value, list | tuple) else (value,)))
    if any(isinstance(text, str) and "\0" in text for text in texts):
        raise InvalidRequestError("an option holds a NUL character", "leave it out: no file and no model is named so")
    if options.get("levers") == "off":
        off = {name: "off" for name in names_of_levers() if name not in given and options[name] in ("auto", None)}
        # A training without autotune has the allocator's setting of the environment, so that it is kept.
        if segments_expand(os.environ) is not None:
            off.pop("expandable_segments", None)
        options = {**options, **off}
    named = devices or (named_devices(options) if options.get("gpus") is not None else ())
    if options.get("packing") and "padding_free" in given and options["padding_free"] == "off":
        raise InvalidRequestError(
            f"{BY_NAME['padding_free'].said('off')} does not go with --packing, whose rows are never padded",
            "leave it out",
        )
    own = _own_workload(options, given, ranks=1 if options.get("parallel") else max(1, len(named)))
    workload = own or build_workload(options)
    options = with_effective_batch(options, workload)
    device, *others = named or named_devices(options)
    workload = workload if own else in_usual_dtype(workload, options["dtype"], device.precisions)
    # Devices that each run trials of one rank, in place of others that train together.
    beside: list[Device] = []
    if options.get("parallel"):
        beside, others = others, []
    if others and options["world_size"] == 1:
        options = {**options, "world_size": (1 + len(others)) // options.get("context_parallel", 1)}
    defaults: dict[str, Any] = {
        "optims": () if own else (DEFAULT_OPTIM,),
        # As the environment sets them for training.
        "expandable_segments": "on" if device.kind == "cuda" and segments_expand(os.environ) else "off",
    }
    request = SearchRequest(
        workload=workload,
        device=device,
        others=tuple(others),
        beside=tuple(beside),
        **{**defaults, **request_fields(options)},
    )
    expanding = replace(request, expandable_segments="auto")
    is_left_open = options.get("expandable_segments") is None and segments_expand(os.environ) is None
    return expanding if is_left_open and "expandable_segments" in expanding.late_settings(None) else request


def named_devices(options: dict[str, Any]) -> tuple[Device, ...]:
    """Return the devices that the options name, one for each rank."""
    gpus, device = options.get("gpus"), options["device"]
    if gpus is None and options.get("parallel"):
        instead = "add --gpus all" if device is None else f"give --gpus all in place of --device {device}"
        raise InvalidRequestError("--parallel runs trials on several GPUs, and none are named", instead)
    if gpus is None:
        return (find_device(device),)
    if device is not None:
        raise InvalidRequestError(
            f"--device {device} is one device, and --gpus {gpus} names others", "give one of the two"
        )
    return find_gpus(gpus)


def build_workload(options: dict[str, Any]) -> Workload:
    """Return the workload (model, task, samples, dtype and adapters) that the options describe, for a model by name."""
    source = resolve_model(options["model"])
    task = options["task"] or infer_task(source.config)
    _check_meaning(options, task)
    data = _dataset_of(options, source, task)
    seq_len = choose_seq_len(source.config, task, options["seq_len"])
    images, image_side = _images(options, source, task, seq_len)
    workload = Workload(
        model=source.name,
        config=source.config,
        task=task,
        seq_len=seq_len,
        padding=options.get("padding") or 0.0,
        dtype=options["dtype"] or "float32",
        peft=options.get("peft"),
        lora_rank=(options.get("lora_rank") or DEFAULT_LORA_RANK) if options.get("peft") else None,
        lora_options=_lora_options(options),
        quantize=options.get("quantize"),
        weights=_weights_location(source) if options.get("pretrained") else None,
        data=data,
        images=images,
        image_side=image_side,
    )
    return with_quantize_alone(workload)


def _images(options: dict[str, Any], source: ModelSource, task: Task, seq_len: int) -> tuple[int, int | None]:
    """Return the number of images in a synthetic sample and their side in pixels; 0 and ``None`` where there are none.

    Raises an error where their tokens are more than ``seq_len``, or the task has no images.
    """
    asked, side = options.get("images"), options.get("image_size")
    if task != "image-text-to-text":
        for name in ("images", "image_size"):
            if options.get(name):
                raise InvalidRequestError(f"{BY_NAME[name].parameter} does not apply to {task}", "leave it out")
        return 0, None
    images, side = asked or 1, choose_image_side(source.config, side)
    if options.get("dataset") is not None:
        return 0, None
    check_images_fit(source.config, images, side, seq_len)
    return images, side


def with_effective_batch(options: dict[str, Any], workload: Workload) -> dict[str, Any]:
    """Return the options with an effective batch in tokens converted to samples."""
    tokens = options.get("effective_tokens")
    if tokens is None:
        return options
    said = f"--effective-tokens {tokens}"
    if options["effective_batch"] is not None:
        raise InvalidRequestError(f"{said} and --effective-batch both say what a step is", "give one of the two")
    if not workload.is_text:
        raise InvalidRequestError(f"{said}: samples of {workload.task} are not text", "give --effective-batch")
    if workload.data is not None and not workload.data.packing:
        raise InvalidRequestError(
            f"{said}: samples of --dataset differ in length", "give --effective-batch, in samples"
        )
    samples, rest = divmod(tokens, workload.seq_len)
    if rest or not samples:
        near = [count * workload.seq_len for count in (samples, samples + 1) if count]
        raise InvalidRequestError(
            f"{said} is no whole number of samples of {workload.seq_len} tokens",
            f"give {' or '.join(map(str, near))}, or another --seq-len",
        )
    return {**options, "effective_batch": samples}


def in_usual_dtype(workload: Workload, asked: DTypeName | None, precisions: Collection[Precision]) -> Workload:
    """Return the workload with the requested weight dtype (``asked``), else the usual one of the device's precisions.

    Weights that are trained are stored in float32. Frozen ones are stored in bfloat16, or where the device does not
    compute in bfloat16, in the dtype of the model's config. Where the config says bfloat16, they are stored in float16,
    which allows fp16 autocast, unless a new head would be trained in float16.
    """
    if asked is not None or workload.peft is None or workload.source is not None:
        return workload
    said = workload.config.get("dtype") or workload.config.get("torch_dtype")
    usual: DTypeName = "bfloat16" if "bf16" in precisions else said if said in DTYPES else "float32"
    half = replace(workload, dtype="float16")
    if usual == "bfloat16" and "bf16" not in precisions and "fp16" in precisions and half.trained_dtype == "float32":
        return half
    return replace(workload, dtype=usual)


_LORA_ARGUMENTS = {
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_targets": "target_modules",
    "dora": "use_dora",
    "rslora": "use_rslora",
}
"""Arguments of peft's ``LoraConfig``, by the options that set them."""


def _lora_options(options: dict[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of peft's ``LoraConfig`` among the options; ``None`` without any."""
    given = {argument: options[name] for name, argument in _LORA_ARGUMENTS.items() if options.get(name)}
    given = {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}
    if given.get("target_modules") == [LORA_DEFAULTS["target_modules"]]:
        # This is peft's default, which it takes as a word of its own only, not in a list.
        del given["target_modules"]
    return given or None


def _check_meaning(options: dict[str, Any], task: Task) -> None:
    """Raise ``InvalidRequestError`` for options that have no effect with this task or without other options."""
    if task == "image-classification" and options["seq_len"] is not None:
        raise InvalidRequestError(
            f"--seq-len {options['seq_len']} does not apply to {task}, whose samples are images", "leave --seq-len out"
        )
    if task in ("image-classification", "speech-seq2seq") and options.get("padding"):
        raise InvalidRequestError(
            f"--padding {options['padding']:g} does not apply to {task}, whose samples are not text",
            "leave --padding out",
        )
    for name in ("lora_rank", *_LORA_ARGUMENTS):
        if options.get(name) and not options.get("peft"):
            raise InvalidRequestError(
                f"{BY_NAME[name].parameter} applies to LoRA adapters, and there are none", "add --peft lora"
            )
    if options["world_size"] > 1 and options["effective_batch"] is None and not options.get("effective_tokens"):
        raise InvalidRequestError(
            f"--world-size {options['world_size']} divides an effective batch, and none is given",
            "give --effective-batch, or leave --world-size out",
        )


def _weights_location(source: ModelSource) -> str:
    """Return the hub's repository or the folder of the model's weights. Raises ``InvalidRequestError`` without one."""
    place = source.repository or source.path
    if place is None:
        raise InvalidRequestError(f"--pretrained: {source.name!r} has no weights anywhere", "leave --pretrained out")
    return place


def _dataset_of(options: dict[str, Any], source: ModelSource, task: Task) -> DataSpec | None:
    """Return the dataset that the options name, hashed but not parsed; ``None`` for synthetic samples."""
    name = options.get("dataset")
    if name is None:
        for option in names(DATA):
            if options.get(option):
                raise InvalidRequestError(
                    f"{BY_NAME[option].parameter} applies to a dataset, and none is given", "give --dataset"
                )
        return None
    _check_data_meaning(options, task)
    path, kind, content = locate(name, options["split"])
    tokenizer = None
    if task != "image-classification":
        tokenizer = options["tokenizer"] or source.path or source.repository or source.name
        if os.path.isdir(folder := os.path.expanduser(tokenizer)):
            tokenizer = os.path.abspath(folder)
    tokenizer_hash = tokenizer_content(tokenizer, of_processor=task == "image-text-to-text") if tokenizer else None
    return DataSpec(
        source=path, kind=kind, content=content, split=options["split"] or DEFAULT_SPLIT,
        text_columns=options["text_column"], label_column=options["label_column"], image_column=options["image_column"],
        tokenizer=tokenizer, tokenizer_content=tokenizer_hash,
        padding="max_length" if options["pad_to_max_length"] else "longest",
        pad_to_multiple_of=options["pad_to_multiple_of"], group_by_length=options["group_by_length"],
        packing=options["packing"],
    )  # fmt: skip


def _check_data_meaning(options: dict[str, Any], task: Task) -> None:
    """Raise ``InvalidRequestError`` for options or a task that do not go with a dataset, or with each other."""
    name = options["dataset"]
    if task == "speech-seq2seq":
        raise InvalidRequestError(f"--dataset {name}: speech is measured with synthetic samples only", "leave it out")
    if options.get("padding"):
        raise InvalidRequestError(
            f"--padding {options['padding']:g} is for synthetic samples; those of --dataset have their own lengths",
            "leave --padding out",
        )
    for option in ("images", "image_size"):
        if task == "image-text-to-text" and options.get(option):
            said = BY_NAME[option].parameter
            raise InvalidRequestError(
                f"{said} {options[option]} is for synthetic samples; those of --dataset have their own images",
                f"leave {said} out",
            )
    image_only, text_only = ("image_column",), ("text_column", "tokenizer", "pad_to_max_length", "pad_to_multiple_of",
                                                "group_by_length", "packing")  # fmt: skip
    not_for_images_with_text = ("label_column", "group_by_length")
    foreign = {"image-classification": text_only, "image-text-to-text": not_for_images_with_text}.get(task, image_only)
    for option in foreign:
        if options.get(option):
            raise InvalidRequestError(f"{BY_NAME[option].parameter} does not apply to {task}", "leave it out")
    if options["packing"] and task != "causal-lm":
        raise InvalidRequestError(f"--packing: samples of {task} are not packed", "leave it out")
    padding = ["pad_to_max_length", "pad_to_multiple_of"]
    joining = {"--packing": [*padding, "group_by_length"]} if options["packing"] else {}
    if options.get("padding_free") == "on":
        joining[BY_NAME["padding_free"].said("on")] = padding
    for said, excluded in joining.items():
        for option in excluded:
            if options[option]:
                raise InvalidRequestError(
                    f"{BY_NAME[option].parameter} does not go with {said}, which leaves nothing to pad",
                    "give one of the two",
                )
    columns = options["text_column"] or ()
    if len(columns) > (2 if task == "sequence-classification" else 1):
        most = "give a column or a pair" if task == "sequence-classification" else "give one column"
        raise InvalidRequestError(f"--text-column {','.join(columns)} is too many for {task}", most)


def _own_workload(options: dict[str, Any], given: Collection[str], *, ranks: int) -> Workload | None:
    """Return the workload of the user's own code: ``trainer``, ``loop`` or ``script``; ``None`` for a model name.

    ``ranks`` is the number of processes that a script's own launcher may start. Raises ``InvalidRequestError`` where
    several of these or none are named, or where the code decides what an option that was ``given`` says.
    """
    trainer, loop, script = options["trainer"], options["loop"], options["script"]
    named = [f"--{option} {options[option]}" for option in ("trainer", "loop") if options[option]]
    if script:
        named.append(f"the script {' '.join(script)[:80]}")
    if not named:
        if options["model"] is None:
            raise InvalidRequestError(
                "nothing to train was given",
                "give --model NAME, --trainer train.py:build, --loop train.py:train, or a script after --",
            )
        return None
    if len(named) > 1:
        raise InvalidRequestError(
            f"{' and '.join(named)} cannot be combined: each names what to train", "leave one of them out"
        )
    what = named[0]
    if len(script) == 1 and not os.path.exists(script[0]) and find(script[0]) is not None:
        raise InvalidRequestError(f"there is no script {script[0]}, but a model", f"did you mean --model {script[0]}?")
    found = find_script(script, ranks) if script else None
    for option in OPTIONS:
        if option.own_code_decides and option.name in given:
            instead = f"leave {option.parameter} out"
            if option.name == "effective_tokens":
                instead = (
                    "give --effective-batch, the samples of a step; {effective_tokens} is filled with their tokens"
                )
            raise InvalidRequestError(f"{option.parameter} cannot be combined with {what}, which decides it", instead)
    if loop and options["effective_batch"] is None and options["objective"] == "throughput":
        raise InvalidRequestError(
            f"{what} has no effective batch of its own", "give --effective-batch, the samples of an optimizer step"
        )
    if found is None:
        found = find_loop(loop) if loop else find_trainer(trainer)
    return Workload.of_source(found)
