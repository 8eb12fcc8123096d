"""The lines that one rank of a module runs, forward and backward: operations of ATen and collectives, each with its source.

A tensor that is written in place is another value from there on, as are the views of its storage.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._decomp import get_decompositions
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.checker.captured import canonical
from autopar.checker.rows.operation_call import TensorName, bind, plain
from autopar.checker.shards import Shape

_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
_PLACE = re.compile(r'File "(.+?)", line (\d+)')
_DECOMPOSED = (
    "native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward", "mse_loss_backward",
    "select_backward", "native_dropout", "smooth_l1_loss_backward",
)  # fmt: skip
"""Operations that become several, each of which has a row."""
UNKNOWN = "a tensor that the module had before, of shape"


class WrongLine(Exception):
    """A line that is wrong, or that cannot be judged: where, and why."""

    def __init__(self, source: str, reason: str) -> None:
        super().__init__(f"{source or 'autograd'}: {reason}")


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor that a line makes."""

    name: int
    shape: Shape
    dtype: str


@dataclass(frozen=True, slots=True)
class RecordedLine:
    """One operation. `axes`: of a collective, the mesh axes that its group spans."""

    op: str
    arguments: Mapping[str, Any]
    operands: tuple[Made, ...]
    results: tuple[Made, ...]
    source: str
    backward: bool
    axes: tuple[str, ...] = ()


@dataclass
class Recording:
    """The lines that a rank ran. `given`: tensors that were there before, by name; `results`: those that are asked for after."""

    lines: list[RecordedLine] = field(default_factory=list)
    given: dict[str, Made] = field(default_factory=dict)
    results: dict[str, Made] = field(default_factory=dict)


