"""Test what a look finds in a collection of trainings, one step of each in this process."""

import itertools
from collections.abc import Iterable, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_graphs import emulate
from trainings import DIFFERING, SAME, T5, How, Training, causal, of, ragged, table_lines
from transformers import AutoModelForMaskedLM, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

from autotune.core.look import Difference, difference
from autotune.training import SettingUnavailableError, apply
from autotune.training.graphs import GraphedSteps
from autotune.worker.trial.look import turn_off_dropout


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


_LEVERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "few lengths": ({"length_multiple": 8}, {}),
    "rows": ({"padding_free": True}, {}),
    "fused loss": ({"fused_loss": True}, {}),
    "sparse prediction": ({"sparse_prediction": True}, {}),
    "some layers": ({"checkpointed_layers": 1}, {"activation_checkpointing": True}),
    "compiled": ({"regional_compilation": True}, {"torch_compile": True, "torch_compile_backend": "eager"}),
    "graphs": ({"cuda_graphs": True}, {}),
    "non-blocking": ({}, {"accelerator_config": {"non_blocking": True}, "logging_nan_inf_filter": False}),
}
"""What is applied and the fields of ``TrainingArguments`` for each lever."""


def _classes_of_other_lengths() -> list[dict[str, Any]]:
    return [row | {"labels": torch.tensor(at % 2)} for at, row in enumerate(ragged())]


_OTHER_LENGTHS = {
    "causal": Training("", "", causal("llama", num_key_value_heads=2), ragged, How()),
    "masked": Training("", "", of(AutoModelForMaskedLM, "bert"), ragged, How()),
    "classes": Training("", "", of(AutoModelForSequenceClassification, "bert"), _classes_of_other_lengths, How()),
    "targets": Training("", "", of(AutoModelForSeq2SeqLM, "t5", **T5), ragged, How()),
}


def _emulate_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    monkeypatch.setattr(
        "autotune.training.use_cuda_graphs", lambda trainer: setattr(trainer, "training_step", GraphedSteps(trainer))
    )


def _together(names: Iterable[str], accumulation: int = 2) -> How:
    """A way to train with some levers, the same eight samples a step."""
    applied, arguments = ({k: v for name in names for k, v in _LEVERS[name][part].items()} for part in (0, 1))
    return How(8 // accumulation, accumulation, tuple(arguments.items()), tuple(applied.items()))


@pytest.mark.parametrize(
    ("kind", "levers", "count"),
    [
        # All but what is compiled, which takes most of the time.
        pytest.param("causal", _LEVERS.keys() - {"compiled", "non-blocking"}, 15, id="causal"),
        *(
            pytest.param(kind, _LEVERS.keys(), count, marks=pytest.mark.whole, id=f"{kind}, all")
            for kind, count in (("causal", 28), ("masked", 21), ("classes", 15), ("targets", 15))
        ),
    ],
)
def test_levers_together_are_the_training_without(
    kind: str, levers: Set[str], count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each lever and all pairs that a training of samples of different lengths can have."""
    _emulate_graphs(monkeypatch)
    training, ran, refused = _OTHER_LENGTHS[kind], [], set[str]()
    asked = training.step(training.asked, tmp_path)
    for names in itertools.combinations_with_replacement(_LEVERS, 2):
        if refused.intersection(names) or not levers >= {*names}:
            continue
        try:
            found = difference(asked, training.step(_together(names), tmp_path))
        except SettingUnavailableError:
            refused |= {names[0]} if names[0] == names[1] else set()
            continue
        assert found is None, f"{names}: {found}"
        ran.append(names)
    assert len(ran) == count


_PAIRS = {
    "causal": [*itertools.combinations(("few lengths", "fused loss", "some layers", "graphs", "compiled"), 2),
               *(("rows", name) for name in ("fused loss", "some layers"))],
    "masked": [*itertools.combinations(("few lengths", "sparse prediction", "some layers", "graphs", "compiled"), 2),
               ("graphs", "non-blocking")],
}  # fmt: skip
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
        for kind, pairs in _PAIRS.items()
        for names in pairs
    ],
)
def test_twenty_steps_with_an_evaluation_and_resuming_are_the_same(
    kind: str, names: tuple[str, str], accumulation: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _emulate_graphs(monkeypatch)
    training = _OTHER_LENGTHS[kind]
    training = replace(training, options=(("eval_dataset", training.data()),))

    def trained(how: How, name: str, resumed: str | None = None) -> tuple[list[float], list[float], torch.Tensor]:
        schedule = {"eval_strategy": "steps", "eval_steps": 10, "save_strategy": "steps", "save_steps": 10}
        trainer = training.made(how, tmp_path / name, max_steps=20, logging_steps=1, **schedule)
        turn_off_dropout(trainer.model)
        apply(trainer, **dict(how.applied or ()))
        trainer.train(resume_from_checkpoint=resumed)
        told = ([e[key] for e in trainer.state.log_history if key in e] for key in ("loss", "eval_loss"))
        return (*told, torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))

    how = _together(names, accumulation)
    losses, evaluated, weights = trained(_together((), accumulation), "asked")
    for found in (trained(how, "changed"), trained(how, "resumed", str(tmp_path / "changed" / "checkpoint-10"))):
        assert found[0] == pytest.approx(losses, rel=1e-4)
        assert found[1] == pytest.approx(evaluated, rel=1e-4)
        assert torch.allclose(found[2], weights, atol=1e-4)
