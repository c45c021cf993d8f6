"""Test the memory that is predicted of the user's own training, on the CPU: against the built-in training, and used."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from own_memory import CHIP, OWN_CODE, inspected, predicted
from recorded import ComputedRunner
from searching import CONTEXT_BYTES, FACTS, RecordingObserver, new_store, request
from server_client import ServerClient, of_command

from autotune.core.candidate import Arm, Candidate
from autotune.core.inspection import ModelFacts
from autotune.core.messages import Answer
from autotune.core.prediction import PredictionWork
from autotune.core.training_source import find_script, find_trainer
from autotune.core.units import MIB
from autotune.core.workload import Workload
from autotune.estimate.chance import Chances
from autotune.estimate.history import History
from autotune.tuning.forecast import forecast_of
from autotune.tuning.loop import Search
from autotune.tuning.prepare import prepare
from autotune.worker.user.code import UserCodeError
from autotune.worker.user.trainer_memory import BatchShapes, NotTraceableError, of_loader, why_not


@pytest.fixture(scope="module")
def trainer() -> Workload:
    """A stock Trainer that the user's function builds."""
    return Workload.of_source(find_trainer(f"{OWN_CODE / 'build_trainer.py'}:build_plain"))


@pytest.fixture(scope="module")
def model(trial_server: ServerClient, trainer: Workload) -> ModelFacts:
    """What its inspection says."""
    return inspected(trial_server, trainer, precisions=("bf16", "fp32"))


def test_a_trainers_memory_is_that_of_the_built_in_training(trial_server: ServerClient, model: ModelFacts) -> None:
    assert model.interface.memory_unknown is None
    traced = {(trace.arm.precision, trace.arm.gradient_checkpointing) for trace in model.memory}
    assert traced == {("bf16", False), ("bf16", True), ("fp32", False), ("fp32", True)}
    built_in = Workload("tiny", {**model.config, "model_type": "bert"}, "sequence-classification", 12)
    # Each precision and each choice of checkpointing once.
    for trace in (
        trace for trace in model.memory if (trace.arm.precision == "bf16") is trace.arm.gradient_checkpointing
    ):
        own = predicted(trial_server, built_in, trace.arm, trace.step)
        like = predicted(trial_server, built_in, trace.arm)
        assert own.peaks == like.peaks
        assert own.flops == like.flops > 0
        assert own.updated_bytes == like.updated_bytes > 0


ENGINE = """
from build_trainer import build_plain
def build(overrides):
    trainer = build_plain(overrides)
    trainer.args.use_vllm, trainer.args.vllm_mode, trainer.args.vllm_gpu_memory_utilization = True, "colocate", 0.3
    return trainer
"""


def test_an_engine_on_the_same_gpu_is_told_and_its_training_not_predicted(
    trial_server: ServerClient, tmp_path: Path
) -> None:
    """The arguments are named as TRL's GRPOConfig has them; vLLM itself has no part in this."""
    (tmp_path / "with_engine.py").write_text(f"import sys\nsys.path.insert(0, {str(OWN_CODE)!r})\n{ENGINE}")
    model = inspected(trial_server, Workload.of_source(find_trainer(f"{tmp_path / 'with_engine.py'}:build")))
    assert model.memory == ()
    assert model.interface.memory_unknown == "vLLM generates in its process"
    assert model.interface.engine_share == 0.3


OWN_LOSS = """
from typing import Any
from build_trainer import make
from transformers import Trainer, TrainingArguments
class OwnLoss(Trainer):
    def compute_loss(self, model: Any, inputs: Any, **_: Any) -> Any:
        outputs = model(**inputs)
        {computes}
        return outputs.loss
def build(overrides):
    return make(TrainingArguments(**{{"output_dir": "own_output", "use_liger_kernel": True, **overrides}}), OwnLoss)
"""


