"""Test what ``autotune doctor`` says of this machine, of an older database, and of another project of the name."""

import json
import sqlite3
from pathlib import Path

import warm
from command_line import COLD, ROOT, Run, run_process

from autotune.core.code_interface import PROTECTED
from autotune.core.errors import NotReadyError

LOOKED_AT = {"Python", "autotune", "memory", "cores", "disk", "torch", "compiler", "extras", "your files", "hub"}


@COLD
def test_it_tells_of_everything_that_a_search_needs(run: Run, folder: Path, cold: bool) -> None:
    with warm.cold(cold):
        ran = run("doctor", "--json")
    document = json.loads(ran.stdout)
    checks = {check["name"]: check for check in document["checks"]}
    assert checks.keys() >= LOOKED_AT
    assert ran.code == (0 if document["ready"] else NotReadyError.exit_code)
    assert document["ready"] == all(check["state"] != "wrong" for check in checks.values())
    assert all((check["cure"] is None) == (check["state"] == "ok") for check in checks.values())
    # What a process with torch, one that tries out the protection, and the environment say.
    assert checks["torch"]["found"][0].isdigit()
    assert any(said in checks["your files"]["found"] for said in PROTECTED.values())
    assert "HF_HUB_OFFLINE" in checks["hub"]["found"]
    assert "which the first search makes" in checks["database"]["found"]
    assert list(folder.iterdir()) == []


def test_an_older_database_and_one_of_another_program_are_told(run: Run, folder: Path) -> None:
    with sqlite3.connect("old.db") as old:
        old.executescript((ROOT / "tests/store/recorded_searches/search_0001.sql").read_text())
    before = Path("old.db").read_bytes()
    ran = run("doctor", "--json", "--storage", "old.db")
    database = json.loads(ran.stdout)["checks"][-2]
    assert database["name"] == "database"
    assert (database["state"], "revision 0001" in database["found"]) == ("note", True)
    assert "db upgrade" in database["cure"]
    assert Path("old.db").read_bytes() == before
    Path("text.db").write_text("no database at all\n" * 100)
    shown = run("doctor", "--storage", "text.db")
    assert shown.code == NotReadyError.exit_code
    assert "wrong  database" in shown.stdout
    assert "wrong here: database" in shown.stderr


def test_another_project_named_autotune_is_told_by_the_doctor_and_by_a_search(tmp_path: Path) -> None:
    record = tmp_path / "packages" / "autotune-0.0.3.dist-info"
    record.mkdir(parents=True)
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: autotune\nVersion: 0.0.3\n")
    path = str(record.parent)
    ran = run_process("doctor", folder=tmp_path, PYTHONPATH=path)
    assert ran.code == NotReadyError.exit_code
    assert "wrong  other project" in ran.stdout
    assert "autotune 0.0.3 of the package index is installed too" in ran.stdout
    assert "pip uninstall autotune, then pip install --force-reinstall traintune" in ran.stdout
    (tmp_path / "text.db").write_text("no database at all\n" * 100)
    search = ("search", "--model", "bert-tiny", "--device", "cpu", "--storage", "text.db")
    said = run_process(*search, folder=tmp_path, PYTHONPATH=path).stderr.splitlines()
    assert said[0].startswith("autotune: other project: autotune 0.0.3 of the package index")
    assert "error" in said[1]
