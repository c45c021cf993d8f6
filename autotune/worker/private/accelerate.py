"""Adapt private names of accelerate."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def with_float32_outputs(forward: Any) -> Any:
    """Wrap a model's ``forward`` so that 16-bit outputs become float32, as accelerate does."""
    from accelerate.utils.operations import convert_outputs_to_fp32

    return convert_outputs_to_fp32(forward)


def why_no_fsdp2() -> str | None:
    """Return why the installed accelerate cannot shard with FSDP2; ``None`` where it can."""
    import accelerate
    from accelerate.utils import fsdp_utils

    if hasattr(fsdp_utils, "fsdp2_prepare_model"):
        return None
    return f"version {accelerate.__version__} has no FSDP2, later ones have"


def shard(model: Any, settings: dict[str, Any], mixed_precision: str, mesh: Any) -> Any:
    """Shard a model on the CPU between the ranks of a device mesh, with accelerate's own functions; return the model.

    ``settings`` is an ``fsdp_config`` of ``TrainingArguments``. ``Accelerator`` itself shards on GPUs only, so a
    stand-in provides the attributes that accelerate's functions read from it.
    """
    import torch
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_apply_ac, fsdp2_prepare_model

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=settings["reshard_after_forward"],
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=settings["transformer_layer_cls_to_wrap"],
        activation_checkpointing=settings["activation_checkpointing"],
        cpu_ram_efficient_loading=False,
    )
    if mixed_precision != "no":
        plugin.set_mixed_precision(mixed_precision)
    stand_in = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh=mesh,
        mixed_precision=mixed_precision,
        parallelism_config=SimpleNamespace(fsdp_dim_names=mesh.mesh_dim_names),
        # The main process logs that it makes 16-bit weights float32, which needs accelerate's own state.
        is_main_process=False,
        device=torch.device("cpu"),
    )
    if settings["activation_checkpointing"]:
        model = fsdp2_apply_ac(stand_in, model)
    return fsdp2_prepare_model(stand_in, model)


def shard_for(accelerator: Any, model: Any) -> None:
    """Shard a model in place, with checkpointing if configured. ``accelerator.prepare`` then leaves it as it is."""
    from accelerate.utils.fsdp_utils import fsdp2_apply_ac, fsdp2_prepare_model

    plugin = accelerator.state.fsdp_plugin
    plugin.set_auto_wrap_policy(model)
    if plugin.activation_checkpointing:
        fsdp2_apply_ac(accelerator, model)
        # Else ``accelerator.prepare`` would apply it again.
        plugin.activation_checkpointing = False
    fsdp2_prepare_model(accelerator, model)


def compute_on_cpu() -> None:
    """Make accelerate, whose state exists already, use the CPU for the rest of this process."""
    import torch
    from accelerate.state import AcceleratorState, PartialState

    for state in (PartialState, AcceleratorState):
        if "device" in state._shared_state:
            state._shared_state["device"] = torch.device("cpu")
