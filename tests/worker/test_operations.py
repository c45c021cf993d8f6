"""What the operations of a fake step compute and move, counted beside its allocations."""

import json
from typing import Any

import pytest
import warm

_TRACED = """
import json
import torch
from autotune.core.candidate import Arm
from autotune.core.workload import Workload
from autotune.core.schema import encode
from autotune.devices.gpus import CHIPS
from autotune.models.resolve import resolve_model
from autotune.worker.fake.tracer import Shortcuts
from autotune.worker.fake.step import FakeTraining
from autotune.worker.private.torch import fake_tensor_mode


def sort_offers(events):
    # Autocast frees its casts in any order.
    groups = [[]]
    for event in events:
        if event[1] == -1:
            groups[-1].append(event)
        else:
            groups += [[event], []]
    return [sorted(group) for group in groups]


found = {}
for name, task in (("bert-tiny", "sequence-classification"), ("gpt2-tiny", "causal-lm")):
    workload = Workload(name, resolve_model(name).config, task, 32)
    for arm in (Arm("bf16"), Arm("tf32", True)):
        training = FakeTraining(workload, arm, CHIPS["h200"])
        documents = []
        traces = []
        for batch in (61, 67):
            traces.append(training.trace(batch))
            documents.append(encode(training.operations))
        # Each operation by itself, without the results of earlier ones.
        known, Shortcuts.key = Shortcuts.key, lambda *_: None
        silent, Shortcuts._changes_only_values = Shortcuts._changes_only_values, lambda *_: False
        alone = training.trace(61)
        documents.append(encode(training.operations))
        Shortcuts.key, Shortcuts._changes_only_values = known, silent
        events = [sort_offers(trace.events) for trace in (traces[0], alone)]
        same = events[0] == events[1] and traces[0].labels == alone.labels and traces[0].parts == alone.parts
        found[f"{name} {arm.describe()}"] = {"config": workload.config, "documents": documents, "same": same}

shortcuts = Shortcuts()
found["repeated"] = repeated = {"documents": []}
aten = torch.ops.aten


def twice(func, *args, **kwargs):
    results = []
    for _ in range(2):
        key = shortcuts.key(func, args, kwargs)
        results.append(shortcuts.result(key, func, args, kwargs))
    return results


with fake_tensor_mode():
    one, flags = torch.empty(4, 6), torch.empty(4, 6, dtype=torch.bool)
    repeated["dtypes"] = [
        str(result.dtype)
        for value in (1, 1.0, True)
        for result in twice(aten.add.Scalar, flags, value)
    ]
    into = torch.empty(4, 6)
    repeated["given"] = [result is into for result in twice(aten.add.out, one, one, out=into)]
    repeated["in place"] = [result is one for result in twice(aten.add_.Tensor, one, one)]
    turned = twice(aten.t.default, one)
    repeated["views"] = [list(result.stride()) + [result.untyped_storage()._cdata == one.untyped_storage()._cdata]
                      for result in turned]
    repeated["parts"] = [[list(part.shape) + [part.storage_offset()] for part in result]
                      for result in twice(aten.split.Tensor, one, 4, 1)]
    number = torch.tensor(3)
    repeated["values"] = [int(result) for result in twice(aten.add.Tensor, number, number)]
    fresh = twice(aten.mul.Tensor, one, one)
    repeated["fresh"] = fresh[0].untyped_storage()._cdata != fresh[1].untyped_storage()._cdata

from autotune.worker.fake.operations import OperationTally

tally = OperationTally(61)
tally.counts_as = "micro_step"
tokens, experts = torch.empty((61 * 4, 16), dtype=torch.bfloat16), torch.empty((2, 16, 24), dtype=torch.bfloat16)
tally.add(torch.ops.aten._grouped_mm.default, (tokens, experts), torch.empty((61 * 4, 24), dtype=torch.bfloat16))
found["experts"] = {"documents": [encode(tally.operations([]))]}

# A model with an operation of its own library.
from autotune.worker.fake.step import trace_training


@torch.library.custom_op("notes::scan", mutates_args=())
def scan(x: torch.Tensor) -> torch.Tensor:
    return x.cumsum(1)


@scan.register_fake
def _(x):
    return torch.empty_like(x)


scan.register_autograd(lambda ctx, gradient: scan(gradient), setup_context=lambda ctx, inputs, output: None)


class Scanning:
    max_grad_norm = 1.0
    with torch.device("meta"):
        model = torch.nn.Linear(16, 24)

    def begin(self, batch_size):
        return torch.optim.SGD(self.model.parameters(), lr=0.1)

    def batch(self, size):
        return torch.empty((size, 8, 16))

    def loss(self, batch):
        return torch.fft.rfft(scan(self.model(batch))).abs().sum()


_, operations = trace_training(Scanning(), 61, CHIPS["h200"], padded=False)
found["scanning"] = {"documents": [encode(operations)]}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def traced() -> dict[str, Any]:
    return json.loads(warm.output_of("-c", _TRACED))


def sort_offers(document: dict[str, Any]) -> list[str]:
    """The operations of a step, in an order of their own."""
    return sorted(json.dumps(row) for row in document["rows"])


def flops(document: dict[str, Any], kind: str, part: str) -> list[int]:
    """Of a sample, and whatever the batch."""
    rows = [row for row in document["rows"] if row["kind"] == kind and row["part"] == part]
    return [sum(row["count"] * row["flops"][i] for row in rows) for i in (0, 1)]


def test_a_trace_is_the_same_without_the_results_of_earlier_operations(traced: dict[str, Any]) -> None:
    found = [traced[name] for name in traced if "tiny" in name]
    assert len(found) == 4
    for model in found:
        assert model["same"]
        assert sort_offers(model["documents"][0]) == sort_offers(model["documents"][2])


def test_an_operation_repeats_the_result_of_equal_arguments_alone(traced: dict[str, Any]) -> None:
    repeated = traced["repeated"]
    assert repeated["dtypes"] == [f"torch.{name}" for name in ("int64", "float32", "bool") for _ in range(2)]
    assert repeated["given"] == [True, True]
    assert repeated["in place"] == [True, True]
    assert repeated["views"] == [[1, 6, True], [1, 6, True]]
    assert repeated["parts"] == [[[4, 4, 0], [4, 2, 4]]] * 2
    assert repeated["values"] == [6, 6]
    assert repeated["fresh"]


def test_operations_are_the_same_whatever_the_batch_of_the_trace(traced: dict[str, Any]) -> None:
    for name, found in traced.items():
        if "tiny" not in name:
            continue
        first, second, _ = found["documents"]
        assert sort_offers(first) == sort_offers(second)
        assert {name: first[name] for name in first if name != "rows"} == {
            name: second[name] for name in second if name != "rows"
        }


def test_matrix_products_have_the_operations_of_the_layers(traced: dict[str, Any]) -> None:
    found = traced["bert-tiny bf16"]
    config, document = found["config"], found["documents"][0]
    width, inner, tokens = config["hidden_size"], config["intermediate_size"], 32
    # Query, key, value, output, and the two of the feed-forward part; the pooler and two labels see one token.
    a_layer = 2 * tokens * (4 * width * width + 2 * width * inner)
    forward = config["num_hidden_layers"] * a_layer + 2 * width * (width + 2)
    assert flops(document, "matrix_product", "forward") == [forward, 0]
    assert flops(document, "matrix_product", "backward") == [2 * forward, 0]
    assert flops(document, "matrix_product", "recomputation") == [0, 0]
    # Two products of 32 × 32 scores in each layer, forward.
    attention = config["num_hidden_layers"] * 2 * 2 * tokens * tokens * width
    assert flops(document, "attention", "forward") == [attention, 0]


def test_what_checkpoints_repeat_is_told_apart(traced: dict[str, Any]) -> None:
    document = traced["bert-tiny tf32, checkpointing"]["documents"][0]
    plain = traced["bert-tiny bf16"]["documents"][0]
    assert document["dispatched"]["recomputation"] > 0
    assert plain["dispatched"]["recomputation"] == 0
    # All layers again, without pooler and classifier.
    repeated, _ = flops(document, "matrix_product", "recomputation")
    forward, _ = flops(document, "matrix_product", "forward")
    assert 0.9 < repeated / forward < 1


def test_the_optimizer_reads_and_writes_each_state_once(traced: dict[str, Any]) -> None:
    document = traced["gpt2-tiny bf16"]["documents"][0]
    moved = [row["bytes"][1] for row in document["rows"] if row["kind"] == "fused_update"]
    # AdamW: parameter, gradient and two moments are read, all but the gradient written; and the counts of steps.
    assert 7 * document["gradient_bytes"] <= max(moved) < 7.1 * document["gradient_bytes"]


def test_the_products_of_experts_have_the_operations_of_their_tokens(traced: dict[str, Any]) -> None:
    (row,) = traced["experts"]["documents"][0]["rows"]
    assert row["kind"] == "matrix_product"
    assert row["flops"] == [2 * 4 * 16 * 24, 0]


def test_operations_of_no_known_kind_are_named_and_their_traffic_is_counted(traced: dict[str, Any]) -> None:
    document = traced["scanning"]["documents"][0]
    assert document["unknown"]["notes::scan"] == 2
    assert {"aten::_fft_r2c", "aten::_fft_c2r"} & set(document["unknown"])
    forward = [row for row in document["rows"] if row["kind"] == "unknown" and row["part"] == "forward"]
    # The scan reads and writes 8 × 24 numbers of 4 bytes for each sample.
    assert [2 * 8 * 24 * 4, 0] in [list(row["bytes"]) for row in forward]


def test_every_operation_of_known_models_has_a_kind(traced: dict[str, Any]) -> None:
    for name, found in traced.items():
        if name != "scanning":
            assert all(not document.get("unknown") for document in found["documents"]), name
