"""The API: what a client submits, sees, hears and takes away, and what an agent does between."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from searching import H200
from serving import Agent, run_recorded
from starlette.testclient import TestClient

from autotune.core.candidate import Document
from autotune.core.errors import DeviceError
from autotune.core.options import OPTIONS
from autotune.results.export import FORMATS, LAUNCH_FORMATS
from autotune.service.change_events import NEW_JOB
from autotune.service.requests import OPTION_NAMES, search_request
from autotune.service.searches import Searches
from autotune.store.engine import leave_syncing_to_checkpoints, transaction
from autotune.store.queue import LEASE_SECONDS, JobRecord, Needs
from autotune.store.repository import Store

TINY = {"model": "bert-tiny", "effective_batch": 16, "seq_len": 32}
LARGE = {"model": "bert-large-uncased", "effective_batch": 64}


def submit(client: TestClient, request: Document = TINY, **headers: str) -> Document:
    answer = client.post("/v1/searches", json=request, headers=headers)
    assert answer.status_code in (200, 202), answer.text
    found: Document = answer.json()
    return found


def problem(client: TestClient, request: object) -> Document:
    answer = client.post("/v1/searches", json=request)
    assert answer.status_code >= 400, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    found: Document = answer.json()
    return found


def streamed(client: TestClient, path: str, **headers: str) -> list[tuple[str | None, str, Document]]:
    """The events of a search that has ended: number, kind, document."""
    found = []
    for block in client.get(path, headers=headers).text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line and not line.startswith(":"))
        if "data" in fields:
            found.append((fields.get("id"), fields["event"], json.loads(fields["data"])))
    return found


def test_health_needs_no_token(server: TestClient) -> None:
    assert server.get("/healthz").json()["status"] == "ok"


def test_a_search_is_queued_and_says_what_it_waits_for(writer: TestClient) -> None:
    answer = writer.post("/v1/searches", json=TINY)
    assert answer.status_code == 202
    told = answer.json()
    assert answer.headers["location"] == f"/v1/searches/{told['id']}"
    assert (told["study"], told["state"], told["submitted_by"]) == ("bert-tiny-16", "queued", "writer")
    assert "no agent is connected" in told["waits_for"]
    assert writer.get(answer.headers["location"]).json() == told
    assert writer.get("/v1/searches/bert-tiny-16").json() == told


def test_needs_that_no_agent_meets_are_named(writer: TestClient, agent: Agent) -> None:
    told = submit(writer, {**TINY, "device": "h200"})
    assert told["needs"] == {"device_kind": "cuda", "gpu": "h200", "memory_bytes": None, "count": 1}
    assert told["waits_for"].startswith("no agent has a GPU named h200; there are ")
    assert submit(writer, TINY)["waits_for"] == "1 before it in the queue"
    assert agent.claim()["options"]["effective_batch"] == 16  # type: ignore[index]


def test_a_search_on_several_gpus_waits_for_an_agent_that_has_them(writer: TestClient, gpu_agent: Agent) -> None:
    told = submit(writer, {**LARGE, "gpus": 2, "device": "h200"})
    assert (told["needs"]["gpu"], told["needs"]["count"]) == ("h200", 2)
    assert told["waits_for"] == "no agent has 2 GPUs named h200; there are NVIDIA H200 (cuda)"
    assert gpu_agent.claim() is None
    pair = Agent(writer, H200, count=2)
    assert pair.claim()["options"]["gpus"] == "2"  # type: ignore[index]


@pytest.mark.parametrize("gpus", ["all", "0,1", [0, 1], 0, 10**9, "GPU-abc"])
def test_gpus_over_http_are_a_number_of_them(writer: TestClient, gpus: object) -> None:
    found = problem(writer, {**LARGE, "gpus": gpus})
    assert (found["status"], "give a number of them" in found["hint"]) == (422, True)


def test_the_agent_searches_on_as_many_gpus_as_were_asked_for() -> None:
    second = dataclasses.replace(H200, uuid="GPU-2", index=1)
    request = search_request({**LARGE, "gpus": "2"}, [H200, second])
    assert (request.ranks, request.placement.uuids) == (2, (H200.uuid, "GPU-2"))
    assert search_request(LARGE, [H200, second]).ranks == 1
    with pytest.raises(DeviceError, match="the agent has 1"):
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


def test_no_search_is_claimed_for_an_agent_that_has_left(
    writer: TestClient, searches: Searches, agent: Agent, gpu_agent: Agent
) -> None:
    queue, looked = searches.store.queue, threading.Event()
    claim_now = queue.claim

    def look(*given: Any) -> JobRecord | None:
        found = claim_now(*given)
        looked.set()
        return found

    queue.claim = look  # type: ignore[method-assign]

    async def leave_while_waiting() -> Document:
        searches.changes.attach()

        async def has_left() -> bool:
            return True

        claim = asyncio.create_task(searches.claim(agent.id, 20, has_left))
        await asyncio.to_thread(looked.wait, 10)
        queue.submit("a", {}, Needs())
        searches.changes.notify(NEW_JOB)
        return await asyncio.wait_for(claim, 10)

    assert asyncio.run(leave_while_waiting()) == {"job": None}
    assert gpu_agent.claim() is not None


def test_a_request_that_was_answered_is_not_searched_again(
    writer: TestClient, searches: Searches, gpu_agent: Agent
) -> None:
    job = run_after(writer, searches, gpu_agent)
    again = writer.post("/v1/searches", json=dict(reversed(LARGE.items())))
    assert (again.status_code, again.json()["id"], again.json()["state"]) == (200, job["id"], "finished")
    assert submit(writer, {**LARGE, "fresh": True})["study"] == "bert-large-uncased-64-2"
    assert submit(writer, {**LARGE, "seed": 1})["state"] == "queued"


def test_searches_of_other_models_do_not_hide_an_answer(
    writer: TestClient, searches: Searches, gpu_agent: Agent, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = run_after(writer, searches, gpu_agent)
    submit(writer)
    other = agent.claim()
    assert other is not None
    agent.post(other, "end", state="finished")
    monkeypatch.setattr("autotune.service.searches._MOST_COMPARED", 1)
    assert submit(writer, LARGE)["id"] == job["id"]


def run_after(writer: TestClient, searches: Searches, gpu_agent: Agent) -> Document:
    submit(writer, LARGE)
    return run_recorded(searches, gpu_agent)


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
    writer: TestClient, agent: Agent, request_: object, words: str, hint: str, code: int
) -> None:
    found = problem(writer, request_)
    assert words in found["detail"]
    assert hint in found["hint"]
    assert (found["status"], found["exit_code"]) == (422, code)
    assert writer.get("/v1/searches").json() == {"searches": []}


def test_what_no_connected_device_can_do_is_refused_at_once(writer: TestClient, agent: Agent) -> None:
    found = problem(writer, {**TINY, "liger": "on", "device": "cpu"})
    assert found["detail"] == "cpu cannot run Liger's kernels"
    assert (found["status"], found["exit_code"]) == (409, 4)


def test_the_whole_way_of_a_search(writer: TestClient, searches: Searches, gpu_agent: Agent) -> None:
    queued = submit(writer, LARGE)
    job = run_recorded(searches, gpu_agent)
    path = f"/v1/searches/{queued['id']}"
    told = writer.get(path).json()
    assert (told["state"], told["agent"], told["attempts"]) == ("finished", gpu_agent.id, 1)
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
    assert job["study"] == "bert-large-uncased-64"


@pytest.mark.parametrize("searches", ["sqlite"], indirect=True)
def test_a_log_of_a_trial_is_shown(writer: TestClient, searches: Searches, gpu_agent: Agent) -> None:
    job = run_after(writer, searches, gpu_agent)
    log = searches.log_path(job["study"], 0)
    log.parent.mkdir(parents=True)
    log.write_text("step 1\n")
    path = f"/v1/searches/{job['id']}/trials"
    assert writer.get(f"{path}/0/log").text == "step 1\n"
    assert writer.get(f"{path}/1/log").status_code == 404
    assert writer.get(f"{path}/999/log").status_code == 404


def test_a_search_without_trials_has_no_report_yet(writer: TestClient) -> None:
    path = f"/v1/searches/{submit(writer)['id']}"
    assert "it waits in the queue" in writer.get(f"{path}/report").json()["detail"]
    assert writer.get(f"{path}/trials").json() == {"trials": []}
    missing = writer.get("/v1/searches/nobody")
    assert (missing.status_code, missing.json()["exit_code"]) == (404, 9)


def test_cancelling(writer: TestClient, agent: Agent) -> None:
    first, second = submit(writer), submit(writer, {**TINY, "seed": 1})
    job = agent.claim()
    assert job is not None
    assert agent.post(job, "heartbeat", status={"running": "trial 0"}) == {"cancel": False}
    assert writer.get(f"/v1/searches/{first['id']}").json()["status"] == {"running": "trial 0"}
    assert writer.delete(f"/v1/searches/{first['id']}").json()["cancel_asked"] is True
    assert agent.post(job, "heartbeat") == {"cancel": True}
    agent.post(job, "end", state="cancelled")
    assert writer.delete(f"/v1/searches/{second['study']}").json()["state"] == "cancelled"
    states = [search["state"] for search in writer.get("/v1/searches?state=cancelled").json()["searches"]]
    assert states == ["cancelled", "cancelled"]


def test_an_agent_that_fell_silent_is_told_that_its_lease_is_lost(
    writer: TestClient, store: Store, searches: Searches, agent: Agent
) -> None:
    told = submit(writer)
    job = agent.claim()
    assert job is not None
    later = store.queue.clock() + timedelta(seconds=LEASE_SECONDS + 1)
    store.queue.clock = lambda: later
    searches.sweep()
    assert writer.get(f"/v1/searches/{told['id']}").json()["state"] == "queued"
    for what in ("heartbeat", "events", "end"):
        assert agent.post(job, what, state="finished")["status"] == 410
    assert "autotune_leases_lost_total 1" in writer.get("/metrics").text


def test_a_search_that_is_put_back_is_claimed_again(writer: TestClient, agent: Agent) -> None:
    submit(writer)
    job = agent.claim()
    assert job is not None
    agent.post(job, "end", state="queued", why="its agent ended")
    again = agent.claim()
    assert again is not None
    assert (again["id"], again["attempts"]) == (job["id"], 1)


def test_a_search_that_failed_says_why(writer: TestClient, agent: Agent) -> None:
    told = submit(writer)
    job = agent.claim()
    assert job is not None
    why = {"exit_code": 6, "message": "nothing fits", "hint": "raise --memory-limit"}
    agent.post(job, "end", state="failed", problem=why)
    assert writer.get(f"/v1/searches/{told['id']}").json()["problem"] == why


def test_agents_are_listed_with_what_they_run(writer: TestClient, agent: Agent) -> None:
    submit(writer)
    job = agent.claim()
    (found,) = writer.get("/v1/agents").json()["agents"]
    assert (found["id"], found["study"], found["device"]["kind"]) == (agent.id, job["study"], "cpu")  # type: ignore[index]
    writer.delete(f"/v1/agents/{agent.id}")
    assert writer.get("/v1/agents").json() == {"agents": []}


def test_an_agent_of_another_version_is_refused(writer: TestClient) -> None:
    told = {"name": "old", "host": "h", "version": "0.0.1", "device": H200.document()}
    answer = writer.post("/v1/agents", json=told)
    assert answer.status_code == 409
    assert answer.json()["detail"].startswith("the agent is autotune 0.0.1, the service ")
    assert writer.post("/v1/agents/nobody/claim", json={}).status_code == 404


def test_an_agent_may_not_send_what_is_no_event(writer: TestClient, agent: Agent) -> None:
    submit(writer)
    job = agent.claim()
    assert job is not None
    assert "not a kind of event" in agent.post(job, "events", events=[{"kind": "state", "document": {}}])["detail"]
    assert "not a state in which a search ends" in agent.post(job, "end", state="running")["detail"]
    assert "lease_token is missing" in agent.post({**job, "lease_token": None}, "heartbeat")["detail"]


def test_metrics(writer: TestClient, agent: Agent) -> None:
    submit(writer)
    text = writer.get("/metrics").text
    assert 'autotune_searches{state="queued"} 1' in text
    assert f'autotune_agent_heartbeat_age_seconds{{agent="{agent.id}",name="host cpu"' in text


def test_every_option_of_a_search_can_be_asked_for_but_those_that_bring_code_or_belong_to_the_service() -> None:
    of_search = {option.name for option in OPTIONS if "search" in option.commands}
    left_out = {"storage", "wait", "as_json", "trainer", "loop", "script", "server", "priority", "parallel", "executor"}
    assert of_search - set(OPTION_NAMES) == left_out


def test_the_api_is_as_it_is_written_down(writer: TestClient) -> None:
    """After a change that is meant, write the file anew: python tests/service/write_openapi.py."""
    snapshot = json.loads((Path(__file__).parent / "openapi.json").read_text())
    assert writer.get("/openapi.json").json() == snapshot


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
