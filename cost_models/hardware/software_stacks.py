"""A cluster as a training framework uses it: what its kernels reach, what it overlaps, how it lays out state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import isclose
from typing import Any

from autopar.cost_models.hardware.bottleneck import bottleneck_device
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.device_specs import Device, Link
from autopar.cost_models.hardware.mesh_links import has_symmetric_memory
from autopar.cost_models.hardware.software_traits import Overlap
from autopar.cost_models.hardware.stack_entries import (
    DEFAULT_STACK,
    FIELDS,
    SoftwareStack,
    host_launch_seconds,
    planner_fractions,
    software_stacks,
    stack_for,
    state_layouts,
)

Links = tuple[Link, ...]


def with_compilation(cluster: Cluster, compiled: bool) -> Cluster:
    """Return the cluster as our own programs use it, compiled or in eager mode: with the fractions of that on devices that have
    those of our programs, or one share of them all (as ``autopar tune`` writes it); where a device has fractions of its own, only
    the fusion of kernels changes."""
    if cluster.device.fused != compiled:
        cluster = _on_each_device(cluster, lambda device, links: (_with_fusion(device, compiled), links))
    overlap = _with_compiled_overlap(cluster.overlap, cluster, compiled)
    return cluster if cluster.overlap == overlap else replace(cluster, overlap=overlap)


def _with_compiled_overlap(overlap: Overlap, cluster: Cluster, compiled: bool) -> Overlap:
    pieces = compiled and (has_symmetric_memory(cluster) or overlap.async_tp_by_messages)
    return replace(overlap, weight_gradients=compiled, async_tensor_parallel=pieces)


def _on_each_device(cluster: Cluster, change: Callable[[Device, Links], tuple[Device, Links]]) -> Cluster:
    """Return the cluster with its devices and links changed, those of each group of nodes by the group's device."""
    groups = []
    for each in cluster.groups:
        device, links = change(each.device, each.links)
        groups.append(replace(each, device=device, links=links))
    device, links = change(cluster.device, cluster.links)
    if groups:
        device = bottleneck_device([each.device for each in groups])
    return replace(cluster, device=device, links=links, groups=tuple(groups))


def _with_fusion(device: Device, compiled: bool) -> Device:
    before, after = (planner_fractions(device.generation, each) for each in (not compiled, compiled))
    shares = [getattr(device, name) / fraction for name, fraction in before.items()]
    if any(not isclose(share, shares[0]) for share in shares):
        return replace(device, fused=compiled)
    fractions: dict[str, Any] = {name: after[name] * share for name, share in zip(before, shares, strict=True)}
    return replace(device, **fractions, fused=compiled)


def with_stack(
    cluster: Cluster,
    name: str = DEFAULT_STACK,
    *,
    compiled: bool = False,
    async_tp: bool | None = None,
    ep_overlap: bool | None = None,
    constants: Mapping[str, float] | None = None,
    graphs: bool = False,
) -> Cluster:
    """Return the cluster as software `name` uses it, in eager mode or compiled; with its own fractions where nothing is known of
    the stack on this device generation. `async_tp` and `ep_overlap`: whether this run overlaps collectives of its tensor axis, or
    all-to-alls of its experts (None: the stack's default). `constants` replace those of the file. `graphs`: CUDA graphs are
    replayed, and the host is ahead. Contention is the cluster's."""
    given = None if constants is None else SoftwareStack(name, "", tuple(constants.items()), "")

    def used(device: Device, links: Links) -> tuple[Device, Links]:
        stack = given or stack_for(name, device.generation, compiled)
        own = dict(stack.constants) if stack is not None else {}
        fractions: dict[str, Any] = {FIELDS[each]: own[each] for each in own if each in FIELDS}
        launch = 0.0 if graphs else host_launch_seconds().get(name, device.host_launch_seconds)
        scaled = tuple(link.scaled(own.get("network", 1.0)) for link in links)
        return replace(device, **fractions, fused=compiled, host_launch_seconds=launch), scaled

    overlap = software_stacks()[1].get(name, cluster.overlap)
    overlap = replace(
        overlap,
        contention=cluster.overlap.contention,
        model_parallel=overlap.model_parallel if async_tp is None else async_tp,
        expert_dispatch=overlap.expert_dispatch if ep_overlap is None else ep_overlap,
    )
    overlap = _with_compiled_overlap(overlap, cluster, compiled and name == DEFAULT_STACK)
    if async_tp is not None:  # the run says what it overlapped of its tensor axis: all, or nothing
        overlap = replace(overlap, async_tensor_parallel=False)
    layout = state_layouts().get(name, cluster.state_layout)
    return replace(_on_each_device(cluster, used), overlap=overlap, state_layout=layout)
