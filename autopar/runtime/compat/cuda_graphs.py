"""CUDA graphs: the capture of what a function launches, and a check of what it launches for what no graph replays.

A capture runs on a stream of its own, where one step has run before: autograd, FSDP2 and the libraries of kernels make what they
need in their first step, and autograd's nodes stay on the stream on which they were made. Other threads (NCCL's watchdog) may use
the device meanwhile (``thread_local``)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import RuntimeProblem

_READS = ("tolist", "numpy", "item", "__bool__", "__int__", "__float__", "__index__")
"""Methods of tensors that wait for the device, by name."""
_WAITING = ("_linalg_check_errors", "embedding_renorm_", "histc")
"""Operators that wait for the device and whose tags do not say so, by name. Seen on 2.13.0."""
_SEEDED = ("next_seed", "keep_mask", "random_numbers")
"""Our operators that take a seed which Python draws in each step."""

Replay = Callable[[], None]


class CaptureStream:
    """The stream on which steps run that are captured, or run before a capture."""

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise RuntimeProblem(f"cuda_graph=True needs CUDA devices, and this process computes on {device.type}: leave it out")
        self.stream = torch.cuda.Stream(device)

    @contextmanager
    def current(self) -> Iterator[None]:
        """A context whose launches come after those before it, and before those behind it."""
        outside = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(outside)
        with torch.cuda.stream(self.stream):
            yield
        outside.wait_stream(self.stream)

    def capture(self, run: Callable[[], None]) -> Replay:
        """Return a function that launches again what `run` launches, which does not compute anything now."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                run()
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            raise CaptureProblem(f"cuda_graph=True: the step was not captured: {reason}: leave it out") from error
        return graph.replay


def is_capturing(device: torch.device) -> bool:
    """Return whether a graph is captured now, where no event may be asked whether it happened."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class CaptureProblem(RuntimeProblem):
    """A step that a CUDA graph cannot capture, or would replay with the values of its capture."""


@contextmanager
def capture_check(device: torch.device, where: Callable[[Any], str]) -> Iterator[None]:
    """A context that raises a CaptureProblem for what a graph would replay with the values of its capture, or cannot capture:
    reads by the host, sizes that depend on data, and random numbers. `where` names the place of a frame (empty: it is none)."""
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # compiled code shows none of its operations
        stack.enter_context(_HostReads(device, where))
        stack.enter_context(_Launches(device, where))
        yield


def _refusal(what: str, where: Callable[[Any], str]) -> CaptureProblem:
    frame, place = sys._getframe(1), ""
    while frame is not None and not place:
        place, frame = where(frame), frame.f_back  # type: ignore[assignment]
    return CaptureProblem(f"cuda_graph=True: {place or 'the backward'} {what}, which a CUDA graph does not replay: leave it out")


class _HostReads(TorchFunctionMode):
    """Refuses functions that read a tensor of the device on the host, or make one of numbers of the host."""

    def __init__(self, device: torch.device, where: Callable[[Any], str]) -> None:
        super().__init__()
        self.device, self.where = device, where

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _READS and isinstance(args[0], Tensor) and args[0].device.type == self.device.type:
            raise _refusal(f"reads values on the host ({func.__name__})", self.where)
        out = func(*args, **(kwargs or {}))
        stays = str((kwargs or {}).get("device")) == "cpu"
        if func in (torch.tensor, torch.as_tensor) and not stays and out.device.type == self.device.type:
            raise _refusal(f"copies values from the host ({func.__name__})", self.where)
        return out


class _Launches(TorchDispatchMode):
    """Refuses operators whose replay would be another than a call."""

    def __init__(self, device: torch.device, where: Callable[[Any], str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.where = device, where

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it shows its operators on local tensors
        name = func._schema.name.split("::")[1]
        named = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | (kwargs or {})
        if _draws(func, named) or (func.namespace == "autopar" and name in _SEEDED):
            raise _refusal(f"draws random numbers ({name})", self.where)
        if self._is_here(args) and _waits(func, name, named):
            raise _refusal(f"reads values on the host ({name})", self.where)
        out = func(*args, **(kwargs or {}))
        if name in ("_to_copy", "copy_"):
            source = args[1] if name == "copy_" else args[0]
            if self._is_here([source]) and not self._is_here([out]):
                raise _refusal(f"copies to host memory ({name})", self.where)
            if self._is_here([out]) and not self._is_here([source]) and source.dim():
                raise _refusal(f"copies from host memory ({name})", self.where)
        return out

    def _is_here(self, values: Any) -> bool:
        return any(isinstance(each, Tensor) and each.device.type == self.device.type for each in values)


def _draws(func: Any, named: dict[str, Any]) -> bool:
    """Return whether an operator draws random numbers: attention and recurrent layers may, and do not without dropout."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    names = {each.name for each in func._schema.arguments}
    if "train" in names and not named.get("train"):
        return False
    rate = next((name for name in ("dropout_p", "dropout") if name in names), "")
    return bool(named.get(rate, 0.0)) if rate else True


def _waits(func: Any, name: str, named: dict[str, Any]) -> bool:
    """Return whether the host waits for what an operator computes: values, sizes, or whether it failed."""
    if name in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"):
        return any(isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) for each in named["indices"])
    if named.get("output_size") is not None:
        return False
    tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
    return bool(tags) or name in _WAITING
