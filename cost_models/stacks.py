"""What a software stack reaches on a device generation: at most three constants each, from ``stacks.yaml``.

The physics is in the other files; these constants say which share of it a stack's kernels and launches reach. They were fitted
(``tests/benchmarks/fit_stacks.py``) on published runs, never on a single row or source; the file says on how many.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from autopar.cost_models.hardware import Cluster
from autopar.cost_models.keeping import keepings
from autopar.cost_models.overlap import Overlap
from autopar.errors import ClusterError

CONSTANTS = ("products", "streams", "attention", "network")
"""Shares of the peak that large matrix products and long attention reach, share of the memory bandwidth that streaming kernels
reach, and the factor on every link's bandwidth. A stack may have three of them; the rest is the cluster's own."""

MOST = 3
DEFAULT = "autopar"


@dataclass(frozen=True, slots=True)
class Stack:
    """One software stack on one device generation."""

    name: str
    generation: str
    constants: tuple[tuple[str, float], ...]
    how: str

    def applied(self, cluster: Cluster, compiled: bool = False) -> Cluster:
        """The cluster with these constants in place of its own; `compiled`: streaming operations run as one kernel a chain."""
        given = dict(self.constants)
        device = cluster.device
        device = replace(
            device,
            matmul_fraction=given.get("products", device.matmul_fraction),
            bandwidth_fraction=given.get("streams", device.bandwidth_fraction),
            attention_fraction=given.get("attention", device.attention_fraction),
            fused=compiled,
        )
        share = given.get("network", 1.0)
        links = tuple(link.scaled(share) for link in cluster.links)
        return replace(cluster, device=device, links=links)


@lru_cache(maxsize=1)
def stacks() -> tuple[tuple[Stack, ...], Mapping[str, Overlap]]:
    """All entries, and per stack what its step hides (a fact of the software, not fitted). ClusterError where one has more than
    three constants."""
    data = yaml.safe_load((Path(__file__).parent / "stacks.yaml").read_text())
    entries = tuple(_stack(entry) for entry in data["stacks"])
    return entries, {name: Overlap.from_dict(given) for name, given in data["overlap"].items()}


def _stack(entry: Mapping[str, Any]) -> Stack:
    constants = tuple((name, float(entry[name])) for name in CONSTANTS if name in entry)
    name = f"{entry['stack']} on {entry['generation']}"
    if len(constants) > MOST:
        raise ClusterError(f"stacks.yaml: {name} has {len(constants)} constants; at most {MOST} are allowed")
    if not entry.get("how"):
        raise ClusterError(f"stacks.yaml: {name} does not say how its constants were obtained")
    return Stack(str(entry["stack"]), str(entry["generation"]), constants, str(entry["how"]))


def found(name: str, generation: str) -> Stack | None:
    """The nearest entry: this stack on this generation, else what any stack reaches there."""
    fit = [stack for stack in stacks()[0] if stack.generation == generation and stack.name in (name, DEFAULT)]
    return max(fit, key=lambda stack: stack.name == name, default=None)


def with_stack(
    cluster: Cluster,
    name: str = DEFAULT,
    *,
    compiled: bool = False,
    async_tp: bool | None = None,
    ep_overlap: bool | None = None,
    constants: Mapping[str, float] | None = None,
) -> Cluster:
    """The cluster as software `name` uses it, in eager mode or compiled; with its own fractions where nothing is known of the
    stack on this device generation. `async_tp` and `ep_overlap`: whether this run hides what its tensor axis or its experts
    exchange (None: as the stack does by itself). `constants` take the place of those of the file."""
    stack = found(name, cluster.device.generation) if constants is None else Stack(name, "", tuple(constants.items()), "")
    stack = stack or Stack(name, "", (), "")
    hidden = stacks()[1].get(name, cluster.overlap)
    hidden = replace(
        hidden,
        model_behind=hidden.model_behind if async_tp is None else async_tp,
        experts_behind=hidden.experts_behind if ep_overlap is None else ep_overlap,
    )
    return replace(stack.applied(cluster, compiled), overlap=hidden, keeping=keepings().get(name, cluster.keeping))
