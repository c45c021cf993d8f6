"""Test that the command which installs an extra is that of the way in which the package was installed."""

import json
from pathlib import Path

import pytest

from autotune.space.features import command_to_add, how_to_add

FOLDER = json.dumps({"url": "file:///home/me/my%20code", "dir_info": {}})
EDITABLE = json.dumps({"url": "file:///home/me/my%20code", "dir_info": {"editable": True}})
GIT = json.dumps({"url": "https://example.org/autotune.git", "vcs_info": {"vcs": "git", "commit_id": "0"}})


@pytest.mark.parametrize(
    ("receipt", "direct_url", "command"),
    [
        (None, None, "pip install 'traintune[serve]'"),
        (None, FOLDER, "pip install '/home/me/my code[serve]'"),
        (None, EDITABLE, "pip install -e '/home/me/my code[serve]'"),
        (None, GIT, "pip install 'traintune[serve] @ git+https://example.org/autotune.git@0'"),
        ("uv-receipt.toml", None, "uv tool install 'traintune[serve]'"),
        ("uv-receipt.toml", EDITABLE, "uv tool install -e '/home/me/my code[serve]'"),
        ("pipx_metadata.json", FOLDER, "pipx install --force '/home/me/my code[serve]'"),
    ],
)
def test_the_command_is_that_of_the_installation(
    receipt: str | None, direct_url: str | None, command: str, tmp_path: Path
) -> None:
    if receipt is not None:
        (tmp_path / receipt).touch()
    assert command_to_add("serve", tmp_path, direct_url) == command


def test_a_checkout_in_the_working_directory_does_not_hide_the_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ``egg-info`` is found before the installed package, and has no record of where that came from."""
    names = "Metadata-Version: 2.1\nName: traintune\nVersion: 0.1.0\n"
    for place, file in (("checkout/traintune.egg-info", "PKG-INFO"), ("site/traintune-0.1.0.dist-info", "METADATA")):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / file).write_text(names)
    (tmp_path / "site/traintune-0.1.0.dist-info/direct_url.json").write_text(EDITABLE)
    monkeypatch.setattr("sys.path", [str(tmp_path / "checkout"), str(tmp_path / "site")])
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    assert how_to_add("serve") == "pip install -e '/home/me/my code[serve]'"
