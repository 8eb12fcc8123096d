"""A small graph with what is easily lost: buffers and their updates, no_grad, grouped heads, alternating layers, frozen state."""

from __future__ import annotations

from autopar.ir.graph import Block, Call, DType, Graph, Ref, Symbol, Value
from support.models.handwritten_blocks import Builder, llama_block


def rotary_prologue(hidden: int, head: int, classes: int, seq: int, dtype: str) -> Block:
    """input_ids (B, S) -> hidden, cos, sin; the frequencies are a buffer, read without a gradient."""
    b = Builder("Prologue", dtype)
    ids = b.input("input_ids", ("B", seq), "int64")
    words = b.op("aten.embedding", b.parameter("embed.weight", (classes, hidden)), ids, shape=("B", seq, hidden), name="words")
    frequencies = b.parameter("inv_freq", (head // 2,), buffer=True)
    places = b.op("aten.arange", seq, shape=(seq,), dtype="int64", no_grad=True)
    column = b.op("aten.reshape", places, (seq, 1), shape=(seq, 1), dtype="int64", no_grad=True)
    wide = b.op("aten.to.dtype", column, DType(dtype), shape=(seq, 1), dtype=dtype, no_grad=True)
    angles = b.op("aten.mul.Tensor", wide, frequencies, shape=(seq, head // 2), no_grad=True)
    both = b.op("aten.cat", (angles, angles), -1, shape=(seq, head), no_grad=True)
    out = []
    for name in ("cos", "sin"):
        wave = b.op(f"aten.{name}", both, shape=(seq, head), no_grad=True)
        out.append(b.op("aten.unsqueeze", wave, 0, shape=(1, seq, head), no_grad=True, name=f"{name}_table"))
    return b.block(words, *out)  # type: ignore[arg-type]


def running_mean_layer(hidden: int, seq: int, dtype: str) -> Block:
    """Subtracts the mean over the batch and keeps a running one; has a scale that is not trained."""
    b = Builder("Centre", dtype)
    x = b.input("hidden", ("B", seq, hidden))
    kept = b.parameter("running", (hidden,), buffer=True)
    total = b.op("aten.sum.dim_IntList", x, (0, 1), shape=(hidden,))
    mean = b.op("aten.div.Tensor", total, Symbol(f"{seq}*B"), shape=(hidden,), name="mean")
    flat = b.op("aten.detach", mean, shape=(hidden,), differentiable=False)
    step = b.op("aten.mul.Tensor", flat, 0.1, shape=(hidden,), no_grad=True)
    old = b.op("aten.mul.Tensor", kept, 0.9, shape=(hidden,), no_grad=True)
    new = b.op("aten.add.Tensor", old, step, shape=(hidden,), no_grad=True, name="new")
    centred = b.op("aten.sub.Tensor", x, mean, shape=("B", seq, hidden))
    scaled = b.op("aten.mul.Tensor", centred, b.parameter("scale", (hidden,), trainable=False), shape=("B", seq, hidden))
    block = b.block(scaled)  # type: ignore[arg-type]
    assert isinstance(new, Ref)
    return Block(block.name, block.inputs, block.parameters, block.nodes, block.outputs, (("running", new.name),))


def head(hidden: int, classes: int, seq: int, dtype: str) -> Block:
    """Untied head; labels are shifted by one as Hugging Face does it."""
    b = Builder("Epilogue", dtype)
    x = b.input("hidden", ("B", seq, hidden))
    labels = b.input("labels", ("B", seq), "int64")
    logits = b.op("aten.linear", x, b.parameter("head.weight", (classes, hidden)), shape=("B", seq, classes))
    padded = b.op("aten.constant_pad_nd", labels, (0, 1), -100, shape=("B", seq + 1), dtype="int64", differentiable=False)
    target = b.op("aten.slice.Tensor", padded, 1, 1, 2**63 - 1, shape=("B", seq), dtype="int64", differentiable=False)
    total = b.op("ap.cross_entropy_sum", logits, target, -100, 0.0, shape=())
    count = b.op("ap.count_valid", target, -100, shape=(), differentiable=False)
    return b.block(b.op("aten.div.Tensor", total, count, shape=(), name="loss"))  # type: ignore[arg-type]


def mixed_graph(
    layers: int = 2, hidden: int = 16, classes: int = 32, seq: int = 8, dtype: str = "float64", batch: int = 8
) -> Graph:
    """Llama layers with a centring layer after each, cos and sin from a buffer: a loop of two blocks with constants."""
    heads, kv_heads = 4, 2
    blocks = (
        rotary_prologue(hidden, hidden // heads, classes, seq, dtype),
        llama_block(hidden, heads, kv_heads, 32, seq, dtype=dtype),
        running_mean_layer(hidden, seq, dtype),
        head(hidden, classes, seq, dtype),
    )
    calls = [Call("Prologue", "", ("input_ids",), ("h_0", "cos", "sin"), ("model.embed.weight", "model.inv_freq"))]
    for i in range(layers):
        for block, prefix, inputs, outputs in (
            (blocks[1], f"model.layers.{i}", (f"h_{i}", "cos", "sin"), (f"m_{i}",)),
            (blocks[2], f"model.centres.{i}", (f"m_{i}",), (f"h_{i + 1}",)),
        ):
            names = tuple(f"{prefix}.{parameter.path}" for parameter in block.parameters)
            calls.append(Call(block.name, prefix, inputs, outputs, names))
    calls.append(Call("Epilogue", "", (f"h_{layers}", "labels"), ("loss",), ("head.weight",)))
    inputs = (Value("input_ids", ("B", seq), "int64"), Value("labels", ("B", seq), "int64"))
    return Graph("mixed", inputs, blocks, tuple(calls), "loss", batch, "hand-written")
