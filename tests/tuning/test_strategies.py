"""Test which ways of sharing a model are searched, what each sets, and what is refused."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from histories import completed, ran_out
from messages import check_refusals
from searching import BERT_LARGE, FACTS, H200, ceiling_of, facts, request

from autotune.core.candidate import Arm, Candidate, Document, Strategy
from autotune.core.code_interface import CodeInterface
from autotune.core.device import Chip, Device
from autotune.core.errors import NothingFitsError
from autotune.core.inspection import AfterStep, OwnSettings
from autotune.core.messages import Answer
from autotune.core.prediction import PredictionWork
from autotune.core.training_source import TrainingSource
from autotune.core.units import GIB
from autotune.core.workload import Workload
from autotune.devices.host import HostMemory
from autotune.estimate.feasibility import Judge
from autotune.estimate.history import History
from autotune.space.space import Batches, Space
from autotune.space.training_arguments import deepspeed_settings, training_arguments
from autotune.tuning.allowed import check_request
from autotune.tuning.forecast import forecast_of
from autotune.tuning.left_out import left_out_arms
from autotune.tuning.optuna_study import candidate_of, distributions, params_of
from autotune.tuning.policy import Acquisition
from autotune.tuning.prepare import Prepared, prepare
from autotune.tuning.request import SearchRequest

SECOND = dataclasses.replace(H200, uuid="GPU-1", index=1)
LAYERS = {"layer_classes": ("BertLayer",), "after_step": AfterStep((), ())}
ZERO = ["zero1", "zero2", "zero3", "zero2-offload"]
FIELDS = {"activation_checkpointing", "bf16", "fp16", "tf32", "optim"}


def prepared_on_two(model: Document | None = None, **options: Any) -> Prepared:
    """A prepared search on two GPUs."""
    changed: Document = {"effective_batch": 64, "world_size": 2, "study": "two", "precisions": ("bf16",), **options}
    workload = changed.pop("workload", BERT_LARGE)
    device: Device = changed.pop("device", H200)
    others = changed.pop("others", (SECOND if device is H200 else device,))
    request = SearchRequest(workload, device, others=others, **changed)
    check_request(request)
    return prepare(request, facts(**(LAYERS if model is None else model)))


def ways_of_arms(prepared: Prepared) -> list[tuple[str | None, bool, bool]]:
    """Strategy, synchronisation and checkpointing of each arm, in order."""
    return [(arm.strategy, arm.sync_each_batch, arm.gradient_checkpointing) for arm in prepared.space.arms]


def test_every_strategy_is_an_arm_with_and_without_checkpointing() -> None:
    plain = [(s, False, c) for s in ("ddp", "fsdp-keep", "fsdp") for c in (False, True)]
    synchronised = [(s, True, c) for s in ("fsdp-keep", "fsdp") for c in (False, True)]
    assert ways_of_arms(prepared_on_two()) == plain + synchronised
    # Without accumulation each micro-step reduces its gradients.
    assert ways_of_arms(prepared_on_two(effective_batch=None)) == plain
    assert ways_of_arms(
        prepared_on_two(strategies=("fsdp", "ddp"), gradient_checkpointing="off", effective_batch=None)
    ) == [("ddp", False, False), ("fsdp", False, False)]
    for arm in prepared_on_two().space.arms:
        assert (arm.transformer_layer_cls_to_wrap, arm.ranks) == ("BertLayer" if arm.is_sharded else None, 2)
        of_ddp = None if arm.is_sharded else False
        assert (arm.ddp_find_unused_parameters, arm.ddp_broadcast_buffers) == (of_ddp, of_ddp)
    # What speed-ups are relative to is what an untuned Trainer does on two GPUs.
    assert prepared_on_two(strategies=("fsdp",)).baseline.arm == Arm(strategy="ddp", ranks=2)


def test_ddp_keeps_its_first_buckets_where_a_second_copy_of_them_would_take_much_of_the_memory() -> None:
    # The gradients of BERT-large have 1.25 GiB: 0.9 % of an H200, 5 % of 24 GiB.
    looks = [arm.ddp_find_unused_parameters for arm in prepared_on_two(memory_limit_bytes=24 * GIB).space.arms]
    assert set(looks) == {True, None}
    assert {arm.ddp_find_unused_parameters for arm in prepared_on_two().space.arms} == {False, None}
    # A parameter without a gradient may be there, or is.
    for seen in (AfterStep(), AfterStep(("pooler.weight",), ())):
        arms = prepared_on_two({**LAYERS, "after_step": seen}, memory_limit_bytes=24 * GIB).space.arms
        assert {arm.ddp_find_unused_parameters for arm in arms} == {None}


@pytest.mark.parametrize(("ranks", "groups"), [(4, {2}), (8, {4}), (9, {3}), (3, set()), (5, set())])
def test_hybrid_sharding_divides_the_model_within_the_largest_equal_groups(ranks: int, groups: set[int]) -> None:
    gpus = tuple(dataclasses.replace(H200, uuid=f"GPU-{index}", index=index) for index in range(1, ranks))
    arms = prepared_on_two(others=gpus, world_size=ranks, effective_batch=ranks * 8).space.arms
    assert {arm.dp_shard_size for arm in arms if arm.strategy == "hybrid"} == groups
    assert {arm.dp_shard_size for arm in arms if arm.strategy != "hybrid"} == {None}


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ({}, {}),
        ({"layer_classes": ()}, {}),
        ({**LAYERS, "sharding_error": "shared weights"}, {}),
        (LAYERS, {"optims": ("adafactor",)}),
    ],
    ids=["not known", "no layers", "accelerate cannot", "no optimizer for shards"],
)
def test_what_cannot_be_sharded_is_trained_with_ddp(model: Document, options: Document) -> None:
    assert {arm.strategy for arm in prepared_on_two(model, **options).space.arms} == {"ddp"}


def test_an_optimizer_that_cannot_update_shards_has_arms_of_ddp_alone() -> None:
    arms = prepared_on_two(optims=("adamw_torch_fused", "adafactor")).space.arms
    assert {(arm.optim, arm.is_sharded) for arm in arms} == {
        ("adamw_torch_fused", False), ("adamw_torch_fused", True), ("adafactor", False)
    }  # fmt: skip


OWN = Workload.of_source(TrainingSource("script", "/train.py", "0", "/", interface=CodeInterface()))


def own_trainer(optim: str = "adamw_torch_fused") -> Document:
    """The facts of a Trainer of the user's own."""
    return {**LAYERS, "own": OwnSettings(Arm(optim=optim), 8), "interface": CodeInterface(), "samples": 6400}


