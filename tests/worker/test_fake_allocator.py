"""Test the simulated allocator, and that a scaled trace equals the trace at that batch."""

import json
from importlib.metadata import version
from typing import Any

import pytest
import warm
from hypothesis import given
from hypothesis import strategies as st

from autotune.devices.gpus import CHIPS
from autotune.models.resolve import resolve_model
from autotune.tuning.allowed import _OFFLOADS_SINCE
from autotune.worker.fake.memory import CachingAllocator, OutOfCapError, column_sum_scratch_bytes, replay
from autotune.worker.fake.tracer import DEATH

MIB = 1024**2


@st.composite
def _events(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Births and deaths in an order that a program could have."""
    events: list[tuple[int, int]] = []
    alive: list[int] = []
    for number in range(draw(st.integers(1, 60))):
        if alive and draw(st.booleans()):
            events.append((alive.pop(draw(st.integers(0, len(alive) - 1))), DEATH))
        events.append((number, draw(st.integers(1, 64 * MIB))))
        alive.append(number)
    return events


@given(_events())
def test_what_is_reserved_holds_what_is_allocated(events: list[tuple[int, int]]) -> None:
    allocator = replay(events)
    assert allocator.peak_reserved_bytes >= allocator.peak_allocated_bytes
    assert allocator.reserved_bytes >= allocator.allocated_bytes
    alive = {number for number, size in events if size != DEATH} - {number for number, size in events if size == DEATH}
    for number in alive:
        allocator.release(number)
    assert allocator.allocated_bytes == 0


@given(_events())
def test_a_cap_is_never_passed(events: list[tuple[int, int]]) -> None:
    cap = 128 * MIB
    try:
        allocator = replay(events, cap)
    except OutOfCapError:
        return
    assert allocator.peak_reserved_bytes <= cap


def test_small_requests_share_a_segment_and_large_ones_do_not() -> None:
    allocator = CachingAllocator()
    allocator.allocate(1, 1000)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (1024, 2 * MIB)
    allocator.allocate(2, 3 * MIB)
    assert allocator.reserved_bytes == 22 * MIB
    allocator.allocate(3, 33 * MIB)
    assert allocator.reserved_bytes == 56 * MIB


def test_a_freed_block_is_used_again_and_merges_with_its_neighbours() -> None:
    allocator = CachingAllocator()
    for number in range(4):
        allocator.allocate(number, 5 * MIB)
    assert allocator.reserved_bytes == 20 * MIB
    for number in (1, 2):
        allocator.release(number)
    allocator.allocate(9, 10 * MIB)
    assert allocator.reserved_bytes == 20 * MIB


def test_a_bias_gradient_borrows_what_was_seen_on_an_h200() -> None:
    # Taken from a recorded memory history: 32 MiB beside the sum of 4096 rows of 1024, 64 and 96 for more rows.
    sizes = [column_sum_scratch_bytes(rows, 1024, CHIPS["h200"]) / MIB for rows in (4096, 8192, 12288)]
    assert sizes == [32, 64, 96]
    assert column_sum_scratch_bytes(8, 1024, CHIPS["h200"]) == 0


_LAST = ("whisper-tiny-random", "speech-seq2seq", "bf16", True)
_SAMPLE = [
    ("bert-tiny", "sequence-classification", "bf16", False), ("t5-tiny", "seq2seq-lm", "fp16", False), _LAST
]  # fmt: skip
_OTHERS = [
    ("gpt2-tiny", "causal-lm", "tf32", True), ("vit-tiny", "image-classification", "fp32", True),
    ("llama-tiny", "causal-lm", "tf32", False), _LAST,
]  # fmt: skip
_BEGINS = """
import json
import sys
from autotune.core.candidate import Arm
from autotune.core.workload import Workload
from autotune.devices.gpus import CHIPS
from autotune.models.resolve import resolve_model
from autotune.training import loss
from autotune.worker.fake import step as module
from autotune.worker.fake.memory import replay
from autotune.worker.fake.step import FakeTraining, ScalableStep, anatomy
from autotune.worker.fake.tracer import StorageTracer

chip = CHIPS["h200"]
"""
_SCALED = """
repeat = StorageTracer.repeat_micro_step
were_repeated = []
peaks = []
for name, task, precision, checkpointing in json.loads(sys.argv[1]):
    workload = Workload(name, resolve_model(name).config, task, 1 if task.startswith("image") else 32)
    # T5 has no sdpa in transformers 5.3 to 5.6.
    arm = Arm(precision, checkpointing, "eager" if name == "t5-tiny" else "sdpa")
    training = FakeTraining(workload, arm, chip)
    step = training.step()
    StorageTracer.repeat_micro_step = lambda *words: were_repeated.append(repeat(*words)) or were_repeated[-1]
    repeated = training.trace(40)
    StorageTracer.repeat_micro_step = lambda *_: False
    traced_twice = training.trace(40)
    StorageTracer.repeat_micro_step = repeat
    sizes = [sorted(size for _, size in trace.events) for trace in (repeated, traced_twice)]
    held = [replay(trace.events) for trace in (repeated, traced_twice)]
    same = were_repeated[-1] and sizes[0] == sizes[1] and repeated.parts == traced_twice.parts
    same = same and held[0].peak_reserved_bytes == held[1].peak_reserved_bytes
    direct = ScalableStep(traced_twice, 40)
    for accumulation in (1, 2):
        scaled = step.at(40, chip, accumulation=accumulation)
        parts = anatomy(scaled, step.label)
        traced = replay(direct.at(40, chip, accumulation=accumulation)).peak_allocated_bytes
        peaks.append((replay(scaled).peak_allocated_bytes, traced, sum(parts.values()), parts, same))
    # The last model is a speech model, whose inputs are the largest.
    inputs = [anatomy(step.at(40, chip, accumulation=accumulation), step.label)["inputs"] for accumulation in (1, 2, 9)]
    held = [replay(step.at(40, chip, accumulation=accumulation)) for accumulation in (2, 9)]
    grown = [held[1].peak_allocated_bytes - held[0].peak_allocated_bytes]
    grown += [held[1].peak_reserved_bytes - held[0].peak_reserved_bytes]
print(json.dumps({"peaks": peaks, "inputs": inputs, "grown": grown, "bytes": step.micro_batch_bytes(40, chip)}))
"""


@pytest.fixture(
    scope="module", params=[_SAMPLE, pytest.param(_OTHERS, marks=pytest.mark.whole)], ids=["sample", "others"]
)
def scaled(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What traces show; the sample has an encoder, a model of both halves, 16-bit floats of both kinds, checkpoints."""
    return json.loads(warm.output_of("-c", _BEGINS + _SCALED, json.dumps(request.param)))


def test_the_inputs_of_all_micro_steps_are_there_at_once(scaled: dict[str, Any]) -> None:
    micro_batch_bytes = scaled["bytes"]
    # 80 mel bands of 100 frames in float32, and 32 labels of 8 bytes.
    assert micro_batch_bytes == 40 * (80 * 100 * 4 + 32 * 8)
    assert scaled["inputs"] == [micro_batch_bytes, 2 * micro_batch_bytes, 9 * micro_batch_bytes]
    grown_allocated, grown_reserved = scaled["grown"]
    # The rest of a segment is given along where it is too small to be a block.
    assert 7 * micro_batch_bytes <= grown_allocated < 7 * micro_batch_bytes + MIB
    assert grown_reserved >= grown_allocated


def test_one_batch_says_what_another_needs(scaled: dict[str, Any]) -> None:
    for told, direct, _, _, _ in scaled["peaks"]:
        assert told == pytest.approx(direct, rel=2e-3)


def test_a_micro_step_that_is_repeated_is_the_one_that_would_be_traced(scaled: dict[str, Any]) -> None:
    assert all(same for *_, same in scaled["peaks"])


def test_the_anatomy_adds_up_to_the_peak(scaled: dict[str, Any]) -> None:
    for told, _, whole, parts, _ in scaled["peaks"]:
        # Every block is rounded up to 512 bytes, and some hold a little more than was asked.
        assert whole <= told <= whole * 1.1 + MIB
        assert {"weights", "optimizer", "activations"} <= parts.keys()


_FUSED = """
workload = Workload("llama-tiny", resolve_model("llama-tiny").config, "causal-lm", 512)
words = workload.config["vocab_size"]
loss._PARTED_FROM = 1
loss._LOGITS_AT_ONCE = 512 * 8 * words
for precision in ("bf16", "tf32"):
    training = FakeTraining(workload, Arm(precision, True, fused_loss=True), chip)
    scaled = training.step()
    as_one_piece = module._noting_pieces
    for batch in (4, 32):
        told = replay(scaled.at(batch, chip, accumulation=2)).peak_allocated_bytes
        module._noting_pieces = module.contextlib.nullcontext
        ran = replay(ScalableStep(training.trace(batch), batch).at(batch, chip, accumulation=2))
        module._noting_pieces = as_one_piece
        print(told, ran.peak_allocated_bytes)

masked = Workload("bert-tiny", resolve_model("bert-tiny").config, "masked-lm", 512)
for sparse in (False, True):
    training = FakeTraining(masked, Arm("bf16", sparse_prediction=sparse), chip)
    told = replay(training.step().at(16, chip, accumulation=2)).peak_allocated_bytes
    ran = replay(ScalableStep(training.trace(16), 16).at(16, chip, accumulation=2)).peak_allocated_bytes
    print(told, ran)

# So many weights that they are most of what is there at the end of the forward pass.
config = {**workload.config, "intermediate_size": 2**16, "num_hidden_layers": 4}
for uncached in (False, True):
    training = FakeTraining(Workload("wide", config, "causal-lm", 8), Arm("bf16", True, uncached_casts=uncached), chip)
    peak = replay(training.step().at(1, chip, accumulation=2)).peak_allocated_bytes
    print(peak, 3 * config["num_hidden_layers"] * config["hidden_size"])
"""


def test_losses_of_fewer_logits_need_what_their_pieces_need() -> None:
    """Traced as one piece and scaled, or in the pieces that run: one of them at a batch of 4, four at one of 32."""
    *peaks, cached, uncached = [
        tuple(map(int, line.split())) for line in warm.output_of("-c", _BEGINS + _FUSED).splitlines()
    ]
    assert len(peaks) == 6
    whole, sparse = peaks[-2:]
    # Three sixteenths of the logits, which are most of what a small model has.
    assert sparse[0] < 0.5 * whole[0]
    for told, ran in peaks:
        assert told == pytest.approx(ran, rel=5e-3)
    # Copies of 2 bytes of most layers' weights, before the backward pass of a layer needs more than they do.
    assert 0.5 * 2 * 2**16 * cached[1] < cached[0] - uncached[0] < 2 * 2**16 * cached[1]


_OFFLOADED = """
workload = Workload("llama-tiny", resolve_model("llama-tiny").config, "causal-lm", 512)
for offloads in (False, True):
    training = FakeTraining(workload, Arm("bf16", True, offload_activations=offloads), chip)
    print(replay(training.trace(8).events).peak_allocated_bytes)
"""


@pytest.mark.skipif(
    tuple(map(int, version("transformers").split(".")[:2])) < _OFFLOADS_SINCE, reason="this transformers cannot offload"
)
def test_offloaded_inputs_of_layers_are_not_on_the_gpu_where_memory_is_highest() -> None:
    config = resolve_model("llama-tiny").config
    kept, offloaded = map(int, warm.output_of("-c", _BEGINS + _OFFLOADED).split())
    # Inputs of layers are float32 under autocast; memory is highest at the loss, when all of them are kept.
    assert kept - offloaded == config["num_hidden_layers"] * 8 * 512 * config["hidden_size"] * 4
