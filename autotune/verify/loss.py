"""Check again whether a study's winner trains as its baseline does, now with the precision that was measured."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.core.candidate import Arm, Candidate
from autotune.core.errors import DifferentTrainingError, InvalidRequestError, TrialServerError
from autotune.core.look import Look
from autotune.execution.trial_server import TrialServer
from autotune.space.space import Batches
from autotune.tuning.look import Looker
from autotune.verify.target import Target


@dataclass(frozen=True, slots=True)
class LossComparisonDocument:
    """A comparison of the first steps of two trainings: the winner's (``candidate``) and the baseline's."""

    same: bool
    candidate: Any
    reference: Any
    """The baseline's settings with as many samples a step."""
    look: Look
    finding: str

    def check(self) -> None:
        """Raise ``DifferentTrainingError`` where the trainings differ."""
        if not self.same:
            hint = self.look.cure or "compare a few hundred steps of both on your own data before you rely on it"
            raise DifferentTrainingError(self.finding, hint)


def reference_of(candidate: Candidate, baseline: Arm) -> Candidate:
    """Return what a candidate is compared with: the baseline's settings with its effective batch and optimizer.

    With another optimizer the two would train differently by intention.
    """
    batch, accumulation = Batches(candidate.samples_per_step).baseline()
    return Candidate(dataclasses.replace(baseline, optim=candidate.arm.optim), batch, accumulation)


def check_can_compare(target: Target) -> None:
    """Raise ``InvalidRequestError`` for several ranks, or the user's own dataset: there losses are not compared."""
    if target.best.candidate.arm.ranks > 1:
        raise InvalidRequestError(
            f"the study {target.report.study.name!r} was measured on {target.best.candidate.arm.ranks} ranks, on which "
            "losses are not compared",
            "search the same model on one GPU; autotune verify without --same-loss runs all ranks",
        )
    if target.has_data:
        raise InvalidRequestError(
            f"the study {target.report.study.name!r} was searched with its own dataset, on which losses are not "
            "compared once more",
            "autotune show tells what the search itself found; autotune verify without --same-loss runs on the data",
        )


def compare_losses(target: Target, log_folder: Path) -> LossComparisonDocument:
    """Compare the first step of the winner with that of the baseline's settings (``reference_of``).

    Raises ``InvalidRequestError`` for several ranks and own datasets, ``TrialServerError`` where a step fails.
    """
    check_can_compare(target)
    candidate, baseline = target.best.candidate, target.report.baseline
    # A study without a measured baseline is compared with default settings.
    plain = Arm(attn_implementation=candidate.arm.attn_implementation)
    reference = reference_of(candidate, baseline.candidate.arm if baseline is not None else plain)
    with TrialServer(target.placement, target.workload, log_folder) as server:
        looker = Looker(
            server.look,
            reference,
            target.placement.rank_devices,
            cap_bytes=target.report.ceiling.cap_bytes,
            seed=target.report.study.request["seed"],
            is_unmodified=False,
            is_own=False,
            as_measured=True,
        )
        look = looker.differences(candidate).look
    if look.unknown is not None:
        raise TrialServerError(f"the two were not compared: {look.unknown}", f"the logs are in {log_folder}")
    against = f"{candidate.describe()} against {reference.describe()}"
    differences = (*look.differs, *look.ruled_out)
    finding = f"the same training: {against}: the first step has the same loss and gradients"
    if differences:
        finding = f"different training: {against}: {'; '.join(differences)}"
    return LossComparisonDocument(not differences, candidate.parameters(), reference.parameters(), look, finding)
