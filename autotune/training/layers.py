"""Change how the layers of a model compute: compiled in place, some checkpointed, in FP8, the products of experts.

Checkpointing drops a layer's activations after the forward pass and computes them again in the backward pass. A layer
that is left out keeps them. Checkpointing some layers uses the memory that would be left if all were checkpointed.

accelerate's regional compilation of one process compiles every embedding, norm and head as well, each for itself:
BERT-large took 12.3 s to its first step, and 8.1 s as here; the steps after it were 1.1 % faster (H200, torch 2.11.0,
transformers 5.17.0, 24 November 2026). accelerate compiles a layer's checkpoint, too. Where a layer checkpoints as it
is called (transformers before 5.23), what is compiled here is within its checkpoint: a GPT-2 with checkpoints compiles,
which failed with accelerate's, and QLoRA needs no more memory than eager, not twice as much (same run).

In FP8 activations and weights are rounded to e4m3 and gradients to e5m2, each tensor with a scale of its own, for the
product alone (Micikevicius et al. 2022, FP8 Formats for Deep Learning); weights stay as they are. This is another
numeric.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate.utils import TorchDynamoPlugin
from torch.fx.experimental import _config as symbolic_shapes
from transformers import PreTrainedModel, Trainer, TrainerCallback
from transformers.modeling_layers import GradientCheckpointingLayer

from autotune.training.batches import SettingUnavailableError, stock_settings, without_adapters


def flagged_within_layers(model: torch.nn.Module) -> set[torch.nn.Module]:
    """Return modules that have the checkpointing flag inside a checkpointed layer, but do not checkpoint themselves.

    The attention of T5 and of its relatives is such a module (transformers 5.23).
    """
    return {
        module
        for layer in model.modules()
        if isinstance(layer, GradientCheckpointingLayer)
        for module in layer.modules()
        if hasattr(module, "gradient_checkpointing") and not isinstance(module, GradientCheckpointingLayer)
    }


def _innermost_flagged(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules that checkpoint: the innermost with the flag ``gradient_checkpointing``, in their order."""
    flagged = {module for module in model.modules() if hasattr(module, "gradient_checkpointing")}
    flagged -= flagged_within_layers(model)
    return [module for module in model.modules() if flagged.intersection(module.modules()) == {module}]


def checkpoint_layers(model: torch.nn.Module, count: int) -> int:
    """Keep checkpointing on in ``count`` evenly spread layers, and off in the others; return how many had it on.

    Layers are those of ``transformers.modeling_layers.GradientCheckpointingLayer``, or modules with the attribute
    ``gradient_checkpointing`` and a checkpointing function. Raises ``ValueError`` where there are fewer.
    """
    layers = [
        module for module in _innermost_flagged(model) if getattr(module, "gradient_checkpointing", False) is True
    ]
    if not 0 < count <= len(layers):
        raise ValueError(f"{count} of {len(layers)} checkpointed layers: name 1 to {len(layers)}")
    for place, layer in enumerate(layers):
        # Floor of the share up to here grows by one exactly ``count`` times.
        is_on = (place + 1) * count // len(layers) > place * count // len(layers)
        layer.gradient_checkpointing = is_on  # type: ignore[assignment]
    return len(layers)


class _OnTrainBegin(TrainerCallback):  # type: ignore[misc]
    """Calls ``act`` with the model as training starts, once the ``Trainer`` has turned checkpointing on."""

    def __init__(self, act: Callable[[torch.nn.Module], None]) -> None:
        self._act = act

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._act(model)


_EVERY = "every_n_layers"
_ENABLE = getattr(PreTrainedModel, "activation_checkpointing_enable", None)
_TAKES_EVERY = _ENABLE is not None and _EVERY in inspect.signature(_ENABLE).parameters


def checkpoint_some_layers(trainer: Trainer, count: int) -> None:
    """Make a ``Trainer``, whose arguments turn checkpointing on, checkpoint only ``count`` layers, evenly spread.

    Where ``count`` layers are every n-th one, newer versions of transformers choose them, from the first layer on.
    """
    args, every = trainer.args, None
    if _TAKES_EVERY and trainer.args.activation_checkpointing:
        every = _interval_of(trainer.model, count)
    if every is not None:
        args.activation_checkpointing_kwargs = {**(args.activation_checkpointing_kwargs or {}), _EVERY: every}

    def turn_off_others(model: torch.nn.Module) -> None:
        # It returns how many layers were on: ``count`` where transformers, and not the model, turned on every n-th.
        if checkpoint_layers(model, count) == count and every is not None:
            stock_settings(trainer)[_EVERY] = every

    trainer.add_callback(_OnTrainBegin(turn_off_others))


