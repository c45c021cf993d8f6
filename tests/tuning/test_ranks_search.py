"""Searches whose trials train on two ranks together: real processes on the CPU, from the request to the export."""

import dataclasses
import json
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from searching import BERT_LARGE, FACTS, H200, RecordingObserver, facts
from tiny import tiny_workload

from autotune.cli.session import print_result
from autotune.core.candidate import OF_RANKS, Arm, Candidate, Document
from autotune.core.device import Device
from autotune.core.errors import DeviceError, InvalidRequestError
from autotune.core.inspection import AfterStep
from autotune.core.options import BY_NAME
from autotune.core.outcome import Completed
from autotune.core.training_source import find_script, find_trainer
from autotune.core.units import GIB
from autotune.core.workload import Workload
from autotune.devices import listing
from autotune.devices.listing import devices_of_ranks, find_gpus
from autotune.results.export import make_export, render, render_launch
from autotune.results.report import Report
from autotune.results.warnings import notes
from autotune.store.opening import open_store
from autotune.store.records import StudyRecord
from autotune.tuning import options as tuning_options
from autotune.tuning.allowed import check_request
from autotune.tuning.options import build_request
from autotune.tuning.prepare import prepare
from autotune.tuning.request import SearchRequest, request_from_document
from autotune.tuning.run import run_search
from autotune.tuning.studies import recorded_request
from autotune.verify.target import placement_of, target_of
from autotune.verify.throughput import verify

SECOND = dataclasses.replace(H200, uuid="GPU-1", index=1, memory_free_bytes=90 * GIB)


def of_two(**options: object) -> SearchRequest:
    """A request for two GPUs."""
    changed: Document = {"effective_batch": 64, "world_size": 2, "study": "two", **options}
    return SearchRequest(BERT_LARGE, H200, others=(SECOND,), **changed)


class Searched(NamedTuple):
    """A search on two ranks of the CPU."""

    storage: str
    study: StudyRecord
    report: Report


@pytest.fixture(scope="module")
def searched(cpu: Device, tmp_path_factory: pytest.TempPathFactory) -> Searched:
    storage = str(tmp_path_factory.mktemp("ranks") / "studies.db")
    request = SearchRequest(
        tiny_workload("bert-tiny"), cpu, others=(cpu,), effective_batch=16, world_size=2, trials=2, study="two",
        precisions=("fp32",), gradient_checkpointing="off",
    )  # fmt: skip
    return Searched(storage, *run_search(request, storage, RecordingObserver()))


def test_a_search_on_two_ranks_from_request_to_export(searched: Searched) -> None:
    report = searched.report
    assert searched.study.state == "finished"
    best = report.best
    candidate, measured = best.candidate, best.outcome.measurement
    # Per-device batch × accumulation × ranks is the effective batch.
    assert candidate.samples_per_step == 16
    assert candidate.per_device_train_batch_size * candidate.gradient_accumulation_steps == 8
    assert measured.samples_per_second == pytest.approx(16 / measured.step_seconds)
    assert report.environment["ranks"] == {"world_size": 2, "backend": "gloo", "links": []}
    assert report.baseline.candidate.arm == Arm(strategy="ddp", ranks=2)
    # Every parameter of the model gets a gradient, and its buffers never change.
    assert candidate.arm.ddp_find_unused_parameters is False
    assert candidate.arm.ddp_broadcast_buffers is False

    export = make_export(report)
    assert export.arguments["ddp_find_unused_parameters"] is export.arguments["ddp_broadcast_buffers"] is False
    words = shlex.split(render_launch(export, "torchrun"))
    assert words[:6] == ["OMP_NUM_THREADS=1", "torchrun", "--standalone", "--nproc_per_node", "2", "train.py"]
    assert words[6:] == shlex.split(render(export, "cli"))
    config = yaml.safe_load(render_launch(export, "accelerate"))
    assert (config["distributed_type"], config["num_processes"]) == ("MULTI_CPU", 2)

    with open_store(searched.storage) as store:
        again = recorded_request(store, "two")
        assert again.placement.ranks == 2
        with pytest.raises(DeviceError, match="was searched on 2 devices, and --device cpu is one"):
            recorded_request(store, "two", "cpu")
        cpu = again.device
        with pytest.raises(DeviceError, match="has trials of 2 devices, and --gpus names 3"):
            recorded_request(store, "two", devices=(cpu, cpu, cpu))
        with pytest.raises(DeviceError, match="which are not run side by side"):
            recorded_request(store, "two", devices=(cpu, cpu), parallel=True)


def test_the_command_that_starts_all_ranks_comes_next(searched: Searched, capsys: pytest.CaptureFixture[str]) -> None:
    print_result(searched.report, as_json=False, storage=None)
    assert "\n\nNext:\n  autotune export two --format torchrun\n" in capsys.readouterr().out


