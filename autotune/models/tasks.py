"""Map tasks to the classes that build their models, and infer task, lengths, images and quantization from a config."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autotune.core.errors import InvalidRequestError
from autotune.core.workload import TASKS, Task, Workload

# Model types that divide an image in patches, and merge a square of patches to one token (Qwen2VLImageProcessor).
_MERGING = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
# Model types whose images, or the tiles that larger ones are cut in, have one fixed size (Idefics3Processor).
_TILING = ("idefics3", "smolvlm")
# 256 tokens of 28 pixels each side. A choice: such models take any size.
_USUAL_SIDE = 448

# Fields of vision configs that are left out where they have the default of transformers.
_DEFAULT_PATCH = {"qwen2_vl": 14, "qwen2_5_vl": 14, "qwen3_vl": 16, "idefics3": 32, "smolvlm": 32}
_DEFAULT_TILE = 224
_DEFAULT_SCALE = 2


def is_merging(model_type: str) -> bool:
    """Return whether models of this type take the image patches of a batch as one list, with the images' sizes."""
    return model_type in _MERGING


def choose_image_side(config: dict[str, Any], asked: int | None) -> int:
    """Return the side of a sample's images in pixels: the requested side (``asked``), else the model's usual one.

    Raises ``InvalidRequestError`` for a model with unknown images, or a side that it does not support.
    """
    model_type = str(config.get("model_type"))
    vision = config.get("vision_config") or {}
    if model_type in _MERGING:
        step = _token_side(config)
        side = asked or _USUAL_SIDE // step * step
        if side % step:
            near = [whole for whole in (side // step * step, (side // step + 1) * step) if whole]
            raise InvalidRequestError(
                f"--image-size {side}: {model_type} takes images whose sides are multiples of {step} pixels",
                f"give {' or '.join(map(str, near))}",
            )
        return side
    if model_type not in _TILING:
        known = ", ".join((*_MERGING, *_TILING))
        raise InvalidRequestError(
            f"the images of models of type {model_type!r} are not known",
            f"use one of the types {known}, or name another --task, such as causal-lm, to train without images",
        )
    side = int(vision.get("image_size", _DEFAULT_TILE))
    if asked not in (None, side):
        raise InvalidRequestError(
            f"--image-size {asked}: {model_type} takes images of {side} pixels, and cuts larger ones in such tiles",
            "leave it out, and give the number of tiles with --images",
        )
    return side


def tokens_of_image(config: dict[str, Any], side: int) -> int:
    """Return the number of tokens that a model makes of a square image with a side of so many pixels."""
    if config["model_type"] in _MERGING:
        return (side // _token_side(config)) ** 2
    patches = (side // _patch_side(config)) ** 2
    return int(patches / int(config.get("scale_factor", _DEFAULT_SCALE)) ** 2)


def check_images_fit(config: dict[str, Any], images: int, side: int, seq_len: int) -> None:
    """Raise ``InvalidRequestError`` where the images of a sample leave no room for text."""
    tokens = images * (tokens_of_image(config, side) + _BESIDE_IMAGE) + _LEAST_TEXT
    if tokens > seq_len:
        raise InvalidRequestError(
            f"--images {images} of {side} pixels take {tokens - _LEAST_TEXT} tokens, and a sample has {seq_len}",
            f"give --seq-len {tokens} or more, or fewer images",
        )


def _token_side(config: dict[str, Any]) -> int:
    """Return the side, in pixels, of the square that becomes one token."""
    return _patch_side(config) * int((config.get("vision_config") or {}).get("spatial_merge_size", 2))


def _patch_side(config: dict[str, Any]) -> int:
    """Return the side, in pixels, of one image patch."""
    vision = config.get("vision_config") or {}
    return int(vision.get("patch_size", _DEFAULT_PATCH[str(config["model_type"])]))


# Before each image a token says that one begins.
_BESIDE_IMAGE = 1
# Least number of text tokens in a sample with images, since the model learns from text. A choice.
_LEAST_TEXT = 2


AUTO_CLASS_OF_TASK: dict[str, str] = {
    "sequence-classification": "AutoModelForSequenceClassification",
    "masked-lm": "AutoModelForMaskedLM",
    "causal-lm": "AutoModelForCausalLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "image-classification": "AutoModelForImageClassification",
    "speech-seq2seq": "AutoModelForSpeechSeq2Seq",
    "image-text-to-text": "AutoModelForImageTextToText",
}
"""The class of transformers that builds a task's model."""

PEFT_TASKS: dict[str, str] = {
    "sequence-classification": "SEQ_CLS",
    "causal-lm": "CAUSAL_LM",
    "image-text-to-text": "CAUSAL_LM",
    "seq2seq-lm": "SEQ_2_SEQ_LM",
}
"""peft's ``TaskType`` of a task, which tells it the head to train in full. Other tasks have none."""

# Endings of class names in transformers, in the order in which they are tried. An encoder with a masked-lm head is
# fine-tuned for classification far more often than it is pretrained again, so classification is inferred for it; --task
# overrides that.
_TASK_OF_ENDING: tuple[tuple[str, Task], ...] = (
    ("ForImageClassification", "image-classification"),
    ("ForMaskedImageModeling", "image-classification"),
    ("ForSequenceClassification", "sequence-classification"),
    ("ForMaskedLM", "sequence-classification"),
    ("ForPreTraining", "sequence-classification"),
    ("ForCausalLM", "causal-lm"),
    ("LMHeadModel", "causal-lm"),
)
_SPEECH_TYPES = frozenset({"whisper", "speech_to_text", "moonshine"})
_IMAGE_TYPES = frozenset(
    {"vit", "deit", "beit", "swin", "swinv2", "convnext", "convnextv2", "resnet", "dinov2", "mobilevit"}
)
# Encoders of which some configs on the hub have no ``architectures`` (deberta-v3, the small BERTs).
_ENCODER_TYPES = frozenset({"bert", "roberta", "xlm-roberta", "electra", "deberta", "deberta-v2"})


def infer_task(config: dict[str, Any]) -> Task:
    """Return the task that a config's ``architectures`` and ``model_type`` imply.

    Raises ``InvalidRequestError`` where they imply none; then ``--task`` is needed.
    """
    model_type = str(config.get("model_type", ""))
    if model_type in _SPEECH_TYPES:
        return "speech-seq2seq"
    if model_type in _IMAGE_TYPES:
        return "image-classification"
    architectures = [str(name) for name in config.get("architectures") or ()]
    if isinstance(config.get("vision_config"), dict):
        for architecture in architectures:
            # One part of such a model may be what the config is for: SiglipForImageClassification.
            if task := _task_of_ending(architecture):
                return task
        return "image-text-to-text"
    if config.get("is_encoder_decoder"):
        return "seq2seq-lm"
    if not architectures and model_type in _ENCODER_TYPES:
        return "sequence-classification"
    for architecture in architectures:
        if task := _task_of_ending(architecture):
            return task
        if architecture.endswith("Model"):
            return "sequence-classification"
    raise InvalidRequestError(
        f"the task of model type {model_type!r} cannot be inferred from its architectures {architectures}",
        f"name it with --task, one of {', '.join(TASKS)}",
    )


def _task_of_ending(architecture: str) -> Task | None:
    """Return the task that the ending of a class name implies; ``None`` for another ending."""
    return next((task for ending, task in _TASK_OF_ENDING if architecture.endswith(ending)), None)


# Fields in which configs keep the longest sequence that position embeddings allow.
_POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len")
# RoBERTa-like models offset positions by padding_idx + 1, so two positions are not for tokens (transformers,
# create_position_ids_from_input_ids).
_OFFSET_POSITION_TYPES = frozenset({"roberta", "xlm-roberta", "camembert", "longformer", "mpnet"})
# These have relative position biases, in buckets of distance. The number in their config is the length of pretraining,
# and longer sequences work (transformers, T5Attention).
_RELATIVE_POSITION_TYPES = frozenset({"t5", "mt5", "umt5", "longt5"})
DEFAULT_SEQ_LEN = 512


def max_seq_len(config: dict[str, Any]) -> int | None:
    """Return the largest sequence length that a model's position embeddings allow; ``None`` without a limit."""
    # DeBERTa-v2 and -v3 have relative positions as well, and a table of absolute ones only if this is true.
    relative_only = config.get("relative_attention") is True and config.get("position_biased_input") is False
    if relative_only or config.get("model_type") in _RELATIVE_POSITION_TYPES:
        return None
    return _stated_seq_len(config)


def _stated_seq_len(config: dict[str, Any]) -> int | None:
    """Return the sequence length in a config, even if longer ones work; ``None`` where it has none."""
    # A model of images and text has the text's length in text_config.
    text = {**config, **(config.get("text_config") or {})}
    for key in _POSITION_KEYS:
        value = text.get(key)
        if isinstance(value, int) and value > 0:
            return value - 2 if config.get("model_type") in _OFFSET_POSITION_TYPES else value
    return None


def choose_seq_len(config: dict[str, Any], task: Task, asked: int | None) -> int:
    """Return the sequence length to measure: the requested one, else 512 or the config's smaller length; 1 for images.

    Raises ``InvalidRequestError`` where the requested length (``asked``) exceeds what the model supports.
    """
    if task == "image-classification":
        return 1
    if task == "speech-seq2seq":
        # The transcript's tokens; 448 is Whisper's default.
        limit: int | None = int(config.get("max_target_positions", 448))
        usual = limit
    else:
        limit = max_seq_len(config)
        usual = _stated_seq_len(config)
    if asked is None:
        return min(DEFAULT_SEQ_LEN, usual or DEFAULT_SEQ_LEN)
    if limit is not None and asked > limit:
        raise InvalidRequestError(
            f"--seq-len {asked} is longer than the {limit} positions of this model",
            f"use --seq-len {limit} or less",
        )
    return asked


STATED = "quantization_config"
# Defaults of transformers' BitsAndBytesConfig.
_DEFAULTS: dict[str, Any] = {
    "bnb_4bit_quant_type": "fp4",
    "bnb_4bit_use_double_quant": False,
    "llm_int8_has_fp16_weight": False,
    "llm_int8_threshold": 6.0,
}
# Modules that are never quantized: output layers, and embeddings, which are no linear layers.
_KEPT = frozenset({"lm_head", "embed_tokens", "embedding"})
# Modules that configs by unsloth name for every model, although text models have none of them.
_OF_IMAGES = frozenset({"multi_modal_projector", "merger", "modality_projection", "visual", "vision_tower"})


def with_quantize_alone(workload: Workload) -> Workload:
    """Return the workload with ``--quantize`` alone: without its config's quantization, if that is the same.

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
    # Of the modules that the config leaves unquantized, those count that this model has and ``--quantize`` quantizes.
    kept = {name.removeprefix("model.") for name in stated.get("llm_int8_skip_modules") or ()}
    absent = set() if workload.task == "image-text-to-text" else {*_OF_IMAGES}
    if not any("expert" in name for name in workload.config):
        absent.add("router")
    if others := kept - _KEPT - absent - {*arguments.get("llm_int8_skip_modules", ())}:
        raise InvalidRequestError(
            f"{said} that leaves {', '.join(sorted(others))} as they are, and --quantize {bits} does not", copy
        )
    return replace(workload, config={name: value for name, value in workload.config.items() if name != STATED})
