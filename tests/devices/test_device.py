"""Test reading GPUs from a stand-in NVML library, in real child processes, with both distributions of pynvml."""

import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machine import PROJECT, STAND_INS, Machine, uuid_of

from autotune.core.candidate import PRECISIONS
from autotune.core.device import Device, Neighbour
from autotune.core.errors import InvalidRequestError
from autotune.core.units import GIB, MIB
from autotune.devices.listing import devices_document, find_device
from autotune.devices.nvml import visible_gpus


@pytest.fixture
def old_machine(library_folder: Path, tmp_path: Path) -> Machine:
    """The stand-in library with the binding of 2017."""
    shutil.copyfile(STAND_INS / "pynvml_2017.py", tmp_path / "pynvml.py")
    return Machine(library_folder, tmp_path)


@pytest.fixture(params=["machine", pytest.param("old_machine", marks=pytest.mark.whole)])
def either_machine(request: pytest.FixtureRequest) -> Machine:
    """Each of the two bindings in turn."""
    return request.getfixturevalue(request.param)


def test_the_printed_document_is_what_the_devices_say() -> None:
    neighbours = (Neighbour(71, "python", 512 * MIB), Neighbour(9, None, None))
    gpu = Device("cuda", 0, "GPU-0", "a GPU", 2 * GIB, None, GIB, GIB, capability=(9, 0), neighbours=neighbours)
    devices = [gpu, find_device("cpu")]
    document = devices_document(devices, "no driver", {"peft": "0.18", "bitsandbytes": None})
    said = {
        "devices": [device.document() for device in devices],
        "nvml_problem": "no driver",
        "packages": {"peft": "0.18", "bitsandbytes": None},
    }
    assert json.dumps(document) == json.dumps(said)


class TestListing:
    def test_every_fact_of_a_gpu(self, machine: Machine) -> None:
        gpu, cpu = machine.devices(STAND_IN_PROCESSES="71=python=512,9=Xorg=-")
        assert gpu == {
            "label": "cuda:0",
            "kind": "cuda",
            "index": 0,
            "uuid": uuid_of(0),
            "name": "Stand-in GPU",
            "memory_total_bytes": 79 * GIB,
            "memory_reserved_bytes": 1 * GIB,
            "memory_used_bytes": 2 * GIB,
            "memory_free_bytes": 76 * GIB,
            "driver": "580.1",
            "capability": [9, 0],
            "neighbours": [
                {"pid": 9, "name": "Xorg", "used_bytes": None},
                {"pid": 71, "name": "python", "used_bytes": 512 * MIB},
            ],
            "native_bf16": False,
            "mig_uuids": None,
            "precisions": ["fp32", "tf32", "fp16", "bf16"],
        }
        assert (cpu["label"], cpu["uuid"], cpu["neighbours"]) == ("cpu", "cpu", [])

    def test_the_binding_of_2017_knows_all_but_what_is_reserved(self, machine: Machine, old_machine: Machine) -> None:
        new = machine.devices(STAND_IN_PROCESSES="71=python=512,9=Xorg=-", STAND_IN_GPUS="2")[:-1]
        old = old_machine.devices(STAND_IN_PROCESSES="71=python=512,9=Xorg=-", STAND_IN_GPUS="2")[:-1]
        assert old == [{**gpu, "memory_reserved_bytes": None, "memory_used_bytes": 3 * GIB} for gpu in new]

    def test_a_driver_without_the_second_memory_reading(self, machine: Machine) -> None:
        gpu = machine.devices(STAND_IN_ERRORS="nvmlDeviceGetMemoryInfo_v2=13")[0]
        assert (gpu["memory_reserved_bytes"], gpu["memory_used_bytes"]) == (None, 3 * GIB)

    def test_a_gpu_without_memory_of_its_own_shows_that_of_the_host(self, either_machine: Machine) -> None:
        errors = "nvmlDeviceGetMemoryInfo=3,nvmlDeviceGetMemoryInfo_v2=3"
        gpu, cpu = either_machine.devices(STAND_IN_ERRORS=errors)
        assert gpu["memory_total_bytes"] == cpu["memory_total_bytes"]
        assert gpu["memory_free_bytes"] > 0
        assert gpu["memory_reserved_bytes"] is None

    def test_facts_that_the_driver_keeps_to_itself_are_none(self, either_machine: Machine) -> None:
        functions = (
            "nvmlSystemGetDriverVersion",
            "nvmlDeviceGetCudaComputeCapability",
            "nvmlSystemGetProcessName",
            "nvmlDeviceGetGraphicsRunningProcesses",
            "nvmlDeviceGetGraphicsRunningProcesses_v3",
        )
        errors = ",".join(f"{function}=4" for function in functions)
        gpu = either_machine.devices(STAND_IN_ERRORS=errors, STAND_IN_PROCESSES="71=python=512")[0]
        assert (gpu["driver"], gpu["capability"], gpu["precisions"]) == (None, None, ["fp32"])
        assert gpu["neighbours"] == [{"pid": 71, "name": None, "used_bytes": 512 * MIB}]

    def test_this_process_is_not_its_own_neighbour(self, either_machine: Machine) -> None:
        code = """
os.environ["STAND_IN_PROCESSES"] = f"{os.getpid()}=python=512,7=other=1"
answer = [n.pid for n in list_devices()[0].neighbours]"""
        assert either_machine.ask(code) == [7]

    def test_importing_the_module_opens_nothing(self, machine: Machine, tmp_path: Path) -> None:
        code = "import sys\nanswer = [name for name in ('pynvml', 'torch', 'ctypes') if name in sys.modules]"
        new = {"LD_LIBRARY_PATH": str(machine.library_folder)}
        assert machine.ask(code, STAND_IN_LOG=str(tmp_path / "log"), **new) == []
        assert not (tmp_path / "log").exists()


