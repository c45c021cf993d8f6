"""Test what many listeners and many visitors share: events, and the parts of pages."""

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from markupsafe import Markup
from searching import write_empty_database
from serving import StandInEngine

from autotune.service import feeds
from autotune.service.access import Access
from autotune.service.change_events import ChangeEvents
from autotune.service.feeds import Feeds
from autotune.service.pages import frame
from autotune.service.searches import Searches
from autotune.store.opening import open_store
from autotune.store.queue import JobEvent, Needs, TokenRecord
from autotune.store.repository import Store

LIMIT_SECONDS = 120


async def heard(feed: Feeds, job_id: str, after: int, token: TokenRecord) -> bytes:
    """Listen to a search to its end."""
    return b"".join([message async for message in feed.events(job_id, token, after)])


def token_in(store: Store) -> TokenRecord:
    """A token that the database knows."""
    store.queue.add_token("listener", "read")
    return store.queue.tokens()[0]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """An empty database."""
    write_empty_database(tmp_path / "a.db")
    with open_store(str(tmp_path / "a.db")) as store:
        yield store


def feeding(store: Store) -> tuple[Searches, Access, Feeds]:
    """The searches of a database in this event loop, who may see them, and their feeds."""
    searches = Searches(store, "a.db", StandInEngine())
    searches.changes.attach()
    access = Access(searches)
    return searches, access, Feeds(searches, access)


def test_all_who_listen_to_a_search_share_one_look_at_the_database(store: Store) -> None:
    looks: list[int] = []
    look = store.queue.events

    def counted(job_id: str, after: int = 0, most: int = 1000) -> list[JobEvent]:
        looks.append(after)
        return look(job_id, after, most)

    store.queue.events = counted  # type: ignore[method-assign]

    async def run() -> list[bytes]:
        searches, access, feed = feeding(store)
        job, _ = store.queue.submit("a", {}, Needs())
        token = token_in(store)
        await access.refresh()
        listeners = [asyncio.create_task(heard(feed, job.id, after, token)) for after in (*[0] * 50, 2)]
        await asyncio.sleep(0)
        started = store.queue.start(job.id, {"host": "here"})
        assert started is not None
        searches.changes.notify(job.id)
        with store.queue.writing(job.id, started.attempts, [("line", {"text": "one"})]):
            pass
        store.queue.end(job.id, started.attempts, "finished")
        searches.changes.notify(job.id)
        return await asyncio.gather(*listeners)

    told = asyncio.run(asyncio.wait_for(run(), LIMIT_SECONDS))
    assert len(set(told[:50])) == 1
    numbers = [line for line in told[0].splitlines() if line.startswith(b"id: ")]
    assert numbers == [b"id: 1", b"id: 2", b"id: 3", b"id: 4"]
    # Whoever has the first two is not sent them again, as after a restart of the service.
    assert told[0].endswith(told[50])
    assert told[50].startswith(b"event: line\n")
    assert len(looks) <= 4


def test_a_listener_who_leaves_does_not_end_the_others(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "_PAUSE_SECONDS", 0.0)

    async def run() -> None:
        (searches, access, feed), token = feeding(store), token_in(store)
        await access.refresh()
        first, second = feed.changes(token), feed.changes(token)
        assert await anext(first) == await anext(second) == b"event: changed\ndata: {}\n\n"
        await first.aclose()  # type: ignore[attr-defined]
        waiting = asyncio.ensure_future(anext(second))
        await asyncio.sleep(0)
        searches.changes.notify("x")
        assert await waiting == b"event: changed\ndata: {}\n\n"
        await second.aclose()  # type: ignore[attr-defined]

    asyncio.run(asyncio.wait_for(run(), LIMIT_SECONDS))


def test_a_stream_ends_with_its_token_and_the_change_is_logged(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module, name in ((feeds, "_POLL_SECONDS"), (feeds, "_CHANGES_POLL_SECONDS"), (feeds, "_PAUSE_SECONDS")):
        monkeypatch.setattr(module, name, 0.01)
    monkeypatch.setattr("autotune.service.access._BELIEVED_SECONDS", 0.01)
    caplog.set_level(logging.INFO, logger="autotune.service")

    async def run() -> None:
        _, access, feed = feeding(store)
        for name in ("gone", "other"):
            store.queue.add_token(name, "read")
        await access.refresh()
        job, _ = store.queue.submit("a", {}, Needs())
        streams = {
            record.name: (feed.changes(record), feed.events(job.id, record)) for record in store.queue.tokens()
        }  # fmt: skip
        for stream in (*streams["gone"], *streams["other"]):
            assert await anext(stream)
        store.queue.remove_token("gone")
        for stream in streams["gone"]:
            # Without anything that happens, to its end.
            assert [message async for message in stream if message != feeds._CHANGED] == []
        assert await anext(streams["other"][0]) == feeds._CHANGED

    asyncio.run(asyncio.wait_for(run(), LIMIT_SECONDS))
    said = [(record.getMessage(), record.__dict__["fields"]) for record in caplog.records]
    assert ("token removed", {"name": "gone", "role": "read"}) in said


def test_a_part_is_rendered_once_for_all_who_ask_and_shows_what_came_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame, "_OLD_SECONDS", 1000.0)
    changes, renderings = ChangeEvents(), []

    def render() -> Markup:
        renderings.append(changes.count)
        return Markup(changes.count)

    async def run() -> None:
        parts = frame.Rendered(changes)
        assert set(await asyncio.gather(*(parts.get("home", render) for _ in range(20)))) == {"0"}
        assert await parts.get("home", render) == "0"
        assert len(renderings) == 1
        changes.notify("x")
        assert set(await asyncio.gather(*(parts.get("home", render) for _ in range(20)))) == {"1"}
        assert renderings == [0, 1]

    asyncio.run(asyncio.wait_for(run(), LIMIT_SECONDS))
