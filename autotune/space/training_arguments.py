"""Translate a candidate to ``TrainingArguments`` fields, for trials and exports alike."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal, TypedDict

from autotune.core.candidate import Arm, Candidate
from autotune.core.dataset_spec import DataSpec
from autotune.space.arms import trainer_fields

# DeepSpeed's own 5e8 take 1 GB in 16 bits, twice, and gradients of smaller models are then exchanged after the backward
# pass only. This number is DeepSpeed's default for what ZeRO-3 fetches ahead.
REDUCE_BUCKET_ELEMENTS = 50_000_000
EVALUATION_BATCH: Literal["per_device_eval_batch_size"] = "per_device_eval_batch_size"
# transformers 5.18 and later rename gradient checkpointing, and deprecate the old name.
CheckpointingField = Literal["activation_checkpointing", "gradient_checkpointing"]
_CHECKPOINTING_FIELDS: tuple[CheckpointingField, ...] = ("activation_checkpointing", "gradient_checkpointing")


TF32_UNSET_REVISION = 3
"""Since this measurement revision, trials on a GPU leave ``tf32`` at its default unless the precision is tf32."""


class TunedArguments(TypedDict, total=False):
    """Fields of ``TrainingArguments`` that are tuned, or that a training needs to run as its trial did.

    Which of them are present depends on the candidate, the device and the installed transformers.
    """

    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    bf16: bool
    fp16: bool
    tf32: bool | None
    optim: str
    activation_checkpointing: bool
    activation_checkpointing_kwargs: dict[str, int]
    gradient_checkpointing: bool
    gradient_checkpointing_kwargs: dict[str, bool]
    torch_compile: bool
    torch_compile_backend: None
    torch_compile_mode: str | None
    use_liger_kernel: bool
    use_cpu: bool
    dataloader_num_workers: int
    dataloader_prefetch_factor: int
    ddp_find_unused_parameters: bool
    ddp_broadcast_buffers: bool
    fsdp: bool | str
    fsdp_config: dict[str, Any]
    accelerator_config: dict[str, Any]
    deepspeed: dict[str, Any]
    logging_nan_inf_filter: bool
    train_sampling_strategy: str
    per_device_eval_batch_size: int


def checkpointing_field(fields: Collection[str]) -> CheckpointingField:
    """Return the name of the field for gradient checkpointing; ``fields`` are those of ``TrainingArguments`` here."""
    return next((name for name in _CHECKPOINTING_FIELDS if name in fields), _CHECKPOINTING_FIELDS[-1])


def training_arguments(
    candidate: Candidate, fields: Collection[str], device_kind: str, revision: int = TF32_UNSET_REVISION
) -> TunedArguments:
    """Return the fields of ``TrainingArguments`` with which a training runs as a candidate's trial did.

    ``fields`` are the names in the installed version. ``revision`` is the trial's measurement revision (it counts up
    where trials begin to measure in another way); the current one by default.
    """
    arm = candidate.arm
    checkpointing = checkpointing_field(fields)
    arguments: TunedArguments = {
        "per_device_train_batch_size": candidate.per_device_train_batch_size,
        "gradient_accumulation_steps": candidate.gradient_accumulation_steps,
        "bf16": arm.precision == "bf16",
        "fp16": arm.precision == "fp16",
        "tf32": _tf32(arm, device_kind, revision),
    }
    arguments[checkpointing] = arm.gradient_checkpointing and not arm.is_sharded
    arguments.update(trainer_fields(arm))  # type: ignore[typeddict-item]
    if arguments[checkpointing]:
        # torch recommends this variant of checkpointing, the only one that works with frozen inputs.
        kwargs = {"use_reentrant": False} | ({"offload": True} if arm.offload_activations else {})
        arguments[f"{checkpointing}_kwargs"] = kwargs  # type: ignore[literal-required]
    if arm.is_sharded:
        arguments |= _fsdp(arm, fields)
    if arm.zero_stage is not None:
        arguments["deepspeed"] = deepspeed_settings(arm)
    accelerator: dict[str, Any] = {}
    if arm.is_sharded and arm.sync_each_batch:
        accelerator["gradient_accumulation_kwargs"] = {"sync_each_batch": True}
    if arm.non_blocking:
        accelerator["non_blocking"] = True
        # The filter reads the loss of each micro-step, for which the host waits for the GPU.
        arguments["logging_nan_inf_filter"] = False
    if accelerator:
        arguments["accelerator_config"] = accelerator
    if device_kind == "cpu":
        arguments["use_cpu"] = True
    return arguments


def linked_fields(arguments: Mapping[str, Any]) -> dict[str, None]:
    """Return further fields to reset to ``None`` where ``arguments`` turn compilation off; otherwise none.

    ``TrainingArguments`` compile where a backend or a mode is given, whatever ``torch_compile`` says.
    """
    if arguments.get("torch_compile", True):
        return {}
    return {"torch_compile_backend": None, "torch_compile_mode": None}


def fsdp_settings(arm: Arm) -> dict[str, Any]:
    """Return the settings of FSDP2 that an arm was measured with, named as in ``fsdp_config``.

    The layer classes are always named: by default accelerate shards the input embedding a second time where the model
    lists its module of embeddings as one that is not to be split (accelerate 1.15, BERT). Checkpointing is FSDP's own:
    that of ``TrainingArguments`` would gather every layer once more.
    """
    assert arm.transformer_layer_cls_to_wrap is not None
    return {
        "version": 2,
        "reshard_after_forward": arm.strategy != "fsdp-keep",
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": arm.transformer_layer_cls_to_wrap.split(","),
        "activation_checkpointing": arm.gradient_checkpointing,
        "cpu_ram_efficient_loading": False,
        "state_dict_type": "FULL_STATE_DICT",
    }


def launch_variables(arm: Arm) -> dict[str, str]:
    """Return the environment variables that make accelerate use context parallelism or hybrid sharding, if an arm does.

    ``accelerate launch`` sets the same ones from its configuration file. The field ``parallelism_config`` of
    ``TrainingArguments`` takes an object, so that no JSON can hold it.
    """
    sizes = parallelism(arm)
    variables = {f"PARALLELISM_CONFIG_{name.upper()}": str(size) for name, size in sizes.items()}
    return {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", **variables} if sizes else {}


def parallelism(arm: Arm) -> dict[str, int]:
    """Return the sizes for accelerate's ``ParallelismConfig``; an empty dictionary where its defaults are right."""
    if arm.context_parallel > 1:
        return {"dp_shard_size": arm.data_parallel, "cp_size": arm.context_parallel}
    if arm.dp_shard_size:
        return {"dp_replicate_size": arm.ranks // arm.dp_shard_size, "dp_shard_size": arm.dp_shard_size}
    return {}


def _fsdp(arm: Arm, fields: Collection[str]) -> TunedArguments:
    """Return the fields of ``TrainingArguments`` that turn on FSDP2 as the arm sets it."""
    # Before transformers 5.18, which has a new name for checkpointing, a bare True did not wrap layers. Since then the
    # text is deprecated.
    takes_true = _CHECKPOINTING_FIELDS[0] in fields
    return {"fsdp": True if takes_true else "full_shard auto_wrap", "fsdp_config": fsdp_settings(arm)}


def deepspeed_settings(arm: Arm) -> dict[str, Any]:
    """Return the settings of DeepSpeed that an arm with ZeRO was measured with, for ``TrainingArguments(deepspeed=…)``.

    The ``Trainer`` fills in each ``"auto"`` from its other arguments, and makes the optimizer that ``optim`` names.
    """
    stage = arm.zero_stage
    assert stage is not None
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True}
    zero["reduce_bucket_size"] = REDUCE_BUCKET_ELEMENTS
    if stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    if arm.offloads_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "zero_optimization": zero,
    }
    if arm.offloads_optimizer:
        # DeepSpeed's own Adam for the CPU is compiled when it is first used, for which a compiler has to be there.
        settings["zero_force_ds_cpu_optimizer"] = False
    return settings