def test_a_trainer_of_ones_own_is_sharded_where_that_is_asked_for() -> None:
    """What it allocates is not predicted on several ranks, so that its trials would find out what fits."""
    assert {arm.strategy for arm in prepared_on_two(own_trainer(), workload=OWN).space.arms} == {"ddp"}
    asked = prepared_on_two(own_trainer(), workload=OWN, strategies=("ddp", "fsdp")).space.arms
    assert {(arm.strategy, arm.transformer_layer_cls_to_wrap) for arm in asked} == {
        ("ddp", None), ("fsdp", "BertLayer")
    }  # fmt: skip


LOOP = Workload.of_source(TrainingSource("loop", "/train.py", "0", "/", function="train"))
QUANTIZED = dataclasses.replace(BERT_LARGE, quantize="4bit", peft="lora", lora_rank=8)
UNSHARDED = "version 1.3.0 has no FSDP2, later ones have"
OF_LOOP = {**own_trainer(), "interface": CodeInterface("accelerate")}
"""The inspection of a script shows that it has a loop of its own."""


Case = tuple[Strategy | None, Document, Document]


@pytest.mark.usefixtures("with_deepspeed")
def test_messages_of_strategies_that_cannot_be(cpu: Device) -> None:
    few_bits: Document = {"workload": QUANTIZED}
    of_cpu: Document = {"device": cpu, "precisions": ("fp32",)}
    cases: dict[str, Case] = {
        "two equal groups": ("hybrid", LAYERS, {}),
        "groups of one's own code": ("hybrid", own_trainer(), {"workload": OWN}),
        "no class of layers": ("fsdp", {"layer_classes": ()}, {}),
        "shared weights": ("fsdp", {**LAYERS, "sharding_error": "shared weights"}, {}),
        "an older accelerate": ("fsdp", {"layer_classes": (), "sharding_error": UNSHARDED}, {}),
        "an optimizer": ("fsdp", LAYERS, {"optims": ("adafactor",)}),
        "weights in few bits": ("fsdp", LAYERS, few_bits),
        "the optimizer of one's own Trainer": ("fsdp", own_trainer("adafactor"), {"workload": OWN, "optims": ()}),
        "an optimizer that a script makes": ("fsdp", own_trainer("own"), {"workload": OWN, "optims": ()}),
        "another optimizer for one's own Trainer": (
            "fsdp", own_trainer("adamw_torch"), {"workload": OWN, "optims": ("adafactor",)}
        ),
        "a script with a loop": ("fsdp", OF_LOOP, {"workload": OWN}),
        "a script with a loop, no strategy": (None, OF_LOOP, {"workload": OWN}),
        "a loop": ("fsdp", OF_LOOP, {"workload": LOOP}),
        "a loop under ZeRO": ("zero2", OF_LOOP, {"workload": LOOP}),
        "a loop, no strategy": (None, OF_LOOP, {"workload": LOOP}),
        "one's own code under ZeRO": ("zero2-offload", LAYERS, {"workload": OWN}),
        "an optimizer under ZeRO": ("zero1", LAYERS, {"optims": ("adamw_bnb_8bit",)}),
        "compiled under ZeRO": ("zero2", LAYERS, {"torch_compile": "on"}),
        "weights in few bits under ZeRO": ("zero3", LAYERS, few_bits),
        "offloaded on a CPU": ("zero2-offload", LAYERS, of_cpu),
        "sharded on a CPU": ("fsdp", LAYERS, of_cpu),
    }  # fmt: skip
    calls: dict[str, Callable[[], object]] = {
        name: partial(prepared_on_two, model, strategies=strategy and (strategy,), **options)
        for name, (strategy, model, options) in cases.items()
    }
    alone = {
        "a loop on one GPU": SearchRequest(LOOP, H200, effective_batch=64, strategies=("fsdp",)),
        "one's own code under ZeRO on one GPU": SearchRequest(OWN, H200, strategies=("zero2-offload",)),
    }
    check_refusals("strategies", calls | {name: partial(check_request, asked) for name, asked in alone.items()})


