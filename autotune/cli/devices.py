"""Run ``autotune devices`` and ``autotune models``: list what there is to train on, and the built-in catalog."""

from __future__ import annotations

import click

from autotune.cli.options import table_options
from autotune.cli.output import print_json, print_table


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


@click.command()
@table_options("models")
def models(as_json: bool) -> None:
    """List the built-in models, which need no download."""
    from autotune.core.units import format_count
    from autotune.models.catalog import entries
    from autotune.models.tasks import infer_task

    if as_json:
        print_json(
            [
                {
                    "name": entry.name,
                    "aliases": list(entry.aliases),
                    "parameters": entry.parameters,
                    "task": infer_task(entry.config),
                    "about": entry.about,
                }
                for entry in entries()
            ]
        )
        return
    rows = [(entry.name, format_count(entry.parameters), infer_task(entry.config), entry.about) for entry in entries()]
    print_table(("model", "parameters", "task", "about"), rows, right=("parameters",))
    click.echo("The part before a slash may be left out.", err=True)
    click.echo("A folder with a config.json or any model on the hub works as well.", err=True)
