"""Test ``autotune predict`` with a small model and GPUs that are not in this machine."""

import dataclasses
import json
import os
import re
import sqlite3
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from command_line import COLD, ROOT, run_process
from messages import check_messages, check_refusals
from tiny import tiny_workload

from autotune.core.candidate import Arm, Candidate
from autotune.core.schema import decode, fields_of
from autotune.core.units import GIB, MIB
from autotune.devices.gpus import Prices, find_chip
from autotune.estimate.advice import Graded, Offer
from autotune.estimate.step_time import StepTime
from autotune.models.resolve import resolve_model
from autotune.results.predicted import (
    GpuPredictionDocument,
    PredictionDocument,
    RanksPredictionDocument,
    TimedBatchDocument,
    arm_prediction_type,
    best_of,
    best_prediction_type,
    read_gpu_document,
)
from autotune.results.prediction_text import (
    accuracy_lines,
    advice_lines,
    choice_line,
    gpu_lines,
    grade_lines,
    prediction_lines,
    time_lines,
    unknown_line,
)
from autotune.store.opening import open_store
from autotune.tuning.predictions import known_chips

_SMALL = ("predict", "--model", "bert-tiny", "--seq-len", "64", "--precision", "bf16,tf32")

SPEC = {
    "memory": "24GiB", "capability": "8.9", "multiprocessors": 128, "half_tflops": 165.2, "tf32_tflops": 82.6,
    "fp32_tflops": 82.6, "gigabytes_per_second": 1008, "watts": 450,
}  # fmt: skip


def check_types(document: dict[str, Any], kind: type[PredictionDocument]) -> None:
    """Check what is printed against the published schemas: each field is there, and no other one."""
    assert document.keys() == {field.name for field in dataclasses.fields(decode(document, kind))}
    assert document["arms"] == document["gpus"][0]["arms"]
    for gpu in document["gpus"]:
        assert gpu.keys() == {field.name for field in dataclasses.fields(GpuPredictionDocument)}
        assert gpu["best"].keys() == fields_of(decode(gpu["best"], best_prediction_type())).keys()
        for arm in gpu["arms"]:
            assert arm.keys() == fields_of(decode(arm, arm_prediction_type())).keys()
            for row in arm["batches"]:
                assert row.keys() == {field.name for field in dataclasses.fields(decode(row, TimedBatchDocument))}


@COLD
def test_predict_says_what_fits_on_named_gpus(tmp_path: Path, cold: bool) -> None:
    asked = (*_SMALL, "--effective-batch", "64", "--gpu", "rtx-3090,v100-16gb", "--precision", "fp16", "--json")
    document = run_process(*asked, folder=tmp_path, cold=cold).document
    check_types(document, PredictionDocument)
    assert document["predicted"] is True
    assert [gpu["gpu"] for gpu in document["gpus"]] == ["rtx-3090", "v100-16gb"]
    for arm in document["arms"]:
        assert arm["precision"] == "fp16"
        assert arm["largest_batch"] == 64
        for row in arm["batches"]:
            assert row["per_device_train_batch_size"] * row["gradient_accumulation_steps"] == 64
            assert row["peak_reserved_bytes"] >= row["peak_allocated_bytes"] > 16 * 4_000_000
            low, high = row["peak_reserved_interval_bytes"]
            assert row["peak_allocated_bytes"] <= low <= row["peak_reserved_bytes"] <= high
            assert row["fits"]
            low, high = row["samples_per_second_interval"]
            assert low < row["samples_per_second"] < high
            assert row["tokens_per_second"] == pytest.approx(64 * row["samples_per_second"])
            # So small a model waits for the host.
            assert row["limited_by"] == "host"
            assert 0 < row["model_flops_utilization"] < 0.1
    best = document["gpus"][0]["best"]
    every = [row["samples_per_second"] for arm in document["arms"] for row in arm["batches"]]
    assert best["samples_per_second"] == max(every)
    assert best["precision"] == "fp16"


