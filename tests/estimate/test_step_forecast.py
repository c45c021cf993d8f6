"""Test predicted step times of a search's candidates, and the names of chips and kernels."""

import pytest
from recorded_steps import Subject, operations_key, recorded_operations

from autotune.core.candidate import Arm, Candidate
from autotune.core.ceiling import Ceiling
from autotune.core.kernel_kinds import kind_of_kernel
from autotune.core.prediction import MemoryPrediction, Operations, PredictionAnswer
from autotune.core.schema import decode
from autotune.core.units import GIB
from autotune.devices.gpus import CHIPS, chip_of_device
from autotune.estimate.memory import MemoryModel, Question
from autotune.estimate.step_time import StepForecast

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
