"""The API: what a client submits, sees, hears and takes away, and what the engine does between."""

import dataclasses
import json
import logging
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from processes import wait_until
from searching import H200
from serving import StandInEngine, run_recorded, waits_for_state
from starlette.testclient import TestClient

from autotune.core.candidate import Document
from autotune.core.device import Device
from autotune.core.errors import DeviceError, StorageError
from autotune.core.options import OPTIONS
from autotune.core.schema import decode
from autotune.engine.work import search_request
from autotune.results.forms import FORMATS, LAUNCH_FORMATS
from autotune.results.json_document import StudyDocument
from autotune.service.openapi import (
    DevicesDocument,
    HealthDocument,
    ProblemDocument,
    SearchDocument,
    SearchesDocument,
    TrialsDocument,
    VerifyingDocument,
)
from autotune.service.requests import OPTION_NAMES
from autotune.service.searches import Searches
from autotune.store.engine import leave_syncing_to_checkpoints, transaction
from autotune.store.queue import MOST_LOSSES
from autotune.store.repository import Store
from autotune.tuning.run import trial_log_path

TINY = {"model": "bert-tiny", "effective_batch": 16, "seq_len": 32}
LARGE = {"model": "bert-large-uncased", "effective_batch": 64}


def submit(client: TestClient, request: Document = TINY, **headers: str) -> Document:
    answer = client.post("/v1/searches", json=request, headers=headers)
    assert answer.status_code in (200, 202), answer.text
    return answer.json()


def problem(client: TestClient, request: object) -> Document:
    answer = client.post("/v1/searches", json=request)
    assert answer.status_code >= 400, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    return answer.json()


def streamed(client: TestClient, path: str, **headers: str) -> list[tuple[str | None, str, Document]]:
    """The events of a search that has ended: number, kind, document."""
    found = []
    for block in client.get(path, headers=headers).text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line and not line.startswith(":"))
        if "data" in fields:
            found.append((fields.get("id"), fields["event"], json.loads(fields["data"])))
    return found


def test_a_search_is_queued_and_says_what_it_waits_for(writer: TestClient) -> None:
    answer = writer.post("/v1/searches", json=TINY)
    assert answer.status_code == 202
    told = answer.json()
    assert answer.headers["location"] == f"/v1/searches/{told['id']}"
    assert (told["study"], told["state"], told["submitted_by"]) == ("bert-tiny-16", "queued", "writer")
    assert told["waits_for"] == "no device is ready to search"
    assert writer.get(answer.headers["location"]).json() == told
    assert writer.get("/v1/searches/bert-tiny-16").json() == told


def test_needs_that_no_machine_meets_are_named(writer: TestClient, on_cpu: StandInEngine) -> None:
    told = submit(writer, {**TINY, "device": "h200"})
    assert told["needs"] == {"device_kind": "cuda", "gpu": "h200", "memory_bytes": None, "count": 1}
    assert told["waits_for"].startswith("no machine has a GPU named h200; there are ")
    submit(writer, TINY)
    assert on_cpu.next_run().work.options["effective_batch"] == 16
    assert submit(writer, {**TINY, "seed": 1})["waits_for"] == "1 before it in the queue"


def test_a_search_on_several_gpus_waits_for_a_machine_that_has_them(writer: TestClient, on_gpu: StandInEngine) -> None:
    told = submit(writer, {**LARGE, "gpus": 2, "device": "h200"})
    assert (told["needs"]["gpu"], told["needs"]["count"]) == ("h200", 2)
    assert told["waits_for"] == "no machine has 2 GPUs named h200; there are NVIDIA H200 (cuda)"
    second = dataclasses.replace(H200, uuid="GPU-2", index=1)
    on_gpu.add(H200, second, name="pair")
    work = on_gpu.next_run().work
    assert (work.options["gpus"], work.devices) == ("2", (H200.uuid, "GPU-2"))


def test_a_search_on_several_gpus_is_not_held_up_by_those_after_it(
    writer: TestClient, searches: Searches, engine: StandInEngine
) -> None:
    engine.add(H200, dataclasses.replace(H200, uuid="GPU-2", index=1))
    submit(writer, LARGE)
    first = engine.next_run()
    pair = submit(writer, {**LARGE, "gpus": 2})
    submit(writer, {**LARGE, "seed": 1})
    # One GPU is free, and is kept for the search that needs two.
    first.end("finished")
    second = engine.next_run()
    assert (second.job, second.work.devices) == (pair["id"], (H200.uuid, "GPU-2"))
    second.end("finished")
    assert engine.next_run().work.options["seed"] == 1


