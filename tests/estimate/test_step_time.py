"""Test predicted GPU times and step times against those recorded on an H200, without GPU or torch.

Those of several ranks exchange gradients behind the backward pass, over links of different rates.
"""

import json
import statistics
from dataclasses import replace

import pytest
from published import FITTED, calibrated_errors, is_inside, published_predictions
from recorded_steps import PUBLISHED, Subject, operations_key, recorded_operations
from several_gpus import exchanges, grids, several
from step_times import H200, cells, known_steps

from autotune.core.candidate import Arm, Candidate, Strategy
from autotune.core.ceiling import Ceiling
from autotune.core.device import Calibration, Collective
from autotune.core.errors import InvalidRequestError
from autotune.core.outcome import kind_of_kernel
from autotune.core.prediction import MemoryPrediction, Operation, Operations, PredictionAnswer
from autotune.core.units import GIB
from autotune.devices.gpus import ALIASES, CHECKED_AGAINST, CHIPS, chip_of_device, find_chip
from autotune.estimate.gpu_time import EFFICIENCIES, GpuModel, calibrated
from autotune.estimate.memory import MemoryModel, Question
from autotune.estimate.step_time import HostSpeed, StepForecast, StepTimeModel, exchange, gathering

BERT_LARGE = Subject("bert-large-uncased", 512)
BF16 = Arm("bf16")


@pytest.fixture(scope="module")
def bert_large() -> Operations:
    return recorded_operations()[operations_key(BERT_LARGE, BF16)]


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
    half, tf32, single = (GpuModel(H200.rates, precision) for precision in ("bf16", "tf32", "fp32"))
    aligned, odd = (product(512, columns, 768) for columns in (50264, 50265))
    assert half.seconds(odd, 8) > 3 * half.seconds(aligned, 8)
    aligned, odd = (product(512, columns, 768, "float32") for columns in (50264, 50265))
    assert tf32.seconds(odd, 8) > 2 * tf32.seconds(aligned, 8)
    # Without tensor cores elements are loaded one by one.
    assert single.seconds(odd, 8) < 1.01 * single.seconds(aligned, 8)


def test_tiles_come_in_waves() -> None:
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


CHECKPOINTED, TF32 = Arm("bf16", True), Arm("tf32")


BATCHES = (8, 16, 32, 64)


@pytest.fixture(scope="module")
def forecast() -> StepForecast:
    """BERT-large at 512 tokens on an H200, where every batch fits."""
    recorded = recorded_operations()
    model = MemoryModel(Ceiling(None, 139 * GIB, 0))
    for arm in (BF16, CHECKPOINTED, TF32):
        operations = recorded[operations_key(BERT_LARGE, arm)]
        rows = tuple(
            MemoryPrediction(batch, 64 // batch, 0, batch * GIB, batch * GIB, False, True, {}) for batch in BATCHES
        )
        model.add(Question(arm, (), None), PredictionAnswer(rows, None, operations))
    return StepForecast(model, CHIPS["h200"])


def test_arms_are_ordered_as_they_were_measured(forecast: StepForecast) -> None:
    # 297, 240 and 121 samples a second on an H200.
    speeds = [
        forecast.predicted(candidate).samples_per_second
        for candidate in (Candidate(BF16, 32, 2), Candidate(CHECKPOINTED, 64, 1), Candidate(TF32, 16, 4))
    ]
    assert speeds == sorted(speeds, reverse=True)


def test_nothing_is_predicted_of_what_was_not_traced(forecast: StepForecast) -> None:
    assert forecast.predicted(Candidate(Arm("fp32", attn_implementation="eager"), 8)) is None
    assert forecast.predicted(Candidate(Arm("bf16", torch_compile=True), 8)) is None
    assert forecast.predicted(Candidate(Arm("bf16", use_liger_kernel=True), 8)) is None


def test_chips_are_known_by_what_drivers_call_them() -> None:
    assert chip_of_device("NVIDIA H200") is CHIPS["h200"]
    assert chip_of_device("NVIDIA A100-SXM4-80GB") is CHIPS["a100-80gb"]
    assert chip_of_device("Voodoo 2") is None


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT", "matrix_product"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>", "attention_backward"),
        ("fmha_cutlassF_f32_aligned_64x64_rf_sm80(...)", "attention"),
        ("fmha_cutlassB_f32_aligned_64x64_k64_sm80(...)", "attention_backward"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x64", "attention_backward"),
        ("void cudnn::fusion::convert_dq_to_16bits<true>(void const*, void*)", "attention_backward"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>", "normalisation"),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float>", "softmax"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "reduction"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdam>", "fused_update"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl>", "elementwise"),
        ("Memset (Device)", "fill"),
    ],
)
def test_kernels_are_classed_by_name(kernel: str, kind: str) -> None:
    assert kind_of_kernel(kernel) == kind