def _flows(tensor: Tensor) -> bool:
    try:
        return tensor.grad_fn is not None
    except RuntimeError:  # a view that was made where no gradients are recorded, of what was written in place since
        return False


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _part_of_storage(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.storage_offset(), tensor.shape, tensor.stride()


def axes_of(ranks: Sequence[int], rank: int, mesh: Mapping[str, int]) -> tuple[str, ...] | None:
    """The mesh axes along which the ranks of a group lie; None where they are no such group."""
    inner, strides = 1, dict[str, int]()
    for name, size in reversed(list(mesh.items())):
        strides[name], inner = inner, inner * size
    moving = [name for name in mesh if len({each // strides[name] % mesh[name] for each in ranks}) > 1]
    expected = {rank}
    for name in moving:
        base = strides[name]
        expected = {each + (k - each // base % mesh[name]) * base for each in expected for k in range(mesh[name])}
    return tuple(moving) if expected == set(ranks) else None


class Recorder(TorchDispatchMode):
    """Records while it is on. Tensors are kept, so that each one's `id` is its own."""

    def __init__(self, rank: int, mesh: Mapping[str, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rank, self.mesh, self.recording = rank, mesh, Recording()
        self._made: dict[int, Made] = {}
        self._alive: dict[int, list[Tensor]] = {}
        self._views: list[tuple[str, tuple[Made, ...], Made]] = []
        self._count = 0
        self._decomposed = get_decompositions([getattr(torch.ops.aten, name) for name in _DECOMPOSED])

    def give(self, name: str, tensor: Tensor) -> None:
        """A tensor that is there before anything runs."""
        self.recording.given[name] = self._new(tensor)

    def take(self, name: str, tensor: Tensor) -> None:
        """A tensor that somebody asks for."""
        self.recording.results[name] = self._name(tensor)

    def pair_gradients(self) -> None:
        """Record which value each gradient belongs to, in the backward to come."""
        for tensor in [each for group in self._alive.values() for each in group if _flows(each)]:
            tensor.register_hook(partial(self._pair, self._made[id(tensor)]))

    def _pair(self, made: Made, gradient: Tensor) -> None:
        self._add("gradient", {}, (self._name(gradient), made), ())

    def _new(self, tensor: Tensor) -> Made:
        self._count += 1
        made = Made(self._count, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        if id(tensor) not in self._made:
            self._alive.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
        self._made[id(tensor)] = made
        return made

    def _name(self, tensor: Tensor) -> Made:
        if id(tensor) not in self._made:
            same = self._alive.setdefault(tensor.untyped_storage()._cdata, [])
            for other in same:
                if _part_of_storage(other) == _part_of_storage(tensor):  # what autograd saved of it
                    same.append(tensor)
                    self._made[id(tensor)] = self._made[id(other)]
                    return self._made[id(tensor)]
            if _in_backward() and tensor.dim():
                raise WrongLine(_source(True), f"it reads a tensor of shape {list(tensor.shape)} that no line made")
            made = self._new(tensor)
            if tensor.dim():
                self.recording.given[f"{UNKNOWN} {list(tensor.shape)}, read at {_source(False)}"] = made
            else:  # a number of Python's
                self._add("aten.scalar_tensor", {"s": tensor.item()}, (), (made,))
        return self._made[id(tensor)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(each, Tensor) and each not in (Tensor, torch.nn.Parameter) for each in types):
            return NotImplemented  # a subclass, whose own operations come here one by one
        if func in self._decomposed:
            with self:
                return self._decomposed[func](*args, **kwargs)
        before = [self._name(each) for each in _tensors((args, kwargs))]
        result = func(*args, **kwargs)
        if func.namespace in ("c10d", "_c10d_functional"):
            self._collective(func, args, kwargs, result)
        elif func.namespace == "aten":
            self._operation(func, args, kwargs, result, before)
        return result

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return TensorName(str(self._name(value).name))
        if isinstance(value, (list, tuple)):
            return tuple(map(self._argument, value))
        return plain(value)

    def _operation(self, func: Any, args: Any, kwargs: Any, result: Any, operands: Sequence[Made]) -> None:
        op = canonical(str(func))
        written = op.endswith("_") and not op.endswith("__")
        given = {name: each for name, each in kwargs.items() if name not in ("device", "layout", "pin_memory", "memory_format")}
        arguments = bind(str(func), self._argument(args), {name: self._argument(each) for name, each in given.items()})
        results = [self._write(args[0])] if written else [self._new(each) for each in _tensors(result)]
        self._add(op.removesuffix("_") if written else op, arguments, operands, results)

    def _write(self, tensor: Tensor) -> Made:
        """The new value of a tensor that is written in place, and of the views of its storage."""
        made = self._new(tensor)
        for other in self._alive[tensor.untyped_storage()._cdata]:
            if other is not tensor:
                old = self._made[id(other)]
                read = ("aten.reshape", (made,)) if other.numel() == tensor.numel() else ("written", (old, made))
                self._views.append((*read, self._new(other)))
        return made

    def _add(
        self, op: str, arguments: Mapping[str, Any], operands: Sequence[Made], results: Sequence[Made], axes: tuple[str, ...] = ()
    ) -> None:
        backward = _in_backward()
        source = _source(backward)
        self.recording.lines.append(RecordedLine(op, arguments, tuple(operands), tuple(results), source, backward, axes))
        for view, read, made in self._views:
            self.recording.lines.append(RecordedLine(view, {}, read, (made,), source, backward))
        self._views = []

    def _collective(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = func._opname
        if name in ("wait_tensor", "_wrap_tensor_autograd"):
            return self._add("aten.alias", {}, (self._name(args[0]),), (self._new(result),))
        found = collective_of(name, args, kwargs, result)
        if found is None:
            raise WrongLine(_source(False), f"{name} is no collective that is known here")
        kind, reduced, outputs, inputs, group = found
        axes = axes_of(dist.get_process_group_ranks(group), self.rank, self.mesh)
        if axes is None:
            ranks = dist.get_process_group_ranks(group)
            raise WrongLine(_source(False), f"{name} runs on ranks {ranks}, which are no axis of {dict(self.mesh)}")
        operands = [self._name(each) for each in inputs]
        made = [self._write(each) if func.namespace == "c10d" else self._new(each) for each in outputs]
        self._add(kind, {"reduce": reduced}, operands, made, axes)
        return None


def collective_of(name: str, args: Any, kwargs: Any, result: Any) -> tuple[str, str, list[Tensor], list[Tensor], Any] | None:
    """Kind, reduction, what is written, what is read, and the group of a collective. None for one that is not known."""
    kinds = {
        "allreduce_": "all_reduce", "all_reduce": "all_reduce", "_allgather_base_": "all_gather", "allgather_": "all_gather",
        "all_gather_into_tensor": "all_gather", "_reduce_scatter_base_": "reduce_scatter",
        "reduce_scatter_tensor": "reduce_scatter", "alltoall_base_": "all_to_all", "all_to_all_single": "all_to_all",
        "broadcast_": "broadcast", "broadcast": "broadcast",
    }  # fmt: skip
    if name not in kinds:
        return None
    values = [*args, *kwargs.values()]
    group = next((x for x in values if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type())), None)
    operator: Any = next((x for x in values if isinstance(x, torch.ScriptObject) and "ReduceOp" in str(x._type())), None)
    words: list[Any] = [x for x in values if isinstance(x, str)]
    if group is not None:
        found: Any = dist.ProcessGroup.unbox(group)
        reduced = "" if operator is None else dist.ReduceOp.RedOpType(operator.op()).name.lower()
    else:
        found = torch._C._distributed_c10d._resolve_process_group(words[-1])
        reduced = words[0] if len(words) > 1 else ""
        return kinds[name], reduced, list(_tensors(result)), list(_tensors(args[:1])), found
    if name in ("allreduce_", "broadcast_"):
        return kinds[name], reduced, list(_tensors(args[:1])), list(_tensors(args[:1])), found
    return kinds[name], reduced, list(_tensors(args[:1])), list(_tensors(args[1:2])), found


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


def _source(backward: bool) -> str:
    """The innermost line of the user's: that which runs, or in the backward of torch's own the one whose backward it is."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_OURS) and not name.startswith("<"):
            break
        frame = frame.f_back
    node: Any = torch._C._current_autograd_node() if backward else None
    trace = () if node is None else node.metadata.get("traceback_", ())
    places = [found.groups() for text in trace for found in [_PLACE.search(text)] if found and not found[1].startswith(_OURS)]
    inside = frame is not None and places and _called_by(frame, "backward")
    if places and not inside:
        return f"{Path(places[-1][0]).name}:{places[-1][1]}"
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _called_by(frame: Any, name: str) -> bool:
    """Return whether a frame is, or is called by, a function of this name or the backward of somebody's autograd.Function."""
    while frame is not None and not frame.f_code.co_filename.startswith(_OURS):
        if frame.f_code.co_name == name:
            return True
        frame = frame.f_back
    return False
