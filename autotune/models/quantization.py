"""Compare the quantization that a model's config states with the one that is asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autotune.core.errors import InvalidRequestError
from autotune.core.workload import Workload

STATED = "quantization_config"
# transformers' BitsAndBytesConfig, where it is told nothing else.
_DEFAULTS: dict[str, Any] = {
    "bnb_4bit_quant_type": "fp4",
    "bnb_4bit_use_double_quant": False,
    "llm_int8_has_fp16_weight": False,
    "llm_int8_threshold": 6.0,
}
# Output layers stay as they are in any case, and embeddings are no linear layers.
_KEPT = frozenset({"lm_head", "embed_tokens", "embedding"})
# Configs that unsloth writes name these of every model: text models have none of them.
_OF_IMAGES = frozenset({"multi_modal_projector", "merger", "modality_projection", "visual", "vision_tower"})


def with_quantize_alone(workload: Workload) -> Workload:
    """Return the workload without its config's quantization, where ``--quantize`` asks for the same.

    Raises ``InvalidRequestError`` where they differ, since a model with random weights is built without the config's
    quantization.
    """
    stated = workload.config.get(STATED)
    if not stated:
        return workload
    if not isinstance(stated, dict):
        stated = {"quant_method": stated}
    said = f"the config of {workload.model} states a {STATED}"
    copy = f"give a folder with a copy of its config.json without {STATED}"
    bits = next((bits for bits in ("4bit", "8bit") if stated.get(f"load_in_{bits}")), None)
    if bits is None:
        raise InvalidRequestError(
            f"{said} with quant_method {stated.get('quant_method')!r}, which is not measured",
            f"{copy}; its weights are then in --dtype, or with --quantize and --peft lora in few bits",
        )
    if workload.quantize != bits:
        asked = f"--quantize says {workload.quantize}" if workload.quantize else "nothing asks for it"
        add = f"give --quantize {bits}" + ("" if workload.peft else " and --peft lora")
        raise InvalidRequestError(f"{said} with load_in_{bits}, and {asked}", f"{add}; or {copy}")
    arguments = workload.bits_arguments()
    for name, default in _DEFAULTS.items():
        value, measured = stated.get(name, default), arguments.get(name, default)
        if value != measured:
            raise InvalidRequestError(
                f"{said} with {name} {value!r}, and --quantize {bits} measures {measured!r}", f"change it, or {copy}"
            )
    kept = {name.removeprefix("model.") for name in stated.get("llm_int8_skip_modules") or ()}
    absent = set() if workload.task == "image-text-to-text" else {*_OF_IMAGES}
    if not any("expert" in name for name in workload.config):
        absent.add("router")
    if others := kept - _KEPT - absent - {*arguments.get("llm_int8_skip_modules", ())}:
        raise InvalidRequestError(
            f"{said} that leaves {', '.join(sorted(others))} as they are, and --quantize {bits} does not", copy
        )
    return replace(workload, config={name: value for name, value in workload.config.items() if name != STATED})