def test_predict_finds_the_largest_free_batch_and_what_the_peak_consists_of(tmp_path: Path) -> None:
    few = (*_SMALL, "--memory-limit", "2GiB", "--gradient-checkpointing", "off")
    every = run_process(*few, "--all", "--anatomy", folder=tmp_path)
    assert every.code == 0, every.stderr
    assert "activations" in every.stdout
    assert "yes" in every.stdout
    assert "no" in every.stdout
    assert "not measured" in every.stderr
    # By default one line for each configuration: its largest batch that fits.
    largest = run_process(*few, folder=tmp_path)
    assert largest.code == 0, largest.stderr
    head, title, *lines = largest.stdout.strip().splitlines()
    assert "if the headroom stays free (the line)" in head
    assert title.split("  ")[0] == "configuration"
    assert [line.split()[0] for line in lines] == ["bf16", "tf32"]
    # Of the peaks it has the reserved one alone.
    every_row = [re.split(r"  +", line) for line in every.stdout.splitlines() if "  yes" in line]
    rows = [re.split(r"  +", line.rstrip()) for line in lines]
    assert {tuple(row[:4]) for row in rows} == {(*row[:2], *row[3:5]) for row in every_row}


def test_what_saves_memory_is_predicted_where_nothing_fits_without(tmp_path: Path) -> None:
    trained = ("--model", "gpt2-tiny", "--seq-len", "128", "--effective-batch", "512", "--batch-multiple", "512")
    spec = tmp_path / "spec.json"
    # 880 MiB without, 667 MiB with; the context takes 715 MiB.
    spec.write_text(json.dumps({"small": {**SPEC, "memory": "1.75GiB"}, "large": SPEC}))
    on = (*trained, "--gpu-spec", str(spec), "--precision", "bf16", "--gradient-checkpointing", "on", "--json")
    small, large = run_process("predict", *on, "--gpu", "small,large", folder=tmp_path).document["gpus"]
    fitting = [(arm["fused_loss"], arm["gradient_checkpointing"]) for arm in small["arms"] if arm["largest_batch"]]
    # With casts that are kept, and without.
    assert fitting == [(True, True)] * 2
    assert small["best"]["fused_loss"]
    assert not any(arm["fused_loss"] for arm in large["arms"])
    advised = run_process("advise", *on, "--gpu", "small", folder=tmp_path).document
    offers = {offer["gpu"]: offer for offer in advised["gpus"]}
    assert offers["small"]["fits"]


def test_where_nothing_fits_the_exit_code_says_so(tmp_path: Path) -> None:
    tight = ("--model", "bert-tiny", "--effective-batch", "8", "--memory-limit", "840MiB", "--precision", "fp32")
    for form in ((), ("--json",)):
        done = run_process("predict", *tight, *form, folder=tmp_path)
        assert (done.code, bool(done.stdout)) == (6, True), done.stderr


def test_a_pipeline_can_ask_that_a_model_fits_on_every_gpu(tmp_path: Path) -> None:
    (tmp_path / "gpus.json").write_text(json.dumps({"small": {**SPEC, "memory": "840MiB"}}))
    asked = ("--model", "bert-tiny", "--effective-batch", "8", "--precision", "fp32", "--seq-len", "16")
    both = ("--gpu-spec", "gpus.json", "--gpu", "rtx-4090,small")
    assert run_process("predict", *asked, *both, folder=tmp_path).code == 0
    done = run_process("predict", *asked, *both, "--fail-if-not-fit", folder=tmp_path)
    assert done.code == 6, done.stderr
    assert "no batch of bert-tiny is predicted to fit on small" in done.stderr
    assert run_process("predict", *asked, "--gpu", "rtx-4090", "--fail-if-not-fit", folder=tmp_path).code == 0


