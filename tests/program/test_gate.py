"""The last gate: no text runs that says more than, or something else than, the lowered program."""

from __future__ import annotations

import ast
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import pytest
from support.plans.tiny_plans import TINY, tiny_plan

from autopar.errors import PlanError
from autopar.ir.graph import Node, Value
from autopar.passes.lower import lower
from autopar.passes.lowered import Lowered
from autopar.program.build import checked_text
from autopar.program.gate.expressions import forms_of
from autopar.program.gate.gate import check_program, check_tree
from autopar.program.source import RUNTIME, render


@cache
def lowered(kind: str) -> Lowered:
    plan = tiny_plan(kind)
    blocks = plan.candidate.blocks
    if kind == "dense":  # a layer that recomputes and offloads
        layer = max(blocks, key=lambda each: len(each.nodes))
        nodes = tuple(node.node for node in layer.nodes[3:40:3])
        changed = replace(layer, recompute=False, recompute_nodes=nodes)
        blocks = tuple(changed if each is layer else each for each in blocks)
    return lower(plan.graph, replace(plan.candidate, blocks=blocks))


def refused(tree: ast.Module, kind: str) -> bool:
    try:
        check_tree(tree, lowered(kind), RUNTIME)
    except PlanError as error:
        assert "\n" not in str(error)
        return True
    return False


EXPRESSIONS = ("__import__('os').system('id')", "exec('1')", "(lambda: 1)()", "[x for x in ().__class__.__mro__]", "f'{self}'")
STATEMENTS = (
    "import os",
    "from os import system",
    "print(1)",
    "x = torch.load('f')",
    "torch.save(1, 'f')",
    "global x",
    "del self.mesh",
    "self.mesh.__class__ = 1",
    "for i in range(3): pass",
    "while True: pass",
    "try:\n    pass\nexcept Exception:\n    pass",
    "def forward(self): return 1",
    "class Program: pass",
    "raise ValueError",
    "with open('f') as f: pass",
    "x: int = 1",
    "assert True",
    "x += 1",
    "pass",
    "C = F",
    "'text'",
)


def with_statements(tree: ast.Module, statement: ast.stmt) -> Iterator[int]:
    """The statement at each place where one may stand, one after the other."""
    place = 0
    for body in bodies(tree):
        for index in range(len(body) + 1):
            body.insert(index, statement)
            yield (place := place + 1)
            del body[index]


def bodies(tree: ast.AST) -> list[list[ast.stmt]]:
    return [
        node.body
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.With | ast.For | ast.If)
    ]


def changed_nodes(tree: ast.Module, change: Callable[[ast.AST], ast.AST | None], every: int) -> Iterator[None]:
    """The module with one node changed, one after the other; of all that may be, each `every`-th. Docstrings stay."""
    docstrings = {id(body[0].value) for body in bodies(tree) if body and isinstance(body[0], ast.Expr)}
    found = 0
    for parent in list(ast.walk(tree)):
        for name, value in ast.iter_fields(parent):
            for index, each in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if not isinstance(each, ast.AST) or id(each) in docstrings or (new := change(each)) is None:
                    continue
                found += 1
                if found % every:
                    continue
                if index is None:
                    setattr(parent, name, new)
                    yield
                    setattr(parent, name, each)
                else:
                    value[index] = new
                    yield
                    value[index] = each


def other_constant(node: ast.AST) -> ast.AST | None:
    if not isinstance(node, ast.Constant) or isinstance(node.value, bool) or node.value is None or node.value is Ellipsis:
        return None
    return ast.Constant(f"{node.value}x" if isinstance(node.value, str) else 977_111)


def other_name(node: ast.AST) -> ast.AST | None:
    return ast.Name("eval", node.ctx) if isinstance(node, ast.Name) and node.id != "_" else None


def other_attribute(node: ast.AST) -> ast.AST | None:
    return ast.Attribute(node.value, "__globals__", node.ctx) if isinstance(node, ast.Attribute) else None


def deeper(node: ast.AST) -> ast.AST | None:
    loads = isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load)
    return ast.Attribute(node, "data", ast.Load()) if loads and isinstance(node, ast.expr) else None


