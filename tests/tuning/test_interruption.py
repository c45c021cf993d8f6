"""Signals that end a search, in the middle of what must be kept together and outside of it."""

import os
import signal
from collections.abc import Iterator, Sequence

import pytest

from autotune.tuning.interruption import Interruption, interrupted_by_signals


def hold(interruption: Interruption, numbers: Sequence[int], done: list[str], error: Exception | None = None) -> None:
    """Get signals within a block that is held."""
    with interruption.held():
        for number in numbers:
            os.kill(os.getpid(), number)
        if error is not None:
            raise error
        done.append("kept together")
    done.append("went on")


@pytest.fixture(autouse=True)
def _no_nohup() -> Iterator[None]:
    """However the tests were started."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_a_search_under_nohup_goes_on_when_the_terminal_is_closed() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    interruption, done = Interruption(), list[str]()
    with interrupted_by_signals(interruption, lambda text: None):
        hold(interruption, (signal.SIGHUP,), done)
    assert (done, interruption.asked) == (["kept together", "went on"], False)


@pytest.mark.parametrize("numbers", [(signal.SIGTERM,), (signal.SIGHUP,), (signal.SIGINT, signal.SIGINT)])
def test_a_signal_within_a_block_that_is_held_ends_the_search_after_it(numbers: tuple[signal.Signals, ...]) -> None:
    interruption, done = Interruption(), list[str]()
    with interrupted_by_signals(interruption, lambda text: None), pytest.raises(KeyboardInterrupt):
        hold(interruption, numbers, done)
    assert (done, interruption.asked) == (["kept together"], True)


def test_a_signal_after_such_a_block_ends_the_search_at_once() -> None:
    interruption, done = Interruption(), list[str]()
    with interrupted_by_signals(interruption, lambda text: None):
        hold(interruption, (), done)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    assert done == ["kept together", "went on"]


def test_an_error_within_such_a_block_is_raised_as_it_is() -> None:
    interruption, done = Interruption(), list[str]()
    with interrupted_by_signals(interruption, lambda text: None):
        with pytest.raises(ValueError, match="own"):
            hold(interruption, (signal.SIGTERM,), done, ValueError("own"))
        hold(interruption, (), done)
    assert done == ["kept together", "went on"]