@pytest.mark.whole
def test_a_stock_torchrun_trains_as_the_winner_did(searched: Searched, tmp_path: Path) -> None:
    """``tests/verify/test_torchrun.py`` has torchrun start ranks that import nothing."""
    target = target_of(searched.report, placement_of(searched.report))
    verification = verify(target, 20, tmp_path / "verify.log")
    assert verification.obtained.state == "completed"
    # 16 samples of both ranks in each timed step.
    assert verification.samples_timed == 16 * verification.steps_timed > 0


def test_the_ceiling_is_that_of_the_gpu_with_the_least_memory_free() -> None:
    assert prepare(of_two(), FACTS).ceiling.free_bytes == 90 * GIB


def test_a_torch_without_nccl_is_told_before_a_trial() -> None:
    with pytest.raises(DeviceError, match="this torch has no NCCL, through which 2 GPUs exchange gradients"):
        prepare(of_two(), dataclasses.replace(FACTS, lacks_nccl=True))


def test_unused_parameters_are_left_to_ddp_where_there_are_some() -> None:
    for unused, expected in (([], False), (["bert.pooler.weight"], None), (None, None)):
        after_step = AfterStep(None if unused is None else tuple(unused), ())
        given = facts(trainable_parameters=110_000_000, after_step=after_step)
        prepared = prepare(of_two(), given)
        assert {arm.ddp_find_unused_parameters for arm in prepared.space.arms} == {expected}
        assert {(arm.strategy, arm.ranks) for arm in prepared.space.arms} == {("ddp", 2)}


def test_a_request_of_two_ranks_is_recorded_and_read_back() -> None:
    request = of_two()
    document = json.loads(json.dumps(request.document()))
    assert request_from_document(document, BERT_LARGE, H200, "two", (SECOND,)) == request
    with pytest.raises(ValueError, match="it has 2 ranks, and 1 devices were found"):
        request_from_document(document, BERT_LARGE, H200, "two")
    alone = dataclasses.replace(request, others=(), world_size=1)
    assert "ranks" not in alone.document()


def test_trials_of_one_rank_are_recorded_as_before_there_were_several() -> None:
    names = set(OF_RANKS)
    assert not names & Candidate(Arm(), 8).recorded_parameters().keys()
    joint = Candidate(Arm(strategy="ddp", ranks=2), 8)
    assert names <= joint.recorded_parameters().keys()
    assert Candidate.from_parameters(joint.recorded_parameters()) == joint


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch, cpu: Device) -> None:
    """A machine with two equal GPUs and one of another kind."""
    other = dataclasses.replace(H200, uuid="GPU-2", index=2, name="NVIDIA L4")
    monkeypatch.setattr(listing, "list_devices", lambda: (H200, SECOND, other, cpu))


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("text", "found"),
    [("1", [0]), ("2", [0, 1]), ("1,0", [1, 0]), ("cuda:1", [1]), ("cuda:1,GPU-2", [1, 2]), ("all", [0, 1, 2])],
)
def test_gpus_by_number_name_or_all(text: str, found: list[int]) -> None:
    assert [device.index for device in find_gpus(text)] == found


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus": "4"}, "--gpus 4: there are 3 GPUs here"),
        ({"gpus": "0"}, "--gpus 0 leaves nothing"),
        ({"gpus": "cpu"}, "'cpu' names no GPUs"),
        ({"gpus": "two"}, "'two' names no GPUs"),
        ({"gpus": "-1"}, "'-1' names no GPUs"),
        ({"gpus": "00"}, "--gpus 0 leaves nothing"),
        ({"gpus": "9" * 5000}, "names no GPUs"),
        ({"device": "cuda:" + "9" * 5000}, "is not a device"),
        ({"parallel": True, "device": "cuda:0"}, "--parallel runs trials on several GPUs, and none are named"),
        ({"device": "cuda:0,cuda:1"}, "'cuda:0,cuda:1' is not a device"),
        ({"gpus": "0,cuda:0"}, "--gpus 0,cuda:0 names cuda:0 more than once"),
        ({"gpus": "2", "parallel": True, "strategy": ("fsdp",)}, "--parallel has each trial train on one"),
        ({"gpus": "all"}, "NVIDIA H200 and NVIDIA L4 are not equal"),
        ({"gpus": "2", "device": "cuda:0"}, "--device cuda:0 is one device, and --gpus 2 names others"),
        ({"gpus": "2", "world_size": 4}, "--world-size 4 is not the 2 GPUs"),
        ({"gpus": "2", "effective_batch": 33}, "--effective-batch 33 cannot be shared equally by 2 devices"),
        ({"strategy": ("fsdp",)}, "--strategy fsdp applies to several GPUs, and there is one"),
        ({"gpus": "2", "strategy": ("fsdp",), "optim": ("adafactor",)}, "--optim adafactor cannot update sharded"),
    ],
)
def test_gpus_that_cannot_be_are_one_clear_line(options: Document, message: str) -> None:
    given = {name: option.default for name, option in BY_NAME.items() if "search" in option.commands}
    with pytest.raises((DeviceError, InvalidRequestError)) as caught:
        check_request(build_request({**given, "model": "bert-tiny", "effective_batch": 64, **options}))
    assert message in caught.value.message
    assert caught.value.hint


