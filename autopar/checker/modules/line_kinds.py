"""How the lines that ranks ran carry kinds: by the checker's rows, on the shapes that the ranks of an axis have together.

The backward is lines like the forward, so that the kind of a gradient is that of any value; but each is held against the value
whose gradient it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from autopar.checker.modules.recording import Made, RecordedLine, WrongLine
from autopar.checker.modules.values import VARYING, RankDifference, RankValue, collective, partial, since, word
from autopar.checker.rows import table
from autopar.checker.rows.carry import Dims, NotCarried, OperationRow, carry
from autopar.checker.rows.elements import Rows, along, aten, letters, pointwise, reduction, redundant
from autopar.checker.rows.indexing import index_put
from autopar.checker.rows.operation_call import WholeCall
from autopar.checker.rows.products import named, spelled
from autopar.checker.shards import PARTIAL, REPLICATED, Axes, Cut, Kind, Shape, words_of

_BLOCKS = frozenset(f"aten.{name}" for name in words_of("slice split split_with_sizes chunk cat slice_scatter slice_backward"))
"""Operations on parts of a dimension, which on a rank's part of it take parts of that."""
_RANDOM = frozenset(f"aten.{name}" for name in words_of("bernoulli normal uniform rand randn rand_like randn_like multinomial"))
_NUMBERS = frozenset(
    f"aten.{name}"
    for name in words_of("""zeros ones full empty new_zeros new_ones new_full new_empty empty_strided new_empty_strided zeros_like
    ones_like full_like empty_like scalar_tensor fill zero lift_fresh""")
) | _RANDOM  # fmt: skip
"""Tensors of which any part is right."""
_ZEROS = frozenset(("aten.zeros", "aten.new_zeros", "aten.zeros_like", "aten.zero"))
_COPIES = frozenset(("aten.detach", "aten.clone", "aten.alias"))
_ELEMENTWISE = frozenset(f"aten.{name}" for name in words_of("expand clone alias detach _to_copy mul add sub div neg"))
_VIEWS = frozenset(f"aten.{name}" for name in words_of("reshape transpose permute t unsqueeze squeeze slice select"))


def _linear_backward(call: WholeCall) -> OperationRow:
    return pointwise(call, ((0,),))


def _nll(call: WholeCall) -> OperationRow:
    """``nll_loss_forward(logarithms, target)``: the sum of the losses of tokens, and how many there are."""
    tokens = ["t"] if len(call.shapes[0]) > 1 else []
    kept = tokens if len(call.results[0]) else []
    operands = (named([*tokens, "_"], call.shapes[0]), named(tokens, call.shapes[1]))
    return OperationRow(operands, (named(kept, call.results[0]), ()), {} if kept else {"t": "sum"})


def _nll_backward(call: WholeCall) -> OperationRow:
    gradient, x, target, total = call.shapes
    tokens = ["t"] if len(x) > 1 else []
    operands = named(tokens if gradient else [], gradient), named([*tokens, "_"], x), named(tokens, target), named([], total)
    return OperationRow(operands, (operands[1],), linear=((0,),))


def _index_put(call: WholeCall) -> OperationRow:
    """``x[mask] = number``: as elements of `x`."""
    x, *others = call.shapes
    if call.dtypes[1:2] != ("bool",) or len(others) != 2 or others[1] not in ((), (1,)):
        return index_put(call)
    return OperationRow((letters(x), letters(others[0]), ((("", 1),),) * len(others[1])), (letters(x),))


def _rows(call: WholeCall) -> OperationRow:
    """``x[arange(n), i]``, or that element of each row written."""
    x, *others = call.shapes
    made = named("t _"[: 2 * len(call.results[0])], call.results[0])
    return OperationRow((named("t _", x), *(named("t", each) for each in others)), (made,))


ROWS: Rows = {
    "rows": _rows,
    **table.ROWS,
    **aten("""silu_backward gelu_backward sigmoid_backward tanh_backward threshold_backward leaky_relu_backward elu_backward
    hardtanh_backward softplus_backward detach""", _linear_backward),
    **aten("_softmax_backward_data _log_softmax_backward_data", along(linear=True)),
    **aten("softmax log_softmax _safe_softmax", along()),
    **aten("amax max", lambda call: reduction("max")(call) if len(call.shapes) == 1 else pointwise(call)),
    **aten("var_mean std_mean", reduction("")),
    "aten.mean": reduction("sum", linear=True),  # of a rank's part: a summand of as many times the mean as there are ranks
    "aten.copy": lambda call: OperationRow((letters(call.results[0]),), (letters(call.results[0]),), linear=((0,),)),
    "aten.embedding_dense_backward": spelled("i* d, i* -> _ d", ((0,),)),
    "aten.index_put": _index_put,
    "aten.slice_backward": along(0, linear=True),
    "aten.nll_loss_forward": _nll,
    "aten.nll_loss_backward": _nll_backward,
}  # fmt: skip


