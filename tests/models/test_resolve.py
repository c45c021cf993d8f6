"""From a name to a config: folders, the catalog, a real hub cache, and a small hub on this machine.

Whatever reaches the hub client runs in a child process: the client reads its environment once,
when it is imported.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from messages import check_refusals

import autotune
from autotune.core.errors import UnknownModelError
from autotune.models import catalog
from autotune.models.resolve import ModelSource, resolve_model

ROOT = Path(autotune.__file__).parent.parent
COMMIT = "0123456789abcdef0123456789abcdef01234567"
SMALL = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 8}
CUSTOM = {"AutoConfig": "configuration_x.XConfig", "AutoModel": "modeling_x.XModel"}


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep this process from asking the hub; the children have an environment of their own."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def write_config(folder: Path, content: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = content if isinstance(content, str | bytes) else json.dumps(content)
    (folder / "config.json").write_bytes(text.encode() if isinstance(text, str) else text)
    return folder


def error_of_name(name: str) -> UnknownModelError:
    with pytest.raises(UnknownModelError) as caught:
        resolve_model(name)
    error = caught.value
    assert "\n" not in str(error)
    assert error.hint
    assert error.exit_code == 3
    return error


# --- the catalog and folders, in this process


def test_a_catalog_name_needs_nothing_else() -> None:
    source = resolve_model("bert-large-uncased")
    assert (source.name, source.origin, source.path) == ("bert-large-uncased", "catalog", None)
    assert source.config["hidden_size"] == 1024


@pytest.mark.parametrize(
    ("name", "repository"),
    [
        ("Llama-3.2-1B", "meta-llama/Llama-3.2-1B"),
        ("llama-3.2-1b-instruct", "meta-llama/Llama-3.2-1B-Instruct"),
        ("meta-llama/Llama-3.2-1B-Instruct", "meta-llama/Llama-3.2-1B-Instruct"),
        ("bert-tiny", "prajjwal1/bert-tiny"),
        ("gpt2-tiny", None),
        ("TinyLlama-1.1B", "TinyLlama/TinyLlama-1.1B-Chat-v1.0"),
    ],
)
def test_the_repository_is_the_one_that_was_named(name: str, repository: str | None) -> None:
    assert resolve_model(name).repository == repository


def test_changing_a_config_leaves_the_catalog_as_it_was() -> None:
    resolve_model("Llama-3.2-1B").config["rope_scaling"]["factor"] = 1
    assert resolve_model("Llama-3.2-1B").config["rope_scaling"]["factor"] == 32


def test_a_folder(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "my model", SMALL)
    assert resolve_model(str(folder)) == ModelSource(str(folder), SMALL, "folder", str(folder))


def test_a_folder_from_here_gets_an_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_config(tmp_path / "mine", SMALL)
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "./mine", "mine/"):
        source = resolve_model(name)
        assert (source.name, source.origin, source.path) == (name, "folder", str(tmp_path / "mine"))


def test_a_folder_from_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_config(tmp_path / "mine", SMALL)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/mine").path == str(tmp_path / "mine")


def test_a_folder_wins_over_the_catalog_only_with_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    assert resolve_model("gpt2").origin == "catalog"
    write_config(tmp_path / "gpt2", SMALL)
    assert resolve_model("gpt2").origin == "folder"


def test_messages_of_configs_that_are_no_use(tmp_path: Path) -> None:
    contents: dict[str, object] = {
        "{": "{not json", "empty": "", "deep": "[" * 200_000, "UTF-16": b"\xff\xfe\x00\x01", "a list": "[1, 2]",
        "no model_type": {"hidden_size": 8}, "model_type None": {"model_type": None},
        "model_type a list": {"model_type": ["bert"]}, "code": {"model_type": "new-idea", "auto_map": CUSTOM},
    }  # fmt: skip
    folders = {name: str(write_config(tmp_path / name, content)) for name, content in contents.items()}
    check_refusals("configs", {name: partial(resolve_model, each) for name, each in folders.items()}, tmp_path)


def test_custom_code_matters_only_for_a_model_that_transformers_lacks(tmp_path: Path) -> None:
    known = write_config(tmp_path / "known", {**SMALL, "auto_map": CUSTOM})
    assert resolve_model(str(known)).config == SMALL
    tokenizer = {"model_type": "new-idea", "auto_map": {"AutoTokenizer": ["tokenization_x.X", None]}}
    assert resolve_model(str(write_config(tmp_path / "tokenizer", tokenizer))).config == {"model_type": "new-idea"}


def test_a_composite_config_passes_as_it_is(tmp_path: Path) -> None:
    config = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "hidden_size": 8}}
    assert resolve_model(str(write_config(tmp_path / "both", config))).config == config


def test_messages_of_what_names_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(write_config(tmp_path / "mine", SMALL))
    paths = [*(str(tmp_path / name) for name in ("empty", "missing", "mine/config.json")), "./missing", "a/b/c"]
    names = ["", "   ", "\t\n", *NO_REPOSITORY]
    calls = {ascii(name).replace(str(tmp_path), "FOLDER")[:40]: partial(resolve_model, name) for name in paths + names}
    check_refusals("unknown-models", calls, tmp_path)


NO_REPOSITORY = [
    "a b", "gpt2 ", "a..b", "../gpt2x", "gpt2\n", "gpt2\x00", "\x1b[31mred", "\udcff", "übermodell",
    "-gpt2", "a--b", "a/b.git", "a?b=c", "http://example.com/x", "x" * 97,
]  # fmt: skip


@pytest.mark.parametrize("name", [*NO_REPOSITORY, "x" * 100_000], ids=range(len(NO_REPOSITORY) + 1))
def test_what_cannot_be_a_repository_is_refused_in_one_clean_line(name: str) -> None:
    error = error_of_name(name)
    assert str(error).isprintable()


# --- the hub cache and the hub, in a child process

ASK = """
import json, sys
from autotune.models import resolve as model_source
from autotune.core.errors import UnknownModelError
model_source._HUB_TIMEOUT_SECONDS, model_source._HUB_DEADLINE_SECONDS = json.loads(sys.argv[2])
answers = []
for name in json.loads(sys.argv[1]):
    try:
        source = model_source.resolve_model(name)
        answer = {"origin": source.origin, "config": source.config, "path": source.path, "of": source.repository}
    except UnknownModelError as error:
        answer = {"message": error.message, "hint": error.hint}
    answers.append(answer)
