"""Write the winner as a recipe of another trainer (TRL, axolotl, LLaMA-Factory), or as a block for a model card.

Names and meanings are those of TRL 1.16.0 (``SFTConfig``, ``ModelConfig``), axolotl 0.19.0 (``utils/schemas``,
``utils/config``) and LLaMA-Factory 0.9.5 (``hparams``). A winner with a setting that a recipe cannot express is refused
where the training would be another; where it would only be slower, comments of the recipe name the setting.
"""

from __future__ import annotations

import json
from typing import Any

from autotune.core.errors import InvalidRequestError
from autotune.core.units import format_bytes, format_rate, in_one_line
from autotune.results.export import Export, beside_lines, hub_name, make_export, render, yaml_text
from autotune.results.forms import AnyForm, Recipe
from autotune.results.report import Report
from autotune.results.wording import rate_unit
from autotune.space.arms import applied_settings

_NAMES = {"trl": "TRL", "axolotl": "axolotl", "llama-factory": "LLaMA-Factory"}
_LORA_NAMES = {
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "target_modules": "lora_target_modules",
}
"""Names of LoRA's settings in TRL's ``ModelConfig``, and in axolotl."""
_LIGER = ("liger_rope", "liger_rms_norm", "liger_glu_activation", "liger_fused_linear_cross_entropy")
_ATTENTION = {"sdpa": "sdpa", "flash_attention_2": "fa2", "eager": "disabled"}


def exported_text(report: Report, form: AnyForm) -> tuple[str, list[str]]:
    """Return a study's winner in a form, ending in a newline, and notes on settings that the form cannot contain.

    Raises ``InvalidRequestError`` where the form cannot express the winner, and ``NoResultError`` without a winner.
    """
    made = make_export(report)
    match form:
        case "model-card":
            return _model_card(report, made), []
        case "trl" | "axolotl" | "llama-factory":
            return _render_recipe(report, made, form), []
    return render(made, form), beside_lines(made, form)


def _render_recipe(report: Report, export: Export, form: Recipe) -> str:
    """Return the winner as a recipe, with comments on settings that it cannot contain."""
    _check_expressible(export, form)
    makers = {"trl": _trl, "axolotl": _axolotl, "llama-factory": _llama_factory}
    settings = makers[form](export, report.workload)
    # The version of transformers beside the other trainers is unknown: what only newer ones do is left out, too.
    left_out = sorted(export.applied_settings if form == "trl" else applied_settings(export.candidate.arm))
    # axolotl has a name for one of the two settings of this lever.
    if form == "axolotl" and export.candidate.arm.non_blocking:
        left_out.append("logging_nan_inf_filter")
    lines = [f"for {_NAMES[form]}; add your data and what else it needs", *beside_lines(export, None)]
    if left_out:
        lines.append(f"slower than measured without: {', '.join(left_out)}, which {_NAMES[form]} has no name for")
    return yaml_text(map(in_one_line, lines), settings)


def _check_expressible(export: Export, form: Recipe) -> None:
    """Raise ``InvalidRequestError`` where a recipe in this form would be another training than the winner's."""
    arm, name = export.candidate.arm, _NAMES[form]
    if export.task != "causal-lm":
        what = "your own code" if export.task == "own" else f"a model for {export.task}"
        raise InvalidRequestError(
            f"--format {form}: {name} trains causal language models, and this study trained {what}",
            f"use --format {export.usual_form}",
        )
    if form != "trl" and (arm.is_sharded or arm.zero_stage is not None or arm.context_parallel > 1):
        raise InvalidRequestError(
            f"--format {form}: its file of {arm.strategy} is not written by autotune", "use --format accelerate"
        )
    in_half = arm.precision in ("bf16", "fp16")
    if form == "axolotl" and in_half and export.model_arguments["dtype"] == "float32":
        raise InvalidRequestError(
            f"--format axolotl: in {arm.precision} axolotl keeps the weights in 16 bits, and weights in float32 were "
            "measured",
            "use --format trl, or search with --dtype bfloat16",
        )


def _adapters(export: Export, names: dict[str, str]) -> dict[str, Any]:
    """Return the settings of LoRA under a trainer's own ``names``, by the fields of peft's ``LoraConfig``."""
    return {name: export.lora[field] for field, name in names.items() if field in export.lora}


def _trl(export: Export, _: Any) -> dict[str, Any]:
    """Return the settings for ``trl sft --config FILE``: ``TrainingArguments`` and TRL's ``ModelConfig``."""
    settings = {name: value for name, value in export.arguments.items() if value is not None}
    settings |= {"model_name_or_path": hub_name(export), **export.model_arguments}
    if export.lora:
        settings |= {"use_peft": True, **_adapters(export, _LORA_NAMES)}
    if export.bits:
        settings |= {name: value for name, value in export.bits.items() if name in ("load_in_4bit", "load_in_8bit")}
        if export.bits.get("bnb_4bit_use_double_quant"):
            settings["use_bnb_nested_quant"] = True
    return settings


