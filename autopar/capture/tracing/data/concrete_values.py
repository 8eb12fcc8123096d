"""Tensors whose values no input decides: made of numbers in the forward. While a model is traced, Python may read them.

``assert mask[0].all()`` of a mask of ones, ``F.pad(x, crop.tolist())`` of the difference of two shapes: tensors have no values
there, but these can be computed beside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

MOST_ELEMENTS = 4096
_MADE = frozenset(
    (torch.tensor, torch.ones, torch.zeros, torch.full, torch.arange, torch.linspace, torch.eye, torch.as_tensor,
     torch.ones_like, torch.zeros_like, torch.full_like, Tensor.new_ones, Tensor.new_zeros, Tensor.new_full, Tensor.new_tensor)
)  # fmt: skip
"""The functions that make values out of numbers and shapes alone."""
_READ = frozenset((Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.item, Tensor.tolist))
_PURE = """
__get__ __getitem__ __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __floordiv__ __mod__ __neg__
__invert__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__ __or__ __xor__ add sub mul div neg abs eq ne lt le gt ge
logical_and logical_or logical_not all any sum prod max min amax amin cumsum stack cat t transpose permute reshape view
flatten unsqueeze squeeze expand flip diff int long float double bool to type clone contiguous detach __reversed__ floor ceil
round clamp where unbind chunk split __len__ dim size stride numel nelement ndimension is_floating_point is_complex
is_contiguous storage_offset element_size _is_view item tolist
"""
"""Names of functions that only compute, or view: of known values, known values."""
_PURE_NAMES = frozenset(_PURE.split())
_REPEATS = (torch.repeat_interleave, Tensor.repeat_interleave)


class ConcreteValues(TorchFunctionMode):
    """While active, reads of tensors with known values give them."""

    def __init__(self) -> None:
        super().__init__()
        self._values: Any = WeakIdKeyDictionary()
        self.more_at_fixed_sizes = False
        """Whether more were known if no size were a symbol."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():  # the branches of torch.cond
            return func(*args, **kwargs)
        if func not in _MADE and not self._values:
            return func(*args, **kwargs)
        if func in _REPEATS and (found := self._repeated(*args, **kwargs)) is not None:
            return found
        if func in _READ and args[0] in self._values:
            with _disable_current_modes():
                return func(self._values[args[0]], *args[1:], **kwargs)
        leaves = [each for leaf in tree_leaves((args, kwargs)) for each in (leaf if isinstance(leaf, torch.Size) else (leaf,))]
        found = self._compute(func, args, kwargs, leaves)
        out = func(*args, **kwargs)
        if found is not None:
            for made, real in zip(_tensors(out), _tensors(found), strict=True):
                if made.shape == real.shape:
                    self._values[made] = real
        elif not _only_computes(func):
            self._forget(leaves)
        return out

    def _compute(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], leaves: list[Any]) -> Any:
        """Return the result of `func` on known values; None where they are not known."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        sizes = [*leaves, *(size for tensor in tensors for size in tensor.shape)] if func in _MADE else leaves
        if any(isinstance(leaf, (SymInt, SymFloat, SymBool)) for leaf in sizes):
            self.more_at_fixed_sizes |= func in _MADE
            return None
        if func in _MADE:  # of `like` tensors the shape and dtype count
            pick = self._shape_only
        elif _only_computes(func) and tensors and all(tensor in self._values for tensor in tensors):
            pick = self._values.__getitem__
        else:
            return None
        options = {key: torch.device("cpu") if key == "device" else value for key, value in kwargs.items()}
        plain = [torch.device("cpu") if isinstance(arg, torch.device) else arg for arg in args]
        with _disable_current_modes(), torch.no_grad():
            try:
                given, named = tree_map(lambda leaf: pick(leaf) if isinstance(leaf, Tensor) else leaf, (plain, options))
                real = func(*given, **named)
            except Exception:
                return None  # the call itself says what is wrong with it
        small = all(tensor.numel() <= MOST_ELEMENTS and not tensor.requires_grad for tensor in _tensors(real))
        return real if small and _tensors(real) else None

    def _repeated(self, x: Tensor, repeats: Any = None, dim: int | None = None, **_: Any) -> Tensor | None:
        """Return the copies of a tensor's parts, as many as known values say; None where they are not known."""
        if not isinstance(repeats, Tensor) or repeats not in self._values:
            return None
        with _disable_current_modes():
            counts = self._values[repeats]
            places = torch.repeat_interleave(counts).tolist()
        if counts.numel() == 1:
            return x.repeat_interleave(int(counts), dim)
        x, dim = (x, dim) if dim is not None else (x.flatten(), 0)
        return x.index_select(dim, torch.tensor(places, device=x.device))

    def _shape_only(self, tensor: Tensor) -> Tensor:
        return self._values[tensor] if tensor in self._values else torch.empty(1, dtype=tensor.dtype).expand(tensor.shape)

    def _forget(self, leaves: list[Any]) -> None:
        """Forget the values of what may be written into, and of what shares its memory."""
        written = {
            self._values[leaf].untyped_storage().data_ptr()
            for leaf in leaves
            if isinstance(leaf, Tensor) and leaf in self._values
        }
        for tensor in [each for each, real in self._values.items() if real.untyped_storage().data_ptr() in written]:
            del self._values[tensor]


def _only_computes(func: Callable[..., Any]) -> bool:
    return getattr(func, "__name__", "") in _PURE_NAMES or func in _MADE or func in _READ


def _tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
