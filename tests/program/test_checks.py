"""What a lowered program says becomes text as names, quoted strings and numbers, or is refused: also where no check of a file has
seen it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
from support.plans.tiny_plans import tiny_plan

from autopar.errors import PlanError
from autopar.ir.graph import Arg, DType, Node, Ref, Symbol, Value
from autopar.ir.mesh import Axis, Mesh
from autopar.passes.lower import lower
from autopar.passes.lowered import Lowered, LoweredBlock
from autopar.program.build import build_program, render
from autopar.program.load import load_program


@cache
def lowered(kind: str = "dense") -> Lowered:
    plan = tiny_plan(kind)
    return lower(plan.graph, plan.candidate)


def with_block(given: Lowered, block: LoweredBlock) -> Lowered:
    """The lowered program with another first block."""
    return replace(given, blocks=(block, *given.blocks[1:]))


def with_node(node: Node) -> Lowered:
    """The lowered program with one more operation, as a renderer would get it from a plan that no check has seen."""
    first = lowered().blocks[0]
    return with_block(lowered(), replace(first, state=first.state.with_nodes([*first.block.nodes, node])))


def ones(name: str = "made", dtype: str = "float32", **more: Arg) -> Node:
    return Node("aten.ones", ((1,),), tuple(more.items()), (Value(name, (1,), dtype),))


@pytest.mark.parametrize(
    "op",
    ["aten.from_file", "aten.set_.source_Tensor", "aten.resize_", "prim.device.default", "os.system", "c10d.barrier", "ap.load"]
    + ["load_library.__call__.__call__", "import_module.__call__.__call__", "aten.__init__.__globals__", "aten.add.__class__"]
    + ["aten.add.overloads", "aten.add._schema", "aten.__class__.__mro__", "aten.add.Tensor.__call__", "os::system.default"],
)
def test_operations_that_no_model_has_are_refused(op: str) -> None:
    """Operations of torch that do not compute tensors from tensors, and names that are no operation."""
    with pytest.raises(PlanError, match="calls"):
        render(with_node(Node(op, ("x",), (), (Value("made", (1,), "float32"),))))


@pytest.mark.parametrize("op", ["aten.from_file", "aten.resize_", "ap.opaque", "load_library.__call__.__call__"])
def test_operations_inside_of_a_branch_are_checked_too(op: str) -> None:
    region = ((), ((("y",), op, ("x",), (), (((1,), "float32"),)),), ("y",))
    predicate = Ref(lowered().blocks[0].block.inputs[0].name)
    with pytest.raises(PlanError, match="inside"):
        render(with_node(Node("ap.cond", (predicate, (), region, region), (), (Value("made", (1,), "float32"),))))


NAMES = (
    "exec",
    "__class__",
    "torch",
    "a b",
    "x\nimport os\n#",
    "x=1;import os;y",
    "self",
    "if",
    "1x",
    "",
    "\uff45xec",
    "\u2102",
    "x'",
)
"""Builtins, dunders, keywords, code, and letters that Python reads as others (a wide ``e``, a double-struck ``C``)."""


@pytest.mark.parametrize("name", NAMES)
def test_names_of_a_lowered_program_are_checked_too(name: str) -> None:
    with pytest.raises(PlanError):
        render(with_node(ones(name)))
    given = lowered()
    with pytest.raises(PlanError):
        render(replace(given, candidate=replace(given.candidate, mesh=Mesh((*given.candidate.mesh.axes, Axis(name, 1))))))
    if name not in ("exec", "torch", "self"):  # keyword arguments may be called so
        with pytest.raises(PlanError):
            render(with_node(ones(**{name: 1})))
    if name not in ("exec",):  # an argument of the user's model may be called as a builtin
        with pytest.raises(PlanError):
            render(replace(given, inputs=tuple(replace(value, name=name) for value in given.inputs)))


CODE = (
    "__import__('os')",
    'x"); __import__("os"); ("',
    "x'); __import__('os'); ('",
    "1\n__import__('os')",
    "R -> __import__('os')",
)


def crafted(code: str) -> Iterator[Lowered]:
    """The code as each string that the text has without quotes, or in a comment."""
    x = lowered().blocks[0].block.inputs[0].name
    for op in ("ap.convert", "ap.linear_kn", "ap.moe_experts", "aten.add.Tensor"):
        arguments = (Ref(x), Ref(x), None, None, None, None, None, None)
        yield with_node(Node(op, arguments, (("axis", code), ("conversion", "R -> S(0)")), (Value("made", (1,), "float32"),)))
        yield with_node(Node(op, arguments, (("axis", "tp"), ("conversion", code)), (Value("made", (1,), "float32"),)))
    yield with_node(ones(dtype=code))
    yield with_node(ones(fill=DType(code)))
    yield with_node(ones(fill=Symbol(code)))
    yield with_node(ones(fill=Ref(code)))
    first = lowered().blocks[0]
    block = replace(first.block, outputs=(code, *first.block.outputs[1:]))
    yield with_block(lowered(), replace(first, state=replace(first.state, block=block)))


def harmless(code: str) -> Iterator[Lowered]:
    """The code as strings that the text has in quotes or comments."""
    first = lowered().blocks[0]
    yield with_node(ones(fill=code))
    yield with_node(ones(fill=(code, (code,))))
    yield with_node(replace(ones(), module=code, source=code))
    graph = lowered().graph
    yield replace(lowered(), graph=replace(graph, name=code))
    specs = tuple(replace(spec, path=f"p.{code}") for spec in first.specs)
    yield with_block(lowered(), replace(first, specs=specs))
    calls = tuple(replace(call, prefix=f"{{{code}}}.{index}.{call.prefix}") for index, call in enumerate(graph.calls))
    yield replace(lowered(), graph=replace(graph, calls=calls))


@pytest.mark.parametrize("code", CODE)
def test_strings_are_no_code(code: str) -> None:
    for each in crafted(code):
        with pytest.raises(PlanError) as error:
            render(each)
        assert "\n" not in str(error.value)
    for each in harmless(code):
        text = render(each)
        assert not {"__import__", "os"} & {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
        load_program(text)


@pytest.mark.parametrize("size", ["S", "floor(B)", "B.__class__", "B; import os", "B if B else 1", "B[0]", "B\n", "٣", "B @ B"])
def test_sizes_are_arithmetic_of_the_batch(size: str) -> None:
    with pytest.raises(PlanError, match="is no size"):
        render(with_node(ones(fill=Symbol(size))))


def test_a_plan_whose_program_python_does_not_read_is_one_line() -> None:
    graph, candidate = tiny_plan("dense").graph, tiny_plan("dense").candidate
    deep: Arg = 1
    for _ in range(300):
        deep = (deep,)
    block = next(each for each in graph.blocks if any(node.op == "aten.linear" for node in each.nodes))
    nodes = tuple(replace(each, kwargs=(("x", deep),)) if each.op == "aten.linear" else each for each in block.nodes)
    blocks = tuple(replace(each, nodes=nodes) if each is block else each for each in graph.blocks)
    with pytest.raises(PlanError, match="no Python"):
        build_program(replace(graph, blocks=blocks), candidate)
