"""Run ``autotune doctor``: check what searches need on this machine, and print what is wrong and how to mend it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

from autotune import __version__
from autotune.cli.options import table_options
from autotune.cli.output import print_json, print_lines
from autotune.core.code_interface import PROTECTED
from autotune.core.errors import AutotuneError, InvalidRequestError, NotReadyError
from autotune.core.schema import encode
from autotune.devices.health import Check, Diagnosis, disk_check, gpu_checks, host_checks
from autotune.devices.listing import list_devices
from autotune.space.features import OPTIONAL, require_compiler, version_of
from autotune.store.location import resolve_location, shown_location

# A choice: torch is imported in two seconds, and on a machine that does not answer the other checks still count.
_WAIT_SECONDS = 30.0
_HUB_SECONDS = 1.0
_PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
# NVIDIA, CUDA Toolkit release notes, "CUDA Toolkit and Minimum Required Driver Version for CUDA Minor Version
# Compatibility", Linux.
_LEAST_DRIVER = {"11": 450, "12": 525, "13": 580}


@click.command(short_help="Look at this machine and the installation.")
@table_options("doctor")
@click.pass_context
def doctor(ctx: click.Context, /, storage: str, as_json: bool) -> None:
    """Check what searches need on this machine: each line is ok, or says what is wrong and how to mend it.

    "note" costs speed or a choice; "wrong" keeps searches from starting or spoils what they measure.
    """
    # The look-up of a host name has no timeout, so it runs in a thread that need not end.
    is_reached: list[bool] = []
    hub_thread = threading.Thread(target=lambda: is_reached.append(_reaches_hub()), daemon=True)
    hub_thread.start()
    deadline = time.monotonic() + _HUB_SECONDS
    with ThreadPoolExecutor() as pool:
        torch, protection = pool.submit(_torch), pool.submit(_protection)
        python = Check("Python", "ok", f"{platform.python_version()} ({sys.executable})")
        checks = [python, *quick_checks(storage), *torch_checks(torch.result()), *_compilers(), _extras()]
        checks += [protection.result(), _database(storage)]
    hub_thread.join(max(0.0, deadline - time.monotonic()))
    checks.append(_hub(is_reached=True in is_reached))
    wrong = [check for check in checks if check.state == "wrong"]
    if as_json:
        print_json(encode(Diagnosis(not wrong, tuple(checks))))
        ctx.exit(NotReadyError.exit_code if wrong else 0)
    width = max(len(check.name) for check in checks)

    def lines(check: Check) -> Iterator[str]:
        yield f"{check.state:<5}  {check.name:<{width}}  {check.found}"
        if check.cure is not None:
            yield f"{'':<{width + 7}}  → {check.cure}"

    print_lines(line for check in checks for line in lines(check))
    if wrong:
        raise NotReadyError(f"wrong here: {', '.join(check.name for check in wrong)}", "the lines above say what to do")


def quick_checks(storage: str, uuids: Collection[str] | None = None) -> Iterator[Check]:
    """Yield the checks that start no process and use no network: the installation, the machine, the disk.

    ``uuids`` selects the GPUs: ``None`` means all, an empty list none.
    """
    yield from _installation()
    if uuids is None or uuids:
        yield from gpu_checks(uuids)
    yield from host_checks()
    if (folder := _folder_of(storage)) is not None:
        yield disk_check("disk", folder)
    yield disk_check("temporary files", Path(tempfile.gettempdir()))


def say_what_is_wrong(storage: str, uuids: Collection[str] | None) -> None:
    """Print the first problem on stderr that would spoil a search on these GPUs."""
    wrong = next((check for check in quick_checks(storage, uuids) if check.state == "wrong"), None)
    if wrong is not None:
        click.echo(f"autotune: {wrong.name}: {wrong.found}; {wrong.cure} (autotune doctor says more)", err=True)


def torch_checks(said: dict[str, Any]) -> Iterator[Check]:
    """Yield the check of torch on the GPUs that NVML lists; ``said`` is what ``_torch`` returned."""
    if "version" not in said:
        yield Check("torch", "wrong", said["error"], "install it again: pip install --force-reinstall torch")
        return
    # CUDA does not show a GPU that is split by MIG, only its instances.
    gpus = [device for device in list_devices() if device.kind == "cuda" and device.mig_uuids is None]
    cuda = said["cuda"]
    found = f"{said['version']}, {f'CUDA {cuda}' if cuda else 'without CUDA'}"
    if not gpus:
        yield Check("torch", "ok", found)
    elif cuda is None:
        cure = "install the one for CUDA that pytorch.org names for this driver"
        yield Check("torch", "wrong", f"{found}, and there are GPUs", cure)
    elif said["error"] is not None or not said["device_count"]:
        least = _LEAST_DRIVER.get(cuda.partition(".")[0])
        driver = (gpus[0].driver or "").partition(".")[0]
        is_old = least is not None and driver.isdecimal() and int(driver) < least
        cure = "nvidia-smi and python -c 'import torch; torch.zeros(1).cuda()' show the same: see to the driver"
        if is_old:
            cure = f"update the driver to {least} or newer, or install a torch for an older CUDA"
        yield Check("torch", "wrong", f"{found}: {said['error'] or 'it finds no GPU'}", cure)
    else:
        # Only now: torch does not know its architectures where CUDA did not start.
        for gpu in gpus:
            if gpu.capability and not _is_built_for(gpu.capability, said["architectures"]):
                number = ".".join(map(str, gpu.capability))
                cure = "install a torch that is built for it, as pytorch.org says"
                yield Check("torch", "wrong", f"{found} has no code for {gpu.name} (compute capability {number})", cure)
                return
        yield Check("torch", "ok", found)


def _is_built_for(capability: tuple[int, int], architectures: list[str]) -> bool:
    """Return whether code of these architectures runs on a GPU.

    CUDA programming guide, "Compute Capability": binary code (``sm_80``) runs on the same major version with the same
    or a higher minor one, PTX (``compute_80``) on all later ones, ``sm_90a`` on that one alone.
    """
    for architecture in architectures:
        kind, _, number = architecture.partition("_")
        digits = number.rstrip("af")
        if not digits.isdecimal():
            continue
        major, minor = int(digits[:-1]), int(digits[-1])
        # Code for one architecture alone, such as ``sm_90a``.
        if digits != number:
            if capability == (major, minor):
                return True
        elif (kind == "compute" or capability[0] == major) and capability >= (major, minor):
            return True
    return False


def _torch() -> dict[str, Any]:
    """Return what ``autotune.worker.doctor`` prints of torch and CUDA; only an ``error`` where its process failed."""
    command = [sys.executable, "-P", "-m", "autotune.worker.doctor"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_WAIT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"importing it and starting CUDA took more than {_WAIT_SECONDS:g} s"}
    lines = ended.stdout.splitlines()
    if lines:
        said: dict[str, Any] = json.loads(lines[-1])
        return said
    return {"error": f"its process ended with {ended.returncode} while it was imported"}


def _installation() -> Iterator[Check]:
    """Yield the installed version, and a conflict with another project of this name."""
    yield Check("autotune", "ok", __version__)
    other = next(iter(importlib.metadata.distributions(name="autotune")), None)
    if other is not None:
        found = f"autotune {other.version} of the package index is installed too, and its files mix with these"
        cure = "pip uninstall autotune, then pip install --force-reinstall traintune"
        yield Check("other project", "wrong", found, cure)


def _compilers() -> Iterator[Check]:
    """Yield the check whether this machine has the compilers that ``torch.compile`` needs."""
    try:
        require_compiler(list_devices()[0].kind, "torch.compile")
    except InvalidRequestError as error:
        yield Check("compiler", "note", error.message, error.hint)
        return
    triton = version_of("triton")
    yield Check("compiler", "ok", "there is one for torch.compile" + (f", Triton {triton}" if triton else ""))


def _extras() -> Check:
    """Return a check of optional packages and their versions."""
    versions = {package: version_of(package) for package in (*OPTIONAL, "fastapi", "psycopg", "ray", "mcp")}
    there = [f"{package} {version}" for package, version in versions.items() if version]
    missing = [package for package, version in versions.items() if not version]
    return Check("extras", "ok", f"{', '.join(there) or 'none'}; not installed: {', '.join(missing) or 'none'}")


def _protection() -> Check:
    """Return a check whether trials of the user's own code can be kept from writing the user's files."""
    from autotune.execution.oneshot import find_protection

    found = find_protection()
    if found.kind == "none":
        cure = "search your own code with --unprotected, in a folder that may be changed"
        return Check("your files", "note", f"{PROTECTED['none']} ({found.why_not_better})", cure)
    return Check("your files", "ok", PROTECTED[found.kind])


def _hub(*, is_reached: bool) -> Check:
    """Return a check whether models and data can be downloaded; ``is_reached``: the hub accepted a connection."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return Check("hub", "ok", "switched off (HF_HUB_OFFLINE): catalog models, folders and cached models work")
    if (proxy := next((name for name in _PROXIES if os.environ.get(name)), None)) is not None:
        return Check("hub", "ok", f"{constants.ENDPOINT} through {proxy}, which was not tried")
    if is_reached:
        return Check("hub", "ok", constants.ENDPOINT)
    cure = "HF_HUB_OFFLINE=1 keeps all from asking; catalog models, folders and cached models work"
    return Check("hub", "note", f"{constants.ENDPOINT} does not answer", cure)


