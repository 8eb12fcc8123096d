"""Attention in windows of images (Swin, ViTDet, SAM) by its roofline: within 1.5 times, on two generations of GPUs.

The roofline is the slower of memory (what an ideal kernel reads and writes, at the rate that streams reach) and of arithmetic on
whole tiles of 64 queries and 64 keys, at the rate that heads of this size reach in long sequences."""

from __future__ import annotations

from math import ceil

import pytest
from support.models.handwritten_blocks import Builder

from autopar.cost_models.compute.kernels import attention_efficiency, product_efficiency, product_flops_per_second
from autopar.cost_models.compute.operations import profile, seconds_and_flops
from autopar.cost_models.hardware.cluster import Cluster
from autopar.ir.graph import Block
from autopar.ir.placement import Invariant
from autopar.ir.plan import NodePlan

I = Invariant()  # noqa: E741
DEVICES = {name: Cluster.parse(f"{name}:1").device for name in ("dgx-a100", "dgx-h100")}
MORE = {name: Cluster.parse(f"{name}:1").device for name in ("dgx-a100-40", "dgx-h200", "dgx-b200", "mi300x")}
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


@pytest.mark.parametrize("device", (DEVICES | MORE).values(), ids=DEVICES | MORE)
@pytest.mark.parametrize("scores", [True, False])
@pytest.mark.parametrize("shape", WINDOWS, ids=str)
def test_its_products_are_near_their_roofline(shape: tuple[int, int, int, int], scores: bool, device) -> None:  # type: ignore[no-untyped-def]
    """Memory, or whole tiles of 64: on the tensor cores at the rate of such tiles; where rows do not begin at multiples of 16
    bytes (windows of 49 and 196) on the vector units, which small tiles and short inner dimensions do not keep waiting."""
    windows, heads, tokens, head = shape
    block = product(*shape, scores)
    known = profile(block.nodes[0], block.values(), 1)
    found, _, flops, _ = seconds_and_flops(known, whole(block), (1,), device)
    stream = device.bandwidth_bytes_per_second * device.bandwidth_fraction
    moved = (sum(known.operand_bytes) + sum(known.result_bytes)) / stream
    columns, inner = (tokens, head) if scores else (head, tokens)
    padded = ceil(tokens / 64) * 64 / tokens * ceil(columns / 64) * 64 / columns
    rate = product_flops_per_second(device, "bfloat16", aligned=False)
    if tokens % 8 == 0:
        rate = device.product_flops_per_second("bfloat16") * product_efficiency(1 << 20, 64, 64, inner, device.multiprocessors)
    roofline = max(moved, padded * flops / rate, device.launch_seconds)
    assert roofline / 1.5 < found < 1.5 * roofline, (found / roofline, moved, padded * flops / rate)


MEASURED = [
    ("float32", 1024, 128, 32, 476.4), ("float32", 1024, 128, 64, 560.8), ("float32", 1024, 128, 128, 731.7),
    ("float32", 1024, 128, 256, 1280.8), ("float32", 1024, 512, 16, 6066.0),
    ("float16", 1024, 128, 64, 216.2), ("float16", 1024, 128, 128, 291.5), ("float16", 1024, 128, 256, 437.0),
    ("float16", 1024, 512, 16, 1781.5), ("float16", 1024, 512, 32, 1858.3),  # pull request 387, column of plain torch
    ("float32", 384, 197, 64, 640.5), ("float32", 384, 197, 80, 692.4), ("float32", 384, 197, 88, 719.5),
    ("float32", 1024, 197, 80, 1700.6), ("float32", 1024, 197, 88, 1765.2),
    ("float16", 384, 197, 64, 679.8), ("float16", 384, 197, 80, 742.2), ("float16", 384, 197, 88, 851.8),
    ("float16", 1024, 197, 80, 1927.2), ("float16", 1024, 197, 88, 2221.3),  # pull request 587, column "eager"
]  # fmt: skip
"""Microseconds of the forward of attention written out (scaled queries, scores, softmax, values), one head, on an A100:
github.com/facebookresearch/xformers. Count, tokens, size of a head."""


@pytest.mark.parametrize(("dtype", "count", "tokens", "head", "microseconds"), MEASURED)
def test_attention_written_out_takes_what_was_measured(
    dtype: str, count: int, tokens: int, head: int, microseconds: float
) -> None:
    b = Builder("Written", dtype=dtype)
    q, k, v = (b.parameter(name, shape) for name, shape in zip("qkv", _written(count, tokens, head), strict=True))
    queries, square = (count, tokens, head), (count, tokens, tokens)
    scaled = b.op("aten.mul", q, 0.125, shape=queries)
    scores = b.op("aten.bmm", scaled, k, shape=square)
    block = b.block(b.op("aten.bmm", b.op("aten.softmax", scores, -1, shape=square), v, shape=queries))
    device, values = Cluster.parse("dgx-a100-40:1").device, block.values()
    known = [profile(node, values, 1) for node in block.nodes]
    plans = [NodePlan(node.name, ((I,),) * len(node.operands()), ((I,),), ("redundant",)) for node in block.nodes]
    found = 1e6 * sum(seconds_and_flops(each, plan, (1,), device)[0] for each, plan in zip(known, plans, strict=True))
    assert microseconds / 1.5 < found < 1.5 * microseconds, found / microseconds


def _written(count: int, tokens: int, head: int) -> tuple[tuple[int, int, int], ...]:
    return (count, tokens, head), (count, head, tokens), (count, tokens, head)
