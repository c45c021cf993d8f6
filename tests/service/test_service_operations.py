"""What runs a service for good: the files of the documentation, its metrics and its log."""

import asyncio
import contextlib
import io
import json
import logging
import os
import re
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import tomllib
import urllib.request
import weakref
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import httpx2
import pytest
import uvicorn
import yaml
from checkout import ROOT
from click.testing import CliRunner
from processes import wait_until
from served import Service
from serving import StandInEngine, run_recorded
from standing_in import with_devices
from starlette.testclient import TestClient

from autotune.cli.main import cli
from autotune.core.device import Device
from autotune.core.errors import StorageError
from autotune.service import server
from autotune.service.app import make_app
from autotune.service.change_events import ChangeEvents
from autotune.service.searches import Searches
from autotune.service.server import JsonLines
from autotune.store.opening import open_store
from autotune.store.repository import Store
from autotune.tuning.run import trial_log_path

FILES = ROOT / "docs" / "how-to" / "service"


def parsed(words: list[str]) -> dict[str, Any]:
    """Return the options of an autotune command, as the command line reads them."""
    name, *rest = words
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    # Click keeps the names of the first help option that it makes, for all tests of this process.
    return command.make_context(name, rest, **cli.context_settings).params


def test_the_unit_is_one_that_systemd_accepts(tmp_path: Path) -> None:
    text = (FILES / "autotune.service").read_text()
    (command,) = re.findall(r"^ExecStart=(.*)$", text, flags=re.MULTILINE)
    program, *words = shlex.split(command)
    assert parsed(words)["storage"] == "/var/lib/autotune/autotune.db"
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze here")
    unit = tmp_path / "autotune.service"
    unit.write_text(text.replace(program, sys.executable))
    told = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=240)
    assert (told.returncode, told.stderr) == (0, "")


def test_the_compose_file_serves_this_machine_alone() -> None:
    document = yaml.safe_load((FILES / "compose.yaml").read_text())
    (service,) = document["services"].values()
    program, *words = service["command"]
    assert program == "autotune"
    options = parsed(words)
    assert options["behind_proxy"]
    assert Path(options["storage"]).parent == Path("/data")
    assert service["ports"] == ["127.0.0.1:8321:8321"]
    assert set(document["volumes"]) == {volume.partition(":")[0] for volume in service["volumes"]}
    assert (FILES / service["build"]["context"]).resolve() == ROOT


def test_the_other_files_can_be_read() -> None:
    prometheus = yaml.safe_load((FILES / "prometheus.yaml").read_text())
    assert prometheus["scrape_configs"][0]["job_name"] == "autotune"
    for entry in tomllib.loads((FILES / "allow.toml").read_text()).values():
        assert set(entry) - {"folder"} in ({"script"}, {"trainer"}, {"loop"})


def test_alerts_and_the_dashboard_ask_for_metrics_that_there_are(writer: TestClient, on_cpu: StandInEngine) -> None:
    told = writer.get("/metrics").text
    rules = yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"][0]["rules"]
    panels = json.loads((FILES / "grafana.json").read_text())["panels"]
    asked = [rule["expr"] for rule in rules] + [target["expr"] for panel in panels for target in panel["targets"]]
    known = set(re.findall(r"^# TYPE (\w+) ", told, re.MULTILINE))
    assert set(re.findall(r"autotune_\w+", " ".join(asked))) == known
    states = set(re.findall(r'autotune_searches\{state="(\w+)"\}', told))
    assert {name for each in re.findall(r'state=~?"([a-z|]+)"', " ".join(asked)) for name in each.split("|")} <= states


NGINX = """
daemon off;
pid {folder}/pid;
error_log stderr;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/a;
    proxy_temp_path {folder}/b;
    fastcgi_temp_path {folder}/c;
    uwsgi_temp_path {folder}/d;
    scgi_temp_path {folder}/e;
{server}
}}
"""


