"""Test what a look finds in a collection of trainings, one step of each in this process."""

import itertools
from collections.abc import Set
from pathlib import Path

import pytest
import torch
from emulated_graphs import emulate
from levers_together import LEVERS, OTHER_LENGTHS, PAIRS, together, twenty_steps
from trainings import DIFFERING, SAME, Training, table_lines

from autotune.core.look import Difference, difference
from autotune.training import SettingUnavailableError
from autotune.training.graphs import GraphedSteps


def _named(training: Training) -> object:
    marks = () if training.is_quick else (pytest.mark.whole,)
    return pytest.param(training, marks=marks, id=f"{training.name}; {training.change}")


def test_the_collection_is_large_enough_and_documented() -> None:
    """``python tests/trainings.py`` prints the table."""
    assert len(DIFFERING) >= 30
    assert len(SAME) >= 30
    page = Path(__file__).resolve().parents[2] / "docs" / "explanation" / "same-training.md"
    assert "\n".join(table_lines()) in page.read_text()


@pytest.mark.parametrize("training", map(_named, (*DIFFERING, *SAME)))
def test_a_look_finds_what_changes_a_training(training: Training, tmp_path: Path) -> None:
    found = training.found(tmp_path)
    kind = found.kind if isinstance(found, Difference) else found or "same"
    assert kind == training.finds, found


def _emulate_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    monkeypatch.setattr(
        "autotune.training.use_cuda_graphs", lambda trainer: setattr(trainer, "training_step", GraphedSteps(trainer))
    )


@pytest.mark.parametrize(
    ("kind", "levers", "count"),
    [
        # All but what is compiled, which takes most of the time.
        pytest.param("causal", LEVERS.keys() - {"compiled", "non-blocking"}, 15, id="causal"),
        *(
            pytest.param(kind, LEVERS.keys(), count, marks=pytest.mark.whole, id=f"{kind}, all")
            for kind, count in (("causal", 28), ("masked", 21), ("classes", 15), ("targets", 15))
        ),
    ],
)
def test_levers_together_are_the_training_without(
    kind: str, levers: Set[str], count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each lever and all pairs that a training of samples of different lengths can have."""
    _emulate_graphs(monkeypatch)
    training, ran, refused = OTHER_LENGTHS[kind], [], set[str]()
    asked = training.step(training.asked, tmp_path)
    for names in itertools.combinations_with_replacement(LEVERS, 2):
        if refused.intersection(names) or not levers >= {*names}:
            continue
        try:
            found = difference(asked, training.step(together(names), tmp_path))
        except SettingUnavailableError:
            refused |= {names[0]} if names[0] == names[1] else set()
            continue
        assert found is None, f"{names}: {found}"
        ran.append(names)
    assert len(ran) == count


_QUICK = {
    ("causal", ("few lengths", "graphs")), ("causal", ("rows", "fused loss")),
    ("masked", ("sparse prediction", "some layers")),
}  # fmt: skip


@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.whole), 4])
@pytest.mark.parametrize(
    ("kind", "names"),
    [
        pytest.param(
            kind, names, marks=() if (kind, names) in _QUICK else pytest.mark.whole, id=f"{kind}, {' and '.join(names)}"
        )
        for kind, pairs in PAIRS.items()
        for names in pairs
    ],
)
def test_twenty_steps_with_an_evaluation_and_resuming_are_the_same(
    kind: str, names: tuple[str, str], accumulation: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _emulate_graphs(monkeypatch)
    how = together(names, accumulation)
    asked = twenty_steps(kind, together((), accumulation), tmp_path / "asked")
    changed = twenty_steps(kind, how, tmp_path / "changed")
    resumed = twenty_steps(kind, how, tmp_path / "resumed", resumed=tmp_path / "changed" / "checkpoint-10")
    for found in (changed, resumed):
        assert found.losses == pytest.approx(asked.losses, rel=1e-4)
        assert found.evaluated == pytest.approx(asked.evaluated, rel=1e-4)
        assert torch.allclose(found.weights, asked.weights, atol=1e-4)
