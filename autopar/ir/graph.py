"""The captured forward: distinct blocks of ATen operations, and the calls that string them together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.ir.dims import Dim, Shape
from autopar.ir.interface import Interface, Output


@dataclass(frozen=True, slots=True)
class Ref:
    """A use of a value by name (an SSA name, unique within its block)."""

    name: str


@dataclass(frozen=True, slots=True)
class Symbol:
    """A size in the batch (see `dims`) where an operation takes a number."""

    dim: Dim


@dataclass(frozen=True, slots=True)
class DType:
    """A dtype as an argument: ``float32``, ``bfloat16``, ``int64``, ``bool`` ..."""

    name: str


Arg = Ref | Symbol | DType | int | float | bool | str | None | tuple["Arg", ...]


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor: its name, shape (global, before sharding), dtype, and whether a gradient flows through it."""

    name: str
    shape: Shape
    dtype: str
    differentiable: bool = False


@dataclass(frozen=True, slots=True)
class Node:
    """One operation. `op` is ``aten.linear`` (default overload) or ``aten.add.Tensor``; autopar's own are ``ap.*``.

    `operands()` are the tensors among the arguments, flattened in order (args, then kwargs): every per-operand tuple in
    rules, plans and passes is in that order. `module` is the path relative to the block; `source` is ``file.py:line``.
    """

    op: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    outputs: tuple[Value, ...]
    module: str = ""
    source: str = ""
    no_grad: bool = False

    @property
    def name(self) -> str:
        return self.outputs[0].name

    def operands(self) -> tuple[str, ...]:
        return tuple(ref.name for arg in (*self.args, *(arg for _, arg in self.kwargs)) for ref in refs(arg))


def refs(arg: Arg) -> Iterator[Ref]:
    """Every `Ref` in an argument, in order."""
    if isinstance(arg, Ref):
        yield arg
    elif isinstance(arg, tuple):
        for item in arg:
            yield from refs(item)


def draws_masks(node: Node) -> bool:
    """Whether the operation is random: dropout, attention with dropout (both in training only), and random numbers."""
    if node.op == "aten.scaled_dot_product_attention":
        given = node.args[4] if len(node.args) > 4 else dict(node.kwargs).get("dropout_p", 0.0)
        return given != 0.0
    return node.op in ("ap.dropout", "ap.random")


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter or buffer that a block reads. `path` is relative to the block's module (``self_attn.q_proj.weight``).

    `cut`: expert weights, of which each of so many neighbouring data ranks holds a part of dimension 0 (expert parallelism).
    """

    value: Value
    path: str
    trainable: bool = True
    buffer: bool = False
    cut: int = 1


@dataclass(frozen=True, slots=True)
class Block:
    """A distinct piece of the forward. `outputs` are names of node outputs (or of inputs passed through).

    `updates` are buffer writes: (parameter value name, name of the new value), made after the forward in training mode.
    """

    name: str
    inputs: tuple[Value, ...]
    parameters: tuple[Parameter, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]
    updates: tuple[tuple[str, str], ...] = ()

    def values(self) -> dict[str, Value]:
        """Every value of the block by name."""
        out = {value.name: value for value in self.inputs}
        out.update((parameter.value.name, parameter.value) for parameter in self.parameters)
        out.update((value.name, value) for node in self.nodes for value in node.outputs)
        return out


@dataclass(frozen=True, slots=True)
class Call:
    """One use of a block. `inputs` and `outputs` name graph values; `parameters` are original fully qualified names.

    `prefix` is the module path of this instance (``model.layers.3``), empty for the model's own glue.
    """

    block: str
    prefix: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Graph:
    """The whole forward. `inputs` are the tensors of the user's batch under their keyword names.

    The result is `loss`, a scalar, and beside it the `outputs` that were asked for. `interface` is how the user calls the model
    (None in graphs that were written by hand: by the names of the inputs). `batch` is the batch size of the example; 0-th
    dimensions that follow it are ``B``. `batch_is_symbolic` is false where capture had to specialise (then every size is an int).
    """

    name: str
    inputs: tuple[Value, ...]
    blocks: tuple[Block, ...]
    calls: tuple[Call, ...]
    loss: str
    batch: int
    fingerprint: str
    batch_is_symbolic: bool = True
    notes: tuple[str, ...] = ()
    outputs: tuple[Output, ...] = ()
    interface: Interface | None = None

    @property
    def results(self) -> tuple[str, ...]:
        """The values that the program returns: the loss first."""
        return (self.loss, *(output.value for output in self.outputs))

    def block(self, name: str) -> Block:
        return next(block for block in self.blocks if block.name == name)

    def count(self, name: str) -> int:
        """How often a block is called."""
        return sum(call.block == name for call in self.calls)

    def parameters(self) -> dict[str, Parameter]:
        """Every distinct parameter and buffer by its original name; a tied one appears once."""
        blocks = {block.name: block for block in self.blocks}
        return {
            name: parameter
            for call in self.calls
            for name, parameter in zip(call.parameters, blocks[call.block].parameters, strict=True)
        }