@pytest.fixture
def behind_nginx(tmp_path: Path) -> Iterator[tuple[str, ssl.SSLContext, str]]:
    """The address of a service behind the proxy of the documentation, whom to trust, and a token."""
    program = shutil.which("nginx")
    if program is None:
        pytest.skip("there is no nginx here")
    key, certificate = tmp_path / "key", tmp_path / "certificate"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
             "-keyout", key, "-out", certificate, "-subj", "/CN=localhost",
             "-addext", "subjectAltName=DNS:localhost"]  # fmt: skip
    subprocess.run(words, check=True, capture_output=True)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(Service(tmp_path, with_devices(tmp_path, {"host": 1})))
        service.serve("--behind-proxy", "--storage", "a.db")
        server = (FILES / "nginx.conf").read_text()
        changes = {"443 ssl": f"127.0.0.1:{port} ssl", "gpu-box.example;": "localhost;",
                   "/etc/ssl/gpu-box.pem": str(certificate), "/etc/ssl/gpu-box.key": str(key),
                   "http://127.0.0.1:8321": service.url}  # fmt: skip
        for old, new in changes.items():
            assert old in server
            server = server.replace(old, new)
        (tmp_path / "nginx.conf").write_text(NGINX.format(folder=tmp_path, server=server))
        proxy = stack.enter_context(subprocess.Popen([program, "-p", tmp_path, "-c", tmp_path / "nginx.conf"]))
        stack.callback(proxy.terminate)
        trusted = ssl.create_default_context(cafile=str(certificate))
        url = f"https://localhost:{port}"

        def is_up() -> bool:
            with contextlib.suppress(OSError):
                return bool(urllib.request.urlopen(f"{url}/healthz", timeout=5, context=trusted).read())
            return False

        assert wait_until(is_up, 60)
        yield url, trusted, service.token


@pytest.mark.service
def test_the_proxy_of_the_documentation_passes_events_on_as_they_come_and_the_page_s_forms(
    behind_nginx: tuple[str, ssl.SSLContext, str],
) -> None:
    url, trusted, token = behind_nginx
    with httpx2.Client(base_url=url, verify=trusted, headers={"Origin": url}) as client:
        signed_in = client.post("/session", data={"token": token})
        assert signed_in.status_code == 303
        assert "Secure" in signed_in.headers["set-cookie"]
        assert client.post("/session", data={"token": token}, headers={"Origin": "https://other"}).status_code == 403
        job = client.post("/v1/searches", json={"model": "bert-tiny", "effective_batch": 16}).json()
        # The search lasts for ever, so whatever is held back never comes.
        with client.stream("GET", f"/v1/searches/{job['id']}/events", timeout=120) as answer:
            lines = answer.iter_lines()
            assert next(lines) == "event: state"
            assert '"running"' in next(line for line in lines if line.startswith("data: ") and "running" in line)


def test_a_token_can_be_made_before_the_first_start(tmp_path: Path) -> None:
    storage = str(tmp_path / "autotune.db")
    made = CliRunner().invoke(cli, ["token", "add", "me", "--storage", storage])
    assert made.output.startswith("at_")
    with open_store(storage, create=False) as store:
        assert [token.name for token in store.queue.tokens()] == ["me"]


def test_every_line_of_the_metrics_is_one_that_prometheus_reads(
    writer: TestClient, engine: StandInEngine, cpu: Device
) -> None:
    engine.add(cpu, name='a "b" \\ c\nd')
    text = writer.get("/metrics").text
    label = r'[a-z_]+="(?:[^"\\\n]|\\["\\n])*"'
    sample = re.compile(rf"(?:# (?:HELP|TYPE) [a-z_]+ .+|[a-z_]+(?:\{{{label}(?:,{label})*\}})? -?[0-9.]+)")
    assert [line for line in text.splitlines() if not sample.fullmatch(line)] == []
    assert 'host="a \\"b\\" \\\\ c\\nd"' in text


def test_what_happens_is_logged_as_json_without_any_token(
    writer: TestClient, searches: Searches, on_gpu: StandInEngine, caplog: pytest.LogCaptureFixture
) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    log = logging.getLogger("autotune.service")
    log.addHandler(handler)
    try:
        with caplog.at_level(logging.INFO, logger="autotune.service"):
            writer.post("/v1/searches", json={"model": "bert-large-uncased", "effective_batch": 64})
            run = run_recorded(searches, on_gpu)
            writer.get("/v1/searches", headers={"Authorization": "Bearer at_wrong"})
    finally:
        log.removeHandler(handler)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["message"] for line in lines] == ["search submitted", "search started", "search ended"]
    assert {line["search"] for line in lines} == {run.job}
    assert lines[-1]["state"] == "finished"
    assert "at_" not in stream.getvalue()


