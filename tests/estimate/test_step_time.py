"""Test predicted GPU times and step times against those recorded on an H200, without GPU or torch."""

import json
import statistics
from dataclasses import replace

import pytest
from published import FITTED, is_inside, published_predictions
from recorded_steps import PUBLISHED, Subject, operations_key, recorded_operations
from step_times import H200, cells, known_steps

from autotune.core.candidate import Arm, Candidate
from autotune.core.errors import InvalidRequestError
from autotune.core.prediction import Operation, Operations
from autotune.core.schema import decode
from autotune.devices.gpus import ALIASES, CHECKED_AGAINST, CHIPS, find_chip
from autotune.estimate.gpu_time import EFFICIENCIES, GpuModel
from autotune.estimate.step_time import HostSpeed, StepTimeModel

BERT_LARGE = Subject("bert-large-uncased", 512)
BF16 = Arm("bf16")


@pytest.fixture(scope="module")
def bert_large() -> Operations:
    return decode(recorded_operations()[operations_key(BERT_LARGE, BF16)], Operations)


def test_recorded_gpu_times_are_predicted() -> None:
    measured, limited = cells(known_steps())
    assert len({cell.subject.model for cell in measured}) >= 10
    errors = sorted(abs(cell.predicted(EFFICIENCIES) / cell.seconds - 1) for cell in measured)
    assert statistics.median(errors) < 0.02
    assert errors[int(0.9 * len(errors))] < 0.06
    others = [abs(cell.predicted(EFFICIENCIES) / cell.seconds - 1) for cell in limited]
    assert statistics.median(others) < 0.04


def test_intervals_hold_the_recorded_steps_and_those_that_the_gpu_limits_are_near() -> None:
    model = StepTimeModel(H200)
    known = [(step.step_seconds, model.predict(operations, step.candidate)) for step, operations in known_steps()]
    inside = [low <= seconds <= high for seconds, predicted in known for low, high in [predicted.interval_seconds]]
    assert sum(inside) / len(inside) > 0.95
    errors = [abs(p.seconds / seconds - 1) for seconds, p in known if p.limited_by == "matrix products"]
    assert statistics.median(errors) < 0.04


def test_published_throughputs_of_other_gpus_are_in_their_intervals() -> None:
    others = [pair for pair in published_predictions() if pair[0].gpu != FITTED]
    assert len(others) >= 100
    assert len({known.gpu for known, _ in others}) >= 18
    assert sum(map(is_inside, others)) >= 0.95 * len(others)


def test_published_throughputs_have_source_date_and_settings() -> None:
    document = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    used = {row[document["columns"].index("source")] for row in document["rows"]}
    assert used == set(document["sources"])
    for source in document["sources"].values():
        assert source["address"].startswith("https://")
        assert source["title"]
        assert source["date"]
        assert source["settings"]
        assert source["comparable"] in ("stock", "near")


def test_tensor_cores_that_sum_at_half_rate_reach_all_of_it(bert_large: Operations) -> None:
    geforce, workstation = CHIPS["rtx-4090"], CHIPS["rtx-6000-ada"]
    assert geforce.rates.sums_at_half_rate
    assert not workstation.rates.sums_at_half_rate
    product = Operation("forward", "matrix_product", "float16", (0, 0), (0, 0), ((0, 1), *[(0, 8192)] * 3), 1)
    for rates, least in ((geforce.rates, 0.95), (workstation.rates, 0.75)):
        flops = 2 * 8192**3 / GpuModel(rates, "fp16").seconds(product, 1)
        assert least < flops / rates.half_flops < least + 0.1


def test_what_limits_is_told(bert_large: Operations) -> None:
    model = StepTimeModel(H200)
    large, small = (model.predict(bert_large, Candidate(BF16, batch, 1)) for batch in (32, 1))
    assert large.limited_by == "matrix products"
    assert small.limited_by == "host"
    assert small.gpu_seconds < 0.5 * small.seconds
    assert 0 < small.utilisation < large.utilisation < 1
    low, high = large.interval_samples_per_second
    assert low < large.samples_per_second < high


def test_a_slower_host_only_matters_where_it_limits(bert_large: Operations) -> None:
    slow, usual = (StepTimeModel(H200, host) for host in (HostSpeed().scaled(1.5), HostSpeed()))
    small, large = Candidate(BF16, 2), Candidate(BF16, 64)
    assert slow.predict(bert_large, small).seconds > 1.4 * usual.predict(bert_large, small).seconds
    assert slow.predict(bert_large, large).seconds < 1.06 * usual.predict(bert_large, large).seconds


