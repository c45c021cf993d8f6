"""Test ``autotune mcp`` with the client of the protocol's own library."""

import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import warm
from command_line import COLD, TINY_MODEL, TINY_SEARCH, Studied, environment

anyio = pytest.importorskip("anyio")
library = pytest.importorskip("mcp", minversion=None)


def asked(folder: Path, storage: str, questions: Callable[[Any], Awaitable[Any]], *, cold: bool = True) -> Any:
    """What came of questions to a client of a server on a database, which starts cold unless it is said."""
    parameters = library.StdioServerParameters(
        command=sys.executable, args=["-m", "autotune", "mcp", "--storage", storage], env=environment(), cwd=str(folder)
    )

    async def ask() -> Any:
        async with (
            library.stdio_client(parameters) as (reader, writer),
            library.ClientSession(reader, writer) as session,
        ):
            await session.initialize()
            return await questions(session)

    with warm.cold(cold):
        return anyio.run(ask)


def text_of(answer: Any) -> str:
    return "".join(part.text for part in answer.content)


@COLD
def test_an_agent_shows_exports_and_predicts(studied: Studied, tmp_path: Path, cold: bool) -> None:
    async def questions(session: Any) -> Any:
        listed = await session.list_tools()
        shown = await session.call_tool("show", {"study": studied.name})
        exported = await session.call_tool("export", {"study": studied.name, "format": "yaml"})
        unknown = await session.call_tool("show", {"study": "nothing"})
        options = ["--seq-len", "32"]
        predicted = await session.call_tool(
            "predict", {"model": TINY_MODEL, "effective_batch": 16, "gpu": "rtx-4090", "options": options}
        )
        return listed, shown, exported, unknown, predicted

    listed, shown, exported, unknown, predicted = asked(tmp_path, studied.storage, questions, cold=cold)
    assert [tool.name for tool in listed.tools] == ["search", "predict", "show", "export", "verify"]
    assert all(tool.description for tool in listed.tools)
    best = studied.document["best"]
    assert json.loads(text_of(shown))["best"] == best
    assert f"per_device_train_batch_size: {best['per_device_train_batch_size']}" in text_of(exported)
    assert json.loads(text_of(predicted))["gpus"]
    assert "nothing" in text_of(unknown)
    assert "exit code 9" in text_of(unknown)


@pytest.mark.whole
def test_an_agent_searches_and_verifies(tmp_path: Path) -> None:
    async def questions(session: Any) -> Any:
        options = [*TINY_SEARCH[3:], "--trials", "1", "--study", "asked"]
        found = await session.call_tool("search", {"model": TINY_MODEL, "effective_batch": 16, "options": options})
        verified = await session.call_tool("verify", {"study": "asked", "options": ["--steps", "10"]})
        return found, verified

    found, verified = asked(tmp_path, "studies.db", questions)
    assert json.loads(text_of(found))["study"] == "asked"
    assert "promised" in text_of(verified)
