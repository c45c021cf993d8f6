"""Specify GPUs by name, to predict memory and speed for one that is not in this machine. None was measured here.

Memory is what ``nvidia-smi`` lists as the total of the common variant. Multiprocessors, threads and capability are from
NVIDIA's architecture whitepapers and the CUDA programming guide's table of compute capabilities. Rates are from the
data sheet or whitepaper that is named with each chip: dense, without sparsity, and for 16-bit products with sums in
float32, as torch computes them. GeForce cards have half the rate of other sums for those.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from autotune.core.chip import PCIE_3 as PCIE_3
from autotune.core.chip import PCIE_4 as PCIE_4
from autotune.core.chip import PCIE_5 as PCIE_5
from autotune.core.chip import Chip as Chip
from autotune.core.chip import Link as Link
from autotune.core.chip import Rates as Rates
from autotune.core.errors import InvalidRequestError, did_you_mean
from autotune.core.units import MIB, parse_bytes

TYPICAL_CONTEXT_BYTES = 767 * MIB
"""Memory of the CUDA context while a model trains: 751 to 771 MiB in 54 trials on an H200 (torch 2.11, driver 580);
this is the median in bf16. Other GPUs differ somewhat."""

MOST_CONTEXT_BYTES = 2 * TYPICAL_CONTEXT_BYTES
"""More than the CUDA context of one process takes. What lies above it where only the use of the whole GPU can be read
is another process's: a desktop's or a neighbour's. A choice."""


def _nvlink(gigabytes_per_second: float) -> Link:
    """Return the link of a board with NVLink in every direction; data sheets give both directions together."""
    return Link("NVLink", gigabytes_per_second / 2 * 1e9)


_VOLTA = "NVIDIA V100 data sheet (2020)"
_TURING = "NVIDIA Turing architecture whitepaper (WP-09183-001), reference boards"
_T4 = "NVIDIA T4 data sheet (2019)"
_A100 = "NVIDIA A100 data sheet (2022), SXM"
_GA102 = "NVIDIA Ampere GA102 architecture whitepaper, V2.1"
_A10 = "NVIDIA A10 data sheet (2021)"
_A40 = "NVIDIA A40 data sheet (2021)"
_ADA = "NVIDIA Ada architecture whitepaper, V2.1"
_L4 = "NVIDIA L4 data sheet (2023)"
_L40 = "NVIDIA L40 data sheet (2023)"
_L40S = "NVIDIA L40S data sheet (2023)"
_H100 = "NVIDIA H100 data sheet (2024)"
_H200 = "NVIDIA H200 data sheet (2024), SXM"
_GH200 = "NVIDIA GH200 data sheet (2024), 96 GB of HBM3"
_B200 = "NVIDIA Blackwell architecture technical brief (2024), HGX B200"
_BLACKWELL = "NVIDIA RTX Blackwell architecture whitepaper, V1.1"
_PRO = "NVIDIA RTX Blackwell PRO architecture whitepaper, V1.0, Workstation Edition"


def _chip(
    name: str,
    memory_mib: int,
    capability: tuple[int, int],
    multiprocessors: int,
    threads: int,
    tflops: tuple[float, float | None, float] | None = None,
    gigabytes_per_second: float = 0.0,
    watts: int = 0,
    source: str = "",
    link: Link | None = PCIE_4,
) -> Chip:
    """``tflops`` are those of 16-bit, TF32 and float32 arithmetic."""
    rates = None
    if tflops is not None:
        half, tf32, single = tflops
        rates = Rates(
            half * 1e12,
            None if tf32 is None else tf32 * 1e12,
            single * 1e12,
            gigabytes_per_second * 1e9,
            multiprocessors,
            watts,
            source,
            link,
        )
    return Chip(capability, multiprocessors, threads, name, memory_mib * MIB, rates)


CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        _chip("rtx-2080-ti", 11264, (7, 5), 68, 1024, (53.8, None, 13.4), 616, 250, _TURING, PCIE_3),
        _chip("rtx-3060-12gb", 12288, (8, 6), 28, 1536, (25.5, 12.7, 12.7), 360, 170, _GA102),
        _chip("rtx-3070", 8192, (8, 6), 46, 1536, (40.6, 20.3, 20.3), 448, 220, _GA102),
        _chip("rtx-3080-10gb", 10240, (8, 6), 68, 1536, (59.5, 29.8, 29.8), 760, 320, _GA102),
        _chip("rtx-3090", 24576, (8, 6), 82, 1536, (71.0, 35.6, 35.6), 936, 350, _GA102),
        _chip("rtx-4070", 12282, (8, 9), 46, 1536, (58.3, 29.1, 29.1), 504, 200, _ADA),
        _chip("rtx-4080", 16376, (8, 9), 76, 1536, (97.5, 48.7, 48.7), 716.8, 320, _ADA),
        _chip("rtx-4090", 24564, (8, 9), 128, 1536, (165.2, 82.6, 82.6), 1008, 450, _ADA),
        _chip("rtx-5070-ti", 16303, (12, 0), 70, 1536, (87.9, 43.9, 43.9), 896, 300, _BLACKWELL, PCIE_5),
        _chip("rtx-5080", 16303, (12, 0), 84, 1536, (112.6, 56.3, 56.3), 960, 360, _BLACKWELL, PCIE_5),
        _chip("rtx-5090", 32607, (12, 0), 170, 1536, (209.5, 104.8, 104.8), 1792, 575, _BLACKWELL, PCIE_5),
        _chip("a6000", 49140, (8, 6), 84, 1536, (154.8, 77.4, 38.7), 768, 300, _GA102),
        _chip("rtx-6000-ada", 49140, (8, 9), 142, 1536, (364.2, 182.1, 91.1), 960, 300, _ADA),
        _chip("rtx-pro-6000", 97887, (12, 0), 188, 1536, (503.8, 251.9, 125.0), 1792, 600, _PRO, PCIE_5),
        _chip("t4", 15360, (7, 5), 40, 1024, (65.0, None, 8.1), 320, 70, _T4, PCIE_3),
        _chip("v100-16gb", 16384, (7, 0), 80, 2048, (125.0, None, 15.7), 900, 300, _VOLTA, _nvlink(300)),
        _chip("v100-32gb", 32768, (7, 0), 80, 2048, (125.0, None, 15.7), 900, 300, _VOLTA, _nvlink(300)),
        _chip("a10", 23028, (8, 6), 72, 1536, (125.0, 62.5, 31.2), 600, 150, _A10),
        # Made for one cloud, without a public data sheet.
        _chip("a10g", 23028, (8, 6), 80, 1536),
        _chip("a40", 46068, (8, 6), 84, 1536, (149.7, 74.8, 37.4), 696, 300, _A40),
        _chip("l4", 23034, (8, 9), 58, 1536, (121.0, 60.0, 30.3), 300, 72, _L4),
        _chip("l40", 46068, (8, 9), 142, 1536, (181.0, 90.5, 90.5), 864, 300, _L40),
        _chip("l40s", 46068, (8, 9), 142, 1536, (362.0, 183.0, 91.6), 864, 350, _L40S),
        _chip("a100-40gb", 40960, (8, 0), 108, 2048, (312.0, 156.0, 19.5), 1555, 400, _A100, _nvlink(600)),
        _chip("a100-80gb", 81920, (8, 0), 108, 2048, (312.0, 156.0, 19.5), 2039, 400, _A100, _nvlink(600)),
        _chip("h100-pcie", 81559, (9, 0), 114, 2048, (756.0, 378.0, 51.0), 2000, 350, _H100, PCIE_5),
        _chip("h100-80gb", 81559, (9, 0), 132, 2048, (989.0, 494.0, 67.0), 3350, 700, _H100, _nvlink(900)),
        _chip("h100-nvl", 95830, (9, 0), 132, 2048, (835.0, 417.0, 60.0), 3900, 400, _H100, PCIE_5),
        _chip("gh200-96gb", 97871, (9, 0), 132, 2048, (989.0, 494.0, 67.0), 4000, 1000, _GH200, None),
        _chip("h200", 143771, (9, 0), 132, 2048, (989.0, 494.0, 67.0), 4800, 700, _H200, _nvlink(900)),
        _chip("b200", 183359, (10, 0), 148, 2048, (2250.0, 1100.0, 80.0), 8000, 1000, _B200, _nvlink(1800)),
    )
}

