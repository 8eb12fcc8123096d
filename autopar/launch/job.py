"""What a scheduler has to start: so many nodes, so many processes on each, a script."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import yaml

from autopar.cost_models.hardware.cluster import Cluster
from autopar.errors import AutoparError
from autopar.solve.space.grid import devices_per_node

PORT = 29500
"""The port of the first node, at which ranks meet."""

ENVIRONMENT: Mapping[str, str] = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
"""One thread a process, as plans are priced and torchrun does by default where there are several; lines of logs at once."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A run of `script` by torchrun on `nodes` nodes of `devices` processes each.

    name: of lower-case letters, digits and hyphens, as Kubernetes has them.
    device: its name, such as ``H100 SXM 80GB``; `kind`: ``cuda`` (ROCm's too) or ``cpu``.
    image: of a container; empty where none was named.
    """

    name: str
    nodes: int
    devices: int
    device: str
    kind: str
    script: tuple[str, ...]
    image: str = ""

    @property
    def torchrun(self) -> str:
        """The command of one node but for its own number and the address of the first one."""
        return f"torchrun --nnodes {self.nodes} --nproc-per-node {self.devices}"

    @property
    def resource(self) -> str:
        """The devices by the name that Kubernetes has for them."""
        if self.kind == "cpu":
            return "cpu"
        return "amd.com/gpu" if self.device.startswith("MI") else "nvidia.com/gpu"

    def require_image(self, scheduler: str) -> None:
        """Raise AutoparError where no image was named."""
        if not self.image:
            raise AutoparError(
                f"--for {scheduler} starts containers: name their image, which has torch, autopar and the script, by --image"
            )


Writer = Callable[[Launch], Mapping[str, str]]
"""From a job to the text of each file by its name."""


def job_of(cluster: Cluster, model: str, script: tuple[str, ...], *, name: str = "", image: str = "", devices: int = 0) -> Launch:
    """Return the job of a plan's cluster. `devices` of a node, where the cluster does not say it (0)."""
    if any(not part.isprintable() for part in (*script, image)):
        raise AutoparError("the script, its arguments and the image have to be printable characters")
    per_node = devices or node_devices(cluster)
    if per_node > cluster.size or cluster.size % per_node:
        raise AutoparError(
            f"{cluster.size} devices are no whole nodes of {per_node}: say how many a node has by --devices-per-node"
        )
    return Launch(
        _label(name or model), cluster.size // per_node, per_node, cluster.device.name, cluster.device.kind, script, image
    )


def node_devices(cluster: Cluster) -> int:
    """The devices of a node: of ``preset:nodes`` by that number (a rack of NVLink is several nodes), else those of the innermost
    links."""
    if len({group.device.name for group in cluster.groups}) > 1:
        raise AutoparError(f"the nodes of {cluster.name} are of several kinds, and a job has one: write it by hand")
    preset = _PRESET.fullmatch(cluster.name)
    if preset and cluster.device.kind != "cpu" and cluster.size % int(preset[1]) == 0:
        return cluster.size // int(preset[1])
    return min(devices_per_node(cluster), cluster.size)


_PRESET = re.compile(r"[\w-]+:([1-9]\d{0,5})", re.ASCII)


def _label(text: str) -> str:
    """A name that Kubernetes takes for hosts too, with the number of a node behind it."""
    label = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].rstrip("-")
    return label if label[:1].isalpha() else f"train-{label}".rstrip("-")


def yaml_text(head: str, *documents: Mapping[str, object]) -> str:
    """The documents of one YAML file below a comment."""
    return "\n".join(f"# {line}" for line in head.splitlines()) + "\n" + yaml.safe_dump_all(documents, sort_keys=False)