def called(node: ast.AST) -> ast.AST | None:
    loads = isinstance(node, ast.Name | ast.Attribute | ast.Call)
    plain = loads and not isinstance(getattr(node, "ctx", None), ast.Store)
    return ast.Call(node, [], []) if plain and isinstance(node, ast.expr) else None


def crafted(node: ast.AST) -> ast.AST | None:
    usable = isinstance(node, ast.expr) and not isinstance(getattr(node, "ctx", None), ast.Store)
    return ast.parse(EXPRESSIONS[0], mode="eval").body if usable else None


def one_argument_more(node: ast.AST) -> ast.AST | None:
    return ast.Call(node.func, [*node.args, ast.Name("self", ast.Load())], node.keywords) if isinstance(node, ast.Call) else None


def starred(node: ast.AST) -> ast.AST | None:
    return (
        ast.Call(node.func, [*node.args, ast.Starred(ast.Constant(()), ast.Load())], node.keywords)
        if isinstance(node, ast.Call)
        else None
    )


CHANGES = (other_constant, other_name, other_attribute, deeper, called, crafted, one_argument_more, starred)


def attempt(kind: str, every: int) -> int:
    """Each `every`-th of all changes; all are refused. Gives how many there were."""
    text = render(lowered(kind))
    tree = ast.parse(text)
    check_tree(tree, lowered(kind), RUNTIME)
    count = 0
    for change in CHANGES:
        for _ in changed_nodes(tree, change, every):
            count += 1
            assert refused(tree, kind), (change.__name__, difference(text, tree))
    for number, written in enumerate(STATEMENTS):
        for place in with_statements(tree, ast.parse(written).body[0]):
            if (place + 7 * number) % every == 0:
                count += 1
                assert refused(tree, kind), (written, place)
    check_tree(tree, lowered(kind), RUNTIME)
    return count


def difference(before: str, tree: ast.Module) -> str:
    old = set(ast.unparse(ast.parse(before)).splitlines())
    return "\n".join([line for line in ast.unparse(ast.fix_missing_locations(tree)).splitlines() if line not in old][:5])


@pytest.mark.parametrize("kind", TINY)
def test_every_change_of_a_text_is_refused(kind: str) -> None:
    assert attempt(kind, every=11) > 20


@pytest.mark.slow
@pytest.mark.parametrize("kind", TINY)
def test_every_change_of_a_text_is_refused_at_every_place(kind: str) -> None:
    assert attempt(kind, every=1) > 2000


@pytest.mark.parametrize("kind", TINY)
def test_the_gate_is_quick(kind: str) -> None:
    text = render(lowered(kind))
    start = time.process_time()
    check_program(text, lowered(kind), RUNTIME)
    seconds = time.process_time() - start
    assert seconds < 0.15, f"{seconds:.3f} s for {len(text.splitlines())} lines"


def with_node(given: Lowered, node: Node) -> Lowered:
    """The lowered program with one more operation, as a renderer would get it from a plan that no check has seen."""
    first = given.blocks[0]
    block = replace(first.block, nodes=(*first.block.nodes, node))
    return replace(given, blocks=(replace(first, block=block), *given.blocks[1:]))


@pytest.mark.parametrize(
    "op",
    ["aten.from_file", "aten.set_.source_Tensor", "aten.resize_", "prim.device.default", "os.system", "c10d.barrier", "ap.load"],
)
def test_operations_that_no_model_has_are_refused(op: str) -> None:
    """Operations of torch that do not compute tensors from tensors, and names that are no operation."""
    assert not any("." in form for form in forms_of(op))
    with pytest.raises(PlanError, match="calls"):
        checked_text(with_node(lowered("dense"), Node(op, ("x",), (), (Value("made", (1,), "float32"),))))


@pytest.mark.parametrize("name", ["exec", "__class__", "torch", "a b", "x\nimport os\n#", "x=1;import os;y", "self"])
def test_names_of_a_lowered_program_are_checked_too(name: str) -> None:
    """Even where no check before has seen them."""
    node = Node("aten.ones", ((1,),), (), (Value(name, (1,), "float32"),))
    with pytest.raises(PlanError):
        checked_text(with_node(lowered("dense"), node))