assert not {"torch", "transformers"} & sys.modules.keys()
print(json.dumps(answers))
"""


@dataclass
class Asker:
    """Resolves names in a fresh process with an empty hub cache of its own."""

    home: Path
    environment: dict[str, str] = field(default_factory=dict)

    def __call__(self, *names: str, timeout: float = 30.0, deadline: float = 100.0) -> list[dict[str, Any]]:
        """What each name came to. stdout must hold nothing but that, and no progress bar is drawn anywhere."""
        foreign = ("HF_", "TRANSFORMERS_")
        inherited = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(foreign) and not key.lower().endswith("_proxy")
        }
        child = subprocess.run(
            [sys.executable, "-c", ASK, json.dumps(names), json.dumps([timeout, deadline])],
            # The position -1 is how tqdm is told to draw without a terminal.
            env={
                **inherited,
                **self.environment,
                "PYTHONPATH": str(ROOT),
                "HF_HOME": str(self.home),
                "TQDM_POSITION": "-1",
            },
            cwd=self.home,
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )
        assert child.returncode == 0, child.stderr
        assert "%|" not in child.stderr
        answers = json.loads(child.stdout)
        assert isinstance(answers, list)
        return answers


REFUSALS = {"acme/gated": (403, "GatedRepo"), "acme/weights-only": (404, "EntryNotFound"), "acme/ill": (503, "")}


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as ``config.json`` needs."""

    seen: list[str]
    closing: threading.Event

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        self.seen.append(f"{self.command} {self.path}")
        name = self.path.removeprefix("/").split("/resolve/")[0]
        if name == "acme/silent":
            self.closing.wait()
        elif name == "acme/dripping":
            self.drip()
        elif name in ("acme/small", "renamed"):
            self.reply(200, json.dumps(SMALL), {"X-Repo-Commit": COMMIT, "ETag": '"1f"'})
        elif name == "old-name":
            self.reply(307, "", {"Location": "/renamed/resolve/main/config.json"})
        elif name == "acme/broken-config":
            self.reply(200, "<html>", {"X-Repo-Commit": COMMIT, "ETag": '"2f"'})
        else:
            status, code = REFUSALS.get(name, (401, "RepoNotFound"))
            self.reply(status, "", {"X-Error-Code": code})

    def reply(self, status: int, body: str, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body.encode())

    def drip(self) -> None:
        """A header a moment, so that no single read ever times out."""
        self.send_response(200)
        try:
            while not self.closing.wait(0.1):
                self.send_header("X-More", "to come")
                self.flush_headers()
        except OSError:
            pass

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def seen() -> list[str]:
    """What the hub was asked for."""
    return []


