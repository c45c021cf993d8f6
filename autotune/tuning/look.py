"""Look before an answer whether the winner's training is the one that was asked for, and find out what changes it.

The winner of a search of one's own ``Trainer`` also runs once what a long run does beyond its first steps.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from autotune.core.candidate import Arm, Candidate
from autotune.core.code_interface import Fixed
from autotune.core.look import Difference, FirstStep, Look, LookAnswer, LookWork, difference
from autotune.core.placement import RankDevices
from autotune.core.rehearsal import Rehearsal, RehearsalWork
from autotune.devices.host import host_memory
from autotune.space.arms import changed, without
from autotune.space.features import FLASH_ATTENTION
from autotune.space.levers import BY_NAME
from autotune.tuning.answer_cache import look_key

if TYPE_CHECKING:
    from autotune.execution.trial_server import TrialServer
    from autotune.store.answers import Answers
    from autotune.tuning.prepare import Prepared

Ask = Callable[[LookWork], LookAnswer | str]
"""Trains one step with each candidate of the work, or says in words why not; may raise ``TrialServerError``."""

# Settings that do not change what one process computes.
_BESIDE = (
    "strategy", "dp_shard_size", "context_parallel", "expandable_segments", "cpu_affinity", "dataloader_num_workers",
    "non_blocking", "train_sampling_strategy",
)  # fmt: skip
_DIVIDE = "trainer.model_accepts_loss_kwargs = False has a Trainer divide that leaves it to the model"
_SMALL = 2
"""Samples of the smaller of the compared batches, where the settings allow it. What depends on the other samples of a
batch, as its padding does, shows in two."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of comparing a winner's training with the requested one."""

    look: Look
    levers: tuple[str, ...] = ()
    """Fields of the winner's arm that make it another training."""


