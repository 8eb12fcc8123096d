"""Compares the text of a program with the lowered program, before anything of the text runs."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from autopar.passes.lowered import Lowered
from autopar.program.gate.attributes import boundary_names, check_attributes
from autopar.program.gate.blocks import check_batch_size, check_block
from autopar.program.gate.calls import CallReader, read_init
from autopar.program.gate.reading import (
    USED,
    check_identifiers,
    check_signature,
    class_body,
    dotted,
    expect,
    literal,
    refuse,
    without_docstring,
)
from autopar.program.names import IMPORTED_NAMES, class_names


def check_program(text: str, lowered: Lowered, runtime: str) -> str:
    """The text. PlanError, one line, where it has a statement, call, name, attribute, string or number that the lowered program
    does not say: then a name of the plan was read as code, or the renderer is wrong."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        refuse(None, f"it is no Python ({str(error)[:80]})")
    check_tree(tree, lowered, runtime)
    return text


def check_tree(tree: ast.Module, lowered: Lowered, runtime: str) -> None:
    """The same of a syntax tree."""
    body = without_docstring(tree.body)
    count = sum(isinstance(tree, ast.Import | ast.ImportFrom) for tree in body)
    _check_imports(body[:count], lowered, runtime)
    classes = iter(body[count:])
    used = {call.block for call in lowered.all_calls}
    names = class_names(block.block.name for block in lowered.blocks)
    check_identifiers(names.values(), IMPORTED_NAMES)
    for block in lowered.blocks:
        if block.block.name in used:
            check_block(_next(classes), names[block.block.name], lowered, block)
    _Programs(lowered).check(classes)
    expect(next(classes, None) is None, body[-1], "there is more than the program")


def _next(classes: Iterator[ast.stmt]) -> ast.stmt:
    tree = next(classes, None)
    if tree is None:
        refuse(None, "a class is missing")
    return tree


def _check_imports(body: Sequence[ast.stmt], lowered: Lowered, runtime: str) -> None:
    selective = any(block.selective for block in lowered.blocks)
    lines = ["import torch", "import torch.nn.functional as F"]
    lines += ["from torch import Tensor, nn" if selective else "from torch import nn"]
    lines += [f"from {runtime} import collectives as C"]
    lines += [f"from {runtime}.step.recompute import Recompute"] * selective
    lines += [f"from {runtime}.module import BlockModule, ParameterSpec"]
    if lowered.schedule is None:
        lines += [f"from {runtime}.module import Program as Base"]
    else:
        stages = f"from {runtime}.pipeline.stage_modules import"
        lines += [f"{stages} BoundaryTensor, ModelChunk", f"{stages} PipelineProgram as Base"]
    expect([ast.unparse(tree) for tree in body] == lines, body[0] if body else None, "it imports something else")


