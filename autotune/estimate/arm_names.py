"""Name several arms in a few words: ``all fp16`` in place of each fp16 arm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from autotune.core.candidate import Arm


def _strategy(arm: Arm) -> str | None:
    if arm.strategy is None:
        return None
    ranks = f" × {arm.ranks}" if arm.ranks > 1 else ""
    return f"{arm.strategy}{ranks}" + (", sync each batch" if arm.sync_each_batch else "")


# What arms may have in common, in the words for it.
_IN_COMMON: tuple[Callable[[Arm], str | None], ...] = (
    lambda arm: arm.precision,
    lambda arm: "that sync each batch" if arm.sync_each_batch else None,
    _strategy,
    lambda arm: f"{arm.precision}, {_strategy(arm)}" if arm.strategy else None,
)


def names_of_arms(arms: Iterable[Arm], others: Sequence[Arm], every: Sequence[Arm]) -> tuple[str, ...]:
    """Return names for some arms, each ``Arm.describe`` or the words for several: ``all fp16``, ``all other fsdp × 2``.

    Words name those of ``others``, which contain ``arms``, that have something in common. They say ``other`` where more
    of ``every`` arm have it.
    """
    left = list(arms)
    # Names in the order of the first arm that each stands for.
    names: dict[int, str] = {}
    while left:
        shared = {
            words: [arm for arm in others if has(arm) == words] for has in _IN_COMMON for words in _words(left, has)
        }
        whole = {words: of_it for words, of_it in shared.items() if len(of_it) > 1 and {*of_it} <= {*left}}
        if not whole:
            names.update((others.index(arm), arm.describe()) for arm in left)
            break
        words, named = max(whole.items(), key=lambda item: len(item[1]))
        more = any(has(arm) == words for has in _IN_COMMON for arm in every if arm not in others)
        names[others.index(named[0])] = f"all other {words}" if more else f"all {words}"
        left = [arm for arm in left if arm not in named]
    return tuple(names[place] for place in sorted(names))


def _words(arms: Iterable[Arm], has: Callable[[Arm], str | None]) -> dict[str, None]:
    return dict.fromkeys(words for arm in arms if (words := has(arm)) is not None)
