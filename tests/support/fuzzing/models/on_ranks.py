"""What a rank does with programs of random models: two steps of SGD of each, on meshes that are made once."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.harness.training_loop import Tensors, full_gradients, full_state

RATE, STEPS = 0.05, 2


class Case(NamedTuple):
    """A program to run: its text, the initial state and the inputs by name, the inputs among them that are random draws, and the
    form of the result. (What was captured in evaluation runs as a program in training.) `uneven`: the program of
    calls whose inputs data ranks have uneven shards of; `text` is then that of the plan."""

    text: str
    state: Tensors
    inputs: Tensors
    given: tuple[str, ...]
    form: Any
    uneven: str = ""


class Steps(NamedTuple):
    """Losses of all steps, gradients of the first, the state after the last, and what the model returned at first."""

    losses: list[float]
    gradients: Tensors
    state: Tensors
    returned: Tensors


def parts_of(result: Any, path: str = "") -> Tensors:
    """The tensors of a result by path."""
    if isinstance(result, Tensor):
        return {path: result}
    pairs = result.items() if isinstance(result, Mapping) else enumerate(result) if isinstance(result, (tuple, list)) else ()
    out: Tensors = {}
    for key, value in pairs:
        out |= parts_of(value, f"{path}.{key}" if path else str(key))
    return out


def weighted(parts: Mapping[str, Tensor]) -> Tensor:
    """A number of all tensors, to take gradients of."""
    total = torch.zeros((), dtype=torch.float64)
    for number, tensor in enumerate(parts.values()):
        weights = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64) + 0.5
        total = total + (tensor * weights).sum() / tensor.numel()
    return total


def loss_in(parts: Mapping[str, Tensor]) -> Tensor:
    """The loss of a result: its only number, or one of all tensors where there is none."""
    if "loss" in parts:
        return parts["loss"].reshape(())
    numbers = [tensor for tensor in parts.values() if tensor.numel() == 1 and tensor.requires_grad]
    if len(numbers) == 1:
        return numbers[0].reshape(())
    return weighted({path: tensor for path, tensor in parts.items() if tensor.is_floating_point()})


def two_steps(model: nn.Module, call: Callable[[], Any]) -> Steps:
    """Two steps of SGD of one model on one batch."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=RATE)
    losses, first, returned = [], Tensors(), Tensors()
    for step in range(STEPS):
        parts = parts_of(call())
        loss = loss_in(parts)
        loss.backward()
        losses.append(loss.item())
        if step == 0:
            first = full_gradients(model)
            returned = {path: tensor.detach().clone() for path, tensor in parts.items() if tensor is not None}
        optimizer.step()
        optimizer.zero_grad()
    return Steps(losses, first, full_state(model), returned)


@cache
def mesh_of(axes: tuple[tuple[str, int], ...], number: int) -> Any:
    """The mesh of a rank, once for the `number` of its process group."""
    from autopar.runtime.device.mesh import MeshHandle

    return MeshHandle(dict(axes))


class _Keeper:
    """Whom the heartbeat of a rank belongs to."""


def run_case(case: Case, heartbeat: Any, keeper: _Keeper) -> Steps:
    """On a rank. All programs of a run have one heartbeat, since each has threads and a connection of its own."""
    from autopar.program.load import load_program
    from autopar.runtime.parallel import Parallel
    from autopar.runtime.state.lend import lend_state
    from autopar.runtime.step.inputs import NamedBatch
    from autopar.runtime.variants import Variant

    program: Any = load_program(case.text).Program
    program.input_shapes = {name: shape for name, shape in program.input_shapes.items() if name not in case.given}
    mesh = mesh_of(tuple(program.mesh_axes.items()), id(dist.group.WORLD))
    parallel = Parallel(program(mesh), case.state, form=case.form, check_every=1, heartbeat=heartbeat)
    heartbeat.stop_with(keeper)
    inputs = {name: tensor.clone() for name, tensor in case.inputs.items()}
    if case.uneven:  # as `Variants` runs it
        mesh = mesh.for_variant(False, len(next(iter(inputs.values()))))
        other: Any = load_program(case.uneven).Program(mesh)
        lend_state(other, parallel.program, parallel.state)
        parallel.calls.first = Variant(other, case.form, parallel.state)
    return two_steps(parallel, lambda: parallel(NamedBatch(inputs)))


def run_cases(cases: Sequence[Case]) -> list[Steps | str]:
    """Each case on this rank, or what was raised: its last line where autopar refuses it, else the traceback."""
    from autopar.runtime.comm.heartbeat import start_heartbeat
    from autopar.runtime.errors import AutoparError

    heartbeat, keeper = start_heartbeat(lambda rank: f"rank {rank}"), _Keeper()
    out: list[Steps | str] = []
    for case in cases:
        try:
            found = run_case(case, heartbeat, keeper)
            out.append(found if dist.get_rank() == 0 else found._replace(gradients={}, state={}, returned={}))
        except AutoparError as error:
            out.append(f"{type(error).__name__}: {error}")
        except Exception:
            out.append(traceback.format_exc())
    return out
