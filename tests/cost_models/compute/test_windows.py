"""Attention in windows of images (Swin, ViTDet, SAM) by its roofline: within 1.5 times, on two generations of GPUs.

The roofline is the slower of memory (what an ideal kernel reads and writes, at the rate that streams reach) and of arithmetic on
whole tiles of 64 queries and 64 keys, at the rate that heads of this size reach in long sequences."""

from __future__ import annotations

from math import ceil

import pytest
from support.models.handwritten_blocks import Builder

from autopar.cost_models.compute.kernels import attention_efficiency, product_efficiency
from autopar.cost_models.compute.operations import profile, seconds_and_flops
from autopar.cost_models.hardware.cluster import Cluster
from autopar.ir.graph import Block
from autopar.ir.placement import Invariant
from autopar.ir.plan import NodePlan

I = Invariant()  # noqa: E741
DEVICES = {name: Cluster.parse(f"{name}:1").device for name in ("dgx-a100", "dgx-h100")}
WINDOWS = [
    (8192, 3, 49, 32), (2048, 6, 49, 32), (512, 12, 49, 32), (128, 24, 49, 32),  # Swin-T, four stages, 128 images
    (2048, 6, 144, 32), (512, 12, 144, 32), (128, 24, 144, 32),  # Swin-L at 384, 32 images
    (2048, 6, 64, 32), (512, 12, 256, 32),  # Swin v2
    (800, 12, 196, 64), (400, 16, 196, 80),  # ViTDet-B, SAM's ViT-H
]  # fmt: skip
"""Windows of a batch, heads, tokens of a window, size of a head."""


def attention(windows: int, heads: int, tokens: int, head: int) -> Block:
    b = Builder("One", dtype="bfloat16")
    operands = [b.parameter(name, (windows, heads, tokens, head)) for name in ("q", "k", "v")]
    bias = b.parameter("bias", (1, heads, tokens, tokens))
    shape = (windows, heads, tokens, head)
    return b.block(b.op("aten.scaled_dot_product_attention", *operands, bias, shape=shape, name="out"))


def product(windows: int, heads: int, tokens: int, head: int, scores: bool) -> Block:
    """Where the model writes attention out: scores, or values."""
    b, count = Builder("One", dtype="bfloat16"), windows * heads
    inner, columns = (head, tokens) if scores else (tokens, head)
    x, y = b.parameter("x", (count, tokens, inner)), b.parameter("y", (count, inner, columns))
    return b.block(b.op("aten.bmm", x, y, shape=(count, tokens, columns), name="out"))


def whole(block: Block) -> NodePlan:
    return NodePlan("out", ((I,),) * len(block.nodes[0].operands()), ((I,),), ("redundant",))


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize("shape", WINDOWS, ids=str)
def test_windowed_attention_is_near_its_roofline(shape: tuple[int, int, int, int], device) -> None:  # type: ignore[no-untyped-def]
    *_, tokens, head = shape
    block = attention(*shape)
    known = profile(block.nodes[0], block.values(), 1)
    forward, backward, *flops = seconds_and_flops(known, whole(block), (1,), device)
    stream = device.bandwidth_bytes_per_second * device.bandwidth_fraction
    tensor, bias = known.result_bytes[0], known.operand_bytes[3]
    moved = 4 * tensor + bias, 9 * tensor + 2 * bias  # q, k, v, out; and out's gradient, three gradients, that of q in float32
    padded = (ceil(tokens / 64) * 64 / tokens) ** 2
    for found, number, total, again in zip((forward, backward), flops, moved, (False, True), strict=True):
        rate = device.peak_flops_per_second("bfloat16") * device.attention_fraction
        rate *= attention_efficiency(2**20, head, again, True)
        roofline = max(total / stream, padded * number / rate, device.launch_seconds)
        assert roofline / 1.5 < found < 1.5 * roofline, (found / roofline, total / stream, padded * number / rate)


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize("scores", [True, False])
@pytest.mark.parametrize("shape", [shape for shape in WINDOWS if shape[2] % 8 == 0], ids=str)
def test_its_products_are_near_their_roofline(shape: tuple[int, int, int, int], scores: bool, device) -> None:  # type: ignore[no-untyped-def]
    """Memory, or whole tiles at the rate of the smallest tile. Rows that do not begin at multiples of 16 bytes (windows of 49 and
    196) are priced on the vector units, 3 to 12 times their roofline (`kernels.product_dtype`)."""
    windows, heads, tokens, head = shape
    block = product(*shape, scores)
    known = profile(block.nodes[0], block.values(), 1)
    found, _, flops, _ = seconds_and_flops(known, whole(block), (1,), device)
    stream = device.bandwidth_bytes_per_second * device.bandwidth_fraction
    moved = (sum(known.operand_bytes) + sum(known.result_bytes)) / stream
    columns, inner = (tokens, head) if scores else (head, tokens)
    padded = ceil(tokens / 64) * 64 / tokens * ceil(columns / 64) * 64 / columns
    rate = device.product_flops_per_second("bfloat16") * product_efficiency(1 << 20, 64, 64, inner, device.multiprocessors)
    roofline = max(moved, padded * flops / rate, device.launch_seconds)
    assert roofline / 1.5 < found < 1.5 * roofline, (found / roofline, moved, padded * flops / rate)
