"""The values that a pin's name stands for: a parameter by its path, the results of a module by its path, those of a source line,
or a value by its own name. ``*`` stands for one part of a path, as in torch's `parallelize_module`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache

from autopar.errors import PlanError
from autopar.ir.graph import Block, Call, Graph, Node

Key = tuple[str, str]
"""A block and the name of a value in it."""

_LINE = re.compile(r"(?:.*[\\/])?([^\\/]+\.py:\d+)")
"""``net.py:12``, with or without folders: operations know the name of the file."""


def named_values(graph: Graph, name: str) -> tuple[Key, ...]:
    """Return the values of a name. PlanError where nothing has it, or where it means only some of the equal layers that share
    one plan."""
    blocks = {block.name: block for block in graph.blocks}
    if line := _LINE.fullmatch(name):
        calls = _results(graph, blocks, lambda call, node: f"{call.prefix} {line[1]}" if node.source == line[1] else "")
    else:
        calls = {**_parameters(graph, blocks, name), **_results(graph, blocks, _module_group(name))}
    if not calls:
        own = tuple((block.name, value) for block in graph.blocks for value in block.values() if value == name)
        if own:
            return own
        raise PlanError(f"constrain {name}: {_nearest(graph, line[1] if line else name)}")
    for (block, _), of in calls.items():
        if len(of) < graph.count(block):
            first = graph.calls[min(of)].prefix or block
            whole = _general(name) if _general(name) != name else _general(first)
            raise PlanError(
                f"constrain {name}: it means {len(of)} of {graph.count(block)} equal layers ({first}, ...) that share one plan: "
                f"write {whole} for all of them"
            )
    return tuple(calls)


def matches(pattern: str, path: str) -> bool:
    """Return whether a path fits a pattern, part by part."""
    wanted, parts = pattern.split("."), path.split(".")
    return len(wanted) == len(parts) and all(map(fnmatchcase, parts, wanted))


def _parameters(graph: Graph, blocks: Mapping[str, Block], pattern: str) -> dict[Key, set[int]]:
    """The parameters that a pattern means, with the calls in which it does. A tied one has the paths of all modules that read it:
    ``lm_head.weight`` is that of the embedding."""
    out: dict[Key, set[int]] = {}
    for number, call in enumerate(graph.calls):
        parameters = {each.value.name: each for each in blocks[call.block].parameters}
        paths = [*zip(call.parameters, parameters, strict=True)]
        for node in blocks[call.block].nodes:
            read = (parameters[name] for name in node.operands() if name in parameters)
            paths += [(f"{module_path(call, node)}.{each.path.rpartition('.')[2]}", each.value.name) for each in read]
        for path, name in paths:
            if matches(pattern, path):
                out.setdefault((call.block, name), set()).add(number)
    return out


Group = Callable[[Call, Node], str]
"""The module or line that an operation of a call belongs to; empty where it is not meant."""


def module_path(call: Call, node: Node) -> str:
    """The path of an operation's module in the model."""
    return ".".join(filter(None, (call.prefix, node.module)))


def _module_group(pattern: str) -> Group:
    length = pattern.count(".") + 1

    @cache
    def group_of(path: str) -> str:
        module = ".".join(path.split(".")[:length])
        return module if matches(pattern, module) else ""

    return lambda call, node: group_of(module_path(call, node))


def _results(graph: Graph, blocks: Mapping[str, Block], group: Group) -> dict[Key, set[int]]:
    """The values that operations of a group make and others read, with the calls in which they do. A block of a pipeline may be
    split inside of a module: readers are followed into other calls. New values of buffers are nobody's results."""
    readers: dict[str, list[tuple[Call, str]]] = {}
    for call in graph.calls:
        for name, value in zip(call.inputs, blocks[call.block].inputs, strict=True):
            readers.setdefault(name, []).append((call, value.name))
    operands = {block.name: _readers(block) for block in graph.blocks}
    out: dict[Key, set[int]] = {}
    for number, call in enumerate(graph.calls):
        block = blocks[call.block]
        outputs = dict(zip(block.outputs, call.outputs, strict=True))

        def is_read(name: str, own: str, call: Call = call, outputs: Mapping[str, str] = outputs) -> bool:
            """Whether an operation outside of the group reads a value of this call, or the program returns it."""
            if any(group(call, node) != own for node in operands[call.block].get(name, ())):
                return True
            if name not in outputs:
                return False
            if outputs[name] in graph.results:
                return True
            for other, inner in readers.get(outputs[name], ()):
                nodes = operands[other.block].get(inner, ())
                if inner in blocks[other.block].outputs or any(group(other, node) != own for node in nodes):
                    return True
            return False

        for node in block.nodes:
            if own := group(call, node):
                for value in node.outputs:
                    if is_read(value.name, own):
                        out.setdefault((block.name, value.name), set()).add(number)
    return out


def _readers(block: Block) -> dict[str, list[Node]]:
    out: dict[str, list[Node]] = {}
    for node in block.nodes:
        for name in node.operands():
            out.setdefault(name, []).append(node)
    return out


# -- where nothing has the name


def _general(path: str) -> str:
    """The path with ``*`` for the numbers of layers."""
    return ".".join("*" if re.fullmatch(r"\d+|.*[*?\[].*", part) else part for part in path.split("."))


def _nearest(graph: Graph, name: str) -> str:
    """Say that nothing has a name, and which names are near it."""
    if ".py:" in name:
        file, _, number = name.rpartition(":")
        lines = {node.source for block in graph.blocks for node in block.nodes if node.source.rpartition(":")[0] == file}
        near = sorted(sorted(lines), key=lambda each: abs(int(each.rpartition(":")[2]) - int(number)))[:3]
        return f"no operation is of that line; near it are those of {', '.join(near)}" if near else f"no operation is of {file}"
    names = Counter(_general(path) for path in _paths(graph))
    near = get_close_matches(_general(name), names, n=3, cutoff=0.4) or sorted(names)[:3]
    return f"the model has no parameter or module of that name whose result anything reads; near it are {', '.join(near)}"


def _paths(graph: Graph) -> Iterator[str]:
    """Every name of a parameter, and of a module with operations."""
    blocks: Mapping[str, Collection[Node]] = {block.name: block.nodes for block in graph.blocks}
    for call in graph.calls:
        yield from call.parameters
        yield from filter(None, dict.fromkeys(module_path(call, node) for node in blocks[call.block]))
