"""Changes of JSON documents: a leaf or a part replaced, taken out, doubled, exchanged with its neighbour."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from autopar.ir.graph import Graph
from autopar.ir.plan_file.codec import checksum, decode, encode, graph_fingerprint

Place = tuple[str | int, ...]

ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 2**31, 2**53, 2**63 - 1, 2**64, -(2**63), 10**18, 10**25, 0.5, -0.0, 1e308, -1e308,
    1e-320,
    "", " ", "x", "²", "٣", "B", "S", "B*B", "B//0", "B**99", "16*B", "1e400", "nan", "inf", "R", "P", "I", "S(0)", "S(-1)",
    "S(99)",
    "S(0) R", "R R R R", "aten.add.Tensor", "aten.nothing", "ap.convert", "mylib::op", "float32", "int64", "object", "dp",
    "tp", "pp",
    "none", "1f1b", "0F0", "0F0 0B0", "a.b.c", "..", "/etc/passwd", "x" * 600, "\n", "\u2028", "\x00", "\ud800", "é",
    "__class__",
    [], {}, [[]], [None], [0], ["x"], {"": 0}, {"ref": "x"}, {"size": "B"}, {"dtype": "x"}, {"float": "nan"},
    {"int": "9" * 50}, {"x": {}},
)  # fmt: skip
"""Values that a field may hold after all: of the wrong type, extreme, or nearly right."""


def places(data: Any, at: Place = ()) -> Iterator[Place]:
    """Every part of the document but the whole."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield (*at, key)
        yield from places(value, (*at, key))


def part(data: Any, at: Place) -> Any:
    for key in at:
        data = data[key]
    return data


def changed(data: Any, at: Place, change: Any) -> Any:
    """A document with the parent of `at` given to `change`; everything else is shared with `data`."""
    if len(at) == 1:
        copy = dict(data) if isinstance(data, dict) else list(data)
        change(copy, at[0])
        return copy
    copy = dict(data) if isinstance(data, dict) else list(data)
    copy[at[0]] = changed(data[at[0]], at[1:], change)
    return copy


def replaced(data: Any, at: Place, value: Any) -> Any:
    """The document with one part replaced."""
    return changed(data, at, lambda parent, key: parent.__setitem__(key, value))


def mutated(data: Any, at: Place, draw: random.Random, pool: tuple[Any, ...] = ODD) -> Any:
    """The document with one change at the place."""

    def remove(parent: Any, key: Any) -> None:
        del parent[key]

    def double(parent: Any, key: Any) -> None:
        if isinstance(parent, list):
            parent.insert(key, parent[key])
        else:
            parent[f"{key}x"] = parent[key]

    def exchange(parent: Any, key: Any) -> None:
        keys = list(range(len(parent))) if isinstance(parent, list) else list(parent)
        other = draw.choice(keys)
        parent[key], parent[other] = parent[other], parent[key]

    def replace(parent: Any, key: Any) -> None:
        parent[key] = draw.choice(pool)

    def nearly(parent: Any, key: Any) -> None:
        old = parent[key]
        if isinstance(old, bool):
            parent[key] = not old
        elif isinstance(old, int):
            parent[key] = old + draw.choice((-1, 1, 2, old))
        elif isinstance(old, float):
            parent[key] = draw.choice((-old, old * 1e6, float(int(old))))
        elif isinstance(old, str):
            parent[key] = draw.choice((old + "x", old[1:], old.upper(), old + " R", old[::-1], old + "\n"))
        else:
            replace(parent, key)

    return changed(data, at, draw.choice((remove, double, exchange, replace, replace, nearly, nearly)))


# -- with checksums made anew


def resealed(document: dict[str, Any], change: Callable[[dict[str, Any]], object] = lambda document: None) -> str:
    """The file with a changed graph, and with checksums and fingerprints as if it had been written so."""
    document = json.loads(json.dumps(document))
    change(document)
    graph = decode(Graph, document["graph"])
    graph = dataclasses.replace(graph, fingerprint=graph_fingerprint(graph))
    graph = dataclasses.replace(graph, checksum=checksum(graph))
    document["graph"] = msgspec.to_builtins(encode(graph))
    document["model"]["fingerprint"] = graph.fingerprint
    return json.dumps(document)


def shapes(document: Any) -> list[Place]:
    """The shape of every value of the graph."""
    return [at for at in places(document) if at[0] == "graph" and at[-1] == "shape"]


SHAPE_CHANGES: dict[str, Callable[[list[Any]], list[Any]]] = {
    "one entry less": lambda shape: shape[:-1],
    "the first gone": lambda shape: shape[1:],
    "none": lambda shape: [],
    "one more": lambda shape: [*shape, 2],
    "reversed": lambda shape: shape[::-1],
    "odd": lambda shape: [7] * len(shape),
    "huge": lambda shape: [2**40] * len(shape),
    "zero": lambda shape: [0] * len(shape),
}
