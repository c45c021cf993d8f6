"""What runs a service for good: the files of the documentation, its metrics and its log."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
import uvicorn
import yaml
from checkout import ROOT
from click.testing import CliRunner
from serving import Agent, run_recorded
from starlette.testclient import TestClient

from autotune.cli.main import cli
from autotune.service import server
from autotune.service.app import make_app
from autotune.service.searches import Searches
from autotune.service.server import JsonLines, Settings
from autotune.store.opening import open_store

FILES = ROOT / "docs" / "how-to" / "service"


def parsed(words: list[str]) -> dict[str, Any]:
    """Return the options of an autotune command, as the command line reads them."""
    name, *rest = words
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    return command.make_context(name, rest).params


def test_the_unit_is_one_that_systemd_accepts(tmp_path: Path) -> None:
    text = (FILES / "autotune.service").read_text()
    (command,) = re.findall(r"^ExecStart=(.*)$", text, flags=re.MULTILINE)
    program, *words = shlex.split(command)
    assert parsed(words)["storage"] == "/var/lib/autotune/autotune.db"
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze here")
    unit = tmp_path / "autotune.service"
    unit.write_text(text.replace(program, sys.executable))
    told = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=60)
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


def test_the_slurm_job_runs_an_agent() -> None:
    file = FILES / "agents.sbatch"
    assert subprocess.run(["bash", "-n", file], timeout=60).returncode == 0
    (line,) = re.findall(r"^srun autotune (.*)$", file.read_text(), flags=re.MULTILINE)
    assert parsed(shlex.split(line))["server"] == "https://gpu-box:8321"
    # Without B: it is the agent that is told, not the shell around it.
    assert "--signal=TERM@" in file.read_text()


def test_the_other_files_can_be_read() -> None:
    assert yaml.safe_load((FILES / "prometheus.yaml").read_text())["scrape_configs"][0]["job_name"] == "autotune"
    for entry in tomllib.loads((FILES / "allow.toml").read_text()).values():
        assert set(entry) - {"folder"} in ({"script"}, {"trainer"}, {"loop"})


def test_a_token_can_be_made_before_the_first_start(tmp_path: Path) -> None:
    storage = str(tmp_path / "autotune.db")
    made = CliRunner().invoke(cli, ["token", "add", "me", "--storage", storage])
    assert made.output.startswith("at_")
    with open_store(storage, create=False) as store:
        assert [token.name for token in store.queue.tokens()] == ["me"]


def test_every_line_of_the_metrics_is_one_that_prometheus_reads(writer: TestClient, agent: Agent) -> None:
    (device,) = [found["device"] for found in writer.get("/v1/agents").json()["agents"]]
    version = writer.get("/healthz").json()["version"]
    told = {"name": 'a "b" \\ c\nd', "host": "x", "version": version, "device": device}
    assert writer.post("/v1/agents", json=told).status_code == 201
    text = writer.get("/metrics").text
    label = r'[a-z_]+="(?:[^"\\\n]|\\["\\n])*"'
    sample = re.compile(rf"(?:# (?:HELP|TYPE) [a-z_]+ .+|[a-z_]+(?:\{{{label}(?:,{label})*\}})? -?[0-9.]+)")
    assert [line for line in text.splitlines() if not sample.fullmatch(line)] == []
    assert 'name="a \\"b\\" \\\\ c\\nd"' in text


def test_what_happens_is_logged_as_json_without_any_token(
    writer: TestClient, searches: Searches, gpu_agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    log = logging.getLogger("autotune.service")
    log.addHandler(handler)
    try:
        with caplog.at_level(logging.INFO, logger="autotune.service"):
            writer.post("/v1/searches", json={"model": "bert-large-uncased", "effective_batch": 64})
            job = run_recorded(searches, gpu_agent)
            writer.get("/v1/searches", headers={"Authorization": "Bearer at_wrong"})
    finally:
        log.removeHandler(handler)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["message"] for line in lines] == ["search submitted", "search claimed", "search ended"]
    assert {line["search"] for line in lines} == {job["id"]}
    assert lines[-1]["state"] == "finished"
    assert job["lease_token"] not in stream.getvalue()
    assert "at_" not in stream.getvalue()


_STAND_IN = """
import signal, sys, urllib.request
def end(*_):
    print(urllib.request.urlopen(sys.argv[1] + "/healthz", timeout=30).status, flush=True)
    sys.exit()
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
signal.pause()
"""


def test_a_service_answers_until_its_agents_have_ended(searches: Searches, monkeypatch: pytest.MonkeyPatch) -> None:
    """They tell it then that their searches wait again."""
    agents: list[subprocess.Popen[bytes]] = []

    def start_agents(settings: Settings, token: str) -> list[subprocess.Popen[bytes]]:
        agents.append(subprocess.Popen([sys.executable, "-c", _STAND_IN, settings.url], stdout=subprocess.PIPE))
        assert agents[0].stdout is not None
        assert agents[0].stdout.readline() == b"ready\n"
        return agents

    monkeypatch.setattr(server, "start_agents", start_agents)
    listener = socket.create_server(("127.0.0.1", 0))
    settings = Settings("a.db", port=listener.getsockname()[1])
    running = server._Server(uvicorn.Config(make_app(searches), log_config=None))
    with listener:
        asyncio.run(
            asyncio.wait_for(
                server._run(running, listener, searches, settings, "", lambda: os.kill(os.getpid(), signal.SIGTERM)), 60
            )
        )
    with agents[0] as agent:
        assert agent.stdout is not None
        assert (agent.stdout.read(), agent.wait()) == (b"200\n", 0)