def candidate(ranks: int, batch: int = 16, accumulation: int = 1, strategy: Strategy = "ddp") -> Candidate:
    return Candidate(Arm("bf16", strategy=strategy, ranks=ranks), batch, accumulation)


def test_recorded_and_published_steps_of_several_gpus_are_in_their_intervals() -> None:
    every = several()
    assert len(every) >= 30
    assert sum(known.is_inside for known in every) >= 0.85 * len(every)
    own = [known for known in every if known.gpu == "h200"]
    assert all(known.is_inside for known in own)
    limited_by_gpu = own[0]
    expected, _, _ = limited_by_gpu.expected
    assert expected == pytest.approx(limited_by_gpu.measured, rel=0.05)


def test_a_ring_sends_each_gradient_less_than_twice(bert_large: Operations) -> None:
    two, eight = (exchange(bert_large, CHIPS["h200"], ranks).exchanged for ranks in (2, 8))
    # 1.34 GB over 450 GB/s, of which 80 % are reached.
    assert two == pytest.approx(1.34e9 / (0.8 * 450e9), rel=0.4)
    assert 1.4 < eight / two < 1.75


def test_the_backward_pass_hides_the_exchange_but_for_its_last_bucket(bert_large: Operations) -> None:
    known = exchange(bert_large, CHIPS["rtx-4090"], 2)
    assert known.added_seconds(10.0) == pytest.approx(known.copies + known.shown)
    assert known.added_seconds(0.0) == pytest.approx(known.copies + known.exchanged)
    assert known.added_seconds(10.0, overlaps=False) == known.added_seconds(0.0)


def test_a_slow_link_limits_small_batches(bert_large: Operations) -> None:
    slow, fast = (StepTimeModel(CHIPS[name]) for name in ("rtx-2080-ti", "h200"))
    assert slow.predict(bert_large, candidate(8, 1)).limited_by == "network"
    assert fast.predict(bert_large, candidate(8, 1)).limited_by == "host"


def test_several_ranks_train_more_samples_and_are_known_less_well(bert_large: Operations) -> None:
    model = StepTimeModel(CHIPS["h200"])
    one, two = model.predict(bert_large, Candidate(Arm("bf16"), 32)), model.predict(bert_large, candidate(2, 32))
    assert 1.6 < two.samples_per_second / one.samples_per_second < 2
    assert two.scaling_efficiency == pytest.approx(two.samples_per_second / one.samples_per_second / 2)
    assert one.scaling_efficiency is None
    assert two.interval_seconds[1] / two.interval_seconds[0] > one.interval_seconds[1] / one.interval_seconds[0]


def test_recorded_steps_of_two_h200_are_in_their_intervals() -> None:
    every = grids()
    assert {known.candidate.arm.strategy for known in every} == {"ddp", "fsdp", "fsdp-keep"}
    assert len({known.model for known in every}) == 4
    # The one outside used 98 % of the memory that it was allowed.
    outside = [(known.model, known.candidate.arm.sync_each_batch) for known in every if not known.is_inside]
    assert outside == [("Llama-3.2-1B", True)]
    # GPT-2 medium is the only one of the four that trains faster sharded, as is predicted.
    gpt2 = [known for known in every if known.model == "gpt2-medium"]
    fastest = max(gpt2, key=lambda known: known.measured)
    assert fastest == max(gpt2, key=lambda known: known.expected[0])
    assert fastest.candidate.arm.is_sharded


def test_strategies_are_predicted_in_the_order_that_was_measured(bert_large: Operations) -> None:
    model = StepTimeModel(CHIPS["h200"])
    speeds = [
        model.predict(bert_large, candidate(2, 32, 1, strategy)).samples_per_second
        for strategy in ("ddp", "fsdp-keep", "fsdp")
    ]
    # 536, 371 and 327 samples a second on two H200.
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[0] > 1.1 * speeds[1]


