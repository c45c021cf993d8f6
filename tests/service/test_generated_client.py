"""A client that a generator makes from the description of the API searches, follows, reads and cancels."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from served import Service
from serving import record_answers
from standing_in import with_devices

LARGE = {"model": "bert-large-uncased", "effective_batch": 64}


@pytest.mark.service
def test_a_generated_client_submits_follows_reads_and_cancels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openapi_python_client", reason="pip install openapi-python-client")
    described = tmp_path / "api.json"
    token = record_answers(str(tmp_path / "a.db"), LARGE)
    with Service(tmp_path, with_devices(tmp_path, {"gpu-1": 1})) as service:
        service.token = token
        service.serve("--storage", "a.db")
        described.write_text(json.dumps(service.call("GET", "/openapi.json")))
        words = ["generate", "--path", described.name, "--meta", "none", "--output-path", "made_client"]
        made = subprocess.run([sys.executable, "-m", "openapi_python_client", *words], cwd=tmp_path, timeout=120)
        assert made.returncode == 0
        monkeypatch.syspath_prepend(str(tmp_path))

        def call(name: str, *path: str, **body: object) -> Any:
            return importlib.import_module(f"made_client.api.{name}").sync(*path, client=client, **body)

        models = importlib.import_module("made_client.models")
        client = importlib.import_module("made_client").AuthenticatedClient(
            base_url=service.url, token=token, timeout=60
        )
        search = call("searches.searches_submit", body=models.SearchesSubmitBody(**LARGE))
        assert (search.state.value, search.submitted_by) == ("finished", "ann")
        events = call("searches.searches_events", search.id)
        assert '"state": "finished"' in events
        report = call("searches.searches_report", search.id)
        assert report.best.samples_per_second > report.baseline.samples_per_second
        assert {trial.state.value for trial in report.trials} >= {"completed"}
        other = call("searches.searches_submit", body=models.SearchesSubmitBody(model="gpt2", device="b200"))
        assert "no machine has a GPU named b200" in other.waits_for
        assert call("searches.searches_cancel", other.id).state.value == "cancelled"
        refused = call("searches.searches_submit", body=models.SearchesSubmitBody(model="bert-tinyy"))
        assert (refused.status, "did you mean" in refused.hint) == (422, True)
        assert json.dumps(refused.detail).startswith("\"no model 'bert-tinyy'")
