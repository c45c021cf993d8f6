"""Build the model of a workload: its weights random or pretrained, in few bits, with LoRA adapters, as asked for."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import accelerate
import torch
import torch.distributed as dist
import transformers
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoConfig, BitsAndBytesConfig, PreTrainedModel
from transformers import initialization as init
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import AutoHfQuantizer

from autotune.core.errors import InvalidRequestError
from autotune.core.workload import TASKS, Workload
from autotune.models.tasks import AUTO_CLASS_OF_TASK, PEFT_TASKS
from autotune.training.batches import SettingUnavailableError
from autotune.worker.private.accelerate import shard_for
from autotune.worker.private.transformers import class_for_config


def auto_class(workload: Workload) -> Any:
    """Return the ``AutoModelFor…`` class of the workload's task."""
    return getattr(transformers, AUTO_CLASS_OF_TASK[workload.task])


def build_config(workload: Workload) -> Any:
    """Return the model's ``PretrainedConfig`` from the workload, whose own dtype replaces that of the file."""
    facts = {key: value for key, value in workload.config.items() if key not in ("model_type", "torch_dtype", "dtype")}
    config = AutoConfig.for_model(workload.model_type, **facts)
    if workload.task == "sequence-classification" and getattr(config, "pad_token_id", None) is None:
        # Decoders need one to find the last token that is not padding.
        config.pad_token_id = 0
    return config


def model_class(workload: Workload) -> Any:
    """Return the class of the model, imported. Importing it before the fork saves each trial the import.

    Raises ``ValueError`` where transformers has no class for this task and model type.
    """
    config, found = build_config(workload), {}
    # Other tasks are only for the message.
    for task in (workload.task, *TASKS):
        with contextlib.suppress(KeyError):
            found[task] = class_for_config(auto_class(dataclasses.replace(workload, task=task)), config)
        if workload.task in found:
            return found[workload.task]
    others = f", but {' and '.join(found)}" if found else ""
    raise ValueError(f"transformers has no {workload.task} model of type {workload.model_type!r}{others}")


