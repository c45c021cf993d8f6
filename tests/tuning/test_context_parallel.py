"""Ranks that share samples: what is searched, what is refused, how it is exported."""

import dataclasses
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from recorded import ComputedRunner
from reported import report_of
from searching import H200, MODEL, facts, new_store, search
from tiny import tiny_workload

from autotune.core.candidate import Arm, Candidate, Document
from autotune.core.dataset_spec import DataSpec
from autotune.core.device import Device
from autotune.core.errors import AutotuneError
from autotune.core.units import GIB
from autotune.core.workload import Workload
from autotune.results.export import beside_lines, make_export, render, render_launch
from autotune.results.report import load_report
from autotune.results.text import report_lines
from autotune.space.training_arguments import launch_variables
from autotune.tuning.allowed import check_inspected, check_request
from autotune.tuning.narrator import Narrator
from autotune.tuning.options import open_search
from autotune.tuning.prepare import Prepared, prepare
from autotune.tuning.request import SearchRequest, request_from_document

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
    @pytest.mark.parametrize(
        ("changes", "message", "hint"),
        [
            ({"context_parallel": 3}, "--context-parallel 3 does not divide the number of GPUs", "divisor of --gpus"),
            ({"context_parallel": 0}, "--context-parallel 0 does not divide the number of GPUs", "divisor of --gpus"),
            ({"gpus": 1, "world_size": 1}, "GPUs that are trained on, 1", "add --gpus 2"),
            ({"world_size": 4}, "--world-size 4 is not the 2 groups of 2 GPUs", "leave it out"),
            ({"effective_batch": 3}, "cannot be shared equally by 2 groups of 2 devices", "--effective-batch 2 or 4"),
            ({"batch_multiple": 8}, "the 2 samples that a group of devices gets", "would work: 1, 2"),
            (
                {"optims": ("adafactor",)},
                "--context-parallel 2: --optim adafactor cannot update sharded weights",
                "leave --context-parallel out, or use --optim adamw_torch_fused",
            ),
            ({"liger": "auto"}, "does not go with --lever liger", "leave --lever liger out"),
            ({"workload": with_data(packing=True)}, "does not go with --packing", "leave --packing out"),
            ({"workload": BERT}, "this is sequence-classification", "leave --context-parallel out"),
            ({"strategies": ("ddp", "fsdp")}, "with FSDP, not ddp", "use --strategy fsdp-keep,fsdp"),
            ({"attn_implementations": ("eager",)}, "with sdpa, not eager", "leave --attn out"),
            (
                {"workload": dataclasses.replace(LLAMA, seq_len=66)},
                "in 4 equal stretches, and 66 tokens are not divisible",
                "use --seq-len 64 or 68",
            ),
            ({"workload": with_data()}, "those of --dataset differ", "add --pad-to-multiple-of 4"),
            ({"workload": with_data(pad_to_multiple_of=6)}, "those of --dataset differ", "--pad-to-max-length"),
            (
                {"padding_free": "on", "workload": dataclasses.replace(LLAMA, padding=0.5)},
                "does not go with --lever padding_free",
                "leave --lever padding_free out",
            ),
            (
                {"workload": dataclasses.replace(LLAMA, quantize="4bit", peft="lora", lora_rank=4)},
                "--context-parallel 2: weights in 4 bits are not sharded",
                "leave --context-parallel out, or leave --quantize out",
            ),
        ],
    )
    def test_what_cannot_be_is_one_clear_line(self, changes: Document, message: str, hint: str) -> None:
        with pytest.raises(AutotuneError) as caught:
            prepared(**changes)
        assert message in caught.value.message
        assert hint in str(caught.value.hint)

    def test_padded_samples_that_are_divisible_are_searched(self) -> None:
        check_request(request_of(workload=with_data(pad_to_multiple_of=8)))
        check_request(request_of(workload=with_data(padding="max_length")))

    def test_a_model_without_the_attention_cannot(self) -> None:
        request, model = request_of(), dataclasses.replace(MODEL, attn_implementations=("eager",), **LAYERS)
        with pytest.raises(AutotuneError, match="has no sdpa attention") as caught:
            check_inspected(request, facts(), model)
        assert caught.value.hint == "leave --context-parallel out"
        whole = dataclasses.replace(model, attn_implementations=("sdpa",), layer_classes=())
        with pytest.raises(AutotuneError, match=r"--context-parallel 2: .* has no class of layers") as caught:
            check_inspected(request, facts(), whole)
        assert caught.value.hint == "leave --context-parallel out"

    def test_a_cpu_cannot(self) -> None:
        with pytest.raises(AutotuneError, match="cpu has no attention over several ranks"):
            check_request(SearchRequest(LLAMA, CPU, others=(CPU,), world_size=1, context_parallel=2))

    def test_one_device_cannot(self) -> None:
        with pytest.raises(AutotuneError, match="GPUs that are trained on, 1"):
            open_search({"model": "llama-tiny", "device": "cpu", "context_parallel": 2})


class TestExported:
    def test_a_launcher_is_told(self) -> None:
        export = make_export(report_of(Candidate(SHARED, 2, 1), "cuda", ("bf16", "fsdp", "fsdp_config"), LLAMA))
        words = shlex.split(render_launch(export, "torchrun"))
        assert "PARALLELISM_CONFIG_CP_SIZE=2" in words
        assert words[words.index("--nproc_per_node") + 1] == "4"
        config = yaml.safe_load(render_launch(export, "accelerate"))
        assert config["parallelism_config"] == {
            "parallelism_config_dp_shard_size": 2,
            "parallelism_config_cp_size": 2,
        }
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
        file.write_text(render_launch(export, "accelerate"))
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
