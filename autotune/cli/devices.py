"""Run ``autotune devices``: list the GPUs, the CPU and the optional packages."""

from __future__ import annotations

import click

from autotune.cli.options import table_options
from autotune.cli.output import print_json


@click.command(short_help="List the devices and the optional packages.")
@table_options("devices")
def devices(as_json: bool) -> None:
    """List the devices (memory, driver, capability, precisions, other processes) and the optional packages."""
    from autotune.core.units import format_bytes
    from autotune.devices.listing import devices_document, list_devices
    from autotune.devices.nvml import nvml_problem
    from autotune.space.features import OPTIONAL, how_to_install, version_of

    listed = list_devices()
    problem = nvml_problem()
    packages = {package: version_of(package) for package in OPTIONAL}
    if as_json:
        print_json(devices_document(listed, problem, packages))
        return

    def size(size_bytes: int | None) -> str:
        return "unknown" if size_bytes is None else format_bytes(size_bytes)

    for device in listed:
        click.echo(f"{device.label}  {device.name}")
        if device.mig_uuids is not None:
            click.echo("  MIG         split into instances, which are devices of their own")
        if device.kind == "cuda":
            click.echo(f"  uuid        {device.uuid}")
        click.echo(
            f"  memory      {size(device.memory_total_bytes)} total, {size(device.memory_used_bytes)} used, "
            f"{size(device.memory_free_bytes)} free"
            + (f", {size(device.memory_reserved_bytes)} reserved by the driver" if device.memory_reserved_bytes else "")
        )
        if device.kind == "cuda":
            capability = ".".join(map(str, device.capability)) if device.capability else "unknown"
            click.echo(f"  driver      {device.driver or 'unknown'}, compute capability {capability}")
        click.echo(f"  precisions  {', '.join(device.precisions)}")
        for neighbour in device.neighbours:
            click.echo(f"  process     {neighbour.pid} {neighbour.name or '?'} holds {size(neighbour.used_bytes)}")
    click.echo("optional packages")
    for package, version in packages.items():
        click.echo(f"  {package:<12}  {version or f'not installed: {how_to_install(package)}'}")
    if problem:
        click.echo(f"NVML: {problem}", err=True)
    elif len(listed) == 1:
        click.echo("no GPU is visible to this process", err=True)
