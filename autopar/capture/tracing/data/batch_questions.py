"""Questions that a forward asks about the batch: of ``if x.shape[0] > 1:`` a program has the branch of its example. And those
that torch's own modules ask of data, to be faster or to have a number: while a model is traced, they need not; and lists of
numbers as indices, whose values they would lose.

Torch answers most questions about the batch by what it takes for granted of every size (at least 2), and notes nothing. Questions
of torch's own code (may two sizes be equal?) have one answer for all batches.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partialmethod
from types import FrameType
from typing import Any, NamedTuple

import sympy
import torch
from torch import Tensor, nn
from torch._subclasses import fake_impls
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.nn.functional import batch_norm
from torch.nn.modules import transformer
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from torch.overrides import TorchFunctionMode
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


def masks_are_not_read() -> AbstractContextManager[None]:
    """``nn.TransformerEncoder`` compares its mask with a causal one, to say so to the kernel beside the mask. It is said where
    the caller does; the mask counts in any case, and `normalize.masks` finds causal ones."""

    def hint(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True

    return replaced(transformer, "_detect_is_causal_mask", hint)


PADDED_ENCODER = (
    "an nn.TransformerEncoder has a padding mask: in evaluation without gradients the program computes what torch does under "
    "torch.backends.mha.set_fastpath_enabled(False)"
)


@contextmanager
def padded_encoders() -> Iterator[list[str]]:
    """Yield `PADDED_ENCODER` for each call of an ``nn.TransformerEncoder`` for which torch may take its fast path in evaluation:
    over nested tensors, whose padded outputs are zeros. While a model is traced it does not, since that depends on the mask."""
    before, notes = nn.TransformerEncoder.forward, list[str]()

    def forward(
        self: nn.TransformerEncoder,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        if self.use_nested_tensor and src.dim() == 3 and src_key_padding_mask is not None and mask is None:
            notes.append(PADDED_ENCODER)
        return before(self, src, mask, src_key_padding_mask, is_causal)

    with replaced(nn.TransformerEncoder, "forward", forward):
        yield notes


def to_the_same_device() -> AbstractContextManager[None]:
    """``submodule.to(device)`` in a forward, where it is there already: torch would swap parameters that are being traced."""
    before = nn.Module.to

    def to(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        tensors = (*self.parameters(), *self.buffers())
        if dtype is None and device is not None and all(tensor.device == device for tensor in tensors):
            return self
        return before(self, *args, **kwargs)

    return replaced(nn.Module, "to", to)


@contextmanager
def plain_batch_norms() -> Iterator[None]:
    """Batch norm with ``momentum=None`` makes a number of how many batches it saw, for the mean over all of them. Here that
    stays a tensor. And `nn.SyncBatchNorm`, which has collectives of its own, is one like others: its batch is the global one."""
    before = _BatchNorm.forward

    def forward(self: _BatchNorm, input: Tensor) -> Tensor:
        x = input
        seen, mean, variance = self.num_batches_tracked, self.running_mean, self.running_var
        if self.momentum is not None or not self.training or seen is None or mean is None or variance is None:
            return before(self, x)
        self._check_input_dim(x)
        with torch.no_grad():
            seen.add_(1)
            dims = [dim for dim in range(x.dim()) if dim != 1]
            share = 1 / seen.to(mean.dtype)
            for running, found in ((mean, x.mean(dims)), (variance, x.var(dims))):
                running.copy_(running + share * (found - running))
        return batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)

    with replaced(_BatchNorm, "forward", forward), replaced(SyncBatchNorm, "forward", forward):
        yield


class ListIndices(TorchFunctionMode):
    """Lists of numbers as indices (``x[:, [-1]]``) have values: torch makes tensors of them where the indexed one is, on meta.
    One number is a slice of length 1, several are a tensor. And old masks of ``torch.where`` are those of today."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            args = (args[0], _with_values(args[1]), *args[2:])
        elif func in (torch.where, torch.Tensor.where) and (mask := args[func is torch.Tensor.where]).dtype is torch.uint8:
            args = tuple(mask.bool() if arg is mask else arg for arg in args)  # the kernels take it, fake tensors do not
        return func(*args, **(kwargs or {}))


def _with_values(index: Any) -> Any:
    items = index if isinstance(index, tuple) else (index,)
    if not any(map(_is_list, items)):
        return index
    alone = sum(isinstance(item, (list, torch.Tensor)) for item in items) == 1
    return tuple(_of_list(item, alone) if _is_list(item) else item for item in items)


def _is_list(item: Any) -> bool:
    return isinstance(item, list) and bool(item) and all(type(each) is int for each in item)


def _of_list(numbers: list[int], alone: bool) -> slice | torch.Tensor:
    if alone and len(numbers) == 1:
        return slice(numbers[0], numbers[0] + 1 or None)
    return torch.tensor(numbers)