class TestPolicy:
    """Settings of the owner's that decide how fast a GPU is."""

    CODE = f"answer = current_session().policy({uuid_of(0)!r})"

    def test_what_nvml_tells(self, machine: Machine) -> None:
        assert machine.ask(self.CODE, STAND_IN_WATTS="450") == {
            "power_limit_watts": 450.0,
            "sm_application_clock_mhz": 1980,
            "memory_application_clock_mhz": 3201,
            # Functions that this library does not have.
            "sm_clock_offset_mhz": None,
            "memory_clock_offset_mhz": None,
            "has_ecc": True,
        }

    def test_the_binding_of_2017_may_know_none_of_it(self, old_machine: Machine) -> None:
        assert set(old_machine.ask(self.CODE).values()) == {None}

    def test_a_mig_instance_has_those_of_its_gpu(self, machine: Machine) -> None:
        assert machine.ask("answer = current_session().policy('MIG-1')['power_limit_watts']") == 700.0

    def test_no_such_gpu_has_none(self, either_machine: Machine) -> None:
        assert either_machine.ask("answer = current_session().policy('GPU-9')") is None


class TestTrouble:
    def test_no_library_is_no_gpu_and_no_problem(self, either_machine: Machine, tmp_path: Path) -> None:
        # A file that is no library also hides a real one further along the search path.
        (tmp_path / "libnvidia-ml.so.1").write_text("not a library")
        assert either_machine.listing(LD_LIBRARY_PATH=str(tmp_path)) == ([], None)

    def test_no_binding_is_a_problem_that_names_the_package(self, machine: Machine, tmp_path: Path) -> None:
        (tmp_path / "pynvml.py").write_text("raise ImportError('no such thing')")
        gpus, problem = machine.listing(PYTHONPATH=f"{tmp_path}{os.pathsep}{PROJECT}")
        assert gpus == []
        assert problem is not None
        assert "pip install nvidia-ml-py" in problem

    @pytest.mark.parametrize("code", [9, 18, 999, 77])
    def test_a_library_that_does_not_start_is_a_problem(self, either_machine: Machine, code: int) -> None:
        gpus, problem = either_machine.listing(STAND_IN_ERRORS=f"nvmlInit={code}")
        assert gpus == []
        assert problem.startswith("NVML does not start: ")
        assert "b'" not in problem
        ask = "answer = current_session().used_bytes('GPU-0')"
        assert either_machine.ask(ask, STAND_IN_ERRORS=f"nvmlInit={code}") is None

    @pytest.mark.parametrize(
        ("errors", "said"),
        [
            ("nvmlDeviceGetHandleByIndex_v2:1=15", "GPU 1: GPU is lost"),
            ("nvmlDeviceGetMemoryInfo:1=15,nvmlDeviceGetMemoryInfo_v2:1=15", "cuda:1: GPU is lost"),
            ("nvmlDeviceGetUUID:1=15", "cuda:1: GPU is lost"),
        ],
    )
    def test_a_lost_gpu_hides_no_other(self, either_machine: Machine, errors: str, said: str) -> None:
        gpus, problem = either_machine.listing(STAND_IN_GPUS="3", STAND_IN_ERRORS=errors)
        assert gpus == [("cuda:0", "GPU-00000000"), ("cuda:2", "GPU-00000002")]
        assert problem == said

    def test_gpus_that_cannot_be_counted(self, either_machine: Machine) -> None:
        gpus, problem = either_machine.listing(STAND_IN_ERRORS="nvmlDeviceGetCount_v2=15")
        assert (gpus, problem) == ([], "the GPUs cannot be counted: GPU is lost")

    def test_a_problem_that_passed_is_forgotten(self, machine: Machine) -> None:
        code = """
list_devices(); before = nvml_problem()
del os.environ["STAND_IN_ERRORS"]
list_devices(); answer = [before, nvml_problem()]"""
        said = "GPU 0: GPU is lost"
        assert machine.ask(code, STAND_IN_ERRORS="nvmlDeviceGetHandleByIndex_v2=15") == [said, None]