@pytest.mark.parametrize("gpus", ["all", "0,1", [0, 1], 0, 10**9, "GPU-abc"])
def test_gpus_over_http_are_a_number_of_them(writer: TestClient, gpus: object) -> None:
    found = problem(writer, {**LARGE, "gpus": gpus})
    assert (found["status"], "give a number of them" in found["hint"]) == (422, True)


def test_a_search_is_on_as_many_gpus_as_were_asked_for() -> None:
    second = dataclasses.replace(H200, uuid="GPU-2", index=1)
    request = search_request({**LARGE, "gpus": "2"}, [H200, second])
    assert (request.ranks, request.placement.uuids) == (2, (H200.uuid, "GPU-2"))
    assert search_request(LARGE, [H200, second]).ranks == 1
    with pytest.raises(DeviceError, match="there are 1"):
        search_request({**LARGE, "gpus": "2"}, [H200])


def test_an_idempotency_key_makes_one_search(writer: TestClient) -> None:
    first = submit(writer, TINY, **{"Idempotency-Key": "a"})
    assert submit(writer, TINY, **{"Idempotency-Key": "a"})["id"] == first["id"]
    other = writer.post("/v1/searches", json={**TINY, "seed": 1}, headers={"Idempotency-Key": "a"})
    assert other.status_code == 422
    assert "used with another request" in other.json()["detail"]
    # What a device is asked for is not an option of the search.
    elsewhere = writer.post("/v1/searches", json={**TINY, "device": "h200"}, headers={"Idempotency-Key": "a"})
    assert elsewhere.status_code == 422


def test_clients_that_send_one_key_at_once_make_one_search(writer: TestClient) -> None:
    with ThreadPoolExecutor(8) as pool:
        told = list(pool.map(lambda _: submit(writer, TINY, **{"Idempotency-Key": "a"})["id"], range(16)))
    assert len(set(told)) == 1
    assert len(writer.get("/v1/searches").json()["searches"]) == 1


