"""Test what DeepSpeed is told before it is imported."""

import os
from pathlib import Path

import pytest
import torch

from autotune.core.placement import RankDevices
from autotune.worker.rendezvous import lacks_nccl, open_store, prepare_deepspeed


@pytest.mark.parametrize(("numbers", "expected"), [({"GPU-a": 2, "GPU-b": 0}, "2,0"), ({"GPU-a": 2}, "GPU-a,GPU-b")])
def test_gpus_are_numbered(monkeypatch: pytest.MonkeyPatch, numbers: dict[str, int], expected: str) -> None:
    """DeepSpeed makes numbers of what is in the variable. CUDA has read the UUIDs by then."""
    seen = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    monkeypatch.setattr(torch.cuda, "init", lambda: seen.append(os.environ["CUDA_VISIBLE_DEVICES"]))
    monkeypatch.setattr("autotune.worker.rendezvous.gpu_number", numbers.get)
    prepare_deepspeed("cuda", 2, offloads=False)
    assert seen == ["GPU-a,GPU-b"]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == expected


@pytest.mark.parametrize("has_nccl", [True, False])
def test_nccl_is_asked_for_where_gpus_need_it(monkeypatch: pytest.MonkeyPatch, has_nccl: bool) -> None:
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: has_nccl)
    assert lacks_nccl(RankDevices("cuda", ("a", "b"))) is not has_nccl
    assert not lacks_nccl(RankDevices("cuda", ("a",)))
    assert not lacks_nccl(RankDevices("cpu", ("cpu", "cpu")))


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="Linux tells there who listens where")
def test_only_this_host_reaches_the_store() -> None:
    store = open_store()
    listening = [line.split() for path in ("tcp", "tcp6") for line in Path("/proc/net", path).read_text().splitlines()]
    # Local address and port in hexadecimal; 0A is the state of a socket that listens.
    places = [words[1] for words in listening if words[3] == "0A" and words[1].endswith(f":{store.port:04X}")]
    assert places == [f"0100007F:{store.port:04X}"]
    store.set("key", "value")
    assert store.get("key") == b"value"
