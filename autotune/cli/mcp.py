"""Run ``autotune mcp``: offer search, predict, show, export and verify to agents, by the Model Context Protocol."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import click

from autotune.cli.options import table_options
from autotune.core.errors import InvalidRequestError, error_with_code
from autotune.space.features import how_to_add

_INSTRUCTIONS = (
    "autotune finds the fastest settings to train a transformer on a GPU by running real training steps. predict tells "
    "what fits and how fast it is without a GPU; search measures, which takes minutes; show, export and verify work on "
    "a study that search made. options are those of the command line: autotune COMMAND --help-all lists them."
)
# Time for a command to end after SIGTERM, in which a search records what it measured, before it is killed. A choice.
_ENDING_SECONDS = 20.0


@click.command(short_help="Offer searches to agents (MCP, over stdio).")
@table_options("mcp")
def mcp(storage: str) -> None:
    """Offer search, predict, show, export and verify to agents, by the Model Context Protocol over stdin and stdout.

    \b
      claude mcp add autotune -- autotune mcp
    """
    try:
        from mcp.server.mcpserver import MCPServer
    except ImportError as error:
        raise InvalidRequestError(
            "autotune mcp needs the package mcp, which is not installed", how_to_add("mcp")
        ) from error
    server = MCPServer("autotune", instructions=_INSTRUCTIONS)
    for tool in tools(storage):
        server.add_tool(tool)
    server.run()


def tools(storage: str) -> tuple[Callable[..., Awaitable[str]], ...]:
    """Return the MCP tools for a database. Each tool runs a command in its own process and returns its output."""

    async def search(model: str = "", effective_batch: int = 0, options: list[str] | None = None) -> str:
        """Find the fastest settings by running training steps; returns the study as JSON. Takes minutes.

        options: further words of the command line, such as ["--seq-len", "512", "--time-budget", "5m"]. For the user's
        own code leave model out: ["--", "python", "train.py", ...].
        """
        words = [*(["--model", model] if model else [])]
        words += ["--effective-batch", str(effective_batch)] if effective_batch else []
        return await _run("search", "--storage", storage, "--json", *words, *(options or []))

    async def predict(model: str, effective_batch: int, gpu: str, options: list[str] | None = None) -> str:
        """Predict which batches fit on a GPU that need not be here, and how fast they train; returns JSON.

        gpu: a name such as rtx-4090 or h100-sxm. options: further words of the command line.
        """
        words = ["--model", model, "--effective-batch", str(effective_batch), "--gpu", gpu]
        return await _run("predict", "--storage", storage, "--json", *words, *(options or []))

    async def show(study: str) -> str:
        """Return a study with its winner and every trial, as JSON."""
        return await _run("show", "--storage", storage, "--json", "--", study)

    async def export(study: str, format: str = "json") -> str:
        """Return the winner of a study: as TrainingArguments in JSON, or in another format of autotune export."""
        return await _run("export", "--storage", storage, "--format", format, "--", study)

    async def verify(study: str, options: list[str] | None = None) -> str:
        """Train with a stock Trainer and compare it with what a study promises; returns JSON. Takes minutes.

        options: further words of the command line, such as ["--steps", "20"] or ["--same-loss"].
        """
        return await _run("verify", "--storage", storage, "--json", *(options or []), "--", study)

    return (search, predict, show, export, verify)


async def _run(*args: str) -> str:
    """Run an autotune command; return its stdout. Raises ``ToolError`` where it fails without any output."""
    from mcp.server.mcpserver.exceptions import ToolError

    pipe: Any = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "autotune", *args),
        # This process's stdin carries the protocol.
        stdin=asyncio.subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
    )
    try:
        printed, told = (text.decode(errors="replace") for text in await process.communicate())
    finally:
        # The agent has cancelled the call.
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(asyncio.shield(process.wait()), _ENDING_SECONDS)
            except TimeoutError:
                process.kill()
    if process.returncode and not printed.strip():
        kind = error_with_code(process.returncode, "", "")
        meaning = (type(kind).__doc__ or "").partition("\n")[0] if kind is not None else ""
        raise ToolError(f"{told.strip()}\nexit code {process.returncode}: {meaning}")
    return printed