def test_a_request_that_was_accepted_is_found_again_by_its_key_although_the_queue_is_full(
    writer: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = submit(writer, TINY, **{"Idempotency-Key": "a"})
    monkeypatch.setattr("autotune.service.searches.MOST_QUEUED", 1)
    assert submit(writer, TINY, **{"Idempotency-Key": "a"})["id"] == first["id"]
    assert writer.post("/v1/searches", json=TINY).status_code == 429


def test_searches_that_are_submitted_at_once_have_a_name_each(writer: TestClient) -> None:
    with ThreadPoolExecutor(6) as pool:
        told = list(pool.map(lambda number: submit(writer, {**TINY, "seed": number})["study"], range(6)))
    assert sorted(told) == ["bert-tiny-16", *(f"bert-tiny-16-{number}" for number in range(2, 7))]


def test_a_request_that_was_answered_is_not_searched_again(
    writer: TestClient, searches: Searches, on_gpu: StandInEngine
) -> None:
    job = run_after(writer, searches, on_gpu)
    again = writer.post("/v1/searches", json=dict(reversed(LARGE.items())))
    assert (again.status_code, again.json()["id"], again.json()["state"]) == (200, job, "finished")
    assert submit(writer, {**LARGE, "fresh": True})["study"] == "bert-large-uncased-64-2"
    assert submit(writer, {**LARGE, "seed": 1})["state"] == "queued"


def test_searches_of_other_models_do_not_hide_an_answer(
    writer: TestClient, searches: Searches, on_gpu: StandInEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = run_after(writer, searches, on_gpu)
    other = submit(writer)["id"]
    on_gpu.next_run().end("finished")
    waits_for_state(searches, other, "finished")
    monkeypatch.setattr("autotune.service.searches._MOST_COMPARED", 1)
    assert submit(writer, LARGE)["id"] == job


def run_after(writer: TestClient, searches: Searches, engine: StandInEngine) -> str:
    submit(writer, LARGE)
    return run_recorded(searches, engine).job


@pytest.mark.parametrize(
    ("request_", "words", "hint", "code"),
    [
        ({}, "nothing to train was given", "model", 2),
        ([], "a request is a JSON object", "model", 2),
        ({"model": "bert-tinyy", "effective_batch": 16}, "no model 'bert-tinyy'", "did you mean bert-tiny", 3),
        ({**TINY, "efective_batch": 3}, "'efective_batch' is not an option", "effective_batch", 2),
        ({**TINY, "effective_batch": "many"}, "effective_batch='many' is not a whole number", "int", 2),
        ({**TINY, "precision": ["fp64"]}, "'fp64'", "choose", 2),
        ({**TINY, "trial_timeout": "soon"}, "soon", "", 2),
        ({**TINY, "study": "../../etc"}, "is not a study name", "letters", 2),
        ({**TINY, "priority": 99}, "priority is 99", "", 2),
        ({**TINY, "needs": {"gpu": 3}}, "not part of a GPU's name", "", 2),
        ({**TINY, "needs": {"gpus": 3}}, "needs is not an object", "", 2),
        ({**TINY, "storage": "/tmp/x.db"}, "storage is set by the service", "", 2),
    ],
)
def test_bad_requests_are_refused_in_the_words_of_the_command_line(
    writer: TestClient, on_cpu: StandInEngine, request_: object, words: str, hint: str, code: int
) -> None:
    found = problem(writer, request_)
    assert words in found["detail"]
    assert hint in found["hint"]
    assert (found["status"], found["exit_code"]) == (422, code)
    assert writer.get("/v1/searches").json() == {"searches": []}


def test_what_no_device_can_do_is_refused_at_once(writer: TestClient, on_cpu: StandInEngine) -> None:
    found = problem(writer, {**TINY, "liger": "on", "device": "cpu"})
    assert found["detail"] == "cpu cannot run Liger's kernels"
    assert (found["status"], found["exit_code"]) == (409, 4)


def test_the_whole_way_of_a_search(writer: TestClient, searches: Searches, on_gpu: StandInEngine) -> None:
    queued = submit(writer, LARGE)
    run = run_recorded(searches, on_gpu)
    path = f"/v1/searches/{queued['id']}"
    told = writer.get(path).json()
    assert (told["state"], told["attempts"]) == ("finished", 1)
    assert (told["device"]["host"], told["device"]["uuids"]) == ("host", [H200.uuid])
    events = streamed(writer, f"{path}/events")
    assert [event[0] for event in events] == [str(number) for number in range(1, len(events) + 1)]
    assert [event[2]["state"] for event in events if event[1] == "state"] == ["queued", "running", "finished"]
    lines = [event[2]["text"] for event in events if event[1] == "line"]
    assert any(line.startswith("memory  a trial may reserve") for line in lines)
    assert any("best" in line for line in lines)
    shown = [event[2] for event in events if event[1] == "trial"]
    trials = writer.get(f"{path}/trials").json()["trials"]
    assert [trial["number"] for trial in shown] == [trial["number"] for trial in trials]
    rest = streamed(writer, f"{path}/events", **{"Last-Event-ID": str(len(events) - 2)})
    assert rest == events[-2:]
    report = writer.get(f"{path}/report").json()
    assert report["best"]["per_device_train_batch_size"] == 32
    assert writer.get(f"{path}/report?format=text").text.startswith("Best: per-device batch 32 × accumulation 2")
    assert "<svg" in writer.get(f"{path}/report?format=html").text
    assert json.loads(writer.get(f"{path}/export").text)["per_device_train_batch_size"] == 32
    for form in FORMATS:
        assert writer.get(f"{path}/export?format={form}").status_code == 200, form
    for form in LAUNCH_FORMATS:
        assert "this study measured one" in writer.get(f"{path}/export?format={form}").json()["detail"]
    assert "--per_device_train_batch_size 32" in writer.get(f"{path}/export?format=cli").text
    assert run.work.study == "bert-large-uncased-64"


@pytest.mark.parametrize("searches", ["sqlite"], indirect=True)
def test_a_log_of_a_trial_is_shown(writer: TestClient, searches: Searches, on_gpu: StandInEngine) -> None:
    job = searches.job(run_after(writer, searches, on_gpu))
    log = trial_log_path(searches.storage, job.study, 0)
    log.parent.mkdir(parents=True)
    log.write_text("step 1\n")
    path = f"/v1/searches/{job.id}/trials"
    assert writer.get(f"{path}/0/log").text == "step 1\n"
    assert writer.get(f"{path}/1/log").status_code == 404
    assert writer.get(f"{path}/999/log").status_code == 404


def test_a_search_without_trials_has_no_report_yet(writer: TestClient) -> None:
    path = f"/v1/searches/{submit(writer)['id']}"
    assert "it waits in the queue" in writer.get(f"{path}/report").json()["detail"]
    assert writer.get(f"{path}/trials").json() == {"trials": []}
    missing = writer.get("/v1/searches/nobody")
    assert (missing.status_code, missing.json()["exit_code"]) == (404, 9)


def test_cancelling(writer: TestClient, searches: Searches, on_cpu: StandInEngine) -> None:
    first, second = submit(writer), submit(writer, {**TINY, "seed": 1})
    run = on_cpu.next_run()
    run.add("status", {"running": "trial 0"})
    path = f"/v1/searches/{first['id']}"
    assert wait_until(lambda: writer.get(path).json()["status"] == {"running": "trial 0"})
    assert writer.delete(f"/v1/searches/{second['study']}").json()["state"] == "cancelled"
    assert writer.delete(path).json()["cancel_asked"] is True
    waits_for_state(searches, first["id"], "cancelled")
    states = [search["state"] for search in writer.get("/v1/searches?state=cancelled").json()["searches"]]
    assert states == ["cancelled", "cancelled"]
    assert not on_cpu.has_started


def test_a_search_that_runs_again_at_once_keeps_its_device(
    writer: TestClient, searches: Searches, on_gpu: StandInEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the end of the lost attempt is dealt with, as where a process is killed under load."""
    on_gpu.add(dataclasses.replace(H200, uuid="GPU-2"), name="other")
    job, put_back, again = submit(writer), searches.runner._put_back, []
    first = on_gpu.next_run()
    followers: list[threading.Thread] = []

    def put_back_and_start(*what: Any, **more: Any) -> None:
        put_back(*what, **more)
        searches.runner.wake()
        again.append(on_gpu.next_run())
        followers.append(threading.current_thread())

    monkeypatch.setattr(searches.runner, "_put_back", put_back_and_start)
    first.end("lost", why="its process was ended by signal 9")
    assert wait_until(lambda: bool(followers))
    followers[0].join(120)
    assert [run.job for run in again] == [job["id"]]
    assert [searches.runner.job_on("other", "GPU-2"), searches.runner.job_on("host", H200.uuid)].count(None) == 1
    again[0].end("finished")
    waits_for_state(searches, job["id"], "finished")


def test_an_attempt_that_is_lost_is_followed_by_another(
    writer: TestClient, searches: Searches, on_cpu: StandInEngine
) -> None:
    told = submit(writer)
    for number in range(1, MOST_LOSSES + 1):
        run = on_cpu.next_run()
        assert run.work.id == f"{told['id']}-{number}"
        run.end("lost", why="its process was ended by signal 9")
    waits_for_state(searches, told["id"], "failed")
    problem = writer.get(f"/v1/searches/{told['id']}").json()["problem"]
    assert problem["message"].endswith(
        "attempts at this search were lost, the last one: its process was ended by signal 9"
    )
    assert f"autotune_attempts_lost_total {MOST_LOSSES}" in writer.get("/metrics").text


def test_what_a_former_attempt_says_changes_nothing(
    writer: TestClient, searches: Searches, on_cpu: StandInEngine
) -> None:
    told = submit(writer)
    run = on_cpu.next_run()
    searches.store.queue.put_back(told["id"], 1, "taken away", is_lost=False)
    run.add("line", {"text": "too late", "style": None})
    run.end("finished")
    again = on_cpu.next_run()
    assert again.work.id == f"{told['id']}-2"
    again.end("finished")
    waits_for_state(searches, told["id"], "finished")
    assert "too late" not in str(streamed(writer, f"/v1/searches/{told['id']}/events"))


def test_a_search_that_was_told_to_end_goes_on_and_its_attempt_does_not_count(
    writer: TestClient, searches: Searches, on_cpu: StandInEngine
) -> None:
    told = submit(writer)
    for _ in range(MOST_LOSSES + 1):
        on_cpu.next_run().end("interrupted")
    on_cpu.next_run().end("finished")
    waits_for_state(searches, told["id"], "finished")


@pytest.mark.parametrize("kind", [DeviceError, StorageError, OSError])
def test_a_device_that_cannot_be_used_costs_an_attempt(
    writer: TestClient, searches: Searches, engine: StandInEngine, cpu: Device, kind: type[Exception]
) -> None:
    engine.refuses = kind("the process of this device has ended")
    told = submit(writer)
    engine.add(cpu)
    waits_for_state(searches, told["id"], "failed")
    assert "attempts at this search were lost, the last one: the process of" in str(searches.job(told["id"]).problem)
    assert writer.get("/v1/devices").json()["devices"][0]["search"] is None


def test_a_search_that_is_cancelled_as_it_starts_is_told(
    writer: TestClient, searches: Searches, engine: StandInEngine, cpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, queue = submit(writer), searches.store.queue
    start, path = queue.start, f"/v1/searches/{told['id']}"
    monkeypatch.setattr(queue, "start", lambda *what: (start(*what), writer.delete(path))[0])
    engine.add(cpu)
    waits_for_state(searches, told["id"], "cancelled")


def test_devices_are_listed_with_what_they_run(writer: TestClient, on_cpu: StandInEngine) -> None:
    told = submit(writer)
    on_cpu.next_run()
    (found,) = writer.get("/v1/devices").json()["devices"]
    assert (found["host"], found["kind"], found["search"]) == ("host", "cpu", told["id"])
    text = writer.get("/metrics").text
    assert 'autotune_searches{state="running"} 1' in text
    assert 'autotune_device_busy{host="host",label="cpu",name=' in text


def test_an_agent_of_an_earlier_version_is_told_in_a_line(writer: TestClient) -> None:
    for path in ("/v1/agents", "/v1/agents/x/claim", "/v1/agents/x/jobs/y/heartbeat"):
        answer = writer.post(path, json={"name": "old"})
        assert (answer.status_code, answer.json()["exit_code"]) == (410, 13)
        assert answer.json()["detail"] == "this service runs its searches itself; there are no agents any more"


def test_every_option_of_a_search_can_be_asked_for_but_those_that_bring_code_or_belong_to_the_service() -> None:
    of_search = {option.name for option in OPTIONS if "search" in option.commands}
    left_out = {"storage", "wait", "as_json", "trainer", "loop", "script", "server", "priority", "parallel", "executor"}
    left_out |= {"dry_run", "lever"}
    assert of_search - set(OPTION_NAMES) == left_out


def test_the_description_of_the_api_is_complete(writer: TestClient) -> None:
    described = writer.get("/openapi.json").json()
    schemas, ids = described["components"]["schemas"], []
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            ids.append(operation["operationId"])
            responses = operation["responses"]
            assert operation.get("security", described["security"]) == ([] if path == "/healthz" else [{"token": []}])
            assert ("401" in responses) == (path != "/healthz")
            assert ("404" in responses) == ("{" in path)
            assert ("422" in responses) >= (method == "post")
            assert {code for code in responses if code.startswith("2")}, (method, path)
    assert len(ids) == len(set(ids)) == 17
    assert "HTTPValidationError" not in schemas
    # Of every field it is said what it is.
    assert all(each for schema in schemas.values() for each in schema.get("properties", {}).values())
    assert set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(described))) == set(schemas)
    assert described["components"]["securitySchemes"]["token"]["scheme"] == "bearer"
    options = described["paths"]["/v1/searches"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert set(options["properties"]) == {*OPTION_NAMES, "priority", "needs"}
    assert options["properties"]["effective_batch"]["type"] == "integer"


def test_what_is_answered_is_what_is_described(writer: TestClient, searches: Searches, on_gpu: StandInEngine) -> None:
    """Of each kind of document, with every field of its type and no other."""
    asked = {"model": "bert-large-uncased", "effective_batch": 64}
    job = writer.post("/v1/searches", json=asked).json()
    run_recorded(searches, on_gpu)
    waiting = writer.post("/v1/verify", json={"study": job["study"]}).json()
    path = f"/v1/searches/{job['id']}"
    kinds: dict[str, Any] = {
        path: SearchDocument, "/v1/searches": SearchesDocument, f"{path}/trials": TrialsDocument,
        f"{path}/report": StudyDocument, f"/v1/verify/{waiting['id']}": VerifyingDocument,
        "/healthz": HealthDocument, "/v1/devices": DevicesDocument,
    }  # fmt: skip
    for place, kind in kinds.items():
        assert decode(writer.get(place).json(), kind), place
    assert set(writer.get(path).json()) == set(SearchDocument.__annotations__)
    refused = writer.get("/v1/searches/none")
    assert refused.headers["content-type"] == "application/problem+json"
    assert set(refused.json()) == set(ProblemDocument.__annotations__)
    assert decode(refused.json(), ProblemDocument)


def test_only_what_is_accepted_waits_for_the_disk(
    writer: TestClient, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    if store.path is None:
        pytest.skip("a server decides itself when it writes to the disk")
    leave_syncing_to_checkpoints(store.engine)
    with transaction(store.engine, writes=False) as connection:
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 1
    synced: list[bytes] = []

    def fdatasync(file: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{file}"))
        synced.append(path.read_bytes())
        assert path.name == "autotune.db-wal"

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    job = submit(writer)
    assert len(synced) == 1
    assert job["id"].encode() in synced[0]
    writer.get(f"/v1/searches/{job['id']}")
    assert len(synced) == 1


def test_a_body_is_json_whatever_the_client_calls_it(writer: TestClient) -> None:
    """As curl -d does, which says that it sends a form."""
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    told = writer.post("/v1/verify", content=b'{"study": "nothing"}', headers=form)
    assert (told.status_code, told.json()["detail"][:22]) == (404, "there is no study 'not")
    broken = writer.post("/v1/verify", content=b"study=nothing", headers=form)
    assert (broken.status_code, broken.json()["detail"]) == (422, "the body is not JSON")
    for path in ("/v1/searches", "/v1/verify"):
        empty = writer.post(path).json()
        assert (empty["status"], empty["detail"], empty["hint"]) == (422, "the body is empty", "send a JSON object")


def test_a_search_that_outlives_the_service_is_left_alone_and_found_again(
    writer: TestClient, searches: Searches, on_cpu: StandInEngine
) -> None:
    """As an actor of a cluster: the service that ends neither ends it nor puts its job back."""
    on_cpu.shares_storage = False
    told = submit(writer)
    run = on_cpu.next_run()
    closed: list[bool] = []
    run.close = lambda: closed.append(True)  # type: ignore[method-assign]
    run.add("line", {"text": "before", "style": None})
    assert wait_until(lambda: len(streamed_lines(searches, told["id"])) == 1)
    searches.runner.close()
    assert (closed, searches.job(told["id"]).state) == ([], "running")
    again = Searches(searches.store, searches.storage, on_cpu)
    on_cpu.found[run.work.id] = run
    again.runner.begin()
    run.add("line", {"text": "after", "style": None})
    run.end("finished")
    waits_for_state(again, told["id"], "finished")
    assert streamed_lines(again, told["id"]) == ["before", "after"]
    assert again.job(told["id"]).attempts == 1
    assert wait_until(lambda: closed == [True])
    again.runner.close()


def test_a_refused_record_ends_its_search_however_often_the_database_fails_meanwhile(
    writer: TestClient, searches: Searches, on_cpu: StandInEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.service.runner._RETRY_SECONDS", 0.01)
    on_cpu.shares_storage = False
    end, failures = searches.store.queue.end, [StorageError("the disk is full", "free some space")] * 2

    def end_at_last(*what: Any) -> None:
        if failures:
            raise failures.pop()
        end(*what)

    monkeypatch.setattr(searches.store.queue, "end", end_at_last)
    refused = submit(writer)["id"]
    on_cpu.next_run().add("record", {"study": "none"})
    waits_for_state(searches, refused, "failed")
    assert not failures
    following = submit(writer, {**TINY, "seed": 1})["id"]
    on_cpu.next_run().end("finished")
    waits_for_state(searches, following, "finished")


def test_what_cannot_be_recorded_as_the_service_ends_is_logged_and_its_search_waits_again(
    writer: TestClient, searches: Searches, on_cpu: StandInEngine, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    queue, tries = searches.store.queue, threading.Event()

    def fail(*_: object, **__: object) -> None:
        tries.set()
        raise StorageError("the disk is full", "free some space")

    with monkeypatch.context() as full:
        full.setattr("autotune.service.runner._RETRY_SECONDS", 0.01)
        full.setattr(queue, "writing", fail)
        job = submit(writer)["id"]
        on_cpu.next_run().add("line", {"text": "one", "style": None})
        assert tries.wait(120)
        with caplog.at_level(logging.WARNING, logger="autotune.service"):
            searches.runner.close()
    (said,) = [record for record in caplog.records if record.getMessage().startswith("what a search says is not")]
    assert said.getMessage() == "what a search says is not recorded: the disk is full. free some space"
    assert said.__dict__["fields"]["search"] == job
    assert searches.job(job).state == "running"
    again = Searches(searches.store, searches.storage, on_cpu)
    again.runner.begin()
    assert on_cpu.next_run().work.id == f"{job}-2"
    again.runner.close()


def streamed_lines(searches: Searches, job: str) -> list[str]:
    return [str(event.document["text"]) for event in searches.store.queue.events(job) if event.kind == "line"]