def small_splits(asked: Candidate, winner: Candidate) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return a small (batch, accumulation) for the requested candidate and one for the winner, to compare one step.

    Both steps have equally many samples. The candidate with the larger batch keeps the larger one, and accumulates only
    where both do.
    """
    batches = asked.per_device_train_batch_size, winner.per_device_train_batch_size
    # Two micro-steps show what accumulation changes as well as more would.
    if batches[0] == batches[1]:
        split = min(_SMALL, batches[1]), min(2, winner.gradient_accumulation_steps)
        return split, split
    small = min(_SMALL, *batches)
    accumulation = min(2, asked.gradient_accumulation_steps, winner.gradient_accumulation_steps)
    of_smaller, of_larger = (small, 2 * accumulation), (2 * small, accumulation)
    return (of_smaller, of_larger) if batches[0] < batches[1] else (of_larger, of_smaller)


def simplified_for_look(arm: Arm, *, as_measured: bool) -> Arm:
    """Return an arm (settings without batch) for one device and, unless ``as_measured``, uncompiled in float32."""
    if as_measured:
        return without(arm, _BESIDE)
    plain = changed(without(arm, _BESIDE), precision="fp32", torch_compile=False)
    if arm.padding_free:
        # Attention within samples in float32 asks the GPU where they begin, which no capture survives. A graph was
        # compared with an eager micro-step in its trial.
        plain = changed(plain, cuda_graphs=False)
    return changed(plain, attn_implementation="sdpa") if arm.attn_implementation == FLASH_ATTENTION else plain


class Looker:
    """Compares the first optimizer step of a search's winners with a step of the settings that the user requested."""

    def __init__(
        self,
        ask: Ask,
        asked: Candidate,
        devices: RankDevices,
        *,
        cap_bytes: int,
        seed: int,
        is_unmodified: bool,
        is_own: bool,
        data_folder: str | None = None,
        as_measured: bool = False,
        is_batch_free: bool = False,
        has_fixed_split: bool = False,
    ) -> None:
        """Prepare to compare winners with ``asked``, the settings that the user requested, by the processes of ``ask``.

        ``cap_bytes`` limits torch's allocator. ``is_own``: the user's own code is trained. ``is_unmodified``: ``asked``
        are that code's settings. ``has_fixed_split``: the code decides a part of batch and accumulation itself, so that
        both stay as they are. ``is_batch_free``: the user requested no effective batch. ``as_measured`` keeps precision
        and compilation.
        """
        self._ask, self._asked = ask, asked
        self._is_unmodified, self._is_own, self._is_batch_free = is_unmodified, is_own, is_batch_free
        self._has_fixed_split = has_fixed_split
        one = dataclasses.replace(devices, uuids=devices.uuids[:1])
        self._work = LookWork((), one, cap_bytes, seed, data_folder=data_folder, as_measured=as_measured)

    def differences(self, winner: Candidate) -> Verdict:
        """Return how a winner's training differs from the requested one. Failures of the comparison never raise."""
        began = time.monotonic()
        verdict = None
        while verdict is None:
            try:
                verdict = self._verdict(winner)
            except _TooLargeError as error:
                self._work = dataclasses.replace(self._work, layers=error.args[0])
            except _UnknownError as error:
                verdict = Verdict(Look(unknown=str(error)))
        look = dataclasses.replace(verdict.look, seconds=round(time.monotonic() - began, 3))
        return dataclasses.replace(verdict, look=look)

    def _verdict(self, winner: Candidate) -> Verdict:
        """Compare the first step of the winner's settings with the requested one, and find what causes a difference.

        Each lever is tried alone, then the winner's batch. Raises ``_UnknownError`` where nothing can be compared, and
        ``_TooLargeError`` where the model needs fewer layers for it.
        """
        split, winners_split = self._splits(winner)
        is_measured = self._work.as_measured
        arm, winners_arm = (simplified_for_look(each.arm, as_measured=is_measured) for each in (self._asked, winner))
        # The optimizer acts after the gradients that are compared.
        names = [field.name for field in dataclasses.fields(Arm) if field.name != "optim"]
        differing = [name for name in names if getattr(arm, name) != getattr(winners_arm, name)]
        levers = [name for name in differing if BY_NAME[name].part_of not in differing]
        if not levers and split == winners_split:
            return Verdict(Look())
        asked, simple_winner = Candidate(arm, *split), Candidate(winners_arm, *winners_split)
        asked_step, winners_step = self._first_steps(asked, [asked, simple_winner])
        if asked_step.weights != winners_step.weights:
            raise _UnknownError("its weights are other ones each time it is run; set a seed before the model is made")
        # Sums of all numbers that the model was given.
        one, other = asked_step.batch, winners_step.batch
        if one is not None and other is not None and not math.isclose(one, other, rel_tol=1e-9):
            raise _UnknownError("another batch has other samples, or pads and masks them otherwise")
        whole = difference(asked_step, winners_step)
        if whole is None:
            return Verdict(Look())
        # With another seed for dropout and the like: is the difference no more than chance?
        (again,) = self._first_steps(asked, [asked], seed_offset=1)
        if (random := difference(asked_step, again)) is not None:
            raise _UnknownError(f"the same settings give other gradients each time: a second run {random.words}")
        tried = [Candidate(changed(arm, **{name: getattr(winners_arm, name)}), *split) for name in levers]
        tried += [Candidate(arm, *winners_split)] if split != winners_split else []
        found = [difference(asked_step, step) for step in self._first_steps(asked, tried)]
        guilty = {name: each.words for name, each in zip(levers, found, strict=False) if each is not None}
        of_split = found[-1] if split != winners_split else None
        differs, cure = [], None
        if of_split is not None:
            undivided = _undivided_loss(of_split, asked, tried[-1], divides=winners_step.divides)
            cut_down = f"cut down to {_batch_in_words(tried[-1])} for {_batch_in_words(asked)}, it {of_split.words}"
            both = f"{_batch_in_words(winner)} is another training than {_batch_in_words(self._asked, winner)}"
            differs.append(f"{both}: {undivided or cut_down}")
            cure = _DIVIDE if undivided else self._options_keeping_batch()
        if not guilty and of_split is None:
            lever = self._curing_lever(asked_step, asked, simple_winner, levers)
            guilty = {lever: f"beside the other settings {whole.words}"} if lever else {}
        if not guilty and of_split is None:
            differs.append(
                f"these settings together are another training than {self._asked.describe()}: it {whole.words}"
            )
            cure = "compare a few hundred steps of both before you rely on it"
        ruled_out = tuple(f"{name.replace('_', ' ')} {words}" for name, words in guilty.items())
        return Verdict(Look(tuple(differs), cure, ruled_out), tuple(guilty))

    def _splits(self, winner: Candidate) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return (batch, accumulation) for the compared step of the requested settings, and of the winner's."""
        if self._has_fixed_split:
            split, winners_split = (
                (each.per_device_train_batch_size, each.gradient_accumulation_steps) for each in (self._asked, winner)
            )
        else:
            split, winners_split = small_splits(self._asked, winner)
        # Where the batch is free, any batch is what was asked for.
        return (winners_split if self._is_batch_free else split), winners_split

    def _curing_lever(
        self, asked_step: FirstStep, asked: Candidate, winner: Candidate, levers: Sequence[str]
    ) -> str | None:
        """Return the first lever without which the winner's step is the requested one; ``None`` where none is."""
        for name in levers:
            without_lever = changed(winner.arm, **{name: getattr(asked.arm, name)})
            try:
                (step,) = self._first_steps(asked, [dataclasses.replace(winner, arm=without_lever)])
            except _UnknownError:
                continue
            if difference(asked_step, step) is None:
                return name
        return None

    def _first_steps(self, asked: Candidate, candidates: Sequence[Candidate], seed_offset: int = 0) -> list[FirstStep]:
        """Train one step with each candidate in trial processes, and return these steps.

        ``asked`` has the requested settings, with which the user's own code runs unmodified. ``seed_offset`` changes
        what is random within a step, such as dropout, and not the weights. Raises ``_UnknownError`` where a candidate
        has no first step, ``_TooLargeError`` where the model does not fit.
        """
        # The user's own code ends with its first step, so that each candidate needs a process of its own.
        jobs = [[each] for each in candidates] if self._is_own else [list(candidates)]
        steps: list[FirstStep] = []
        for job in filter(None, jobs):
            unmodified = self._is_unmodified and job == [asked]
            work = dataclasses.replace(self._work, candidates=tuple(job), noise=seed_offset, unmodified=unmodified)
            answer = self._ask(work)
            if isinstance(answer, str):
                raise _UnknownError(answer)
            if answer.fewer_layers is not None:
                raise _TooLargeError(answer.fewer_layers)
            if len(answer.steps) != len(job):
                raise _UnknownError("its process ended without an answer")
            steps += answer.steps
        return steps

    def _options_keeping_batch(self) -> str:
        """Return in words the options of a search that keep the user's own batch."""
        batch, samples = self._asked.per_device_train_batch_size, self._asked.samples_per_step
        if samples != batch:
            return f"--batch-multiple {batch} searches batches of {batch} and its multiples"
        return f"--batch-multiple {batch} --effective-batch {batch} keeps a batch of {batch}"