def _tf32(arm: Arm, device_kind: str, revision: int) -> bool | None:
    """Return the value of the field ``tf32``; ``None`` is the default of ``TrainingArguments``.

    The default leaves torch's settings unchanged: convolutions and recurrent layers may use TF32, matrix products may
    not (torch.backends.fp32_precision). fp32 means that default, so that the baseline is what an untuned ``Trainer``
    does. bf16 and fp16 keep it, too. Autocast computes matrix products and convolutions in 16 bits, and code that turns
    autocast off needs full float32: with TF32, rotary embeddings rounded positions above 2,048 on a B200
    (github.com/huggingface/transformers/issues/48428).
    """
    if arm.precision == "tf32":
        return True
    # Trials of older measurement revisions set the field to False.
    if device_kind == "cpu" or revision < TF32_UNSET_REVISION:
        return False
    # TrainingArguments turns TF32 on by default for compiled models, which would make fp32 the same as tf32.
    return False if arm.precision == "fp32" and arm.torch_compile else None


def evaluation_arguments(candidate: Candidate) -> TunedArguments:
    """Return the field for the batch size of evaluation: that of training, which needs more memory for its gradients.

    The ``Trainer``'s default of 8 may not fit where training uses a smaller batch: 8 × 2,048 tokens have 9.3 GiB of
    float32 logits over Qwen2.5's vocabulary, and ran out of 24 GiB on an H200.
    """
    return {EVALUATION_BATCH: candidate.per_device_train_batch_size}


def data_arguments(data: DataSpec) -> TunedArguments:
    """Return the fields that load a dataset in the order and way that trials did; tuned fields override them."""
    return {
        "dataloader_num_workers": 0,
        "train_sampling_strategy": "group_by_length" if data.group_by_length else "random",
    }
