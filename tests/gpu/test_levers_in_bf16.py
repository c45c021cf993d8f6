"""Pairs of levers on a GPU in bf16: twenty steps are the same as without, to the rounding of bf16."""

from pathlib import Path
from typing import Any

import pytest
import torch
from levers_together import LEVERS, PAIRS, TwentySteps, together, twenty_steps

pytestmark = pytest.mark.gpu

_BF16: dict[str, Any] = {"use_cpu": False, "bf16": True, "tf32": False}
_FP32: dict[str, Any] = {"use_cpu": False, "tf32": False}


@pytest.fixture(autouse=True)
def compiled_by_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile as a search does, and each training anew: past eight variants of a function nothing is compiled."""
    torch._dynamo.reset()
    monkeypatch.setitem(LEVERS, "compiled", ({"regional_compilation": True}, {"torch_compile": True}))


def _distances(one: TwentySteps, other: TwentySteps) -> tuple[float, float, float]:
    """The largest distance of two losses of steps, that of two evaluations, and that of the weights."""
    losses, evaluated = (
        max(abs(a - b) for a, b in zip(*pair, strict=True))
        for pair in ((one.losses, other.losses), (one.evaluated, other.evaluated))
    )
    return losses, evaluated, torch.linalg.vector_norm(one.weights - other.weights).item()


def _is_to_rounding(found: TwentySteps, asked: TwentySteps, exact: TwentySteps) -> bool:
    """Tell whether a training in bf16 is as near to that in fp32 as the one that was asked for in bf16 is.

    Two trainings with other roundings lie equally far from the exact one, up to chance: a factor of 2 allows for it.
    """
    pairs = zip(_distances(found, exact), _distances(asked, exact), strict=True)
    return all(here <= 2 * there for here, there in pairs)


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("kind", PAIRS)
def test_twenty_steps_with_each_pair_are_the_same(kind: str, accumulation: int, tmp_path: Path) -> None:
    plain = together((), accumulation)
    exact = twenty_steps(kind, plain, tmp_path / "exact", **_FP32)
    asked = twenty_steps(kind, plain, tmp_path / "asked", **_BF16)
    differ = []
    for names in PAIRS[kind]:
        how, folder = together(names, accumulation), tmp_path / " and ".join(names)
        changed = twenty_steps(kind, how, folder, **_BF16)
        torch._dynamo.reset()
        resumed = twenty_steps(kind, how, tmp_path / "resumed", resumed=folder / "checkpoint-10", **_BF16)
        torch._dynamo.reset()
        for word, found in (("changed", changed), ("resumed", resumed)):
            if not _is_to_rounding(found, asked, exact):
                differ.append((names, word, _distances(found, exact), _distances(asked, exact)))
    assert differ == []


@pytest.mark.parametrize("kind", PAIRS)
def test_another_training_is_told_apart(kind: str, tmp_path: Path) -> None:
    """A learning rate that is a fifth larger is farther away than rounding."""
    plain = together((), 4)
    exact = twenty_steps(kind, plain, tmp_path / "exact", **_FP32)
    asked = twenty_steps(kind, plain, tmp_path / "asked", **_BF16)
    other = twenty_steps(kind, plain, tmp_path / "other", learning_rate=6e-5, **_BF16)
    assert not _is_to_rounding(other, asked, exact)