@dataclass
class LineKinds:
    """Carries kinds through lines. `data`: axes over which gradients are added up afterwards. `values`: by the name of a tensor,
    `sources`: the line that made it. `assumed`: by line, what is taken for right."""

    axes: Axes
    data: frozenset[str]
    values: dict[int, RankValue] = field(default_factory=dict)
    assumed: dict[str, str] = field(default_factory=dict)
    sources: dict[int, str] = field(default_factory=dict)

    def run(self, line: RecordedLine, varying: Mapping[str, RankDifference]) -> None:
        """The kinds of the results. `varying`: what differs along an axis."""
        operands = [self.values[each.name] for each in line.operands]
        if line.axes:
            return self._collective(line, operands)
        if line.op == "gradient":
            return self._gradient(line, *operands)
        if line.op in _NUMBERS and not varying:
            if line.op in _RANDOM:
                self.assumed[line.source] = "random numbers differ on ranks that hold different elements, and agree elsewhere"
            return self._set(line, [(REPLICATED,) * len(self.axes.names)] * len(line.results), (), True)
        per_axis = [self._chosen(line, axis, operands, varying) for axis in range(len(self.axes.names))]
        results = [tuple(kinds[index] for kinds in per_axis) for index in range(len(line.results))]
        return self._set(line, results, operands, bool(operands) and all(each.number for each in operands) and not varying)

    def _chosen(
        self, line: RecordedLine, axis: int, operands: Sequence[RankValue], varying: Mapping[str, RankDifference]
    ) -> list[Kind]:
        """The kinds of the results on an axis, of the first kinds that the operands may be taken for."""
        reasons, cuts = [], [kind for kind in (each.kinds[axis] for each in operands) if isinstance(kind, Cut)]
        for kinds in product(*(_choices(value, axis, made, cuts) for value, made in zip(operands, line.operands, strict=True))):
            try:
                return self._on_axis(line, axis, list(kinds), varying)
            except NotCarried as error:
                worst = next((each for each in operands if each.kinds[axis] != REPLICATED), None)
                reasons.append(f"{error}{since(worst, axis) if worst else ''}")
        raise WrongLine(line.source, f"{line.op.removeprefix('aten.')}: {reasons[0]}")

    def _set(self, line: RecordedLine, results: Sequence[tuple[Kind, ...]], operands: Sequence[RankValue], number: bool) -> None:
        for made, kinds in zip(line.results, results, strict=True):
            since = []
            for axis, kind in enumerate(kinds):
                before = [each.since[axis] for each in operands if each.kinds[axis] == kind and each.since[axis]]
                since.append(before[0] if before else line.source)
            self.sources[made.name] = line.source
            made_of_numbers = number and line.op in (*_ELEMENTWISE, *_VIEWS, *_NUMBERS)
            repeats = frozenset(range(len(made.shape))) if made_of_numbers else self._repeated(line, operands, made)
            copied = operands[0] if line.op in _COPIES else None
            zero = copied.zero if copied else line.op in _ZEROS
            whole = line.op == "aten.arange" and not line.arguments.get("start") and line.arguments.get("step", 1) == 1
            counts = copied.counts if copied else whole
            self.values[made.name] = RankValue(kinds, tuple(since), repeats, made_of_numbers, zero, counts)

    def _repeated(self, line: RecordedLine, operands: Sequence[RankValue], made: Made) -> frozenset[int]:
        """The dimensions of a result along which its elements are alike."""
        dims = range(len(made.shape))
        if line.op in _ELEMENTWISE:
            sides = [(value, each.shape) for value, each in zip(operands, line.operands, strict=True)]
            return frozenset(dim for dim in dims if all(_repeats(value, shape, dim - len(dims)) for value, shape in sides))
        row = self._row(_call(line)) if line.op in _VIEWS and operands[0].repeats else None
        if row is None:
            return frozenset()
        factors = {factor for dim in operands[0].repeats for factor, _ in row.operands[0][dim]} - {""}
        return frozenset(dim for dim in dims if all(factor in factors or size == 1 for factor, size in row.results[0][dim]))

    def _collective(self, line: RecordedLine, operands: Sequence[RankValue]) -> None:
        read = [operands[min(index, len(operands) - 1)] for index in range(len(line.results))]  # a gather has one for all
        out = [list(value.kinds) for value in read]
        for name in (each for each in line.axes if each in self.axes.names):
            axis = self.axes.names.index(name)
            for index, (made, value) in enumerate(zip(line.results, read, strict=True)):
                kind = value.kinds[axis]
                out[index][axis] = collective(line, name, self.axes.sizes[axis], value, kind, made, axis)
                if kind == VARYING:
                    self.assumed[line.source] = f"{line.op} over {name} takes values that differ by rank as they are meant"
        self._set(line, [tuple(each) for each in out], (), False)

    def _gradient(self, line: RecordedLine, gradient: RankValue, value: RankValue) -> None:
        """The gradient of an equal value is equal, or summands (as what differs by rank is); that of a part or of a summand is
        whole on its rank."""
        kinds = list(gradient.kinds)
        for axis, (kind, own) in enumerate(zip(gradient.kinds, value.kinds, strict=True)):
            name = self.axes.names[axis]
            if own == REPLICATED and kind != REPLICATED:
                kinds[axis] = PARTIAL
            elif (own != REPLICATED and partial(kind)) or (isinstance(own, Cut) and isinstance(kind, Cut) and own != kind):
                source = self.sources.get(line.operands[1].name, line.source)
                why = f"its result is {word(own)} on {name}, and the gradient of that {word(kind)}{since(gradient, axis)}"
                raise WrongLine(source, why)
        self.values[line.operands[0].name] = replace(gradient, kinds=tuple(kinds))

    # -- operations

    def _on_axis(self, line: RecordedLine, axis: int, kinds: list[Kind], varying: Mapping[str, RankDifference]) -> list[Kind]:
        name, count = self.axes.names[axis], len(line.results)
        difference = varying.get(name, RankDifference({}))
        for index, part in difference.operands.items():
            if kinds[index] != REPLICATED:
                raise NotCarried(f"each rank of {name} takes its part of a value that is {word(kinds[index])} there")
            kinds[index] = part
        if difference.results is not None:
            if any(map(partial, kinds)) or (difference.results != VARYING and kinds[0] != REPLICATED):
                raise NotCarried(f"each rank of {name} takes its part of a value that is {word(kinds[0])} there")
            return [difference.results] * count
        if line.op == "written":
            if kinds[0] != kinds[1]:
                raise NotCarried(f"a part that is {word(kinds[1])} on {name} is written into a tensor that is {word(kinds[0])}")
            return kinds[:1]
        if line.op == "aten._local_scalar_dense":
            if any(kind != REPLICATED for kind in kinds):
                raise NotCarried(f"Python reads a number that is {word(kinds[0])} on {name}")
            return []
        if line.op == "aten.copy":  # what is written over is not read
            line, kinds = replace(line, operands=line.operands[1:]), kinds[1:]
        if line.op in ("aten.index", "aten.index_put") and len(kinds) > 2 and self.values[line.operands[1].name].counts:
            rows = len(line.operands[0].shape) == 2 and line.operands[0].shape[:1] == line.operands[1].shape
            if rows and line.operands[1].shape == line.operands[2].shape:  # x[arange(n), i]: of each row an element
                line, kinds = replace(line, op="rows", operands=(line.operands[0], *line.operands[2:])), [kinds[0], *kinds[2:]]
        call = _call(line)
        row = self._row(call)
        if VARYING in kinds:
            if any(partial(kind) for kind in kinds) and not (row and row.linear and tuple(range(len(kinds))) in row.linear):
                raise NotCarried(f"on {name} a partial value is read beside one that differs by rank")
            return [VARYING] * count
        blocks = self._blocks(line, call, kinds)
        if blocks is not None:
            return blocks
        if row is None:
            if any(isinstance(kind, Cut) for kind in kinds) and not any(map(partial, kinds)):
                self.assumed[line.source] = f"{line.op} has no row: what it makes of shards differs by rank"
                return [VARYING] * count
            row = redundant(call)
        if line.op == "aten.nll_loss_forward" and isinstance(kinds[0], Cut) and line.arguments.get("reduction") == 1:
            if name not in self.data:
                raise NotCarried(f"each rank of {name} divides by how many of its own tokens are valid")
            self.assumed[line.source] = f"the ranks of {name} have equally many valid tokens"
            return [PARTIAL, REPLICATED]
        if line.op in ("aten.reshape", "aten.squeeze"):
            return [self._reshaped(line, row, axis, kinds[0])]
        return [each[0] for each in carry(*self._scaled(row, axis, kinds), [False] * len(kinds), [None] * count)]

    def _reshaped(self, line: RecordedLine, row: OperationRow, axis: int, kind: Kind) -> Kind:
        """A part of a dimension that becomes several is a part of the first of these, be it one head of a rank."""
        shape, made = line.operands[0].shape, line.results[0].shape
        while isinstance(kind, Cut) and shape[kind.dim] == kind.inner == 1 and kind.dim + 1 < len(shape):
            kind = Cut(kind.dim + 1, shape[kind.dim + 1])
        ((after,),) = carry(*self._scaled(row, axis, [kind]), [False], [None])
        if not isinstance(kind, Cut) or not isinstance(after, Cut) or after.inner < made[after.dim]:
            return after
        return Cut(kind.dim, 1) if kind.dim < after.dim and set(made[kind.dim : after.dim]) == {1} else after

    @staticmethod
    def _row(call: WholeCall) -> OperationRow | None:
        make: Callable[[WholeCall], OperationRow] | None = ROWS.get(call.op)
        return None if make is None else make(call)

    def _scaled(self, row: OperationRow, axis: int, kinds: Sequence[Kind]) -> tuple[OperationRow, Axes, list[tuple[Kind]]]:
        """The row of the shapes that the ranks of one axis have together."""
        size, cut = self.axes.sizes[axis], set[str]()
        for dims, kind in zip(row.operands, kinds, strict=True):
            below = 1
            for factor, extent in reversed(dims[kind.dim] if isinstance(kind, Cut) and kind.dim < len(dims) else ()):
                below *= extent
                if isinstance(kind, Cut) and kind.inner <= below:
                    cut |= {factor} - {""}
                    break

        def whole(side: tuple[Dims, ...]) -> tuple[Dims, ...]:
            return tuple(tuple(tuple((f, n * size if f in cut else n) for f, n in dim) for dim in dims) for dims in side)

        axes = Axes((self.axes.names[axis],), (size,))
        return replace(row, operands=whole(row.operands), results=whole(row.results)), axes, [(kind,) for kind in kinds]

    @staticmethod
    def _blocks(line: RecordedLine, call: WholeCall, kinds: Sequence[Kind]) -> list[Kind] | None:
        """Parts of a rank's part of a dimension: of all operands that are cut there, as a whole each."""
        if line.op not in (*_BLOCKS, "aten.select"):
            return None
        dim = call.dim(default=0)
        if any(not isinstance(kind, Cut) or kind.dim != dim for kind in kinds):
            return None
        if any(kind != Cut(dim, shape[dim]) for kind, shape in zip(kinds, call.shapes, strict=True)):
            raise NotCarried(f"parts of dimension {dim}, which is cut in runs of {kinds[0]}")
        return [VARYING if line.op == "aten.select" else Cut(dim, shape[dim]) for shape in call.results]


def _call(line: RecordedLine) -> WholeCall:
    (shapes, dtypes), (made, made_dtypes) = (
        (tuple(x.shape for x in side), tuple(x.dtype for x in side)) for side in (line.operands, line.results)
    )
    return WholeCall(line.op, line.arguments, shapes, made, dtypes, made_dtypes)


def _choices(value: RankValue, axis: int, made: Made, cuts: Sequence[Cut]) -> list[Kind]:
    """The kinds that a value may be taken for beside operands that are cut so."""
    if value.kinds[axis] != REPLICATED:
        return [value.kinds[axis]]
    alike = [dim for dim, size in enumerate(made.shape) if size == 1 or dim in value.repeats]
    parts = dict.fromkeys(Cut(dim, inner) for dim in alike for inner in (made.shape[dim], *(each.inner for each in cuts)))
    return [REPLICATED, *parts, *([PARTIAL] if value.zero else [])]


def _repeats(value: RankValue, shape: Shape, dim: int) -> bool:
    """Return whether an operand's elements are alike along a dimension of the result, counted from the end."""
    return len(shape) < -dim or shape[dim] == 1 or len(shape) + dim in value.repeats
