"""Test predictions over HTTP, and the queued verification of a study."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from searching import H200
from serving import PREDICTED, StandInEngine, run_recorded, waits_for_state
from starlette.testclient import TestClient

from autotune.cli.main import cli
from autotune.cli.remote import print_verification
from autotune.core.candidate import Document
from autotune.core.errors import PromiseMissedError, ServiceError
from autotune.core.options import BY_NAME, options_of
from autotune.service.predict_process import predicted as predicted_for_a_service
from autotune.service.predictions import NAMES
from autotune.service.searches import Searches

ASKED = {"model": "bert-tiny", "effective_batch": 16, "gpu": ["rtx-3090"]}
STUDY = "bert-large-uncased-64"


def test_a_prediction_is_made_once(reader: TestClient) -> None:
    PREDICTED.clear()
    first = reader.post("/v1/predict", json=ASKED)
    assert (first.status_code, first.json()["gpus"]) == (200, ["rtx-3090"])
    assert reader.post("/v1/predict", json=dict(reversed(ASKED.items()))).json() == first.json()
    assert len(PREDICTED) == 1
    assert reader.post("/v1/predict", json={**ASKED, "seq_len": 32}).status_code == 200
    assert [options["seq_len"] for options in PREDICTED] == [None, 32]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({}, "nothing to train was given"),
        ({**ASKED, "model": "/etc"}, "reads no files at"),
        ({**ASKED, "efective_batch": 1}, "'efective_batch' is not an option of autotune predict"),
        ({**ASKED, "gpu_spec": "/etc/passwd"}, "'gpu_spec' is not an option"),
        ({**ASKED, "storage": "x.db"}, "storage is set by the service"),
        ({**ASKED, "trainer": "train.py:build"}, "no code over HTTP"),
        ({**ASKED, "gpu": ["unknown"]}, "--gpu 'unknown' is not known"),
    ],
)
def test_what_cannot_be_predicted_is_refused_in_the_words_of_the_command_line(
    reader: TestClient, server: TestClient, asked: Document, words: str
) -> None:
    refused = reader.post("/v1/predict", json=asked)
    assert (refused.status_code, refused.json()["exit_code"]) == (422, 2)
    assert words in refused.json()["detail"]
    assert server.post("/v1/predict", json=ASKED).status_code == 401


def test_the_service_predicts_as_the_command_does(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def predicted(gpu: object, spec: object, storage: str, options: Document) -> tuple[Document, None]:
        asked.append((gpu, spec, storage, options))
        return {"predicted": True}, None

    monkeypatch.setattr("autotune.tuning.predictions.predicted_document", predicted)
    options = {name: BY_NAME[name].default for name in NAMES["predict"]}
    assert predicted_for_a_service("predict", {**options, "gpu": ("rtx-3090",)}, "a.db") == {"predicted": True}
    of_command = {option.name for option in options_of("predict")}
    passed = of_command - {"gpu", "gpu_spec", "storage", "server", "as_json", "all_batches", "anatomy"}
    passed -= {"fail_if_not_fit", "lever"}
    assert asked == [(("rtx-3090",), None, "a.db", {name: BY_NAME[name].default for name in passed})]


def test_a_service_advises_as_the_command_does(
    reader: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: Document = {"model": "bert-tiny", "effective_batch": 16, "seq_len": 64, "gradient_checkpointing": "off"}
    given: Document = {**asked, "gpu": ["l4", "h100"], "price": ["l4=0.7"], "gpu_counts": [1, 2]}
    PREDICTED.clear()
    assert reader.post("/v1/advise", json=given).status_code == 200
    assert reader.post("/v1/advise", json=asked | {"effective_batch": None}).status_code == 422
    refused = reader.post("/v1/advise", json={**given, "prices": "/etc/passwd"})
    assert (refused.status_code, "'prices' is not an option" in refused.json()["detail"]) == (422, True)
    (options,) = PREDICTED
    told = json.loads(json.dumps(predicted_for_a_service("advise", dict(options), str(tmp_path / "a.db"))))
    words = [f"--{name.replace('_', '-')}={value}" for name, value in asked.items()]
    words += ["--gpu=l4,h100", "--price=l4=0.7", "--gpus=1,2", f"--storage={tmp_path}/a.db"]
    local = CliRunner().invoke(cli, ["advise", *words])
    assert local.stdout == "\n".join(told["lines"]) + "\n"
    monkeypatch.setattr("autotune.service.client.Client.request", lambda *words, **more: told)
    words[-1] = "--server=http://127.0.0.1:1"
    assert CliRunner().invoke(cli, ["advise", *words]).stdout == local.stdout
    assert json.loads(CliRunner().invoke(cli, ["advise", *words, "--json"]).stdout) == told["advice"]


@pytest.fixture
def searched(writer: TestClient, searches: Searches, on_gpu: StandInEngine) -> None:
    writer.post("/v1/searches", json={"model": "bert-large-uncased", "effective_batch": 64})
    run_recorded(searches, on_gpu)


def test_a_verification_is_queued_for_a_device_like_the_one_of_the_study(
    searched: None, writer: TestClient, searches: Searches, on_gpu: StandInEngine
) -> None:
    answer = writer.post("/v1/verify", json={"study": STUDY, "steps": 50})
    assert answer.status_code == 202
    told = answer.json()
    assert (told["study"], told["request"]) == (f"verify {STUDY}", {"verify_study": STUDY, "steps": 50})
    assert told["needs"]["gpu"] == H200.name.lower()
    run = on_gpu.next_run()
    assert (run.work.kind, run.work.study, run.work.devices) == ("verify", STUDY, (H200.uuid,))
    missed = {"exit_code": 8, "message": "slower than promised", "hint": "search again"}
    shown = {"verification": {"verdict": "missed"}, "problem": missed, "lines": ["told"]}
    run.add("verification", shown)
    run.end("finished")
    waits_for_state(searches, run.job, "finished")
    found = writer.get(answer.headers["location"]).json()
    assert (found["state"], found["verification"], found["missed"]) == ("finished", {"verdict": "missed"}, missed)
    assert found["lines"] == ["told"]
    assert "the promise is missed" in writer.get("/parts/home").text
    assert writer.get(f"/searches/{run.job}").status_code == 200
    # The study's own search is still found by its name.
    assert writer.get(f"/v1/searches/{STUDY}").json()["request"]["model"] == "bert-large-uncased"


def test_a_verification_is_printed_as_text_or_json_and_raises_what_was_missed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown: Document = {
        "study": "verify mine",
        "verification": {"verdict": "cannot_tell"},
        "lines": ["cannot tell: too noisy"],
        "missed": None,
    }
    print_verification(shown, as_json=False)
    assert capsys.readouterr().out == "cannot tell: too noisy\n"
    print_verification(shown, as_json=True)
    assert '"verdict": "cannot_tell"' in capsys.readouterr().out
    missed = {"exit_code": 11, "message": "slower than promised", "hint": "search again"}
    with pytest.raises(PromiseMissedError, match="slower than promised"):
        print_verification({**shown, "missed": missed}, as_json=False)
    with pytest.raises(ServiceError, match="ended without a result"):
        print_verification({**shown, "verification": None}, as_json=False)


@pytest.mark.parametrize(
    ("asked", "status", "words"),
    [
        ({}, 422, "no study is named"),
        ({"study": "nobody"}, 404, "nobody"),
        ({"study": STUDY, "steps": 1}, 422, "too few"),
        ({"study": STUDY, "steps": "many"}, 422, "many"),
        ({"study": STUDY, "storage": "x"}, 422, "'storage' is not an option of verify"),
    ],
)
def test_what_cannot_be_verified_is_refused(
    searched: None, writer: TestClient, reader: TestClient, asked: Document, status: int, words: str
) -> None:
    refused = writer.post("/v1/verify", json=asked)
    assert refused.status_code == status
    assert words in refused.json()["detail"]
    assert reader.post("/v1/verify", json=asked).status_code == 403
    search = writer.get("/v1/searches").json()["searches"][0]["id"]
    assert writer.get(f"/v1/verify/{search}").status_code == 404
