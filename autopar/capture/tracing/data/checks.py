"""Checks of data in a forward (``if labels.max() >= vocab: raise ...``): tracing goes on as if they passed.

A tensor has no values while a model is traced, so Python cannot take a branch by them. Where one of the two branches does nothing
but raise or warn, the other is the program. The plan notes each check that is left out in this way.
"""

from __future__ import annotations

import ast
import dis
import linecache
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import TracingContext
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, free_unbacked_symbols
from torch.overrides import TorchFunctionMode

from autopar.capture.tracing.places import TORCH_ROOT, is_assertion, reads_number
from autopar.runtime.compat.hooks import replaced

_CHECKS = frozenset(("_assert", "_check", "_check_with", "_check_tensor_all", "_check_tensor_all_with", "_check_value"))
"""Functions of torch that raise where their first argument is false."""
_ASKS_DATA = re.compile(r"/torch/(distributions/|nn/functional\.py)")
"""Torch's own code that asks data in the way of users: whether parameters of a distribution or variances are valid."""
_TRUTH = frozenset(("all", "any", "bool"))
"""Builtins that take the truth of values, and return it."""
_WARN = frozenset(("warn", "warning", "warning_once", "warn_once", "print", "info", "debug"))
_COMPARE = frozenset((torch.equal, torch.allclose, Tensor.equal, Tensor.allclose))
Span = tuple[int | None, int | None, int | None, int | None]


class Comparisons(TorchFunctionMode):
    """While active, ``torch.equal`` and ``allclose`` in a check of data give what lets it pass."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self.lines = lines

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = _passing(sys._getframe(1)) if func in _COMPARE else None
        if answer is None:
            return func(*args, **(kwargs or {}))
        self.lines.append(answer[0])
        return answer[1]


@contextmanager
def checks_pass() -> Iterator[list[str]]:
    """While active, checks of data pass. Yields the lines, in order, of those that are left out; `Comparisons` adds to them."""
    environment: Any = TracingContext.get().fake_mode.shape_env  # type: ignore[union-attr]
    evaluate, defer = environment.evaluate_sym_node, environment.guard_or_defer_runtime_assert
    lines: list[str] = []

    def evaluated(*args: Any, **kwargs: Any) -> Any:
        try:
            return evaluate(*args, **kwargs)
        except GuardOnDataDependentSymNode:
            answer = _passing(sys._getframe(1))
            if answer is None:
                raise
            lines.append(answer[0])
            return answer[1]

    def deferred(expression: Any, *args: Any, **kwargs: Any) -> Any:
        answer = _of_function(sys._getframe(1)) if free_unbacked_symbols(expression) else None
        if answer is not None:
            lines.append(answer[0])
        return defer(expression, *args, **kwargs)

    with (
        replaced(environment, "evaluate_sym_node", evaluated),
        replaced(environment, "guard_or_defer_runtime_assert", deferred),
    ):
        yield lines


def drop_checks(program: ExportedProgram) -> None:
    """Takes assertions, and the numbers of tensors that nothing else reads, out of a functional program, in place."""
    graph = program.graph_module.graph
    asked = [node for node in graph.nodes if node.op == "call_function" and (reads_number(node) or is_assertion(node))]
    for node in asked:
        if is_assertion(node) and not node.users:
            graph.erase_node(node)
    if asked:
        graph.eliminate_dead_code(_counts)
        program.graph_module.recompile()


def _counts(node: fx.Node) -> bool:
    """Return whether a node has an effect beside its result."""
    return node.is_impure() and not reads_number(node)


def _passing(frame: FrameType | None) -> tuple[str, bool] | None:
    """The line of the check that asks, and the answer that lets it pass; None where this is no check."""
    answer = _of_function(frame)
    if answer is not None:
        return answer
    while frame is not None and _of_torch(frame) and not _ASKS_DATA.search(frame.f_code.co_filename):
        frame = None if _calls_the_model(frame) else frame.f_back
    user = _user_frame(frame)
    if frame is None or user is None:
        return None
    span, calls = _asked(frame)
    for statement in _branches(frame):
        if isinstance(statement, ast.Try):
            continue
        wanted = _wanted(statement)
        truth = None if wanted is None else _answer(statement.test, wanted, span, calls)
        if truth is not None:
            return None if _caught(frame) else (_line(user), truth)
    return None


def _of_function(frame: FrameType | None) -> tuple[str, bool] | None:
    """The line that calls one of torch's functions that check, if one is asking, and the answer that lets it pass."""
    while frame is not None and _of_torch(frame) and not _calls_the_model(frame):
        if frame.f_code.co_name in _CHECKS:
            user = _user_frame(frame)
            return (_line(user), True) if user is not None and not _caught(user) else None
        frame = frame.f_back
    return None