def test_why_nothing_is_predicted_is_said(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    few = ("--seq-len", "64", "--effective-batch", "8", "--gpu", "rtx-4090", "--precision", "bf16", "--peft", "lora")
    dora = ("--model", "llama-3.2-1b", "--quantize", "4bit", "--dora", "--gradient-checkpointing", "off")
    done = run_process("predict", *few, *dora, folder=tmp_path)
    assert done.code == 0, done.stderr
    assert done.stdout.count("Not predicted: how DoRA dequantizes weights is not traced.") == 1
    document = run_process("predict", *few, *dora, "--json", folder=tmp_path).document
    assert document["arms"][0]["why_not"] == "how DoRA dequantizes weights is not traced"
    told = run_process("advise", *few, *dora, folder=tmp_path)
    assert "nothing is predicted for it: how DoRA dequantizes weights is not traced" in told.stdout


def test_what_only_a_search_tried_is_predicted(tmp_path: Path) -> None:
    trained = ("--model", "gpt2-tiny", "--seq-len", "128", "--effective-batch", "16", "--batch-multiple", "16")
    asked = ("predict", *trained, "--gpu", "rtx-4090", "--precision", "bf16", "--gradient-checkpointing", "on")
    plain, saving = (
        run_process(*asked, *more, "--json", folder=tmp_path).document["arms"]
        for more in ((), ("--lever", "offload_activations=on", "--lever", "fused_loss=on"))
    )
    assert [(arm["offload_activations"], arm["fused_loss"]) for arm in saving] == [(True, True)]
    assert saving[0]["batches"][0]["peak_allocated_bytes"] < plain[0]["batches"][0]["peak_allocated_bytes"]
    told = run_process(*asked, "--lever", "offload_activations=on", folder=tmp_path)
    assert "Offloaded: the time of the copies to the host and back is not counted" in told.stdout


def test_predict_tells_which_strategy_fits_on_several_gpus(tmp_path: Path) -> None:
    asked = (*_SMALL, "--gpus", "2", "--gpu", "rtx-4090", "--effective-batch", "16", "--precision", "bf16")
    asked = (*asked, "--gradient-checkpointing", "off")
    document = run_process(*asked, "--strategy", "ddp,fsdp", "--json", folder=tmp_path).document
    check_types(document, RanksPredictionDocument)
    found = {(arm["strategy"], arm["sync_each_batch"]): arm for arm in document["arms"]}
    assert list(found) == [("ddp", False), ("fsdp", False), ("fsdp", True)]
    # As in a search: every parameter of the model gets a gradient, for which DDP need not look.
    assert found["ddp", False]["ddp_find_unused_parameters"] is found["ddp", False]["ddp_broadcast_buffers"] is False
    for (strategy, syncs), arm in found.items():
        assert arm["ranks"] == 2
        for row in arm["batches"]:
            assert row["samples_per_second"] > 0
            assert row["per_device_train_batch_size"] * row["gradient_accumulation_steps"] == 8
            assert row["anatomy_bytes"]["weights"] < (10 if strategy == "fsdp" else 20) * 1_000_000
        # What is the same without accumulation is told once.
        assert (arm["batches"][-1]["gradient_accumulation_steps"] == 1) is not syncs
    assert "two H200" in document["ranks_accuracy"]
    told = run_process(*asked, "--strategy", "ddp", folder=tmp_path)
    assert "on 2 × rtx-4090" in told.stdout
    assert "What fits: ddp up to 8 a GPU." in told.stdout
    assert "62 of 63 steps" in told.stderr
    assert "Choose bf16, ddp × 2 at 8 × 1" in told.stdout
    refused = run_process(*asked, "--gpus", "0,1", folder=tmp_path)
    assert (refused.code, "--gpus 0,1 is not a number of GPUs" in refused.stderr) == (2, True)


def batch(size: int, reserved_bytes: int, fits: bool) -> dict[str, Any]:
    """One predicted batch of an effective batch of 64, as ``--json`` has it."""
    return {
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": 64 // size,
        "peak_allocated_bytes": reserved_bytes - MIB,
        "peak_reserved_bytes": reserved_bytes,
        "peak_reserved_interval_bytes": [reserved_bytes, reserved_bytes],
        "fits": fits,
        "anatomy_bytes": {},
    }


def arm(precision: str, *batches: dict[str, Any]) -> dict[str, Any]:
    """The predictions of one configuration."""
    plain = {"gradient_checkpointing": False, "attn_implementation": "sdpa", "optim": "adamw_torch_fused"}
    plain |= {"strategy": None, "ranks": 1, "sync_each_batch": False}
    return {"precision": precision, **plain, "batches": list(batches)}


def view(*arms: dict[str, Any], **workload: Any) -> GpuPredictionDocument:
    """What is predicted of these configurations on a GPU."""
    return read_gpu_document(
        {
            "gpu": "rtx-3090",
            "workload": {"model": "some-model", "task": "causal-lm", "seq_len": 512, **workload},
            "ceiling_bytes": 11 * GIB,
            "line_bytes": 10 * GIB,
            "fits_below_bytes": 10 * GIB,
            "arms": list(arms),
        }
    )


def test_it_is_told_what_of_a_mixture_of_experts_is_not_quantized(tmp_path: Path) -> None:
    small = {
        "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_experts": 4,
        "num_key_value_heads": 2, "num_experts_per_tok": 2, "vocab_size": 256,
    }  # fmt: skip
    (tmp_path / "moe").mkdir()
    config = {**resolve_model("olmoe-1b-7b-0924").config, **small}
    (tmp_path / "moe" / "config.json").write_text(json.dumps(config))
    words = ("--seq-len", "16", "--effective-batch", "8", "--precision", "bf16", "--gradient-checkpointing", "off")
    asked = ("predict", "--model", "./moe", "--memory-limit", "8GiB", *words, "--peft", "lora", "--lora-rank", "4")
    quantized = run_process(*asked, "--quantize", "4bit", folder=tmp_path)
    assert quantized.code == 0, quantized.stderr
    # Two layers of four experts, each with three matrices of 64 × 32 in two bytes.
    assert "Not quantized: 96.0 KiB of weights stay in bfloat16: the experts" in quantized.stdout
    assert "Not quantized" not in run_process(*asked, folder=tmp_path).stdout


def with_speed(row: dict[str, Any], samples_per_second: float) -> dict[str, Any]:
    """The same batch with a speed."""
    return row | {
        "samples_per_second": samples_per_second,
        "samples_per_second_interval": [0.8 * samples_per_second, 1.2 * samples_per_second],
        "tokens_per_second": 512 * samples_per_second,
        "model_flops_utilization": 0.4,
        "limited_by": "matrix products",
        "step_seconds": 0.25,
        "gpu_seconds": 0.1,
        "gpu_seconds_by_kind": {},
        "unknown_operations": {},
        "unknown_operations_share": 0.0,
        "scaling_efficiency": None,
    }


def test_messages_of_predictions() -> None:
    untimed = [
        arm("bf16", batch(8, 4 * GIB, True), batch(16, 8 * GIB, True), batch(32, 16 * GIB, False)),
        arm("fp32", batch(8, 12 * GIB, False), batch(16, 24 * GIB, False)),
        arm("fp16"),
    ]
    of_kinds = {"gpu_seconds_by_kind": {"matrix_product": 0.09, "softmax": 0.0095, "fill": 0.0005}}
    bf16 = [with_speed(batch(size, 4 * GIB, True), speed) | of_kinds for size, speed in ((8, 90.0), (16, 88.0))]
    slow = arm("fp32", with_speed(batch(8, 12 * GIB, False), 40.0) | of_kinds)
    timed = [arm("bf16", *bf16), slow, arm("fp16", batch(8, 4 * GIB, True))]
    adapted = {"dtype": "bfloat16", "peft": "lora", "lora_rank": 8, "quantize": "4bit"}
    recomputes = arm("bf16", with_speed(batch(64, 9 * GIB, True), 123.4)) | {"gradient_checkpointing": True}
    wide = [recomputes | {"optim": name} for name in ("adafactor", "lion_8bit")]
    widest = view(*(each | {"fused_loss": True, "offload_activations": True} for each in wide))
    zero = [{**arm("bf16", batch(8, 4 * GIB, True)), "strategy": name, "ranks": 2} for name in ("zero1", "zero2")]
    zero.append({**arm("bf16", batch(8, 24 * GIB, False)), "strategy": "zero3", "ranks": 2})
    on_two = view({**arm("bf16", bf16[0]), "strategy": "ddp", "ranks": 2}, *zero)
    unknown = {**arm("bf16"), "strategy": "fsdp", "ranks": 2, "why_not": "tracing a step failed"}
    prices = Prices({}, "USD", "as given")
    step = StepTime(Candidate(Arm("bf16"), 32, 2), 1.0, (0.9, 1.1), 1.0, 0.0, {}, 1e12, 1e15)
    predicted = Offer(find_chip("l4", known_chips(None)), Graded(step, "predicted"), None, 64.0, 1.0)
    measured = replace(predicted, graded=Graded(step, "measured"))
    plain = {"all_batches": False, "anatomy": False}
    rows = {
        "the largest batches": gpu_lines(view(*untimed), **plain),
        "all batches": gpu_lines(view(*untimed), all_batches=True, anatomy=False),
        "the fastest batches and the choice": gpu_lines(view(*timed), **plain),
        "the time of each kind of work": time_lines(view(*timed[:2]).arms, all_batches=False),
        "the time of each kind of work, all batches": time_lines(view(*timed[:2]).arms, all_batches=True),
        "adapters over few bits": gpu_lines(view(slow, **adapted), **plain),
        "adapters over few bits, GPUs compared": advice_lines(
            [], replace(tiny_workload("gpt2-tiny"), **adapted), 64, 1e6, prices
        ),
        "limits of what is predicted, few bits": accuracy_lines([view(timed[0], quantize="4bit")]),
        "limits of what is predicted, an optimizer of 8 bits": accuracy_lines([view(timed[0])], ["adamw_bnb_8bit"]),
        "grades, few bits": grade_lines([predicted, measured], "4bit"),
        "grades, few bits that were measured": grade_lines([measured], "4bit"),
        "grades": grade_lines([predicted]),
        "80 columns": gpu_lines(view(recomputes), **plain),
        "a wide table": gpu_lines(view(*wide), **plain, columns=None),
        "76 columns": gpu_lines(view(*wide), **plain, columns=76),
        "60 columns": prediction_lines([widest, widest], **plain, columns=60),
        "a strategy that is not predicted": gpu_lines(view(unknown), **plain),
        "strategies without a speed": [choice_line(*best_of(on_two.arms), on_two.arms)],
        "one strategy": [choice_line(*best_of(on_two.arms), on_two.arms[:1])],
        "operations of no known kind": [
            unknown_line({"notes::scan": 2, "aten::_fft_r2c": 12, "a::b": 1, "a::c": 1, "a::d": 1}, 0.0312)
        ],
    }
    check_messages("predictions", rows)
    for name, columns, count in (("80 columns", 80, 3), ("76 columns", 76, 4), ("60 columns", 60, 6)):
        assert max(map(len, rows[name][1:count])) <= columns
    assert all(len(line) <= 60 for line in rows["60 columns"][-5:])


def test_a_gpu_of_ones_own_is_described_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "gpus.json"
    path.write_text(json.dumps({"My-GPU": SPEC}))
    chip = known_chips(str(path))["my-gpu"]
    assert (chip.capability, chip.memory_bytes, chip.multiprocessors) == ((8, 9), 24 * GIB, 128)
    assert chip.rates.half_flops == 165.2e12
    assert find_chip("MY-GPU", known_chips(str(path))) == chip


def test_messages_of_descriptions_that_cannot_be_read(tmp_path: Path) -> None:
    changes = ({"flops": 3}, {"watts": 0}, {"memory": "much"}, {"half_tflops": None}, {"capability": "new"})
    described = [{"a": each} for each in ({"memory": "24GiB"}, *({**SPEC, **change} for change in changes))]
    written = ["{", "[]", '{"a": 3}', *map(json.dumps, described)]
    for at, text in enumerate(written):
        (tmp_path / f"{at}.json").write_text(text)
    paths = {text: str(tmp_path / f"{at}.json") for at, text in enumerate(written)}
    check_refusals("gpu-descriptions", {text: partial(known_chips, path) for text, path in paths.items()}, tmp_path)


# A module that Python imports at its start: no process can be started any more.
_ALONE = """
import sys

def refuse(event, arguments):
    if event in ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec"):
        raise RuntimeError(f"{event} by a command that is to start no process")

sys.addaudithook(refuse)
"""


def variables_without_processes(folder: Path) -> dict[str, str]:
    """The variables with which a command can start no process."""
    site = folder / "alone"
    site.mkdir()
    (site / "sitecustomize.py").write_text(_ALONE)
    return {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}


def test_a_second_prediction_of_the_same_starts_no_process(tmp_path: Path) -> None:
    gpus = (*_SMALL, "--effective-batch", "64", "--memory-limit", "8GiB", "--gpu", "v100-16gb,v100-32gb,rtx-3090")
    first = run_process(*gpus, "--precision", "fp32", "--json", folder=tmp_path)
    assert first.code == 0, first.stderr
    database = tmp_path / "studies" / "autotune.db"
    with open_store(str(database)) as store:
        assert store.studies() == []
    with closing(sqlite3.connect(database)) as connection:
        rows = connection.execute("SELECT kind, count(*) FROM autotune_answers GROUP BY kind").fetchall()
    # With and without checkpointing; the V100s differ in nothing but their memory, of which no more than 8 GiB counts.
    assert dict(rows) == {"inspection": 1, "prediction": 4}
    variables = variables_without_processes(tmp_path)
    second = run_process(*gpus, "--precision", "fp32", "--json", folder=tmp_path, cold=True, **variables)
    gpu, twin, other = second.document["gpus"]
    assert second.stdout == first.stdout
    assert gpu["arms"] == twin["arms"]
    assert [arm["largest_batch"] for arm in other["arms"]] == [64, 64]
    # The refusal is real: what was not asked before cannot be asked so.
    assert run_process(*gpus, "--precision", "fp16", folder=tmp_path, **variables).code != 0


def test_a_prediction_where_nothing_can_be_kept_is_made_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "studies").write_text("in the way")
    few = (*_SMALL, "--memory-limit", "2GiB", "--effective-batch", "8", "--gradient-checkpointing", "off")
    done = run_process(*few, folder=tmp_path)
    assert done.code == 0, done.stderr
    assert "8 × 1" in done.stdout
    assert "not kept" not in done.stderr
    named = run_process(*few, "--storage", "studies/own.db", folder=tmp_path)
    assert named.code == 0, named.stderr
    assert named.stdout == done.stdout
    assert "what was predicted is not kept: studies/own.db" in named.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["studies"]


@pytest.mark.parametrize(
    "refused",
    [("--gpu", "voodoo-2"), ("--memory-limit", "0.65GiB"), ("--memory-limit", "8GiB", "--effective-batch", "0")],
)
def test_a_prediction_that_is_refused_leaves_nothing_behind(refused: tuple[str, ...], tmp_path: Path) -> None:
    assert run_process(*_SMALL, *refused, folder=tmp_path).code != 0
    assert list(tmp_path.iterdir()) == []