def looker_of(prepared: Prepared, server: TrialServer, answers: Answers, timeout_seconds: float) -> Looker:
    """Return what compares a search's winners with the request, by jobs of a trial server with cached ``answers``."""
    request, source = prepared.request, prepared.request.workload.source

    def ask(work: LookWork) -> LookAnswer | str:
        """Return the cached answer, or run the job."""
        key = look_key(request.device, request.workload, work)
        if key is not None and not request.fresh and (known := answers.find(key, LookAnswer)) is not None:
            return known
        answer = server.look(work, request.trial_timeout_seconds or timeout_seconds)
        if key is not None and not isinstance(answer, str) and answer.fewer_layers is None:
            answers.keep(key, answer)
        return answer

    return Looker(
        ask, prepared.baseline, server.placement.rank_devices,
        cap_bytes=prepared.ceiling.cap_bytes, seed=request.seed, is_batch_free=request.effective_batch is None,
        is_unmodified=source is not None and source.framework == "trainer" and prepared.model.own is not None,
        is_own=source is not None,
        has_fixed_split=source is not None and source.interface.fixed != Fixed(),
        data_folder=str(server.data_folder) if server.data_folder else None,
    )  # fmt: skip


def _batch_in_words(candidate: Candidate, like: Candidate | None = None) -> str:
    """Return ``batch × accumulation`` of a candidate, accumulated to as many samples as ``like`` has where possible."""
    batch, accumulation = candidate.per_device_train_batch_size, candidate.gradient_accumulation_steps
    if like is not None and like.per_device_train_batch_size * like.gradient_accumulation_steps % batch == 0:
        accumulation = like.per_device_train_batch_size * like.gradient_accumulation_steps // batch
    return f"{batch} × {accumulation}"


