"""Rewrites losses over classes as gathers and sums: ``nll_loss``, and cross entropy with class weights, class probabilities or a
loss of each element (all others may shard the vocabulary, see `losses`)."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.capture.flat import FlatGraph, node_like, rewrite_nodes, size_args
from autopar.capture.normalize.losses import count
from autopar.errors import CaptureError
from autopar.ir.dims import Shape
from autopar.ir.graph import Arg, DType, Node, Ref, Symbol, Value

_NONE, _MEAN, _SUM = 0, 1, 2
_NLL = ("aten.nll_loss_nd", "aten.nll_loss", "aten.nll_loss2d", "aten.nll_loss_forward", "aten.nll_loss2d_forward")


def is_plain(options: Mapping[str, Arg], integers: bool) -> bool:
    """Whether a cross entropy is the one that ``ap.cross_entropy_sum`` computes."""
    return options["weight"] is None and options["reduction"] in (_MEAN, _SUM) and integers


def class_losses(flat: FlatGraph) -> FlatGraph:
    """``nll_loss`` and the further forms of ``cross_entropy_loss`` in operations that have rules."""
    values = flat.values()

    def step(node: Node) -> tuple[tuple[Node, ...], Mapping[str, str]] | None:
        if node.op in _NLL:
            given = dict(
                zip(
                    ("weight", "reduction", "ignore_index"),
                    (*node.args[2:], *(None, _MEAN, -100)[len(node.args) - 2 :]),
                    strict=False,
                )
            )
            given |= dict(node.kwargs)
            return _Loss(node, values).of_indices(given, 0.0, logged=True)
        if node.op != "aten.cross_entropy_loss":
            return None
        options = cross_entropy_options(node)
        integers = values[node.operands()[1]].dtype == "int64"
        if is_plain(options, integers):
            return None
        smoothing = options["label_smoothing"]
        assert isinstance(smoothing, (int, float))
        loss = _Loss(node, values)
        return loss.of_indices(options, smoothing, logged=False) if integers else loss.of_probabilities(options, smoothing)

    return rewrite_nodes(flat, step)


def cross_entropy_options(node: Node) -> dict[str, Arg]:
    """The arguments of a ``cross_entropy_loss`` after logits and target, by name."""
    given = (*node.args, *(None, _MEAN, -100, 0.0)[len(node.args) - 2 :])
    return dict(zip(("weight", "reduction", "ignore_index", "label_smoothing"), given[2:], strict=True)) | dict(node.kwargs)


class _Loss:
    """Writes the nodes of one loss. Classes are dimension 1, or 0 of a single example."""

    def __init__(self, node: Node, values: dict[str, Value]) -> None:
        self.node, self.values, self.nodes = node, values, list[Node]()
        self.logits, self.target = (values[name] for name in node.operands()[:2])
        self.dim = 1 if len(self.logits.shape) > 1 else 0
        self.flows = node.outputs[0].differentiable
        self.rows: Shape = (*self.logits.shape[: self.dim], *self.logits.shape[self.dim + 1 :])

    def add(self, op: str, args: tuple[Arg, ...], suffix: str, shape: Shape, dtype: str = "", flows: bool | None = None) -> Ref:
        made = node_like(
            self.node,
            op,
            args,
            f"{self.node.name}_{suffix}",
            shape,
            dtype or self.logits.dtype,
            self.flows if flows is None else flows,
        )
        self.nodes.append(made)
        self.values[made.name] = made.outputs[0]
        return Ref(made.name)

    def logged(self, already: bool) -> Ref:
        x = Ref(self.logits.name)
        return x if already else self.add("aten.log_softmax.int", (x, self.dim), "logs", self.logits.shape)

    def weight_of(self, weight: Arg, index: Ref, shape: Shape) -> Ref | None:
        """The class weight of each element."""
        if not isinstance(weight, Ref):
            return None
        return self.add("aten.index.Tensor", (weight, (index,)), "weights", shape, flows=False)

    def of_indices(
        self, options: Mapping[str, Arg], smoothing: float, logged: bool
    ) -> tuple[tuple[Node, ...], Mapping[str, str]]:
        logs, target, rows = self.logged(logged), Ref(self.target.name), self.rows
        ignore, weight = options["ignore_index"], options["weight"]
        valid = self.add("aten.ne.Scalar", (target, ignore), "valid", rows, "bool", False)
        zero = self.add("aten.zeros_like", (target,), "zero", rows, self.target.dtype, False)
        index = self.add("aten.where.self", (valid, target, zero), "index", rows, self.target.dtype, False)
        wide: Shape = (*rows[: self.dim], 1, *rows[self.dim :])
        column = self.add("aten.unsqueeze", (index, self.dim), "column", wide, self.target.dtype, False)
        taken = self.add("aten.gather", (logs, self.dim, column), "taken", wide)
        each = self.add("aten.neg", (self.add("aten.squeeze.dim", (taken, self.dim), "own", rows),), "each", rows)
        weights = self.weight_of(weight, index, rows)
        each = self.add("aten.mul.Tensor", (each, weights), "weighted", rows) if weights is not None else each
        if smoothing:
            each = self.smoothed(each, logs, weight, smoothing)
        mask = self.add("aten.to.dtype", (valid, DType(self.logits.dtype)), "mask", rows, flows=False)
        blank = self.add("aten.zeros_like", (each,), "blank", rows, flows=False)
        each = self.add("aten.where.self", (valid, each, blank), "kept", rows)
        number = self.add("aten.mul.Tensor", (mask, weights), "mass", rows, flows=False) if weights is not None else mask
        return self.reduced(each, options["reduction"], number)

    def smoothed(self, each: Ref, logs: Ref, weight: Arg, smoothing: float) -> Ref:
        spread = self.spread(logs, weight)
        own = self.add("aten.mul.Tensor", (each, 1.0 - smoothing), "sharp", self.rows)
        size = self.logits.shape[self.dim]
        if not isinstance(size, int):
            raise CaptureError(f"{self.node.source}: label smoothing over a number of classes that depends on the batch")
        every = self.add("aten.mul.Tensor", (spread, -smoothing / size), "smooth", self.rows)
        return self.add("aten.add.Tensor", (own, every), "mixed", self.rows)

    def spread(self, logs: Ref, weight: Arg) -> Ref:
        """The sum over classes, each with its weight."""
        if isinstance(weight, Ref):
            size: Shape = tuple(n if d == self.dim else 1 for d, n in enumerate(self.logits.shape))
            wide = self.add("aten.reshape", (weight, size_args(size)), "wide_weights", size, flows=False)
            logs = self.add("aten.mul.Tensor", (logs, wide), "weighted_logs", self.logits.shape)
        return self.add("aten.sum.dim_IntList", (logs, (self.dim,)), "spread", self.rows)

    def of_probabilities(self, options: Mapping[str, Arg], smoothing: float) -> tuple[tuple[Node, ...], Mapping[str, str]]:
        shape, target = self.logits.shape, Ref(self.target.name)
        flows = self.target.differentiable and not self.node.no_grad
        if smoothing:
            size = shape[self.dim]
            if not isinstance(size, int):
                raise CaptureError(f"{self.node.source}: label smoothing over a number of classes that depends on the batch")
            sharp = self.add("aten.mul.Tensor", (target, 1.0 - smoothing), "sharp", shape, flows=flows)
            target = self.add("aten.add.Tensor", (sharp, smoothing / size), "soft", shape, flows=flows)
        products = self.add("aten.mul.Tensor", (self.logged(False), target), "products", shape)
        each = self.add("aten.neg", (self.spread(products, options["weight"]),), "each", self.rows)
        return self.reduced(each, options["reduction"], None)

    def reduced(self, each: Ref, reduction: Arg, number: Ref | None) -> tuple[tuple[Node, ...], Mapping[str, str]]:
        """`number` is what the mean divides by the sum of; None: the number of elements."""
        if reduction == _NONE:
            return tuple(self.nodes), {self.node.outputs[0].name: each.name}
        total = self.add("aten.sum", (each,), "total", ())
        if reduction == _MEAN:
            size = count(list(self.rows))
            by: Arg = Symbol(size) if isinstance(size, str) else size
            by = self.add("aten.sum", (number,), "number", (), flows=False) if number is not None else by
            total = self.add("aten.div.Tensor", (total, by), "mean", ())
        return tuple(self.nodes), {self.node.outputs[0].name: total.name}
