"""``autopar models`` and ``autopar clusters``: bundled names."""

from __future__ import annotations

import argparse

from autopar.cli.output import Output, size


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Lists what the command is named after."""
    return _models(output) if arguments.command == "models" else _clusters(output)


def _models(output: Output) -> int:
    from autopar.capture.models import bundled

    rows = {name: entry.description for name, entry in bundled().items()}
    output.table("Models: `autopar plan NAME --cluster ...`", ("name", "what"), rows.items())
    output.document({"models": [{"name": name, "description": text} for name, text in rows.items()]})
    return 0


def _clusters(output: Output) -> int:
    from autopar.cost_models.hardware import Cluster, presets

    clusters = {name: Cluster.parse(name) for name in presets()}
    rows = [
        (f"{name}:{'processes' if name == 'local' else 'nodes'}", c.size, c.device.name, size(c.device.memory_bytes), _links(c))
        for name, c in clusters.items()
    ]
    output.table("Clusters", ("name", "devices each", "device", "memory", "links, GB/s per device"), rows)
    output.document({"clusters": [{**cluster.to_dict(), "name": name} for name, cluster in clusters.items()]})
    return 0


def _links(cluster: object) -> str:
    from autopar.cost_models.hardware import Cluster

    assert isinstance(cluster, Cluster)
    return ", ".join(f"{link.name} {link.bandwidth_bytes_per_second / 1e9:.4g}" for link in cluster.links)