def check_liger_knows(model_type: str) -> None:
    """Raise ``ValueError`` where Liger has no kernels for a model. The Trainer would only log it."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    if model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        names = ", ".join(sorted(MODEL_TYPE_TO_APPLY_LIGER_FN))
        raise ValueError(f"Liger has no kernels for models of type {model_type!r}; it has them for {names}")


def check_attends_to_all(model: Any) -> None:
    """Raise ``SettingUnavailableError`` for a model without full causal attention in every layer.

    Context parallelism computes only this: accelerate drops the mask of each layer, and a layer with a recurrent state
    would begin anew in each rank. accelerate 1.15 refuses windows, and earlier versions train without them.
    """
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if kinds is None:
        # Models from before there were such lists have their window in every layer.
        kinds = ["sliding_attention"] if getattr(config, "sliding_window", None) else []
    if getattr(config, "alibi", False):
        # Its biases of positions are in the mask.
        kinds = [*kinds, "alibi"]
    other = sorted({*kinds} - {"full_attention", "attention"})
    if other:
        raise SettingUnavailableError(
            f"ranks that share samples compute full causal attention alone, and {type(model).__name__} has layers of "
            f"type {', '.join(other)}: leave --context-parallel out"
        )


def check_shared_by(trainer: Any, sizes: dict[str, int]) -> None:
    """Raise ``SettingUnavailableError`` where accelerate ignores the requested sizes, or attention would see padding.

    accelerate before 1.10 has FSDP2, but ignores the variables for these ``sizes``: each rank would train on samples of
    its own, or have a part of the model that is divided between all. Under context parallelism no layer has a mask,
    which would hide padding on the left.
    """
    if "cp_size" in sizes and getattr(trainer.processing_class, "padding_side", None) == "left":
        raise SettingUnavailableError(
            "the tokenizer pads on the left, which ranks that share samples cannot hide: set its padding_side to right"
        )
    config = getattr(trainer.accelerator, "parallelism_config", None)
    if any(getattr(config, name, None) != size for name, size in sizes.items()):
        what, option = ("share samples", "--context-parallel") if "cp_size" in sizes else ("form groups", "hybrid")
        raise SettingUnavailableError(
            f"accelerate {accelerate.__version__} does not let ranks {what}: upgrade it to 1.10 or later, or leave "
            f"{option} out"
        )


def build_model(workload: Workload, attn_implementation: str, device: torch.device) -> Any:
    """Build the model in training mode on ``device``, with weights in the workload's dtype.

    Weights are created on the device, or read from files one by one: the host never holds all of them.
    """
    dtype = getattr(torch, workload.dtype)
    is_on_meta = device.type == "meta"
    with warnings.catch_warnings(action="ignore"):
        if workload.weights:
            # ZeRO-3 reads weights itself, and gives each rank its part.
            streamed = {} if is_deepspeed_zero3_enabled() else {"device_map": {"": device}}
            model = auto_class(workload).from_pretrained(
                workload.weights,
                dtype=dtype,
                attn_implementation=attn_implementation,
                quantization_config=quantization_config(workload),
                **streamed,
            )
        else:
            # A model to be quantized is built without values, and its weights are then drawn and quantized one by one.
            drawn_later = workload.quantize is not None and not is_on_meta
            with torch.device("meta" if drawn_later else device):
                model = auto_class(workload).from_config(
                    build_config(workload), dtype=dtype, attn_implementation=attn_implementation
                )
            model = quantize_at_random(model, workload, device) if drawn_later else model
        with torch.device(device):
            model = with_lora(model, workload) if workload.peft == "lora" else model
    return model.train()


# Standard deviation of random weights: that of most language models' configs.
_DEVIATION = 0.02
_LINEAR = (torch.nn.Linear, Conv1D)


def quantization_config(workload: Workload) -> Any:
    """Return the quantization config for ``from_pretrained``; ``None`` where weights are not quantized."""
    if workload.quantize is None:
        return None
    arguments = workload.bits_arguments()
    if "bnb_4bit_compute_dtype" in arguments:
        arguments["bnb_4bit_compute_dtype"] = getattr(torch, arguments["bnb_4bit_compute_dtype"])
    return BitsAndBytesConfig(**arguments)


def with_lora(model: Any, workload: Workload) -> Any:
    """Add LoRA adapters to a model and freeze its own weights; return peft's model around it.

    Raises ``InvalidRequestError`` for a rank that exceeds a layer's size, for a target that matches no layer, and for
    one whose layers peft cannot adapt.
    """
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import LoraLayer

    # peft has no task type for image classification, whose new head has to be trained all the same.
    has_head = workload.task == "image-classification" and hasattr(model, "classifier")
    config = LoraConfig(
        **workload.lora_arguments(),
        task_type=PEFT_TASKS.get(workload.task),
        modules_to_save=["classifier"] if has_head else None,
    )
    targets = (workload.lora_options or {}).get("target_modules", [])
    linear = {name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, _LINEAR)}
    hint = f"its linear layers are {', '.join(sorted(linear))}"
    for target in targets:
        if not any(f".{name}".endswith(f".{target}") for name, _ in model.named_modules()):
            raise InvalidRequestError(f"--lora-targets: no layer is called {target}", hint)
    try:
        adapted = get_peft_model(model, config)
    except ValueError as error:
        if not targets or "is not supported" not in str(error):
            raise
        raise InvalidRequestError(
            f"--lora-targets: peft adapts no such layer as one of {', '.join(targets)}", hint
        ) from error
    for name, layer in adapted.named_modules():
        # Only linear layers: peft also wraps a router's weights, which have a row for each expert, often fewer than the
        # rank.
        is_linear = isinstance(layer, LoraLayer) and isinstance(layer.get_base_layer(), _LINEAR)
        if is_linear and config.r > min(layer.in_features, layer.out_features):
            size = f"{layer.in_features} × {layer.out_features}"
            least = min(layer.in_features, layer.out_features)
            raise InvalidRequestError(
                f"LoRA of rank {config.r} exceeds {name.rpartition('.')[2]} of {size}",
                f"use --lora-rank {least} or less",
            )
    return adapted


def quantize_at_random(model: Any, workload: Workload, device: torch.device) -> Any:
    """Give a ``meta`` model random weights on a device, those of its linear layers quantized; return the model.

    As in ``from_pretrained``, transformers' quantizer chooses the layers, and each weight is quantized once it is made.
    So building takes the memory of the model and of one more weight.
    """
    quantizer = AutoHfQuantizer.from_config(quantization_config(workload), pre_quantized=False)
    quantizer.preprocess_model(model, dtype=getattr(torch, workload.dtype), device_map={"": device})
    made: dict[int, Any] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        if id(tensor) not in made:
            made[id(tensor)] = _random_weight(model, name, tensor, quantizer, workload, device)
        path, _, own = name.rpartition(".")
        module = model.get_submodule(path)
        (module._parameters if own in module._parameters else module._buffers)[own] = made[id(tensor)]
    # Draws the weights that are in full precision, and computes buffers such as those of rotary embeddings.
    model.initialize_weights()
    model.hf_quantizer = quantizer
    return quantizer.postprocess_model(model)


def _random_weight(
    model: Any, name: str, tensor: Any, quantizer: Any, workload: Workload, device: torch.device
) -> torch.Tensor:
    """Return a tensor on a device for ``tensor``, the ``meta`` parameter or buffer of a model that is called ``name``.

    In a quantized layer it is a drawn and quantized weight, or a bias of 0. Elsewhere its values are not set yet.
    """
    path, _, own = name.rpartition(".")
    module = model.get_submodule(path)
    if not quantizer.param_needs_quantization(model, f"{path}.weight"):
        value = torch.empty_like(tensor, device=device)
        return torch.nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else value
    dtype = getattr(torch, workload.dtype)
    if own != "weight":
        bias = torch.zeros(tensor.shape, dtype=dtype, device=device)
        return _mark_initialized(torch.nn.Parameter(bias, requires_grad=False))
    drawn = torch.empty(tensor.shape, dtype=dtype, device=device).normal_(std=_DEVIATION)
    # Saved weights of a Conv1D are transposed, and are transposed again while they are quantized.
    drawn = drawn.T if issubclass(module.source_cls, Conv1D) else drawn
    quantized = quantizer.get_quantize_ops().convert({name: drawn}, model=model, full_layer_name=name)
    return _mark_initialized(quantized[name])


def _mark_initialized(value: torch.Tensor) -> torch.Tensor:
    """Mark a tensor as initialized, so that transformers keeps its values."""
    value._is_hf_initialized = True  # type: ignore[attr-defined]
    return value


# A model is sharded between ranks before it has weights, so that no rank ever holds more than its part and one module.
# On the meta device it has shapes and no values. It is sharded as accelerate does it. Then the weights of one module
# after the other are made on the device, and every rank keeps its part of them.

# Value of weights that no model initializes, such as DoRA's magnitudes: any number that is not zero.
_UNDRAWN = 0.02


def model_for(
    fields: Mapping[str, Any], workload: Workload, attn_implementation: str, device: torch.device
) -> tuple[Any, bool]:
    """Return the model for a training with these ``fields`` of ``TrainingArguments``, and whether it is on ``meta``.

    A model on ``meta`` is to be sharded before it has weights. Compiled and quantized models get their weights at once:
    the Trainer wraps compiled models before sharding, and bitsandbytes quantizes whole weights.
    """
    if fields.get("deepspeed"):
        # The dtype to which DeepSpeed converts a model. A Trainer leaves the model on the CPU until then, so that its
        # float32 weights never have to fit on the GPU. Built in 16 bits on the GPU it takes as much memory, and saves
        # seconds.
        workload = dataclasses.replace(
            workload, dtype="bfloat16" if fields["bf16"] else "float16" if fields["fp16"] else "float32"
        )
    if fields.get("fsdp") and not fields.get("torch_compile") and workload.quantize is None:
        return on_meta(workload, attn_implementation), True
    return build_model(workload, attn_implementation, device), False


def check_devices(arguments: Any, ranks: int) -> None:
    """Raise ``RuntimeError`` where a ``Trainer`` sees several GPUs, or another number of ranks."""
    if arguments.n_gpu > 1:
        raise RuntimeError(f"{arguments.n_gpu} GPUs are visible; exactly one was expected")
    if arguments.world_size != ranks:
        raise RuntimeError(f"the Trainer sees {arguments.world_size} ranks; {ranks} were expected")


def shard_from_meta(trainer: Any, workload: Workload) -> None:
    """Shard the ``meta`` model of a ``Trainer`` before training, and give it weights: random, or from files.

    The first rank holds all weights from files in the host's memory, and broadcasts them one by one.
    """
    device = trainer.accelerator.device
    shard_for(trainer.accelerator, trainer.model)
    fill(trainer.model, device)
    if workload.weights:
        _take_from_files(trainer.model, workload)


def on_meta(workload: Workload, attn_implementation: str) -> Any:
    """Return the model on the ``meta`` device, without values even where its weights are in files."""
    return build_model(dataclasses.replace(workload, weights=None), attn_implementation, torch.device("meta"))


@torch.no_grad()
def fill(model: Any, device: torch.device) -> None:
    """Give a ``meta`` model, sharded or whole, random weights on a device; equal weights for equal seeds.

    Every rank draws all weights in the same order, each by its own module. T5 and Whisper draw a few weights again for
    an outer module, which is not done here. No training begins from these weights.
    """
    model.to_empty(device=device)
    # peft's models call the method of the model inside.
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    with init.guard_torch_init_functions():
        for module, owner in _modules_with_owners(model, None):
            if owner is not None:
                _fill_module(module, owner)


def _modules_with_owners(module: Any, owner: Any) -> Iterator[tuple[Any, Any]]:
    """Yield modules, children first, each with the innermost transformers model around it, which can initialize it."""
    owner = module if isinstance(module, PreTrainedModel) else owner
    for child in module.children():
        yield from _modules_with_owners(child, owner)
    yield module, owner


def _fill_module(module: Any, owner: Any) -> None:
    """Give a module's own tensors values as ``owner`` initializes them: in full, of which this rank keeps its part."""
    parts: dict[str, DTensor] = {}
    for own in (module._parameters, module._buffers):
        for name, tensor in own.items():
            if tensor is None or getattr(tensor, "_is_hf_initialized", False):
                continue
            if isinstance(tensor, DTensor):
                parts[name] = tensor
                whole = torch.full(tensor.shape, _UNDRAWN, dtype=tensor.dtype, device=tensor.device)
                own[name] = torch.nn.Parameter(whole, tensor.requires_grad)
            else:
                tensor.fill_(_UNDRAWN)
    owner._init_weights(module)
    for name, part in parts.items():
        # Without communication, since every rank has the whole tensor.
        whole = module._parameters[name].detach()
        mine = distribute_tensor(whole, part.device_mesh, part.placements, src_data_rank=None)
        part.to_local().copy_(mine.to_local())
        module._parameters[name] = part
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None:
            # A tied tensor is not drawn again, nor is one by a module around this one.
            tensor._is_hf_initialized = True


def _take_from_files(model: Any, workload: Workload) -> None:
    """Copy weights from files to a sharded model, broadcast by the first rank."""
    saved = build_model(workload, "eager", torch.device("cpu")).state_dict() if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, saved, options=options)
