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
"""Runs the first steps of some settings, or says why not; raises ``TrialServerError`` where no process can."""

# Settings that do not change what one process computes.
_BESIDE = (
    "strategy", "dp_shard_size", "context_parallel", "expandable_segments", "cpu_affinity", "dataloader_num_workers",
    "non_blocking", "train_sampling_strategy",
)  # fmt: skip
_DIVIDE = "trainer.model_accepts_loss_kwargs = False has a Trainer divide that leaves it to the model"
_SMALL = 2
"""Samples of the smaller micro-batch of a look, where the settings have as many: what a batch shares shows in two."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a look at a winner found."""

    look: Look
    levers: tuple[str, ...] = ()
    """Fields of the winner's arm that make it another training."""


def small_splits(asked: Candidate, winner: Candidate) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return two splits in batch and accumulation, with equally many samples, to compare two candidates.

    The order of the batch sizes stays, and so does whether each accumulates.
    """
    batches = asked.per_device_train_batch_size, winner.per_device_train_batch_size
    if batches[0] == batches[1]:
        split = min(_SMALL, batches[1]), min(2, winner.gradient_accumulation_steps)
        return split, split
    small = min(_SMALL, *batches)
    both = min(2, asked.gradient_accumulation_steps, winner.gradient_accumulation_steps)
    one, other = (small, 2 * both), (2 * small, both)
    return (one, other) if batches[0] < batches[1] else (other, one)


def simplified_for_look(arm: Arm, *, as_measured: bool) -> Arm:
    """Return an arm on one device and, unless ``as_measured``, in float32 without compilation."""
    if as_measured:
        return without(arm, _BESIDE)
    plain = changed(without(arm, _BESIDE), precision="fp32", torch_compile=False)
    if arm.padding_free:
        # Attention within samples in float32 asks the GPU where they begin, which no capture survives. A graph was
        # compared with an eager micro-step in its trial.
        plain = changed(plain, cuda_graphs=False)
    return changed(plain, attn_implementation="sdpa") if arm.attn_implementation == FLASH_ATTENTION else plain


class Looker:
    """Looks at winners of one search."""

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
        """Prepare to compare winners with ``asked``, the settings that the user requested.

        ``is_unmodified``: these are the settings of the user's own code. ``has_fixed_split``: the code decides a part
        of batch and accumulation itself, so that both stay as they are.
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
                self._work = dataclasses.replace(self._work, layers=error.layers)
            except _UnknownError as error:
                verdict = Verdict(Look(unknown=str(error)))
        look = dataclasses.replace(verdict.look, seconds=round(time.monotonic() - began, 3))
        return dataclasses.replace(verdict, look=look)

    def _verdict(self, winner: Candidate) -> Verdict:
        """Compare the first steps of both settings, and find the lever that causes a difference."""
        split, winners = self._splits(winner)
        is_measured = self._work.as_measured
        arm, winners_arm = (simplified_for_look(each.arm, as_measured=is_measured) for each in (self._asked, winner))
        # The fields in which the two differ, without the optimizer and what is part of another field.
        names = [field.name for field in dataclasses.fields(Arm)]
        differing = [name for name in names if name != "optim" and getattr(arm, name) != getattr(winners_arm, name)]
        levers = [name for name in differing if BY_NAME[name].part_of not in differing]
        if not levers and split == winners:
            return Verdict(Look())
        own = Candidate(arm, *split)
        asked, found = self._steps(own, [own, Candidate(winners_arm, *winners)])
        if asked.weights != found.weights:
            raise _UnknownError("its weights are other ones each time it is run; set a seed before the model is made")
        one, other = asked.batch, found.batch
        if one is not None and other is not None and not math.isclose(one, other, rel_tol=1e-9):
            raise _UnknownError("another batch has other samples, or pads and masks them otherwise")
        whole = difference(asked, found)
        if whole is None:
            return Verdict(Look())
        (again,) = self._steps(own, [own], noise=1)
        if (random := difference(asked, again)) is not None:
            raise _UnknownError(f"the same settings give other gradients each time: a second run {random.words}")
        alone = [changed(arm, **{name: getattr(winners_arm, name)}) for name in levers]
        tried = [Candidate(each, *split) for each in alone]
        tried += [Candidate(arm, *winners)] if split != winners else []
        found_of = [difference(asked, step) for step in self._steps(own, tried)]
        guilty = {name: each.words for name, each in zip(levers, found_of, strict=False) if each is not None}
        of_split = found_of[-1] if split != winners else None
        differs, cure = [], None
        if of_split is not None:
            undivided = _undivided_loss(of_split, own, tried[-1], divides=found.divides)
            cut_down = f"cut down to {_batch_in_words(tried[-1])} for {_batch_in_words(own)}, it {of_split.words}"
            both = f"{_batch_in_words(winner)} is another training than {_batch_in_words(self._asked, winner)}"
            differs.append(f"{both}: {undivided or cut_down}")
            cure = _DIVIDE if undivided else self._options_keeping_batch()
        if not guilty and of_split is None:
            lever = self._curing_lever(asked, own, Candidate(winners_arm, *winners), levers)
            guilty = {lever: f"beside the other settings {whole.words}"} if lever else {}
        if not guilty and of_split is None:
            differs.append(
                f"these settings together are another training than {self._asked.describe()}: it {whole.words}"
            )
            cure = "compare a few hundred steps of both before you rely on it"
        ruled_out = tuple(f"{name.replace('_', ' ')} {words}" for name, words in guilty.items())
        return Verdict(Look(tuple(differs), cure, ruled_out), tuple(guilty))

    def _splits(self, winner: Candidate) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return batch and accumulation at which the requested settings and a winner's are compared."""
        if self._has_fixed_split:
            split, winners = (
                (each.per_device_train_batch_size, each.gradient_accumulation_steps) for each in (self._asked, winner)
            )
        else:
            split, winners = small_splits(self._asked, winner)
        # Where the batch is free, any batch is what was asked for.
        return (winners if self._is_batch_free else split), winners

    def _curing_lever(self, asked: FirstStep, own: Candidate, winner: Candidate, levers: Sequence[str]) -> str | None:
        """Return the first lever without which the winner's training is the requested one."""
        for name in levers:
            other = changed(winner.arm, **{name: getattr(own.arm, name)})
            try:
                (step,) = self._steps(own, [dataclasses.replace(winner, arm=other)])
            except _UnknownError:
                continue
            if difference(asked, step) is None:
                return name
        return None

    def _steps(self, own: Candidate, candidates: Sequence[Candidate], noise: int = 0) -> list[FirstStep]:
        """Return the first step of each candidate. ``own`` has the settings of the user's own code.

        Raises ``_UnknownError`` where a first step cannot be had.
        """
        # The user's own code ends with its first step, so that each of its settings has a process of its own.
        jobs = [[each] for each in candidates] if self._is_own else [list(candidates)]
        steps: list[FirstStep] = []
        for job in filter(None, jobs):
            unmodified = self._is_unmodified and job == [own]
            work = dataclasses.replace(self._work, candidates=tuple(job), noise=noise, unmodified=unmodified)
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
    """Return the comparison of a search's winners, run as jobs of a trial server and cached in a database."""
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
        ask,
        prepared.baseline,
        server.placement.rank_devices,
        cap_bytes=prepared.ceiling.cap_bytes,
        seed=request.seed,
        is_batch_free=request.effective_batch is None,
        is_unmodified=source is not None and source.framework == "trainer" and prepared.model.own is not None,
        is_own=source is not None,
        has_fixed_split=source is not None and source.interface.fixed != Fixed(),
        data_folder=str(server.data_folder) if server.data_folder else None,
    )


