"""Searches whose trials train on two ranks together: real processes on the CPU, from the request to the export.

That with DeepSpeed's ZeRO is run with ``make test-deepspeed``. DeepSpeed compiles a library for ranks on a CPU when
they first run, for two minutes. Of ranks that share samples: what is searched, what is refused, how it is exported.
"""

import dataclasses
import importlib.util
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from histories import measured_at
from messages import check_refusals
from recorded import ComputedRunner
from reported import report_of
from searching import BERT_LARGE, FACTS, H200, MODEL, RecordingObserver, facts, new_store, search
from tiny import tiny_workload

from autotune.cli.search import print_result
from autotune.core.candidate import OF_RANKS, Arm, Candidate, Document
from autotune.core.dataset_spec import DataSpec
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
from autotune.estimate.history import History
from autotune.results.export import beside_lines, make_export, render
from autotune.results.report import Report, load_report
from autotune.results.text import report_lines
from autotune.results.warnings import notes
from autotune.space.training_arguments import launch_variables
from autotune.store.opening import open_store
from autotune.store.records import StudyRecord
from autotune.tuning import options as tuning_options
from autotune.tuning.allowed import check_inspected, check_request
from autotune.tuning.narrator import Narrator
from autotune.tuning.options import open_search
from autotune.tuning.policy import Acquisition
from autotune.tuning.prepare import Prepared, prepare
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
    rehearsal = report.study.look.rehearsal
    assert (rehearsal.problem, rehearsal.saving.ranks, rehearsal.alarms) == (None, 2, [])
    assert any(line.startswith("a checkpoint needs ") for line in notes(report))

    export = make_export(report)
    assert export.arguments["ddp_find_unused_parameters"] is export.arguments["ddp_broadcast_buffers"] is False
    words = shlex.split(render(export, "torchrun"))
    assert words[:6] == ["OMP_NUM_THREADS=1", "torchrun", "--standalone", "--nproc_per_node", "2", "train.py"]
    assert words[6:] == shlex.split(render(export, "cli"))
    config = yaml.safe_load(render(export, "accelerate"))
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
    """``tests/verify/test_throughput_promise.py`` has torchrun start ranks that import nothing."""
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


def test_other_machines_of_the_kind_decide_what_follows_on_the_baseline() -> None:
    prepared = prepare(of_two(), facts())
    history, slow = History(prepared.ceiling), prepared.space.candidate(prepared.space.arms[0], 8)
    history.elsewhere[slow] = 100.0
    history.add(measured_at(prepared.baseline, 1.0))
    assert Acquisition(prepared.space).next(history) == slow


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
def test_messages_of_gpus_that_cannot_be() -> None:
    cases: list[Document] = [
        *({"gpus": text} for text in ("4", "0", "cpu", "two", "-1", "00", "0,cuda:0", "all")),
        {"parallel": True, "device": "cuda:0"},
        {"device": "cuda:0,cuda:1"},
        {"gpus": "2", "parallel": True, "strategy": ("fsdp",)},
        {"gpus": "2", "device": "cuda:0"},
        {"gpus": "2", "world_size": 4},
        {"gpus": "2", "effective_batch": 33},
        {"strategy": ("fsdp",)},
        {"gpus": "2", "strategy": ("fsdp",), "optim": ("adafactor",)},
    ]
    asked: Document = {"model": "bert-tiny", "effective_batch": 64}
    check_refusals("gpus", {str(each): partial(open_search, {**asked, **each}) for each in cases})


@pytest.mark.parametrize("options", [{"gpus": "9" * 5000}, {"device": "cuda:" + "9" * 5000}], ids=["gpus", "device"])
def test_a_number_of_more_digits_than_python_reads_is_refused(options: Document) -> None:
    with pytest.raises(InvalidRequestError, match=r"names no GPUs|is not a device"):
        open_search({"model": "bert-tiny", "effective_batch": 64, **options})


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
    words = shlex.split(render(export, "torchrun"))
    started = words[words.index("--nproc_per_node") + 2 :]
    own = ["train.py", "--output_dir", "out", "--per_device_train_batch_size", "4", "--use_cpu"]
    # A function has no command line to take flags from.
    assert started == ([*own, *shlex.split(render(export, "cli"))] if kind == "script" else ["train.py"])
    arguments = json.loads(render(export, "json"))
    assert arguments["per_device_train_batch_size"] * arguments["gradient_accumulation_steps"] == 16


FIRST_SECONDS = 280.0
"""For a trial in which DeepSpeed compiles its library."""

ZERO_SCRIPT = """
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, HfArgumentParser, Trainer, TrainingArguments

(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
arguments.max_steps = 2
model = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained("model"))
data = [{"input_ids": torch.randint(10, 1000, (8,)), "labels": torch.tensor(0)}] * 200
trainer = Trainer(model=model, args=arguments, train_dataset=data)
steps = trainer.train().global_step
stage = trainer.accelerator.deepspeed_engine_wrapped.engine.zero_optimization_stage()
print(f"trained {steps} steps in stage {int(stage)} on {arguments.world_size} ranks")
"""


