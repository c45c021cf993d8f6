"""Look whether two settings are the same training, by comparing their first optimizer steps on the same samples.

Both steps begin from the same weights, in float32 and without dropout. Of each gradient only its norm and a few random
projections are kept, which tell how far two gradients are apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from autotune.core.candidate import Candidate
from autotune.core.placement import RankDevices
from autotune.core.rehearsal import Rehearsal
from autotune.core.units import plural

PROJECTIONS = 8
"""Random projections of each gradient. The root of their mean square is its norm, ± 25 % (the deviation of a chi-square
with 8 degrees of freedom, halved)."""
LOSS_TOLERANCE = 1e-4
"""Largest relative difference of two losses in float32. Those of the same training differed by 4e-7 at most."""
GRADIENT_TOLERANCE = 4e-3
"""Largest distance of two gradients of a parameter in float32, relative to their norm.

Of tests/trainings.py, the largest was 1e-4 at most where the training is the same, and 0.16 at least where it is not
(CPU, torch 2.13.0, transformers 5.23.0, 25 November 2026)."""
LOSS_ROUNDOFFS, GRADIENT_ROUNDOFFS = 4, 32
"""The same tolerances in unit roundoffs, for coarser precisions than float32. Losses of tiny models differed by 0.04 of
bf16, norms of their gradients by 0.4; depth adds to that. Choices."""
_ROUNDOFF = 2.0**-24
_LEAST_NORM = 1e-3
"""A parameter's gradient whose norm is a smaller share of the whole gradient's may be rounding, as for the bias of
attention's keys: its distance is taken relative to this share. A choice."""


@dataclass(frozen=True, slots=True)
class Gradient:
    """A parameter's gradient, in a few numbers by which two gradients can be compared."""

    norm: float
    sketch: tuple[float, ...]
    """Its products with random directions of variance 1, which depend on its shape alone."""


@dataclass(frozen=True, slots=True)
class FirstStep:
    """The first optimizer step of a training: its loss, gradients and samples."""

    loss: float
    """As the Trainer reports it: the sum over the micro-steps."""
    gradients: dict[str, Gradient | None]
    """By the name of each trainable parameter; ``None`` for one that got no gradient."""
    samples: int
    micro_steps: int
    weights: float
    """The sum of the norms of all weights, by which two steps are seen to begin from the same ones."""
    roundoff: float = _ROUNDOFF
    """Unit roundoff of the weights' type: 2⁻²⁴ for float32, 2⁻⁸ for bfloat16."""
    batch: float | None = None
    """The sum of all numbers in the model's inputs, to see whether two steps had the same samples; ``None`` where that
    is known without it."""
    divides: bool = False
    """Whether ``autotune.training`` had the Trainer divide the loss by the accumulation, since it would not."""
    has_same_samples: bool = True
    """Whether the samples of all micro-steps were cut from one batch, so that every setting sees the same samples."""

    @property
    def trained(self) -> int:
        """Number of parameters that got a gradient."""
        return sum(gradient is not None for gradient in self.gradients.values())


@dataclass(frozen=True, slots=True)
class LookWork:
    """The work of a look: one optimizer step with each candidate from the same weights; gives a ``LookAnswer``."""

    candidates: tuple[Candidate, ...]
    """Settings with the small batches of the look. The user's own code is run with one candidate in a process."""
    devices: RankDevices
    cap_bytes: int
    seed: int
    noise: int = 0
    """Added to the seed of randomness within the step, to see its effect; the weights stay the same."""
    as_measured: bool = False
    """Train in the precision and weight dtype of each candidate; otherwise in float32, which rounds least."""
    unmodified: bool = False
    """Keep the settings of the user's own code, but for batch, accumulation and precision."""
    data_folder: str | None = None
    layers: int | None = None
    """How many layers a model by name has in the look, where all of them do not fit."""


@dataclass(frozen=True, slots=True)
class LookAnswer:
    """The first steps that a look has made or, where memory ran out, the size of a model for which it may not."""

    steps: tuple[FirstStep, ...] = ()
    fewer_layers: int | None = None
    """Where it ran out of memory: the number of layers with which the same look may fit."""


Kind = Literal["untrained", "scale", "loss", "gradient"]


@dataclass(frozen=True, slots=True)
class Difference:
    """How the first step of a setting differs, beyond rounding, from that of the training that was asked for."""

    kind: Kind
    words: str
    """The end of a sentence: ``trains 2 of 14 tensors, not 14``."""
    factor: float = 1.0
    """For the kind ``scale``: how many times as large the gradients are."""


