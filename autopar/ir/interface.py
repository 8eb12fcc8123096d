"""The interface of the user's model: the leaves of its arguments, and the form of its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from autopar.ir.names import Line, Name

Form = str | int | float | bool | None | tuple["Form", ...]
"""The form of the model's result: ``("loss",)``, or ``("loss", dims)`` where it has dimensions, of one element; ``("output",
path)``; ``("constant", value)``; ``("tuple", (form, ...))``; ``("list", (form, ...))``; ``("dict", ((key, form), ...))``;
``("class", "module:name", ((field, form), ...))``; None for what is left out.

A dictionary has the forms of its keys before the pairs where these are no texts: ``("dict", (form, ...), ((text, form), ...))``,
and so has one of a class. ``("defaultdict", form of the factory, form of the dict)``. Beside tensors: ``("member", "module:enum",
form of the value)``; ``("named", "module:name")`` of a class, function or dtype; ``("device", text)``; ``("size", path, dim)`` of
an output; ``("examples", input, factor, more)`` of a number that is computed of the size of an input's batch: ``factor`` times
that, and ``more``; ``("object", type)`` of what no plan can hold; ``("cache",)`` of a key-value cache, which the model makes with
`use_cache`."""


@dataclass(frozen=True, slots=True)
class Argument:
    """A leaf of the arguments of the model's forward. `path` is the argument, then keys of dicts and indices of tuples
    (``pairs.0``).

    `input` is the graph's input; it is empty for a constant, whose text is `constant` (empty: any value will do). `optional`: the
    constant is the default of the forward and may be left out. `batch_dim`: where the user's tensor has the batch; the graph's
    input has it at dimension 0.
    """

    path: Line
    input: Line = ""
    constant: Line = ""
    optional: bool = False
    batch_dim: int = 0


OUTPUT_KINDS = ("gradient", "full", "dtensor")
"""The ways in which a field of the result comes back: as a full tensor that takes gradients, as a full tensor without, as a
DTensor without."""


@dataclass(frozen=True, slots=True)
class Output:
    """A field of the model's result that is returned beside the loss, its value in the graph, and how it comes back (one of
    `OUTPUT_KINDS`)."""

    path: Line
    value: Name
    kind: Annotated[str, Meta(pattern=rf"\A(?:{'|'.join(OUTPUT_KINDS)})\Z")] = "dtensor"

    @property
    def asked(self) -> str:
        """The text that asks for it: ``logits:full``."""
        return f"{self.path}:{self.kind}"


CONDITIONS = ("==", "!=", "<", "<=", ">", ">=")


@dataclass(frozen=True, slots=True)
class BatchCondition:
    """A condition on the global batch, under which the forward takes the branches that the graph has: a size in ``B``, whose
    quotients are floor divisions, and how it compares with zero."""

    size: Line
    sign: Annotated[str, Meta(pattern=rf"\A(?:{'|'.join(CONDITIONS)})\Z")]


@dataclass(frozen=True, slots=True)
class Interface:
    """`positional` are the names of the forward's arguments in their order. `left_out` are the tensors of the result that were
    not requested: they come back as None."""

    positional: tuple[Name, ...] = ()
    arguments: tuple[Argument, ...] = ()
    returns: Form = ("loss",)
    left_out: tuple[Line, ...] = ()
    batch_conditions: tuple[BatchCondition, ...] = ()

    @property
    def batch_dims(self) -> dict[str, int]:
        """The inputs whose tensors have the batch elsewhere than at dimension 0, each with the dimension."""
        return {each.input: each.batch_dim for each in self.arguments if each.batch_dim}

    @property
    def said_batch_dims(self) -> tuple[tuple[str, int], ...]:
        """The same by path in the user's arguments."""
        return tuple((each.path, each.batch_dim) for each in self.arguments if each.batch_dim)

    @property
    def has_loss(self) -> bool:
        """Whether the model returns a loss; else the graph's loss is a stand-in (the sum of all outputs), which nobody gets."""
        return loss_path(self.returns) is not None


def loss_path(form: Form) -> str | None:
    """The path of the loss in a form (empty: it is the result itself); None where there is none."""
    kind, *rest = form if isinstance(form, tuple) else (None,)
    if kind == "loss":
        return ""
    if kind == "defaultdict":
        return loss_path(rest[-1])
    parts: Any = rest[-1] if kind in ("tuple", "list", "dict", "class") else ()
    for key, each in enumerate(parts) if kind in ("tuple", "list") else parts:
        found = loss_path(each)
        if found is not None:
            return f"{key}.{found}" if found else str(key)
    return None