@pytest.mark.parametrize(
    ("computes", "unknown"),
    [
        # As no trial has them that is predicted, whatever the user's own settings are.
        ('assert not self.args.use_liger_kernel, "these kernels are used"', None),
        (
            "self.seen = outputs.logits[inputs['labels'] > 0]",
            "what its step computes depends on values of tensors (aten.nonzero.default)",
        ),
        (
            "outputs.loss = sum(row.square().mean() for row in outputs.logits)",
            "its step goes over the samples of a batch one by one",
        ),
    ],
    ids=["without Liger's kernels", "values", "samples"],
)
def test_the_loss_that_trials_compute_is_traced_or_it_is_said_why_not(
    trial_server: ServerClient, tmp_path: Path, computes: str, unknown: str | None
) -> None:
    own = f"import sys\nsys.path.insert(0, {str(OWN_CODE)!r})\n{OWN_LOSS.format(computes=computes)}"
    (tmp_path / "own_loss.py").write_text(own)
    workload = Workload.of_source(find_trainer(f"{tmp_path / 'own_loss.py'}:build"))
    model = inspected(trial_server, workload, precisions=("fp32",), gradient_checkpointing="off")
    assert model.interface.memory_unknown == unknown
    assert len(model.memory) == (unknown is None)


class Predictions:
    """Submits predictions to a real trial server, and waits for each."""

    def __init__(self, server: ServerClient, workload: Workload) -> None:
        self._server = server
        self._workload = workload
        self._answers: dict[str, Answer] = {}

    def submit(self, job_id: str, work: PredictionWork, timeout_seconds: float) -> None:
        self._answers[job_id] = Answer(self._server.run(self._workload, work).result)

    def ended(self, wait_seconds: float = 0.0) -> dict[str, Answer]:
        answers, self._answers = self._answers, {}
        return answers


def test_a_search_tries_no_size_that_is_predicted_not_to_fit(
    trial_server: ServerClient, trainer: Workload, model: ModelFacts, tmp_path: Path
) -> None:
    # cuBLAS takes 65 MiB; the activations of 1024 samples 23 MiB without checkpointing, for which 106 MiB are reserved.
    limit_bytes = CONTEXT_BYTES + 112 * MIB
    options: Any = {"effective_batch": 4096, "precisions": ("fp32",), "gradient_checkpointing": "off"}
    asked = request(workload=trainer, memory_limit_bytes=limit_bytes, **options)
    ready = prepare(asked, dataclasses.replace(FACTS, chip=CHIP, model=dataclasses.replace(model, samples=10_000)))
    forecast = forecast_of(ready, Predictions(trial_server, trainer))
    forecast.complete()
    assert not forecast.unanswered

    def peak_bytes(candidate: Candidate) -> float:
        found = forecast.model.prediction(candidate)
        return found.peak_allocated_bytes

    observer = RecordingObserver()
    runner = ComputedRunner(peak_bytes, lambda candidate: 1 / candidate.per_device_train_batch_size)
    with new_store(tmp_path) as store:
        Search(ready, runner, store, observer, tmp_path, forecast=forecast, clock=runner.clock).run()
    assert {trial.state for trial in observer.ended} == {"completed"}
    tried = {trial.candidate for trial in observer.ended}
    assert max(candidate.per_device_train_batch_size for candidate in tried) == 1024
    plain = Arm("fp32", optim=model.own.arm.optim)
    too_large = [Candidate(plain, 2048, 2), Candidate(plain, 4096, 1)]
    assert all(map(Chances(History(ready.ceiling, memory=forecast.model)).rules_out, too_large))
    assert not tried.intersection(too_large)


def test_what_saves_memory_is_predicted_where_its_steps_were_traced_alone(
    trial_server: ServerClient, trainer: Workload, model: ModelFacts
) -> None:
    ready = prepare(
        request(workload=trainer, effective_batch=64, precisions=("bf16",), search_effort="default"),
        dataclasses.replace(FACTS, chip=CHIP, model=dataclasses.replace(model, samples=10_000)),
    )
    assert ready.space.saving_arms
    forecast = forecast_of(ready, Predictions(trial_server, trainer))
    forecast.call_on_reserve()
    assert not forecast.unanswered


