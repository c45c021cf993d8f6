"""Run commands on a service (``--server``) or a Ray cluster (``--executor``), shown as if they ran here."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from autotune.cli.output import print_json, print_lines
from autotune.cli.view import waiting
from autotune.core.arguments import json_value
from autotune.core.candidate import Document
from autotune.core.errors import InvalidRequestError, ServiceError
from autotune.core.options import BRINGS_CODE
from autotune.service.client import Client, path_of
from autotune.service.problems import error_of

if TYPE_CHECKING:
    from autotune.engine.work import Message
    from autotune.results.report import Report
    from autotune.store.records import StudyRecord


# A prediction of a model that nobody asked for before takes a minute or two of the service's processor.
_PREDICT_SECONDS = 600.0


def search_remotely(server: str, given: Mapping[str, Any], *, as_json: bool) -> None:
    """Run a search on a service, show it, and print the result. ``given`` are the command-line options.

    Raises the search's errors. Ctrl-C stops watching; the search continues.
    """
    for name in BRINGS_CODE:
        if given.get(name):
            option = "the script" if name == "script" else f"--{name}"
            raise InvalidRequestError(
                f"{option} brings code, and a service takes no code over HTTP",
                "leave --server out on the machine itself, or ask its operator to list it and name it with --code",
            )
    _refuse_with_server(given, "storage", "wait")
    client = Client(server)
    asked = {name: json_value(value) for name, value in given.items() if name not in ("as_json", "server")}
    search = client.request("POST", "/v1/searches", asked)
    follow_to_the_end(client, search, as_json=as_json)


def _refuse_with_server(given: Mapping[str, Any], *names: str) -> None:
    """Raise ``InvalidRequestError`` where one of these options is given."""
    for name in names:
        if given.get(name):
            option = f"--{name.replace('_', '-')}"
            raise InvalidRequestError(f"{option} cannot be used with --server", f"leave {option} or --server out")


def resume_remotely(server: str, study: str, budget: Mapping[str, Any], *, as_json: bool) -> None:
    """Continue a search on a service with a new budget, and show it: its request is submitted again for its study."""
    client = Client(server)
    search = client.request("GET", path_of(study))
    needs = {name: search["needs"][name] for name in ("gpu", "memory_bytes", "count") if search["needs"][name]}
    asked = {**search["request"], "study": search["study"], "needs": needs}
    asked |= {name: value for name, value in budget.items() if value is not None}
    # A request has no field for the kind of device but ``device``; a GPU's name implies it.
    if search["needs"]["device_kind"] is not None and "gpu" not in needs:
        asked["device"] = search["needs"]["device_kind"]
    follow_to_the_end(client, client.request("POST", "/v1/searches", asked), as_json=as_json)


def print_report(client: Client, search: str, *, as_json: bool) -> None:
    """Print a service's report of a search or a study, as ``autotune show`` does."""
    if as_json:
        print_json(client.request("GET", f"{path_of(search)}/report"))
    else:
        print_lines([client.request("GET", f"{path_of(search)}/report", query={"format": "text"}).rstrip("\n")])


def follow_to_the_end(client: Client, search: Document, *, as_json: bool) -> None:
    """Show a service's search from its beginning to its end, and print the result. Raises the search's error."""
    name = shlex.quote(str(search["study"]))
    try:
        problem = _watch(client, search)
    except KeyboardInterrupt:
        click.echo(
            f"the search {name} goes on at {client.url}; autotune follow {name} --server {client.url} shows it again, "
            f"autotune cancel {name} --server {client.url} ends it",
            err=True,
        )
        raise
    if problem is not None:
        raise error_of(problem)
    print_report(client, str(search["id"]), as_json=as_json)
    if as_json:
        return
    click.echo(f"\nNext:\n  {client.url}{search['links']['page']}")
    click.echo(f"  {client.url}{search['links']['export']}?format=cli")


def search_on_cluster(
    address: str, options: Mapping[str, Any], study: str | None, storage: str, *, wait: bool, resumes: bool
) -> tuple[StudyRecord, Report]:
    """Run a search on the Ray cluster at ``address``, or resume the named study there; return study and report."""
    from autotune.engine.elsewhere import Asked, search_elsewhere

    given = {name: value for name, value in options.items() if value is not None}
    with waiting("looking for a node") as view:

        def show(message: Message) -> None:
            if message.kind == "line":
                view.print_line(str(message.document["text"]), message.document.get("style"))
            elif message.kind == "status":
                view.shown = message.document

        return search_elsewhere(address, Asked(given, study, resumes), storage, show, wait=wait)


def predict_remotely(server: str, path: str, given: Mapping[str, Any]) -> Document:
    """Return a service's prediction or advice; ``given`` are the command-line options."""
    _refuse_with_server(given, "storage", "gpu_spec", "prices")
    # Options on what to print are applied here.
    of_output = ("as_json", "server", "all_batches", "anatomy", "fail_if_not_fit")
    asked = {name: json_value(value) for name, value in given.items() if name not in of_output}
    predicted: Document = Client(server).request("POST", path, asked, timeout_seconds=_PREDICT_SECONDS)
    return predicted


def verify_remotely(server: str, study: str, steps: int | None, *, as_json: bool) -> None:
    """Verify a study on its service, and print the result. Raises an error for a missed promise."""
    client = Client(server)
    job = client.request("POST", "/v1/verify", {"study": study} | ({"steps": steps} if steps else {}))
    problem = _watch(client, job)
    if problem is not None:
        raise error_of(problem)
    print_verification(client.request("GET", f"/v1/verify/{job['id']}"), as_json=as_json)


def print_verification(shown: Document, *, as_json: bool) -> None:
    """Print a service's verification. Raises an error for a missed promise, or a verification without a result."""
    if shown["verification"] is None:
        raise ServiceError(f"{shown['study']!r} ended without a result", "verify once more, see the service's log")
    if as_json:
        print_json(shown["verification"])
    else:
        print_lines(shown["lines"])
    if shown["missed"] is not None:
        raise error_of(shown["missed"])


def _watch(client: Client, search: Document) -> Document | None:
    """Show a service's search until its end; return a failed one's problem. Raises an error for a cancelled one."""
    with waiting("waiting for a device") as view:
        if search["state"] == "finished":
            view.print_line(f"the service has answered this before, as {search['study']}; --fresh measures anew", "dim")
            return None
        if search["waits_for"]:
            view.print_line(f"queued as {search['study']}: {search['waits_for']}", "dim")
        for event in client.events(str(search["id"])):
            told = event.document
            if event.kind == "line":
                view.print_line(str(told["text"]), told.get("style"))
            elif event.kind == "status":
                view.shown = told
            elif event.kind == "state":
                state = told["state"]
                if state == "failed":
                    return dict(told.get("problem") or {})
                if state == "cancelled":
                    raise ServiceError(f"the search {search['study']!r} was cancelled", "submit it again to search on")
                if state == "queued" and told.get("why"):
                    view.print_line(f"back in the queue: {told['why']}", "dim")
                view.shown = {"running": "waiting for a device" if state == "queued" else "starting"}
    return None
