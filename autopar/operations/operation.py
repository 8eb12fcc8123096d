"""The record of an operation: what the compiler knows of it, in one place. Other rooms ask `table.operation` for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.ir.graph import Node
from autopar.operations.notation.rule import Derive, NamedFunction, Rule
from autopar.operations.notation.spelling import Spelling

Sizes = tuple[int, ...]

Flops = Callable[[Node, Sequence[Sizes], Sequence[Sizes]], float]
"""Forward FLOPs from a node and the shapes of its operands and results. A multiply-add is two."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation: `name` is ``aten.add``, which stands for all overloads, or that of one overload, ``aten.div.Tensor``.

    `line`, `linear_in`, `functions`, `addends` are its sharding rule (see `notation.rule.Rule`); without a line every rank
    computes it whole. `flops` are those of matrix products and what is made of them (None: it streams). `spelling` is how the
    program writes it (None: by its registered name).
    """

    name: str
    line: str | Derive | None = None
    linear_in: tuple[tuple[int, ...] | str, ...] = ()
    functions: tuple[NamedFunction, ...] = ()
    plain: NamedFunction = NamedFunction("", "")  # the operation itself on shards: whose work may be uneven
    addends: bool = True
    flops: Flops | None = None
    spelling: Spelling | None = None

    # matrix products and what is made of them
    product: bool = False  # a matrix product, or a batch of them, of operands `left` and `left + 1`
    left: int = 0  # the operand that is the left matrix of a product; one before it is added to the result
    linear: bool = False  # a product with a weight of two dimensions: nn.Linear and its kind
    batched: bool = False  # a product whose sides may both have leading dimensions: scores and context of attention in parts
    attention: bool = False  # attention in one kernel, which saves no scores
    experts: bool = False  # routed experts
    convolution: bool = False
    float8: bool = False  # of bfloat16 tensors, with products in float8
    scaled: bool = False  # kernels of its own cast the operands to float8 (dynamic scaling)
    float32_sums: bool = False  # adds up parts of its results and gradients in float32
    splits_backward: bool = False  # the runtime can compute the gradient of the input first, and that of the weight later

    # memory traffic
    view: bool = False  # the forward only changes strides, and runs no kernel
    slices: bool = False  # a view whose backward writes a gradient of another size
    may_share: bool = False  # the result may be the operand itself: a cast to the same dtype, a conversion without a collective
    lookup: bool = False  # reads of its first operand only as much as it returns
    bag: bool = False  # a lookup that returns sums of rows
    kernels: tuple[int, int] = (1, 1)  # of an eager forward and backward; each but the first reads and writes operand 0 once more
    sum: bool = False  # the gradient is passed through without a kernel, but for operands that were broadcast
    transcendental: bool = False  # a transcendental function, or a random number, for each element
    in_place: bool = False  # the backward makes the gradient in the storage of what the forward saved, in float32

    # what it is for
    norm: bool = False  # a norm of the last dimensions in one kernel
    loss: bool = False  # cross entropy of logits
    embedding: bool = False  # a lookup in a table of words, which vocabulary parallelism shards by rows
    factory: bool = False  # takes no tensors
    layer: bool = False  # the whole forward of a torch module, whose name the result has in the program
    # Values of captured graphs are named after the module. Names stand in saved plans, so that no operation is added to these.
    named_after_module: bool = False
    published: bool = False  # only in the graphs of published runs of other software, which are priced and never run

    # shards
    rank_statistics: bool = False  # the result depends on which examples a rank has
    gives_tuple: bool = False  # the call gives a tuple of tensors, even of one
    sizes_at: int | None = None  # the argument that is the shape of the result
    groups_at: int | None = None  # the argument that is the number of groups of channels

    @property
    def rule(self) -> Rule | None:
        """The sharding rule; None where every rank computes the operation whole."""
        return None if self.line is None else Rule(self.line, self.linear_in, self.functions, addends=self.addends)

    @property
    def shares_storage(self) -> bool:
        """Whether the result may be the first operand's storage."""
        return self.view or self.may_share

    def function(self, name: str) -> NamedFunction:
        """Return its named function of this name; `plain` where there is none."""
        return next((each for each in self.functions if each.name == name), self.plain)


def several(like: Operation, names: str) -> Iterator[Operation]:
    """Operations that have everything in common but their names; that of `like` is their namespace."""
    return (replace(like, name=f"{like.name}.{name}") for name in names.split())


def packet(op: str) -> str:
    """``aten.add.Tensor`` -> ``aten.add``."""
    return ".".join(op.split(".")[:2])