def test_weights_are_gathered_in_every_micro_step_and_gradients_reduced_once(bert_large: Operations) -> None:
    def seconds(strategy: Strategy, accumulation: int, **changes: bool) -> float:
        one = candidate(2, 8, accumulation, strategy)
        return gathering(bert_large, CHIPS["rtx-4090"], replace(one, arm=replace(one.arm, **changes))).exchanged

    once = seconds("fsdp-keep", 1) / 2
    assert seconds("fsdp", 1) == pytest.approx(3 * once)
    assert seconds("fsdp", 4) == pytest.approx(9 * once)
    assert seconds("fsdp", 4, sync_each_batch=True) == pytest.approx(12 * once)
    # 0.67 GB of bf16 weights, of which the other rank has half.
    link = CHIPS["rtx-4090"].rates.link  # type: ignore[union-attr]
    assert once == pytest.approx(0.335e9 / (link.cases(None)[1].bytes_per_second), rel=0.1)
    known = gathering(bert_large, CHIPS["rtx-4090"], candidate(2, 8, 1, "fsdp"))
    assert known.added_seconds(10.0) == known.shown < known.added_seconds(0.0) == known.exchanged


def test_a_measured_exchange_stands_for_the_rate_of_the_link(bert_large: Operations) -> None:
    times = {
        "all_reduce": Collective(1e-4, 100e9),
        "all_gather": Collective(0.0, 50e9),
        "group_gather": Collective(0.0, 20e9),
    }
    chip = calibrated(CHIPS["h200"], replace(measured(), collectives=times))
    size = bert_large.gradient_bytes
    buckets = -(-size // (25 * 2**20))
    assert exchange(bert_large, chip, 4).exchanged == pytest.approx(buckets * 1e-4 + 1.5 * size / 100e9)
    # Gathered once, reduced once, in 16 bits; within groups, and then summed up between them.
    keep, hybrid = (replace(candidate(4, 8, 1, name).arm, dp_shard_size=shared) for name, shared in
                    (("fsdp-keep", None), ("hybrid", 2)))  # fmt: skip
    assert gathering(bert_large, chip, Candidate(keep, 8)).exchanged == pytest.approx(2 * 0.75 * size / 2 / 50e9)
    units = bert_large.gradient_tensors // 12
    within, between = 3 * 0.5 * size / 2 / 20e9, units * 1e-4 + size / 2 / 2 / 100e9
    assert gathering(bert_large, chip, Candidate(hybrid, 8)).exchanged == pytest.approx(within + between)


def test_exchanges_of_h200s_are_predicted_from_what_was_measured_of_two_sizes() -> None:
    errors = [abs(predicted / seconds - 1) for *_, seconds, predicted, _ in exchanges()]
    assert len(errors) == 35
    assert statistics.median(errors) < 0.05
    assert max(errors) < 0.15


def test_gpus_that_are_not_put_into_one_host_are_refused(bert_large: Operations) -> None:
    chip = CHIPS["gh200-96gb"]
    with pytest.raises(InvalidRequestError, match="gh200"):
        exchange(bert_large, chip, 2)
    model = StepTimeModel(chip)
    assert (model.knows(Arm()), model.knows(candidate(2).arm)) == (True, False)
    linked = replace(chip.rates, link=CHIPS["h200"].rates.link)  # type: ignore[union-attr]
    assert exchange(bert_large, replace(chip, rates=linked), 2).exchanged > 0


SIZE = 4096


def measured(**flops: float) -> Calibration:
    return Calibration(SIZE, flops, None, 2e-6, 4e-6)


def seconds(name: str, precision: str, calibration: Calibration | None) -> float:
    """Predicted seconds of the product that is measured."""
    dtype = "float16" if precision == "fp16" else "float32"
    product = Operation("forward", "matrix_product", dtype, (0, 0), (0, 0), ((0, 1), *[(0, SIZE)] * 3), 1)
    return GpuModel(calibrated(CHIPS[name], calibration).rates, precision).seconds(product, 1)  # type: ignore[arg-type]


def test_a_measured_product_is_predicted_as_it_was_measured() -> None:
    known = measured(half=200e12, tf32=116e12, fp32=18e12)
    for precision, flops in (("fp16", 200e12), ("tf32", 116e12), ("fp32", 18e12)):
        assert seconds("a100-80gb", precision, known) == pytest.approx(2 * SIZE**3 / flops, rel=0.02)


def test_what_was_not_measured_or_is_not_believed_stays() -> None:
    plain = seconds("a100-80gb", "fp16", None)
    assert seconds("a100-80gb", "fp16", measured(tf32=116e12)) == plain
    assert seconds("a100-80gb", "fp16", measured(half=20e12)) == plain
    chip = CHIPS["h200"]
    assert calibrated(chip, measured(half=500e12)) is chip


def test_published_micro_benchmarks_correct_published_throughputs() -> None:
    for precision, before, after in calibrated_errors():
        if precision == "fp16":
            assert after < before + 0.02
        else:
            assert after < before