def difference(asked: FirstStep, other: FirstStep) -> Difference | None:
    """Return how another setting's first step differs from that asked for; ``None`` where rounding explains it.

    Tried in this order: other parameters get gradients, gradients are a multiple, gradients differ, the loss differs.
    """
    lost = [name for name, gradient in asked.gradients.items() if gradient and not other.gradients.get(name)]
    added = [name for name, gradient in other.gradients.items() if gradient and not asked.gradients.get(name)]
    if lost or added:
        total = len(asked.gradients)
        return Difference("untrained", f"trains {other.trained} of {total} tensors, not {asked.trained}")
    roundoff = max(asked.roundoff, other.roundoff)
    is_coarse = roundoff > _ROUNDOFF
    largest_gap = max(GRADIENT_TOLERANCE, GRADIENT_ROUNDOFFS * roundoff)
    largest_loss_gap = max(LOSS_TOLERANCE, LOSS_ROUNDOFFS * roundoff)
    loss_gap = abs(other.loss - asked.loss) / max(abs(asked.loss), 1e-6)
    loss = f"a loss of {other.loss:.5g}, not {asked.loss:.5g}"
    if not math.isfinite(loss_gap):
        return Difference("loss", f"has {loss}")
    factor = _gradient_factor(asked, other)
    if abs(factor - 1) > largest_gap:
        gaps_of_scaled = _gradient_gaps(asked, other, factor, together=is_coarse)
        if max(gaps_of_scaled.values(), default=0.0) <= largest_gap:
            return Difference("scale", f"has gradients {factor:.3g} times as large", factor)
    gaps = _gradient_gaps(asked, other, together=is_coarse)
    # Written with "not", so that a gap of NaN is far, too.
    far = {name: gap for name, gap in gaps.items() if not gap <= largest_gap}
    if far:
        name = max(far, key=far.__getitem__)
        which = f"of {plural(len(far), 'tensor')}, {name} by" if len(far) > 1 else f"of {name} by"
        also = f"{loss}, and " if loss_gap > largest_loss_gap else ""
        return Difference("gradient", f"has {also}other gradients ({which} {far[name]:.2g} of its norm)")
    return Difference("loss", f"has {loss}") if loss_gap > largest_loss_gap else None


def _gradient_pairs(asked: FirstStep, other: FirstStep) -> Iterator[tuple[str, Gradient, Gradient]]:
    """Yield name and both gradients of each parameter that has a gradient in both steps."""
    for name, mine in asked.gradients.items():
        if mine is not None and (theirs := other.gradients.get(name)) is not None:
            yield name, mine, theirs


def _gradient_factor(asked: FirstStep, other: FirstStep) -> float:
    """Return the factor by which the asked gradients come nearest to the other's (least squares); 1 without any."""
    products = squares = 0.0
    for _, mine, theirs in _gradient_pairs(asked, other):
        products += sum(a * b for a, b in zip(mine.sketch, theirs.sketch, strict=True))
        squares += sum(a * a for a in mine.sketch)
    return products / squares if squares else 1.0


def _gradient_gaps(
    asked: FirstStep, other: FirstStep, factor: float = 1.0, *, together: bool = False
) -> dict[str, float]:
    """Return the distance between both gradients of each parameter, relative to the larger of their norms.

    A norm counts as ``_LEAST_NORM`` of the whole gradient's at least. The gradients of ``asked`` are multiplied by
    ``factor`` first. With ``together``, return one distance over all parameters, relative to the norm of ``asked``: in
    16 bits the gradients of single parameters are mostly rounding.
    """
    pairs = list(_gradient_pairs(asked, other))
    whole_norm = abs(factor) * math.sqrt(sum(mine.norm**2 for _, mine, _ in pairs))
    squares = {
        name: sum((b - factor * a) ** 2 for a, b in zip(mine.sketch, theirs.sketch, strict=True)) / PROJECTIONS
        for name, mine, theirs in pairs
    }
    if together:
        return {"all": math.sqrt(sum(squares.values())) / whole_norm} if whole_norm else {}
    scales = {name: max(abs(factor) * mine.norm, theirs.norm, _LEAST_NORM * whole_norm) for name, mine, theirs in pairs}
    return {name: math.sqrt(squares[name]) / scale for name, scale in scales.items() if scale}


@dataclass(frozen=True, slots=True)
class Look:
    """What the look found: whether the winner trains as the training that was asked for. Kept with the study."""

    differs: tuple[str, ...] = ()
    """How the winner's training differs from that asked for, a sentence for each cause."""
    cure: str | None = None
    """The advice what to do about ``differs``."""
    ruled_out: tuple[str, ...] = ()
    """Settings that change the training, each with the difference; the search went on without them."""
    unknown: str | None = None
    """Why nothing was compared; ``None`` where it was."""

    @property
    def sentences(self) -> list[str]:
        """Sentences that say how the training differs, with the remedy."""
        return [f"{each}; {self.cure}" if self.cure is not None else each for each in self.differs]

    seconds: float = 0.0
    rehearsal: Rehearsal | None = None
    """What a long run does beyond its first steps; ``None`` where there is nothing, and in studies of versions without
    one."""
