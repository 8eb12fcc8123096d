"""Writes dataclasses of the IR as plain data and reads them back, as their annotations say; and fingerprints of a graph: what it
computes and how it is called, as short texts.

A class of plain fields is msgspec's own matter; of another one msgspec checks a struct that is derived from the class. Placements
and arguments of operations have a text of their own (`_HOOKS`). ValueError, of msgspec with the path of the fault, on other data.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cache, partial
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from autopar.ir.graph import Arg, DType, Graph, Node, Parameter, Ref, Symbol
from autopar.ir.interface import Argument, Interface
from autopar.ir.placement import format_placements, parse_placements
from autopar.ir.plan import BlockPlan, Pipeline, Precision
from autopar.ir.plan_file.document import SavedTensors

_INT64 = 2**63
T = TypeVar("T")


def encode(value: Any) -> Any:
    """An instance of a dataclass as what msgspec writes."""
    hint: Any = type(value)
    return _codec_of(hint).encode(value)


def decode(cls: type[T], data: Any) -> T:
    """The inverse of `encode`, for the content of a JSON document."""
    hint: Any = cls
    codec = _codec_of(hint)
    value: T = codec.decode(msgspec.convert(data, codec.type))
    return value


def file_type(cls: Any) -> Any:
    """The type that msgspec checks for a dataclass."""
    return _codec_of(cls).type


def encode_arg(arg: Arg) -> Any:
    """One argument as JSON. What JSON lacks is an object of one key: ref, size, real (a float computed of sizes), dtype, float
    (inf, nan), int (over 64 bits)."""
    if isinstance(arg, Ref):
        return {"ref": arg.name}
    if isinstance(arg, Symbol):
        return {"real" if arg.real else "size": arg.dim}
    if isinstance(arg, DType):
        return {"dtype": arg.name}
    if isinstance(arg, tuple):
        return [encode_arg(item) for item in arg]
    if isinstance(arg, float) and not math.isfinite(arg):
        return {"float": str(arg)}
    if isinstance(arg, int) and not -_INT64 <= arg < _INT64:
        return {"int": str(arg)}
    return arg


def decode_arg(data: Any) -> Arg:
    """The inverse of `encode_arg`."""
    if isinstance(data, list | tuple):
        return tuple(decode_arg(item) for item in data)
    if data is None or isinstance(data, int | float | str):
        return data
    if isinstance(data, dict) and len(data) == 1:
        ((key, value),) = data.items()
        if key in _TAGS and isinstance(value, str if key in ("ref", "dtype") else str | int):
            return _TAGS[key](value)
    raise ValueError(f"{str(data)[:80]} is not an argument; write {{ref}}, {{size}}, {{real}}, {{dtype}}, {{float}} or {{int}}")


_TAGS: Mapping[str, Callable[[Any], Arg]] = {
    "ref": Ref, "size": Symbol, "real": partial(Symbol, real=True), "dtype": DType, "float": float, "int": int,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Codec:
    """The form in a file of values of one annotation: the type that msgspec checks, and both directions (None: as they are)."""

    type: Any
    to_file: Callable[[Any], Any] | None = None
    from_file: Callable[[Any], Any] | None = None

    def encode(self, value: Any) -> Any:
        return value if self.to_file is None else self.to_file(value)

    def decode(self, data: Any) -> Any:
        return data if self.from_file is None else self.from_file(data)


_ARGUMENT = _Codec(Any, encode_arg, decode_arg)
_HOOKS = {
    "Arg": _ARGUMENT,
    "Form": _ARGUMENT,
    "Kwargs": _Codec(
        dict[str, Any],
        lambda pairs: {key: encode_arg(arg) for key, arg in pairs},
        lambda items: tuple((key, decode_arg(data)) for key, data in items.items()),
    ),
    "Placements": _Codec(str, format_placements, parse_placements),
}
"""The codecs by the name of an annotation."""

_KEYS: Mapping[type[Any], str] = {
    Node: "op args outputs kwargs? module? source? no_grad?",
    Parameter: "value path trainable? buffer?",
    Argument: "path input? constant? optional? batch_dim?",
    Precision: "compute! master! offload_optimizer? reduce? float8?",
    BlockPlan: "block zero recompute! inputs parameters outputs conversions recompute_nodes recompute_conversions offload"
    " partition_saved",
    Pipeline: "schedule=name stages virtual layers cuts repeated actions weight_versions",
}
"""The fields of a class in the file, where they are not all in their order (the nodes of a block stand in `ops`). ``?``: it is
left out where it is the default, ``!``: it must be there although it has a default, ``=``: the key in the file."""
_FIELD = re.compile(r"(\w+)(?:=(\w+))?([?!]?)")


@cache
def _codec_of(hint: Any) -> _Codec:
    if isinstance(hint, _Codec):
        return hint
    if is_dataclass(hint):
        return _codec_of_class(hint)
    parts = () if get_origin(hint) is Annotated else get_args(hint)
    codecs = [_codec_of(part) for part in parts if part is not ...]
    if all(each.to_file is None for each in codecs):
        return _Codec(hint)
    first = codecs[0]
    if get_origin(hint) is not tuple:  # a class, or None
        return _Codec(
            first.type | None,
            lambda value: None if value is None else first.encode(value),
            lambda data: None if data is None else first.decode(data),
        )
    if ... in parts:
        return _Codec(
            tuple[first.type, ...],  # type: ignore[name-defined]
            lambda items: tuple(map(first.encode, items)),
            lambda items: tuple(map(first.decode, items)),
        )
    return _Codec(
        tuple[tuple(each.type for each in codecs)],  # type: ignore[misc]
        lambda items: tuple(each.encode(item) for each, item in zip(codecs, items, strict=True)),
        lambda items: tuple(each.decode(item) for each, item in zip(codecs, items, strict=True)),
    )


def _codec_of_class(cls: Any) -> _Codec:
    hints = get_type_hints(cls, localns=_HOOKS, include_extras=True)
    own = {each.name: each.default for each in fields(cls) if each.init}
    written = _FIELD.findall(_KEYS.get(cls, " ".join(own)))
    codecs = {name: _codec_of(hints[name]) for name, _, _ in written}
    if cls not in _KEYS and len(own) == len(fields(cls)) and all(each.to_file is None for each in codecs.values()):
        return _Codec(cls)
    keys = {name: key or name for name, key, _ in written}
    empty = {name: () if default is MISSING else default for name, default in own.items()}
    omitted = {name: empty[name] for name, _, mark in written if mark == "?"}
    absent = {name: empty[name] for name in own.keys() - codecs.keys()}

    def to_file(value: Any) -> dict[str, Any]:
        items = {name: getattr(value, name) for name in keys}
        return {keys[name]: codecs[name].encode(item) for name, item in items.items() if item != omitted.get(name, MISSING)}

    def from_file(data: Any) -> Any:
        return cls(**{name: codecs[name].decode(getattr(data, key)) for name, key in keys.items()}, **absent)

    def struct_field(name: str, mark: str) -> Any:
        if mark == "!" or (own[name] is MISSING and mark != "?"):
            return keys[name], codecs[name].type
        return keys[name], codecs[name].type, msgspec.field(default_factory=lambda: codecs[name].encode(empty[name]))

    struct = msgspec.defstruct(cls.__name__, [struct_field(name, mark) for name, _, mark in written], kw_only=True)
    return _Codec(struct, to_file, from_file)


def graph_fingerprint(graph: Graph) -> str:
    """16 hexadecimal digits, equal for equal models and shapes.

    Everything counts but the size of a symbolic batch and what only people read: the name, notes, module paths and source lines,
    and the class that the call returns.
    """
    blocks = (replace(block, nodes=tuple(replace(node, module="", source="") for node in block.nodes)) for block in graph.blocks)
    interface = graph.interface or Interface()
    parts = (
        interface.positional,
        graph.inputs,
        [encode(block) for block in blocks],
        graph.calls,
        graph.loss,
        graph.outputs,
        [encode(each) for each in interface.arguments if not each.optional],
        graph.batch_is_symbolic,
    )
    return _digest((parts, None if graph.batch_is_symbolic else graph.batch))


def checksum(graph: Graph) -> str:
    """16 hexadecimal digits of all that a file says of a graph, with what `graph_fingerprint` leaves out: names, notes, sources,
    the arguments that may be left out, and the form of the result. They differ between versions of a library and between scripts
    for models that compute the same, so a captured model is not compared with them; a file that is used without its model is."""
    return _digest(encode(replace(graph, checksum="")))


def saves_checksum(saves: Mapping[str, SavedTensors]) -> str:
    """16 hexadecimal digits of what autograd saves, as a file says it: who edits it has it observed anew."""
    return _digest([(key, encode(saved)) for key, saved in saves.items()]) if saves else ""


def _digest(data: object) -> str:
    return hashlib.sha256(msgspec.json.encode(data)).hexdigest()[:16]