def _axolotl(export: Export, workload: Any) -> dict[str, Any]:
    """Return the settings for axolotl's YAML file."""
    candidate, arm = export.candidate, export.candidate.arm
    is_half = export.model_arguments["dtype"] != "float32"
    settings: dict[str, Any] = {
        "base_model": hub_name(export),
        "sequence_len": workload["seq_len"],
        "sample_packing": export.row_tokens is not None,
        "micro_batch_size": candidate.per_device_train_batch_size,
        "gradient_accumulation_steps": candidate.gradient_accumulation_steps,
        "bf16": arm.precision == "bf16",
        "fp16": arm.precision == "fp16",
        "tf32": arm.precision == "tf32",
        # Weights in 16 bits without autocast.
        **({export.model_arguments["dtype"]: True} if is_half and arm.precision not in ("bf16", "fp16") else {}),
        "gradient_checkpointing": arm.gradient_checkpointing,
        "gradient_checkpointing_kwargs": {"use_reentrant": False} if arm.gradient_checkpointing else None,
        "optimizer": arm.optim,
        "attn_implementation": arm.attn_implementation,
        "torch_compile": arm.torch_compile,
        "torch_compile_mode": arm.torch_compile_mode,
        "dataloader_num_workers": arm.dataloader_num_workers,
        "dataloader_prefetch_factor": arm.dataloader_prefetch_factor,
        "accelerator_config": {"non_blocking": True} if arm.non_blocking else None,
        "plugins": ["axolotl.integrations.liger.LigerPlugin"] if arm.use_liger_kernel else None,
        # What use_liger_kernel of a Trainer turns on.
        **dict.fromkeys(_LIGER if arm.use_liger_kernel else (), True),
        "adapter": ("qlora" if export.bits.get("load_in_4bit") else "lora") if export.lora else None,
        **_adapters(export, _LORA_NAMES),
        **{name: True for name in ("load_in_4bit", "load_in_8bit") if export.bits.get(name)},
    }
    return {name: value for name, value in settings.items() if value is not None}


def _llama_factory(export: Export, workload: Any) -> dict[str, Any]:
    """Return the settings for LLaMA-Factory's YAML file."""
    candidate, arm = export.candidate, export.candidate.arm
    if (attention := _ATTENTION.get(arm.attn_implementation)) is None:
        raise InvalidRequestError(
            f"--format llama-factory: LLaMA-Factory has no name for {arm.attn_implementation}", "use --format trl"
        )
    settings: dict[str, Any] = {
        "model_name_or_path": hub_name(export),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "lora" if export.lora else "full",
        "cutoff_len": workload["seq_len"],
        # Its neat_packing keeps the samples of a row apart, as rows of autotune do.
        "packing": export.row_tokens is not None,
        "neat_packing": export.row_tokens is not None,
        "per_device_train_batch_size": candidate.per_device_train_batch_size,
        "gradient_accumulation_steps": candidate.gradient_accumulation_steps,
        "bf16": arm.precision == "bf16",
        "fp16": arm.precision == "fp16",
        "tf32": arm.precision == "tf32" or None,
        # Otherwise LLaMA-Factory trains the weights in float32.
        "pure_bf16": export.model_arguments["dtype"] == "bfloat16" and not export.lora,
        "disable_gradient_checkpointing": not arm.gradient_checkpointing,
        "use_reentrant_gc": False,
        "optim": arm.optim,
        "flash_attn": attention,
        "enable_liger_kernel": arm.use_liger_kernel,
        "torch_compile": arm.torch_compile,
        "torch_compile_mode": arm.torch_compile_mode,
        "dataloader_num_workers": arm.dataloader_num_workers,
        "dataloader_prefetch_factor": arm.dataloader_prefetch_factor,
        **{name: export.arguments.get(name) for name in ("accelerator_config", "logging_nan_inf_filter")},
    }
    if export.lora:
        names = {"r": "lora_rank", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout"}
        settings |= _adapters(export, names)
        targets = export.lora.get("target_modules")
        if targets == "all-linear":
            targets = "all"
        if targets is not None:
            settings["lora_target"] = targets if isinstance(targets, str) else ",".join(targets)
    if export.bits:
        settings |= {
            "quantization_method": "bnb",
            "quantization_bit": 4 if export.bits.get("load_in_4bit") else 8,
            "double_quantization": bool(export.bits.get("bnb_4bit_use_double_quant")),
        }
    return {name: value for name, value in settings.items() if value is not None}


def _model_card(report: Report, export: Export) -> str:
    """Return a model card section in Markdown: settings, measurements, hardware."""
    # A study with an export has a winner, which was measured.
    measured, candidate = report.pooled(report.best), export.candidate
    assert measured is not None
    # --world-size may declare more devices than a trial used.
    times = max(1, int(report.study.request.get("world_size") or 1) // candidate.arm.ranks)
    unit = rate_unit(report.workload) + (" on one device" if times > 1 else "")
    rows = [
        ("per-device batch × accumulation", f"{candidate.per_device_train_batch_size} × "
         f"{candidate.gradient_accumulation_steps}"),
        ("effective batch", str(candidate.samples_per_step * times)),
        ("settings", candidate.arm.describe()),
        ("measured speed", f"{format_rate(measured.samples_per_second)} {unit}"),
        ("peak memory", f"{format_bytes(measured.peak_reserved_bytes)} reserved"),
        ("measured on", export.measured),
    ]  # fmt: skip
    lines = [
        "## Training settings",
        "",
        "Found by [autotune](https://pypi.org/project/traintune/) with real training steps.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {in_one_line(value).replace('|', chr(92) + '|')} |" for name, value in rows),
        "",
        "```json",
        json.dumps(export.arguments, indent=2),
        "```",
    ]
    return "\n".join(lines) + "\n"
