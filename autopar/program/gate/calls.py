"""The calls of blocks: the forward is followed with the names of the graph's values, loops unrolled, and must make the calls of
the lowered program in their order."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

from autopar.ir.graph import Call
from autopar.passes.lowered import Lowered
from autopar.program.gate.reading import USED, check_identifiers, dotted, expect, is_name, literal, refuse
from autopar.program.names import RESERVED_ATTRIBUTES, class_names

Instance = tuple[str, str, tuple[tuple[str, str], ...]]
"""A block module: class, prefix, and the original names of parameters that are not prefix + path."""


def read_init(tree: ast.FunctionDef | None, lowered: Lowered) -> dict[str, list[Instance]]:
    """The block modules of each attribute that ``__init__`` sets."""
    if tree is None:
        return {}
    head, *rest = tree.body
    call = head.value if isinstance(head, ast.Expr) else None
    inner = call.func if isinstance(call, ast.Call) and len(call.args) == 1 and is_name(call.args[0], "mesh") else None
    of = inner.value if isinstance(inner, ast.Attribute) and inner.attr == "__init__" else None
    plain = isinstance(of, ast.Call) and is_name(of.func, "super") and not of.args and not of.keywords
    expect(plain and isinstance(call, ast.Call) and not call.keywords, head, "super().__init__(mesh) is missing")
    classes = frozenset(class_names(block.block.name for block in lowered.blocks).values())
    most = len(lowered.all_calls)
    out: dict[str, list[Instance]] = {}
    for each in rest:
        if not isinstance(each, ast.Assign) or len(each.targets) != 1:
            refuse(each, "__init__ does something else")
        owner, _, name = (dotted(each.targets[0]) or "").partition(".")
        check_identifiers([name], RESERVED_ATTRIBUTES)
        expect(owner == "self" and not hasattr(nn.Module, name) and name not in out, each, f"__init__ sets {owner}.{name}")
        out[name] = _modules(each.value, classes, most)
    return out


def _modules(tree: ast.expr, classes: Collection[str], most: int) -> list[Instance]:
    if not isinstance(tree, ast.Call) or dotted(tree.func) != "nn.ModuleList":
        return [_instance(tree, classes, None)]
    inner = tree.args[0] if len(tree.args) == 1 and not tree.keywords else None
    if isinstance(inner, ast.List):
        return [_instance(each, classes, None) for each in inner.elts]
    loop = inner.generators[0] if isinstance(inner, ast.GeneratorExp) and len(inner.generators) == 1 else None
    if not isinstance(inner, ast.GeneratorExp) or loop is None or loop.ifs or loop.is_async or not is_name(loop.target, "i"):
        refuse(tree, "a ModuleList is made of something else")
    over = loop.iter
    if not isinstance(over, ast.Call) or not is_name(over.func, "range") or over.keywords:
        refuse(tree, "a ModuleList counts over something else")
    numbers = [literal(each) for each in over.args]
    whole = 1 <= len(numbers) <= 3 and all(type(number) is int and number >= 0 for number in numbers)
    expect(whole and (len(numbers) < 3 or numbers[2] > 0), tree, "a ModuleList counts over something else")
    counted = range(*numbers)
    expect(len(counted) <= most, tree, "a ModuleList has more blocks than the model")
    return [_instance(inner.elt, classes, number) for number in counted]


def _instance(tree: ast.expr, classes: Collection[str], number: int | None) -> Instance:
    """``Layer(mesh, "model.layers.0")``."""
    if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name) or tree.func.id not in classes or tree.keywords:
        refuse(tree, "a block is made of something else")
    expect(len(tree.args) in (2, 3) and is_name(tree.args[0], "mesh"), tree, "a block has other arguments")
    names = literal(tree.args[2]) if len(tree.args) == 3 else {}
    expect(isinstance(names, dict), tree, "a block has other names")
    return tree.func.id, _prefix(tree.args[1], number), tuple(names.items())


def _prefix(tree: ast.expr, number: int | None) -> str:
    if not isinstance(tree, ast.JoinedStr):
        return str(literal(tree))
    words = []
    for part in tree.values:
        if isinstance(part, ast.Constant):
            words.append(str(part.value))
        else:
            if not isinstance(part, ast.FormattedValue) or not is_name(part.value, "i"):
                refuse(tree, "a prefix is made of other things")
            expect(part.format_spec is None and part.conversion == -1, tree, "a prefix is made of other things")
            words.append(str(number))
    return "".join(words)


@dataclass(slots=True)
class CallReader:
    """Follows a forward: `names` are the graph's values by variable, `pending` the calls that it must still make."""

    lowered: Lowered
    attributes: dict[str, list[Instance]]
    names: dict[str, str]
    pending: Iterator[Call]
    classes: dict[str, str] = field(init=False)
    called: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.classes = class_names(block.block.name for block in self.lowered.blocks)
        check_identifiers(self.names, USED)

    def follow(self, body: Sequence[ast.stmt]) -> ast.stmt:
        """All statements but the last, which is given back."""
        for tree in body[:-1]:
            if isinstance(tree, ast.For):
                self._loop(tree)
            else:
                self._statement(tree, {})
        expect(next(self.pending, None) is None, body[-1], "a call is missing")
        return body[-1]

    def _loop(self, tree: ast.For) -> None:
        targets = tree.target.elts if isinstance(tree.target, ast.Tuple) else [tree.target]
        over = [tree.iter]
        if isinstance(tree.iter, ast.Call):
            strict = [(each.arg, literal(each.value)) for each in tree.iter.keywords] == [("strict", True)]
            expect(is_name(tree.iter.func, "zip") and strict, tree, "another loop")
            over = tree.iter.args
        blocks = [dotted(each) or "" for each in targets]
        check_identifiers(blocks)
        lists = [self._attribute(each) for each in over]
        expect(len(blocks) == len(lists) and len({len(each) for each in lists}) == 1 and not tree.orelse, tree, "another loop")
        for row in zip(*lists, strict=True):
            for each in tree.body:
                self._statement(each, dict(zip(blocks, row, strict=True)))

    def _attribute(self, tree: ast.expr) -> list[Instance]:
        owner, _, name = (dotted(tree) or "").partition(".")
        expect(owner == "self" and name in self.attributes, tree, "a block is called that is none")
        self.called.add(name)
        return self.attributes[name]

    def _statement(self, tree: ast.stmt, blocks: dict[str, Instance]) -> None:
        """``x = self.layer(y)``, or ``x = y``."""
        if not isinstance(tree, ast.Assign) or len(tree.targets) != 1:
            refuse(tree, "the forward has another statement")
        target, value = tree.targets[0], tree.value
        targets = [dotted(each) or "" for each in (target.elts if isinstance(target, ast.Tuple) else [target])]
        check_identifiers(targets)
        if isinstance(value, ast.Name):
            expect(value.id in self.names and len(targets) == 1, tree, f"{value.id} is no value")
            self.names[targets[0]] = self.names[value.id]
            return
        if not isinstance(value, ast.Call) or value.keywords:
            refuse(tree, "the forward calls no block")
        name = dotted(value.func) or ""
        found = [blocks[name]] if name in blocks else self._attribute(value.func)
        inputs = [self.names.get(dotted(each) or "") for each in value.args]
        call = next(self.pending, None)
        if call is None or len(found) != 1:
            refuse(tree, "there is a call too many")
        same = found[0] == self._expected(call) and inputs == list(call.inputs) and len(targets) == len(call.outputs)
        expect(same, tree, f"{call.prefix or call.block} is called in another way")
        self.names.update(zip(targets, call.outputs, strict=True))

    def _expected(self, call: Call) -> Instance:
        dotted_prefix = f"{call.prefix}." if call.prefix else ""
        pairs = zip(self.lowered.block(call.block).specs, call.parameters, strict=True)
        others = tuple((spec.path, name) for spec, name in pairs if name != dotted_prefix + spec.path)
        return self.classes[call.block], call.prefix, tuple(dict(others).items())

    def check_return(self, tree: ast.stmt, results: Sequence[str], last: bool) -> None:
        """The results; the `last` ones, of the program: all but the loss and what takes gradients without their graph."""
        kinds = ["gradient", *(output.kind for output in self.lowered.outputs)] if last else ["gradient"] * len(results)
        value = tree.value if isinstance(tree, ast.Return) else None
        values = value.elts if isinstance(value, ast.Tuple) else [value] if value is not None else []
        got = []
        for index, each in enumerate(values):
            name = each
            if kinds[index : index + 1] != ["gradient"]:
                if not isinstance(each, ast.Call) or not isinstance(each.func, ast.Attribute) or each.args or each.keywords:
                    refuse(tree, "an output has its graph")
                expect(each.func.attr == "detach", tree, "an output has its graph")
                name = each.func.value
            got.append(self.names.get(name.id) if isinstance(name, ast.Name) else None)
        expect(got == list(results), tree, "other values are returned")