class TestVisible:
    @pytest.mark.parametrize(
        ("visible", "numbers"),
        [
            ("2,0", [2, 0]),
            ("", []),
            ("-1", []),
            ("0,-1,1", [0]),
            ("GPU-00000001,GPU-00000002-1111", [1, 2]),
            ("GPU-00000002,0", [2, 0]),
        ],
    )
    def test_order_and_choice_go_by_uuid(self, either_machine: Machine, visible: str, numbers: list[int]) -> None:
        gpus, problem = either_machine.listing(STAND_IN_GPUS="3", CUDA_VISIBLE_DEVICES=visible)
        assert gpus == [(f"cuda:{n}", uuid_of(number)[:12]) for n, number in enumerate(numbers)]
        assert problem is None

    def test_a_mig_instance_is_a_device_with_its_own_memory(self, machine: Machine, old_machine: Machine) -> None:
        for asked in (machine, old_machine):
            gpu = asked.devices(STAND_IN_GPUS="2", CUDA_VISIBLE_DEVICES="MIG-1,MIG-2")[0]
            assert (gpu["label"], gpu["uuid"], gpu["memory_total_bytes"]) == ("cuda:0", "MIG-1", 10 * GIB)
        assert machine.devices(CUDA_VISIBLE_DEVICES="MIG-1")[0]["capability"] == [9, 0]

    def test_an_unknown_mig_instance_is_a_problem(self, either_machine: Machine) -> None:
        assert either_machine.listing(CUDA_VISIBLE_DEVICES="MIG-9") == ([], "MIG-9: Not Found")

    @pytest.mark.parametrize(
        ("visible", "shown"),
        [
            (None, (0, 1, 2)),
            ("1", (1,)),
            (" 1 , 0 ", (1, 0)),
            ("1gpu,2", (1, 2)),
            ("0,3,1", (0,)),
            ("0,0", ()),
            ("GPU-a", ()),
            ("GPU-ab", (1,)),
            ("GPU-c,GPU-x,0", (2,)),
            ("0,MIG-1", (0,)),
            ("MIG-1,0", ("MIG-1",)),
            ("NoDevFiles", ()),
            ("٢", ()),
        ],
    )
    def test_the_rules_of_the_variable(self, visible: str | None, shown: tuple[int | str, ...]) -> None:
        assert visible_gpus(visible, ["GPU-aa", "GPU-ab", "GPU-cc"]) == shown

    def test_a_gpu_that_cannot_be_read_keeps_its_number(self) -> None:
        assert visible_gpus("1,GPU-c", ["GPU-aa", None, "GPU-cc"]) == (1, 2)

    @given(st.text(alphabet="0123-,GPUMIabc +", max_size=20))
    def test_whatever_it_holds_no_gpu_shows_twice(self, visible: str) -> None:
        shown = visible_gpus(visible, ["GPU-aa", "GPU-ab"])
        assert len(set(shown)) == len(shown)
        assert all(position in (0, 1) for position in shown if isinstance(position, int))