TRAINS = """
import os, time
import torch
from transformers import Trainer, TrainingArguments
is_traced = os.environ["CUDA_VISIBLE_DEVICES"] == ""
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1024, 1024)
    def forward(self, inputs):
        assert not is_traced or type(self.layer.weight.data).__name__ == "FakeTensor", "this is computed"
        return {"loss": self.layer(inputs).square().mean()}
def train():
    weights = torch.nn.init.normal_(torch.nn.Parameter(torch.full((1024, 1024), 7.0)))
    assert is_traced == bool((weights == 7).all()), "large weights of a traced model are left as they are"
    data = [{"inputs": torch.ones(1024)} for _ in range(96)]
    Trainer(Model(), TrainingArguments("out", report_to="none"), train_dataset=data).train()
"""
WAITS = (
    TRAINS
    + """
# Neither sees what the other writes to the user's files.
made = f"/dev/shm/autotune-test-{os.getppid()}"
if is_traced:
    open(made, "w").close()
else:
    until = time.monotonic() + 100
    while not os.path.exists(made):
        assert time.monotonic() < until, "nothing runs beside"
        time.sleep(0.01)
    os.unlink(made)
train()
"""
)
COLLIDES = (
    TRAINS
    + """
until = time.monotonic() + 0.5
while not is_traced and not os.path.isdir("made") and time.monotonic() < until: time.sleep(0.01)
os.mkdir("made")
train()
"""
)
HALF_WRITTEN = (
    TRAINS
    + """
import json
until = time.monotonic() + 0.5
while not is_traced and not os.path.exists("cache") and time.monotonic() < until: time.sleep(0.01)
if not os.path.exists("cache"):
    with open("cache", "w") as file:
        time.sleep(is_traced)
        file.write("{}")
with open("cache") as file: json.load(file)
train()
"""
)


def of_script(server: ServerClient, folder: Path, text: str) -> ModelFacts:
    (folder / "train.py").write_text(text)
    workload = of_command(str(folder / "train.py"))
    return inspected(server, workload, precisions=("fp32",), gradient_checkpointing="off")


@pytest.mark.parametrize(
    "text", [WAITS, COLLIDES, HALF_WRITTEN], ids=["at once", "one after the other", "after a file was half written"]
)
def test_a_script_is_traced_while_it_is_looked_at_and_computes_nothing(
    trial_server: ServerClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    model = of_script(trial_server, tmp_path, text)
    assert model.own.per_device_train_batch_size == 8
    if text is WAITS:
        assert model.interface.memory_unknown is None
        assert [(trace.arm.precision, trace.arm.optim) for trace in model.memory] == [("fp32", model.own.arm.optim)]


def test_a_loop_is_not_traced(trial_server: ServerClient, tmp_path: Path) -> None:
    script = find_script([str(OWN_CODE / "accelerate_loop.py"), "--output_dir", str(tmp_path / "out")])
    model = inspected(trial_server, Workload.of_source(script))
    assert model.interface.kind == "accelerate"
    assert (model.memory, model.interface.memory_unknown) == ((), None)


def test_what_cannot_be_traced_is_said(trial_server: ServerClient) -> None:
    workload = Workload.of_source(find_trainer(f"{OWN_CODE / 'build_trainer.py'}:build_with_numpy"))
    model = inspected(trial_server, workload, precisions=("fp32",), gradient_checkpointing="off")
    assert model.memory == ()
    assert "numpy" in model.interface.memory_unknown


class TestBatchShapes:
    def test_they_are_those_of_the_largest_sample(self) -> None:
        texts = [{"input_ids": torch.ones(length, dtype=torch.long)} for length in (3, 9, 5)]

        def collate(samples: list[Any]) -> Any:
            ids = [sample["input_ids"] for sample in samples]
            padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
            return {"input_ids": padded, "attention_mask": (padded != 0).long(), "note": "text"}

        shapes = BatchShapes(collate, texts)
        assert shapes.is_padded
        assert shapes.at(7)["input_ids"].shape == (7, 9)
        assert shapes.at(7)["note"] == "text"

    def test_batches_without_padding_are_as_long_as_all_samples(self) -> None:
        shapes = BatchShapes(lambda samples: (torch.cat(samples)[None], len(samples)), [torch.ones(4)] * 3)
        tokens, count = shapes.at(10)
        assert tokens.shape == (1, 40)
        assert count == 10

    def test_streamed_data_is_looked_at(self) -> None:
        shapes = BatchShapes(torch.stack, iter([torch.ones(2), torch.zeros(2)]))
        assert shapes.at(5).shape == (5, 2)

    @pytest.mark.parametrize("loader", [object(), torch.utils.data.DataLoader([[1]], batch_size=None)])
    def test_other_loaders_are_refused(self, loader: Any) -> None:
        with pytest.raises(NotTraceableError):
            of_loader(loader)


def test_what_the_users_code_does_wrong_is_told_alike_of_trainers_and_loops(capsys: pytest.CaptureFixture[str]) -> None:
    assert why_not(UserCodeError("it ends too soon", "train longer")) == "it ends too soon"
    assert why_not(NotTraceableError("it has no loader")) == "it has no loader"
    assert capsys.readouterr().err == ""
    assert why_not(ValueError("of theirs")) == "ValueError: of theirs"