def _reaches_hub() -> bool:
    """Return whether the hub accepts a connection."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    address = urlsplit(constants.ENDPOINT)
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), timeout=_HUB_SECONDS).close()
    except OSError:
        return False
    return True


def _folder_of(storage: str) -> Path | None:
    """Return the folder of the studies' SQLite file; ``None`` for a server's database, or an invalid location."""
    try:
        path = resolve_location(storage).path
    except AutotuneError:
        # The check of the database reports it.
        return None
    return None if path is None else path.parent


def _database(storage: str) -> Check:
    """Return a check whether the database of studies can be used, without changing it. A missing one is ok."""
    name = shown_location(storage)
    try:
        path = resolve_location(storage).path
        if path is not None and not path.exists():
            return Check("database", "ok", f"{name}, which the first search makes")
        # Imports Alembic.
        from autotune.store.opening import current_revision

        now, newest = current_revision(storage)
    except AutotuneError as error:
        return Check("database", "wrong", error.message, error.hint)
    if now is not None and now > newest:
        return Check("database", "wrong", f"{name} was written by a newer autotune ({now})", "install that version")
    if now is not None and now != newest:
        cure = "keep a copy if an earlier version is to read it; the next search, or autotune db upgrade, upgrades it"
        return Check("database", "note", f"{name} is of an earlier version (revision {now})", cure)
    return Check("database", "ok", name)
