"""Test what a result is compared with besides the defaults: an expert's settings, and the GPU's rated arithmetic."""

import dataclasses

import pytest
from reported import BASELINE, BF16, SOURCE, completed, report, trial

from autotune.core.candidate import Arm, Candidate
from autotune.core.outcome import Completed, OutOfMemory
from autotune.results.html import html_page
from autotune.results.json_document import report_document
from autotune.results.report import Report, measurement
from autotune.results.study_view import expert_of, utilization
from autotune.results.text import summary_lines

CHECKPOINTED = dataclasses.replace(BF16, gradient_checkpointing=True)
GRAPHED = dataclasses.replace(BF16, cuda_graphs=True)
TF32 = Arm("tf32")
OVER = OutOfMemory("out of memory")


def search(*trials: tuple[Arm, int, Completed | OutOfMemory], best: int = 1) -> Report:
    return report(BASELINE, *(trial(n, *each) for n, each in enumerate(trials, 1)), best=best)


def test_it_is_bf16_at_the_largest_batch_that_was_measured() -> None:
    found = expert_of(
        search(
            (GRAPHED, 64, completed(400.0)),
            (BF16, 32, completed(210.0)),
            (BF16, 64, completed(200.0)),
            (TF32, 64, completed(250.0)),
        )
    )
    assert (found.candidate.arm, found.candidate.per_device_train_batch_size) == (BF16, 64)
    assert found.is_measured
    assert found.speedup == pytest.approx(2.0)


def test_an_expert_pads_to_the_longest_and_meets_every_shape() -> None:
    """The speed is that of the same epoch, new shapes included; few lengths and other attention are levers."""
    plain = completed(200.0)
    first = dataclasses.replace(plain.measurement, steady_step_seconds=plain.measurement.step_seconds / 2)
    levers = dataclasses.replace(BF16, length_multiple=64), dataclasses.replace(BF16, cudnn_attention=False)
    found = expert_of(search(*((arm, 64, completed(400.0)) for arm in levers), (BF16, 32, Completed(first))))
    assert (found.candidate.arm, found.samples_per_second) == (BF16, 200.0)
    assert found.speedup == pytest.approx(2.0)


