"""Test preparing a search from a request and inspected facts, and its errors."""

import dataclasses
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from messages import check_refusals
from searching import BERT_LARGE, CONTEXT_BYTES, FACTS, H200, MODEL, facts, prepared, request

from autotune.core.candidate import OWN_OPTIM, Arm, Candidate
from autotune.core.ceiling import Headroom
from autotune.core.code_interface import CodeInterface, Framework
from autotune.core.errors import NothingFitsError
from autotune.core.inspection import Inspection, OwnSettings
from autotune.core.lengths import Batching, SampleLengths, shapes_of
from autotune.core.options import CheckpointingChoice
from autotune.core.training_source import TrainingSource
from autotune.core.units import GIB, MIB, parse_bytes
from autotune.core.workload import Workload
from autotune.space.arms import with_lever
from autotune.space.levers import LENGTH_MULTIPLE, ROW_MULTIPLE
from autotune.space.training_arguments import TF32_UNSET_REVISION
from autotune.store.records import StudyRecord
from autotune.tuning.environment import environment_fingerprint
from autotune.tuning.forecast import most_predictions
from autotune.tuning.narrator import Narrator
from autotune.tuning.own_code import note_on_engine
from autotune.tuning.prepare import Prepared, _smallest_with_few_shapes, prepare
from autotune.tuning.strategies import training_state_bytes

STATE_BYTES = 16 * 335_143_938
"""Weights, gradients and two moments of BERT-large in float32."""


OWN_SCRIPT = Workload.of_source(TrainingSource("script", "/run.py", "0", "/"))


def limit_in(hint: str) -> int:
    """The memory limit that a hint names."""
    match = re.search(r"--memory-limit (\S+)", hint)
    assert match is not None, hint
    return parse_bytes(match.group(1))


class TestPrepared:
    def test_the_example(self) -> None:
        given = prepared()
        assert given.ceiling.cap_bytes == 24 * GIB - CONTEXT_BYTES
        assert given.baseline == Candidate(Arm("fp32"), 8, 8)
        assert len(given.space.arms) == 8
        assert {arm.attn_implementation for arm in given.space.arms} == {"sdpa"}
        assert given.model.class_name == "BertForSequenceClassification"
        assert given.environment["device_name"] == "NVIDIA H200"
        assert given.environment["packages"]["torch"] == "2.13.0"

    def test_the_head_says_what_of_a_mixture_of_experts_is_not_quantized(self) -> None:
        quantized = dataclasses.replace(BERT_LARGE, dtype="bfloat16", peft="lora", lora_rank=16, quantize="4bit")
        study = StudyRecord("moe", "w", "e", {}, {}, "0.1.0")
        for workload, weights, notes in ((quantized, GIB, 1), (BERT_LARGE, 0, 0)):
            said: list[str] = []
            given = prepare(request(workload=workload), facts(unquantized_experts=weights))
            Narrator(lambda line, _, said=said: said.append(line)).begins(given, study)  # type: ignore[misc]
            assert (
                sum(line.startswith("note    2.0 GiB of weights stay in bfloat16: the experts") for line in said)
                == notes
            )

    def test_without_a_limit_all_that_is_free_counts(self) -> None:
        assert prepared(memory_limit_bytes=None).ceiling.cap_bytes == 139 * GIB - CONTEXT_BYTES

    def test_a_model_without_sdpa_and_checkpointing(self) -> None:
        given = prepare(request(), facts(attn_implementations=("eager",), gradient_checkpointing=False))
        assert given.baseline.arm.attn_implementation == "eager"
        assert {arm.attn_implementation for arm in given.space.arms} == {"eager"}
        assert not any(arm.gradient_checkpointing for arm in given.space.arms)

    def test_the_baseline_is_what_transformers_chooses_whatever_is_searched(self) -> None:
        given = prepared(attn_implementations=("eager",), precisions=("bf16",), optims=("adafactor",))
        assert given.baseline.arm == Arm("fp32", False, "sdpa", "adamw_torch_fused")
        assert not given.space.contains(given.baseline)


