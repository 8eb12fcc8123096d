"""Small graphs for the solver: blocks in a row, Llama layers, and graphs drawn at random."""

from __future__ import annotations

from random import Random

from autopar.ir.graph import Block, Call, Graph, Ref, Value
from support.models.handwritten_blocks import Builder, llama_block


def graph_of(blocks: tuple[Block, ...], order: tuple[str, ...], hidden: tuple[int | str, ...], batch: int, dtype: str) -> Graph:
    """Calls of one-input one-output blocks in a row; parameters are named after the call."""
    named = {block.name: block for block in blocks}
    calls = []
    for index, name in enumerate(order):
        out = "loss" if index == len(order) - 1 else f"h{index + 1}"
        parameters = tuple(f"c{index}.{parameter.path}" for parameter in named[name].parameters)
        calls.append(Call(name, f"c{index}", (f"h{index}",), (out,), parameters))
    return Graph("toy", (Value("h0", hidden, dtype, False),), blocks, tuple(calls), "loss", batch, "hand-written")


def llama_graph(layers: int = 2, batch: int = 32, seq: int = 8192, hidden: int = 4096, heads: int = 32, kv_heads: int = 8,
                ffn: int = 14336, dtype: str = "bfloat16") -> Graph:  # fmt: skip
    """A projection, Llama layers, and a sum."""
    layer = llama_block(hidden, heads, kv_heads, ffn, seq, dtype=dtype)
    full = ("B", seq, hidden)
    first = Builder("Prologue", dtype)
    x = first.input("features", ("B", seq, 64), differentiable=False)
    y = first.op("aten.linear", x, first.parameter("inner.weight", (hidden, 64)), shape=full, name="hidden")
    last = Builder("Epilogue", dtype)
    z = last.op("aten.linear", last.input("hidden", full), last.parameter("head.weight", (64, hidden)), shape=("B", seq, 64))
    end = last.block(last.op("aten.sum", z, shape=(), name="loss"))  # type: ignore[arg-type]
    calls = [Call("Prologue", "", ("features",), ("h0",), ("inner.weight",))]
    for i in range(layers):
        names = tuple(f"layers.{i}.{parameter.path}" for parameter in layer.parameters)
        calls.append(Call(layer.name, f"layers.{i}", (f"h{i}", "cos", "sin"), (f"h{i + 1}",), names))
    calls.append(Call("Epilogue", "", (f"h{layers}",), ("loss",), ("head.weight",)))
    angles = (1, seq, hidden // heads)
    inputs = (Value("features", ("B", seq, 64), dtype), Value("cos", angles, dtype), Value("sin", angles, dtype))
    return Graph("llama", inputs, (first.block(y), layer, end), tuple(calls), "loss", batch, "hand-written")  # type: ignore[arg-type]


def drawn_graph(seed: int, calls: int = 2) -> Graph:
    """A projection, two or three random operations as a repeated block, and a sum."""
    random = Random(seed)
    width, seq, dtype = random.choice((256, 512)), random.choice((128, 256)), "float32"
    full = ("B", seq, width)
    first = Builder("Prologue", dtype)
    x = first.input("x", full, differentiable=False)
    prologue = first.block(first.op("aten.linear", x, first.parameter("w.weight", (width, width)), shape=full, name="first"))  # type: ignore[arg-type]
    b = Builder("Middle", dtype)
    known: list[Ref] = [b.input("hidden", full)]
    for index in range(random.choice((1, 2))):
        op = random.choice(("aten.linear", "aten.silu", "aten.mul.Tensor", "aten.add.Tensor"))
        left, right = random.choice(known), random.choice(known)
        if op == "aten.linear":
            args: tuple[Ref, ...] = (left, b.parameter(f"w{index}.weight", (width, width)))
        else:
            args = (left,) if op == "aten.silu" else (left, right)
        known.append(b.op(op, *args, shape=full))  # type: ignore[arg-type]
    middle = b.block(known[-1])
    end = Builder("Epilogue", dtype)
    epilogue = end.block(end.op("aten.sum", end.input("hidden", full), shape=(), name="loss"))  # type: ignore[arg-type]
    return graph_of((prologue, middle, epilogue), ("Prologue", *["Middle"] * calls, "Epilogue"), full, 4, dtype)
