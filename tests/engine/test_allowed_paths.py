"""Test that the process which searches reads no folder that the service's clients may not name."""

import io
from pathlib import Path

import pytest

from autotune.core.device import Device
from autotune.core.errors import InvalidRequestError
from autotune.engine.child import _Child
from autotune.engine.work import Work


@pytest.mark.parametrize("option", ["model", "dataset", "tokenizer"])
def test_a_name_of_the_hub_that_is_a_folder_on_this_node_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpu: Device, option: str
) -> None:
    """The service, on another machine, took it for a name of the hub."""
    (tmp_path / "outputs" / "private").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    options = {"model": "bert-tiny", "effective_batch": 8, option: "outputs/private"}
    work = Work("a-1", "a", options, devices=(cpu.uuid,), folders=(str(tmp_path / "data"),))
    said: list[str] = []
    with pytest.raises(InvalidRequestError, match=f"{option}: this service reads no files at 'outputs/private'"):
        _Child(0, io.StringIO(), None)._run(work, lambda kind, document: said.append(kind))
    assert said == []
