"""Test the CPU and its memory on recorded /proc and control group files, and the ceiling with its headroom."""

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machine import write_files
from messages import check_refusals

from autotune.core.ceiling import Ceiling, Headroom, parse_headroom
from autotune.core.errors import InvalidRequestError, NothingFitsError
from autotune.core.placement import Placement
from autotune.core.schema import decode, encode
from autotune.core.units import GIB, MIB
from autotune.devices.host import HostMemory, cpu_device, host_memory, processor_name
from autotune.devices.listing import find_device, list_devices

MEMINFO = "MemTotal:       33554432 kB\nMemFree:         1048576 kB\nMemAvailable:   25165824 kB\n"


class TestProcessor:
    @pytest.mark.parametrize(
        ("line", "precisions"),
        [
            ("flags\t\t: fpu avx512f avx512_bf16 amx_tile", ("fp32", "bf16")),
            ("flags\t\t: fpu amx_bf16", ("fp32", "bf16")),
            ("flags\t\t: fpu avx512f amx_fp16 xavx512_bf16", ("fp32",)),
            ("Features\t: fp asimd bf16 i8mm", ("fp32", "bf16")),
            ("Features\t: fp asimd", ("fp32",)),
            ("", ("fp32",)),
        ],
    )
    def test_precisions_and_name(self, tmp_path: Path, line: str, precisions: tuple[str, ...]) -> None:
        first = f"processor\t: 0\nmodel name\t: A  CPU @ 2:1\n{line}\n"
        write_files(tmp_path, {"proc/cpuinfo": f"{first}\nmodel name\t: another\nflags\t: amx_bf16\n"})
        assert cpu_device(tmp_path).precisions == precisions
        assert cpu_device(tmp_path).name == "A  CPU @ 2:1"

    def test_one_without_a_name_is_told_apart_by_its_design(self, tmp_path: Path) -> None:
        write_files(tmp_path, {"proc/cpuinfo": "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n"})
        assert processor_name(tmp_path) == f"{cpu_device(tmp_path).name} 0x41 0xd4f"


