"""Test signals that end a search, within a block that delays them and outside of it."""

import asyncio
import os
import signal
import threading
from collections.abc import Iterator, Sequence

import pytest

from autotune.core.signals import signals_delayed
from autotune.tuning.interruption import Interruption, interrupted_by_signals


def hold(numbers: Sequence[int], done: list[str], error: Exception | None = None) -> None:
    """Get signals within a block that delays them."""
    with signals_delayed():
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
        hold((signal.SIGHUP,), done)
    assert (done, interruption.asked) == (["kept together", "went on"], False)


@pytest.mark.parametrize("numbers", [(signal.SIGTERM,), (signal.SIGHUP,), (signal.SIGINT, signal.SIGINT)])
def test_a_signal_within_such_a_block_ends_the_search_after_it(numbers: tuple[signal.Signals, ...]) -> None:
    interruption, done = Interruption(), list[str]()
    with interrupted_by_signals(interruption, lambda text: None), pytest.raises(KeyboardInterrupt):
        hold(numbers, done)
    assert (done, interruption.asked) == (["kept together"], True)


def test_a_signal_after_such_a_block_ends_the_search_at_once() -> None:
    interruption, done = Interruption(), list[str]()
    with interrupted_by_signals(interruption, lambda text: None):
        hold((), done)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    assert done == ["kept together", "went on"]


def test_a_signal_and_an_error_within_such_a_block_are_both_reported() -> None:
    done = list[str]()
    with interrupted_by_signals(Interruption(), lambda text: None):
        with pytest.raises(KeyboardInterrupt) as interrupted:
            hold((signal.SIGTERM,), done, ValueError("own"))
        assert str(interrupted.value.__context__) == "own"
        hold((), done)
    assert done == ["kept together", "went on"]


def test_blocks_can_be_nested() -> None:
    done = list[str]()

    def nest() -> None:
        with signals_delayed():
            hold((signal.SIGTERM,), done)
            done.append("outer")

    with interrupted_by_signals(Interruption(), lambda text: None), pytest.raises(KeyboardInterrupt):
        nest()
    assert done == ["kept together", "went on", "outer"]


def test_asyncio_is_told_of_such_a_signal_once() -> None:
    told = list[str]()

    async def take_signal() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.append, "told")
        hold((signal.SIGTERM,), [])
        for _ in range(3):
            await asyncio.sleep(0.01)

    asyncio.run(take_signal())
    assert told == ["told"]


def test_another_thread_does_not_change_the_handlers() -> None:
    done = list[str]()
    thread = threading.Thread(target=hold, args=((), done))
    thread.start()
    thread.join(60.0)
    assert done == ["kept together", "went on"]
