"""Losses of the positions that a mask picks, losses of CTC, and statistics whose sizes torch reads from data, as operations of
fixed sizes.

``F.cross_entropy(logits[mask], labels[mask])`` has as many rows as the mask has ones: it is the loss of all rows, of which the
others are ignored. So is ``losses[mask].mean()``. ``h[mask] *= 2`` is a choice between all doubled and all as they are.
``F.ctc_loss`` is one operation with a loss for each example, ``ap::ctc_losses``. Its targets that a mask picks out of a padded
matrix (``labels.masked_select(mask)``, ``labels[mask]``) are moved to the left in their rows instead, if the lengths are the
mask's sums: their number is data too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from autopar.capture.tracing.places import user_line
from autopar.errors import CaptureError

_BY_CLASS = (F.cross_entropy, F.nll_loss)
_BY_ELEMENT = (
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits
)  # fmt: skip
_SUMS, _MEANS = (torch.sum, Tensor.sum), (torch.mean, Tensor.mean)
_ELEMENTWISE = frozenset(
    (Tensor.mul, Tensor.mul_, Tensor.__mul__, Tensor.__rmul__, Tensor.__imul__, Tensor.add, Tensor.add_, Tensor.__add__,
     Tensor.__radd__, Tensor.__iadd__, Tensor.sub, Tensor.sub_, Tensor.__sub__, Tensor.__rsub__, Tensor.__isub__, Tensor.div,
     Tensor.div_, Tensor.__truediv__, Tensor.__rtruediv__, Tensor.__itruediv__, Tensor.__neg__, Tensor.neg, Tensor.neg_,
     Tensor.__pow__, Tensor.pow, Tensor.abs, Tensor.clamp, Tensor.clamp_, Tensor.exp, Tensor.log, Tensor.sqrt, Tensor.sqrt_,
     Tensor.tanh, Tensor.sigmoid, Tensor.relu, torch.abs, torch.clamp, torch.exp, torch.log, torch.sqrt, torch.tanh,
     torch.sigmoid, torch.relu, torch.mul, torch.add, torch.sub, torch.div)
)  # fmt: skip
_NOT_PICKED = 0.5  # a value and a target that each of these has a loss for


class MaskLosses(TorchFunctionMode):
    """While active, losses of picked positions and these statistics have fixed sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.picked: Any = WeakIdKeyDictionary()
        """The results of boolean indices, each with the tensor, the mask, and the versions of the three."""
        self.origins: Any = WeakIdKeyDictionary()
        """The function and operands that made a mask, which is the same where it was written twice."""
        self.operands: list[Any] = []  # which live as long as their ids are compared

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func in _STATISTICS:
            return _STATISTICS[func](*args, **named)
        if func in (*_BY_CLASS, *_BY_ELEMENT) and (found := self._loss(func, args, named)) is not None:
            return found
        if func in (*_SUMS, *_MEANS) and len(args) == 1 and not named and (source := self._source(args[0])) is not None:
            if func in _SUMS:
                return _sum(*source)
            if source[0].is_floating_point():
                return _mean(*source)
        if func is Tensor.__setitem__ and self._put(*args):
            return None
        source = self._source(args[0]) if _of_elements(func, args, named) else None
        result = func(*args, **named)
        if source is not None:
            x, mask = source
            # what is not picked may have no logarithm, whose gradient would not be zero
            whole = func(torch.where(_over(mask, x), x, 0), *args[1:], **named)
            self.picked[result] = whole, mask, (whole._version, mask._version, result._version)
        elif func is Tensor.__getitem__ and _picks(*args):
            x, mask = args
            source = x if torch.is_grad_enabled() else x.detach()
            self.picked[result] = source, mask, (source._version, mask._version, result._version)
        elif _is_mask(result) and not named and not any(result is each for each in args):  # bernoulli_ is random
            versions = [arg._version for arg in args if isinstance(arg, Tensor)]
            self.operands.append(args)
            self.origins[result] = (func, *map(self._origin, args), *versions, result._version)
        return result

    def _origin(self, x: Any) -> Any:
        """Return what is equal for equal masks."""
        if not isinstance(x, Tensor):
            return repr(x)
        known = self.origins.get(x)
        return known if known is not None and known[-1] == x._version else id(x)

    def _source(self, picked: Any) -> tuple[Tensor, Tensor] | None:
        """Return the tensor and the mask of a result of a boolean index; None for others, and where one was written since."""
        if not isinstance(picked, Tensor) or picked not in self.picked:
            return None
        x, mask, versions = self.picked[picked]
        return (x, mask) if versions == (x._version, mask._version, picked._version) else None

    def _put(self, x: Tensor, index: Any, value: Any) -> bool:
        """Return whether the values of picked positions were put back to their places."""
        source = self._source(value)
        if source is None or not _picks(x, index) or source[0].shape != x.shape or self._origin(source[1]) != self._origin(index):
            return False
        x.copy_(torch.where(_over(index, x), source[0].to(x.dtype), x))
        return True

    def _loss(self, func: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any]) -> Tensor | None:
        """Return the loss of all positions of which the others do not count; None where it is of another kind."""
        given = signature(func).bind(*args, **named)
        given.apply_defaults()
        options = given.arguments
        of_input, of_target = self._source(options.pop("input")), self._source(options.pop("target"))
        if of_input is None or of_target is None:
            return None
        (x, mask), (y, other) = of_input, of_target
        old = options.get("size_average") is not None or options.get("reduce") is not None
        if self._origin(mask) != self._origin(other) or old or options["reduction"] not in ("mean", "sum"):
            return None
        if func in _BY_CLASS:
            if x.dim() != mask.dim() + 1 or y.shape != mask.shape or y.is_floating_point():
                return None
            target = torch.where(mask, y, options["ignore_index"]).flatten()
            x = torch.where(mask.unsqueeze(-1), x, 0.0)  # rows of -inf have no gradient to multiply by zero
            loss: Tensor = func(x.flatten(0, -2), target, **options)
            return loss
        if x.shape != y.shape or options.get("weight") is not None or options.get("pos_weight") is not None:
            return None
        wide = _over(mask, x)
        x, y = torch.where(wide, x, _NOT_PICKED), torch.where(wide, y, _NOT_PICKED)
        each = func(x, y, **{**options, "reduction": "none"})
        return _sum(each, mask) if options["reduction"] == "sum" else _mean(each, mask)


