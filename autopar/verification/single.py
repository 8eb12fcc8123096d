"""The model on one process: loss, outputs, gradients, and the state after one step of SGD; and what it drew.

`scan`, `map`, `cond` and `while_loop` are written out in Python: called eagerly, torch compiles them, so that the tensors that a
body closes over become operands; under a dispatch mode it does not compile, and its autograd then sees the operands alone.

Casts to float32 inside a model are lifted to float64, in the model itself and in a captured graph alike: in float64 both sides
then compute in float64 throughout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from autopar.capture.bind import BoundInputs
from autopar.capture.results.returned import take_apart
from autopar.capture.tracing.data.varlen import VarlenAttention, one_at_a_time
from autopar.errors import CaptureError
from autopar.ir.graph import Arg, DType, Graph, Value, map_graph
from autopar.ir.interface import loss_path
from autopar.verification.apart import apart
from autopar.verification.draws import Draw, GiveDraws, RecordDraws
from autopar.verification.rank import weighted_sum

LEARNING_RATE = 0.1


@dataclass(frozen=True, slots=True)
class SingleRun:
    """The results of one call of the model, in the form in which ranks give it (`rank`), and its random `draws` in order."""

    result: dict[str, Any]
    draws: tuple[Draw, ...] = ()
    modules: Mapping[str, Tensor] = field(default_factory=dict)
    """The output of each module by path, where it is one tensor of a module that was called once; in order of execution."""


def run_single(
    model: nn.Module,
    bound: BoundInputs,
    tensors: Mapping[str, Tensor],
    asked: Sequence[str],
    *,
    backward: bool,
    lift: bool = False,
    draws: Sequence[Draw] | None = None,
    record_modules: bool = False,
) -> SingleRun:
    """The model, apart, in the mode that it has, with `tensors` as inputs: a forward, with `backward` a step of SGD too.
    `draws`: what its random operations are given. CaptureError, one line, where the model itself fails."""
    with ExitStack() as stack:
        model = stack.enter_context(apart(model))
        recorder = RecordDraws(model)
        seen = _ModuleOutputs(model) if record_modules else None
        stack.enter_context(WriteOutLoops())
        stack.enter_context(VarlenAttention(one_at_a_time))
        if lift:
            stack.enter_context(lifting())
        if draws is not None:
            stack.enter_context(GiveDraws(draws))
        stack.enter_context(torch.set_grad_enabled(backward))
        with recorder, seen or ExitStack():
            try:
                output = model(**bound.arguments(tensors))
            except RuntimeError as error:
                dtypes = ", ".join(sorted({str(t.dtype).removeprefix("torch.") for t in tensors.values()}))
                line = " ".join(str(error).split())[:200]
                raise CaptureError(
                    f"{type(model).__name__} itself fails on one process with these inputs ({dtypes}): {line}; "
                    "mend the model or its example inputs, or verify it in another --dtype"
                ) from None
        parts = take_apart(output, tuple(asked), module=model)
        loss = parts.loss if loss_path(parts.form) is not None else weighted_sum(parts.outputs.values())
        result: dict[str, Any] = {
            "loss": loss.detach(),
            "outputs": {path: tensor.detach() for path, tensor in parts.outputs.items()},
        }
        if backward:
            result |= _step(model, loss)
    return SingleRun(result, tuple(recorder.draws), seen.outputs() if seen is not None else {})


def _step(model: nn.Module, loss: Tensor) -> dict[str, Any]:
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if loss.requires_grad:
        loss.backward()
    gradients = {name: p.grad.to_dense().clone() if p.grad is not None else torch.zeros_like(p) for name, p in trained.items()}
    with torch.no_grad():
        for parameter in trained.values():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=LEARNING_RATE)
    buffers = {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    state = {name: tensor.detach().clone() for name, tensor in (*trained.items(), *buffers.items())}
    return {"gradients": gradients, "state": state}


class _ModuleOutputs:
    """Notes the output of each module while active."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._outputs, self._handles = model, dict[str, list[Tensor]](), list[Any]()

    def __enter__(self) -> _ModuleOutputs:
        for path, module in self._model.named_modules():

            def note(_: nn.Module, __: Any, output: Any, path: str = path) -> None:
                each = self._outputs.setdefault(path, [])
                each.append(output.detach().clone() if isinstance(output, Tensor) else torch.empty(0))

            self._handles.append(module.register_forward_hook(note))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def outputs(self) -> dict[str, Tensor]:
        return {path: tensors[0] for path, tensors in self._outputs.items() if path and len(tensors) == 1 and tensors[0].numel()}


