"""Test the installed package: a wheel with its migrations and its catalog, away from the checkout."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from checkout import ROOT, files

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
MODULES = {name for name in files() if name.startswith("autotune/")}
REVISIONS = sorted(path.name for path in (ROOT / "alembic" / "versions").glob("*.py"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, built from a copy so that nothing is left in the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    skip = shutil.ignore_patterns("__pycache__")
    for name in ("autotune", "alembic"):
        shutil.copytree(ROOT / name, source / name, ignore=skip)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir",
        str(folder), str(source), folder=folder)  # fmt: skip
    (made,) = folder.glob("traintune-*.whl")
    return made


def run(*words: str, folder: Path, **variables: str) -> str:
    """What a command says; an error of the test where it fails."""
    foreign = {"PYTHONPATH", "AUTOTUNE_STORAGE"}
    environment = {name: value for name, value in os.environ.items() if name not in foreign}
    ended = subprocess.run(
        words, cwd=folder, env={**environment, **variables}, capture_output=True, text=True, timeout=240
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_packages_are_the_folders() -> None:
    """They are named one by one in pyproject.toml, so that one may be forgotten."""
    folders = {name.rpartition("/")[0].replace("/", ".") for name in MODULES if name.endswith("__init__.py")}
    migrations = {"autotune._migrations", "autotune._migrations.versions"}
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == folders | migrations


def test_the_oldest_versions_promised_are_those_that_are_tested() -> None:
    """Of torch, the one at hand is tested instead: another comes with gigabytes of CUDA."""
    promised = [re.split(r">=|,", bound) for bound in PYPROJECT["project"]["dependencies"]]
    lines = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    tested = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert {name for name, *_ in promised} - tested.keys() == {"torch"}
    for name, oldest, *_ in promised:
        if name in tested:
            assert f"{tested[name]}.".startswith(f"{oldest}."), name


def test_every_package_says_what_it_is() -> None:
    """A folder of modules without ``__init__.py`` would be left out of type checks."""
    for package in PYPROJECT["tool"]["setuptools"]["packages"]:
        if "_migrations" not in package:
            assert (ROOT.joinpath(*package.split(".")) / "__init__.py").is_file(), package


def test_the_wheel_is_whole(wheel: Path) -> None:
    """Every module, the migrations under their other name, the catalog, the mark of typed code; no tests."""
    names = set(zipfile.ZipFile(wheel).namelist())
    assert names >= MODULES
    assert {"autotune/_migrations/env.py", "autotune/_migrations/script.py.mako"} <= names
    assert REVISIONS
    assert {f"autotune/_migrations/versions/{name}" for name in REVISIONS} <= names
    outside = {name for name in names if not name.startswith(("autotune/", "traintune-"))}
    assert not outside


def test_the_wheel_works_far_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    target, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    elsewhere.mkdir()
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target),
        str(wheel), folder=elsewhere)  # fmt: skip
    path = {"PYTHONPATH": str(target)}
    program = "import autotune, autotune.store.opening as m; print(autotune.__file__); print(m.migrations_folder())"
    module, migrations = run(sys.executable, "-c", program, folder=elsewhere, **path).splitlines()
    assert Path(module).is_relative_to(target)
    assert Path(migrations) == target / "autotune" / "_migrations"
    assert "bert-tiny" in run(sys.executable, "-m", "autotune", "models", folder=elsewhere, **path)
    script = target / "bin" / "autotune"
    assert "none -> " in run(sys.executable, str(script), "db", "upgrade", folder=elsewhere, **path)
    assert (elsewhere / "studies" / "autotune.db").is_file()


def test_what_was_tested_together_is_what_is_allowed() -> None:
    """Every requirement has a pinned version, and that lies in its stated range."""
    from packaging.requirements import Requirement
    from packaging.version import Version

    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    versions = {name.lower().replace("_", "-"): Version(version) for name, version in pinned.items()}
    project = PYPROJECT["project"]
    for text in (*project["dependencies"], *project["optional-dependencies"]["dev"]):
        requirement = Requirement(text)
        assert versions[requirement.name.lower()] in requirement.specifier, text


def test_the_commands_are_declared() -> None:
    assert PYPROJECT["project"]["scripts"] == dict.fromkeys(("autotune", "traintune"), "autotune.__main__:main")
