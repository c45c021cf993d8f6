"""What a search makes of predicted step times: where it begins, what it leaves out, and when it trusts them."""

import pytest
from recorded import measurement
from recorded_steps import Subject, operations_key, recorded_operations

from autotune.core.candidate import Arm, Candidate
from autotune.core.ceiling import Ceiling
from autotune.core.kernel_kinds import kind_of_kernel
from autotune.core.outcome import Completed
from autotune.core.prediction import MemoryPrediction, Operations, PredictionAnswer
from autotune.core.schema import decode
from autotune.core.units import GIB
from autotune.devices.gpus import CHIPS, chip_of_device
from autotune.estimate.history import History, Tried
from autotune.estimate.memory import MemoryModel, Question
from autotune.estimate.step_forecast import StepForecast
from autotune.estimate.throughput import Speeds
from autotune.space.space import Batches, Space

BF16, CHECKPOINTED, TF32 = Arm("bf16"), Arm("bf16", True), Arm("tf32")


BATCHES = (8, 16, 32, 64)


@pytest.fixture(scope="module")
def memory() -> MemoryModel:
    """BERT-large at 512 tokens, of which every batch fits."""
    recorded = recorded_operations()
    model = MemoryModel(Ceiling(None, 139 * GIB, 0))
    for arm in (BF16, CHECKPOINTED, TF32):
        operations = decode(recorded[operations_key(Subject("bert-large-uncased", 512), arm)], Operations)
        rows = tuple(
            MemoryPrediction(batch, 64 // batch, 0, batch * GIB, batch * GIB, False, True, {}) for batch in BATCHES
        )
        model.add(Question(arm, (), None), PredictionAnswer(rows, None, operations))
    return model


@pytest.fixture(scope="module")
def forecast(memory: MemoryModel) -> StepForecast:
    """The same on an H200."""
    return StepForecast(memory, CHIPS["h200"])


def speeds(memory: MemoryModel, forecast: StepForecast | None, *measured: tuple[Candidate, float]) -> Speeds:
    """After trials with so many samples a second."""
    history = History(Ceiling(None, 139 * GIB, 0), memory=memory, steps=forecast)
    for candidate, samples_per_second in measured:
        outcome = Completed(measurement(candidate, 64 / samples_per_second, GIB, GIB))
        history.tried.append(Tried(f"{len(history.tried)}", candidate, outcome))
    return Speeds(Space((TF32, CHECKPOINTED, BF16, Arm("bf16", torch_compile=True)), Batches(64)), history)


def test_arms_come_by_predicted_speed_and_others_keep_their_places(memory: MemoryModel, forecast: StepForecast) -> None:
    compiled = Arm("bf16", torch_compile=True)
    assert speeds(memory, forecast).in_order(BATCHES) == [BF16, CHECKPOINTED, TF32, compiled]
    assert speeds(memory, None).in_order(BATCHES) == [TF32, CHECKPOINTED, BF16, compiled]


def test_a_precision_that_is_never_faster_comes_after_the_other(memory: MemoryModel) -> None:
    """A slow trial in bf16 corrects what is predicted of bf16, and nothing of fp16."""
    corrected = StepForecast(memory, CHIPS["h200"])
    corrected.learn(Candidate(BF16, 32, 2), 100.0)
    fp16, fp16_checkpointed = Arm("fp16"), Arm("fp16", True)
    assert (corrected.samples_per_second(Candidate(fp16_checkpointed, 32, 2)) or 0) > (
        corrected.samples_per_second(Candidate(CHECKPOINTED, 32, 2)) or 0
    )
    history = History(Ceiling(None, 139 * GIB, 0), memory=memory, steps=corrected)
    of_four = Speeds(Space((fp16_checkpointed, fp16, BF16, CHECKPOINTED), Batches(64)), history)
    order = of_four.in_order(BATCHES)
    assert order.index(BF16) < order.index(fp16)
    assert order.index(CHECKPOINTED) < order.index(fp16_checkpointed)


def test_an_arm_is_left_out_by_a_prediction_that_held(memory: MemoryModel, forecast: StepForecast) -> None:
    held = speeds(memory, forecast, (Candidate(BF16, 32, 2), 297.0))
    why = held.left_out(CHECKPOINTED)
    assert why is not None
    assert "predicted to reach" in why
    assert "297.0 were measured" in why
    assert held.is_predicted_slower(held.view(BF16), 16, than=32)
    # Its own batches without accumulation may still be faster.
    assert held.left_out(BF16) is None


def test_where_predictions_are_wrong_everything_is_measured(memory: MemoryModel, forecast: StepForecast) -> None:
    wrong = speeds(memory, forecast, (Candidate(BF16, 32, 2), 500.0))
    assert wrong.left_out(CHECKPOINTED) is None
    assert not wrong.is_predicted_slower(wrong.view(BF16), 16, than=32)
    unknown = speeds(memory, None, (Candidate(BF16, 32, 2), 297.0))
    assert unknown.left_out(CHECKPOINTED) is None


def test_arms_are_ordered_as_they_were_measured(forecast: StepForecast) -> None:
    # 297, 240 and 121 samples a second on an H200.
    speeds = [
        forecast.samples_per_second(candidate)
        for candidate in (Candidate(BF16, 32, 2), Candidate(CHECKPOINTED, 64, 1), Candidate(TF32, 16, 4))
    ]
    assert speeds == sorted(speeds, key=lambda speed: -(speed or 0))


def test_nothing_is_predicted_of_what_was_not_traced(forecast: StepForecast) -> None:
    assert forecast.samples_per_second(Candidate(Arm("fp32", attn_implementation="eager"), 8)) is None
    assert forecast.samples_per_second(Candidate(Arm("bf16", torch_compile=True), 8)) is None
    assert forecast.most([Candidate(BF16, 8), Candidate(Arm("bf16", use_liger_kernel=True), 8)]) is None


def test_predictions_hold_while_all_that_was_measured_is_in_its_interval(forecast: StepForecast) -> None:
    near, far = (Candidate(BF16, 32, 2), 297.0), (Candidate(TF32, 16, 4), 20.0)
    assert forecast.has_held([near])
    assert not forecast.has_held([near, far])
    # Nothing was measured, or nothing of which there is a prediction.
    assert not forecast.has_held([])
    assert not forecast.has_held([(Candidate(Arm("bf16", torch_compile=True), 8), 100.0)])


def test_a_measured_step_corrects_those_of_its_arm_and_of_its_precision(memory: MemoryModel) -> None:
    forecast = StepForecast(memory, CHIPS["h200"])
    small, large, other, tf32 = (
        Candidate(BF16, 16, 4), Candidate(BF16, 32, 2), Candidate(CHECKPOINTED, 64, 1), Candidate(TF32, 16, 4)
    )  # fmt: skip
    before = {each: forecast.predicted(each) for each in (small, large, other, tf32)}
    measured = before[large].samples_per_second / 1.05  # type: ignore[union-attr]
    forecast.learn(large, measured)
    for each, spread in ((small, 1.07), (large, 1.07), (other, 1.09)):
        corrected, plain = forecast.step(each), before[each]
        assert corrected.seconds == pytest.approx(1.05 * plain.seconds)
        low, high = corrected.interval_seconds
        assert low == pytest.approx(corrected.seconds / spread)
        assert high == pytest.approx(corrected.seconds * spread)
    assert forecast.step(tf32) == before[tf32]
    # Whether predictions held is asked of those before the correction.
    assert forecast.has_held([(large, measured)])
    assert not forecast.has_held([(large, measured / 1.5)])


def test_what_the_host_limits_is_corrected_by_what_the_host_limits(memory: MemoryModel) -> None:
    forecast = StepForecast(memory, CHIPS["h200"])
    waits, computes = Candidate(BF16, 1, 1), Candidate(BF16, 32, 2)
    plain = forecast.predicted(waits)
    assert plain.limited_by == "host"
    forecast.learn(computes, 200.0)
    assert forecast.step(waits) == plain
    forecast.learn(waits, plain.samples_per_second / 1.6)
    corrected = forecast.step(Candidate(TF32, 1, 1))
    predicted = forecast.predicted(Candidate(TF32, 1, 1))
    assert corrected.seconds == pytest.approx(1.6 * predicted.seconds)


def test_other_gpus_stay_less_known_after_a_measurement(memory: MemoryModel) -> None:
    def width(name: str) -> float:
        forecast = StepForecast(memory, CHIPS[name])
        forecast.learn(Candidate(BF16, 32, 2), 100.0)
        corrected = forecast.step(Candidate(BF16, 16, 4))
        return corrected.interval_seconds[1] / corrected.seconds

    assert width("h200") == pytest.approx(1.07)
    assert width("a100-80gb") == pytest.approx(1.4)


def test_a_trial_that_ends_corrects_the_predictions(memory: MemoryModel) -> None:
    forecast = StepForecast(memory, CHIPS["h200"])
    history = History(Ceiling(None, 139 * GIB, 0), steps=forecast)
    candidate = Candidate(BF16, 32, 2)
    history.add(Tried("0", candidate, Completed(measurement(candidate, 64 / 250.0, GIB, GIB))))
    assert forecast.samples_per_second(candidate) == pytest.approx(250.0)


def test_the_upper_end_of_an_arm_is_that_of_its_fastest_batch(forecast: StepForecast) -> None:
    small, large = Candidate(CHECKPOINTED, 8, 8), Candidate(CHECKPOINTED, 64, 1)
    most = forecast.most([small, large])
    assert most == forecast.most([large])
    assert most is not None
    # What was measured without checkpointing is out of its reach.
    assert 240 < most < 297


def test_a_batch_is_surely_slower_only_by_more_than_predictions_leave_open(forecast: StepForecast) -> None:
    assert forecast.is_surely_slower(Candidate(BF16, 8, 8), Candidate(BF16, 32, 2))
    assert not forecast.is_surely_slower(Candidate(BF16, 32, 2), Candidate(BF16, 8, 8))
    assert not forecast.is_surely_slower(Candidate(CHECKPOINTED, 120, 1), Candidate(CHECKPOINTED, 128, 1))


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