class Answering(StandInEngine):
    """Looks, as it is closed, whether the service still answers."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self.port = port
        self.status = 0

    def close(self) -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/healthz", timeout=120) as answer:
            self.status = answer.status


def test_searches_that_ended_long_ago_are_forgotten_and_their_studies_stay(
    writer: TestClient, searches: Searches, on_gpu: StandInEngine
) -> None:
    asked = {"model": "bert-large-uncased", "effective_batch": 64}
    old = writer.post("/v1/searches", json={**asked, "study": "old"}).json()["id"]
    run_recorded(searches, on_gpu)
    waiting = writer.post("/v1/searches", json={**asked, "study": "waits", "needs": {"gpu": "b200"}}).json()["id"]
    logs = trial_log_path(searches.storage, "old", 0).parent
    logs.mkdir(parents=True)
    (logs / "trial-0000.log").write_text("said\n")
    clock = searches.store.queue.clock
    assert searches.forget(timedelta(days=1)) == 0
    assert logs.is_dir()
    searches.store.queue.clock = lambda: clock() + timedelta(days=2)
    assert searches.forget(timedelta(days=1)) == 1
    assert [job.id for job in searches.store.queue.jobs()] == [waiting]
    assert searches.store.queue.events(old) == []
    assert not logs.exists()
    assert searches.store.study("old") is not None
    assert writer.get(f"/v1/searches/{old}").status_code == 404


def test_who_waits_is_woken_from_a_thread_that_does_not_look_at_what_the_loop_changes() -> None:
    changes = ChangeEvents()

    class OfOneThread(weakref.WeakValueDictionary[str, asyncio.Event]):
        thread = threading.current_thread()

        def keys(self) -> Iterator[str]:  # type: ignore[override]
            assert threading.current_thread() is self.thread
            return super().keys()

        __iter__ = keys

    async def run() -> None:
        changes.attach()
        changes._events = OfOneThread()
        waiting = [changes.next_event(name) for name in ("one", "two")]
        await asyncio.to_thread(changes.notify_all)
        await asyncio.gather(*(event.wait() for event in waiting))
        assert changes.count == 1

    asyncio.run(asyncio.wait_for(run(), 60))


def test_forgetting_goes_on_after_any_error(
    searches: Searches, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    errors = [RuntimeError("dictionary changed size during iteration"), StorageError("the database is locked", "wait")]

    async def run() -> None:
        tries = asyncio.Event()
        loop = asyncio.get_running_loop()

        def fail_twice(_: object) -> dict[str, str]:
            if errors:
                raise errors.pop(0)
            loop.call_soon_threadsafe(tries.set)
            return {}

        monkeypatch.setattr(searches.store.queue, "forget", fail_twice)
        forgetting = asyncio.create_task(searches.forget_hourly(timedelta(days=1)))
        await asyncio.wait_for(tries.wait(), 60)
        forgetting.cancel()

    monkeypatch.setattr("autotune.service.searches._SECONDS_BETWEEN_FORGETTING", 0.01)
    asyncio.run(run())
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert told == [
        "old searches cannot be forgotten now",
        "old searches cannot be forgotten now: the database is locked. wait",
    ]
    assert "dictionary changed size" in caplog.text


def test_a_service_answers_until_its_searches_have_ended(store: Store) -> None:
    """Whoever listens hears that they wait again. Under nohup, no terminal that is closed ends it."""
    on_hangup = []

    def end() -> None:
        on_hangup.append(signal.getsignal(signal.SIGHUP))
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        engine = Answering(listener.getsockname()[1])
        searches = Searches(store, "a.db", engine)
        running = server._Server(uvicorn.Config(make_app(searches), log_config=None))
        ended = server._run(running, listener, searches, end, None)
        asyncio.run(asyncio.wait_for(ended, 60))
    signal.signal(signal.SIGHUP, before)
    assert (engine.status, on_hangup) == (200, [signal.SIG_IGN])