class WriteOutLoops(TorchFunctionMode):
    """While active, loops and branches are the operations that they consist of, each seen by autograd and by other modes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written = _WRITTEN_OUT.get(func.name()) if isinstance(func, torch._ops.HigherOrderOperator) else None
        if written is None:
            return func(*args, **(kwargs or {}))
        with self:  # loops inside of loops
            return written(*args, **(kwargs or {}))


def _map(body: Callable[..., Any], over: Sequence[Tensor], further: Sequence[Any]) -> Any:
    results = [body(*parts, *further) for parts in zip(*over, strict=True)]
    return tree_map(lambda *each: torch.stack(each), *results)


def _scan(
    body: Callable[..., Any], carried: Sequence[Tensor], over: Sequence[Tensor], additional_inputs: Sequence[Any] = ()
) -> Any:
    """Return what the last step carries, and what all steps give, in the form in which a step gives them."""
    now, given_out, form = list(carried), list[list[Any]](), None
    for parts in zip(*over, strict=True):
        found, form = tree_flatten(body(*now, *parts, *additional_inputs))
        now, stacked = found[: len(now)], found[len(now) :]
        given_out.append(stacked)
    assert form is not None  # torch refuses a scan of no steps
    return tree_unflatten([*now, *map(torch.stack, zip(*given_out, strict=True))], form)


def _cond(predicate: Any, true: Callable[..., Any], false: Callable[..., Any], operands: Sequence[Any] = ()) -> Any:
    return true(*operands) if predicate else false(*operands)


def _while_loop(
    condition: Callable[..., Any], body: Callable[..., Any], carried: Sequence[Any], additional_inputs: Sequence[Any] = ()
) -> Any:
    values: Any = tuple(carried)
    while condition(*tree_leaves(values), *additional_inputs):
        values = body(*tree_leaves(values), *additional_inputs)
    return values


_WRITTEN_OUT: Mapping[str, Callable[..., Any]] = {"map_impl": _map, "scan": _scan, "cond": _cond, "while_loop": _while_loop}


class LiftCasts(TorchDispatchMode):
    """While active, whatever an operation would make in float32 it makes in float64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        lifted = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        operands = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        if not func._schema.is_mutable:  # constants of ``torch.FloatTensor``, which no dtype made
            operands = tree_map(_lifted, operands)
        return func(*operands, **lifted)


def _lifted(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.dtype is torch.float32 else leaf


@contextmanager
def lifting() -> Iterator[None]:
    """Run a model with its casts lifted; new tensors are float64 where it does not say a dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with LiftCasts():  # type: ignore[no-untyped-call]
            yield
    finally:
        torch.set_default_dtype(before)


def has_casts(graph: Graph) -> bool:
    """Return whether something of the graph is float32."""
    return any(value.dtype == "float32" for block in graph.blocks for value in block.values().values())


def lift_casts(graph: Graph) -> Graph:
    """The same graph with every float32 a float64."""
    return map_graph(graph, _value, _argument)


def _value(value: Value) -> Value:
    return replace(value, dtype="float64") if value.dtype == "float32" else value


def _argument(arg: Arg) -> Arg:
    return DType("float64") if isinstance(arg, DType) and arg.name == "float32" else arg