@pytest.mark.parametrize(
    ("cores", "free_bytes", "most"),
    [(2, 64 * GIB, 2), (128, 64 * GIB, 8), (128, 3 * GIB, 3), (128, 0, 1), (0, 64 * GIB, 1)],
)
def test_predictions_at_once_are_limited_by_cores_and_memory(cores: int, free_bytes: int, most: int) -> None:
    assert most_predictions(cores, free_bytes) == most


def test_more_predictions_of_several_ranks_run_at_once() -> None:
    assert most_predictions(128, 64 * GIB, ranks=2) == 16


class TestOwnCheckpointing:
    """Of code whose model checkpoints, whatever its ``TrainingArguments`` say."""

    def prepared(self, choice: CheckpointingChoice, always: bool) -> Prepared:
        asked = request(gradient_checkpointing=choice, workload=OWN_SCRIPT)
        own = OwnSettings(Arm(gradient_checkpointing=True), 8, 8)
        return prepare(asked, facts(always_checkpoints=always, own=own))

    @pytest.mark.parametrize("choice", ["auto", "on"])
    def test_nothing_else_is_searched(self, choice: CheckpointingChoice) -> None:
        assert all(arm.gradient_checkpointing for arm in self.prepared(choice, True).space.arms)
        assert self.prepared("auto", False).space.arms[0].gradient_checkpointing is False

    def test_it_may_be_off_where_it_is_not_always_on(self) -> None:
        assert self.prepared("off", False).space.arms


def with_completions(effective_batch: int) -> Prepared:
    """A search over code that generates 4 completions of each prompt."""
    model = facts(own=OwnSettings(Arm(optim="adamw_torch"), 4), interface=CodeInterface(samples_a_prompt=4))
    return prepare(request(effective_batch=effective_batch, workload=OWN_SCRIPT), model)


def test_a_step_has_all_completions_of_its_prompts() -> None:
    assert with_completions(8).space.batches.effective_batch == 8


def test_the_multiples_of_batches_and_of_rows_follow_from_the_lengths() -> None:
    draw = random.Random(0)
    lengths = [min(512, max(8, int(draw.lognormvariate(4.9, 0.7)))) for _ in range(8192)]

    def multiples(lengths: list[int], samples: int) -> tuple[int, int]:
        interface = CodeInterface(lengths=SampleLengths.of(lengths, samples=samples))
        own = facts(own=OwnSettings(Arm(optim="adamw_torch"), 32), interface=interface)
        return prepare(request(workload=OWN_SCRIPT), own).space.multiples

    short, long = multiples(lengths, 8192), multiples(lengths, 1_000_000)
    assert short > long, "the fewer steps, the fewer shapes are worth their padding"
    assert short[0] < short[1]
    assert multiples([512] * 9, 8192) == (LENGTH_MULTIPLE, ROW_MULTIPLE), "nothing to choose"
    late = {"padding_free", "length_multiple"}
    assert with_lever(Arm(), "length_multiple", late, (32, 2048)) == Arm(length_multiple=32)
    assert with_lever(Arm(), "padding_free", late, (32, 2048)).length_multiple == 2048


def with_engine(share: float) -> Inspection:
    """What is known of code that gives vLLM this share of the GPU, an H200 of 139.4 GiB."""
    return facts(own=OwnSettings(Arm(optim="adamw_torch"), 4), interface=CodeInterface(engine_share=share))


def test_vllm_leaves_memory_for_training() -> None:
    """A trial may have 24 GiB."""
    given = request(effective_batch=8, workload=OWN_SCRIPT)
    told = note_on_engine(given, with_engine(0.1).model)
    assert told.startswith("vLLM takes 13.9 GiB of cuda:0 in the process of each trial")
    # What is measured has it in it, so that nothing is taken off.
    assert (
        prepare(given, with_engine(0.1)).ceiling
        == prepare(given, facts(own=OwnSettings(Arm(optim="adamw_torch"), 4))).ceiling
    )