class TestHostMemory:
    def test_without_control_groups_it_is_the_machines(self, tmp_path: Path) -> None:
        write_files(tmp_path, {"proc/meminfo": MEMINFO})
        assert host_memory(tmp_path) == HostMemory(32 * GIB, 24 * GIB)

    def test_version_2_counts_every_level_and_not_the_cache(self, tmp_path: Path) -> None:
        top = "sys/fs/cgroup"
        files = {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/user/job\n",
            f"{top}/user/memory.max": f"{8 * GIB}\n",
            f"{top}/user/memory.current": f"{5 * GIB}\n",
            f"{top}/user/memory.stat": f"anon 5\ninactive_file {2 * GIB}\nactive_file {GIB}\n",
            f"{top}/user/job/memory.max": "max\n",
            f"{top}/user/job/memory.current": f"{GIB}\n",
        }
        write_files(tmp_path, files)
        assert host_memory(tmp_path) == HostMemory(8 * GIB, 5 * GIB)
        write_files(tmp_path, {f"{top}/user/job/memory.max": f"{4 * GIB}"})
        assert host_memory(tmp_path) == HostMemory(4 * GIB, 3 * GIB)

    @pytest.mark.parametrize("inside", [True, False])
    def test_version_1_also_where_a_container_sees_a_path_of_the_host(self, tmp_path: Path, inside: bool) -> None:
        folder = "sys/fs/cgroup/memory" + ("" if inside else "/docker/abc")
        files = {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "9:name=systemd:/docker/abc\n4:cpu,memory:/docker/abc\n0::/\n",
            f"{folder}/memory.limit_in_bytes": f"{8 * GIB}\n",
            f"{folder}/memory.usage_in_bytes": f"{3 * GIB}\n",
            f"{folder}/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB}\n",
        }
        write_files(tmp_path, files)
        assert host_memory(tmp_path) == HostMemory(8 * GIB, 6 * GIB)

    @pytest.mark.parametrize(
        ("group", "most", "limit", "used", "found"),
        [
            (
                "4:memory:/job",
                "memory/job/memory.limit_in_bytes",
                9223372036854771712,
                GIB,
                HostMemory(32 * GIB, 24 * GIB),
            ),
            ("0::/../elsewhere", "memory.max", GIB, 2 * GIB, HostMemory(GIB, 0)),
        ],
        ids=["no limit above the machine", "nothing free in a full group"],
    )
    def test_limits(self, tmp_path: Path, group: str, most: str, limit: int, used: int, found: HostMemory) -> None:
        now = most.replace("limit_in_bytes", "usage_in_bytes").replace("max", "current")
        groups = {f"sys/fs/cgroup/{most}": f"{limit}\n", f"sys/fs/cgroup/{now}": f"{used}\n"}
        write_files(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/cgroup": f"{group}\n", **groups})
        assert host_memory(tmp_path) == found

    def test_without_proc_the_facts_are_fewer(self, tmp_path: Path) -> None:
        cpu = cpu_device(tmp_path)
        assert cpu.memory_total_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        assert (cpu.memory_free_bytes, cpu.memory_used_bytes, cpu.precisions) == (None, None, ("fp32",))
        assert cpu.name
        assert Placement.of(cpu).least_free_bytes == cpu.memory_total_bytes

    def test_this_machine(self) -> None:
        cpu = list_devices()[-1]
        assert (cpu.label, cpu.kind, cpu.driver) == ("cpu", "cpu", None)
        assert cpu.memory_total_bytes > 256 * MIB
        if sys.platform.startswith("linux"):
            assert cpu.memory_free_bytes is not None
            assert cpu.memory_used_bytes == cpu.memory_total_bytes - cpu.memory_free_bytes
        assert json.loads(json.dumps(cpu.document())) == cpu.document()
        assert find_device("cpu").uuid == cpu.uuid


class TestHeadroom:
    @pytest.mark.parametrize(
        ("text", "headroom"),
        [
            ("5%", Headroom(0.05)),
            (" 2.5 % ", Headroom(0.025)),
            ("0.05", Headroom(0.05)),
            (".1", Headroom(0.1)),
            ("0", Headroom(0.0)),
            ("1GiB", Headroom(size_bytes=GIB)),
            ("512 MB", Headroom(size_bytes=512_000_000)),
            ("1048576B", Headroom(size_bytes=MIB)),
        ],
    )
    def test_as_people_write_it(self, text: str, headroom: Headroom) -> None:
        assert parse_headroom(text) == headroom

    @pytest.mark.parametrize("text", ["", "3", "1073741824", "1", "100%", "-5%", "nan", "5%%", "1 apple", "٣%"])
    def test_what_could_mean_anything_else_is_refused(self, text: str) -> None:
        with pytest.raises(InvalidRequestError, match=r"headroom.*write --headroom as 5%"):
            parse_headroom(text)

    def test_description(self) -> None:
        assert [Headroom().describe(), Headroom(size_bytes=GIB).describe()] == ["3 %", "1.0 GiB"]


SIZES = st.integers(min_value=1, max_value=2**50)
HEADROOMS = st.one_of(
    st.builds(Headroom, st.floats(min_value=0, max_value=0.999)), st.builds(Headroom, size_bytes=SIZES)
)


class TestCeiling:
    @given(st.none() | SIZES, SIZES, st.integers(min_value=0, max_value=GIB), HEADROOMS)
    def test_line_cap_limit_are_in_order_or_nothing_is_left(
        self, limit_bytes: int | None, free_bytes: int, context_bytes: int, headroom: Headroom
    ) -> None:
        reachable = min(free_bytes, limit_bytes or free_bytes)
        try:
            ceiling = Ceiling(limit_bytes, free_bytes, context_bytes, headroom)
        except (InvalidRequestError, NothingFitsError):
            cap_bytes = reachable - context_bytes
            assert cap_bytes <= 0 or headroom.of_cap(cap_bytes) >= cap_bytes
            return
        assert 0 < ceiling.line_bytes <= ceiling.cap_bytes == reachable - context_bytes <= reachable
        assert ceiling.line_bytes + ceiling.headroom_bytes == ceiling.cap_bytes
        assert ceiling.bounds.fits(ceiling.line_bytes)
        assert not ceiling.bounds.fits(ceiling.line_bytes + 1)
        assert ceiling.excess_bytes(ceiling.line_bytes, context_bytes + ceiling.headroom_bytes) == 0
        assert ceiling.excess_bytes(ceiling.line_bytes, context_bytes + ceiling.headroom_bytes + 1) == 1
        assert decode(json.loads(json.dumps(encode(ceiling))), Ceiling) == ceiling

    def test_a_smaller_card_emulated_on_a_larger_one(self) -> None:
        ceiling = Ceiling(24 * GIB, 140 * GIB, 620 * MIB)
        assert ceiling.cap_bytes == 24 * GIB - 620 * MIB
        assert ceiling.headroom_bytes == 753590600  # 3 % of the cap, rounded up

    def test_messages_of_ceilings_that_leave_nothing(self) -> None:
        sizes: dict[str, tuple[int | None, int, int, Headroom]] = {
            "a limit below the context": (512 * MIB, 8 * GIB, 620 * MIB, Headroom()),
            "no limit at all": (0, 8 * GIB, 0, Headroom()),
            "less free than the context": (None, 512 * MIB, 620 * MIB, Headroom()),
            "nothing free": (GIB, 0, 0, Headroom()),
            "headroom of all": (GIB, GIB, 0, Headroom(size_bytes=GIB)),
        }
        check_refusals("ceilings", {name: partial(Ceiling, *given) for name, given in sizes.items()})

    @pytest.mark.parametrize("document", [{}, {"headroom": {}}, {"headroom": 3}, {"headroom": {"percent": 3}}])
    def test_a_malformed_document_is_refused(self, document: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="malformed Ceiling"):
            decode(document, Ceiling)
