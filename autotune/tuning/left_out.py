"""Say why some arms of a search (configurations without batch) had no trial, for its report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations

import numpy as np

from autotune.core.candidate import Arm
from autotune.estimate.chance import LEAST_CHANCE, Chances
from autotune.estimate.feasibility import Judge
from autotune.estimate.history import History, speed_of
from autotune.estimate.speed_model import SpeedModel
from autotune.space.space import Space
from autotune.store.records import LeftOut


def left_out_arms(space: Space, history: History) -> tuple[LeftOut, ...]:
    """Return the arms without a trial by reason: no batch fits, or the expected gain is too small."""
    judge, tried = Judge(space, history), {space.plain(t.candidate.arm) for t in history.tried}
    # The batches that the search came to, before smaller multiples.
    reach = judge.batches_in_reach()
    best = history.fastest(t.candidate for t in history.tried if space.contains(t.candidate))
    untried = [
        arm
        for arm in space.arms
        if arm not in tried and not judge.offloads_needlessly(space.candidate(arm, max(reach, default=1)))
    ]
    if not untried or not reach or best is None:
        return ()
    chances, model = Chances(history), SpeedModel(history)
    too_large, slower, largest_gain = [], [], 0.0
    for arm in untried:
        candidates = [space.candidate(arm, batch) for batch in reach]
        fitting = [c for c in candidates if judge.is_open(c) and chances.fits(c) > LEAST_CHANCE]
        if fitting:
            slower.append(arm)
            log_seconds = model.expected(fitting, speed_of(best))[1]
            largest_gain = max(largest_gain, float(np.exp(-log_seconds.min())) / speed_of(best))
        else:
            too_large.append(arm)
    others, named = list(space.arms), []
    whys = (
        ("no batch of it fits", too_large),
        (f"expected to be {largest_gain:.2f} × as fast as the best, or less: not worth a trial", slower),
    )
    for why, arms in whys:
        if arms:
            named.append(LeftOut(names_of_arms(arms, others, space.arms), why))
            others = [arm for arm in others if arm not in arms]
    return tuple(named)


def names_of_arms(arms: Iterable[Arm], others: Sequence[Arm], every: Sequence[Arm]) -> tuple[str, ...]:
    """Return short names for some arms: ``Arm.describe`` of one, or words for a group: ``all fp16``.

    Words for a group stand for all of ``others`` (which contain ``arms``) that have one or two settings in common. They
    are ``all other fp16`` where arms that are not among ``others`` have them, too; ``every`` has all arms.
    """
    # The largest group is named first, until no group of two or more is left.
    left, settings = list(arms), {arm: _settings(arm) for arm in every}
    # By the index among ``others`` of the first arm that a name stands for.
    names: dict[int, str] = {}
    while left:
        shared = dict.fromkeys(words for arm in left for words in settings[arm])
        groups = {words: [arm for arm in others if words in settings[arm]] for words in shared}
        groups = {words: group for words, group in groups.items() if len(group) > 1 and {*group} <= {*left}}
        if not groups:
            names.update((others.index(arm), arm.describe()) for arm in left)
            break
        words, named = max(groups.items(), key=lambda item: len(item[1]))
        has_more = any(words in settings[arm] for arm in every if arm not in others)
        names[others.index(named[0])] = f"all other {words}" if has_more else f"all {words}"
        left = [arm for arm in left if arm not in named]
    return tuple(names[index] for index in sorted(names))


def _settings(arm: Arm) -> list[str]:
    """Return the words of each setting of an arm, and of each two of them."""
    settings = arm.describe().split(", ")
    return [*settings, *map(", ".join, combinations(settings, 2))]
