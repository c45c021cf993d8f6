"""The pages, as the service renders them: signing in, asking, watching, comparing; every name is escaped."""

import dataclasses
import re
from datetime import timedelta
from urllib.parse import parse_qsl

import pytest
from processes import wait_until
from recorded import EFFECTIVE_64, ComputedRunner, RecordedRunner
from searching import BERT_LARGE, H200, search
from serving import URL, StandInEngine, run_recorded, waits_for_state
from sqlalchemy import event, update
from starlette.testclient import TestClient

from autotune.core.candidate import Document
from autotune.core.dataset_spec import DataFacts, DataSpec, Lengths, Packed
from autotune.core.errors import StorageError
from autotune.core.placement import this_owner
from autotune.core.units import GIB
from autotune.service.access import COOKIE
from autotune.service.app import make_app
from autotune.service.searches import Searches
from autotune.store.leases import name_of_study
from autotune.store.queue import Needs
from autotune.store.records import new_id
from autotune.store.repository import Store
from autotune.store.tables import StudyRow

LARGE = {"model": "bert-large-uncased", "effective_batch": 64}


@pytest.fixture
def visitor(server: TestClient, store: Store) -> TestClient:
    """A browser that has signed in."""
    answer = server.post("/session", data={"token": store.queue.add_token("ann", "run")}, headers={"Origin": URL})
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    return server


def test_without_a_token_every_page_asks_for_it(server: TestClient) -> None:
    for path in ("/", "/searches/x", "/compare"):
        assert "<h1>Sign in</h1>" in server.get(path).text
    assert server.get("/parts/home").status_code == 401
    wrong = server.post("/session", data={"token": "guess"})
    assert wrong.status_code == 401
    assert "this token is not known" in wrong.text


def test_the_cookie_is_kept_from_scripts_and_other_sites(server: TestClient, store: Store) -> None:
    token = store.queue.add_token("ann", "run")
    cookie = server.post("/session", data={"token": token}).headers["set-cookie"]
    assert cookie.startswith(f"{COOKIE}=")
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert "<h1>Search for" in server.get("/").text
    assert server.post("/session/end").headers["set-cookie"].startswith(f'{COOKIE}=""')


def test_the_way_from_the_form_to_the_result(visitor: TestClient, searches: Searches, engine: StandInEngine) -> None:
    assert "No search waits or runs" in visitor.get("/").text
    form = {"model": "bert-large-uncased", "effective_batch": "64", "memory_limit": "23.5GiB", "seq_len": ""}
    shown = visitor.get("/command", params=form).json()
    options = "--model bert-large-uncased --effective-batch 64 --memory-limit 23.5GiB"
    assert shown == {
        "command": f"autotune search --server {URL} {options}",
        "problem": None,
        "field": None,
        "note": "no device is ready to search",
    }
    answer = visitor.post("/searches", data=form)
    assert answer.status_code == 303
    page = visitor.get(answer.headers["location"]).text
    assert "No trial has begun yet" in page
    assert "no device is ready to search" in page
    engine.add(H200)
    run_recorded(searches, engine)
    part = visitor.get(f"/parts{answer.headers['location']}").text
    assert "Best configuration" in part
    assert "<svg" in part
    assert "--per_device_train_batch_size 32" in part
    assert "style=" not in part
    assert "<script" not in part
    home = visitor.get("/parts/home").text
    assert "bert-large-uncased-64" in home
    missing = visitor.get("/compare", params={"s": ["bert-large-uncased-64", "nobody"]}).text
    assert "there is no search" in missing


def test_what_is_wrong_in_the_form_is_said_beside_it(visitor: TestClient) -> None:
    answer = visitor.post("/searches", data={"model": "bert-tinyy", "effective_batch": "64"})
    assert answer.status_code == 422
    assert "did you mean bert-tiny" in answer.text
    assert 'value="bert-tinyy"' in answer.text
    assert "effective batch: " in visitor.post("/searches", data={"model": "x", "effective_batch": "-1"}).text
    shown = visitor.get("/command", params={"model": "x", "effective_batch": "-1"}).json()
    assert shown["field"] == "effective_batch"
    assert shown["problem"].startswith("effective batch: ")


