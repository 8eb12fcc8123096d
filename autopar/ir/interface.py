"""How the user calls the model and what comes back: the leaves of its arguments, and the form of its result."""

from __future__ import annotations

from dataclasses import dataclass

Form = str | int | float | bool | None | tuple["Form", ...]
"""What the model returns, as words: ``("loss",)``; ``("output", path)``; ``("constant", value)``; ``("tuple", (form, ...))``;
``("list", (form, ...))``; ``("dict", ((key, form), ...))``; ``("class", "module:name", ((field, form), ...))``; None for what is
left out."""


@dataclass(frozen=True, slots=True)
class Argument:
    """A leaf of what the model's forward takes. `path`: the argument, then keys of dicts and places in tuples (``pairs.0``).

    `input` is the graph's input; empty for a constant, which `constant` describes (empty: any will do). `optional`: the constant
    is the forward's own default, and may be left out.
    """

    path: str
    input: str = ""
    constant: str = ""
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Output:
    """A field of the result that was asked for beside the loss, and the value of the graph that it is."""

    path: str
    value: str


@dataclass(frozen=True, slots=True)
class Interface:
    """`positional` are the names of the forward's arguments in their order. `left_out` are the tensors of the result that nobody
    asked for: they come back as None."""

    positional: tuple[str, ...] = ()
    arguments: tuple[Argument, ...] = ()
    returns: Form = ("loss",)
    left_out: tuple[str, ...] = ()


def constant_text(value: object) -> str:
    """A constant argument in words: its value where that is plain, else its type. `runtime.inputs` has the same rule."""
    plain = value is None or isinstance(value, bool | int | float | str) or type(value).__module__ == "torch"
    return repr(value) if plain else type(value).__name__
