"""Rows of operations that combine dimensions: products, attention, norms, lookups of rows, losses, mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from autopar.checker.rows.carry import Dim, Dims, OperationRow, plain
from autopar.checker.rows.elements import Rows, aten, letters, redundant, without
from autopar.checker.rows.operation_call import TensorName, WholeCall
from autopar.checker.shards import Shape


def named(words: str | Sequence[str], shape: Shape) -> Dims:
    """Dimensions by their letters; ``_`` is never cut, and neither is one element that is repeated."""
    return plain([("" if word == "_" else word) for word in (words.split() if isinstance(words, str) else words)], shape)


def spelled(text: str, linear: tuple[tuple[int, ...], ...] = ()) -> Callable[[WholeCall], OperationRow]:
    """The row of one line: ``i* d, i* -> _ d`` has any number of dimensions ``i``, which are summed."""
    left, result = (side.strip() for side in text.split("->"))

    def dims(words: str, shape: Shape) -> Dims:
        many = len(shape) - len(words.split()) + 1
        names = [[f"{each[0]}{i}" for i in range(many)] if each[-1] == "*" else [each] for each in words.split()]
        return named([name for group in names for name in group], shape)

    def row(call: WholeCall) -> OperationRow:
        operands = tuple(map(dims, left.split(","), call.shapes))
        made = dims(result, call.results[0])
        kept = {factor for dim in made for factor, _ in dim} | {""}
        reduced = {factor: "sum" for side in operands for dim in side for factor, _ in dim if factor not in kept}
        return OperationRow(operands, (made,), reduced, linear)

    return row


embedding, cross_entropy_sum = spelled("_ d, i* -> i* d", ((0,),)), spelled("t* _, t* ->")
token_log_probs = spelled("t* _, t* _ -> t* _")


def _leading(shape: Shape, tail: int, rank: int) -> list[str]:
    """Letters of the leading dimensions, from the right."""
    return [f"b{rank - len(shape) + i}" for i in range(len(shape) - tail)]


def equation(
    terms: Sequence[Sequence[str]], result: Sequence[str], call: WholeCall, first: int = 0, addend: bool = False
) -> OperationRow:
    """Products that letters describe: those that are not in the result are summed. An operand that has one element where others
    have many repeats it: its dimension is whole. `first` operands are added to the result (a bias)."""
    sizes: dict[str, int] = {}
    for words, shape in zip(terms, call.shapes, strict=True):
        for word, size in zip(words, shape, strict=True):
            sizes[word] = max(size, sizes.get(word, 1))
    operands = tuple(
        plain([word if size == sizes[word] else "" for word, size in zip(words, shape, strict=True)], shape)
        for words, shape in zip(terms, call.shapes, strict=True)
    )
    reduced = {word: "sum" for word in sizes if word not in result}
    many = len(terms)
    bias = (0,) if first else (many - 1,) if addend else ()
    factors = [index for index in range(many) if index not in bias]
    linear = tuple(tuple(sorted((index, *bias))) for index in factors)
    return OperationRow(operands, (named(result, call.results[0]),), reduced, linear, bias)


def product(weight: str) -> Callable[[WholeCall], OperationRow]:
    """``linear(x, w[n, k], bias)``, or ``linear_kn``, by the letters of the weight."""

    def row(call: WholeCall) -> OperationRow:
        lead = _leading(call.shapes[0], 1, len(call.shapes[0]))
        terms = [[*lead, "k"], list(weight), ["n"]][: len(call.shapes)]
        return equation(terms, [*lead, "n"], call, addend=len(terms) > 2)

    return row


def linear_float8(call: WholeCall) -> OperationRow:
    """A product of whose operands summands would be rounded by themselves."""
    return replace(product("nk")(call), linear=())


def dequantize_4bit(call: WholeCall) -> OperationRow:
    """Blocks of a row, each with one scale: they are cut whole."""
    (rows, packed), (_, blocks) = call.shapes
    row, block = ("n", rows), ("b", blocks)
    made = ((row,), (block, ("", call.results[0][1] // blocks)))
    return OperationRow((((row,), (block, ("", packed // blocks))), ((row,), (block,))), (made,))


def matmul(call: WholeCall) -> OperationRow:
    a, b = call.shapes
    rank = max(len(a), len(b))
    left = ["k"] if len(a) == 1 else [*_leading(a, 2, rank), "m", "k"]
    right = ["k"] if len(b) == 1 else [*_leading(b, 2, rank), "k", "n"]
    lead = sorted({word for word in (*left, *right) if word[0] == "b"}, key=lambda word: int(word[1:]))
    return equation([left, right], [*lead, *(["m"] if len(a) > 1 else []), *(["n"] if len(b) > 1 else [])], call)


def addmm(call: WholeCall) -> OperationRow:
    """``addmm baddbmm(bias, a, b)``."""
    batch = ["b"] if len(call.results[0]) == 3 else []
    names = [*batch, "m", "n"]
    return equation([names[len(names) - len(call.shapes[0]) :], [*batch, "m", "k"], [*batch, "k", "n"]], names, call, first=1)


def einsum(call: WholeCall) -> OperationRow:
    text = str(call.get("equation", "")).replace(" ", "")
    left, arrow, result = text.partition("->")
    terms = left.split(",")
    if not arrow or "." in text or any(len(set(term)) < len(term) for term in (*terms, result)):
        return redundant(call)
    return equation([list(term) for term in terms], list(result), call)


def distances(call: WholeCall) -> OperationRow:
    rank = len(call.results[0])
    lead = [_leading(shape, 2, rank) for shape in call.shapes]
    terms = [[*lead[0], "m", "_"], [*lead[1], "n", "_"]]
    sides = tuple(named([w if w == "_" or size > 1 else "_" for w, size in zip(t, s, strict=True)], s)
                  for t, s in zip(terms, call.shapes, strict=True))  # fmt: skip
    return OperationRow(sides, (named([*(f"b{i}" for i in range(rank - 2)), "m", "n"], call.results[0]),))


def attention(call: WholeCall) -> OperationRow:
    """``scaled_dot_product_attention(q, k, v, mask)``: examples and heads; queries where no band depends on their position.
    Several query heads of one key head are ``g`` groups of ``r``."""
    band = bool(_option(call, "is_causal", "5", False)) or call.get("window") is not None
    q, k = call.shapes[:2]
    rank = len(q)
    grouped = rank > 2 and q[-3] != k[-3]

    def dims(shape: Shape, rows: str, query: bool) -> Dims:
        out: list[Dim] = []
        for i, size in enumerate(shape):
            at = i - len(shape)
            head = at == -3
            if at == -1 or (at == -2 and (rows == "_" or size != q[-2])):
                out.append((("", size),))
            elif at == -2:
                out.append(((rows, size),))
            elif head and grouped and query and size == q[-3]:
                out.append((("g", k[-3]), ("r", q[-3] // k[-3])))
            elif head and grouped and not query:
                out.append((("g", size),))
            else:
                out.append(((f"b{at}" if size == q[at] else "", size),))
        return tuple(out)

    rows = "_" if band else "s"
    sides = [dims(q, rows, True), *(dims(shape, "_", False) for shape in call.shapes[1:3])]
    sides += [dims(shape, rows, True) for shape in call.shapes[3:]]
    return OperationRow(tuple(sides), (dims(call.results[0], rows, True),))


def attention_documents(call: WholeCall) -> OperationRow:
    """``attention_documents(q, k, v, documents and positions of queries and keys)``: examples, heads, and queries, which know
    their documents and positions."""
    row = attention(replace(call, shapes=call.shapes[:3], arguments={}))
    batch = call.shapes[0][0]
    sides = []
    for i, (examples, size) in enumerate(call.shapes[3:]):
        first: Dim = (("b-4" if examples == batch else "", examples),)
        sides.append((first, (("" if i % 2 else "s", size),)))
    return OperationRow((*row.operands, *sides), row.results)


def _option(call: WholeCall, name: str, number: str, default: object) -> object:
    return call.get(name, call.get(number, default))


def layer_norm(call: WholeCall) -> OperationRow:
    sizes = call.get("normalized_shape", ())
    rank = len(call.shapes[0]) - len(sizes)
    return without(lambda c: range(rank, len(c.shapes[0])))(call)


def group_norm(call: WholeCall) -> OperationRow:
    """Examples and groups of channels."""
    groups = int(call.get("num_groups", 1))

    def dims(shape: Shape) -> Dims:
        channels: Dim = (("g", groups), ("", call.shapes[0][1] // groups))
        if len(shape) == 1:
            return (channels,)
        return ((("n", shape[0]),), channels, *((("", size),) for size in shape[2:]))

    return OperationRow(tuple(map(dims, call.shapes)), tuple(map(dims, call.results)))


def instance_norm(call: WholeCall) -> OperationRow:
    if call.get("use_input_stats", True) is not True or isinstance(call.get("running_mean"), TensorName):
        return redundant(call)
    dims = [named(["n", "c", *"_" * (len(shape) - 2)] if len(shape) > 1 else ["c"], shape) for shape in call.shapes]
    return OperationRow(tuple(dims), (dims[0],))


def weight_norm(call: WholeCall) -> OperationRow:
    dim = call.dim(default=0)
    sides = [letters(shape, without=[i for i in range(len(shape)) if i != dim]) for shape in call.shapes]
    return OperationRow(tuple(sides), (sides[0],))


def examples(call: WholeCall) -> OperationRow:
    """The first dimension alone, of all operands that have as many elements there."""
    size = call.shapes[0][0]
    sides = [[named(["n", *"_" * (len(s) - 1)] if s and s[0] == size else ["_"] * len(s), s) for s in side]
             for side in (call.shapes, call.results)]  # fmt: skip
    return OperationRow(tuple(sides[0]), tuple(sides[1]))


def grid_sampler(call: WholeCall) -> OperationRow:
    """``grid_sampler(x[n, c, ...], grid[n, positions, _])``: examples, channels, and positions."""
    x, grid = call.shapes[:2]
    places = [f"s{i}" for i in range(len(grid) - 2)]
    operands = named(["n", "c", *"_" * (len(x) - 2)], x), named(["n", *places, "_"], grid)
    return OperationRow(operands, (named(["n", "c", *places], call.results[0]),))


def recurrent(call: WholeCall) -> OperationRow:
    """``lstm gru rnn_tanh``: examples."""
    if len(call.shapes[0]) != 3 or "data" in call.arguments:
        return redundant(call)
    states = len(call.results) - 1
    at = 0 if call.get("batch_first") else 1

    def dims(shape: Shape, batch: int) -> Dims:
        return plain(["n" if i == batch else "" for i in range(len(shape))], shape)

    operands = [dims(call.shapes[0], at), *(dims(shape, 1) for shape in call.shapes[1 : 1 + states])]
    operands += [dims(shape, -1) for shape in call.shapes[1 + states :]]
    return OperationRow(tuple(operands), (dims(call.results[0], at), *(dims(shape, 1) for shape in call.results[1:])))


# -- losses and experts


def local_mean(call: WholeCall) -> OperationRow:
    """The mean over the examples of one rank: shards of examples give another result than the whole, as the user asked for."""
    dims = call.get("1", ())
    names = [("_" if i in dims and i else f"d{i}") for i in range(len(call.shapes[0]))]
    return OperationRow((named(names, call.shapes[0]),), (named(names, call.results[0]),))


def moe_experts(call: WholeCall) -> OperationRow:
    """``moe_experts(x, experts, weights, up, down, ...)``: tokens, or the inner dimension of every expert, which is summed."""
    number = len(call.shapes)
    lead = [f"t{i}" for i in range(len(call.shapes[0]) - 1)]
    words = str(call.get("layout", call.get("8", ""))).split()
    form = next((word for word in words if word != "transposed"), "halves")
    up_bias = isinstance(call.get("5"), TensorName)
    up, down = call.shapes[3:5]
    wide_at, inner_at = (2, 1) if "transposed" in words else (1, 2)
    inner = down[inner_at]
    wide: Dim = {"halves": (("", 2), ("f", inner)), "interleaved": (("f", inner), ("", 2)), "plain": (("f", inner),)}[form]

    def matrix(shape: Shape, at: int, dim: Dim) -> Dims:
        return tuple(dim if i == at else (("", size),) for i, size in enumerate(shape))

    operands = [named([*lead, "_"], shape) for shape in call.shapes[:3]]
    operands += [matrix(up, wide_at, wide), matrix(down, inner_at, (("f", inner),))]
    if up_bias:
        operands.append(matrix(call.shapes[5], 1, wide))
    if len(operands) < number:
        operands.append(named("_ _", call.shapes[-1]))
    addends = (number - 1,) if number > 5 + up_bias else ()
    return OperationRow(tuple(operands), (named([*lead, "_"], call.results[0]),), {"f": "sum"}, (), addends)


ROWS: Rows = {
    "aten.linear": product("nk"),
    "ap.linear_kn": product("kn"),
    "ap.linear_float8_dynamic": linear_float8,
    "bitsandbytes.dequantize_4bit": dequantize_4bit,
    **aten("mm bmm matmul mv dot vdot", matmul),
    **aten("addmm baddbmm", addmm),
    "aten.einsum": einsum,
    **aten("cdist _cdist_forward _euclidean_dist", distances),
    **dict.fromkeys(("aten.scaled_dot_product_attention", "ap.attention"), attention),
    "ap.attention_documents": attention_documents,
    **aten("layer_norm rms_norm", layer_norm),
    "aten.group_norm": group_norm,
    "aten.instance_norm": instance_norm,
    "aten._weight_norm": weight_norm,
    "ap.local_mean": local_mean,
    **aten("im2col col2im", examples),
    **aten("grid_sampler grid_sampler_2d grid_sampler_3d", grid_sampler),
    **aten("lstm gru rnn_tanh rnn_relu", recurrent),
    "aten.embedding": embedding,
    "aten.one_hot": spelled("d* -> d* _"),
    "ap.cross_entropy_sum": cross_entropy_sum,
    "ap.token_log_probs": token_log_probs,
    "ap.count_valid": spelled("t* ->"),
    "ap.ctc_losses": spelled("_ n _, n _, n, n -> n"),
    "ap.moe_experts": moe_experts,
    "ap.expert_capacity": lambda call: without(lambda c: (-2, -1))(call),
}