@pytest.mark.deepspeed
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_a_search_over_ddp_and_zero_is_verified_by_a_stock_torchrun(cpu: Device, tmp_path: Path) -> None:
    storage = str(tmp_path / "studies.db")
    request = SearchRequest(
        tiny_workload("bert-tiny"), cpu, others=(cpu,), effective_batch=16, world_size=2, trials=3, study="zero",
        precisions=("bf16",), gradient_checkpointing="off", strategies=("zero2",),
        trial_timeout_seconds=FIRST_SECONDS,
    )  # fmt: skip
    study, report = run_search(request, storage, RecordingObserver())
    assert study.state == "finished"
    best = report.best
    assert isinstance(best.outcome, Completed)
    assert (best.candidate.arm.strategy, best.candidate.arm.ranks) == ("zero2", 2)
    assert best.candidate.samples_per_step == 16

    export = make_export(report)
    assert json.loads(render(export, "json"))["deepspeed"]["zero_optimization"]["stage"] == 2
    words = shlex.split(render(export, "torchrun"))
    assert json.loads(words[words.index("--deepspeed") + 1]) == export.arguments["deepspeed"]
    config = yaml.safe_load(render(export, "accelerate"))
    assert (config["distributed_type"], config["num_processes"]) == ("DEEPSPEED", 2)

    # The exported line, with a script that takes TrainingArguments; the Accelerator's file with the same script.
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(tiny_workload("bert-tiny").config))
    (tmp_path / "train.py").write_text(ZERO_SCRIPT)
    (tmp_path / "accelerate.yaml").write_text(render(export, "accelerate"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", *words[words.index("--standalone") :]]
    options = torchrun[torchrun.index("train.py") :]
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "accelerate.yaml", *options]
    for line in (torchrun, launch):
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.count("trained 2 steps in stage 2 on 2 ranks") == 2, done.stdout

    # The exported arguments, unchanged, in a Trainer that torchrun starts.
    verification = verify(target_of(report, placement_of(report)), 20, tmp_path / "verify.log")
    assert verification.obtained.state == "completed"
    assert verification.samples_timed == 16 * verification.steps_timed > 0


GPUS = [dataclasses.replace(H200, uuid=f"GPU-{index}", index=index) for index in range(4)]
LLAMA = tiny_workload("llama-tiny", seq_len=64)
LAYERS = {"layer_classes": ("LlamaDecoderLayer",), "own": None}
SHARED = Arm(
    "bf16", gradient_checkpointing=True, strategy="fsdp", ranks=4, transformer_layer_cls_to_wrap="LlamaDecoderLayer",
    context_parallel=2,
)  # fmt: skip


def request_of(gpus: int = 4, **changes: Any) -> SearchRequest:
    """A request of a search in which two GPUs share each sample."""
    device, *others = GPUS[:gpus]
    given: Document = {"effective_batch": 4, "world_size": gpus // 2, "context_parallel": 2, "study": "s", **changes}
    return SearchRequest(given.pop("workload", LLAMA), given.pop("device", device), others=tuple(others), **given)


def prepared(**changes: Any) -> Prepared:
    """The search, prepared."""
    request = request_of(**changes)
    check_request(request)
    return prepare(request, facts(**LAYERS))


class TestSearched:
    def test_every_arm_is_sharded_and_shares_samples(self) -> None:
        arms = prepared(precisions=("bf16",)).space.arms
        assert {(arm.strategy, arm.ranks, arm.context_parallel) for arm in arms} == {
            ("fsdp-keep", 4, 2),
            ("fsdp", 4, 2),
        }
        assert {arm.strategy for arm in prepared(strategies=("fsdp",)).space.arms} == {"fsdp"}

    def test_ranks_that_share_samples_count_once_in_the_effective_batch(self) -> None:
        space = prepared().space
        assert space.batches.at_level(2) == (2,)
        assert space.candidate(SHARED, 2) == Candidate(SHARED, 2, 1)
        assert Candidate(SHARED, 2, 3).samples_per_step == 12
        # All GPUs may share each sample, which no other way of training can have with a batch of one.
        assert prepared(gpus=2, world_size=1, effective_batch=1).space.batches.at_level(1) == (1,)

    def test_speed_ups_are_relative_to_the_defaults_that_share_samples_too(self) -> None:
        baseline = prepared().baseline
        assert baseline.arm == Arm(
            strategy="fsdp", ranks=4, transformer_layer_cls_to_wrap="LlamaDecoderLayer", context_parallel=2
        )
        assert baseline.samples_per_step == 4

    def test_the_head_and_the_winner_name_the_groups(self, tmp_path: Path) -> None:
        given, said = prepared(), list[str]()
        with new_store(tmp_path) as store:
            found = search(store, ComputedRunner(lambda _: GIB), given=given)
            report = load_report(store, found.study.name)
        Narrator(lambda line, _: said.append(line)).begins(given, found.study)
        assert "effective batch 4 on 2 groups of 2 devices" in said[1]
        assert "per-device batch 2 × accumulation 1 × 2 groups of 2 devices, " in "\n".join(report_lines(report))

    def test_no_process_is_pinned(self) -> None:
        assert "2 processes" in str(request_of(gpus=2, world_size=1).why_not_pinned())

    def test_is_recorded(self) -> None:
        document = request_of().document()
        assert document["context_parallel"] == 2
        assert "context_parallel" not in request_of(context_parallel=1, world_size=4).document()
        again = request_from_document(document, LLAMA, GPUS[0], "s", tuple(GPUS[1:]))
        assert again.document() == document
        stored = Candidate(SHARED, 2, 1).recorded_parameters()
        assert Candidate.from_parameters(stored) == Candidate(SHARED, 2, 1)
        assert "context_parallel" not in Candidate(Arm(), 2, 1).recorded_parameters()


BERT = tiny_workload("bert-tiny")
CPU = Device("cpu", 0, "cpu", "a CPU", 2**34, 0, 0, 2**34)


def with_data(**changes: Any) -> Workload:
    """The workload on a dataset."""
    return dataclasses.replace(LLAMA, data=DataSpec("data.json", "json", "1", **changes))


class TestRefused:
    def test_messages_of_samples_that_cannot_be_shared(self) -> None:
        whole = dataclasses.replace(MODEL, attn_implementations=("sdpa",), **{**LAYERS, "layer_classes": ()})
        eager = dataclasses.replace(MODEL, attn_implementations=("eager",), **LAYERS)
        on_cpu = SearchRequest(LLAMA, CPU, others=(CPU,), world_size=1, context_parallel=2)
        cases: dict[str, Document] = {
            "3 of 4": {"context_parallel": 3},
            "0 of 4": {"context_parallel": 0},
            "one GPU": {"gpus": 1, "world_size": 1},
            "another world size": {"world_size": 4},
            "an unequal effective batch": {"effective_batch": 3},
            "a batch multiple": {"batch_multiple": 8},
            "an optimizer": {"optims": ("adafactor",)},
            "Liger": {"liger": "auto"},
            "packing": {"workload": with_data(packing=True)},
            "another task": {"workload": BERT},
            "DDP": {"strategies": ("ddp", "fsdp")},
            "eager attention": {"attn_implementations": ("eager",)},
            "a length that is not divisible": {"workload": dataclasses.replace(LLAMA, seq_len=66)},
            "lengths that differ": {"workload": with_data()},
            "lengths padded to another multiple": {"workload": with_data(pad_to_multiple_of=6)},
            "rows": {"padding_free": "on", "workload": dataclasses.replace(LLAMA, padding=0.5)},
            "few bits": {"workload": dataclasses.replace(LLAMA, quantize="4bit", peft="lora", lora_rank=4)},
        }
        calls: dict[str, Callable[[], object]] = {name: partial(prepared, **each) for name, each in cases.items()}
        calls["a model without sdpa"] = partial(check_inspected, request_of(), facts(), eager)
        calls["a model without layers"] = partial(check_inspected, request_of(), facts(), whole)
        calls["a CPU"] = partial(check_request, on_cpu)
        check_refusals("context_parallel", calls)

    def test_padded_samples_that_are_divisible_are_searched(self) -> None:
        check_request(request_of(workload=with_data(pad_to_multiple_of=8)))
        check_request(request_of(workload=with_data(padding="max_length")))


class TestExported:
    def test_a_launcher_is_told(self) -> None:
        export = make_export(report_of(Candidate(SHARED, 2, 1), "cuda", ("bf16", "fsdp", "fsdp_config"), LLAMA))
        words = shlex.split(render(export, "torchrun"))
        assert "PARALLELISM_CONFIG_CP_SIZE=2" in words
        assert words[words.index("--nproc_per_node") + 1] == "4"
        config = yaml.safe_load(render(export, "accelerate"))
        assert config["parallelism_config"] == {"parallelism_config_dp_shard_size": 2, "parallelism_config_cp_size": 2}
        assert "os.environ['PARALLELISM_CONFIG_CP_SIZE'] = '2'" in render(export, "python")
        said = "start the training with PARALLELISM_CONFIG_CP_SIZE=2 in its environment"
        assert said in beside_lines(export, "json")
        assert not any("PARALLELISM" in line for line in beside_lines(export, "accelerate"))

    def test_accelerate_reads_the_variables_and_the_file_alike(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from accelerate.commands.launch import _validate_launch_command, launch_command_parser
        from accelerate.parallelism_config import ParallelismConfig
        from accelerate.utils.launch import prepare_multi_gpu_env

        export = make_export(report_of(Candidate(SHARED, 2, 1), "cuda", ("bf16", "fsdp", "fsdp_config"), LLAMA))
        file = tmp_path / "accelerate.yaml"
        file.write_text(render(export, "accelerate"))
        given, *_ = _validate_launch_command(
            launch_command_parser().parse_args(["--config_file", str(file), "train.py"])
        )
        from_file = prepare_multi_gpu_env(given)
        for name, value in launch_variables(SHARED).items():
            assert from_file[name] == value
            monkeypatch.setenv(name, value)
        sizes = ParallelismConfig()
        assert (sizes.cp_size, sizes.dp_shard_size, sizes.total_size) == (2, 2, 4)
        assert sizes.fsdp_dim_names == ["dp_shard_cp"]