class TestSamples:
    """Of the user's own code, whose data is known when it was run up to its training."""

    @staticmethod
    def own(samples: int | None, kind: Framework = "trainer", **options: Any) -> Prepared:
        source = TrainingSource("build", "train.py", "abc", "/", function="build")
        asked = request(effective_batch=None, workload=Workload.of_source(source), **options)
        settings = OwnSettings(Arm(optim="adamw_torch"), 8)
        return prepare(
            asked, facts(config={"model_type": "bert"}, own=settings, samples=samples, interface=CodeInterface(kind))
        )

    @pytest.mark.parametrize(("samples", "largest"), [(5, 4), (8, 8), (100, 64), (None, 65536)])
    def test_bound_a_free_batch(self, samples: int | None, largest: int) -> None:
        batches = self.own(samples, objective="max-batch").space.batches
        assert max(batches.at_level(batches.levels()[0])) == largest

    def test_enough_for_the_multiple_or_for_the_next_epoch_are_taken(self) -> None:
        assert self.own(16, objective="max-batch", batch_multiple=16).space.batches.levels() == (16,)
        # A loop that is told its accumulation may go on with the next epoch.
        self.own(5, "placeholders")


class TestFingerprint:
    @pytest.mark.parametrize("name", ["device_label", "training_arguments_fields"])
    def test_does_not_depend_on_what_a_card_is_called(self, name: str) -> None:
        given = prepared()
        other = dataclasses.replace(given, environment={**given.environment, name: "another"})
        assert environment_fingerprint(other.environment) == environment_fingerprint(given.environment)

    def test_trials_that_switched_tf32_off_on_a_gpu_are_of_another_environment(self) -> None:
        assert prepared().environment["measurement_revision"] >= TF32_UNSET_REVISION

    @pytest.mark.parametrize(
        "name", ["device_uuid", "machine", "device_name", "driver", "packages", "cuda", "python", "device_memory_bytes"]
    )
    def test_depends_on_what_a_measurement_does(self, name: str) -> None:
        given = prepared()
        assert name in given.environment
        other = dataclasses.replace(given, environment={**given.environment, name: "another"})
        assert environment_fingerprint(other.environment) != environment_fingerprint(given.environment)


class TestTrainingState:
    @pytest.mark.parametrize(
        ("optims", "copies"),
        [
            (("adamw_torch",), 4),
            (("adamw_torch_fused",), 4),
            (("adamw_torch_fused", "adamw_torch"), 4),
            (("adafactor",), 2),
            (("sgd",), 2),
            # One that keeps less is among them, or its moments are smaller.
            (("adamw_torch_fused", "sgd"), 2),
            (("adamw_torch_8bit",), 2),
            (("adamw_torch_4bit",), 2),
        ],
    )
    def test_counts_only_what_is_certain_of_an_optimizer(self, optims: tuple[str, ...], copies: int) -> None:
        assert training_state_bytes(request(optims=optims), MODEL) == copies * 4 * 335_143_938

    def test_weights_that_are_not_trained_have_no_gradients(self) -> None:
        model = dataclasses.replace(MODEL, trainable_parameters=1000)
        assert training_state_bytes(request(), model) == 4 * 335_143_938 + 12 * 1000

    def test_16_bit_weights_halve_it(self) -> None:
        halved = request(workload=dataclasses.replace(BERT_LARGE, dtype="bfloat16"))
        assert training_state_bytes(halved, MODEL) == STATE_BYTES // 2


