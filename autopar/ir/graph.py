"""The captured forward as data: distinct blocks of ATen operations, and the sequence of calls of these blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from autopar.ir.dims import Dim, Shape, has_batch, real_at, size_at
from autopar.ir.interface import Interface, Output
from autopar.ir.names import Dtype, Line, Name, Op, Path


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that is a value, by its SSA name (unique within its block)."""

    name: str


@dataclass(frozen=True, slots=True)
class Symbol:
    """An argument that is a size depending on the batch (see `dims`). `whole`: in the program of a rank with an uneven shard of
    the batch, a number in terms of the whole batch. `real`: no size but a float computed of one (``1 / x.shape[0]``)."""

    dim: Dim
    whole: bool = False
    real: bool = False

    def at(self, batch: int) -> int | float:
        """Return the number at batch `batch`."""
        return real_at(self.dim, batch) if self.real else size_at(self.dim, batch)


@dataclass(frozen=True, slots=True)
class DType:
    """An argument that is a dtype: ``float32``, ``bfloat16``, ``int64``, ``bool`` ..."""

    name: str


Arg = Ref | Symbol | DType | int | float | bool | str | None | tuple["Arg", ...]
Kwargs = tuple[tuple[str, Arg], ...]


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor: its name, global shape (before sharding), dtype, and whether a gradient flows through it."""

    name: Name
    shape: Shape
    dtype: Dtype
    differentiable: bool = False


@dataclass(frozen=True, slots=True)
class Node:
    """One operation. `op` is ``aten.linear`` (default overload) or ``aten.add.Tensor``; autopar's own operations are ``ap.*``.

    `operands()` are the tensors among the arguments (args, then kwargs), flattened: whatever is listed per operand in rules,
    plans and passes is in this order. `module` is the module path relative to the block; `source` is ``file.py:line``.
    """

    op: Op
    args: tuple[Arg, ...]
    kwargs: Kwargs
    outputs: tuple[Value, ...]
    module: Line = ""
    source: Line = ""
    no_grad: bool = False
    _operands: tuple[str, ...] | None = field(default=None, init=False, compare=False, repr=False)

    @property
    def name(self) -> str:
        return self.outputs[0].name

    def operands(self) -> tuple[str, ...]:
        names = self._operands
        if names is None:
            names = tuple(ref.name for arg in (*self.args, *(arg for _, arg in self.kwargs)) for ref in refs(arg))
            object.__setattr__(self, "_operands", names)
        return names


def size_argument(dim: Dim) -> Arg:
    """A size as an argument."""
    return Symbol(dim) if isinstance(dim, str) else dim


def leaves(arg: Arg) -> Iterator[Arg]:
    """Every part of an argument that is no tuple, in order."""
    if isinstance(arg, tuple):
        for item in arg:
            yield from leaves(item)
    else:
        yield arg


def refs(arg: Arg) -> Iterator[Ref]:
    """Every `Ref` in an argument, in order."""
    return (leaf for leaf in leaves(arg) if isinstance(leaf, Ref))


def map_leaves(change: Callable[[Arg], Arg], arg: Arg) -> Arg:
    """Return an argument with every part that is no tuple changed, in order."""
    return tuple(map_leaves(change, item) for item in arg) if isinstance(arg, tuple) else change(arg)


def map_arguments(change: Callable[[Arg], Arg], node: Node) -> Node:
    """Return a node with every part of its arguments changed, args before kwargs."""
    args = tuple(map_leaves(change, arg) for arg in node.args)
    return replace(node, args=args, kwargs=tuple((name, map_leaves(change, arg)) for name, arg in node.kwargs))


def with_operands(node: Node, operands: Iterable[str]) -> Node:
    """The node with other operands, in the order of `Node.operands()`."""
    names = iter(operands)
    return map_arguments(lambda arg: Ref(next(names)) if isinstance(arg, Ref) else arg, node)


def draws_masks(node: Node) -> bool:
    """Return whether the operation is random: dropout, attention with dropout (both in training only), and random numbers."""
    if node.op == "aten.scaled_dot_product_attention":
        probability = node.args[4] if len(node.args) > 4 else dict(node.kwargs).get("dropout_p", 0.0)
        return probability != 0.0
    return node.op in ("ap.dropout", "ap.random")


def ancestors(nodes: Sequence[Node], names: Iterable[str]) -> list[Node]:
    """The nodes that compute these values, and all nodes that those depend on, in order.

    Nodes are in topological order, so one reverse scan does it; a networkx graph for `networkx.ancestors` takes five times as
    long (GPT-2's block: 215 against 45 us).
    """
    wanted, out = set(names), []
    for node in reversed(nodes):
        if any(value.name in wanted for value in node.outputs):
            out.append(node)
            wanted.update(node.operands())
    return out[::-1]


def lacks_batch(nodes: Iterable[Node], inputs: Iterable[Value]) -> bool:
    """Return whether nodes depend on the number of examples, which none of these inputs tells."""
    if any(has_batch(dim) for value in inputs for dim in value.shape):
        return False
    every = leaves(tuple(arg for node in nodes for arg in (*node.args, *(value for _, value in node.kwargs))))
    return any(isinstance(leaf, Symbol) and has_batch(leaf.dim) for leaf in every)


def batch_input(inputs: Iterable[Value]) -> tuple[Value, ...]:
    """Return an input that tells the number of examples, of those without a gradient if there are any; none where none does."""
    tells = (value for value in inputs if any(map(has_batch, value.shape)))
    return tuple(sorted(tells, key=lambda value: value.differentiable)[:1])


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter or buffer that a block reads. `path` is relative to the block's module (``self_attn.q_proj.weight``)."""

    value: Value
    path: Path
    trainable: bool = True
    buffer: bool = False


@dataclass(frozen=True, slots=True)
class Block:
    """A distinct part of the forward. `outputs` are names of node outputs (or of inputs that are handed on).

    `updates` are writes of buffers, (buffer's value name, name of the new value), which happen after the forward in training.
    """

    name: Name
    inputs: tuple[Value, ...]
    parameters: tuple[Parameter, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Name, ...]
    updates: tuple[tuple[Name, Name], ...] = ()

    def values(self) -> dict[str, Value]:
        """Every value of the block by name."""
        out = {value.name: value for value in self.inputs}
        out.update((parameter.value.name, parameter.value) for parameter in self.parameters)
        out.update((value.name, value) for node in self.nodes for value in node.outputs)
        return out


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a block. `inputs` and `outputs` name values of the graph; `parameters` are fully qualified names of the model.

    `prefix` is the module path of this instance (``model.layers.3``); it is empty for what belongs to no repeated layer.
    """

    block: Name
    prefix: Path
    inputs: tuple[Name, ...]
    outputs: tuple[Name, ...]
    parameters: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class Graph:
    """The whole forward. `inputs` are the tensors of the user's batch by their keyword names.

    The results are `loss`, a scalar, and the requested `outputs`. `interface` is how the user calls the model (None in graphs
    that are written by hand: by the names of the inputs). `batch` is the batch size of the example; sizes that depend on it are
    expressions in ``B``. `batch_is_symbolic` is false where capture had to specialise: then every size is an int.

    `fingerprint` is of what it computes, `checksum` of all that the file says of it (empty where it is of no file).
    """

    name: Name
    inputs: tuple[Value, ...]
    blocks: tuple[Block, ...]
    calls: tuple[Call, ...]
    loss: Name
    batch: int
    fingerprint: str
    batch_is_symbolic: bool = True
    notes: tuple[Line, ...] = ()
    outputs: tuple[Output, ...] = ()
    interface: Interface | None = None
    checksum: str = field(default="", compare=False, repr=False)
    _counts: Counter[str] | None = field(default=None, init=False, compare=False, repr=False)

    @property
    def results(self) -> tuple[str, ...]:
        """The values that the program returns: the loss first."""
        return (self.loss, *(output.value for output in self.outputs))

    @property
    def has_loss(self) -> bool:
        """Whether the model returns a loss."""
        return self.interface is None or self.interface.has_loss

    @property
    def forward_only(self) -> bool:
        """Whether no gradient flows into the loss: the model is frozen, and its program has no backward."""
        return not self.differentiable(self.loss)

    def value(self, name: str) -> Value | None:
        """The value of this name that a call makes, as it is called in the call's block; None where none makes it."""
        call = next((call for call in self.calls if name in call.outputs), None)
        if call is None:
            return None
        block = self.block(call.block)
        return block.values()[block.outputs[call.outputs.index(name)]]

    def differentiable(self, name: str) -> bool:
        """Return whether a gradient flows through a value that a call makes."""
        value = self.value(name)
        return value is not None and value.differentiable

    def block(self, name: str) -> Block:
        return next(block for block in self.blocks if block.name == name)

    def count(self, name: str) -> int:
        """The number of calls of a block."""
        counts = self._counts
        if counts is None:
            counts = Counter(call.block for call in self.calls)
            object.__setattr__(self, "_counts", counts)
        return counts[name]

    def updated_buffers(self) -> frozenset[str]:
        """The buffers that the forward writes into, by their original names."""
        written = {block.name: {name for name, _ in block.updates} for block in self.blocks}
        blocks = {block.name: block for block in self.blocks}
        return frozenset(
            name
            for call in self.calls
            for name, parameter in zip(call.parameters, blocks[call.block].parameters, strict=True)
            if parameter.value.name in written[call.block]
        )

    def parameters(self) -> dict[str, Parameter]:
        """Every distinct parameter and buffer by its original name; a tied one appears once."""
        blocks = {block.name: block for block in self.blocks}
        return {
            name: parameter
            for call in self.calls
            for name, parameter in zip(call.parameters, blocks[call.block].parameters, strict=True)
        }


def map_graph(graph: Graph, value: Callable[[Value], Value], argument: Callable[[Arg], Arg]) -> Graph:
    """Return a graph with every value changed, and every part of an argument that is no tuple."""

    def node(old: Node) -> Node:
        return replace(map_arguments(argument, old), outputs=tuple(map(value, old.outputs)))

    def block(old: Block) -> Block:
        parameters = tuple(replace(each, value=value(each.value)) for each in old.parameters)
        return replace(old, inputs=tuple(map(value, old.inputs)), parameters=parameters, nodes=tuple(map(node, old.nodes)))

    return replace(graph, inputs=tuple(map(value, graph.inputs)), blocks=tuple(map(block, graph.blocks)))
