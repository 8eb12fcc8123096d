"""``F.ctc_loss`` as one operation with a loss for each example, ``ap::ctc_losses``: torch's own has sizes that depend on data.

Targets that a mask picks out of a padded matrix (``labels.masked_select(mask)``, ``labels[mask]``) are moved to the left in their
rows instead, if the lengths are the mask's sums: their number is data too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from autopar.capture.tracing.places import user_line
from autopar.errors import CaptureError

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

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func is F.ctc_loss:
            return self.loss(*args, **named)
        result = func(*args, **named)
        if func in _PICKED and len(args) == 2 and _is_mask(args[1]) and args[1].shape == args[0].shape:
            self.picked[result] = args
        elif func in (Tensor.sum, torch.sum) and _is_mask(args[0]) and (named.get("dim") or args[1:]) in (-1, 1, (-1,), (1,)):
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


def _is_mask(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype is torch.bool and x.dim() == 2


def _lengths(given: Any, log_probs: Tensor) -> Tensor:
    """Lengths as a tensor, one number for each example."""
    if isinstance(given, Tensor):
        return given.reshape(-1).to(log_probs.device)
    numbers = list(given)
    if numbers and all(each == numbers[0] for each in numbers):
        return log_probs.new_full((log_probs.shape[1],), numbers[0], dtype=torch.int64)
    return torch.tensor(numbers, device=log_probs.device)
