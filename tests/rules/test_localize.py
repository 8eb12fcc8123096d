"""Sizes in arguments become local, numbers stay global."""

from __future__ import annotations

import pytest

from autopar.ir.graph import Arg, Node, Ref, Symbol, Value
from autopar.rules.localize import localize_args, localize_uneven_args, scale_batch


def node(op: str, *args: Arg, shapes: list[tuple[int | str, ...]]) -> Node:
    return Node(op, args, (), tuple(Value(f"y{i}", shape, "float32") for i, shape in enumerate(shapes)))


X = Ref("x")


@pytest.mark.parametrize(
    ("given", "local", "data_size", "args"),
    [
        (node("aten.reshape", X, (Symbol("B"), 4, 6), shapes=[("B", 4, 6)]), [("B", 2, 6)], 2, (X, (Symbol("B"), 2, 6))),
        (node("aten.full", (Symbol("B"), 8), 1.0, shapes=[("B", 8)]), [("2*B", 8)], 2, ((Symbol("2*B"), 8), 1.0)),
        (node("aten.slice.Tensor", X, 1, 8, 16, shapes=[(4, 8)]), [(4, 2)], 1, (X, 1, 2, 4)),
        (node("aten.slice.Tensor", X, 1, 8, 2**63 - 1, shapes=[(4, 8)]), [(2, 8)], 1, (X, 1, 8, 2**63 - 1)),
        (node("aten.slice.Tensor", X, 0, 0, Symbol("B"), shapes=[("B", 8)]), [("B", 8)], 4, (X, 0, 0, Symbol("B"))),
        (node("aten.slice.Tensor", X, 0, 0, Symbol("B"), shapes=[("B", 8)]), [("4*B", 8)], 4, (X, 0, 0, Symbol("4*B"))),
        (node("aten.split.Tensor", X, 8, 1, shapes=[(4, 8), (4, 8)]), [(4, 2), (4, 2)], 1, (X, 2, 1)),
        (node("aten.split.Tensor", X, 8, 1, shapes=[(4, 8), (4, 4)]), [(2, 8), (2, 4)], 1, (X, 8, 1)),
        (node("aten.split_with_sizes", X, (8, 8), 1, shapes=[(4, 8), (4, 8)]), [(4, 4), (4, 4)], 1, (X, (4, 4), 1)),
        (node("aten.div.Tensor", X, Symbol("8*B"), shapes=[()]), [()], 4, (X, Symbol("32*B"))),
        (node("aten.arange", Symbol("B"), shapes=[("B",)]), [("4*B",)], 4, (Symbol("4*B"),)),
    ],
)  # fmt: skip
def test_arguments(given: Node, local: list[tuple[int | str, ...]], data_size: int, args: tuple[Arg, ...]) -> None:
    found = localize_args(given, local, data_size)
    assert found.args == args
    assert [value.shape for value in found.outputs] == local


OWN, ALL = Symbol("B"), Symbol("B", whole=True)


@pytest.mark.parametrize(
    ("given", "local", "sharded", "args"),
    [
        (node("aten.reshape", X, (OWN, 4, 6), shapes=[("B", 4, 6)]), [("B", 2, 6)], 0, (X, (OWN, 2, 6))),
        (node("aten.reshape", X, (OWN, OWN), shapes=[("B", "B")]), [("B", "B")], 1, (X, (ALL, OWN))),
        (node("aten.full", (OWN, 8), 1.0, shapes=[("B", 8)]), [("B", 8)], None, ((ALL, 8), 1.0)),
        (node("aten.div.Tensor", X, Symbol("8*B - 1"), shapes=[("B",)]), [("B",)], 0, (X, Symbol("8*B - 1", whole=True))),
        (node("aten.arange", OWN, shapes=[("B",)]), [("B",)], None, (ALL,)),
        (node("aten.slice.Tensor", X, 0, 0, Symbol("4*B"), shapes=[("4*B",)]), [("2*B",)], 0, (X, 0, 0, Symbol("2*B"))),
        (node("aten.slice.Tensor", X, 0, 0, Symbol("4*B"), shapes=[("4*B",)]), [("2*B",)], None,
         (X, 0, 0, Symbol("2*B", whole=True))),
        (node("aten.slice.Tensor", X, 0, 0, OWN, shapes=[("B",)]), [("B",)], 0, (X, 0, 0, ALL)),  # all of its own examples
    ],
)  # fmt: skip
def test_arguments_of_uneven_shards(
    given: Node, local: list[tuple[int | str, ...]], sharded: int | None, args: tuple[Arg, ...]
) -> None:
    assert localize_uneven_args(given, local, sharded).args == args


def test_scale_batch() -> None:
    assert scale_batch("16*B", 4) == "64*B" and scale_batch(7, 4) == 7 and scale_batch("B", 1) == "B"
