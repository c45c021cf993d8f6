"""Which line is the user's own, and what counts as an array in a batch."""

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import torch

from autotune.worker import wrapping
from autotune.worker.arrays import arrays_by_place


def test_the_trial_server_is_nobodys_line_where_autotune_is_installed_as_a_package(tmp_path: Path) -> None:
    """It runs as ``__main__``, below ``site-packages``."""
    copy = tmp_path / "site-packages" / "autotune" / "worker" / "wrapping.py"
    copy.parent.mkdir(parents=True)
    shutil.copy(wrapping.__file__, copy)
    spec = importlib.util.spec_from_file_location("installed_stack", copy)
    installed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(installed)
    at_work: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("import sys; frame = sys._getframe()", str(copy.with_name("server.py")), "exec"), at_work)
    assert installed.users_line([(at_work["frame"], 1)]) is None


class _Batch(dict[str, Any]):
    """Gives its keys as attributes, as many batches do, and an empty one for those that it has not."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name, _Batch())


def test_a_batch_with_attributes_for_its_keys_is_no_array() -> None:
    batch = _Batch(x=torch.ones(4, 2), y=[torch.ones(4)])
    assert {place: tuple(each.shape) for place, each in arrays_by_place(batch)} == {"x": (4, 2), "y.0": (4,)}


def test_a_value_whose_attributes_cannot_be_asked_for_is_no_array() -> None:
    class Output(dict[str, Any]):
        __getattr__ = dict.__getitem__

    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert [place for place, _ in arrays_by_place(Output(loss=torch.ones(1), rows=nested))] == ["loss"]