class _Programs:
    """Reads the classes of the chunks and of the program."""

    def __init__(self, lowered: Lowered) -> None:
        self.lowered = lowered
        self.inputs = [value.name for value in lowered.inputs]
        check_identifiers(self.inputs, USED)

    def check(self, classes: Iterator[ast.stmt]) -> None:
        chunks = [_next(classes) for _ in self.lowered.chunks] if self.lowered.schedule is not None else []
        tree = _next(classes)
        found, methods = class_body(tree, "Program", "Base")
        pipeline = {key: found.pop(key, None) for key in _PIPELINE} if chunks else {}
        totals = self._totals(methods)
        check_attributes(tree, found, self.lowered, list(totals.values()))
        if not chunks:
            self._forward(tree, methods, totals)
            return
        between = self._pipeline(tree, pipeline)
        expect({*methods} <= {"__init__", "count", "micro_batch_size"}, tree, "the program has other methods")
        self._micro_batch_size(methods.get("micro_batch_size"))
        for number, chunk in enumerate(chunks):
            self._chunk(chunk, number, between[number - 1] if number else [], totals)

    def _totals(self, methods: dict[str, ast.FunctionDef]) -> dict[str, str]:
        """``count``: the name of each total by its value."""
        calls = self.lowered.total_calls
        tree = methods.get("count")
        if tree is None or not calls:
            expect(tree is None and not calls, tree, "there are other totals")
            return {}
        check_signature(tree, ["self", *self.inputs])
        reader = CallReader(self.lowered, self._init(methods), {name: name for name in self.inputs}, iter(calls))
        last = reader.follow(tree.body)
        items = last.value if isinstance(last, ast.Return) else None
        if not isinstance(items, ast.Dict) or not all(isinstance(each, ast.Name) for each in items.values):
            refuse(last, "count returns something else")
        keys = [str(literal(key)) for key in items.keys if key is not None]
        values = [reader.names.get(each.id, "") for each in items.values if isinstance(each, ast.Name)]
        results = [name for call in calls for name in call.outputs]
        same = values == results and keys == [each.id for each in items.values if isinstance(each, ast.Name)]
        expect(same, last, "count returns something else")
        return dict(zip(values, keys, strict=True))

    def _init(self, methods: dict[str, ast.FunctionDef]) -> dict[str, list[tuple[str, str, tuple[tuple[str, str], ...]]]]:
        tree = methods.get("__init__")
        if tree is not None:
            check_signature(tree, ["self", "mesh"])
        return read_init(tree, self.lowered)

    def _forward(self, tree: ast.stmt, methods: dict[str, ast.FunctionDef], totals: dict[str, str]) -> None:
        expect({*methods} <= {"__init__", "count", "forward"} and "forward" in methods, tree, "the program has other methods")
        names = {name: name for name in self.inputs} | {name: value for value, name in totals.items()}
        check_signature(methods["forward"], ["self", *names])
        reader = CallReader(self.lowered, self._init(methods), names, iter(self.lowered.calls))
        reader.check_return(reader.follow(methods["forward"].body), self.lowered.results, last=True)

    def _pipeline(self, tree: ast.stmt, found: dict[str, ast.expr | None]) -> list[list[str]]:
        lowered, schedule = self.lowered, self.lowered.schedule
        assert schedule is not None
        chunks, lines, dtype = found["chunks"], found["schedule"], found["loss_dtype"]
        names = [f"Chunk{number}" for number in range(len(lowered.chunks))]
        listed = [dotted(each) for each in chunks.elts] if isinstance(chunks, ast.Tuple) else []
        expect(listed == names, tree, "the chunks are others")
        words = tuple(" ".join(map(str, rank)) for rank in schedule.ranks)
        expect(lines is not None and literal(lines) == words, tree, "the schedule is another one")
        expect(dtype is not None and literal(dtype) == lowered.chunks[-1].sends[0].dtype, tree, "the loss has another dtype")
        versions = found["weight_versions"]
        given = 1 if versions is None else literal(versions)
        expect(given == (2 if lowered.weight_versions > 1 else 1), tree, "there are other weight versions")
        return boundary_names(found["boundaries"], [chunk.receives for chunk in lowered.chunks[1:]], lowered.batch)

    def _micro_batch_size(self, tree: ast.FunctionDef | None) -> None:
        if tree is None:
            refuse(None, "micro_batch_size is missing")
        check_signature(tree, ["self", *self.inputs])
        body = without_docstring(tree.body)
        last = body[0] if len(body) == 1 else None
        if not isinstance(last, ast.Return) or last.value is None:
            refuse(tree, "micro_batch_size does something else")
        check_batch_size(last.value, self.lowered, self.lowered.inputs)

    def _chunk(self, tree: ast.stmt, number: int, between: Sequence[str], totals: dict[str, str]) -> None:
        chunk = self.lowered.chunks[number]
        found, methods = class_body(tree, f"Chunk{number}", "ModelChunk")
        expect({*found} == {"batch_inputs"} and {*methods} <= {"__init__", "forward"}, tree, f"Chunk{number} has something else")
        batch = literal(found["batch_inputs"])
        known = {name: name for name in self.inputs} | {name: value for value, name in totals.items()}
        expect(isinstance(batch, tuple) and all(name in known for name in batch), tree, f"Chunk{number} has other inputs")
        names = dict(zip(between, (value.name for value in chunk.receives), strict=True)) | {name: known[name] for name in batch}
        forward = methods.get("forward")
        if forward is None:
            refuse(tree, f"Chunk{number} has no forward")
        check_signature(forward, ["self", *between, *batch])
        reader = CallReader(self.lowered, self._init(methods), names, iter(chunk.calls))
        last = number + 1 == len(self.lowered.chunks)
        reader.check_return(reader.follow(forward.body), [value.name for value in chunk.sends], last=last)


_PIPELINE = ("chunks", "boundaries", "schedule", "weight_versions", "loss_dtype")
