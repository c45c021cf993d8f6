"""Test the look at the training of levers that need a GPU, in float32 and as they are measured."""

import sys
import time
from collections.abc import Iterator

import pytest
from tiny import tiny_workload

from autotune.core.candidate import Arm, Candidate
from autotune.core.workload import Workload
from autotune.devices.listing import list_devices
from autotune.execution import TrialServer
from autotune.space.arms import changed
from autotune.tuning.look import Looker

GPUS = [device for device in list_devices() if device.kind == "cuda"]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPUS, reason="no NVIDIA GPU here")]

TEXTS = tiny_workload("gpt2-tiny", seq_len=64, padding=0.3)
FULL = tiny_workload("gpt2-tiny", seq_len=64)
PLAIN = Arm("bf16")
LEVERS = {
    "CUDA graphs": (FULL, changed(PLAIN, cuda_graphs=True, unpadded=True)),
    "compiled by layer": (FULL, changed(PLAIN, torch_compile=True, regional_compilation=True)),
    "varlen attention": (TEXTS, changed(PLAIN, padding_free=True)),
    "fused loss": (TEXTS, changed(PLAIN, fused_loss=True)),
}


@pytest.fixture(scope="module", params=[TEXTS, FULL], ids=["texts", "full"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrialServer]:
    """A trial server on the first GPU."""
    with TrialServer(GPUS[0], request.param, tmp_path_factory.mktemp("look")) as made:
        yield made


@pytest.mark.parametrize("as_measured", [False, True], ids=["in float32", "as measured"])
@pytest.mark.parametrize("lever", LEVERS)
def test_levers_train_the_same_on_a_gpu(server: TrialServer, lever: str, as_measured: bool) -> None:
    workload, arm = LEVERS[lever]
    if workload is not server.workload:
        pytest.skip("of the other texts")
    winner, asked = Candidate(arm, 8, 2), Candidate(PLAIN, 8, 2)
    devices = server.placement.rank_devices
    looker = Looker(
        server.look, asked, devices, cap_bytes=8 << 30, seed=1, is_unmodified=False, is_own=False,
        as_measured=as_measured,
    )  # fmt: skip
    began = time.monotonic()
    verdict = looker.differences(winner)
    print(
        f"{lever}, {'as measured' if as_measured else 'in float32'}: {time.monotonic() - began:.2f} s", file=sys.stderr
    )
    assert verdict.look.unknown is None
    assert (verdict.levers, verdict.look.differs) == ((), ())


def test_another_split_is_the_same_on_a_gpu(server: TrialServer) -> None:
    workload: Workload = server.workload
    assert workload.task == "causal-lm"
    devices = server.placement.rank_devices
    looker = Looker(
        server.look,
        Candidate(Arm("fp32"), 16, 1),
        devices,
        cap_bytes=8 << 30,
        seed=1,
        is_unmodified=False,
        is_own=False,
    )
    began = time.monotonic()
    verdict = looker.differences(Candidate(PLAIN, 4, 4))
    print(f"the split: {time.monotonic() - began:.2f} s", file=sys.stderr)
    assert (verdict.levers, verdict.look.differs, verdict.look.unknown) == ((), (), None)