def test_a_gpu_that_no_machine_has_is_said_at_once(visitor: TestClient, on_gpu: StandInEngine) -> None:
    form = {"model": "bert-large-uncased", "device": "b200"}
    told = "no machine has a GPU named b200; there are NVIDIA H200 (cuda)"
    assert visitor.get("/command", params=form).json()["note"] == told
    several = visitor.get("/command", params={**form, "gpus": "2"}).json()
    assert several["command"].endswith(" --gpus 2")
    assert "names GPUs of one machine" in visitor.get("/command", params={**form, "gpus": "0,1"}).json()["problem"]
    assert told in visitor.get(visitor.post("/searches", data=form).headers["location"]).text
    assert '<option value="NVIDIA H200">' in visitor.get("/").text


def test_a_page_of_a_running_search_lets_it_be_cancelled(
    visitor: TestClient, searches: Searches, on_gpu: StandInEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    visitor.post("/searches", data={"model": "bert-large-uncased", "effective_batch": "64"})
    run = on_gpu.next_run()
    path = f"/searches/{run.job}"
    assert ">Cancel</button>" in visitor.get(path).text
    # It takes a while to end.
    searches.store.queue.cancel(run.job)
    assert "is being cancelled" in visitor.get(path).text
    why: Document = {"exit_code": 6, "message": "<b>nothing fits</b>", "hint": "<script>alert(1)</script>"}
    run.end("failed", why)
    waits_for_state(searches, run.job, "failed")
    page = visitor.get(path).text
    assert "&lt;b&gt;nothing fits&lt;/b&gt;" in page
    assert "<script>alert" not in page


def test_a_search_that_waits_for_another_program_is_shown_as_waiting(
    visitor: TestClient, searches: Searches, on_gpu: StandInEngine
) -> None:
    job, _ = searches.store.queue.submit("shared", {"model": "bert-tiny"}, Needs())
    searches.runner.wake()
    run = on_gpu.next_run()
    why = "waiting for cuda:0 (NVIDIA H200), which process 71 of ada searches"
    run.add("status", {"running": why, "best": "", "waits_for": why})
    assert wait_until(lambda: searches.job(job.id).status is not None)
    for path in ("/searches", f"/searches/{job.id}"):
        shown = visitor.get(path).text
        assert '<span class="badge queued">waiting</span>' in shown
        assert '<span class="badge running">' not in shown
    run.add("status", {"running": "preparing the search", "best": ""})
    assert wait_until(lambda: "waits_for" not in (searches.job(job.id).status or {}))
    assert '<span class="badge running">running</span>' in visitor.get(f"/searches/{job.id}").text


def test_html_in_every_name_is_shown_as_text(visitor: TestClient, store: Store, on_gpu: StandInEngine) -> None:
    evil = '"><img src=x onerror=alert(1)>'
    store.queue.submit(evil, {"model": evil, "study": evil}, Needs(gpu=evil), submitted_by=evil)
    on_gpu.add(dataclasses.replace(H200, name=evil), name=evil)
    form = visitor.post("/searches", data={"model": evil, "study": evil, "dataset": evil})
    job = store.queue.jobs()[-1]
    paths = ["/", f"/searches/{job.id}", "/searches/%3Cb%3E"]
    compared = visitor.get("/compare", params={"s": evil})
    for text in (form.text, compared.text, *(visitor.get(path).text for path in paths)):
        assert "<img" not in text
        assert "<b>" not in text


def test_errors_are_pages_for_browsers_and_documents_for_programs(
    visitor: TestClient, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    browser = {"Accept": "text/html"}
    shown = visitor.get("/nothing", headers=browser)
    assert (shown.status_code, "There is nothing here" in shown.text) == (404, True)
    assert visitor.get("/nothing").json()["detail"] == "there is nothing at /nothing"
    assert visitor.get("/v1/searches/x", headers=browser).json()["status"] == 404
    assert "page: Input should be a valid integer" in visitor.get("/searches?page=x", headers=browser).text
    monkeypatch.setattr(store.queue, "listed", None)
    with TestClient(visitor.app, URL, raise_server_exceptions=False, cookies=visitor.cookies) as failing:
        assert "<h1>This did not work" in failing.get("/searches", headers=browser).text
    visitor.post("/session/end")
    visitor.cookies.clear()
    gone = visitor.post("/searches", data=LARGE, headers=browser)
    assert (gone.status_code, "<h1>Sign in</h1>" in gone.text) == (401, True)


def test_a_search_that_runs_shows_its_best_so_far_and_the_logs_of_its_trials(
    visitor: TestClient, searches: Searches, on_gpu: StandInEngine, store: Store
) -> None:
    visitor.post("/searches", data=LARGE)
    run = run_recorded(searches, on_gpu, ends=False)
    study = store.existing_study(run.work.study)
    store.update_study(dataclasses.replace(study, state="running", best_trial_id=None))
    # As the process that searches does.
    assert store.leases.take(name_of_study(study.name), this_owner(), "token") is None
    part = visitor.get(f"/parts/searches/{run.job}").text
    assert "Best so far" in part
    assert "302.9 samples/s" in part
    assert f'href="/v1/searches/{run.job}/trials/0/log"' in part
    assert "Use this configuration" not in part


def test_a_stock_trainer_is_asked_for_and_shown(visitor: TestClient, searches: Searches, on_gpu: StandInEngine) -> None:
    visitor.post("/searches", data=LARGE)
    search = run_recorded(searches, on_gpu)
    page = f"/searches/{search.job}"
    assert "Have a stock Trainer show the same" in visitor.get(page).text
    asked = visitor.post(f"{page}/verify", headers={"Origin": URL})
    assert asked.status_code == 303
    assert "Have a stock Trainer show the same" not in visitor.get(page).text
    run = on_gpu.next_run()
    assert (run.work.kind, run.work.study) == ("verify", search.work.study)
    speeds = {"samples_per_second": 301.0, "samples_per_second_low": 299.0, "samples_per_second_high": 303.0}
    shown = {"verdict": "kept", "promised": speeds, "obtained": {**speeds, "peak_reserved_bytes": 2**30}}
    run.add("verification", {"verification": shown, "problem": None})
    run.end("finished")
    waits_for_state(searches, run.job, "finished")
    for path in (page, asked.headers["location"]):
        text = visitor.get(path).text
        assert "Kept: a stock Trainer does what was promised." in text
        assert "301.0 (299.0 to 303.0)" in text
    assert ">the promise is kept</td>" in visitor.get("/").text
    assert "verify bert-large" not in visitor.get("/compare").text
    # Run again: the same once more.
    longer, _ = searches.submit_verification({"study": run.work.study, "steps": 500, "priority": 2}, by="ann")
    visitor.post(f"/searches/{longer.id}/cancel")
    again = searches.job(visitor.post(f"/searches/{longer.id}/again").headers["location"].rpartition("/")[2])
    assert (again.id != longer.id, again.request["steps"], again.priority) == (True, 500, 2)


def test_rows_of_packed_samples_are_called_rows(visitor: TestClient, searches: Searches, on_gpu: StandInEngine) -> None:
    lengths = Lengths(30, 110, 120, 122, 100.0, 0.0, 0.0, (1,))
    facts = DataFacts(3600, lengths=lengths, packed=Packed(60100, lengths))
    spec = DataSpec("/data/texts.jsonl", "json", "0", tokenizer="t", packing=True, facts=facts)
    visitor.post("/searches", data=LARGE)
    packed, workload = on_gpu.next_run(), dataclasses.replace(BERT_LARGE, task="causal-lm", data=spec)
    search(searches.store, ComputedRunner(lambda candidate: 4 * GIB), study=packed.work.study, workload=workload)
    packed.end("finished")
    waits_for_state(searches, packed.job, "finished")
    page = f"/searches/{packed.job}"
    visitor.post(f"{page}/verify", headers={"Origin": URL})
    run = on_gpu.next_run()
    speeds = {"samples_per_second": 301.0}
    shown = {"verdict": "kept", "promised": speeds, "obtained": speeds}
    run.add("verification", {"verification": shown, "problem": None})
    run.end("finished")
    waits_for_state(searches, run.job, "finished")
    for path in (page, f"/searches/{run.job}", f"/compare?s={packed.job}", "/"):
        text = visitor.get(path).text
        assert "rows/s" in text, path
        assert "samples/s" not in text, path


def test_a_database_that_does_not_answer_is_said(visitor: TestClient, store: Store) -> None:
    def fail(*_: object, **__: object) -> None:
        raise StorageError("the database studies/autotune.db does not answer: disk I/O error", "see that it is there")

    store.queue.counts = store.queue.count_queued = fail  # type: ignore[method-assign, assignment]
    page = visitor.get("/", headers={"Accept": "text/html"})
    assert page.status_code == 503
    assert "does not answer: disk I/O error" in page.text
    assert "see that it is there" in page.text
    assert visitor.get("/healthz").status_code == 503
    assert visitor.get("/parts/home", headers={"Accept": "text/html"}).json()["status"] == 503


def test_who_may_only_read_sees_no_form(server: TestClient, store: Store) -> None:
    server.post("/session", data={"token": store.queue.add_token("bob", "read")})
    page = server.get("/").text
    assert "it starts no search" in page
    assert 'action="/searches"' not in page
    assert server.post("/searches", data=LARGE).status_code == 403


def test_pages_ask_this_service_alone(visitor: TestClient) -> None:
    page = visitor.get("/").text
    assert not re.findall(r'(?:src|href|action)="(?!/|#|mailto)', page)
    for name in ("report.css", "page.css", "page.js", "icon.svg"):
        text = visitor.get(f"/assets/{name}").text
        assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_the_optuna_dashboard_is_for_those_who_have_a_token(
    searches: Searches, store: Store, on_gpu: StandInEngine, writer: TestClient
) -> None:
    writer.post("/v1/searches", json=LARGE)
    run_recorded(searches, on_gpu)
    app, url = make_app(searches, ["gpu-box.example"]), "https://gpu-box.example"
    with TestClient(app, base_url=url, follow_redirects=False) as client:
        assert client.get("/dashboard").headers["location"] == "/"
        assert client.get("/dashboard", headers={"Host": "other.example"}).status_code == 421
        assert client.get("/api/studies").status_code == 303
        client.post("/session", data={"token": store.queue.add_token("bob", "read")})
        page = client.get("/dashboard/").text
        assert '<body><a class="way-back" href="/">' in page
        # What would change a study is not shown.
        assert 'button[aria-label="delete study"]' in page
        assert client.get("/api/studies").json()["study_summaries"][0]["study_name"] == "bert-large-uncased-64"
        refused = client.post("/api/studies", json={"study_name": "x", "directions": ["minimize"]})
        assert refused.status_code == 405
        assert client.get("/healthz").status_code == 200


def test_all_searches_are_listed_page_by_page(visitor: TestClient, store: Store) -> None:
    for number in range(61):
        store.queue.submit(f"study-{number}", {"model": "bert-tiny"}, Needs())
    store.queue.cancel(store.queue.jobs()[0].id)
    home = visitor.get("/").text
    # In the order of their turns.
    assert [f">study-{number}<" in home for number in (0, 29, 30, 60)] == [True, True, False, True]
    assert "30 more</a>" in home
    newest = visitor.get("/searches").text
    assert [f">study-{number}<" in newest for number in (60, 11, 10)] == [True, True, False]
    assert "no device is ready to search" in newest
    older = re.search(r'href="(/searches[?][^"]*page=2)"', newest)
    assert older is not None
    rest = visitor.get(older[1].replace("&amp;", "&")).text
    assert [f">study-{number}<" in rest for number in (11, 10, 0)] == [False, True, True]
    assert "Next page" not in rest
    assert re.findall(r">(study-\d+)<", visitor.get("/searches?state=ended").text) == ["study-60"]
    assert visitor.get("/searches?state=odd").status_code == 422


def test_what_many_came_to_is_asked_once(searches: Searches, store: Store, on_gpu: StandInEngine) -> None:
    """A busy queue ends many searches between two looks at the page."""
    asked: list[str] = []
    jobs = [store.queue.submit(f"s{number}", LARGE, Needs())[0] for number in range(5)]
    for job in jobs:
        store.queue.start(job.id, {"host": "here"})
        store.queue.end(job.id, 1, "finished")
    jobs = store.queue.jobs(states=["finished"])
    event.listen(store.engine, "before_cursor_execute", lambda *told: asked.append(told[2]))
    assert list(searches.result_lines(jobs).values()) == ["no result"] * 5
    assert len([statement for statement in asked if statement.startswith("SELECT")]) == 1


def test_a_search_says_what_was_asked_and_is_asked_again(
    visitor: TestClient, searches: Searches, on_gpu: StandInEngine
) -> None:
    asked = {**LARGE, "memory_limit": "23.5GiB", "precision": "bf16,tf32", "time_budget": "300", "device": "h200"}
    visitor.post("/searches", data=asked)
    first = run_recorded(searches, on_gpu)
    page = visitor.get(f"/searches/{first.job}").text
    for words in ("by ann, ", "; took ", "NVIDIA H200 on host", "<code>--memory-limit 23.5GiB</code>"):
        assert words in page
    command = re.search(r'<code id="again">(.*)</code>', page)
    assert command is not None
    assert command[1] == (
        f"autotune search --server {URL} --model bert-large-uncased --effective-batch 64 --device h200 "
        "--memory-limit 23.5GiB --precision bf16,tf32 --time-budget 300s"
    )
    clone = re.search(r'class="button" href="([^"]*)"', page)
    assert clone is not None
    form = visitor.get(clone[1].replace("&amp;", "&")).text
    for name, value in {**asked, "time_budget": "300s"}.items():
        assert re.search(rf'name="{name}"[^>]* value="{value}"', form), name
    again = visitor.post(f"/searches/{first.job}/again")
    second = searches.job(again.headers["location"].rpartition("/")[2])
    assert second.request == {**searches.job(first.job).request, "fresh": True}
    assert (second.id != first.job, second.study) == (True, "bert-large-uncased-64-2")
    assert second.needs == searches.job(first.job).needs
    # One that was cancelled goes on with what it has.
    visitor.post(f"/searches/{second.id}/cancel")
    waits_for_state(searches, second.id, "cancelled")
    assert ">Continue</button>" in visitor.get(f"/searches/{second.id}").text
    third = searches.job(visitor.post(f"/searches/{second.id}/again").headers["location"].rpartition("/")[2])
    assert (third.study, third.id != second.id) == (second.study, True)


def test_options_without_a_field_of_their_own_are_in_a_form_that_was_cloned(visitor: TestClient) -> None:
    form = {"model": "bert-tiny", "effective_batch": "16", "fresh": "on", "seed": "3"}
    shown = visitor.get("/", params=form).text
    assert '<input type="checkbox" name="fresh" id="field-fresh" checked>' in shown
    assert 'name="seed"' in shown
    page = visitor.get(visitor.post("/searches", data=form).headers["location"]).text
    assert "--fresh" in page
    assert "--seed 3" in page


def test_what_was_asked_is_written_as_a_command_takes_it(visitor: TestClient, store: Store, searches: Searches) -> None:
    request = {**LARGE, "time_budget": 30 * 86400.0, "torch_compile": "on", "fresh": True}
    job, _ = store.queue.submit("asked", request, Needs("cuda", memory_bytes=80 * GIB, count=2))
    page = visitor.get(f"/searches/{job.id}").text
    for option in ("--time-budget 2592000s", "--lever torch_compile=on", "--gpus 2", "--fresh"):
        assert f"<code>{option}</code>" in page
        assert option in re.findall(r'<code id="again">(.*)</code>', page)[0]
    # What a request alone can ask for.
    assert "a device with 80.0 GiB of memory" in page
    clone = re.findall(r'class="button" href="([^"]*)"', page)[0].replace("&amp;", "&")
    made = visitor.post("/searches", data=dict(parse_qsl(clone.partition("?")[2])))
    cloned = searches.job(made.headers["location"].rpartition("/")[2])
    assert {**cloned.request, "gpus": None} == {**job.request, "gpus": None}
    assert "needs.memory_bytes" not in visitor.get(f"/searches/{cloned.id}").text


def test_a_search_that_runs_says_what_is_left_of_its_budgets(
    visitor: TestClient, searches: Searches, on_gpu: StandInEngine, store: Store
) -> None:
    visitor.post("/searches", data={**LARGE, "trials": "40", "time_budget": "90m"})
    run = run_recorded(searches, on_gpu, ends=False)
    study = store.existing_study(run.work.study)
    store.update_study(dataclasses.replace(study, state="running", best_trial_id=None))
    trials = store.trials(study.id)
    store.start_trial(dataclasses.replace(trials[-1], id=new_id(), number=len(trials), outcome=None))
    store.lose_running_trials(study.id)
    page = f"/parts/searches/{run.job}"
    # One that was interrupted is run again, and counts once.
    assert f"<p>{len(trials)} of at most 40 trials; no trial starts after" in visitor.get(page).text
    ends = study.started_at + timedelta(minutes=90)
    assert f"no trial starts after {ends:%Y-%m-%d %H:%M} UTC" in visitor.get(page).text
    # One that was continued has spent a part of its time before.
    monday = study.started_at - timedelta(days=3)
    with store.engine.begin() as connection:
        connection.execute(update(StudyRow).values(started_at=monday, seconds=1200.0))
    searches.changes.notify(run.job)
    assert "; at least 20m00s of at most 1h30m are spent" in visitor.get(page).text


def test_searches_are_found_and_sorted(visitor: TestClient, store: Store) -> None:
    for name, batch, owner in (("alpha", 32, "bob"), ("beta", 8, "ann"), ("gamma", None, "ann")):
        store.queue.submit(name, {"model": f"model-{name}", "effective_batch": batch}, Needs(), submitted_by=owner)
    for number, job in enumerate(reversed(store.queue.jobs())):
        if job.study != "gamma":
            store.queue.start(job.id, {"host": "here", "name": f"GPU {number}", "uuids": []})
            store.queue.end(job.id, 1, "finished")

    def listed(**params: str) -> list[str]:
        return re.findall(r">(alpha|beta|gamma|delta)<", visitor.get("/searches", params=params).text)

    assert listed() == ["gamma", "beta", "alpha"]
    assert listed(sort="study", up="true") == ["alpha", "beta", "gamma"]
    assert listed(sort="batch", up="true") == ["beta", "alpha", "gamma"]
    assert listed(sort="batch") == ["alpha", "beta", "gamma"]
    assert sorted(listed(sort="took")[:2]) == ["alpha", "beta"]
    assert listed(sort="owner") == ["alpha", "gamma", "beta"]
    assert listed(find="ANN") == ["gamma", "beta"]
    assert listed(find="gpu 1") == ["beta"]
    assert listed(find="model-al") == ["alpha"]
    store.queue.submit("delta", {"code": "Glue"}, Needs("cuda", "b200"), submitted_by="bob")
    assert (listed(find="glue"), listed(find="B200")) == (["delta"], ["delta"])
    assert listed(find="%") == []
    assert listed(find="ann", state="ended") == ["beta"]
    assert visitor.get("/searches", params={"sort": "odd"}).status_code == 422


def test_only_searches_of_one_workload_and_effective_batch_are_ranked(
    visitor: TestClient, searches: Searches, store: Store, on_gpu: StandInEngine
) -> None:
    computed = ComputedRunner(lambda candidate: 4 * GIB)
    runs = [EFFECTIVE_64, EFFECTIVE_64, computed, computed]
    adapters = dataclasses.replace(BERT_LARGE, peft="lora", lora_rank=16)
    options: list[Document] = [{}, {"precisions": ("fp32",)}, {"effective_batch": 32}, {"workload": adapters}]
    names = ["both", "fp32", "smaller", "adapters"]
    for name, landscape, more in zip(names, runs, options, strict=True):
        visitor.post("/searches", data={**LARGE, "study": name, "seed": str(len(name))})
        run = on_gpu.next_run()
        runner = landscape if isinstance(landscape, ComputedRunner) else RecordedRunner(landscape)
        search(store, runner, study=name, **more)
        run.end("finished")
        waits_for_state(searches, run.job, "finished")
    # A study that went on in another search is compared once.
    again, _ = store.queue.submit("both", LARGE, Needs())
    store.queue.start(again.id, {"host": "here"})
    store.queue.end(again.id, 1, "finished")
    page = visitor.get("/compare", params={"s": [*names, again.id]}).text
    assert page.count("<h2>") == 3
    of_adapters, of_32, of_64 = page.split("<h2>")[1:]
    assert "float32 weights, LoRA of rank 16; " in of_adapters
    assert "nothing is ranked" in of_adapters
    assert of_64.count(">both</a>") == 1
    assert re.search(r"both is [\d.]+ ± [\d.]+ times as fast as fp32", of_64)
    assert "nothing is ranked" in of_32
    assert ">smaller</a>" in of_32
    assert ">smaller</a>" not in of_64
    assert "are not ranked" in page
    like = visitor.get("/compare", params={"like": "fp32"}).text
    assert all(f">{name}</a>" in like for name in names)
    assert like.count(">both</a>") == 1
