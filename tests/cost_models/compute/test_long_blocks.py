"""Blocks of hundreds of streaming operations, as of a model that is one block: what their kernels read, and what they save."""

from __future__ import annotations

import pytest
from support.models.handwritten_blocks import Builder

from autopar.cost_models.compute.fusion import with_fused_saves
from autopar.cost_models.compute.kernel_accesses import kernel_accesses
from autopar.cost_models.tensors.saved_tensors import saved_tensors
from autopar.ir.graph import Block

FULL = ("B", 8, 16)


def residual_stream(layers: int) -> Block:
    """A sum after each product, of the sum before it."""
    b = Builder("Stream")
    x = b.input("x", FULL)
    for index in range(layers):
        weight = b.parameter(f"w{index}.weight", (16, 16))
        product = b.op("aten.linear", b.op("aten.silu", x, shape=FULL), weight, shape=FULL)  # type: ignore[arg-type]
        x = b.op("aten.add.Tensor", x, product, shape=FULL)  # type: ignore[arg-type, assignment]
    return b.block(x)


def ladder(steps: int, rungs: int) -> Block:
    """Streaming operations in a row, each the sum of so many of what is before it; a product's kernel reads the last."""
    b = Builder("Ladder")
    first = x = b.input("x", FULL)
    for _ in range(steps):
        one, *others = (b.op("aten.silu", x, shape=FULL) for _ in range(rungs))
        for other in others:
            one = b.op("aten.add.Tensor", one, other, shape=FULL)  # type: ignore[arg-type]
        x = one  # type: ignore[assignment]
    product = b.op("aten.linear", first, b.parameter("w.weight", (16, 16)), shape=FULL)
    return b.block(b.op("aten.mul.Tensor", product, x, shape=FULL))  # type: ignore[arg-type]


def test_a_residual_stream_is_read_once_a_layer() -> None:
    """Not the n-th sum from the results of n products."""
    short, long = (sum(kernel_accesses(residual_stream(layers), 2).values()) for layers in (50, 100))
    assert long - short == pytest.approx(50 * 10, rel=0.05)


@pytest.mark.parametrize(("steps", "rungs"), [(3000, 1), (500, 2)])
def test_chains_of_streaming_operations(steps: int, rungs: int) -> None:
    """As deep as no recursion goes, and with more paths than can be walked."""
    few, many = ladder(3, rungs), ladder(steps, rungs)
    assert sum(kernel_accesses(many, 2).values()) == sum(kernel_accesses(few, 2).values())
    for block in (few, many):
        saved = with_fused_saves(block, {node.name: saved_tensors(node, block.values()) for node in block.nodes})
        assert sum(sum(each.operands) + sum(each.results) for each in saved.values()) < 3 + 2 * rungs
