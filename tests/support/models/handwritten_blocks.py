"""Blocks written by hand in the contract's vocabulary: what capture would give for a Llama, a GPT-2 layer, a head with a loss.

block = llama_block(); graph = graph_of(gpt2_block(), layers=4)
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.dims import Dim, Shape
from autopar.ir.graph import Arg, Block, Call, DType, Graph, Node, Parameter, Ref, Symbol, Value, refs


class Builder:
    """Adds nodes one after another; a result is differentiable where an operand is, unless told otherwise."""

    def __init__(self, name: str, dtype: str = "float32") -> None:
        self.name, self.dtype = name, dtype
        self.values: dict[str, Value] = {}
        self.inputs: list[Value] = []
        self.parameters: list[Parameter] = []
        self.nodes: list[Node] = []

    def input(self, name: str, shape: Shape, dtype: str | None = None, differentiable: bool | None = None) -> Ref:
        dtype = dtype or self.dtype
        value = Value(name, shape, dtype, dtype.startswith(("float", "bfloat")) if differentiable is None else differentiable)
        self.values[name] = value
        self.inputs.append(value)
        return Ref(name)

    def parameter(self, path: str, shape: Shape, trainable: bool = True, buffer: bool = False) -> Ref:
        value = Value(path.replace(".", "_"), shape, self.dtype, trainable and not buffer)
        self.values[value.name] = value
        self.parameters.append(Parameter(value, path, trainable and not buffer, buffer))
        return Ref(value.name)

    def op(
        self,
        op: str,
        *args: Arg,
        shape: Shape | Sequence[Shape],
        name: str = "",
        dtype: str | None = None,
        differentiable: bool | None = None,
        no_grad: bool = False,
        **kwargs: Arg,
    ) -> Ref | tuple[Ref, ...]:
        """`shape` is one shape, or a list of shapes for several outputs."""
        many = isinstance(shape, list)
        shapes: list[Shape] = list(shape) if many else [tuple(shape)]  # type: ignore[arg-type]
        operands = [self.values[ref.name] for arg in (*args, *kwargs.values()) for ref in refs(arg)]
        dtype = dtype or next((value.dtype for value in operands if value.dtype.startswith(("float", "bfloat"))), self.dtype)
        flows = any(value.differentiable for value in operands) and not no_grad and dtype.startswith(("float", "bfloat"))
        flows = flows if differentiable is None else differentiable
        stem = name or f"{op.split('.')[1]}_{len(self.nodes)}"
        outputs = tuple(
            Value(f"{stem}_{index}" if many else stem, tuple(item), dtype, flows) for index, item in enumerate(shapes)
        )
        self.values.update((value.name, value) for value in outputs)
        self.nodes.append(Node(op, args, tuple(kwargs.items()), outputs, no_grad=no_grad))
        return tuple(Ref(value.name) for value in outputs) if many else Ref(outputs[0].name)

    def block(self, *outputs: Ref) -> Block:
        names = tuple(ref.name for ref in outputs)
        return Block(self.name, tuple(self.inputs), tuple(self.parameters), tuple(self.nodes), names)


def sizes(shape: Shape) -> tuple[Arg, ...]:
    """A shape as an argument."""
    return tuple(Symbol(dim) if isinstance(dim, str) else dim for dim in shape)


def rms_norm(b: Builder, x: Ref, weight: Ref, shape: Shape) -> Ref:
    """The norm as Hugging Face writes it."""
    square = b.op("aten.pow.Tensor_Scalar", x, 2, shape=shape)
    mean = b.op("aten.mean.dim", square, (-1,), True, shape=(*shape[:-1], 1))
    inverse = b.op("aten.rsqrt", b.op("aten.add.Tensor", mean, 1e-5, shape=(*shape[:-1], 1)), shape=(*shape[:-1], 1))
    normal = b.op("aten.mul.Tensor", x, inverse, shape=shape)
    return b.op("aten.mul.Tensor", weight, normal, shape=shape)  # type: ignore[return-value]


def rotary(b: Builder, x: Ref, cos: Ref, sin: Ref, shape: Shape) -> Ref:
    """``x * cos + rotate_half(x) * sin``."""
    half_dim = int(shape[-1]) // 2
    half = (*shape[:-1], half_dim)
    first = b.op("aten.slice.Tensor", x, 3, 0, half_dim, shape=half)
    second = b.op("aten.slice.Tensor", x, 3, half_dim, 2**63 - 1, shape=half)
    turned = b.op("aten.cat", (b.op("aten.neg", second, shape=half), first), -1, shape=shape)
    left = b.op("aten.mul.Tensor", x, cos, shape=shape)
    right = b.op("aten.mul.Tensor", turned, sin, shape=shape)
    return b.op("aten.add.Tensor", left, right, shape=shape)  # type: ignore[return-value]


def llama_block(
    hidden: int = 4096,
    heads: int = 32,
    kv_heads: int = 8,
    ffn: int = 14336,
    seq: int = 8192,
    batch: Dim = "B",
    dtype: str = "bfloat16",
) -> Block:
    """A Llama decoder layer: hidden (B, S, H), cos and sin (1, S, D) -> hidden. Sizes of Llama-3-8B."""
    b = Builder("LlamaDecoderLayer", dtype)
    head = hidden // heads
    full: Shape = (batch, seq, hidden)
    x = b.input("hidden", full)
    cos, sin = (b.input(name, (1, seq, head), differentiable=False) for name in ("cos", "sin"))

    def project(path: str, source: Ref, n: int, k: int) -> Ref:
        return b.op("aten.linear", source, b.parameter(f"{path}.weight", (n, k)), shape=(batch, seq, n), name=path.split(".")[-1])  # type: ignore[return-value]

    def split_heads(source: Ref, count: int) -> Ref:
        shape = (batch, seq, count, head)
        return b.op(  # type: ignore[return-value]
            "aten.transpose.int", b.op("aten.reshape", source, sizes(shape), shape=shape), 1, 2, shape=(batch, count, seq, head)
        )

    normal = rms_norm(b, x, b.parameter("input_layernorm.weight", (hidden,)), full)
    q = split_heads(project("self_attn.q_proj", normal, heads * head, hidden), heads)
    k = split_heads(project("self_attn.k_proj", normal, kv_heads * head, hidden), kv_heads)
    v = split_heads(project("self_attn.v_proj", normal, kv_heads * head, hidden), kv_heads)
    cos = b.op("aten.unsqueeze", cos, 1, shape=(1, 1, seq, head))  # type: ignore[assignment]
    sin = b.op("aten.unsqueeze", sin, 1, shape=(1, 1, seq, head))  # type: ignore[assignment]
    q = rotary(b, q, cos, sin, (batch, heads, seq, head))
    k = rotary(b, k, cos, sin, (batch, kv_heads, seq, head))
    grouped = kv_heads != heads
    mixed = b.op(
        "aten.scaled_dot_product_attention", q, k, v, None, 0.0, True, shape=(batch, heads, seq, head), name="sdpa",
        scale=head**-0.5, enable_gqa=grouped,
    )  # fmt: skip
    mixed = b.op("aten.transpose.int", mixed, 1, 2, shape=(batch, seq, heads, head))
    mixed = b.op("aten.reshape", mixed, sizes((batch, seq, heads * head)), shape=(batch, seq, heads * head))
    x = b.op("aten.add.Tensor", x, project("self_attn.o_proj", mixed, hidden, heads * head), shape=full)  # type: ignore[arg-type,assignment]
    normal = rms_norm(b, x, b.parameter("post_attention_layernorm.weight", (hidden,)), full)
    inner: Shape = (batch, seq, ffn)
    gate = b.op("aten.silu", project("mlp.gate_proj", normal, ffn, hidden), shape=inner)
    product = b.op("aten.mul.Tensor", gate, project("mlp.up_proj", normal, ffn, hidden), shape=inner)
    out = b.op("aten.add.Tensor", x, project("mlp.down_proj", product, hidden, ffn), shape=full, name="out")  # type: ignore[arg-type]
    return b.block(out)  # type: ignore[arg-type]


def gpt2_block(hidden: int = 768, heads: int = 12, seq: int = 1024, batch: Dim = "B", dtype: str = "float32") -> Block:
    """A GPT-2 layer with its fused query-key-value projection: hidden (B, S, H) -> hidden."""
    b = Builder("GPT2Block", dtype)
    head = hidden // heads
    full: Shape = (batch, seq, hidden)
    x = b.input("hidden", full)

    def norm(path: str, source: Ref) -> Ref:
        weight, bias = b.parameter(f"{path}.weight", (hidden,)), b.parameter(f"{path}.bias", (hidden,))
        return b.op("aten.layer_norm", source, (hidden,), weight, bias, 1e-5, shape=full)  # type: ignore[return-value]

    def project(path: str, source: Ref, k: int, n: int) -> Ref:
        weight, bias = b.parameter(f"{path}.weight", (k, n)), b.parameter(f"{path}.bias", (n,))
        return b.op("ap.linear_kn", source, weight, bias, shape=(batch, seq, n), name=path.replace(".", "_"))  # type: ignore[return-value]

    fused = project("attn.c_attn", norm("ln_1", x), hidden, 3 * hidden)
    pieces = b.op("aten.split.Tensor", fused, hidden, 2, shape=[full, full, full])
    by_head: Shape = (batch, seq, heads, head)
    q, k, v = (
        b.op(
            "aten.transpose.int",
            b.op("aten.reshape", piece, sizes(by_head), shape=by_head),
            1,
            2,
            shape=(batch, heads, seq, head),
        )
        for piece in pieces  # type: ignore[union-attr]
    )
    mixed = b.op(
        "aten.scaled_dot_product_attention",
        q,
        k,
        v,
        None,
        0.0,
        True,
        shape=(batch, heads, seq, head),
        name="sdpa",  # type: ignore[arg-type]
    )
    mixed = b.op("aten.transpose.int", mixed, 1, 2, shape=by_head)  # type: ignore[arg-type]
    mixed = b.op("aten.reshape", mixed, sizes(full), shape=full)  # type: ignore[arg-type]
    x = b.op("aten.add.Tensor", project("attn.c_proj", mixed, hidden, hidden), x, shape=full)  # type: ignore[assignment,arg-type]
    inner = project("mlp.c_fc", norm("ln_2", x), hidden, 4 * hidden)
    active = b.op("aten.gelu", inner, shape=(batch, seq, 4 * hidden), approximate="tanh")
    out = b.op("aten.add.Tensor", x, project("mlp.c_proj", active, 4 * hidden, hidden), shape=full, name="out")  # type: ignore[arg-type]
    return b.block(out)  # type: ignore[arg-type]


def embedding_block(
    hidden: int = 768, vocabulary: int = 50304, seq: int = 1024, batch: Dim = "B", dtype: str = "float32"
) -> Block:
    """Token and position embedding: input_ids (B, S) -> hidden (B, S, H)."""
    b = Builder("Prologue", dtype)
    ids = b.input("input_ids", (batch, seq), "int64")
    words = b.op("aten.embedding", b.parameter("wte.weight", (vocabulary, hidden)), ids, shape=(batch, seq, hidden), name="words")
    places = b.op("aten.arange", seq, shape=(seq,), dtype="int64")
    places = b.op("aten.unsqueeze", places, 0, shape=(1, seq), dtype="int64")  # type: ignore[arg-type]
    where = b.op("aten.embedding", b.parameter("wpe.weight", (seq, hidden)), places, shape=(1, seq, hidden), name="places")  # type: ignore[arg-type]
    return b.block(b.op("aten.add.Tensor", words, where, shape=(batch, seq, hidden), name="hidden"))  # type: ignore[arg-type]


def loss_block(hidden: int = 768, vocabulary: int = 50304, seq: int = 1024, batch: Dim = "B", dtype: str = "float32") -> Block:
    """Final norm, tied head, mean cross entropy: hidden (B, S, H), labels (B, S) -> loss."""
    b = Builder("Epilogue", dtype)
    x = b.input("hidden", (batch, seq, hidden))
    labels = b.input("labels", (batch, seq), "int64")
    weight, bias = b.parameter("ln_f.weight", (hidden,)), b.parameter("ln_f.bias", (hidden,))
    normal = b.op("aten.layer_norm", x, (hidden,), weight, bias, 1e-5, shape=(batch, seq, hidden))
    table = b.parameter("wte.weight", (vocabulary, hidden))
    logits = b.op("aten.linear", normal, table, shape=(batch, seq, vocabulary), name="logits")  # type: ignore[arg-type]
    total = b.op("ap.cross_entropy_sum", logits, labels, -100, 0.0, shape=(), dtype="float32")  # type: ignore[arg-type]
    count = b.op("ap.count_valid", labels, -100, shape=(), dtype="float32", differentiable=False)
    return b.block(b.op("aten.div.Tensor", total, count, shape=(), name="loss"))  # type: ignore[arg-type]


def gpt2_graph(
    layers: int = 12,
    hidden: int = 768,
    heads: int = 12,
    vocabulary: int = 50304,
    seq: int = 1024,
    batch: int = 8,
    dtype: str = "float32",
) -> Graph:
    """Embedding, `layers` equal blocks, tied head and loss."""
    blocks = (
        embedding_block(hidden, vocabulary, seq, dtype=dtype),
        gpt2_block(hidden, heads, seq, dtype=dtype),
        loss_block(hidden, vocabulary, seq, dtype=dtype),
    )
    wte, wpe = "transformer.wte.weight", "transformer.wpe.weight"
    calls = [Call("Prologue", "", ("input_ids",), ("h0",), (wte, wpe))]
    for index in range(layers):
        prefix = f"transformer.h.{index}"
        names = tuple(f"{prefix}.{parameter.path}" for parameter in blocks[1].parameters)
        calls.append(Call("GPT2Block", prefix, (f"h{index}",), (f"h{index + 1}",), names))
    head = ("transformer.ln_f.weight", "transformer.ln_f.bias", wte)
    calls.append(Call("Epilogue", "", (f"h{layers}", "labels"), ("loss",), head))
    inputs = (Value("input_ids", ("B", seq), "int64"), Value("labels", ("B", seq), "int64"))
    return Graph("gpt2", inputs, blocks, tuple(calls), "loss", batch, "hand-written")


def cast(b: Builder, x: Ref, dtype: str, shape: Shape) -> Ref:
    """A conversion of dtype."""
    return b.op("aten.to.dtype", x, DType(dtype), shape=shape, dtype=dtype)  # type: ignore[return-value]
