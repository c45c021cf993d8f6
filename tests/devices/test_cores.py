"""Test the choice of the core for a pinned training process."""

from pathlib import Path

import pytest

from autotune.devices.cores import choose_core, local_cores, parse_cores, second_threads


@pytest.mark.parametrize(
    ("text", "cores"), [("0-3,8,10-11\n", (0, 1, 2, 3, 8, 10, 11)), ("5", (5,)), ("\n", ()), ("", ())]
)
def test_the_kernels_lists_are_read(text: str, cores: tuple[int, ...]) -> None:
    assert parse_cores(text) == cores


class TestChoice:
    def test_core_0_is_left_to_the_kernel_where_there_is_another(self) -> None:
        assert choose_core(range(16)) == 1
        assert choose_core([0]) == 0
        assert choose_core([4, 7]) == 4

    def test_two_gpus_do_not_share_one(self) -> None:
        chosen = [choose_core(range(16), gpu_index=index) for index in range(8)]
        assert len(set(chosen)) == 8

    def test_more_gpus_than_cores_share_them(self) -> None:
        assert choose_core([0, 1], gpu_index=5) == 1

    def test_it_is_near_the_gpu_where_that_is_known(self) -> None:
        assert choose_core(range(32), near=range(16, 32)) == 16
        assert choose_core(range(8), near=range(16, 32)) == 1, "none of them may be used"

    def test_second_threads_come_last(self) -> None:
        assert choose_core([1, 9, 2, 10], second_threads=[9, 10], gpu_index=1) == 2
        assert choose_core([9, 10], second_threads=[9, 10]) == 9

    def test_without_any_there_is_none(self) -> None:
        assert choose_core([]) is None


def test_the_system_says_which_cores_are_near(tmp_path: Path) -> None:
    device = tmp_path / "0000:1b:00.0"
    device.mkdir()
    (device / "local_cpulist").write_text("0-7,16-23\n")
    assert local_cores("00000000:1B:00.0", tmp_path) == (*range(8), *range(16, 24))
    for other in ("00000000:1C:00.0", "nonsense", "", None):
        assert local_cores(other, tmp_path) == ()


def test_the_system_says_which_threads_share_a_core(tmp_path: Path) -> None:
    for core, siblings in ((0, "0,4"), (4, "0,4"), (1, "1")):
        topology = tmp_path / f"cpu{core}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(siblings)
    assert second_threads([0, 1, 4, 7], tmp_path) == {4}
