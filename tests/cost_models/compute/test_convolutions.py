"""Convolutions by their roofline: halos as messages of rows, groups at the rate of vector units or of memory."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
from support.models.handwritten_blocks import Builder
from support.plans.mesh import mesh_of

from autopar.cost_models.comm.collectives import collective_seconds
from autopar.cost_models.compute.operations import NodeCost, node_cost, profile, seconds_and_flops
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.mesh_links import links_of_axis
from autopar.cost_models.step.block_costs import BlockCosts
from autopar.cost_models.step.block_memory import backward_working_bytes, forward_workspace_bytes
from autopar.ir.graph import Block
from autopar.ir.placement import Invariant, Replicate, Shard
from autopar.ir.plan import NodePlan
from autopar.operations.images.space import HALO, OWN
from autopar.rules.expand import block_strategies
from autopar.rules.registry import default_registry

R, I = Replicate(), Invariant()  # noqa: E741
CLUSTER, TP = Cluster.parse("dgx-h100:1"), mesh_of(dp=1, tp=8)


def convolution(image: tuple[int, ...], kernel: tuple[int, ...], padding: int, groups: int = 1) -> Block:
    b = Builder("One", dtype="bfloat16")
    x, w = b.parameter("x", image), b.parameter("w", kernel)
    shape = (image[0], kernel[0], *image[2:])
    rest = (None, (1, 1), (padding, padding), (1, 1), groups)
    return b.block(b.op("aten.conv2d", x, w, *rest, shape=shape, name="out"))  # type: ignore[arg-type]


def cut(block: Block) -> NodePlan:
    """Along space on the model axis."""
    found = block_strategies(block, 8, batch_axis=False, batch_is_symbolic=True, registry=default_registry())["out"]
    each = next(item for item in found if item.factor in (HALO, OWN))
    operands, results = (tuple((I if place == R else R, place) for place in side) for side in (each.operands, each.results))
    return NodePlan("out", operands, results, ("redundant", each.factor), each.function)


def cost(block: Block, plan: NodePlan) -> NodeCost:
    return node_cost(block.nodes[0], block.values(), plan, TP, 1, CLUSTER)


def whole(block: Block) -> NodePlan:
    count = len(block.nodes[0].operands())
    return NodePlan("out", ((I, I),) * count, ((I, I),), ("redundant",) * 2)


def test_a_halo_is_a_message_to_each_neighbour() -> None:
    block = convolution((1, 64, 1024, 1024), (64, 64, 3, 3), 1)
    found, one = cost(block, cut(block)), cost(block, whole(block))
    message = collective_seconds("point_to_point", 2 * 64 * 1 * 1024, links_of_axis(CLUSTER, TP, 1))
    assert message > 0
    assert found.forward_comm_seconds == (0, pytest.approx(2 * message))
    assert found.backward_comm_seconds == (0, pytest.approx(2 * message))
    assert found.forward_flops == one.forward_flops / 8
    assert one.forward_seconds / 8 < found.forward_seconds < one.forward_seconds / 3.9  # a copy beside the halo


def test_no_halo_costs_nothing() -> None:
    block = convolution((1, 64, 1024, 1024), (64, 64, 1, 1), 0)
    plan = cut(block)
    assert not plan.function and cost(block, plan).forward_comm_seconds == (0, 0)
    assert cost(block, plan).forward_seconds == pytest.approx(cost(block, whole(block)).forward_seconds / 8, rel=1e-3)


def test_a_padded_copy_is_there_while_it_runs() -> None:
    block = convolution((1, 64, 1024, 1024), (64, 64, 3, 3), 1)
    costs, plan = BlockCosts(block, TP, 1, CLUSTER), cut(block)
    shard, weight = 2 * 64 * 1024 * 1024 / 8, 2 * 64 * 64 * 9
    assert forward_workspace_bytes(costs, plan) == pytest.approx(shard, rel=0.01)
    assert backward_working_bytes(costs, plan) == pytest.approx(3 * shard + weight, rel=0.01)


@pytest.mark.parametrize(
    ("image", "kernel", "groups"),
    [((8, 96, 128, 128), (96, 1, 7, 7), 96), ((8, 512, 64, 64), (512, 1, 3, 3), 512), ((32, 256, 56, 56), (256, 8, 3, 3), 32),
     ((8, 512, 64, 64), (512, 256, 3, 3), 2)],
)  # fmt: skip
def test_groups_are_near_their_roofline(image: tuple[int, ...], kernel: tuple[int, ...], groups: int) -> None:
    """At the rates that the device reaches: wide groups on tensor cores, narrow ones on vector units or as memory streams."""
    block, device = convolution(image, kernel, kernel[2] // 2, groups), CLUSTER.device
    known = profile(block.nodes[0], block.values(), 1)
    assert known.forward_flops == 2 * prod(image) * prod(kernel[1:])
    moved = 2 * (2 * prod(image) + prod(kernel)) / (device.bandwidth_bytes_per_second * device.bandwidth_fraction)
    units = device.product_flops_per_second("bfloat16" if kernel[1] >= 64 else "float32")
    roofline = max(moved, known.forward_flops / units)
    assert 0.99 * roofline < cost(block, whole(block)).forward_seconds < 1.2 * roofline


@pytest.mark.parametrize(
    ("inputs", "outputs", "padded"),
    [(64, 64, 64 * 64), (24, 48, 32 * 48), (72, 24, 80 * 32), (24, 3, 32 * 16)],
)
def test_a_cpu_computes_whole_vectors_of_channels(inputs: int, outputs: int, padded: int) -> None:
    """As long as with the channels that fill the vectors (the device reads no memory here)."""
    block = convolution((4, inputs, 32, 32), (outputs, inputs, 3, 3), 1)
    device = replace(Cluster.parse("local:1").device, vector_bits=256, bandwidth_bytes_per_second=1e30, launch_seconds=0.0)
    known = profile(block.nodes[0], block.values(), 1)
    seconds = seconds_and_flops(known, whole(block), (1, 1), device)[0]
    rate = device.convolution_flops_per_second("bfloat16")
    assert seconds == pytest.approx(known.forward_flops / rate * padded / (inputs * outputs))


def test_shards_of_channels_are_padded_too() -> None:
    """Half of 48 channels take two thirds of them, on registers of 16."""
    block = convolution((4, 48, 32, 32), (48, 48, 3, 3), 1)
    device = replace(Cluster.parse("local:1").device, vector_bits=256, bandwidth_bytes_per_second=1e30, launch_seconds=0.0)
    known = profile(block.nodes[0], block.values(), 1)
    sharded = NodePlan("out", ((I, R), (I, Shard(0))), ((I, Shard(1)),), ("redundant", "o"))
    one, two = (seconds_and_flops(known, plan, (1, 2), device)[0] for plan in (whole(block), sharded))
    assert two == pytest.approx(one * 2 / 3)