# Where the figures of each chip were read and compared on 22 November 2026: public copies of NVIDIA's documents, or
# tables that name them. Rates with sparsity were halved. Not found: the rates of the H100 NVL (its memory and power
# were), and of the RTX 4070, 5070 Ti and 5080; the PCIe generation follows from the architecture.
CHECKED_AGAINST: Mapping[str, str] = {
    "rtx-2080-ti": "NVIDIA's Turing whitepaper, reference board, copied in a public repository",
    "rtx-3060-12gb": "https://sysrqmts.com/ru/gpus/compare/nvidia-geforce-rtx-3060-vs-nvidia-rtx-a6000",
    "rtx-3070": "https://huggingface.co/datasets/Fdddhhhill/Advanced_AI_GPU_Benchmark_Dataset.csv",
    "rtx-3080-10gb": "https://huggingface.co/datasets/Fdddhhhill/Advanced_AI_GPU_Benchmark_Dataset.csv",
    "rtx-3090": "NVIDIA's GA102 whitepaper, quoted in public notes",
    "rtx-4080": "https://calwoo.github.io/notes/concepts/deep-learning-engineering/nvidia-gpu-hardware",
    "rtx-4090": "NVIDIA's Ada whitepaper, V2.1, appendix A, quoted in public notes",
    "rtx-5090": "https://www.codesota.com/hardware/rtx-5090",
    "a6000": "NVIDIA's GA102 whitepaper, V2, quoted in public code; "
    "https://sysrqmts.com/tr/gpus/compare/nvidia-a16-pcie-vs-nvidia-rtx-a6000",
    "rtx-6000-ada": "https://www.grafikkarten.com/de/news/nvidia-rtx-6000-grafikkarte-der-ada-generation",
    "rtx-pro-6000": "https://hmc-tech.com/gpu/nvidia-rtx-pro-6000-blackwell-vs-amd-radeon-pro-duo-polaris",
    "t4": "https://sysrqmts.com/es/gpus/compare/nvidia-tesla-t4-vs-nvidia-tesla-v100-sxm3-32-gb",
    "v100-16gb": "NVIDIA's A100 whitepaper, comparison of data center GPUs, copied in public repositories",
    "v100-32gb": "NVIDIA's A100 whitepaper, comparison of data center GPUs, copied in public repositories",
    "a10": "https://github.com/Lightning-AI/pytorch-lightning/blob/master/src/lightning/fabric/utilities/throughput.py",
    "a40": "https://www.ecer.com/corp/details-uuuedqa-p1bsay9-multi-display-setups-supported-by-48gb-gddr6-ecc-memory-"
    "nvidia-a40-gpu-and-vga-outputs.html",
    "l4": "https://store.sourcecode.com/en-us/bg-bucket-compare/125/9820; https://grokipedia.com/page/NVIDIA_L4_vs_L40S",
    "l40": "https://www.mullet.se/product.html?product_id=355414",
    "l40s": "https://www.mullet.se/product.html?product_id=355414",
    "a100-40gb": "NVIDIA's A100 whitepaper, comparison of data center GPUs, copied in public repositories",
    "a100-80gb": "https://github.com/mli/transformers-benchmarks; NVIDIA's A100 whitepaper",
    "h100-pcie": "https://archive-lib.hpctech.co.jp/gpuproduct/nvidia-h100.html",
    "h100-80gb": "https://archive-lib.hpctech.co.jp/gpuproduct/nvidia-h100.html",
    "gh200-96gb": "https://github.com/stas00/ml-engineering/blob/master/compute/accelerator/README.md",
    "h200": "https://hmc-tech.com/gpu/nvidia-h100-vs-nvidia-h200-sxm-vs-nvidia-gb200",
    "b200": "NVIDIA's Blackwell architecture technical brief (2024)",
}