class TestTooLittleMemory:
    @given(st.integers(1, 8 * 2**30), st.floats(0, 0.5) | st.integers(0, 4 * 2**30))
    def test_is_refused_exactly_below_what_it_says_it_takes(self, limit_bytes: int, spare: float | int) -> None:
        headroom = Headroom(size_bytes=spare) if isinstance(spare, int) else Headroom(spare)
        options: dict[str, Any] = {"headroom": headroom}
        try:
            found = prepared(memory_limit_bytes=limit_bytes, **options)
        except NothingFitsError as error:
            enough = limit_in(error.hint)
            assert enough > limit_bytes
            assert prepared(memory_limit_bytes=enough, **options).ceiling.line_bytes >= STATE_BYTES
        else:
            assert found.ceiling.line_bytes >= STATE_BYTES

    def test_is_told_with_what_it_takes_also_where_the_limit_is_below_the_cuda_context(self) -> None:
        with pytest.raises(NothingFitsError) as caught:
            prepared(memory_limit_bytes=500 * MIB)
        assert limit_in(caught.value.hint) > STATE_BYTES


class TestOwnLoop:
    """Of code that trains in a loop of its own, and takes of a candidate what its inspection saw."""

    def prepared(
        self,
        searched: list[str],
        *,
        kind: str = "accelerate",
        batch: int = 8,
        accumulation: int = 2,
        samples: int | None = None,
        **options: Any,
    ) -> Prepared:
        asked = request(**{"effective_batch": 64, "optims": (), "workload": OWN_SCRIPT, **options})
        own = OwnSettings(Arm(optim=OWN_OPTIM), batch, accumulation)
        interface = CodeInterface(kind, tuple(searched))
        checkpoints = "checkpointing" in searched
        return prepare(asked, facts(own=own, interface=interface, gradient_checkpointing=checkpoints, samples=samples))

    def batches(self, given: Prepared) -> list[tuple[int, int]]:
        found = given.space.batches
        return [(b, found.accumulation(b)) for level in found.levels() for b in found.at_level(level)]

    def test_everything_is_searched_where_everything_is_taken(self) -> None:
        given = self.prepared(["batch", "accumulation", "precision", "checkpointing"])
        assert (8, 8) in self.batches(given)
        assert (64, 1) in self.batches(given)
        assert {arm.precision for arm in given.space.arms} == {"bf16", "fp16", "tf32", "fp32"}
        assert {arm.optim for arm in given.space.arms} == {OWN_OPTIM}
        assert given.baseline == Candidate(Arm(optim=OWN_OPTIM), 8, 2)
        assert given.request.workload.source.interface.kind == "accelerate"

    def test_the_baseline_of_a_loop_is_a_candidate_of_its_space(self) -> None:
        """Its optimizer is the loop's own in both: a candidate that is the baseline is not measured as another."""
        source = TrainingSource("loop", "/train.py", "0", "/", function="train")
        asked = request(effective_batch=16, optims=(), workload=Workload.of_source(source))
        given = prepare(asked, facts(interface=CodeInterface("loop", ("batch",))))
        assert given.baseline == Candidate(Arm(optim=OWN_OPTIM), 16)
        assert given.space.contains(given.baseline)

    def test_a_loop_that_may_know_no_tf32_is_given_it_only_when_asked(self) -> None:
        given = self.prepared(["batch", "accumulation", "precision"], kind="loop")
        assert {arm.precision for arm in given.space.arms} == {"bf16", "fp16", "fp32"}
        given = self.prepared(["batch", "accumulation", "precision"], kind="loop", precisions=("tf32",))
        assert {arm.precision for arm in given.space.arms} == {"tf32"}

    def test_what_is_not_taken_is_not_searched(self) -> None:
        assert self.batches(self.prepared(["batch", "precision"])) == [(32, 2)]
        assert self.batches(self.prepared(["accumulation", "precision"])) == [(8, 8)]
        given = self.prepared(["batch"])
        assert {(arm.precision, arm.gradient_checkpointing) for arm in given.space.arms} == {("fp32", False)}

    def test_a_resumed_study_has_the_name_of_the_optimizer_recorded(self) -> None:
        given = self.prepared(["batch", "accumulation"], optims=(OWN_OPTIM,))
        assert {arm.optim for arm in given.space.arms} == {OWN_OPTIM}


