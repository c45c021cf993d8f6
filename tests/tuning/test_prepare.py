"""Test preparing a search from a request and inspected facts, and its errors."""

import dataclasses
import random
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from searching import BERT_LARGE, CONTEXT_BYTES, FACTS, H200, MODEL, facts, prepared, request

from autotune.core.candidate import OWN_OPTIM, Arm, Candidate
from autotune.core.ceiling import Headroom
from autotune.core.code_interface import CodeInterface, Framework
from autotune.core.errors import InvalidRequestError, NothingFitsError, UnknownModelError
from autotune.core.inspection import OwnSettings
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
        own = OwnSettings("adamw_torch_fused", 8, 8, gradient_checkpointing=True)
        return prepare(asked, facts(always_checkpoints=always, own=own))

    @pytest.mark.parametrize("choice", ["auto", "on"])
    def test_nothing_else_is_searched(self, choice: CheckpointingChoice) -> None:
        assert all(arm.gradient_checkpointing for arm in self.prepared(choice, True).space.arms)
        assert self.prepared("auto", False).space.arms[0].gradient_checkpointing is False

    def test_without_it_there_is_nothing_to_search(self) -> None:
        assert self.prepared("off", False).space.arms
        with pytest.raises(InvalidRequestError, match=r"the model of run\.py checkpoints by itself"):
            self.prepared("off", True)


@pytest.mark.parametrize(("asked", "works"), [(6, "4 or 8"), (3, "4"), (8, None)])
def test_a_step_has_all_completions_of_its_prompts(asked: int, works: str | None) -> None:
    given = request(effective_batch=asked, workload=OWN_SCRIPT)
    model = facts(own=OwnSettings("adamw_torch", 4), interface=CodeInterface(samples_a_prompt=4))
    if works is None:
        assert prepare(given, model).space.batches.effective_batch == asked
        return
    with pytest.raises(InvalidRequestError, match=r"run\.py generates 4 completions of each prompt") as caught:
        prepare(given, model)
    assert caught.value.hint == f"use --effective-batch {works}"


def test_the_multiples_of_batches_and_of_rows_follow_from_the_lengths() -> None:
    draw = random.Random(0)
    lengths = [min(512, max(8, int(draw.lognormvariate(4.9, 0.7)))) for _ in range(8192)]

    def multiples(lengths: list[int], samples: int) -> tuple[int, int]:
        interface = CodeInterface(lengths=SampleLengths.of(lengths, samples=samples))
        own = facts(own=OwnSettings("adamw_torch", 32), interface=interface)
        return prepare(request(workload=OWN_SCRIPT), own).space.multiples

    short, long = multiples(lengths, 8192), multiples(lengths, 1_000_000)
    assert short > long, "the fewer steps, the fewer shapes are worth their padding"
    assert short[0] < short[1]
    assert multiples([512] * 9, 8192) == (LENGTH_MULTIPLE, ROW_MULTIPLE), "nothing to choose"
    late = {"padding_free", "length_multiple"}
    assert with_lever(Arm(), "length_multiple", late, (32, 2048)) == Arm(length_multiple=32)
    assert with_lever(Arm(), "padding_free", late, (32, 2048)).length_multiple == 2048


@pytest.mark.parametrize("share", [0.1, 0.3])
def test_vllm_leaves_memory_for_training(share: float) -> None:
    """An H200 of 139.4 GiB, of which a trial may have 24 GiB."""
    given = request(effective_batch=8, workload=OWN_SCRIPT)
    model = facts(own=OwnSettings("adamw_torch", 4), interface=CodeInterface(engine_share=share))
    if share == 0.1:
        assert (told := note_on_engine(given, model.model)) is not None
        assert told.startswith("vLLM takes 13.9 GiB of cuda:0 in the process of each trial")
        # What is measured has it in it, so that nothing is taken off.
        assert prepare(given, model).ceiling == prepare(given, facts(own=OwnSettings("adamw_torch", 4))).ceiling
        return
    with pytest.raises(NothingFitsError, match=r"a memory limit of 24\.0 GiB leaves nothing .* beside vLLM") as caught:
        prepare(given, model)
    assert "run.py gives 41.8 GiB of the GPU (vllm_gpu_memory_utilization=0.3)" in caught.value.message
    assert caught.value.hint == "lower vllm_gpu_memory_utilization or raise --memory-limit"
    # All that is free, which is less than vLLM asks for.
    free = dataclasses.replace(given, memory_limit_bytes=None)
    with pytest.raises(NothingFitsError, match=r"what is free on cuda:0, .* leaves nothing") as caught:
        prepare(free, facts(own=OwnSettings("adamw_torch", 4), interface=CodeInterface(engine_share=1.0)))
    assert caught.value.hint == "lower vllm_gpu_memory_utilization"


class TestSamples:
    """Of the user's own code, whose data is known when it was run up to its training."""

    @staticmethod
    def own(samples: int | None, kind: Framework = "trainer", **options: Any) -> Prepared:
        source = TrainingSource("build", "train.py", "abc", "/", function="build")
        asked = request(effective_batch=None, workload=Workload.of_source(source), **options)
        settings = OwnSettings("adamw_torch", 8)
        return prepare(
            asked, facts(config={"model_type": "bert"}, own=settings, samples=samples, interface=CodeInterface(kind))
        )

    @pytest.mark.parametrize(("samples", "largest"), [(5, 4), (8, 8), (100, 64), (None, 65536)])
    def test_bound_a_free_batch(self, samples: int | None, largest: int) -> None:
        batches = self.own(samples, objective="max-batch").space.batches
        assert max(batches.at_level(batches.levels()[0])) == largest

    def test_too_few_for_the_multiple_are_refused(self) -> None:
        assert self.own(16, objective="max-batch", batch_multiple=16).space.batches.levels() == (16,)
        with pytest.raises(
            InvalidRequestError, match="15 samples, less than one step of --batch-multiple 16"
        ) as caught:
            self.own(15, objective="max-batch", batch_multiple=16)
        assert "--batch-multiple 15 or less" in caught.value.hint

    def test_too_few_for_a_step_are_refused(self) -> None:
        with pytest.raises(InvalidRequestError, match="5 samples, less than one step of --effective-batch 8"):
            self.own(5)
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


