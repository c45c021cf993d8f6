"""Run a service, its agents, and manage its tokens (``autotune serve``, ``agent``, ``token`` and ``queue``)."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autotune.cli.options import table_options
from autotune.cli.output import FilePath
from autotune.cli.table import print_table
from autotune.core.errors import InvalidRequestError
from autotune.core.installation import how_to_add
from autotune.core.options import AGENT_STORAGE_VARIABLE

if TYPE_CHECKING:
    from autotune.service.client import Client


def _needs_extra(error: ImportError) -> InvalidRequestError:
    return InvalidRequestError(f"a service needs a package that is not installed ({error.name})", how_to_add("serve"))


@click.command(short_help="Run a service: searches for a team, over HTTP.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8321, show_default=True)
@table_options("serve")
@click.option("--agent/--no-agent", "has_agent", default=True, help="Run searches on this machine, too [default: yes].")
@click.option(
    "--data", "data_folders", multiple=True, metavar="FOLDER", type=FilePath(path_type=Path),
    help="Folder whose models and datasets requests may name; may be repeated.",
)  # fmt: skip
@click.option(
    "--allow", metavar="FILE", type=FilePath(path_type=Path),
    help="TOML or JSON file that lists scripts, Trainers and loops which requests may name; this machine runs them.",
)  # fmt: skip
@click.option("--name", "names", multiple=True, metavar="HOST", help="Host name that the service answers to.")
@click.option("--ssl-certfile", "certificate", metavar="FILE", type=FilePath(path_type=Path), help="TLS certificate.")
@click.option("--ssl-keyfile", "key", metavar="FILE", type=FilePath(path_type=Path), help="Its key.")
@click.option("--behind-proxy", is_flag=True, help="A proxy in front ends TLS: allow a public --host without it.")
def serve(
    host: str,
    port: int,
    storage: str,
    has_agent: bool,
    data_folders: tuple[Path, ...],
    allow: Path | None,
    names: tuple[str, ...],
    certificate: Path | None,
    key: Path | None,
    behind_proxy: bool,
) -> None:
    """Serve searches to others: an HTTP API with a queue, and agents for this machine's devices.

    The first start prints a URL with a token; the database keeps the token's digest alone.

    \b
      autotune serve
      autotune search --server http://127.0.0.1:8321 --model bert-large-uncased --effective-batch 64
    """
    try:
        from autotune.service.server import Settings, log_to_stderr
        from autotune.service.server import serve as run
    except ImportError as error:
        raise _needs_extra(error) from error
    log_to_stderr()

    def ready(url: str, token: str | None) -> None:
        if token is not None:
            click.echo(f"{url}/#token={token}")
            click.echo("  keep the token: it is not shown again, and the database holds its digest alone", err=True)
        else:
            click.echo(url)
            click.echo("  the token was shown at the first start; autotune token add NAME makes another", err=True)

    run(
        Settings(
            storage, host, port, tuple(folder.absolute() for folder in data_folders), names,
            allow=allow.absolute() if allow is not None else None,
            has_agent=has_agent, certificate=certificate, key=key, behind_proxy=behind_proxy,
        ),
        ready,
        lambda options: _predict(options, storage),
    )  # fmt: skip


def _predict(options: dict[str, Any], storage: str) -> dict[str, Any]:
    from autotune.cli.predict import predicted_document

    gpu = options.pop("gpu")
    return predicted_document(gpu, None, storage, options)[0]


@click.command(short_help="Run a service's searches on this machine.")
@table_options("agent")
@click.option(
    "--storage",
    "database",
    metavar="FILE|URL",
    default="studies/agent.db",
    show_default=True,
    envvar=AGENT_STORAGE_VARIABLE,
    help="Database for the searches of this agent; the service has a copy of each trial.",
)
@click.option(
    "--allow", metavar="FILE", type=FilePath(path_type=Path),
    help="TOML or JSON file that lists scripts, Trainers and loops which searches may name.",
)  # fmt: skip
@click.option("--shared", is_flag=True, hidden=True, help="The database is the service's own.")
@click.option("--with-parent", is_flag=True, hidden=True, help="End when standard input does.")
def agent(
    server: str | None,
    device: str | None,
    gpus: str | None,
    database: str,
    allow: Path | None,
    shared: bool,
    with_parent: bool,
) -> None:
    """Run the searches of a service on this machine, until Ctrl-C or SIGTERM.

    With --gpus it runs one search at a time, also such as train on several GPUs together.

    The agent asks the service for work, so no port need be open here. A search that runs when the agent ends goes
    back to the queue, with its trials.

    \b
      AUTOTUNE_TOKEN=... autotune agent --server http://gpu-box:8321
    """
    from autotune.devices import find_device, find_gpus
    from autotune.service.agent import Agent
    from autotune.service.agent_processes import end_with_parent, run_agents
    from autotune.service.listed_code import read_listed_code

    client = _client(server)
    codes = read_listed_code(allow) if allow is not None else {}
    if gpus is not None and device is not None:
        raise InvalidRequestError(
            f"--device {device} is one device, and --gpus {gpus} names others", "give one of the two"
        )
    if device is None and gpus is None:
        run_agents(str(server), database, allow)
        return
    if with_parent:
        end_with_parent()
    devices = find_gpus(gpus) if gpus is not None else (find_device(str(device)),)
    Agent(client, devices, database, lambda text: click.echo(text, err=True), is_shared=shared, codes=codes).run()


@click.command(short_help="List the searches and the agents of a service.")
@table_options("queue")
@click.option("--all", "shows_all", is_flag=True, help="Show searches that have ended, too.")
def queue(server: str | None, shows_all: bool, as_json: bool) -> None:
    """List the searches of a service that wait or run, and its agents."""
    from autotune.cli.output import print_json

    client = _client(server)
    query = {} if shows_all else {"state": ["queued", "running"]}
    searches = client.request("GET", "/v1/searches", query={**query, "limit": 1000})["searches"]
    agents = client.request("GET", "/v1/agents")["agents"]
    if as_json:
        print_json({"searches": searches, "agents": agents})
        return
    names = {agent["id"]: agent["name"] for agent in agents}
    rows = [
        (
            search["id"][:12],
            search["study"],
            search["state"],
            str(search["priority"]),
            search["waits_for"] or (search["problem"] or {}).get("message") or names.get(search["agent"], ""),
        )
        for search in searches
    ]
    if rows:
        print_table(("search", "study", "state", "priority", "where, or what it waits for"), rows, right=("priority",))
    else:
        click.echo(f"No search waits or runs at {client.url}.", err=True)
    for agent in agents:
        click.echo(f"{agent['name']} ({agent['device']['name']}): {agent['study'] or 'idle'}", err=True)
    if not agents:
        click.echo("No agent is connected; autotune agent starts one.", err=True)


@click.command(short_help="Cancel a search of a service.")
@click.argument("search")
@table_options("cancel")
def cancel(search: str, server: str | None) -> None:
    """Cancel a search of a service, by its id or its study's name. What was measured stays."""
    from urllib.parse import quote

    found = _client(server).request("DELETE", f"/v1/searches/{quote(search, safe='')}")
    waits = " once its agent has heard of it" if found["state"] == "running" else ""
    told = "is cancelled" if found["state"] in ("cancelled", "running") else f"has ended before: {found['state']}"
    click.echo(f"the search {shlex.quote(found['study'])} {told}{waits}", err=True)


