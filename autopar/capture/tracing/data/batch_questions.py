"""Questions that a forward asks about the batch: of ``if x.shape[0] > 1:`` a program has the branch of its example.

Torch answers most of them by what it takes for granted of every size (at least 2), and notes nothing. Questions of torch's own
code (may two sizes be equal?) have one answer for all batches.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partialmethod
from types import FrameType
from typing import Any, NamedTuple

import sympy
import torch
from torch._subclasses import fake_impls
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._sympy.functions import FloatTrueDiv, FloorDiv, IntTrueDiv, Mod, PythonMod, ToFloat

from autopar.capture.tracing.places import is_users
from autopar.ir.dims import BATCH, as_dim, parse_size
from autopar.ir.interface import BatchCondition
from autopar.runtime.compat.hooks import replaced

_ARITHMETIC = ("/torch/fx/experimental/sym_node.py", "/torch/_export/non_strict_utils.py")
"""Files of torch with operators of sizes, and with ``max`` and ``min``. Seen on 2.13.0."""
_SIGNS = {sympy.Eq: "==", sympy.Ne: "!=", sympy.Lt: "<", sympy.Le: "<=", sympy.Gt: ">", sympy.Ge: ">="}


class Question(NamedTuple):
    """A truth value in symbols of sizes, and what the forward was told."""

    asks: sympy.Basic
    answer: bool

    def at(self, sizes: Mapping[sympy.Symbol, Any]) -> sympy.Basic:
        """Return what has to be true of these sizes."""
        asks = self.asks.subs(sizes)
        return asks if self.answer else sympy.Not(asks)


@contextmanager
def batch_questions() -> Iterator[list[Question]]:
    """While active, yields what is asked of sizes that are symbols, in code that is not torch's: truth values, also as numbers
    (``1 + (x.shape[0] > 4)``); what sizes were as texts (``str(x.shape[0])``), and as numbers of Python where nothing else will
    do (``F.layer_norm(x, shape, eps=1 / x.shape[0])``, an index of a list); and whether slices end before the tensor does
    (``x[6:]``)."""
    truth: Any = torch.SymBool.__bool__
    numbers: dict[str, Any] = {name: getattr(SymNode, name) for name in ("guard_int", "guard_float")}
    clipped, ordered = fake_impls._compute_slice_index, symbolic_shapes.guard_or_false
    texts: dict[type, Any] = {kind: kind.__repr__ for kind in (torch.SymInt, torch.SymFloat)}
    found: list[Question] = []

    def ask(condition: Any) -> bool:
        answer: bool = truth(condition)
        if _is_asked_by_user(sys._getframe(1)) and not free_unbacked_symbols(condition):  # of data: `checks`
            found.append(Question(condition.node.expr, answer))
        return answer

    def take(node: Any, name: str, *where: Any) -> float:
        expression = node.expr  # which torch may take for a number from then on
        value: float = numbers[name](node, *where)
        if expression.free_symbols and not free_unbacked_symbols(expression):
            found.append(Question(sympy.Eq(expression, value), True))
        return value

    def write(size: Any) -> str:
        if not _is_asked_by_user(sys._getframe(1)) or free_unbacked_symbols(size) or not size.node.expr.free_symbols:
            usual: str = texts[type(size)](size)
            return usual
        found.append(Question(sympy.Eq(size.node.expr, size.node.hint), True))
        return repr(size.node.hint)

    def clip(size: Any, index: Any) -> Any:
        _take_down(found, index <= size if index >= 0 else -index <= size)
        return clipped(size, index)

    def order(condition: Any) -> bool:
        if sys._getframe(1).f_code.co_name == "slice_forward":
            _take_down(found, condition)
        return ordered(condition)

    with ExitStack() as hooks:
        hooks.enter_context(replaced(fake_impls, "_compute_slice_index", clip))
        hooks.enter_context(replaced(symbolic_shapes, "guard_or_false", order))
        hooks.enter_context(replaced(torch.SymBool, "__bool__", ask))
        hooks.enter_context(replaced(torch.SymBool, "__int__", lambda condition: int(ask(condition))))
        for kind in texts:
            hooks.enter_context(replaced(kind, "__bool__", lambda size: ask(size != 0)))
        for name in numbers:
            hooks.enter_context(replaced(SymNode, name, partialmethod(take, name)))
        for kind in texts:
            hooks.enter_context(replaced(kind, "__repr__", write))
        yield found


def _take_down(found: list[Question], condition: Any) -> None:
    """Add what torch finds out of sizes to know how long a slice is: a program has that length."""
    if isinstance(condition, torch.SymBool) and condition.node.hint is not None and condition.node.expr.free_symbols:
        found.append(Question(condition.node.expr, bool(condition.node.hint)))


def _is_asked_by_user(frame: FrameType | None) -> bool:
    """Return whether a frame is the user's, or torch's that does for it what Python does with plain numbers."""
    while frame is not None and (frame.f_code.co_filename == __file__ or frame.f_code.co_filename.endswith(_ARITHMETIC)):
        frame = frame.f_back
    return frame is not None and is_users(frame.f_code.co_filename)


def batch_conditions(questions: tuple[Question, ...], lengths: Mapping[Any, int], batch: int) -> tuple[BatchCondition, ...]:
    """Return what has to hold for a batch to get the answers of these questions, one of `batch` among them."""
    symbol = sympy.Symbol(BATCH, integer=True, positive=True)
    found: dict[BatchCondition, None] = {}
    for question in questions:
        truth = question.at({each: lengths.get(each, symbol) for each in question.asks.free_symbols})
        if truth.free_symbols:
            found[_condition(truth) or BatchCondition(f"{BATCH} - {batch}", "==")] = None
    return tuple(found)


def _condition(truth: sympy.Basic) -> BatchCondition | None:
    """Return a relation of sizes as a condition without quotients but floor divisions; None for what cannot be written as one."""
    sign = next((text for kind, text in _SIGNS.items() if isinstance(truth, kind)), "")
    if not sign:
        return None
    difference = without_casts(truth.lhs - truth.rhs).replace(sympy.floor, lambda a: FloorDiv(*sympy.fraction(a)))
    for remainder in (Mod, PythonMod, sympy.Mod):
        difference = difference.replace(remainder, lambda a, b: a - b * FloorDiv(a, b))
    difference, _ = sympy.fraction(sympy.together(difference))  # of positive sizes: the sign is the same
    try:
        text = str(as_dim(difference))
        parse_size(text)
        if "/" in text.replace("//", ""):
            return None
    except ValueError:
        return None
    return BatchCondition(text, sign)


def without_casts(found: sympy.Expr) -> sympy.Expr:
    """The expression without ``float(size)`` and with plain quotients, which have the same values."""
    found = found.replace(ToFloat, lambda x: x)
    for quotient in (FloatTrueDiv, IntTrueDiv):
        found = found.replace(quotient, lambda a, b: a / b)
    return sympy.nsimplify(found, rational=True)
