"""Write the notes under a result: reasons why its numbers may not hold for the user's own training."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from autotune.core.candidate import Arm, Candidate
from autotune.core.code_interface import CodeInterface
from autotune.core.outcome import Completed, Failed, Measurement, OutOfMemory, source_of
from autotune.core.units import format_bytes, format_deviation, format_seconds, plural
from autotune.estimate.bottleneck import what_limits
from autotune.estimate.pooling import Speed
from autotune.results.report import Report, data_facts, measurement
from autotune.space.arms import changed, levers_of, without
from autotune.space.levers import LEVERS
from autotune.store.records import StopReason, TrialRecord

# Relative half-width of the interval of the next run's speed, above which a note tells it. A choice.
_WIDE_PROMISE = 0.1
# In shorter steps of the user's own code, watching takes more than about 8 % (docs/explanation/measuring.md).
_SHORT_STEP_SECONDS = 0.005
# The baseline is measured in few steps; above this relative half-width a note says so. A choice.
_VERY_WIDE_SPREAD = 0.2


def notes(report: Report) -> Iterator[str]:
    """Yield the notes of a study: reasons why its numbers may not hold for the user, most important first."""
    request, baseline = report.study.request, report.baseline
    best, measured = report.best, measurement(report.best)
    if best is not None and request["batch_multiple"] is None and best.candidate.per_device_train_batch_size % 8:
        yield (
            f"the per-device batch is {best.candidate.per_device_train_batch_size}, not a multiple of 8: "
            + _why_no_multiple_of_8(report, best)
        )
    yield from _look_notes(report)
    if measured and best and measured.micro_steps_run < best.candidate.gradient_accumulation_steps:
        yield (
            f"the winner's steps were measured with {measured.micro_steps_run} of its "
            f"{best.candidate.gradient_accumulation_steps} micro-steps; the time of the others was added"
        )
    if best is not None and measured and measured.growth_bytes is not None:
        room = report.ceiling.cap_bytes - measured.judged_bytes(best.candidate.arm)
        yield (
            f"memory still grew by {format_bytes(measured.growth_bytes)} a step as the trial ended: the limit is "
            f"reached after about {max(0, room) // measured.growth_bytes:,} steps, if something is kept of each"
        )
    is_cut_short = report.study.stop_reason is not StopReason.NOTHING_LEFT
    if is_cut_short and len(report.trials) > 1 and len({trial.candidate for trial in report.trials}) == 1:
        yield "only one configuration was measured: give the search more --trials or --time-budget"
    if best is not None and measured:
        yield from _wide_promise(report, best)
    speed = report.speed(baseline)
    if speed and best and best != baseline and speed.relative_half_width > _VERY_WIDE_SPREAD:
        width = format_deviation(speed.relative_half_width)
        yield f"the baseline's step time is uncertain by {width}, and so is the speed-up over it"
    if best is not None:
        yield from (
            f"the winner failed when it was run again (trial {trial.number}): {trial.outcome.message}"
            for trial in report.trials
            if trial.candidate == best.candidate
            and trial.number > best.number
            and isinstance(trial.outcome, Failed)
            and trial.outcome.reason != "interrupted"
        )
    is_compared = measured and request["objective"] == "throughput"
    if best and baseline and is_compared and best.candidate != baseline.candidate:
        yield from _beside_baseline(report, best, baseline)
    yield from compiled_notes(report)
    if best is not None and measured:
        yield from _host_notes(report, best, measured)
    if best is not None:
        yield from sharding_notes(best.candidate)
    if (facts := data_facts(report.workload)) is not None and facts.without_text:
        yield (
            f"{facts.without_text:,} of the data's samples have no text (missing or empty) and are trained on as empty "
            "texts: remove them"
        )
    yield from _own_code_notes(report)
    yield from _reused(report)
    if request["world_size"] > request.get("ranks", 1):
        yield f"measured on one device; {request['world_size']} devices also spend time on exchanging gradients"
    yield from _disturbances(report)
    if report.study.state == "interrupted":
        yield f"the search is interrupted: autotune resume {report.study.name} continues it"


def _look_notes(report: Report) -> Iterator[str]:
    """Yield notes on untrained parameters, and on what the look (at the winner's beside the asked training) found."""
    yield from _untrained_note(report)
    look = report.study.look
    if look is None:
        return
    yield from look.sentences
    if look.unknown is not None:
        yield f"whether the winner's training is the one asked for was not looked at: {look.unknown}"
    # The rehearsal runs what comes after a run's first steps, such as an evaluation.
    if look.rehearsal is not None:
        yield from (*look.rehearsal.alarms, *look.rehearsal.sentences)
    yield from (f"left out, since it is another training: {each}" for each in look.ruled_out)


def _untrained_note(report: Report) -> Iterator[str]:
    """Yield a note on parameters of the user's own model that got no gradient in the winner, or else the baseline."""
    if report.workload["task"] != "own":
        return
    for whose, trial in (("the winner", report.best), ("the baseline", report.baseline)):
        measured = measurement(trial)
        if measured is not None and measured.untrained:
            more = " …" if measured.untrained_tensors > len(measured.untrained) else ""
            names = ", ".join(measured.untrained) + more
            total = (measured.trained_tensors or 0) + measured.untrained_tensors
            yield f"{whose} trains {measured.trained_tensors} of {total} tensors; no gradient has {names}"
            return


def _wide_promise(report: Report, best: TrialRecord) -> Iterator[str]:
    """Yield a note where the next run's speed is uncertain by more than 10 %, and why; else nothing."""
    speed = report.speed(best)
    if speed is None or speed.relative_half_width <= _WIDE_PROMISE:
        return
    why = f"the machine was noisy{' when it was measured' if source_of(best.outcome) else ''}; --fresh measures again"
    if report.history.pool.is_host_bound(best.candidate):
        why = "the step is host-bound, and the host's speed differs from process to process"
    yield f"the next run may differ from the winner's speed by {format_deviation(speed.relative_half_width)}: {why}"


def _disturbances(report: Report) -> Iterator[str]:
    """Yield a note on trials that other processes disturbed, and one if the winner was disturbed."""
    outcomes = [trial.outcome for trial in report.trials]
    disturbed = [each for each in outcomes if isinstance(each, Completed | OutOfMemory) and each.disturbed]
    if not disturbed:
        return
    is_repeated = any(isinstance(outcome, OutOfMemory) or outcome.run_again for outcome in disturbed)
    again = " and repeated where that could help" if is_repeated else ""
    were, why = "was" if len(disturbed) == 1 else "were", "; ".join(disturbed[-1].disturbed)
    yield f"{plural(len(disturbed), 'trial')} {were} disturbed{again}; the last: {why}"
    if report.best is not None and getattr(report.best.outcome, "disturbed", False):
        yield "the winner itself was disturbed while it was measured: it may be faster than reported"


def compiled_notes(report: Report) -> list[str]:
    """Return a note on when compiling pays off against the fastest trial without; empty without trials of both."""
    feasible = [(t.candidate, m) for t in report.trials if report.feasible(t) and (m := measurement(t))]
    compiled = [(c, m) for c, m in feasible if c.arm.torch_compile]
    plain = [(c, m) for c, m in feasible if not c.arm.torch_compile]
    if not compiled or not plain:
        return []
    of_winner = [(c, m) for c, m in compiled if report.best is not None and c == report.best.candidate]
    candidate, measured = max(of_winner or compiled, key=lambda pair: pair[1].samples_per_second)
    rival, of_rival = max(plain, key=lambda pair: pair[1].samples_per_second)
    compile_seconds = measured.compile_seconds or 0.0
    name = f"{candidate.describe()} takes {format_seconds(compile_seconds)} to compile"
    # In seconds a sample, since the steps of the two may differ in size.
    gain = 1 / of_rival.samples_per_second - 1 / measured.samples_per_second
    if gain <= 0:
        return [f"{name} and is then no faster than {rival.describe()}"]
    steps = math.ceil(compile_seconds / (gain * candidate.samples_per_step))
    return [f"{name}, which pays off after {steps:,} optimizer steps against {rival.describe()}"]


def _host_notes(report: Report, best: TrialRecord, measured: Measurement) -> Iterator[str]:
    """Yield notes on what the winner gains by compiling, by pinning and by all its levers, and on its data loader."""
    arm = best.candidate.arm
    for lever, words in (("torch_compile", "compiled"), ("cpu_affinity", "pinned to one core")):
        on = dataclasses.replace(best.candidate, arm=changed(arm, **{lever: True}))
        off = dataclasses.replace(best.candidate, arm=changed(arm, **{lever: False}))
        gain = _ratio(report, on, off)
        if gain is not None:
            yield f"{words}, the winner is {gain:.2f} × as fast as without"
    if arm.dataloader_num_workers and not (report.workload.get("data") or report.workload.get("source")):
        yield (
            f"{arm.dataloader_num_workers} data loader workers are enough for made-up samples, of which none is read "
            "or decoded: search with --dataset to know how many your own take"
        )
    # The levers that a search tries by itself. Compiling alone has its own note above.
    levers = levers_of(arm, [row.name for row in LEVERS if row.prior is not None])
    if levers - {"torch_compile"}:
        plain = dataclasses.replace(best.candidate, arm=without(arm, levers))
        gain = _ratio(report, best.candidate, plain)
        if gain is not None:
            yield f"with its levers the winner is {gain:.2f} × as fast as without ({plain.arm.describe()})"
    request = report.study.request
    is_quick = request["objective"] == "throughput" and request.get("effort", "quick") == "quick"
    if is_quick and what_limits(measured).kind == "host" and not arm.torch_compile:
        yield "the winner is host-bound: --effort default measures what compiling and CUDA graphs gain"


def _ratio(report: Report, candidate: Candidate, other: Candidate) -> float | None:
    """Return a candidate's speed over another's; ``None`` where this study measured only one of them, or none."""

    def speed_of(wanted: Candidate) -> Speed | None:
        """Return the pooled speed of a candidate in this study."""
        speeds = (report.speed(trial) for trial in report.trials if trial.candidate == wanted)
        return next(filter(None, speeds), None)

    one, two = speed_of(candidate), speed_of(other)
    return one.samples_per_second / two.samples_per_second if one and two else None


def sharding_notes(winner: Candidate) -> Iterator[str]:
    """Yield notes on numeric differences between FSDP2 or DeepSpeed and DDP."""
    arm = winner.arm
    is_half, is_deepspeed = arm.precision in ("bf16", "fp16"), arm.zero_stage is not None
    if is_half and is_deepspeed:
        yield (
            f"{arm.precision} under DeepSpeed is not autocast: the model itself is in {arm.precision}, with a float32 "
            "copy for the optimizer; normalisation, softmax and the loss are computed in it, too, and gradients are "
            "reduced and accumulated in it; compare its losses with those of DDP"
        )
    elif is_half and arm.is_sharded:
        yield (
            f"{arm.precision} under FSDP2 is not autocast: normalisation, softmax and the loss are computed in "
            f"{arm.precision}, too, and gradients are reduced in it; compare its losses with those of DDP"
        )
    if arm.precision == "fp16" and is_deepspeed:
        yield "DeepSpeed scales the fp16 loss by itself, from 65,536 on, and skips updates that overflow"
    if arm.gradient_checkpointing and arm.is_sharded:
        yield (
            "FSDP2's checkpointing draws new random numbers when it computes a layer again: with dropout, gradients "
            "belong to another mask than the loss"
        )


def _own_code_notes(report: Report) -> Iterator[str]:
    """Yield notes on the user's own code: what it does beside its steps, and otherwise with other settings."""
    request, baseline, measured = report.study.request, report.baseline, measurement(report.best)
    interface = report.source.interface if report.source is not None else CodeInterface()
    if baseline is not None and report.workload["task"] == "own" and request["effective_batch"] is not None:
        own = dataclasses.replace(baseline.candidate, arm=Arm()).samples_per_step * request["world_size"]
        if own != request["effective_batch"]:
            yield f"your own settings train at effective batch {own}, not {request['effective_batch']}"
    if measured and report.workload["task"] == "own" and measured.step_seconds < _SHORT_STEP_SECONDS:
        yield (
            f"watching a step of your own code takes 0.2 to 0.6 ms of the host, and the winner's takes "
            f"{format_seconds(measured.step_seconds)}: your own run may be faster than is promised"
        )
    if (why := interface.batch_matters) is not None:
        yield f"{why}: with another per-device batch it is another training, also at the same effective batch"
    if interface.casts_weights:
        # The placeholder in the user's command.
        yield "{precision} is the dtype of the weights here: in 16 bits they are trained without a float32 copy"
    if measured and measured.evaluation_seconds is not None:
        often = f"every {plural(measured.evaluates_every, 'step')}" if measured.evaluates_every else "in a step"
        yield (
            f"your code evaluates {often}, for {format_seconds(measured.evaluation_seconds)}, which the speed leaves "
            "out and the peak has in it"
        )
    if measured and measured.saving_seconds:
        yield (
            f"your code saves in each step, for {format_seconds(measured.saving_seconds)} of which no figure tells: "
            "a step of your own run takes so much longer"
        )
    if why := interface.memory_unknown:
        yield f"memory was not predicted, so that trials found out what fits: {why}"


def _reused(report: Report) -> Iterator[str]:
    """Yield notes on the trials of earlier searches, and on speeds computed from them at another accumulation."""
    sources = [source for trial in report.trials if (source := source_of(trial.outcome))]
    if not sources:
        return
    names = sorted({source.study for source in sources})
    where = ", ".join(names[:3]) + (" …" if len(names) > 3 else "")
    yield f"{plural(len(sources), 'trial')} of earlier searches ({where}) reused; --fresh measures again"
    for name, trial in (("winner", report.best), ("baseline", report.baseline)):
        source = source_of(trial.outcome) if trial else None
        if source is not None and source.derived:
            yield f"the {name}'s speed is {source.describe()}, with another accumulation"


_OF_DDP = ("ddp_find_unused_parameters", "ddp_broadcast_buffers")


def _beside_baseline(report: Report, best: TrialRecord, baseline: TrialRecord) -> Iterator[str]:
    """Yield a note if winner and baseline differ in DDP's options alone, and one if the baseline was faster."""
    arm, other = best.candidate.arm, baseline.candidate.arm
    # Options of DDP that the table does not show.
    differing = {name: getattr(arm, name) for name in _OF_DDP if getattr(arm, name) != getattr(other, name)}
    is_alike = dataclasses.replace(baseline.candidate, arm=dataclasses.replace(other, **differing)) == best.candidate
    if is_alike:
        values = " and ".join(f"{name}={value}" for name, value in differing.items())
        yield f"the winner differs from the baseline in {values} alone, which changes no value"
    fastest, speed = report.history.fastest(), report.history.speed(best.candidate)
    if fastest is None or fastest.measurement is None or speed is None or fastest.candidate != baseline.candidate:
        return
    gain = fastest.measurement.samples_per_second / speed.samples_per_second - 1
    if gain > 0:
        is_noise = "which is noise: they differ in settings of DDP alone"
        why = is_noise if is_alike else "but the options exclude it from the search"
        yield f"the baseline was faster, by {gain:.1%}, {why}"


def _why_no_multiple_of_8(report: Report, best: TrialRecord) -> str:
    """Return why the winner's per-device batch is no multiple of 8, in words."""
    request, facts = report.study.request, data_facts(report.workload)
    effective = request["effective_batch"]
    if effective and (effective // request["world_size"]) % 8:
        return "no multiple of 8 divides the effective batch"
    if facts is not None and facts.samples < 8:
        return f"the data has {plural(facts.samples, 'sample')}"
    tried = [trial for trial in report.trials if trial.candidate.per_device_train_batch_size % 8 == 0]
    if not tried and report.study.stop_reason is not StopReason.NOTHING_LEFT:
        return "the search ended before one of those was tried"
    if any(report.feasible(trial) and trial.candidate != best.candidate for trial in tried):
        return "those that were measured were no faster"
    if any(isinstance(trial.outcome, Failed) for trial in tried):
        return "none of those completed"
    return "those that divide the effective batch do not fit" if effective else "no multiple of 8 fits"
