"""Code that an operator lists may be searched by its name, and by nothing else."""

import json
from pathlib import Path

import pytest
from serving import StandInEngine
from starlette.testclient import TestClient

from autotune.core.device import Device
from autotune.core.errors import InvalidRequestError
from autotune.engine.work import Code, search_request
from autotune.service.requests import read_listed_code
from autotune.service.searches import Searches

SECRET = "hf_abcdefghijklmnopqrstuvwxyz"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a script and a function."""
    folder = tmp_path / "jobs"
    folder.mkdir()
    (folder / "train.py").write_text("def build(overrides): ...\n")
    return folder


@pytest.fixture
def codes(folder: Path) -> dict[str, Code]:
    """What a file in that folder lists."""
    file = folder / "allow.toml"
    file.write_text(
        f'[glue]\nscript = ["python", "train.py", "--hf_token={SECRET}"]\n[mine]\ntrainer = "train.py:build"\n'
    )
    return read_listed_code(file)


def test_toml_and_json_list_the_same(folder: Path, codes: dict[str, Code]) -> None:
    file = folder / "allow.json"
    script = ["python", "train.py", f"--hf_token={SECRET}"]
    file.write_text(json.dumps({"glue": {"script": script, "folder": "."}, "mine": {"trainer": "train.py:build"}}))
    assert read_listed_code(file) == codes
    assert codes["mine"].value == f"{folder}/train.py:build"
    assert codes["glue"].value == ("python", f"{folder}/train.py", f"--hf_token={SECRET}")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[x", "allow.toml: "),
        ("x = 1", "'x' is not a table"),
        ("[x]", "names 0 trainings"),
        ('[x]\nscript = ["train.py"]\nloop = "train.py"', "names 2 trainings"),
        ('[x]\nscript = "train.py"', "script is not a list of words"),
        ('[x]\ncommand = "train.py"', "has 'command'"),
        ('[x]\ntrainer = "missing.py:build"', "missing.py"),
        ('[x]\nscript = ["missing.py"]', "missing.py"),
        ('[x]\nscript = ["train.py"]\nfolder = "missing"', "there is no folder"),
        ('["a b"]\ntrainer = "train.py:build"', "is not a valid name"),
    ],
)
def test_what_is_wrong_in_the_list_is_said(folder: Path, text: str, told: str) -> None:
    file = folder / "allow.toml"
    file.write_text(text)
    with pytest.raises(InvalidRequestError) as raised:
        read_listed_code(file)
    assert told in raised.value.message
    with pytest.raises(InvalidRequestError, match="No such file"):
        read_listed_code(folder / "missing.toml")


def test_a_listed_name_becomes_its_code_in_its_folder(codes: dict[str, Code], folder: Path, cpu: Device) -> None:
    request = search_request({"code": "glue"}, [cpu], "study", codes["glue"])
    source = request.workload.source
    assert source is not None
    assert (source.kind, source.file, source.cwd) == ("script", str(folder / "train.py"), str(folder))
    assert source.argv == (f"--hf_token={SECRET}",)
    assert SECRET not in json.dumps(request.workload.recorded_document())


def test_a_search_of_listed_code_is_queued_under_its_name_alone(
    writer: TestClient, searches: Searches, codes: dict[str, Code], on_cpu: StandInEngine
) -> None:
    assert "its operator lists some" in writer.post("/v1/searches", json={"code": "glue"}).json()["hint"]
    searches.codes.update(codes)
    told = writer.post("/v1/searches", json={"code": "glue"})
    assert told.status_code == 202, told.text
    assert (told.json()["study"], told.json()["request"]) == ("glue", {"code": "glue"})
    unknown = writer.post("/v1/searches", json={"code": "glu"})
    assert (unknown.status_code, unknown.json()["hint"]) == (422, "did you mean glue?")
    both = writer.post("/v1/searches", json={"code": "glue", "model": "bert-tiny"})
    assert both.json()["detail"] == "model and code cannot be combined: each names what to train"
    refused = writer.post("/v1/searches", json={"code": "glue", "script": ["python", "-c", "1"]})
    assert "takes no code over HTTP" in refused.json()["detail"]
    beside = writer.post("/v1/searches", json={"code": "glue", "seq_len": 32})
    assert "--seq-len cannot be combined with" in beside.json()["detail"]
    work = on_cpu.next_run().work
    assert (work.options, work.code) == ({"code": "glue"}, codes["glue"])
    assert SECRET not in writer.get("/").text + writer.get("/v1/searches").text
    if searches.store.path is not None:
        stored = b"".join(path.read_bytes() for path in searches.store.path.parent.iterdir() if path.is_file())
        assert SECRET.encode() not in stored


def test_the_form_offers_what_is_listed(writer: TestClient, searches: Searches, codes: dict[str, Code]) -> None:
    client = writer
    token = client.headers["Authorization"].removeprefix("Bearer ")
    client.post("/session", data={"token": token})
    assert "Listed code" not in client.get("/").text
    searches.codes.update(codes)
    page = client.get("/").text
    assert '<option value="glue">' in page
    assert client.post("/searches", data={"code": "mine", "model": ""}).status_code == 303


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        ("--code glue", "", "give --server URL"),
        ("--server http://127.0.0.1:1 --trainer train.py:build", "--trainer brings code", "--code"),
    ],
)
def test_a_local_search_has_no_listed_code_and_a_service_no_other(
    folder: Path, words: str, message: str, hint: str
) -> None:
    from click.testing import CliRunner

    from autotune.cli.main import cli

    result = CliRunner().invoke(cli, ["search", *words.split()])
    assert isinstance(result.exception, InvalidRequestError)
    assert message in result.exception.message
    assert hint in result.exception.hint