def _asked(frame: FrameType) -> tuple[Span, bool]:
    """The place of the expression whose truth a frame takes, and whether a function that it calls takes it."""
    instructions = list(dis.get_instructions(frame.f_code))
    at = next((index for index, each in enumerate(instructions) if each.offset == frame.f_lasti), 0)
    if instructions[at].opname.startswith(("CALL", "PRECALL")):
        return _span(instructions[at]), True
    while at and instructions[at].opname.startswith(("POP_JUMP", "JUMP_IF", "TO_BOOL", "UNARY_NOT", "COPY", "SWAP", "EXTENDED")):
        at -= 1  # a jump has the place of the statement in some versions of Python, what made its operand never has
    return _span(instructions[at]), False


def _span(instruction: dis.Instruction) -> Span:
    return tuple(instruction.positions or (None,) * 4)  # type: ignore[return-value]


def _of_torch(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return name.startswith(TORCH_ROOT) or "/autopar/capture/" in name or "<" in name


def _user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame outside of torch and of capture; None where the model is not being called."""
    while frame is not None and _of_torch(frame):
        frame = None if _calls_the_model(frame) else frame.f_back
    return frame


def _calls_the_model(frame: FrameType) -> bool:
    return frame.f_code.co_filename.endswith("/autopar/capture/tracing/trace.py")


def _line(frame: FrameType) -> str:
    """``file.py:line`` of a frame; of its caller, where the frame is a helper that checks."""
    caller = _user_frame(frame.f_back) if "check" in frame.f_code.co_name or "assert" in frame.f_code.co_name else None
    frame = caller or frame
    return f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"


Branch = ast.If | ast.Assert | ast.Try


def _branches(frame: FrameType) -> tuple[Branch, ...]:
    """The conditions, assertions and ``try`` statements of a frame's file."""
    return _branches_of("".join(linecache.getlines(frame.f_code.co_filename)))


@lru_cache(maxsize=16)  # a model asks thousands of times, from a few files of thousands of lines
def _branches_of(source: str) -> tuple[Branch, ...]:
    try:
        return tuple(node for node in ast.walk(ast.parse(source)) if isinstance(node, Branch))
    except SyntaxError:
        return ()


def _wanted(statement: ast.If | ast.Assert) -> bool | None:
    """The truth of a statement's test with which nothing is raised; None where both branches do something."""
    if isinstance(statement, ast.Assert) or (statement.orelse and _only_complains(statement.orelse)):
        return True
    return False if _only_complains(statement.body) else None


def _only_complains(body: list[ast.stmt]) -> bool:
    """Return whether statements only raise or warn."""
    return isinstance(body[-1], ast.Raise) or all(isinstance(each, ast.Pass) or _warns(each) for each in body)


def _warns(statement: ast.stmt) -> bool:
    call = statement.value if isinstance(statement, ast.Expr) else None
    function = call.func if isinstance(call, ast.Call) else None
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in _WARN


def _answer(test: ast.expr, wanted: bool, span: Span, calls: bool) -> bool | None:
    """The truth of the part of a test at `span`, so that the whole is as wanted; None where no such part is asked."""
    operand = test.operand if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) else None
    if span == (test.lineno, test.end_lineno, test.col_offset, test.end_col_offset):
        asks = not calls or (isinstance(test, ast.Call) and (getattr(test.func, "id", "") in _TRUTH or _compares(test)))
        return (wanted if operand is None else not wanted) if asks else None
    parts = test.values if isinstance(test, ast.BoolOp) else [] if operand is None else [operand]
    inner = wanted if operand is None else not wanted
    answers = (_answer(part, inner, span, calls) for part in parts)
    return next((answer for answer in answers if answer is not None), None)


def _compares(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name in ("equal", "allclose")


def _caught(frame: FrameType | None) -> bool:
    """Return whether a frame, or one that called it up to the model, would catch an exception: then raising is a branch as
    well."""
    while frame is not None and not _calls_the_model(frame):
        if not _of_torch(frame):
            line = frame.f_lineno
            tries = (node for node in _branches(frame) if isinstance(node, ast.Try) and node.handlers)
            if any(each.body[0].lineno <= line <= (each.body[-1].end_lineno or line) for each in tries):
                return True
        frame = frame.f_back
    return False
