"""``autopar models`` and ``autopar clusters``: bundled names."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from autopar.cli.console import Console, seconds, size

if TYPE_CHECKING:
    from autopar.cost_models.hardware.cluster import Cluster


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Lists what the command is named after."""
    return _models(console) if arguments.command == "models" else _clusters(console)


def _models(console: Console) -> int:
    from autopar.capture.models import bundled_models

    rows = {name: entry.description for name, entry in bundled_models().items()}
    console.table("Models: `autopar plan NAME --cluster ...`", ("name", "what"), rows.items())
    console.document({"models": [{"name": name, "description": text} for name, text in rows.items()]})
    return 0


def _clusters(console: Console) -> int:
    from autopar.cost_models.hardware.cluster import Cluster
    from autopar.cost_models.hardware.cluster_file import presets

    clusters = {name: Cluster.parse(name) for name in presets()}
    rows = [
        (
            f"{name}:{'processes' if name == 'local' else 'nodes'}",
            one.size,
            one.device.name,
            f"{max(map(one.device.peak_flops_per_second, ('bfloat16', 'float16'))) / 1e12:.4g}",
            size(one.device.memory_bytes),
            f"{one.device.bandwidth_bytes_per_second / 1e9:.4g}",
        )
        for name, one in clusters.items()
    ]
    header = ("name", "devices each", "device", "16-bit TFLOP/s", "memory", "GB/s")
    console.table("Clusters: join several with +, as in dgx-h100:2+dgx-a100:2", header, rows)
    levels = [(name if row == _levels(one)[0] else "", *row) for name, one in clusters.items() for row in _levels(one)]
    console.table(
        "Link levels, per device and direction", ("cluster", "level", "joins", "GB/s", "latency", "small messages"), levels
    )
    console.document({"clusters": [{**cluster.to_dict(), "name": name} for name, cluster in clusters.items()]})
    return 0


def _levels(cluster: Cluster) -> list[tuple[str, str, str, str, str]]:
    """Return the rows of the link levels: its name, the devices that it joins, bandwidth, latency, low-latency protocol; then
    host and NVMe."""
    out = []
    for index, link in enumerate(cluster.links):
        joins = (
            f"{link.devices} ({link.kind})" if index < len(cluster.links) - 1 or len(cluster.links) == 1 else f"all ({link.kind})"
        )
        small = f"{link.low_latency_bandwidth_bytes_per_second / 1e9:.4g} GB/s, {seconds(link.low_latency_seconds)}"
        rate = f"{link.bandwidth_bytes_per_second / 1e9:.4g}"
        none = not link.low_latency_bandwidth_bytes_per_second
        out.append((link.name, joins, rate, seconds(link.latency_seconds), "-" if none else small))
    for store in (cluster.host, cluster.nvme):
        if store is not None:
            rates = f"{store.read_bytes_per_second / 1e9:.4g} in, {store.write_bytes_per_second / 1e9:.4g} out"
            out.append((store.name, f"{size(store.capacity_bytes)} for a device", rates, seconds(store.latency_seconds), "-"))
    return out
