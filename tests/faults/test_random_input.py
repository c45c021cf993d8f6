"""Ten thousand random command lines and requests: an orderly answer each, and never a traceback.

A few hundred of them run always; ``make test-faults`` runs them all.
"""

import contextlib
import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from searching import BERT_LARGE, H200

from autotune.cli.main import cli, main
from autotune.cli.search import search
from autotune.core.candidate import Document
from autotune.core.errors import AutotuneError, InvalidRequestError
from autotune.core.workload import Workload
from autotune.tuning.allowed import check_request
from autotune.tuning.options import request_of
from autotune.tuning.request import SearchRequest, request_from_document

FEW, MANY = 150, 10_000
counts = pytest.mark.parametrize(
    "count", [FEW, pytest.param(MANY, marks=[pytest.mark.faults, pytest.mark.timeout(1800)])]
)


def at_random(count: int, test: Callable[..., None], **strategies: Any) -> None:
    """Run a test with so many random values."""
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    given(**strategies)(settings(max_examples=count, database=None, suppress_health_check=checks)(test))()


ODD = ["", " ", "-", "--", "0", "-1", "1e9", "nan", "∞", "٣", "8", "24GiB", "5%", "90s", "auto", "bf16,", "x" * 300,
       "a\nb", "'", '"', "../..", "/", "~", "\x00", "~\x00", "\udcff", "file:x", "sqlite://", ":memory:"]  # fmt: skip
VALUES = ["bert-tiny", "cpu", "64", "1", "fp32", "json", "cli", "max-batch", "tpe", "1GiB", "study", "no.db"]
# Without --help a search, a dashboard or a service that understood its options would begin.
STARTING = {"search", "resume", "dashboard", "serve", "db"}
# Predictions and a look at the machine take seconds; the server reads this process's standard input.
NEVER_RUN = {"predict", "advise", "doctor", "mcp"}


def all_options() -> dict[str, list[str]]:
    """Every command that there is, with its options."""
    found: dict[str, list[str]] = {}
    for name in cli.list_commands(None):  # type: ignore[arg-type]
        command = cli.get_command(None, name)  # type: ignore[arg-type]
        found[name] = [option for parameter in command.params for option in parameter.opts if option.startswith("-")]
    return found


OPTIONS = all_options()
EVERY_OPTION = sorted({option for options in OPTIONS.values() for option in options} | {"--help", "-h", "--version"})
WORDS = st.one_of(st.sampled_from(EVERY_OPTION), st.sampled_from(VALUES), st.sampled_from(ODD), st.text(max_size=10))


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """A command with options of its own, some of them with values that they can take."""
    name = draw(st.sampled_from([*OPTIONS, "nonsense", ""]))
    words = draw(st.lists(st.one_of(st.sampled_from(OPTIONS.get(name, ["-x"]) or ["-x"]), WORDS), max_size=8))
    # What would start a process or listen is given a database that cannot be.
    place = ["--storage", "/proc/no/such.db"] if name in STARTING else []
    if name in NEVER_RUN:
        words.insert(0, "--no-such-option")
    return [*([name] if name else []), *words, *place]


@contextlib.contextmanager
def in_folder(path: Path) -> Iterator[None]:
    """The working directory for as long as the block lasts."""
    before = Path.cwd()
    os.chdir(path)
    try:
        yield
    finally:
        os.chdir(before)