def _client(server: str | None) -> Client:
    from autotune.service.client import Client

    if server is None:
        raise InvalidRequestError("no service was given", "give --server URL, or set AUTOTUNE_SERVER")
    return Client(server)


@click.group(short_help="Manage the tokens of a service.")
def token() -> None:
    """Make, list and remove the tokens of a service, on the machine of its database."""


@token.command("add")
@click.argument("name")
@click.option("--role", type=click.Choice(("read", "run")), default="run", show_default=True)
@table_options("token")
def add(name: str, role: str, storage: str) -> None:
    """Make a token and print it; it is not shown again."""
    from autotune.service.tokens import add_token
    from autotune.store.opening import open_store

    # Also before the first start, so that a service under systemd prints no token into a log.
    with open_store(storage) as store:
        click.echo(add_token(store.queue, name, "read" if role == "read" else "run"))


@token.command("list")
@table_options("token")
def list_tokens(storage: str) -> None:
    """List the tokens' names and roles."""
    from autotune.store.opening import open_store

    with open_store(storage, create=False) as store:
        rows = [(t.name, t.role, f"{t.created_at:%Y-%m-%d %H:%M}") for t in store.queue.tokens()]
    print_table(("name", "role", "made (UTC)"), rows)


@token.command("remove")
@click.argument("name")
@table_options("token")
def remove(name: str, storage: str) -> None:
    """Remove a token; whoever has it is refused from then on."""
    from autotune.store.opening import open_store

    with open_store(storage, create=False) as store:
        if not store.queue.remove_token(name):
            raise InvalidRequestError(f"there is no token named {name!r}", "autotune token list shows them")
