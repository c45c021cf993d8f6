"""Run a service, look at its queue, and manage its tokens (``autotune serve``, ``queue``, ``cancel``, ``token``)."""

from __future__ import annotations

import logging
import shlex
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autotune.cli.options import table_options
from autotune.cli.output import FilePath, print_json, print_table
from autotune.core.errors import InvalidRequestError
from autotune.space.features import how_to_add

if TYPE_CHECKING:
    from autotune.service.client import Client
    from autotune.store.queue import Role


@click.command(short_help="Run a service: searches for a team, over HTTP.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8321, show_default=True)
@table_options("serve")
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
@click.option(
    "--keep-days", metavar="N", type=click.IntRange(1, 36500),
    help="Forget searches so many days after their end, with events and logs; studies stay [default: never].",
)  # fmt: skip
@click.option("--behind-proxy", is_flag=True, help="A proxy in front ends TLS: allow a public --host without it.")
def serve(data_folders: tuple[Path, ...], allow: Path | None, keep_days: int | None, **options: Any) -> None:
    """Serve searches to others: an HTTP API with a queue, run on this machine's devices or a Ray cluster.

    The first start prints a URL with a token; the database keeps the token's digest alone.

    \b
      autotune serve
      autotune search --server http://127.0.0.1:8321 --model bert-large-uncased --effective-batch 64
    """
    try:
        from autotune.service.server import Settings, log_to_stderr
        from autotune.service.server import serve as run
    except ImportError as error:
        raise InvalidRequestError(
            f"a service needs a package that is not installed ({error.name})", how_to_add("serve")
        ) from error
    log_to_stderr()

    def ready(url: str, token: str | None) -> None:
        if token is not None:
            click.echo(f"{url}/#token={token}")
            advice = "keep the token: it is not shown again, and the database holds its digest alone"
        else:
            click.echo(url)
            advice = "the token was shown at the first start; autotune token add NAME makes another"
        logging.getLogger("autotune.service").info(advice)

    settings = Settings(
        **options,
        data_folders=tuple(folder.absolute() for folder in data_folders),
        allow=allow.absolute() if allow is not None else None,
        keep=timedelta(days=keep_days) if keep_days is not None else None,
    )
    run(settings, ready)


@click.command(short_help="List the searches and the devices of a service.")
@table_options("queue")
@click.option("--all", "shows_all", is_flag=True, help="Show searches that have ended, too.")
def queue(server: str | None, shows_all: bool, as_json: bool) -> None:
    """List the searches of a service that wait or run, and its devices."""
    client = _client(server)
    query = {} if shows_all else {"state": ["queued", "running"]}
    searches = client.request("GET", "/v1/searches", query={**query, "limit": 1000})["searches"]
    devices = client.request("GET", "/v1/devices")["devices"]
    if as_json:
        print_json({"searches": searches, "devices": devices})
        return
    rows = []
    for search in searches:
        device, problem = search["device"], search["problem"] or {}
        where = f"{device['name']} of {device['host']}" if device is not None else ""
        told = search["waits_for"] or problem.get("message") or where
        rows.append((search["id"][:12], search["study"], search["state"], str(search["priority"]), told))
    if rows:
        print_table(("search", "study", "state", "priority", "where, or what it waits for"), rows, right=("priority",))
    else:
        click.echo(f"No search waits or runs at {client.url}.", err=True)
    for device in devices:
        click.echo(f"{device['host']} {device['label']} ({device['name']}): {device['study'] or 'idle'}", err=True)


@click.command(short_help="Show a search of a service to its end.")
@click.argument("search")
@table_options("follow")
def follow(search: str, server: str | None, as_json: bool) -> None:
    """Show a search of a service, by its id or its study's name, from its beginning to its end, and its result."""
    from autotune.cli.remote import follow_to_the_end
    from autotune.service.client import path_of

    client = _client(server)
    follow_to_the_end(client, client.request("GET", path_of(search)), as_json=as_json)


@click.command(short_help="Cancel a search of a service.")
@click.argument("search")
@table_options("cancel")
def cancel(search: str, server: str | None) -> None:
    """Cancel a search of a service, by its id or its study's name. What was measured stays."""
    from autotune.service.client import path_of

    job = _client(server).request("DELETE", path_of(search))
    # One that runs is asked to end, which it does soon.
    outcome = "is cancelled" if job["state"] in ("cancelled", "running") else f"has ended before: {job['state']}"
    click.echo(f"the search {shlex.quote(job['study'])} {outcome}", err=True)


def _client(server: str | None) -> Client:
    """Return the client of a service. Raises ``InvalidRequestError`` where no service was named."""
    from autotune.service.client import Client

    if server is None:
        raise InvalidRequestError("no service was given", "give --server URL, or set AUTOTUNE_SERVER")
    return Client(server)


@click.group(short_help="Manage the tokens of a service.")
def token() -> None:
    """Make, list and remove the tokens of a service, on the machine of its database."""


@token.command("add")
@click.argument("name")
@click.option(
    "--role",
    help="read looks, run also submits and changes its own searches, admin changes all.",
    type=click.Choice(("read", "run", "admin")),
    default="run",
    show_default=True,
)
@table_options("token")
def add(name: str, role: Role, storage: str) -> None:
    """Make a token and print it; it is not shown again."""
    from autotune.store.opening import open_store

    # A missing database is made: a service that finds a token in it prints none at its first start, as into a log.
    with open_store(storage) as store:
        click.echo(store.queue.add_token(name, role))


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