def refusal(machine: Machine, asked: str, **variables: str) -> list[str]:
    """The message and the hint with which a device is refused."""
    code = f"""
from autotune.core.errors import AutotuneError
try: {asked}
except AutotuneError as error: answer = [error.message, error.hint]"""
    return machine.ask(code, **variables)


class TestFindDevice:
    def test_every_way_to_name_one(self, machine: Machine) -> None:
        labels = {
            None: "cuda:0",
            "cuda": "cuda:0",
            " cuda:1 ": "cuda:1",
            "cpu": "cpu",
            uuid_of(0): "cuda:1",
            "GPU-00000001": "cuda:0",
        }
        code = f"answer = [find_device(text).label for text in {[*labels]}]"
        assert machine.ask(code, STAND_IN_GPUS="2", CUDA_VISIBLE_DEVICES="1,0") == [*labels.values()]

    def test_without_a_gpu_the_cpu_is_the_default(self, machine: Machine) -> None:
        assert machine.ask("answer = find_device(None).label", CUDA_VISIBLE_DEVICES="") == "cpu"

    @pytest.mark.parametrize("text", ["cuda:1", "cuda:007", "GPU-00000001", "MIG-5"])
    def test_an_absent_one_is_named_with_what_there_is(self, machine: Machine, text: str) -> None:
        message, hint = refusal(machine, f"find_device({text!r})", STAND_IN_GPUS="2", CUDA_VISIBLE_DEVICES="0")
        assert message == f"there is no device {text}"
        assert "cuda:0 (Stand-in GPU), cpu (" in hint
        assert "CUDA_VISIBLE_DEVICES='0'" in hint

    def test_an_ambiguous_one_is_refused(self, machine: Machine) -> None:
        assert refusal(machine, "find_device('GPU-0')", STAND_IN_GPUS="2")[0] == "GPU-0 matches 2 devices"

    def test_the_error_tells_of_a_gpu_that_is_lost(self, machine: Machine) -> None:
        lost = "nvmlDeviceGetHandleByIndex_v2=15"
        assert "GPU 0: GPU is lost" in refusal(machine, "find_device('cuda:0')", STAND_IN_ERRORS=lost)[1]

    @pytest.mark.parametrize("named", ["find_device(None)", "find_device('cuda:0')", "find_gpus('all')"])
    def test_a_gpu_split_into_instances_is_refused_with_their_uuids(self, machine: Machine, named: str) -> None:
        assert refusal(machine, named, STAND_IN_MIG="2") == [
            "cuda:0 (Stand-in GPU) is split into MIG instances, and CUDA uses one at a time",
            "choose one with --device: MIG-1 (Stand-in GPU MIG 1g.10gb, 10.0 GiB), "
            "MIG-2 (Stand-in GPU MIG 1g.10gb, 10.0 GiB)",
        ]

    def test_an_instance_is_found_by_its_uuid(self, machine: Machine) -> None:
        found = machine.ask("answer = find_device('MIG-2').document()", STAND_IN_MIG="2", STAND_IN_GPUS="2")
        assert (found["label"], found["uuid"], found["memory_total_bytes"]) == ("MIG-2", "MIG-2", 10 * GIB)
        assert found["mig_uuids"] is None

    def test_the_other_gpus_of_a_machine_with_instances_are_used_as_a_whole(self, machine: Machine) -> None:
        found = machine.ask("answer = find_device('cuda:1').uuid", STAND_IN_MIG="2", STAND_IN_GPUS="2")
        assert found == uuid_of(1)

    def test_instances_do_not_train_together(self, machine: Machine) -> None:
        message, _ = refusal(machine, "find_gpus('MIG-1,MIG-2')", STAND_IN_MIG="2")
        assert message == "--gpus MIG-1,MIG-2: MIG instances cannot train together"

    def test_the_binding_of_2017_refuses_a_split_gpu_too(self, old_machine: Machine) -> None:
        _, hint = refusal(old_machine, "find_device(None)", STAND_IN_MIG="1")
        assert hint == "name one with --device; nvidia-smi -L lists their UUIDs"

    AMD = """
from pathlib import Path
from autotune.core.errors import DeviceError
from autotune.devices import listing
listing.amd_gpu.__defaults__ = (Path({root!r}),)
def found(name):
    try: return find_device(name).label
    except DeviceError as error: return error.message
answer = [found(None), found("cuda"), found("cpu")]"""

    def test_an_amd_gpu_is_refused_and_never_becomes_the_cpu(self, machine: Machine, tmp_path: Path) -> None:
        (tmp_path / "dev").mkdir()
        (tmp_path / "dev/kfd").touch()
        (tmp_path / "libnvidia-ml.so.1").write_text("not a library")
        code = self.AMD.format(root=str(tmp_path))
        refused = "AMD GPUs (ROCm) are not supported, and there is no other GPU here (/dev/kfd)"
        assert machine.ask(code, LD_LIBRARY_PATH=str(tmp_path)) == [refused, refused, "cpu"]
        # Beside a GPU of NVIDIA's it is a processor's own graphics.
        assert machine.ask(code) == ["cuda:0", "cuda:0", "cpu"]

    def test_a_torch_for_rocm_is_refused(self, machine: Machine, tmp_path: Path) -> None:
        (tmp_path / "libnvidia-ml.so.1").write_text("not a library")
        metadata = tmp_path / "torch-2.13.0+rocm7.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0+rocm7.0\n")
        paths = f"{tmp_path}{os.pathsep}{PROJECT}"
        found = machine.ask(self.AMD.format(root=str(tmp_path)), LD_LIBRARY_PATH=str(tmp_path), PYTHONPATH=paths)
        refused = "AMD GPUs (ROCm) are not supported, and there is no other GPU here (torch 2.13.0+rocm7.0)"
        assert found == [refused, refused, "cpu"]

    @pytest.mark.parametrize("text", ["gpu7x", "", "cuda:", "cuda:-1", "cuda:1.5", "cuda:٢", "cpu:0", "GPU-", "0"])
    def test_bad_text_is_a_bad_request(self, text: str) -> None:
        with pytest.raises(InvalidRequestError, match=r"cpu, cuda, cuda:N"):
            find_device(text)


