"""Commands of ``memo-sim`` about clusters: parse, call, render; ``cli.py`` adds them to the command line."""

from __future__ import annotations

from pathlib import Path

import click

from memo_sim.views.command_line import show


@click.command("datasheet")
@click.argument("figures", metavar="KEY=VALUE,...")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the profile: a .json to keep and edit.")
def datasheet_command(figures: str, output: Path | None) -> None:
    """Make a rough hardware profile from the figures of a GPU's data sheet.

    Pairs are joined by commas, or by spaces within quotes: tflops=165,memory=24,pcie=4x16. The options
    --from-datasheet of other commands take the same text; a written profile stands for --cluster.

    \b
    tflops        dense bf16 TFLOP/s with fp32 accumulation, without sparsity
    memory        GiB of one board
    pcie          generation x lanes: 4x16
    bandwidth     GB/s of the device's memory [in proportion to tflops]
    fp32          TFLOP/s without tensor cores [in proportion to tflops]
    nvlink        GB/s of all NVLinks of a device, both directions together [none]
    p2p           yes or no: boards reach each other's memory over PCIe [no]
    uplink        boards that share one PCIe link to the host [1]
    devices       boards of a node [8]
    nodes         nodes [1]
    network-gbps  Gb/s of one network card [none]
    cards         network cards of a node [1]
    host          GiB of a node's host memory [in proportion to memory]
    like          a100, h100 or b200: whose fractions of peak are taken [a100]
    generation    the architecture's name
    name          the profile's name [datasheet]

    a100 is like chips whose tensor cores work as Ampere's do (Ampere, Ada, GeForce and RTX PRO Blackwell), h100 like
    Hopper's, b200 like data-center Blackwell's. With several nodes, or a network, the cluster is written beside the
    profile: NAME.cluster.json.
    """
    from memo_sim.contract.catalog import cluster_from_datasheet
    from memo_sim.contract.codec import check_distinct, check_writable, write
    from memo_sim.contract.errors import UsageError
    from memo_sim.contract.peaks import warnings_about
    from memo_sim.views.datasheet_table import datasheet_table
    from memo_sim.views.text_table import warning_lines

    beside = output.with_name(f"{output.stem}.cluster.json") if output else None
    if output is not None and beside is not None:
        if output.suffix != ".json":
            raise UsageError("a profile is a JSON file", got=str(output), wanted="a name that ends in .json")
        check_writable(output)
        check_writable(beside)
        check_distinct([output, beside])
    cluster, hardware = cluster_from_datasheet(figures)
    for block in warning_lines(warnings_about(hardware, {})):
        show(block + "\n")
    show(datasheet_table(cluster, hardware))
    if output is None or beside is None:
        return
    write(output, hardware)
    show(f"\nwrote {output}: --cluster {output} is one node of {hardware.devices}")
    if cluster.network is not None:
        import msgspec

        write(beside, msgspec.structs.replace(cluster, hardware=output.name))
        show(f"wrote {beside}: --cluster {beside} is {cluster.nodes} x {cluster.devices_per_node} with its network")