@pytest.mark.parametrize(("limit", "strategies"), [(24 * GIB, {"ddp"}), (3 * GIB, {"ddp", "fsdp", "fsdp-keep"})])
def test_adapters_are_sharded_where_weights_take_most_of_the_memory(
    monkeypatch: pytest.MonkeyPatch, limit: int, strategies: set[str]
) -> None:
    """They have so few gradients that DDP exchanges next to nothing."""
    monkeypatch.setattr("autotune.tuning.allowed.require", lambda *_: None)
    lora = dataclasses.replace(BERT_LARGE, peft="lora", lora_rank=8)
    few = {**LAYERS, "parameters": 400_000_000, "trainable_parameters": 4_000_000}
    given = {"workload": lora, "memory_limit_bytes": limit}
    assert {arm.strategy for arm in prepared_on_two(few, **given).space.arms} == strategies
    assert {arm.strategy for arm in prepared_on_two(few, **given, strategies=("fsdp",)).space.arms} == {"fsdp"}


def test_on_a_cpu_ranks_train_with_ddp(cpu: Device) -> None:
    assert {arm.strategy for arm in prepared_on_two(device=cpu, precisions=("fp32",)).space.arms} == {"ddp"}


@pytest.fixture
def with_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that DeepSpeed is installed."""
    installed = {"deepspeed": "0.19.8", "bitsandbytes": "0.50", "peft": "0.21"}
    monkeypatch.setattr("autotune.space.features.version_of", installed.get)
    monkeypatch.setattr("autotune.tuning.strategies.version_of", installed.get)


@pytest.mark.usefixtures("with_deepspeed")
def test_the_stages_of_zero_are_arms_where_deepspeed_is_installed(cpu: Device) -> None:
    found = [way for way in ways_of_arms(prepared_on_two(gradient_checkpointing="off")) if way[0] in ZERO]
    # DeepSpeed decides by itself when gradients are reduced.
    assert found == [(strategy, False, False) for strategy in ZERO[:3]]
    # Neither layers to shard nor a GPU is needed.
    assert {arm.strategy for arm in prepared_on_two({"layer_classes": ()}).space.arms} == {"ddp", *ZERO[:3]}
    alone = prepared_on_two({}, device=cpu, strategies=("zero1", "zero2"), precisions=("fp32",))
    assert {arm.strategy for arm in alone.space.arms} == {"zero1", "zero2"}
    assert all(arm.transformer_layer_cls_to_wrap is arm.ddp_find_unused_parameters is None for arm in alone.space.arms)
    # By themselves, ranks on a CPU train with DDP.
    assert {arm.strategy for arm in prepared_on_two(device=cpu, precisions=("fp32",)).space.arms} == {"ddp"}


def test_messages_where_deepspeed_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ZeRO cannot do is told before what it needs, so that nobody installs that to be refused then."""
    monkeypatch.setattr("autotune.space.features.version_of", lambda package: None)
    monkeypatch.setattr("autotune.space.features.how_to_add", lambda package: f"install [{package}]")
    offloads = SearchRequest(QUANTIZED, H200, effective_batch=64, strategies=("zero2-offload",))
    cases: dict[str, Callable[[], object]] = {
        "weights in few bits": partial(prepared_on_two, strategies=("zero3",), workload=QUANTIZED),
        "weights in few bits, offloaded on one GPU": partial(check_request, offloads),
        "ZeRO": partial(prepared_on_two, strategies=("zero2",)),
    }
    check_refusals("without_deepspeed", cases)
    # What is only predicted is not run.
    prepared_on_two(strategies=("zero2",), is_at_hand=False)