@counts
def test_command_lines(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("AUTOTUNE_STORAGE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def run(words: list[str]) -> None:
        stdout, stderr = (io.TextIOWrapper(io.BytesIO(), errors="replace") for _ in range(2))
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr), pytest.raises(SystemExit) as ended:
            main(words)
        stderr.seek(0)
        said = stderr.read()
        code = ended.value.code
        assert isinstance(code, int)
        assert "Traceback" not in said
        assert code == 0 or said.startswith("autotune: error: "), (words, said)

    with in_folder(tmp_path):
        at_random(count, run, words=command_lines())
    assert not list(tmp_path.iterdir())


SEARCH_OPTIONS = [option for param in search.params for option in (*param.opts, *param.secondary_opts)]
MODELS = ["bert-tiny", "vit-tiny", "gpt2-tiny"]
SEARCH_WORDS = st.one_of(
    st.sampled_from(SEARCH_OPTIONS), st.sampled_from([*MODELS, *VALUES, "0.5", "float16", "on"]), st.sampled_from(ODD),
    st.text(max_size=12),
)  # fmt: skip


def search_request(words: list[str]) -> SearchRequest | None:
    """The request that options of a search make; ``None`` where they are refused, by click or by us."""
    try:
        context = search.make_context("search", words, **cli.context_settings)
        options = {n: value for n, value in context.params.items() if n not in ("as_json", "storage", "verify")}
        if os.path.sep not in options["model"] and "." not in options["model"]:
            options["model"] = options["model"] if options["model"] in (*MODELS, *OTHER_MODELS) else "bert-tiny"
        request = request_of(options)
        check_request(request)
    except (click.ClickException, click.exceptions.Exit, AutotuneError):
        return None
    return request


@counts
def test_the_options_of_a_search(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What click takes becomes a request or an error of ours; no search is started."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def ask(words: list[str]) -> None:
        search_request(["--model", "bert-tiny", *words])

    with in_folder(tmp_path):
        at_random(count, ask, words=st.lists(SEARCH_WORDS, max_size=12))
    assert not list(tmp_path.iterdir())


NUMBERS = st.one_of(st.integers(-3, 200), st.integers(0, 2**40)).map(str)
OTHER_MODELS = ["t5-tiny", "whisper-tiny-random"]


@settings(max_examples=FEW)
@given(
    effective_batch=NUMBERS,
    world_size=NUMBERS,
    batch_multiple=st.none() | NUMBERS,
    seq_len=st.none() | NUMBERS,
    padding=st.none() | st.floats().map(str),
    model=st.sampled_from([*MODELS, *OTHER_MODELS]),
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
    if (request := search_request(words)) is None:
        return
    batches = request.batches
    for multiple in batches.levels():
        for batch in batches.at_level(multiple):
            assert batch * batches.accumulation(batch) * request.world_size == int(effective_batch)


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 2**40), st.floats(), st.text(max_size=6),
    st.sampled_from(["auto", "on", "throughput", "max-batch", "tpe", "fp32", "bf16", "adafactor"]),
)  # fmt: skip
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=2)),
    max_leaves=4,
)
RECORDED: Document = json.loads(json.dumps(SearchRequest(BERT_LARGE, H200, effective_batch=64).document()))
NAMES = st.one_of(st.sampled_from(sorted(RECORDED)), st.sampled_from(["workload", "study", "device", "x"]))
WORKLOAD: Document = json.loads(json.dumps(BERT_LARGE.document()))


@counts
def test_recorded_requests(count: int) -> None:
    """A record that was changed in any way makes the request that it says, or an error that names what is wrong."""
    outcomes = {"request": 0, "error": 0}

    def read(changes: Document) -> None:
        try:
            request = request_from_document({**RECORDED, **changes}, BERT_LARGE, H200, "study")
            check_request(request)
        except (ValueError, AutotuneError):
            outcomes["error"] += 1
            return
        outcomes["request"] += 1
        again = json.loads(json.dumps(request.document()))
        assert request_from_document(again, BERT_LARGE, H200, "study") == request

    at_random(count, read, changes=st.dictionaries(NAMES, ANYTHING, max_size=3))
    assert min(outcomes.values()) > 0


@counts
def test_recorded_workloads(count: int) -> None:
    def read(changes: Document, dropped: str) -> None:
        document = {name: value for name, value in {**WORKLOAD, **changes}.items() if name != dropped}
        try:
            workload = Workload.from_document(document)
        except ValueError:
            return
        assert workload.fingerprint()

    names = st.one_of(st.sampled_from(sorted(WORKLOAD)), st.text(max_size=4))
    at_random(
        count, read, changes=st.dictionaries(names, ANYTHING, max_size=3), dropped=st.sampled_from(["", *WORKLOAD])
    )


FIELDS: dict[str, Any] = {
    "effective_batch": st.none() | st.integers(1, 4096),
    "world_size": st.just(1),
    "objective": st.sampled_from(["throughput", "max-batch"]),
    "precisions": st.none() | st.lists(st.sampled_from(["fp32", "bf16", "tf32"]), min_size=1, max_size=3).map(tuple),
    "gradient_checkpointing": st.sampled_from(["auto", "on", "off"]),
    "attn_implementations": st.none() | st.just(("eager", "sdpa")),
    "optims": st.lists(st.text(min_size=1, max_size=9), min_size=1, max_size=3).map(tuple),
    "memory_limit_bytes": st.none() | st.integers(1, 2**45),
    "trials": st.none() | st.integers(1, 1000),
    "time_budget_seconds": st.none() | st.floats(0, 1e6),
    "sampler": st.sampled_from(["autotune", "grid", "tpe", "random"]),
    "seed": st.integers(0, 2**31),
    "trial_timeout_seconds": st.floats(0.1, 1e6),
    "measure_baseline": st.booleans(),
}


@counts
def test_requests_come_back_from_their_record_as_they_were(count: int) -> None:
    """Every field of a request, so that none is forgotten when the search goes on."""

    def there_and_back(**options: Any) -> None:
        request = SearchRequest(BERT_LARGE, H200, study="study", **options)
        document = json.loads(json.dumps(request.document()))
        try:
            assert request_from_document(document, BERT_LARGE, H200, "study") == request
        except InvalidRequestError as error:
            raise AssertionError(options) from error

    at_random(count, there_and_back, **FIELDS)


@pytest.mark.parametrize("option", ["--data", "--allow", "--ssl-certfile", "--ssl-keyfile"])
def test_a_null_character_in_a_path_of_a_service(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", option, "\0"])
    assert ended.value.code == 2
    assert "null character" in capsys.readouterr().err