def _batch_in_words(candidate: Candidate, like: Candidate | None = None) -> str:
    """Return batch × accumulation of a candidate in words, if possible with as many samples as ``like``."""
    batch, accumulation = candidate.per_device_train_batch_size, candidate.gradient_accumulation_steps
    if like is not None and like.per_device_train_batch_size * like.gradient_accumulation_steps % batch == 0:
        accumulation = like.per_device_train_batch_size * like.gradient_accumulation_steps // batch
    return f"{batch} × {accumulation}"


def _undivided_loss(of_split: Difference, asked: Candidate, other: Candidate, *, divides: bool) -> str | None:
    """Say which training does not divide its loss by the accumulation; ``None`` where this explains no difference."""
    if of_split.kind != "scale":
        return None
    times, (one, more) = of_split.factor, (each.gradient_accumulation_steps for each in (asked, other))
    grows = math.isclose(times * one, more, rel_tol=0.01)
    if (grows and one > more) or (divides and math.isclose(times * one, 1, rel_tol=0.01)):
        return "the loss of the latter is not divided by its accumulation, and so many times as large"
    return "its loss is not divided by the accumulation, so that gradients grow with it" if grows else None


class _UnknownError(Exception):
    """A look cannot be had; the message says why."""


class _TooLargeError(Exception):
    """A model does not fit in a look."""

    def __init__(self, layers: int) -> None:
        """``layers``: with how many it may."""
        super().__init__(layers)
        self.layers = layers


Rehearse = Callable[[Candidate, float], Rehearsal | None]
"""Rehearses a winner after so many seconds of searching; ``None`` where its run is no more than its steps."""

# Share of the search's time that a part of a rehearsal may take, and its bounds in seconds. Choices.
_SHARE, _LEAST_SECONDS, _MOST_SECONDS = 0.03, 2.0, 20.0
# Each batch of an evaluation that is tried on several ranks starts them anew. A choice.
_SMALLER_BY = 4


def rehearser_of(prepared: Prepared, server: TrialServer, timeout_seconds: float) -> Rehearse:
    """Return the function that rehearses a long run with the winner, by a job of a trial server."""
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
        of_server = server.placement.rank_devices
        devices = dataclasses.replace(of_server, uuids=of_server.uuids[:ranks])
        work = RehearsalWork(
            candidate,
            devices,
            prepared.ceiling.cap_bytes,
            prepared.ceiling.line_bytes,
            request.seed,
            host_bytes=host_memory().free_bytes if devices.kind == "cuda" else None,
            seconds=min(_MOST_SECONDS, max(_LEAST_SECONDS, _SHARE * searched_seconds)),
            unmodified=candidate == prepared.baseline and prepared.model.own is not None,
            world_size=request.world_size,
            data_folder=str(server.data_folder) if server.data_folder else None,
        )
        limit_seconds = request.trial_timeout_seconds or timeout_seconds
        found = server.rehearse(work, limit_seconds)
        # Ranks that run out of memory end, so that a smaller batch has a run of its own.
        return with_smaller_evaluation(
            found, lambda batch: server.rehearse(dataclasses.replace(work, evaluation_batch=batch), limit_seconds)
        )

    return rehearse


def with_smaller_evaluation(found: Rehearsal, again: Callable[[int], Rehearsal]) -> Rehearsal:
    """Return the rehearsal with a smaller evaluation batch, where ranks ran out of memory in the evaluation."""
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
            told = dataclasses.replace(asked, settings=settings, with_settings=evaluation.whole)
            return dataclasses.replace(smaller, evaluation=told)
    return found