@pytest.mark.usefixtures("with_deepspeed")
def test_the_optimizer_is_offered_to_the_cpu_where_its_state_takes_most_of_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """BERT-large takes 5 GiB: its weights, gradients and AdamW's moments."""

    def strategies(**options: Any) -> set[str | None]:
        return {arm.strategy for arm in prepare(request(precisions=("bf16",), **options), FACTS).space.arms}

    assert strategies() == {None}
    assert strategies(memory_limit_bytes=8 * GIB) == {None, "zero2-offload"}
    assert strategies(memory_limit_bytes=8 * GIB, optims=("adafactor",)) == {None}
    assert strategies(strategies=("zero2-offload",)) == {"zero2-offload"}
    # Without it, this would be refused as too little for a single sample.
    assert strategies(memory_limit_bytes=3 * GIB) == {None, "zero2-offload"}
    with pytest.raises(NothingFitsError):
        strategies(memory_limit_bytes=GIB)
    on_two = prepared_on_two(memory_limit_bytes=4 * GIB)
    assert [arm.strategy for arm in on_two.space.arms if arm.offloads_optimizer]
    assert not [arm.strategy for arm in prepared_on_two().space.arms if arm.offloads_optimizer]
    # The host of a prediction is not this one.
    monkeypatch.setattr("autotune.tuning.strategies.host_memory", lambda: HostMemory(4 * GIB, GIB))
    with pytest.raises(NothingFitsError, match=r"keeps 5.0 GiB of .* in the host's memory, where 1.0 GiB are free"):
        strategies(strategies=("zero2-offload",))
    assert strategies(memory_limit_bytes=8 * GIB) == {None}
    assert strategies(memory_limit_bytes=8 * GIB, is_at_hand=False) == {None, "zero2-offload"}


def test_the_optimizer_goes_to_the_cpu_only_where_nothing_else_fits() -> None:
    plain, offloads = Arm("bf16", gradient_checkpointing=True), Arm("bf16", strategy="zero2-offload")
    space = Space((plain, offloads), Batches(4, 1))
    history = History(ceiling_of(20 * GIB))
    policy, judge = Acquisition(space), Judge(space, history)
    assert not judge.is_new(space.candidate(offloads, 4))
    tried = []
    while (candidate := policy.next(history)) is not None and candidate.arm == plain:
        history.add(ran_out(plain, candidate.per_device_train_batch_size, candidate.gradient_accumulation_steps))
        tried.append(candidate.per_device_train_batch_size)
    assert 1 in tried
    assert candidate.arm == offloads
    # Where something fits, it is neither tried nor listed among what was left out.
    fitting = History(ceiling_of(20 * GIB))
    fitting.add(completed(plain, 4))
    assert not Judge(space, fitting).is_open(space.candidate(offloads, 1))
    assert left_out_arms(space, fitting) == ()


def test_trials_of_one_rank_that_offloads_are_read_back() -> None:
    candidate = Candidate(Arm("bf16", strategy="zero2-offload"), 4, 2)
    assert Candidate.from_parameters(candidate.recorded_parameters()) == candidate
    assert candidate.arm.describe() == "bf16, zero2-offload"