def test_a_larger_batch_that_did_not_fit_is_none() -> None:
    found = expert_of(
        search((BF16, 16, completed(150.0, 6.0)), (BF16, 32, completed(200.0, 10.0)), (BF16, 64, OVER), best=2)
    )
    assert found.candidate.per_device_train_batch_size == 32
    assert found.is_measured
    # Of 22 samples the batch after 2 is 11: no line reaches so far, and none is needed.
    tried = {2: completed(200.0), 11: OVER}
    far = [dataclasses.replace(trial(b, BF16, b, tried[b]), candidate=Candidate(BF16, b, 22 // b)) for b in tried]
    found = expert_of(report(BASELINE, *far, best=2, effective_batch=22))
    assert "at the largest batch that fits (2 × 11" in found.describe()


def test_a_batch_that_ran_without_headroom_fits_an_expert() -> None:
    """The line is at 22.3 GiB, the limit at 24."""
    over = completed(220.0, 23.0)
    found = expert_of(search((BF16, 32, completed(200.0, 12.0)), (BF16, 64, over), best=1))
    assert (found.candidate.per_device_train_batch_size, found.samples_per_second) == (64, 220.0)
    assert found.is_measured
    assert found.speedup == pytest.approx(200 / 220)


def test_the_speed_of_a_larger_batch_that_may_fit_is_predicted() -> None:
    """Micro-steps of 16 / 150 and 32 / 200 seconds: 64 samples take 0.267 s."""
    found = expert_of(search((BF16, 16, completed(150.0, 6.0)), (BF16, 32, completed(200.0, 10.0)), best=2))
    assert found.candidate.per_device_train_batch_size == 64
    assert not found.is_measured
    assert found.samples_per_second == pytest.approx(64 / (2 * 32 / 200 - 16 / 150 + 32 / 200 - 16 / 150))
    assert "predicted" in found.describe()


@pytest.mark.parametrize("effective_batch", [64, None])
def test_no_batch_is_predicted_that_is_larger_than_the_data(effective_batch: int | None) -> None:
    tried = [trial(1, BF16, 16, completed(150.0, 6.0)), trial(2, BF16, 32, completed(200.0, 10.0))]
    found = report(BASELINE, *tried, best=2, effective_batch=effective_batch)
    source = {**SOURCE, "interface": {"samples": 63}}
    assert not expert_of(found).is_measured
    assert expert_of(dataclasses.replace(found, workload={**found.workload, "source": source})).is_measured


def test_no_speed_is_predicted_from_a_larger_batch_that_took_no_longer() -> None:
    """As on a machine that others use: 32 samples in 0.08 s and 16 in 0.11 s promise any speed at 64."""
    found = expert_of(search((BF16, 16, completed(150.0, 6.0)), (BF16, 32, completed(400.0, 10.0)), best=2))
    assert (found.candidate.per_device_train_batch_size, found.is_measured) == (32, True)
    assert "1.00 × bf16 at the largest batch tried" in found.describe()


def test_of_one_batch_it_is_not_said_that_no_larger_one_fits() -> None:
    for batch, words in ((32, "(32 × 2"), (1, "(1 × 64")):
        found = expert_of(search((BF16, batch, completed(200.0))))
        assert (found.candidate.per_device_train_batch_size, found.is_measured) == (batch, True)
        assert f"at the largest batch tried {words}" in found.describe()
        assert f"at a larger batch {words}" in dataclasses.replace(found, is_measured=False).describe()


@pytest.mark.parametrize(("batch", "rate"), [(4000, 900.0), (32, 150.0)])
def test_settings_of_another_effective_batch_are_no_experts(batch: int, rate: float) -> None:
    """A baseline of the user's own in one micro-step, where a search is for 64 samples a step.

    A batch that was measured with two accumulations is one point.
    """
    own = trial(0, BF16, batch, completed(rate), "baseline")
    own = dataclasses.replace(own, candidate=dataclasses.replace(own.candidate, gradient_accumulation_steps=1))
    found = expert_of(report(own, trial(1, BF16, 32, completed(200.0))))
    assert (found.candidate.per_device_train_batch_size, found.candidate.gradient_accumulation_steps) == (32, 2)


def test_activations_are_recomputed_only_where_nothing_fits_without() -> None:
    found = expert_of(search((CHECKPOINTED, 64, completed(120.0)), (BF16, 8, OVER)))
    assert found.candidate.arm == CHECKPOINTED
    found = expert_of(search((CHECKPOINTED, 64, completed(120.0)), (BF16, 64, completed(100.0))))
    assert found.candidate.arm == BF16


def test_without_bf16_it_is_the_fastest_precision() -> None:
    found = expert_of(search((TF32, 64, completed(120.0)), (Arm("fp16"), 64, completed(150.0)), best=2))
    assert found.candidate.arm.precision == "fp16"


def test_every_form_of_a_result_shows_it() -> None:
    shown = search((GRAPHED, 64, completed(400.0)), (BF16, 64, completed(200.0)))
    line = "  2.00 × bf16 at the largest batch that fits (64 × 1  bf16: measured)"
    assert line in summary_lines(shown)
    expert = report_document(shown)["expert"]
    assert (expert["speedup"], expert["measured"]) == (pytest.approx(2.0), True)
    assert expert["candidate"]["per_device_train_batch_size"] == 64
    assert "Against the usual choice" in html_page(shown)


def test_utilization_is_the_counted_arithmetic_over_the_rated() -> None:
    """BERT-large at 512 tokens: 1 TFLOP a sample, 300 samples/s are 30 % of an H200's 989 TFLOP/s."""
    counted = dataclasses.replace(completed(300.0).measurement, sample_flops=(0.33e12, 1e12))
    shown = report(BASELINE, trial(1, BF16, 64, Completed(counted)))
    shown = dataclasses.replace(shown, environment={**shown.environment, "device_name": "NVIDIA H200"})
    found = utilization(shown, counted, BF16)
    assert found == pytest.approx(300e12 / 989.4e12, rel=0.001)
    assert any("rated arithmetic in bf16" in line for line in summary_lines(shown))
    assert report_document(shown)["model_flops_utilization"] == pytest.approx(found)
    # Compiled code is not counted: its samples are those of other trials.
    compiled = dataclasses.replace(completed(600.0).measurement)
    assert utilization(shown, compiled, dataclasses.replace(BF16, torch_compile=True)) == pytest.approx(2 * found)
    assert utilization(shown, compiled, dataclasses.replace(BF16, sparse_prediction=True)) is None
    assert measurement(shown.best) is not None