class TestRefused:
    def test_a_model_that_cannot_be_built(self) -> None:
        with pytest.raises(
            UnknownModelError, match=r"'bert-large-uncased' cannot be built: KeyError: hidden"
        ) as caught:
            prepare(request(), dataclasses.replace(FACTS, model=None, model_error="KeyError: hidden"))
        assert "config.json" in caught.value.hint

    def test_an_optimizer_that_transformers_lacks(self) -> None:
        known = dataclasses.replace(FACTS, optims=("adafactor", "adamw_torch", "adamw_torch_fused"))
        with pytest.raises(InvalidRequestError, match="--optim adamw_troch") as caught:
            prepare(request(optims=("adamw_torch", "adamw_troch")), known)
        assert "adamw_torch" in caught.value.hint
        assert prepare(request(optims=("adafactor",)), known).space.arms

    @pytest.mark.parametrize("asked", [("flash_attention_2",), ("sdpa", "flash_attention_2")])
    def test_an_attention_that_the_model_lacks(self, asked: tuple[str, ...]) -> None:
        with pytest.raises(InvalidRequestError, match="--attn flash_attention_2") as caught:
            prepared(attn_implementations=asked)
        assert "eager, sdpa" in caught.value.hint
        assert "BertForSequenceClassification" in caught.value.message

    def test_checkpointing_that_the_model_lacks(self) -> None:
        with pytest.raises(InvalidRequestError, match="gradient checkpointing"):
            prepare(request(gradient_checkpointing="on"), facts(gradient_checkpointing=False))


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

    def test_says_what_the_model_needs(self) -> None:
        with pytest.raises(NothingFitsError) as caught:
            prepared(memory_limit_bytes=4 * GIB)
        message = caught.value.message
        for word in ("memory limit of 4.0 GiB", "bert-large-uncased", "335.1M parameters", "5.0 GiB"):
            assert word in message
        assert "--dtype bfloat16" in caught.value.hint

    def test_also_where_the_limit_is_below_the_cuda_context(self) -> None:
        with pytest.raises(NothingFitsError, match=r"memory limit of 500\.0 MiB") as caught:
            prepared(memory_limit_bytes=500 * MIB)
        assert limit_in(caught.value.hint) > STATE_BYTES

    @pytest.mark.parametrize("limit_bytes", [None, 24 * GIB])
    def test_of_the_device_names_a_device_rather_than_a_limit(self, limit_bytes: int | None) -> None:
        busy = dataclasses.replace(H200, memory_free_bytes=3 * GIB)
        given = dataclasses.replace(request(memory_limit_bytes=limit_bytes), device=busy)
        with pytest.raises(NothingFitsError, match=r"free on cuda:0, 3\.0 GiB") as caught:
            prepare(given, FACTS)
        assert "--memory-limit" not in caught.value.hint
        assert "a device with 5.76 GiB free" in caught.value.hint

    def test_on_a_cpu_says_nothing_of_cuda(self) -> None:
        with pytest.raises(NothingFitsError) as caught:
            prepare(request(memory_limit_bytes=GIB), dataclasses.replace(FACTS, context_bytes=0))
        assert "CUDA" not in str(caught.value)

    def test_does_not_offer_16_bit_weights_to_those_who_have_them(self) -> None:
        halved = request(memory_limit_bytes=2 * GIB, workload=dataclasses.replace(BERT_LARGE, dtype="bfloat16"))
        with pytest.raises(NothingFitsError) as caught:
            prepare(halved, FACTS)
        assert "--dtype" not in caught.value.hint


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
        own = OwnSettings(OWN_OPTIM, batch, accumulation)
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

    @pytest.mark.parametrize(
        ("searched", "options", "message"),
        [
            ([], {}, "uses nothing of its config"),
            (["batch"], {"precisions": ("bf16",)}, "--precision bf16 does not apply to run.py"),
            (["batch"], {"effective_batch": 63}, "accumulates 2 steps by itself"),
            (["accumulation"], {"effective_batch": 12}, "does not take another per-device batch than 8"),
            (["precision"], {}, "trains at 8 × 2 and takes no other batch"),
            (["batch"], {"optims": ("adafactor",)}, "--optim adafactor does not apply to run.py"),
            (
                ["batch"],
                {"effective_batch": 1024, "samples": 300, "kind": "placeholders"},
                "300 samples, which make no batch of 512",
            ),
        ],
    )
    def test_what_cannot_be_had_is_refused(self, searched: list[str], options: dict[str, Any], message: str) -> None:
        with pytest.raises(InvalidRequestError, match=re.escape(message)) as raised:
            self.prepared(searched, **options)
        assert raised.value.hint


@pytest.mark.parametrize("padding", ["longest", "rows"])
def test_there_are_few_shapes_however_long_a_run_is(padding: str) -> None:
    lengths = SampleLengths.of([8 + 61 * at % 1000 for at in range(2000)], samples=400_000)
    how = Batching(16, padding=padding)  # type: ignore[arg-type]
    multiple = _smallest_with_few_shapes(lengths, how, 8)
    counts = [
        len(shapes_of(lengths, Batching(16, padding=padding, multiple=n)).seen) for n in (multiple, multiple // 2)
    ]  # type: ignore[arg-type]
    assert counts[0] <= 16 < counts[1]