ALIASES = {
    "a100": "a100-80gb",
    "gh200": "gh200-96gb",
    "h100": "h100-80gb",
    "h100-sxm": "h100-80gb",
    "h200-sxm": "h200",
    "rtx-3060": "rtx-3060-12gb",
    "rtx-3080": "rtx-3080-10gb",
    "rtx-a6000": "a6000",
    "v100": "v100-16gb",
}
"""Other names of chips of the catalog: where a chip comes in several sizes, the common one."""


def find_chip(name: str, chips: Mapping[str, Chip]) -> Chip:
    """Return a chip by its name or alias; raises ``InvalidRequestError`` with similar names.

    ``RTX 4090``, ``rtx4090`` and ``NVIDIA GeForce RTX 4090`` are all ``rtx-4090``.
    """
    key = name.lower()
    squeezed = {_squeezed(known): ALIASES.get(known, known) for known in (*ALIASES, *chips)}
    chip = chips.get(key) or chips.get(squeezed.get(_squeezed(key), key))
    if chip is None:
        hints = [did_you_mean(key, chips), f"known are {', '.join(chips)}; or describe it in a file for --gpu-spec"]
        raise InvalidRequestError(f"--gpu {name!r} is not known", " ".join(filter(None, hints)))
    return chip


def _squeezed(name: str) -> str:
    """Return a name without its maker and without what separates its parts."""
    words = re.split(r"[\s_-]+", name.lower())
    return "".join(word for word in words if word not in ("nvidia", "geforce"))


_NAMES_OF_DEVICES = {
    "nvidia geforce rtx 2080 ti": "rtx-2080-ti",
    "nvidia geforce rtx 3070": "rtx-3070",
    "nvidia geforce rtx 3090": "rtx-3090",
    "nvidia geforce rtx 4070": "rtx-4070",
    "nvidia geforce rtx 4080": "rtx-4080",
    "nvidia geforce rtx 4090": "rtx-4090",
    "nvidia geforce rtx 5070 ti": "rtx-5070-ti",
    "nvidia geforce rtx 5080": "rtx-5080",
    "nvidia geforce rtx 5090": "rtx-5090",
    "nvidia rtx a6000": "a6000",
    "nvidia rtx 6000 ada generation": "rtx-6000-ada",
    "nvidia rtx pro 6000 blackwell workstation edition": "rtx-pro-6000",
    "tesla t4": "t4",
    "tesla v100-sxm2-16gb": "v100-16gb",
    "tesla v100-sxm2-32gb": "v100-32gb",
    "nvidia a10": "a10",
    "nvidia a40": "a40",
    "nvidia l4": "l4",
    "nvidia l40": "l40",
    "nvidia l40s": "l40s",
    "nvidia a100-sxm4-40gb": "a100-40gb",
    "nvidia a100-sxm4-80gb": "a100-80gb",
    "nvidia h100 pcie": "h100-pcie",
    "nvidia h100 80gb hbm3": "h100-80gb",
    "nvidia h100 nvl": "h100-nvl",
    "nvidia gh200 480gb": "gh200-96gb",
    "nvidia h200": "h200",
    "nvidia b200": "b200",
}


def chip_of_device(name: str) -> Chip | None:
    """Return the chip of the catalog that a driver calls by this name; ``None`` where there is none."""
    key = _NAMES_OF_DEVICES.get(name.lower())
    return CHIPS[key] if key is not None else None