@pytest.fixture
def asker(tmp_path: Path, seen: list[str]) -> Iterator[Asker]:
    handler = type("Handler", (Hub,), {"seen": seen, "closing": threading.Event()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield Asker(tmp_path, {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"})
    handler.closing.set()  # type: ignore[attr-defined]
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_hub_is_asked_once_and_then_its_cache(asker: Asker, seen: list[str]) -> None:
    first, second = asker("acme/small", "acme/small")
    assert (first["origin"], first["config"], first["of"]) == ("hub", SMALL, "acme/small")
    assert second["origin"] == "hub cache"
    assert first["path"] == second["path"]
    assert (Path(first["path"]) / "config.json").is_file()
    requests = len(seen)
    assert requests > 0

    asker.environment = {"HF_HUB_OFFLINE": "1"}
    (third,) = asker("acme/small")
    assert (third["origin"], third["config"]) == ("hub cache", SMALL)
    assert len(seen) == requests


def test_a_repository_that_was_renamed(asker: Asker) -> None:
    (answer,) = asker("old-name")
    assert (answer["origin"], answer["config"]) == ("hub", SMALL)


def test_what_the_hub_may_answer_otherwise(asker: Asker, seen: list[str]) -> None:
    names = ("acme/bert-large-uncasd", "acme/gated", "acme/weights-only", "acme/broken-config", "acme/ill")
    unknown, gated, bare, broken, ill = asker(*names)
    assert "'acme/bert-large-uncasd'" in unknown["message"]
    assert "the hub has none of this name" in unknown["message"]
    assert "did you mean bert-large-uncased" in unknown["hint"]
    assert "autotune models" in unknown["hint"]
    assert "accepted its terms" in gated["message"]
    assert "hf auth login" in gated["hint"]
    assert "has no config.json" in bare["message"]
    assert "is not JSON" in broken["message"]
    assert "503" in ill["message"]
    assert len([request for request in seen if "acme/ill" in request]) == 1


def test_neither_the_catalog_nor_nonsense_reaches_the_hub(asker: Asker, seen: list[str]) -> None:
    catalogued, *rest = asker("bert-base-uncased", "a b", "a..b", "x\ny", "./x", "a/b/c", "x" * 97)
    assert catalogued["origin"] == "catalog"
    assert all("cannot be the name" in answer["message"] or "no such folder" in answer["message"] for answer in rest)
    assert seen == []


def test_offline_asks_nobody(asker: Asker, seen: list[str]) -> None:
    asker.environment["HF_HUB_OFFLINE"] = "1"
    (answer,) = asker("acme/small")
    assert "the hub is switched off (HF_HUB_OFFLINE)" in answer["message"]
    assert seen == []


def test_a_hub_that_is_not_there_or_does_not_answer(asker: Asker) -> None:
    """The hub is silent and drips for as long as the process that asks lives, so one that waited for it has no end."""
    (silent,) = asker("acme/silent", timeout=0.5)
    assert "could not be reached" in silent["message"]
    (dripping,) = asker("acme/dripping", deadline=1.5)
    assert "no answer within 1.5 s" in dripping["message"]
    asker.environment["HF_ENDPOINT"] = "http://127.0.0.1:9"
    (closed,) = asker("acme/small")
    assert "could not be reached" in closed["message"]


def test_the_hub_cache_is_read_though_the_hub_is_not_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--acme--cached"
    snapshot = write_config(repository / "snapshots" / COMMIT, SMALL)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    source = resolve_model("acme/cached")
    assert (source.origin, source.path, source.repository) == ("hub cache", str(snapshot), "acme/cached")

    (snapshot / "config.json").write_text("{")
    assert "is not JSON" in error_of_name("acme/cached").message
    (repository / "refs" / "main").write_bytes(b"\xff\xfe")
    assert "neither in the catalog nor in the local hub cache" in error_of_name("acme/cached").message


def test_every_catalog_name_resolves_to_its_entry() -> None:
    for entry in catalog.entries():
        for name in entry.names:
            assert resolve_model(name).config == entry.config