def test_gpus_in_python_are_a_number_or_a_list() -> None:
    check = BY_NAME["gpus"].kind.check
    assert [check("gpus", value) for value in (2, "all", [0, 1], ["cuda:1", "GPU-7"], [1])] == [
        "2", "all", "cuda:0,cuda:1", "cuda:1,GPU-7", "cuda:1"
    ]  # fmt: skip
    with pytest.raises(InvalidRequestError):
        check("gpus", True)


@pytest.mark.usefixtures("two_gpus")
def test_ranks_of_a_recorded_study_are_found_by_uuid_else_by_name() -> None:
    ranks = {"world_size": 2, "strategy": "ddp"}
    environment = {"ranks": ranks, "device_name": H200.name, "device_kind": "cuda", "device_uuids": ["GPU-1", "gone"]}
    assert devices_of_ranks(environment, "s") == (H200, SECOND)
    same = {**environment, "device_uuids": ["GPU-1", H200.uuid]}
    assert devices_of_ranks(same, "s") == (SECOND, H200)
    # A search of a service has devices of its own, and others are other searches'.
    third, fourth = (dataclasses.replace(H200, uuid=f"GPU-{number}", index=number) for number in (2, 3))
    assert devices_of_ranks(same, "s", (third, fourth)) == (third, fourth)
    with pytest.raises(DeviceError, match="was searched on 3 of NVIDIA H200, and 2 are here"):
        devices_of_ranks({**environment, "ranks": {**ranks, "world_size": 3}}, "s")


def test_a_machine_without_gpus_says_so(monkeypatch: pytest.MonkeyPatch, cpu: Device) -> None:
    monkeypatch.setattr(listing, "list_devices", lambda: (cpu,))
    with pytest.raises(DeviceError, match="--gpus 2: there are no GPUs here") as caught:
        find_gpus("2")
    assert caught.value.hint.startswith("leave --gpus out to use the CPU")
    assert tuning_options.find_gpus is find_gpus


SCRIPT = """
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, HfArgumentParser, Trainer, TrainingArguments
config = AutoConfig.for_model("bert", hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
samples = [{"input_ids": torch.arange(12), "labels": torch.tensor(n % 2)} for n in range(512)]
def build(overrides):
    arguments = TrainingArguments(output_dir="out", **overrides)
    return Trainer(AutoModelForSequenceClassification.from_config(config), arguments, train_dataset=samples)
if __name__ == "__main__":
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    Trainer(AutoModelForSequenceClassification.from_config(config), arguments, train_dataset=samples).train()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a script, which also has a function that builds a Trainer."""
    monkeypatch.chdir(tmp_path)
    # As warm processes have it: code of one's own may use the hub, else.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


@pytest.mark.whole
@pytest.mark.parametrize("kind", ["script", "function"])
def test_own_code_is_searched_on_two_ranks(cpu: Device, folder: Path, kind: str) -> None:
    if kind == "script":
        words = ["torchrun", "--standalone", "--nproc_per_node", "2", "train.py", "--output_dir", "out"]
        source = find_script([*words, "--per_device_train_batch_size", "4", "--use_cpu"], 2)
    else:
        source = find_trainer(f"{folder / 'train.py'}:build")
    request = SearchRequest(
        Workload.of_source(source), cpu, others=(cpu,), world_size=2, effective_batch=32, trials=2, study="own",
        precisions=("fp32",), gradient_checkpointing="off", optims=(),
    )  # fmt: skip
    study, report = run_search(request, str(folder / "studies.db"), RecordingObserver())
    assert study.state == "finished"
    best, baseline = report.best, report.baseline
    assert best is not None
    assert baseline is not None
    for trial in (best, baseline):
        assert isinstance(trial.outcome, Completed), trial.outcome
        assert trial.outcome.measurement.ranks == 2
        assert (trial.candidate.arm.strategy, trial.candidate.arm.ranks) == ("ddp", 2)
    assert best.candidate.samples_per_step == 32
    # As it trains without us: its own batch on each rank.
    assert baseline.candidate.per_device_train_batch_size == (4 if kind == "script" else 8)
    batch = 2 * baseline.candidate.per_device_train_batch_size
    assert f"your own settings train at effective batch {batch}, not 32" in notes(report)
    export = make_export(report)
    words = shlex.split(render_launch(export, "torchrun"))
    started = words[words.index("--nproc_per_node") + 2 :]
    own = ["train.py", "--output_dir", "out", "--per_device_train_batch_size", "4", "--use_cpu"]
    # A function has no command line to take flags from.
    assert started == ([*own, *shlex.split(render(export, "cli"))] if kind == "script" else ["train.py"])
    arguments = json.loads(render(export, "json"))
    assert arguments["per_device_train_batch_size"] * arguments["gradient_accumulation_steps"] == 16
