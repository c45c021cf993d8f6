"""What is measured once more before a search ends, and what that decides."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import pytest
from recorded import measurement
from searching import ceiling_of

from autotune.finals import finals
from autotune.history import History, Tried
from autotune.trial import Arm, Candidate, Completed, Failed
from autotune.units import GIB

COMFORTABLE = Candidate(Arm("bf16"), 32, 2)
RIVAL = Candidate(Arm("bf16"), 64, 1)
ALL = [COMFORTABLE, RIVAL]


@dataclass
class Told:
    """A history that is told speeds, in samples a second; the smaller batch leaves more memory free."""

    history: History = field(default_factory=lambda: History(ceiling_of(24 * GIB)))

    def measured(self, candidate: Candidate, speed: float, run: int | None = None, spread: float | None = None) -> Told:
        peak = candidate.per_device_train_batch_size * GIB // 8
        found = measurement(candidate, candidate.samples_per_step / speed, peak, peak, run)
        outcome = Completed(found if spread is None else dataclasses.replace(found, relative_spread=spread))
        in_full = run is None
        self.history.add(Tried(str(len(self.history.tried)), candidate, outcome, in_full))
        return self

    def winner(self) -> Candidate:
        found = self.history.winner(ALL)
        assert found is not None
        return found.candidate


def test_a_rival_within_the_noise_but_over_the_tolerance_is_measured_with_the_winner() -> None:
    told = Told().measured(COMFORTABLE, 100.0).measured(RIVAL, 101.5)
    assert told.winner() == COMFORTABLE
    assert finals(told.history, ALL) == [COMFORTABLE, RIVAL]


@pytest.mark.parametrize("speed", [99.0, 100.5])
def test_one_within_the_tolerance_is_not(speed: float) -> None:
    assert finals(Told().measured(COMFORTABLE, 100.0).measured(RIVAL, speed).history, ALL) == []


@pytest.mark.parametrize(("again", "winner"), [(101.5, RIVAL), (100.5, COMFORTABLE), (98.0, COMFORTABLE)])
def test_the_second_measurements_decide_by_the_tolerance(again: float, winner: Candidate) -> None:
    told = Told().measured(COMFORTABLE, 100.0).measured(RIVAL, 101.5)
    told.measured(COMFORTABLE, 100.0)
    assert finals(told.history, ALL) == [RIVAL]
    told.measured(RIVAL, again)
    assert finals(told.history, ALL) == []
    assert told.winner() == winner


def test_a_larger_tolerance_wants_less() -> None:
    told = Told(History(ceiling_of(24 * GIB), tolerance=0.02)).measured(COMFORTABLE, 100.0).measured(RIVAL, 101.5)
    assert finals(told.history, ALL) == []


def test_a_winner_measured_in_part_is_owed_a_whole_measurement_once() -> None:
    told = Told().measured(COMFORTABLE, 100.0, run=1)
    assert finals(told.history, ALL) == [COMFORTABLE]
    told.history.add(Tried("fault", COMFORTABLE, Failed("error", "broken")))
    assert finals(told.history, ALL) == []


@pytest.mark.parametrize(("spread", "is_owed"), [(0.029, False), (0.031, True)])
def test_a_winner_less_certain_than_is_promised_is_measured_once_more(spread: float, is_owed: bool) -> None:
    told = Told().measured(COMFORTABLE, 100.0, spread=spread)
    assert finals(told.history, ALL) == ([COMFORTABLE] if is_owed else [])
    told.measured(COMFORTABLE, 98.0, spread=spread)
    assert finals(told.history, ALL) == []


@pytest.mark.parametrize(("run", "is_owed"), [(None, False), (1, True)])
def test_on_a_machine_that_stays_noisy_doubt_is_not_pursued(run: int | None, is_owed: bool) -> None:
    """What was measured in part is owed a whole measurement all the same."""
    told = Told().measured(COMFORTABLE, 100.0, spread=0.2).measured(COMFORTABLE, 60.0, spread=0.2)
    told.measured(RIVAL, 90.0, run, spread=0.2)
    assert told.winner() == RIVAL
    assert finals(told.history, ALL) == ([RIVAL] if is_owed else [])


def test_what_compiles_is_not_compiled_again_for_that() -> None:
    compiled = Candidate(Arm("bf16", torch_compile=True), 64, 1)
    assert finals(Told().measured(compiled, 100.0, spread=0.2).history, [compiled]) == []


def test_launch_bound_steps_are_promised_less_exactly() -> None:
    """64 samples in 50 ms: the machine's own cores are most of what is timed."""
    assert finals(Told().measured(RIVAL, 1280.0, spread=0.04).history, ALL) == []
    assert finals(Told().measured(RIVAL, 1280.0, spread=0.06).history, ALL) == [RIVAL]


def test_nothing_is_owed_where_nothing_is_known() -> None:
    assert finals(History(ceiling_of(24 * GIB)), ALL) == []
