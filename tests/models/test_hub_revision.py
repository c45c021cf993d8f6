"""Test datasets on the hub, identified by name and commit, with a local server as the hub."""

import dataclasses
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from searching import BERT_LARGE, prepared

from autotune.core.dataset_spec import DataSpec
from autotune.core.errors import InvalidRequestError
from autotune.models import dataset_files as data_module
from autotune.models.dataset_files import check_unchanged, commit_of
from autotune.tuning.studies import changes_since

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ASK = "import sys; from autotune.models.dataset_files import locate; print(locate(sys.argv[1], None)[2])"


class Hub(BaseHTTPRequestHandler):
    """Knows one dataset."""

    def do_GET(self) -> None:
        is_known = self.path.partition("?")[0].startswith("/api/datasets/acme/texts")
        body = json.dumps({"id": "acme/texts", "sha": COMMIT, "siblings": []} if is_known else {}).encode()
        self.send_response(200 if is_known else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    """The address of the hub."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def content(name: str, folder: Path, **variables: str) -> str:
    """What is known of a dataset's content, in a process with a cache of its own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    ran = subprocess.run(
        [sys.executable, "-c", ASK, name],
        env={**environment, "HF_HOME": str(folder), **variables},
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return ran.stdout.strip()


def test_the_hub_says_which_commit_a_dataset_is_at(hub: str, tmp_path: Path) -> None:
    assert content("acme/texts", tmp_path, HF_ENDPOINT=hub) == f"acme/texts@{COMMIT}"
    assert content("acme/texts:german", tmp_path, HF_ENDPOINT=hub) == f"acme/texts:german@{COMMIT}"
    assert content("acme/nothing", tmp_path, HF_ENDPOINT=hub) == "acme/nothing"


def test_offline_it_is_the_commit_that_was_downloaded_last(tmp_path: Path) -> None:
    assert content("acme/texts", tmp_path, HF_HUB_OFFLINE="1") == "acme/texts"
    known = tmp_path / "hub" / "datasets--acme--texts" / "refs"
    known.mkdir(parents=True)
    (known / "main").write_text(COMMIT)
    assert content("acme/texts", tmp_path, HF_HUB_OFFLINE="1") == f"acme/texts@{COMMIT}"


def spec(found: str) -> DataSpec:
    return DataSpec("acme/texts", "hub", found)


OTHER = "f" * 40


@pytest.mark.parametrize(
    ("recorded", "today", "has_changed"),
    [
        (f"acme/texts@{COMMIT}", f"acme/texts@{COMMIT}", False),
        (f"acme/texts@{COMMIT}", f"acme/texts@{OTHER}", True),
        # Recorded when no commit was looked up, or asked now without a network.
        ("acme/texts", f"acme/texts@{OTHER}", False),
        (f"acme/texts@{COMMIT}", "acme/texts", False),
    ],
)
def test_a_study_goes_on_unless_the_dataset_has_changed(
    monkeypatch: pytest.MonkeyPatch, recorded: str, today: str, has_changed: bool
) -> None:
    monkeypatch.setattr(data_module, "hub_content", lambda name: today)
    if has_changed:
        with pytest.raises(InvalidRequestError, match="has changed since"):
            check_unchanged(spec(recorded))
    else:
        check_unchanged(spec(recorded))
    given = prepared()
    workload = dataclasses.replace(BERT_LARGE, data=spec(today))
    given = dataclasses.replace(given, request=dataclasses.replace(given.request, workload=workload))
    then = dataclasses.replace(BERT_LARGE, data=spec(recorded)).recorded_document()
    found = changes_since(given, given.request.document(), then, given.environment)
    assert found == (["acme/texts has changed since"] if has_changed else [])


def test_data_of_two_commits_are_two_workloads() -> None:
    keys = {dataclasses.replace(BERT_LARGE, data=spec(f"acme/texts@{commit}")).fingerprint() for commit in "ab"}
    assert len(keys) == 2
    assert commit_of("acme/texts:german@abc") == "abc"
    assert commit_of("acme/texts") is None