class TestUsedBytes:
    def test_the_second_reading_opens_nothing_again(self, either_machine: Machine, tmp_path: Path) -> None:
        log = tmp_path / "log"
        code = f"answer = [current_session().used_bytes('{uuid_of(1)}') for _ in range(3)]"
        used = either_machine.ask(code, STAND_IN_GPUS="2", STAND_IN_LOG=str(log))
        assert used in ([2 * GIB] * 3, [3 * GIB] * 3)
        calls = log.read_text().split()
        assert calls.count("nvmlInit") == calls.count("nvmlDeviceGetHandleByUUID") == 1

    def test_unknown_and_unreadable_devices_have_none(self, either_machine: Machine) -> None:
        code = f"answer = [current_session().used_bytes(uuid) for uuid in ('cpu', 'GPU-5', '{uuid_of(0)}')]"
        errors = "nvmlDeviceGetMemoryInfo=15,nvmlDeviceGetMemoryInfo_v2=15"
        assert either_machine.ask(code, STAND_IN_ERRORS=errors) == [None, None, None]

    def test_the_context_is_this_process_own_memory_and_nobody_elses(self, machine: Machine) -> None:
        """While CUDA started, a desktop took 3 GiB."""
        code = f"""
from autotune.worker.trial.meter import context_beside
def measured(own_mib, **facts):
    os.environ["STAND_IN_PROCESSES"] = "" if own_mib is None else f"{{os.getpid()}}=python={{own_mib}}"
    return context_beside({uuid_of(0)!r}, 2 << 30, 1 << 30, **facts)
os.environ["STAND_IN_USED"] = "6"
answer = [measured(1536), measured(None), measured(512), measured("-"), measured(None, is_alone=False)]"""
        most = 2 * 767 * MIB
        # Less than the allocator reserved is another process, which has this number on the host.
        assert machine.ask(code) == [512 * MIB, most, most, most, 3 * GIB]

    def test_energy_is_told_in_joules(self, machine: Machine) -> None:
        read = f"current_session().energy_joules('{uuid_of(0)}')"
        assert machine.ask(f"answer = [{read}, {read}]") == [7000.0, 7300.0]

    def test_energy_is_absent_where_it_is_not_counted(self, machine: Machine, old_machine: Machine) -> None:
        code = f"answer = [current_session().energy_joules(uuid) for uuid in ('cpu', 'GPU-5', 'MIG-1', '{uuid_of(0)}')]"
        assert machine.ask(code, STAND_IN_ERRORS="nvmlDeviceGetTotalEnergyConsumption:0=3") == [None] * 4
        assert old_machine.ask(code) == [None] * 4
        assert machine.ask(code, STAND_IN_ERRORS="nvmlInit=12") == [None] * 4

    def test_a_forked_child_opens_its_own(self, either_machine: Machine) -> None:
        code = f"""
before = current_session().used_bytes("{uuid_of(0)}")
reading, writing = os.pipe()
child = os.fork()
if child == 0:
    os.write(writing, json.dumps([current_session().used_bytes("{uuid_of(0)}"), len(list_devices())]).encode())
    os._exit(0)
os.waitpid(child, 0)
answer = [before, current_session().used_bytes("{uuid_of(0)}"), *json.loads(os.read(reading, 100))]"""
        before, after, in_child, devices_in_child = either_machine.ask(code)
        assert before == after == in_child
        assert before in (2 * GIB, 3 * GIB)
        assert devices_in_child == 2


def gpu_of(capability: tuple[int, int] | None) -> Device:
    """A GPU of which only the capability matters."""
    return Device("cuda", 3, "GPU-0", "a GPU", GIB, None, 0, GIB, capability=capability)


class TestPrecisions:
    @pytest.mark.parametrize(
        ("capability", "precisions"),
        [
            (None, ("fp32",)),
            ((5, 2), ("fp32",)),
            ((5, 3), ("fp32", "fp16")),
            ((7, 5), ("fp32", "fp16")),
            ((8, 0), PRECISIONS),
            ((12, 1), PRECISIONS),
        ],
    )
    def test_of_a_gpu(self, capability: tuple[int, int] | None, precisions: tuple[str, ...]) -> None:
        assert gpu_of(capability).precisions == precisions
        assert gpu_of(capability).label == "cuda:3"
