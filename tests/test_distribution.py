"""Test the wheel and the sdist that ``make dist`` has built, installed into empty environments as users do.

What a wheel has to contain: ``test_packaging.py``.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

import pytest

from autotune import __version__

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]

REPOSITORY = Path(__file__).parents[1]
DIST = REPOSITORY / "dist"
STEM = f"traintune-{__version__}"
TINY = REPOSITORY / "tests/cli/tiny-bert"


def run(*words: str | Path, code: int = 0, cwd: Path | None = None) -> str:
    """Run a command, check its exit code, and return all that it printed."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, cwd=cwd, env=environment, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


class TestWheel:
    def test_its_metadata_name_licence_python_and_both_commands(self) -> None:
        with zipfile.ZipFile(DIST / f"{STEM}-py3-none-any.whl") as wheel:
            metadata = Parser().parsestr(wheel.read(f"{STEM}.dist-info/METADATA").decode())
            commands = wheel.read(f"{STEM}.dist-info/entry_points.txt").decode()
            assert f"{STEM}.dist-info/licenses/LICENSE" in wheel.namelist()
        assert (metadata["Name"], metadata["Version"]) == ("traintune", __version__)
        assert metadata["License-Expression"] == "Apache-2.0"
        assert metadata["Requires-Python"] == ">=3.11"
        assert "autotune = " in commands
        assert "traintune = " in commands

    def test_the_sdist_builds_the_same(self, tmp_path: Path) -> None:
        with tarfile.open(DIST / f"{STEM}.tar.gz") as archive:
            archive.extractall(tmp_path, filter="data")
        run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "-w", tmp_path / "again", tmp_path / STEM)
        first, second = DIST / f"{STEM}-py3-none-any.whl", tmp_path / "again" / f"{STEM}-py3-none-any.whl"
        names = [sorted(zipfile.ZipFile(wheel).namelist()) for wheel in (first, second)]
        assert names[0] == names[1]


@pytest.fixture(scope="module", params=["pip", "uv"])
def commands(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Install the wheel into an empty environment; return the folder of its commands."""
    environment = tmp_path_factory.mktemp(request.param) / "environment"
    wheel = DIST / f"{STEM}-py3-none-any.whl"
    pins = REPOSITORY / "constraints.txt"
    if request.param == "pip":
        run(sys.executable, "-m", "venv", environment)
        run(environment / "bin/python", "-m", "pip", "install", "--quiet", "--constraint", pins, wheel)
    else:
        uv = shutil.which("uv")
        if uv is None:
            pytest.skip("uv is not installed")
        # pip finds a build of torch for the CPU where one is at hand; uv keeps what is installed.
        run(uv, "venv", "--quiet", environment)
        pinned = next(line for line in pins.read_text().splitlines() if line.startswith("torch=="))
        run(sys.executable, "-m", "pip", "--python", environment, "install", "--quiet", pinned)
        python = environment / "bin/python"
        run(uv, "pip", "install", "--quiet", "--python", python, "--constraint", pins, wheel)
        run(uv, "pip", "check", "--python", python)
    yield environment / "bin"
    shutil.rmtree(environment)


class TestInstalled:
    def test_it_searches_exports_and_shows(self, commands: Path, tmp_path: Path) -> None:
        search = (
            "search", "--model", TINY, "--seq-len", "16", "--effective-batch", "16", "--device", "cpu", "--effort",
            "quick", "--study", "tiny",
        )  # fmt: skip
        assert "Best:" in run(commands / "autotune", *search, cwd=tmp_path)
        assert "per_device_train_batch_size" in run(commands / "autotune", "export", "tiny", cwd=tmp_path)
        assert "tiny" in run(commands / "traintune", "show", "tiny", cwd=tmp_path)

    def test_it_predicts(self, commands: Path, tmp_path: Path) -> None:
        assert "GiB" in run(
            commands / "traintune", "predict", "--model", "bert-tiny", "--gpu", "rtx-3090", cwd=tmp_path
        )

    def test_a_service_says_which_extra_it_needs(self, commands: Path, tmp_path: Path) -> None:
        said = run(commands / "autotune", "serve", code=2, cwd=tmp_path)
        assert "[serve]'" in said

    def test_the_version_is_that_of_the_package(self, commands: Path) -> None:
        assert __version__ in run(commands / "traintune", "--version")
