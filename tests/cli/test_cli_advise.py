"""``autotune advise``: which GPU to rent, for a small model."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import COLD, Run, run_process
from messages import check_refusals
from recorded import measurement
from recorded_steps import Subject
from test_cli_errors import check_error

from autotune.core.candidate import Arm, Candidate
from autotune.core.ceiling import Ceiling, Headroom
from autotune.core.outcome import Completed
from autotune.core.prediction import MemoryPrediction, Operations, PredictionAnswer
from autotune.core.schema import decode
from autotune.core.units import GIB
from autotune.devices.gpus import CHIPS, EXAMPLES, read_prices
from autotune.estimate.memory import MemoryModel, Question
from autotune.models.resolve import resolve_model
from autotune.results.predicted import AdviceDocument, FittingOfferDocument, OfferDocument, PricesDocument
from autotune.space.space import Batches, Space
from autotune.store.opening import open_store
from autotune.store.records import StudyRecord, TrialRecord
from autotune.tuning.advising import _fitting_steps

_TRAINED = "--model bert-tiny --seq-len 64 --effective-batch 64 --gradient-checkpointing off"
_SMALL = ("advise", *_TRAINED.split())


def keep_a_measurement(storage: str) -> None:
    """Keep a study of the small model on an H100 with one trial."""
    workload = Subject("bert-tiny", 64).workload()
    candidate = Candidate(Arm("bf16"), 64)
    with open_store(storage) as store:
        workload_id = store.intern_workload(workload.recorded_document(), workload.fingerprint())
        named = {"device_kind": "cuda", "device_name": "NVIDIA H100 80GB HBM3"}
        environment_id = store.intern_environment(named, "environment")
        study = StudyRecord("h100", workload_id, environment_id, {}, {"cap_bytes": 2**36}, "0.1.0")
        store.create_study(study)
        outcome = Completed(measurement(candidate, 64 / 5000.0, 2**30, 2**30, None))
        store.start_trial(TrialRecord(study.id, 0, candidate, workload_id, environment_id, outcome=outcome))


NAMES = {"h100": "h100-80gb", "h100-80gb": "h100-80gb", "l4": "l4"}


@COLD
def test_gpus_are_compared_by_cost_and_ties_share_a_rank(tmp_path: Path, cold: bool) -> None:
    few = ("--gpu", "l4,h100,t4,a10g", "--price", "l4=0.70EUR,h100=2.95EUR", "--precision", "bf16,fp16")
    storage = str(tmp_path / "studies.db")
    keep_a_measurement(storage)
    words = (*few, "--samples", "1e6", "--storage", storage, "--json")
    document = run_process(*_SMALL, *words, folder=tmp_path, cold=cold).document
    assert decode(document, AdviceDocument).prices == PricesDocument("EUR", "as given")
    for row in document["gpus"]:
        decode(row, FittingOfferDocument if row["fits"] else OfferDocument)
    by_name = {row["gpu"]: row for row in document["gpus"]}
    # So small a model waits for the host on either, so that the cheaper one costs less.
    assert [row["gpu"] for row in document["gpus"]] == ["l4", "h100-80gb", "t4", "a10g"]
    l4, h100, t4, unknown = by_name["l4"], by_name["h100-80gb"], by_name["t4"], by_name["a10g"]
    assert l4["candidate"]["precision"] in ("bf16", "fp16")
    assert l4["hours"] == pytest.approx(1e6 / l4["samples_per_second"] / 3600)
    assert l4["cost"] == pytest.approx(0.7 * l4["hours"])
    assert l4["cost_interval"][0] < l4["cost"] < l4["cost_interval"][1]
    assert l4["rank"] == 1
    assert h100["rank"] in (1, 2, 3)
    assert l4["is_on_pareto_front"]
    # A GPU without bf16, and without a price.
    assert t4["candidate"]["precision"] == "fp16"
    assert (t4["cost"], t4["rank"]) == (None, None)
    assert unknown["fits"] is False
    assert "not published" in unknown["why_not"]
    assert l4["grade"] == "predicted"
    # Measured in a study of this very workload.
    assert (h100["grade"], h100["samples_per_second"]) == ("measured", pytest.approx(5000.0))
    several = ("--gpu", "l4", "--price", "l4=0.70EUR", "--precision", "bf16", "--gpus", "1,2")
    of_two = run_process(*_SMALL, *several, "--storage", storage, "--json", folder=tmp_path).document
    (two,) = [row for row in of_two["gpus"] if row["gpus"] == 2]
    assert two["candidate"]["ranks"] == 2
    assert two["candidate"]["per_device_train_batch_size"] <= 32
    assert two["price_per_hour"] == pytest.approx(1.4)
    assert two["samples_per_second_interval"][1] / two["samples_per_second_interval"][0] > 2.5


def test_adapters_are_compared_over_weights_that_every_gpu_computes_with(tmp_path: Path) -> None:
    """The Turing card has no bf16, and no flash attention for weights in 16 bits."""
    pytest.importorskip("peft", reason="peft is not installed")
    # The layer is as wide as those of the whole model.
    config = {**resolve_model("llama-3.2-1b").config, "num_hidden_layers": 1}
    (tmp_path / "wide").mkdir()
    (tmp_path / "wide" / "config.json").write_text(json.dumps(config))
    adapted = ("--model", "./wide", "--peft", "lora", "--seq-len", "64")
    few = ("--effective-batch", "8", "--batch-multiple", "8", "--gpu", "rtx-4090,t4", "--json")
    few = (*few, "--gradient-checkpointing", "off")
    document = run_process("advise", *adapted, *few, folder=tmp_path).document
    assert document["workload"]["dtype"] == "float16"
    # Each as if it were alone.
    ada, turing = run_process("predict", *adapted, *few, folder=tmp_path).document["gpus"]
    assert [gpu["workload"]["dtype"] for gpu in (ada, turing)] == ["bfloat16", "float16"]
    assert {arm["precision"] for arm in ada["arms"]} == {"bf16", "fp32"}
    (of_turing,) = [row for row in document["gpus"] if row["gpu"] == "t4"]
    assert of_turing["candidate"]["precision"] == turing["best"]["precision"] == "fp16"
    assert of_turing["samples_per_second"] == pytest.approx(turing["best"]["samples_per_second"])


def test_a_precision_that_not_all_gpus_have_is_asked_of_adapters(tmp_path: Path) -> None:
    """GPUs that have none that is asked for decide nothing; others have their weights in one dtype."""
    pytest.importorskip("peft", reason="peft is not installed")
    config = {**resolve_model("llama-tiny").config, "torch_dtype": "bfloat16"}
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "config.json").write_text(json.dumps(config))
    small = ("--model", "./half", "--seq-len", "16", "--effective-batch", "8", "--gradient-checkpointing", "off")
    asked = ("advise", *small, "--peft", "lora", "--lora-rank", "4", "--gpu", "l4,t4", "--json")
    document = run_process(*asked, "--precision", "bf16", folder=tmp_path).document
    assert document["workload"]["dtype"] == "bfloat16"
    assert {row["gpu"]: "candidate" in row for row in document["gpus"]} == {"l4": True, "t4": False}
    assert document["gpus"][1]["why_not"] == "nothing is predicted for it: it has no bf16"
    refused = run_process(*asked, "--precision", "bf16,fp16", folder=tmp_path)
    check_error(
        refused, 2, "--precision bf16", "float16 weights", "since t4 has no bf16", "leave bf16 out", "--dtype float32"
    )
    none = run_process("advise", *small, "--gpu", "t4,v100-16gb", "--precision", "bf16,tf32", folder=tmp_path)
    check_error(none, 2, "--precision bf16,tf32: t4, v100-16gb have no such precision", "name others, or other GPUs")


def test_a_step_may_be_said_in_tokens(tmp_path: Path) -> None:
    words = ("--gpu", "l4", "--precision", "bf16", "--gradient-checkpointing", "off", "--json")
    asked = ("advise", "--model", "bert-tiny", "--seq-len", "64", *words)
    samples, tokens = (
        run_process(*asked, *step, folder=tmp_path)
        for step in (("--effective-batch", "64"), ("--effective-tokens", "4096"))
    )
    assert tokens.code == 0, tokens.stderr
    assert tokens.stdout == samples.stdout
    refused = run_process(*asked, "--effective-tokens", "4096", "--gpus", "3", folder=tmp_path)
    assert "--effective-tokens 4096 cannot be shared equally by 3 devices" in refused.stderr


def test_several_gpus_have_room_for_ddps_buckets_once() -> None:
    """20 GiB and gradients of 2 GiB need 22 on each of two; a search leaves out a third copy of them."""
    ceiling, arm = Ceiling(None, 24 * GIB, 0, Headroom(size_bytes=GIB)), Arm("bf16")
    predicted = MemoryPrediction(8, 1, 0, 20 * GIB, 20 * GIB, False, True, {})
    counted = Operations((), {"forward": 1, "backward": 1, "recomputation": 0}, 1, 2 * GIB)
    model = MemoryModel(ceiling)
    model.add(Question(arm, ((8, 1),), None), PredictionAnswer((predicted,), None, counted))
    job: Any = SimpleNamespace(
        prepared=SimpleNamespace(space=Space((arm,), Batches(16, multiple=8))), models={True: model}
    )
    known, _ = _fitting_steps(CHIPS["rtx-4090"], 2, job, ceiling)
    assert [step.candidate.per_device_train_batch_size for step in known] == [8]
    tight = Ceiling(None, 23 * GIB, 0, Headroom(size_bytes=GIB))
    assert _fitting_steps(CHIPS["rtx-4090"], 2, job, tight) == ([], 22 * GIB)


def test_the_prices_of_others_are_said_to_be_examples() -> None:
    prices = read_prices((), None, NAMES)
    assert len(EXAMPLES) >= 12
    assert prices.unit == "USD"
    assert "examples" in prices.source
    assert "2026" in prices.source


def test_prices_come_from_a_file_and_from_options(tmp_path: Path) -> None:
    path = tmp_path / "prices.json"
    path.write_text(json.dumps({"h100": 2.5, "l4": 0.7}))
    prices = read_prices(("h100=2.95",), str(path), NAMES)
    assert prices.of == {"h100-80gb": 2.95, "l4": 0.7}


def test_prices_have_one_unit() -> None:
    assert read_prices(("h100=2eur", "l4=1EUR"), None, NAMES).unit == "EUR"


def test_messages_of_prices_that_are_refused() -> None:
    lines = (
        "h100=0 | h100 | h100=cheap | voodoo-2=3 | h100=-2 | h100=nan | =2 | h10=2 | h100=2EUR l4=1USD | h100=2EUR l4=1"
    )
    check_refusals("prices", {line: partial(read_prices, line.split(), None, NAMES) for line in lines.split(" | ")})


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("advise", "--effective-batch", "8"), "--model"),
        (("advise", "--model", "bert-tiny"), "--effective-batch"),
        ((*_SMALL, "--gpu", "h1000"), "h1000"),
        ((*_SMALL, "--samples", "0"), "0"),
        ((*_SMALL, "--gpus", "0"), "whole number"),
        ((*_SMALL, "--gpus", "3"), "cannot be shared equally by 3 devices"),
        ((*_SMALL, "--price", "h100=0"), "not above 0"),
    ],
)
def test_what_is_missing_or_wrong_is_named(words: tuple[str, ...], told: str, run: Run) -> None:
    check_error(run(*words), 2, told)