def _interval_of(model: torch.nn.Module, count: int) -> int | None:
    """Return the n for which every n-th layer makes ``count`` layers, as transformers counts them; ``None`` if none."""
    layers = _innermost_flagged(model)
    if not 0 < count <= len(layers):
        return None
    every = -(-len(layers) // count)
    # transformers counts layers of its own class.
    counted = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    return every if counted == layers and -(-len(layers) // every) == count else None


_MOST_CODES = 24
"""Compiled codes of a function that torch keeps, instead of 8 (2.13); what needs one more runs eagerly from then on.

A T5 some of whose layers are checkpointed needs 24, where batches differ in length and evaluations come between
(transformers 5.23, in which the layers of all classes are one function; 16 before). Without them it needs 6. More would
cost time where a model generates with a cache, for which each layer has codes of its own."""


def _turn_off_flags_within_layers(model: torch.nn.Module) -> None:
    """Turn off the checkpointing flags of modules that do not checkpoint themselves, so that layers compile whole.

    By its flag T5's attention has a bias of zeros require a gradient, which nothing uses. torch leaves that layer
    uncompiled, or compiles it in pieces (2.13).
    """
    for module in flagged_within_layers(model):
        module.gradient_checkpointing = False  # type: ignore[assignment]


def repeated_layers(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield a model's repeated layers: the modules of each outermost ``ModuleList`` whose modules share a class."""
    for child in module.children():
        inner = list(child.children())
        if isinstance(child, torch.nn.ModuleList) and len(inner) > 1 and len({type(each) for each in inner}) == 1:
            yield from inner
        else:
            yield from repeated_layers(child)


def compile_layers(trainer: Trainer, *, for_any_length: bool = False) -> None:
    """Make a ``Trainer`` compile each repeated layer of its model, with its ``torch_compile_mode``, and nothing else.

    With ``for_any_length`` layers are compiled for dynamic shapes at once. Otherwise torch does so at the second
    length, after compiling for the first.

    Raises ``SettingUnavailableError`` for a model without repeated layers.
    """
    make_model, dynamic = trainer.call_model_init, True if for_any_length else None
    # A Trainer with a model_init makes another model when training starts.
    trainer.call_model_init = lambda trial=None: _compile_repeated(trainer, make_model(trial), dynamic)
    _compile_repeated(trainer, trainer.model, dynamic)
    # With torch_compile=True accelerate would compile the whole model as well.
    trainer.accelerator.state.dynamo_plugin = TorchDynamoPlugin(backend="no")
    trainer.add_callback(_OnTrainBegin(_turn_off_flags_within_layers))
    if for_any_length:
        # Else torch unifies equal sizes: after a first batch as long as a head is wide, the next is compiled anew.
        symbolic_shapes.use_duck_shape = False
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_CODES)


def _compile_repeated(trainer: Trainer, model: torch.nn.Module, dynamic: bool | None) -> torch.nn.Module:
    """Compile a model's repeated layers in place, turn off its cache unless the arguments ask for it; return it."""
    layers = list(repeated_layers(model))
    if not layers:
        raise SettingUnavailableError(
            f"{type(model).__name__} has no layers that repeat; train without regional_compilation"
        )
    for module in model.modules():
        # The Trainer turns the cache off in the configuration of the whole; T5's decoder has another. With a cache each
        # layer is compiled to code of its own. torch 2.13 compiles eight of them, and runs the others uncompiled.
        if getattr(getattr(module, "config", None), "use_cache", False):
            module.config.use_cache = getattr(trainer.args, "use_cache", False)  # type: ignore[union-attr]
    for layer in layers:
        layer.compile(
            backend=trainer.args.torch_compile_backend or "inductor", mode=trainer.args.torch_compile_mode,
            dynamic=dynamic,
        )  # fmt: skip
        layer._compiled_call_impl = _without_count(layer._compiled_call_impl)  # type: ignore[arg-type]
    return model


def _without_count(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiled layer that is not given ``num_items_in_batch``, which is for the loss alone.

    In the first micro-step that may require a gradient, and the layers were compiled a second time for those after it:
    6 s for Qwen2.5-0.5B (H200, torch 2.11.0, 28 November 2026).
    """

    @functools.wraps(compiled)
    def call(*args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        return compiled(*args, **kwargs)

    return call


# FP8 products need dimensions of whole multiples of this (torch._scaled_mm).
_MULTIPLE = 16
_LEAST_CAPABILITY = (8, 9)


def _supports_float8(module: torch.nn.Module, _name: str) -> bool:
    """Return whether a module is a linear layer with dimensions for FP8; torchao calls it with the name as well."""
    return isinstance(module, torch.nn.Linear) and not (
        module.in_features % _MULTIPLE or module.out_features % _MULTIPLE
    )


def multiply_in_float8(trainer: Trainer, **config: Any) -> None:
    """Make the linear layers within a ``Trainer``'s repeated layers multiply in FP8. ``config`` is for torchao.

    Embeddings and output layers, which lie outside, stay in 16 bits. Raises ``SettingUnavailableError`` where torchao
    is not installed, the GPU has no FP8 units, or no layer has fitting dimensions.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise SettingUnavailableError(f"FP8 needs torchao: {error}") from error
    device = trainer.args.device
    has_units = device.type == "cuda" and torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY
    if not config.get("emulate") and not has_units:
        raise SettingUnavailableError(f"{device} has no FP8 units")
    model = trainer.accelerator.unwrap_model(trainer.model)
    layers = list(repeated_layers(model))
    if not any(_supports_float8(module, "") for layer in layers for module in layer.modules()):
        raise SettingUnavailableError(
            f"no repeated layer of {type(model).__name__} has a torch.nn.Linear of multiples of {_MULTIPLE}"
        )
    for layer in layers:
        convert_to_float8_training(layer, module_filter_fn=_supports_float8, config=Float8LinearConfig(**config))


def choose_experts(trainer: Trainer, name: str) -> None:
    """Set the implementation of a model's experts: ``grouped_mm``, ``batched_mm`` or ``eager``.

    Raises ``SettingUnavailableError`` for a model without experts, or with a single implementation.
    """
    model = without_adapters(trainer.accelerator.unwrap_model(trainer.model))
    kind = type(model).__name__
    if not getattr(model, "_can_set_experts_implementation", lambda: False)():
        raise SettingUnavailableError(f"this transformers has one way to compute the experts of {kind}, if it has any")
    try:
        model.set_experts_implementation(name)
    except (ValueError, ImportError, RuntimeError) as error:
        raise SettingUnavailableError(f"{kind} has no experts by {name}: {error}") from error