def test_messages_of_searches_that_cannot_be_prepared() -> None:
    few = dataclasses.replace(FACTS, optims=("adafactor", "adamw_torch", "adamw_torch_fused"))
    known = prepare(request(optims=("adafactor",)), few)
    assert known.space.arms
    halved = dataclasses.replace(BERT_LARGE, dtype="bfloat16")
    busy = dataclasses.replace(H200, memory_free_bytes=3 * GIB)
    own_engine = request(effective_batch=8, workload=OWN_SCRIPT)
    loop, own = TestOwnLoop().prepared, TestSamples.own
    without_checkpointing = facts(gradient_checkpointing=False)
    cases: dict[str, Callable[[], object]] = {
        "a model that cannot be built": lambda: prepare(
            request(), dataclasses.replace(FACTS, model=None, model_error="KeyError: hidden")
        ),
        "an optimizer that transformers lacks": lambda: prepare(request(optims=("adamw_torch", "adamw_troch")), few),
        "an attention that the model lacks": lambda: prepared(attn_implementations=("flash_attention_2",)),
        "one of two": lambda: prepared(attn_implementations=("sdpa", "flash_attention_2")),
        "no checkpointing": lambda: prepare(request(gradient_checkpointing="on"), without_checkpointing),
        "code that always checkpoints": lambda: TestOwnCheckpointing().prepared("off", True),
        "a part of the completions of a prompt": lambda: with_completions(6),
        "fewer completions than of one prompt": lambda: with_completions(3),
        "vLLM over the limit": lambda: prepare(own_engine, with_engine(0.3)),
        "vLLM over what is free": lambda: prepare(
            dataclasses.replace(own_engine, memory_limit_bytes=None), with_engine(1.0)
        ),
        "too few samples for the multiple": lambda: own(15, objective="max-batch", batch_multiple=16),
        "too few samples for a step": lambda: own(5),
        "too little memory": lambda: prepared(memory_limit_bytes=4 * GIB),
        "too little memory for 16-bit weights": lambda: prepared(memory_limit_bytes=2 * GIB, workload=halved),
        "less than the CUDA context": lambda: prepared(memory_limit_bytes=500 * MIB),
        "too little memory of a CPU": lambda: prepare(
            request(memory_limit_bytes=GIB), dataclasses.replace(FACTS, context_bytes=0)
        ),
        "too little memory free": lambda: prepare(
            dataclasses.replace(request(memory_limit_bytes=None), device=busy), FACTS
        ),
        "too little memory free for the limit": lambda: prepare(dataclasses.replace(request(), device=busy), FACTS),
        "a loop that takes nothing": lambda: loop([]),
        "a loop without precision": lambda: loop(["batch"], precisions=("bf16",)),
        "a loop that accumulates by itself": lambda: loop(["batch"], effective_batch=63),
        "a loop with one batch": lambda: loop(["accumulation"], effective_batch=12),
        "a loop with one effective batch": lambda: loop(["precision"]),
        "a loop with an optimizer": lambda: loop(["batch"], optims=("adafactor",)),
        "a loop over little data": lambda: loop(["batch"], effective_batch=1024, samples=300, kind="placeholders"),
    }
    check_refusals("preparing", cases)


@pytest.mark.parametrize("padding", ["longest", "rows"])
def test_there_are_few_shapes_however_long_a_run_is(padding: str) -> None:
    lengths = SampleLengths.of([8 + 61 * at % 1000 for at in range(2000)], samples=400_000)
    how = Batching(16, padding=padding)  # type: ignore[arg-type]
    multiple = _smallest_with_few_shapes(lengths, how, 8)
    counts = [
        len(shapes_of(lengths, Batching(16, padding=padding, multiple=n)).seen) for n in (multiple, multiple // 2)
    ]  # type: ignore[arg-type]
    assert counts[0] <= 16 < counts[1]