def test_the_arguments_of_deepspeed_are_filled_in_by_the_trainer() -> None:
    arm = Arm("bf16", gradient_checkpointing=True, strategy="zero3", ranks=2)
    arguments = training_arguments(Candidate(arm, 8, 2), FIELDS, "cuda")
    config = arguments["deepspeed"]
    assert (config["zero_optimization"]["stage"], "offload_optimizer" in config["zero_optimization"]) == (3, False)
    assert config["train_micro_batch_size_per_gpu"] == config["bf16"]["enabled"] == "auto"
    # Checkpointing is the Trainer's own.
    assert arguments["activation_checkpointing"] is True
    offload = deepspeed_settings(Arm("bf16", strategy="zero2-offload"))
    assert offload["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert offload["zero_force_ds_cpu_optimizer"] is False


def test_the_arguments_of_fsdp_are_those_that_the_trainer_takes() -> None:
    arm = Arm(
        "bf16", gradient_checkpointing=True, strategy="fsdp", ranks=2,
        transformer_layer_cls_to_wrap="WhisperDecoderLayer,WhisperEncoderLayer", sync_each_batch=True,
    )  # fmt: skip
    arguments = training_arguments(Candidate(arm, 8, 2), FIELDS, "cuda")
    assert arguments["fsdp"] is True
    config = arguments["fsdp_config"]
    assert (config["version"], config["reshard_after_forward"], config["activation_checkpointing"]) == (2, True, True)
    assert config["transformer_layer_cls_to_wrap"] == ["WhisperDecoderLayer", "WhisperEncoderLayer"]
    # FSDP's own checkpointing instead of the argument's: both at once are refused by the Trainer.
    assert arguments["activation_checkpointing"] is False
    assert "activation_checkpointing_kwargs" not in arguments
    assert arguments["accelerator_config"] == {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    both = training_arguments(Candidate(dataclasses.replace(arm, non_blocking=True), 8, 2), FIELDS, "cuda")
    assert both["accelerator_config"] == {**arguments["accelerator_config"], "non_blocking": True}
    keep = dataclasses.replace(arm, strategy="fsdp-keep", sync_each_batch=False, gradient_checkpointing=False)
    kept = training_arguments(Candidate(keep, 8, 2), FIELDS - {"activation_checkpointing"}, "cuda")
    assert kept["fsdp"] == "full_shard auto_wrap"
    assert kept["fsdp_config"]["reshard_after_forward"] is kept["fsdp_config"]["activation_checkpointing"] is False
    assert "accelerator_config" not in kept


def sharded_arm(strategy: Any, **options: Any) -> Arm:
    return Arm("bf16", strategy=strategy, ranks=2, transformer_layer_cls_to_wrap="BertLayer", **options)


def test_gradients_are_reduced_in_each_micro_step_only_where_memory_calls_for_it() -> None:
    plain, synchronised = sharded_arm("fsdp"), sharded_arm("fsdp", sync_each_batch=True)
    space = Space((plain, synchronised), Batches(64, 2))
    history = History(ceiling_of(20 * GIB))
    judge = Judge(space, history)
    assert judge.is_open(space.candidate(plain, 8))
    assert not judge.is_open(space.candidate(synchronised, 8))
    assert not judge.is_in_turn(space.candidate(synchronised, 8))
    history.add(ran_out(plain, 8, 4))
    assert judge.is_open(space.candidate(synchronised, 8))
    # Where nothing is accumulated the two are the same.
    history.add(ran_out(plain, 32))
    assert not judge.is_open(space.candidate(synchronised, 32))


def test_memory_is_predicted_for_each_strategy() -> None:
    prepared = prepared_on_two(gradient_checkpointing="off")
    asked: list[Arm] = []

    class Submitter:
        def submit(self, job_id: str, work: PredictionWork, timeout_seconds: float) -> None:
            asked.append(work.arm)

        def ended(self, wait_seconds: float = 0.0) -> dict[str, Answer]:
            return {f"predict-{len(asked)}": Answer(exit_code=1)}

    forecast = forecast_of(dataclasses.replace(prepared, chip=Chip(multiprocessors=132)), Submitter())
    forecast.complete()
    assert [(arm.strategy, arm.sync_each_batch, arm.ranks) for arm in asked] == [
        ("ddp", False, 2), ("fsdp-keep", False, 2), ("fsdp", False, 2), ("fsdp-keep", True, 2), ("fsdp", True, 2)
    ]  # fmt: skip


def test_optuna_chooses_the_strategy_as_a_parameter() -> None:
    prepared = prepared_on_two()
    names = distributions(prepared.space, prepared.baseline, "tpe")
    assert {"strategy", "sync_each_batch"} <= names.keys()
    for arm in prepared.space.arms:
        candidate = prepared.space.candidate(arm, 8)
        assert candidate_of(params_of(candidate, names), prepared.space) == candidate
    params = params_of(prepared.space.candidate(prepared.space.arms[0], 8), names)
    # A strategy without such a choice.
    assert candidate_of({**params, "sync_each_batch": True}, prepared.space) is None
    only_ddp = prepared_on_two(strategies=("ddp",))
    assert not {"strategy", "sync_each_batch"} & distributions(only_ddp.space, only_ddp.baseline, "tpe").keys()
