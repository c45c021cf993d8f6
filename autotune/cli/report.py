"""Run ``autotune report``: write a study as an HTML page or as text."""

from __future__ import annotations

from pathlib import Path

import click

from autotune.cli.completion import study_argument
from autotune.cli.options import service_of, table_options
from autotune.cli.output import FilePath, print_lines, write_text


@click.command()
@study_argument
@click.option("--html", "page", metavar="FILE", type=FilePath(dir_okay=False, path_type=Path, allow_dash=True),
              help="Write one HTML page with charts; - is stdout.")  # fmt: skip
@table_options("report")
@click.pass_context
def report(ctx: click.Context, /, study: str, page: Path | None, storage: str, server: str | None) -> None:
    """Report a study as a page with charts, or as text.

    The page needs no other file and no network. Without --html, the text is that of autotune show.

    \b
      autotune report STUDY --html report.html
    """
    from autotune.results.html.page import html_page
    from autotune.results.report import load_report
    from autotune.results.text import report_lines
    from autotune.store.opening import open_store
    from autotune.tuning.predictions import stored_prediction

    if (service := service_of(ctx)) is not None:
        from autotune.cli.remote import print_report
        from autotune.service.client import Client, path_of

        if page is None:
            print_report(Client(service), study, as_json=False)
        else:
            _write(page, Client(service).request("GET", f"{path_of(study)}/report", query={"format": "html"}))
        return
    with open_store(storage, create=False) as store:
        loaded = load_report(store, study)
        if page is None:
            print_lines(report_lines(loaded))
            return
        best = loaded.best
        found = stored_prediction(loaded, best.candidate, store.answers) if best is not None else (None, None)
    _write(page, html_page(loaded, *found))


def _write(page: Path, text: str) -> None:
    if str(page) == "-":
        click.echo(text, nl=False)
    else:
        write_text(page, text)
        click.echo(f"{page} written; open it in a browser", err=True)
