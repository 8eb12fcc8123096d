"""Rewrites batch norm as sums over the batch: exact global statistics for a sharded batch (as SyncBatchNorm), and gradients
through them by autograd.

``local``: the statistics are those of the examples of one data rank in one forward, as in DDP. Then ``ap.local_mean`` gives each
example the mean over its rank's examples; the running statistics take the mean over all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.capture.flat import FlatGraph, node_like, rewrite_nodes, size_args
from autopar.capture.normalize.losses import count
from autopar.ir.dims import Dim, Shape, as_dim, as_sympy
from autopar.ir.graph import Arg, DType, Node, Ref, Symbol, Value

_TRAINING = ("aten._native_batch_norm_legit_functional", "aten.native_batch_norm")
_WITHOUT_RUNNING = "aten._native_batch_norm_legit.no_stats"
_INFERENCE = ("aten._native_batch_norm_legit_no_training",)
_WIDTH = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}

LOCAL = "batch norm takes its statistics from each data rank's own examples (batch_norm=local)"


def batch_norm(flat: FlatGraph, local: bool = False) -> FlatGraph:
    """``_native_batch_norm_legit_functional`` (training) and ``..._no_training`` into primitive operations."""
    flat = _with_none_running(flat)
    values = flat.values()
    trained = any(node.op in _TRAINING and node.args[5] is True for node in flat.nodes)

    def step(node: Node) -> tuple[tuple[Node, ...], Mapping[str, str]] | None:
        if node.op in _TRAINING and node.args[5] is True:
            new, names = _training(node, values, local)
            written = {value.name: value for each in new for value in each.outputs}
            values.update({name: written[name] for name in names.values()})  # a second call of the module reads them
            return new, names
        if node.op in _INFERENCE:
            return _inference(node, values)
        return None

    flat = rewrite_nodes(flat, step)
    return replace(flat, notes=(*flat.notes, LOCAL)) if local and trained else flat


def _with_none_running(flat: FlatGraph) -> FlatGraph:
    """Training without running statistics (``track_running_stats=False``) is the operation that has them, with None for them."""

    def step(node: Node) -> tuple[tuple[Node, ...], Mapping[str, str]] | None:
        if node.op != _WITHOUT_RUNNING or node.args[3] is not True:
            return None
        return (replace(node, op=_TRAINING[0], args=(*node.args[:3], None, None, *node.args[3:])),), {}

    return rewrite_nodes(flat, step)


class _Writer:
    """Adds nodes with names under the norm's own. `beside`: what is computed with the norm's input. Under ``torch.autocast`` that
    is wider than the input, as torch's kernels compute; the result has the input's dtype."""

    def __init__(self, node: Node, values: Mapping[str, Value], beside: Sequence[Arg]) -> None:
        self.node, self.nodes, self.values = node, list[Node](), values
        every = [self.dtype_of(each) for each in (node.args[0], *beside) if isinstance(each, Ref)]
        self.dtype = max(every, key=_WIDTH.__getitem__)

    def dtype_of(self, x: Ref) -> str:
        return self.values[x.name].dtype

    def input(self, shape: Shape) -> Ref:
        """The norm's input in the dtype of the computation."""
        x = self.node.args[0]
        assert isinstance(x, Ref)
        return x if self.dtype_of(x) == self.dtype else self.add("aten.to.dtype", (x, DType(self.dtype)), "input", shape)

    def add(self, op: str, args: tuple[Arg, ...], suffix: str, shape: Shape, flows: bool | None = None, dtype: str = "") -> Ref:
        node = node_like(self.node, op, args, f"{self.node.name}_{suffix}", shape, dtype or self.dtype, flows)
        self.nodes.append(node)
        return Ref(node.name)

    def affine(self, normal: Ref, shape: Shape, wide: Shape) -> None:
        """``normal * weight + bias`` into the norm's own result."""
        weight, bias = self.node.args[1], self.node.args[2]
        if isinstance(weight, Ref):
            weight = self.add("aten.reshape", (weight, size_args(wide)), "weight", wide, dtype=self.dtype_of(weight))
            normal = self.add("aten.mul.Tensor", (normal, weight), "scaled", shape)
        if isinstance(bias, Ref):
            bias = self.add("aten.reshape", (bias, size_args(wide)), "bias", wide, dtype=self.dtype_of(bias))
            normal = self.add("aten.add.Tensor", (normal, bias), "shifted", shape)
        if self.node.outputs[0].dtype != self.dtype:
            self.add("aten.to.dtype", (normal, DType(self.node.outputs[0].dtype)), "result", shape)
        last = self.nodes.pop()
        self.nodes.append(
            Node(
                op=last.op,
                args=last.args,
                kwargs=(),
                outputs=(self.node.outputs[0],),
                module=last.module,
                source=last.source,
                no_grad=last.no_grad,
            )
        )


def _of_all(writer: _Writer, x: Ref, batch: Dim, wide: Shape, name: str) -> Ref:
    """The mean over all examples of what each has of its rank."""
    held = writer.add("aten.detach", (x,), f"{name}_held", (batch, *wide[1:]), flows=False)
    total = writer.add("aten.sum.dim_IntList", (held, (0,), True), f"{name}_total", wide, flows=False)
    number: Arg = Symbol(batch) if isinstance(batch, str) else batch
    return writer.add("aten.div.Tensor", (total, number), f"{name}_of_all", wide, flows=False)


