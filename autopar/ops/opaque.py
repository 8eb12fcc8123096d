"""`opaque`: the smallest submodule around control flow that depends on data is left whole, as one operation ``ap.opaque``.

Capture sees an operation of the module's arguments, parameters and buffers; ranks call the module itself
(`runtime.ops.control_flow`), so gradients are those of autograd. The operation names the module by its path in the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.errors import OperatorError
from autopar.runtime.ops import control_flow as runtime


def opaque(module: nn.Module, *, batchwise: bool = False) -> nn.Module:
    """The module itself, which is captured as one operation: its forward may branch on data.

    Every rank computes it whole, on the whole batch; with `batchwise` each data rank on its own examples, which is right where
    each example's result depends on that example alone (dimension 0 of arguments and results is the batch then). It takes tensors
    and returns one or several, whose shapes do not depend on data; it draws no random numbers and updates no buffers.
    """
    if not isinstance(module, nn.Module):
        raise OperatorError(f"opaque takes a module, not a {type(module).__name__}: pass the submodule around the control flow")
    if not isinstance(module.__dict__.get("forward"), OpaqueForward):
        module.__dict__["forward"] = OpaqueForward(module, batchwise)
    return module


class OpaqueForward:
    """The forward of an opaque module: an operation while it is captured, else the module's own."""

    def __init__(self, module: nn.Module, batchwise: bool) -> None:
        self.module, self.batchwise = module, batchwise
        self.path = ""
        """In the model that is captured (see `opaque_modules`)."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        if not torch.compiler.is_exporting():
            return type(module).forward(module, *args, **kwargs)
        given = {**{f"*{number}": value for number, value in enumerate(args)}, **kwargs}
        for name, value in given.items():
            if not isinstance(value, Tensor):
                raise OperatorError(
                    f"opaque {type(module).__name__} gets a {type(value).__name__} as {name}: pass tensors, and set the rest in "
                    "its __init__"
                )
        state = [tensor for _, tensor in (*module.named_parameters(), *module.named_buffers())]
        names = " ".join("*" if name.startswith("*") else name for name in given)
        found = operator()([*given.values(), *state], self.path, names, module.training, self.batchwise)
        return found[0] if len(found) == 1 else tuple(found)


_captured: ContextVar[Mapping[str, nn.Module]] = ContextVar("opaque modules of the model that is captured")


def whole_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The code of the opaque modules of a model, by path: what `MeshHandle.opaque_modules` holds."""
    found = {path: module for path, module in model.named_modules() if isinstance(module.__dict__.get("forward"), OpaqueForward)}
    return {path: _plain(module) for path, module in found.items()}


def _plain(module: nn.Module) -> nn.Module:
    copied = runtime.without_data(module)
    copied.__dict__.pop("forward")
    return copied


@contextmanager
def opaque_modules(model: nn.Module, clone: nn.Module, equal: Callable[[nn.Module, nn.Module], bool]) -> Iterator[None]:
    """While active, the opaque modules of `clone`, a copy of `model`, are captured by their paths: of several whose code is
    `equal` by that of the first, so that layers around them are equal too."""
    whole = whole_modules(model)
    firsts: list[str] = []
    for path, module in clone.named_modules():
        if isinstance(forward := module.__dict__.get("forward"), OpaqueForward):
            forward.path = next((first for first in firsts if equal(whole[first], whole[path])), path)
            firsts += [path] if forward.path == path else []
    token = _captured.set(whole)
    try:
        yield
    finally:
        _captured.reset(token)


@lru_cache(maxsize=1)
def operator() -> Any:
    """``ap::opaque`` as torch sees it while tracing."""

    @torch.library.custom_op("ap::opaque", mutates_args=())
    def op(tensors: Sequence[Tensor], path: str, names: str, training: bool, batchwise: bool) -> list[Tensor]:
        found = runtime.call_whole(_captured.get()[path], tensors, names, training)
        return [found.clone()] if isinstance(found, Tensor) else [each.clone() for each in found]

    @op.register_fake
    def _(tensors: Sequence[Tensor], path: str, names: str, training: bool, batchwise: bool) -> list[Tensor]:
        return _results(tensors, path, names, training)

    return op


def _results(tensors: Sequence[Tensor], path: str, names: str, training: bool) -> list[Tensor]:
    """Empty results: their sizes are found by running the module on random numbers, at two sizes of the batch."""
    batch = next((size for tensor in tensors for size in tensor.shape if isinstance(size, torch.SymInt)), None)
    module = _captured.get()[path]
    first = _probe(tensors, module, names, training, 3)
    second = _probe(tensors, module, names, training, 5) if batch is not None else None
    out = []
    for number, tensor in enumerate(first):
        sizes: list[Any] = list(tensor.shape)
        if second is not None:
            for dim, (one, two) in enumerate(zip(tensor.shape, second[number].shape, strict=True)):
                times, rest = divmod(two - one, 2)
                if rest:
                    raise OperatorError(
                        f"opaque {path}: dimension {dim} of its result grows unevenly with the batch: reshape it outside"
                    )
                sizes[dim] = times * (batch or 0) + (one - 3 * times) if times else one
        out.append(tensors[0].new_empty(sizes, dtype=tensor.dtype))
    return out


def _probe(tensors: Sequence[Tensor], module: nn.Module, names: str, training: bool, batch: int) -> list[Tensor]:
    """The module's results on real numbers, with `batch` in place of the symbolic size. OperatorError for what ranks could not
    repeat."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    shapes = [tuple(_size(size, batch) for size in tensor.shape) for tensor in tensors]
    title = f"opaque {type(module).__module__.rpartition('.')[2]}.{type(module).__qualname__}"
    with unset_fake_temporarily(), disable_proxy_modes_tracing(), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        real = [_numbers(shape, tensor.dtype, generator) for shape, tensor in zip(shapes, tensors, strict=True)]
        before = [tensor.clone() for tensor in real]
        try:
            with _RefuseRandom(title):
                found = runtime.call_whole(module, real, names, training)
        except (RuntimeError, IndexError, TypeError) as error:
            raise OperatorError(
                f"{title} fails on random numbers: {' '.join(str(error).split())[:150]}: check its arguments"
            ) from None
        found = [found] if isinstance(found, Tensor) else found
        if not all(isinstance(each, Tensor) for each in found):
            raise OperatorError(f"{title} returns what is no tensor: return a tensor, or a tuple of tensors")
        if any(not torch.equal(one, two) for one, two in zip(before, real, strict=True)):
            raise OperatorError(f"{title} writes to its arguments or buffers (batch norm?): leave that outside of it")
        return list(found)


def _size(size: Any, batch: int) -> int:
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression.subs({symbol: batch for symbol in expression.free_symbols}))


def _numbers(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if dtype.is_floating_point:
        return torch.rand(shape, generator=generator, device="cpu").to(dtype)
    return torch.zeros(shape, dtype=dtype, device="cpu")


class _RefuseRandom(TorchDispatchMode):
    def __init__(self, title: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.title = title

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tags, name = getattr(func, "tags", ()), str(getattr(func, "_schema", func))
        if torch.Tag.nondeterministic_seeded in tags and "scaled_dot_product" not in name:
            raise OperatorError(
                f"{self.title} draws random numbers, which ranks would draw apart: draw outside of it, and pass them in"
            )
        return func(*args, **(kwargs or {}))