def _over(mask: Tensor, x: Tensor) -> Tensor:
    """Return a mask of the first dimensions of x with as many dimensions as x."""
    return mask.view(*mask.shape, *(1,) * (x.dim() - mask.dim()))


def _sum(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(_over(mask, x), x, 0).sum()


def _mean(x: Tensor, mask: Tensor) -> Tensor:
    total = _sum(x if x.dtype.itemsize > 2 else x.float(), mask)  # a sum of halves may be infinite, and the mean not
    return (total / (mask.sum() * (x.numel() // mask.numel()))).to(x.dtype)


def _is_mask(x: Any, dims: int = 0) -> bool:
    """Return whether this is a mask, of so many dimensions unless that is 0."""
    return isinstance(x, Tensor) and x.dtype is torch.bool and (x.dim() == dims if dims else x.dim() > 0)


def _of_elements(func: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
    """Return whether a function computes each element of its first argument alone, with numbers."""
    numbers = all(isinstance(each, (int, float)) for each in (*args[1:], *named.values()))
    return numbers and bool(args) and func in _ELEMENTWISE


def _picks(x: Any, index: Any) -> bool:
    return _is_mask(index) and isinstance(x, Tensor) and x.shape[: index.dim()] == index.shape


def _cov(x: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None) -> Tensor:
    if fweights is not None or aweights is not None or x.dim() > 2:
        return torch.cov(x, correction=correction, fweights=fweights, aweights=aweights)
    rows = x if x.dim() == 2 else x.reshape(1, -1)
    rows = rows - rows.mean(1, keepdim=True)
    return (rows @ rows.mH / (rows.shape[1] - correction)).squeeze()


def _corrcoef(x: Tensor) -> Tensor:
    covariance = _cov(x)
    if covariance.dim() == 0 or covariance.is_complex():
        return torch.corrcoef(x)
    deviations = covariance.diagonal().sqrt()
    return (covariance / deviations[:, None] / deviations).clamp(-1, 1)


def _bincount(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """Counts of classes up to `minlength`: a larger one, which would make the result longer, is an error of the index."""
    if not minlength or x.dim() != 1:
        return torch.bincount(x, weights, minlength)
    dtype = torch.int64 if weights is None else weights.dtype if weights.dtype is torch.float32 else torch.float64
    counted = torch.ones_like(x, dtype=dtype) if weights is None else weights.to(dtype)
    return torch.zeros(minlength, dtype=dtype, device=x.device).scatter_add(0, x.long(), counted)


_STATISTICS: Mapping[Any, Callable[..., Tensor]] = {
    **dict.fromkeys((torch.cov, Tensor.cov), _cov),
    **dict.fromkeys((torch.corrcoef, Tensor.corrcoef), _corrcoef),
    **dict.fromkeys((torch.bincount, Tensor.bincount), _bincount),
}


_PICKED = (Tensor.masked_select, torch.masked_select, Tensor.__getitem__)


@lru_cache(maxsize=1)
def _operator() -> Any:
    from autopar.runtime.ops.functions import ctc_losses as run

    @torch.library.custom_op("ap::ctc_losses", mutates_args=())
    def ctc_losses(
        log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
    ) -> Tensor:
        return run(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)

    @ctc_losses.register_fake
    def _(log_probs: Tensor, *_: object) -> Tensor:
        return log_probs.new_empty(log_probs.shape[1])

    return ctc_losses


class CtcLosses(TorchFunctionMode):
    """While active, ``F.ctc_loss`` is the operation, and its reduction."""

    def __init__(self) -> None:
        super().__init__()
        self.picked: Any = WeakIdKeyDictionary()
        """The results, each with the matrix and the mask that it is picked with."""
        self.counted: Any = WeakIdKeyDictionary()
        """The sums of rows, each with its mask."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func is F.ctc_loss:
            return self.loss(*args, **named)
        result = func(*args, **named)
        if func in _PICKED and len(args) == 2 and _is_mask(args[1], 2) and args[1].shape == args[0].shape:
            self.picked[result] = args
        elif func in (Tensor.sum, torch.sum) and _is_mask(args[0], 2) and (named.get("dim") or args[1:]) in (-1, 1, (-1,), (1,)):
            self.counted[result] = args[0]
        return result

    def loss(
        self, log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0,
        reduction: str = "mean", zero_infinity: bool = False,
    ) -> Tensor:  # fmt: skip
        """Return the result of ``F.ctc_loss``."""
        single = log_probs.dim() == 2
        if targets.dim() == 1 and not single:
            targets = self.padded(targets, target_lengths)
        if single:
            log_probs, targets = log_probs.unsqueeze(1), targets.reshape(1, -1)
        lengths = [_lengths(given, log_probs) for given in (input_lengths, target_lengths)]
        losses: Tensor = _operator()(log_probs, targets, *lengths, blank, zero_infinity)
        if reduction == "mean":
            return (losses / lengths[1].clamp_min(1).to(losses.dtype)).mean()
        return losses.sum() if reduction == "sum" else losses[0] if single else losses

    def padded(self, targets: Tensor, lengths: Any) -> Tensor:
        """The matrix of targets that stand one after the other."""
        if targets in self.picked:
            matrix, mask = self.picked[targets]
            if isinstance(lengths, Tensor) and lengths in self.counted and self.counted[lengths] is mask:
                order = torch.argsort((~mask).to(torch.int64), dim=-1, stable=True)
                moved: Tensor = matrix.gather(-1, order)
                return moved
        raise CaptureError(
            f"{user_line()}: ctc_loss of targets that stand one after the other has sizes that depend on data: pass targets as "
            "(batch, length), padded"
        )


def _lengths(given: Any, log_probs: Tensor) -> Tensor:
    """Lengths as a tensor, one number for each example."""
    if isinstance(given, Tensor):
        return given.reshape(-1).to(log_probs.device)
    numbers = list(given)
    if numbers and all(each == numbers[0] for each in numbers):
        return log_probs.new_full((log_probs.shape[1],), numbers[0], dtype=torch.int64)
    return torch.tensor(numbers, device=log_probs.device)