def _undivided_loss(of_split: Difference, asked: Candidate, other: Candidate, *, divides: bool) -> str | None:
    """Say which training does not divide its loss by the accumulation; ``None`` where this explains no difference.

    ``of_split`` is how the step of ``other`` differs from that of ``asked``, at another split in batch and
    accumulation. ``divides``: autotune had the Trainer divide the loss of ``other``.
    """
    if of_split.kind != "scale":
        return None
    factor, before, after = of_split.factor, asked.gradient_accumulation_steps, other.gradient_accumulation_steps
    grows = math.isclose(factor * before, after, rel_tol=0.01)
    if (grows and before > after) or (divides and math.isclose(factor * before, 1, rel_tol=0.01)):
        return "the loss of the latter is not divided by its accumulation, and so many times as large"
    return "its loss is not divided by the accumulation, so that gradients grow with it" if grows else None


class _UnknownError(Exception):
    """Two trainings cannot be compared; the message says why."""


class _TooLargeError(Exception):
    """A model does not fit where first steps are compared; with fewer layers, the argument, it may."""


Rehearse = Callable[[Candidate, float], Rehearsal | None]
"""Runs once what a long run with the winner does beyond its first steps, after so many seconds of searching; ``None``
where there is nothing beyond them."""

# Share of the search's time that a part of a rehearsal may take, and its bounds in seconds. Choices.
_SHARE, _LEAST_SECONDS, _MOST_SECONDS = 0.03, 2.0, 20.0
# The next evaluation batch that is tried is smaller by this factor: each starts all ranks anew. A choice.
_SMALLER_BY = 4


def rehearser_of(prepared: Prepared, server: TrialServer, timeout_seconds: float) -> Rehearse:
    """Return the function that rehearses a long run with the winner (evaluation, checkpoint …) in a trial process."""
    request, source = prepared.request, prepared.request.workload.source

    def rehearse(candidate: Candidate, searched_seconds: float) -> Rehearsal | None:
        """Return the rehearsal; ``None`` where the code does not support it, or for a model by name on one rank."""
        ranks = candidate.arm.ranks
        if source.framework == "placeholders" if source is not None else ranks == 1:
            return None
        is_trainer = source is None or source.framework == "trainer"
        if source is not None and is_trainer and not prepared.model.interface.goes_on:
            return None
        if ranks > 1 and (not is_trainer or candidate.arm.context_parallel > 1):
            return Rehearsal(problem="it trains on several devices")
        devices = server.placement.rank_devices
        devices = dataclasses.replace(devices, uuids=devices.uuids[:ranks])
        work = RehearsalWork(
            candidate, devices, prepared.ceiling.cap_bytes, prepared.ceiling.line_bytes, request.seed,
            host_bytes=host_memory().free_bytes if devices.kind == "cuda" else None,
            seconds=min(_MOST_SECONDS, max(_LEAST_SECONDS, _SHARE * searched_seconds)),
            unmodified=candidate == prepared.baseline and prepared.model.own is not None,
            world_size=request.world_size,
            data_folder=str(server.data_folder) if server.data_folder else None,
        )  # fmt: skip
        limit_seconds = request.trial_timeout_seconds or timeout_seconds
        found = server.rehearse(work, limit_seconds)
        # Ranks that run out of memory end, so that a smaller batch has a run of its own.
        return with_smaller_evaluation(
            found, lambda batch: server.rehearse(dataclasses.replace(work, evaluation_batch=batch), limit_seconds)
        )

    return rehearse


def with_smaller_evaluation(found: Rehearsal, again: Callable[[int], Rehearsal]) -> Rehearsal:
    """Return the rehearsal with a smaller evaluation batch, where ranks ran out of memory in the evaluation.

    ``again`` repeats the rehearsal with an evaluation batch. Return ``found`` itself where no smaller batch fits, or
    none is needed.
    """
    asked = found.evaluation
    if found.failed_rank is None or asked is None or asked.whole is not None:
        return found
    batch = asked.batch
    while batch > 1:
        batch = max(1, batch // _SMALLER_BY)
        smaller = again(batch)
        evaluation = smaller.evaluation
        if evaluation is not None and evaluation.fits:
            settings = {**evaluation.settings, "per_device_eval_batch_size": batch}
            with_both = dataclasses.replace(asked, settings=settings, with_settings=evaluation.whole)
            return dataclasses.replace(smaller, evaluation=with_both)
    return found