def test_the_interval_is_wider_on_a_chip_that_was_not_measured(bert_large: Operations) -> None:
    def width(name: str) -> float:
        low, high = StepTimeModel(CHIPS[name]).predict(bert_large, Candidate(BF16, 32)).interval_seconds
        return high / low

    assert width("rtx-3090") > 1.5 * width("h200")


def product(rows: int, columns: int, inner: int, dtype: str = "bfloat16") -> Operation:
    """A matrix product whose rows are the samples."""
    return Operation(
        "forward",
        "matrix_product",
        dtype,
        (2 * rows * columns * inner, 0),
        (0, 0),
        ((0, 1), (rows, 0), (0, columns), (0, inner)),
        1,
    )


def test_a_row_that_is_not_aligned_makes_a_product_slow() -> None:
    assert H200.rates is not None
    half, tf32, single = (GpuModel(H200.rates, precision) for precision in ("bf16", "tf32", "fp32"))
    aligned, odd = (product(512, columns, 768) for columns in (50264, 50265))
    assert half.seconds(odd, 8) > 3 * half.seconds(aligned, 8)
    aligned, odd = (product(512, columns, 768, "float32") for columns in (50264, 50265))
    assert tf32.seconds(odd, 8) > 2 * tf32.seconds(aligned, 8)
    # Without tensor cores elements are loaded one by one.
    assert single.seconds(odd, 8) < 1.01 * single.seconds(aligned, 8)


def test_tiles_come_in_waves() -> None:
    assert H200.rates is not None
    model = GpuModel(H200.rates, "bf16")
    # 132 tiles of 256 × 128 keep each multiprocessor busy once; one more needs a second wave, or smaller tiles.
    full, more = (model.seconds(product(rows, 512, 4096), 1) for rows in (256 * 33, 256 * 33 + 1))
    assert 1.1 * full < more


def test_a_chip_without_tf32_computes_float32_instead() -> None:
    rates = CHIPS["v100-16gb"].rates
    assert rates.tf32_flops is None
    operation = product(512, 1024, 1024, "float32")
    assert GpuModel(rates, "tf32").seconds(operation, 8) == GpuModel(rates, "fp32").seconds(operation, 8)


def test_the_catalog_names_a_source_for_each_chip_with_rates() -> None:
    known = [chip for chip in CHIPS.values() if chip.rates is not None]
    assert len(known) >= 25
    assert set(CHECKED_AGAINST) <= {chip.name for chip in known}
    assert {chip.name for chip in known} - set(CHECKED_AGAINST) == {"rtx-4070", "rtx-5070-ti", "rtx-5080", "h100-nvl"}
    for chip in known:
        assert chip.rates.source
        assert chip.rates.half_flops > chip.rates.fp32_flops > 0
        assert chip.rates.power_watts > 0
        assert 1e11 < chip.rates.bandwidth_bytes_per_second < 1e13
        assert (chip.rates.tf32_flops is not None) == (chip.capability >= (8, 0))
    assert {find_chip(name, CHIPS) for name in ALIASES} <= set(CHIPS.values())
    assert find_chip("H100", CHIPS) is CHIPS["h100-80gb"]
    for name in ("RTX 4090", "rtx4090", "NVIDIA GeForce RTX 4090"):
        assert find_chip(name, CHIPS) is CHIPS["rtx-4090"]
    with pytest.raises(InvalidRequestError, match="'voodoo-2' is not known"):
        find_chip("voodoo-2", CHIPS)


def test_the_share_of_operations_of_no_known_kind_is_told(bert_large: Operations) -> None:
    candidate = Candidate(BF16, 16, 4)
    plain = StepTimeModel(H200).predict(bert_large, candidate)
    assert plain.unknown_operations == {}
    assert plain.unknown_share == 0
    scan = Operation("forward", "unknown", "float32", (0, 0), (2**24, 0), (), 24)
    traced = replace(bert_large, rows=(*bert_large.rows, scan), unknown={"notes::scan": 24})
    step = StepTimeModel(H200).predict(traced, candidate)
    assert step.unknown_operations == {"notes::scan": 24}
    assert step.unknown_share == pytest.approx(1 - plain.gpu_seconds / step.gpu_seconds)