def _minus_one(size: Dim) -> Arg:
    dim = as_dim(as_sympy(size) - 1)
    return Symbol(dim) if isinstance(dim, str) else dim


def _training(node: Node, values: Mapping[str, Value], local: bool) -> tuple[tuple[Node, ...], Mapping[str, str]]:
    running_mean, running_var = node.args[3], node.args[4]
    momentum, epsilon = node.args[6], node.args[7]
    assert isinstance(node.args[0], Ref) and isinstance(momentum, float)
    shape = values[node.args[0].name].shape
    reduced = tuple(dim for dim in range(len(shape)) if dim != 1)
    wide: Shape = tuple(size if dim == 1 else 1 for dim, size in enumerate(shape))
    size = count([shape[dim] for dim in reduced])
    number: Arg = Symbol(size) if isinstance(size, str) else size
    writer = _Writer(node, values, node.args[1:3])
    x = writer.input(shape)
    each: Shape = (shape[0], *wide[1:]) if local else wide

    def average(x: Ref, name: str, suffix: str = "sum") -> Ref:
        if local:
            return writer.add("ap.local_mean", (x, reduced, 0), name, each)
        return writer.add(
            "aten.div.Tensor", (writer.add("aten.sum.dim_IntList", (x, reduced, True), suffix, wide), number), name, wide
        )

    mean = average(x, "mean")
    centered = writer.add("aten.sub.Tensor", (x, mean), "centered", shape)
    squares = writer.add("aten.mul.Tensor", (centered, centered), "squares", shape)
    variance = average(squares, "variance", "squares_sum")
    shifted = writer.add("aten.add.Tensor", (variance, epsilon), "variance_eps", each)
    inverse = writer.add("aten.rsqrt", (shifted,), "inverse", each)
    writer.affine(writer.add("aten.mul.Tensor", (centered, inverse), "normal", shape), shape, wide)
    aliases: dict[str, str] = {}
    if running_mean is not None and running_var is not None and len(node.outputs) >= 5:
        narrow = values[running_mean.name].shape  # type: ignore[union-attr]
        if local:
            held = writer.add("aten.detach", (squares,), "squares_held", shape, flows=False)
            spread = writer.add("ap.local_mean", (held, reduced, 1), "unbiased_each", each, flows=False)
            mean, unbiased = (_of_all(writer, x, shape[0], wide, name) for x, name in ((mean, "mean"), (spread, "unbiased")))
        else:
            unbiased = writer.add("aten.div.Tensor", (Ref(f"{node.name}_squares_sum"), _minus_one(size)), "unbiased", wide)
        for running, fresh, output in ((running_mean, mean, node.outputs[3]), (running_var, unbiased, node.outputs[4])):
            stem = output.name.removeprefix(f"{node.name.removesuffix('_0')}_")
            flat_fresh = writer.add("aten.reshape", (fresh, size_args(narrow)), f"new{stem}", narrow)
            held = writer.add("aten.detach", (flat_fresh,), f"held{stem}", narrow, flows=False)
            kept = writer.dtype_of(running)  # type: ignore[arg-type]
            old = writer.add("aten.mul.Tensor", (running, 1.0 - momentum), f"old{stem}", narrow, False, kept)
            part = writer.add("aten.mul.Tensor", (held, momentum), f"part{stem}", narrow, flows=False)
            dtype = max(kept, writer.dtype, key=_WIDTH.__getitem__)
            aliases[output.name] = writer.add("aten.add.Tensor", (old, part), f"running{stem}", narrow, False, dtype).name
    return tuple(writer.nodes), aliases


def _inference(node: Node, values: Mapping[str, Value]) -> tuple[tuple[Node, ...], Mapping[str, str]]:
    x, running_mean, running_var, epsilon = node.args[0], node.args[3], node.args[4], node.args[6]
    assert isinstance(x, Ref) and isinstance(running_mean, Ref) and isinstance(running_var, Ref)
    shape = values[x.name].shape
    wide: Shape = tuple(size if dim == 1 else 1 for dim, size in enumerate(shape))
    writer = _Writer(node, values, node.args[1:5])
    x, kept = writer.input(shape), writer.dtype_of(running_var)
    mean = writer.add("aten.reshape", (running_mean, size_args(wide)), "mean", wide, False, writer.dtype_of(running_mean))
    variance = writer.add("aten.reshape", (running_var, size_args(wide)), "variance", wide, False, kept)
    shifted = writer.add("aten.add.Tensor", (variance, epsilon), "eps", wide, False, kept)
    inverse = writer.add("aten.rsqrt", (shifted,), "inverse", wide, False, kept)
    centered = writer.add("aten.sub.Tensor", (x, mean), "centered", shape)
    writer.affine(writer.add("aten.mul.Tensor", (centered, inverse), "normal", shape), shape, wide)
    return tuple(writer.nodes), {}
