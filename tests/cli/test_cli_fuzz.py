"""Test random command lines: never a traceback."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import click
import pytest
from command_line import run_within
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotune.cli.main import cli
from autotune.cli.search import search
from autotune.core.errors import AutotuneError
from autotune.tuning.allowed import check_request
from autotune.tuning.options import build_request

ODD_WORDS = [
    "",
    " ",
    "-",
    "--",
    "0",
    "-1",
    "1e9",
    "nan",
    "inf",
    "∞",
    "٣",
    "8",
    "24GiB",
    "5%",
    "90s",
    "auto",
    "bf16,",
    "x" * 300,
]
WORDS = st.one_of(st.sampled_from(ODD_WORDS), st.text(max_size=12))
# No command here starts a process, makes a file or waits: those that would are given nothing to do it with.
COMMANDS = [
    ("models",),
    ("devices",),
    ("studies",),
    ("show",),
    ("export",),
    ("db", "current"),
    ("db",),
    ("nonsense",),
    (),
]
OPTIONS = ["--json", "--help", "--storage", "--format", "--port", "--nonsense", "-h", "--", "tiny"]
ORDERLY = {0, 1, 2, 5, 9}

quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@quick
@given(command=st.sampled_from(COMMANDS), rest=st.lists(st.one_of(st.sampled_from(OPTIONS), WORDS), max_size=4))
def test_commands_that_only_look(
    command: tuple[str, ...], rest: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An exit code of the list, and no file that was not there."""
    ran = run_within(capsys, *command, *rest)
    assert ran.code in ORDERLY
    assert "Traceback" not in ran.stderr
    assert (ran.code == 0) or ran.stderr.startswith("autotune: error: ")
    assert not list(folder.iterdir())


search_options = [option for param in search.params for option in (*param.opts, *param.secondary_opts)]
known_values = [
    "bert-tiny",
    "vit-tiny",
    "gpt2-tiny",
    "64",
    "8",
    "1",
    "cpu",
    "0.5",
    "1GiB",
    "fp32",
    "float16",
    "on",
    "max-batch",
]


@settings(quick, max_examples=300)
@given(words=st.lists(st.one_of(st.sampled_from(search_options), st.sampled_from(known_values), WORDS), max_size=12))
def test_the_options_of_a_search(words: list[str], folder: Path) -> None:
    """What click takes becomes a request or an error of ours; no search is started."""
    try:
        context = search.make_context("search", ["--model", "bert-tiny", *words], **cli.context_settings)
    except (click.ClickException, click.exceptions.Exit):
        return
    options = {name: value for name, value in context.params.items() if name not in ("as_json", "storage", "verify")}
    if os.path.sep not in options["model"] and "." not in options["model"]:
        options["model"] = options["model"] if options["model"] in known_values else "bert-tiny"
    with contextlib.suppress(AutotuneError):
        check_request(build_request(options))
    assert not list(folder.iterdir())


numbers = st.one_of(st.integers(-3, 200), st.integers(0, 2**40)).map(str)


@settings(quick, max_examples=150)
@given(
    effective_batch=numbers,
    world_size=numbers,
    batch_multiple=st.none() | numbers,
    seq_len=st.none() | numbers,
    padding=st.none() | st.floats().map(str),
    model=st.sampled_from(["bert-tiny", "vit-tiny", "t5-tiny", "whisper-tiny-random"]),
)
def test_the_arithmetic_of_a_search(
    effective_batch: str,
    world_size: str,
    batch_multiple: str | None,
    seq_len: str | None,
    padding: str | None,
    model: str,
) -> None:
    """A request that is accepted keeps the effective batch; any other names the value."""
    words = ["--model", model, "--device", "cpu", "--effective-batch", effective_batch, "--world-size", world_size]
    for option, value in {"--batch-multiple": batch_multiple, "--seq-len": seq_len, "--padding": padding}.items():
        words += [] if value is None else [option, value]
    try:
        context = search.make_context("search", words, **cli.context_settings)
        request = build_request({k: v for k, v in context.params.items() if k not in ("as_json", "storage", "verify")})
        check_request(request)
    except (click.ClickException, AutotuneError):
        return
    batches = request.batches
    for multiple in batches.levels():
        for batch in batches.at_level(multiple):
            assert batch * batches.accumulation(batch) * request.world_size == int(effective_batch)