_SPEC_EXAMPLE = (
    'write e.g. {"my-gpu": {"memory": "24GiB", "capability": "8.9", "multiprocessors": 128, "half_tflops": 165, '
    '"tf32_tflops": 83, "fp32_tflops": 83, "gigabytes_per_second": 1008, "watts": 450}}'
)
_SPEC_FIELDS = frozenset(
    ("memory", "capability", "multiprocessors", "threads_per_multiprocessor", "half_tflops", "tf32_tflops")
) | {"fp32_tflops", "gigabytes_per_second", "watts", "nvlink_gigabytes_per_second"}

_SPEC_NEEDED = (
    "memory",
    "capability",
    "multiprocessors",
    "half_tflops",
    "fp32_tflops",
    "gigabytes_per_second",
    "watts",
)


def read_chips(path: str) -> dict[str, Chip]:
    """Return the GPUs that a JSON file describes, by name. Raises ``InvalidRequestError`` for what is missing there."""
    document = read_table(f"--gpu-spec {path}", path, _SPEC_EXAMPLE)
    return {name.lower(): _read_chip(path, name, figures) for name, figures in document.items()}


def read_table(where: str, path: str, hint: str) -> dict[str, Any]:
    """Return what a JSON file says of GPUs, by name; raises ``InvalidRequestError`` where it says nothing."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidRequestError(f"{where}: {error.strerror}", hint) from error
    except ValueError as error:
        raise InvalidRequestError(f"{where} is not JSON: {error}", hint) from error
    if not isinstance(document, dict) or not document:
        raise InvalidRequestError(f"{where} names no GPU", hint)
    return document


def _read_chip(path: str, name: str, figures: Any) -> Chip:
    where = f"--gpu-spec {path}: {name}"
    if not isinstance(figures, dict):
        raise InvalidRequestError(f"{where} has no figures", _SPEC_EXAMPLE)
    unknown = sorted(set(figures) - _SPEC_FIELDS)
    if unknown:
        names = ", ".join(sorted(_SPEC_FIELDS))
        raise InvalidRequestError(f"{where}: {unknown[0]!r} is not known", f"known are {names}")

    missing = [field for field in _SPEC_NEEDED if figures.get(field) is None]
    if missing:
        raise InvalidRequestError(f"{where} has no {', no '.join(missing)}", _SPEC_EXAMPLE)

    def number(field: str, default: float | None = None) -> float:
        value = figures.get(field, default)
        if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < 1e9:
            raise InvalidRequestError(f"{where}: {field} is {value!r}, not a number above 0", _SPEC_EXAMPLE)
        return float(value)

    try:
        memory_mib = parse_bytes(str(figures["memory"])) // MIB
    except (ValueError, InvalidRequestError) as error:
        raise InvalidRequestError(f"{where}: memory: {error}", _SPEC_EXAMPLE) from error
    try:
        major, _, minor = str(figures["capability"]).partition(".")
        capability = int(major), int(minor or 0)
    except ValueError as error:
        problem = f"{where}: capability is {figures['capability']!r}, not a compute capability"
        raise InvalidRequestError(problem, _SPEC_EXAMPLE) from error
    tf32 = number("tf32_tflops") if figures.get("tf32_tflops") is not None else None
    has_nvlink = figures.get("nvlink_gigabytes_per_second") is not None
    return _chip(
        name.lower(),
        memory_mib,
        capability,
        int(number("multiprocessors")),
        # What all but data centre GPUs have.
        int(number("threads_per_multiprocessor", 1536)),
        (number("half_tflops"), tf32, number("fp32_tflops")),
        number("gigabytes_per_second"),
        int(number("watts")),
        f"as given in {path}",
        _nvlink(number("nvlink_gigabytes_per_second")) if has_nvlink else PCIE_4,
    )
