"""The least bytes and seconds of the parameter state of one call by ZeRO stage: every parameter sharded over all model axes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from operator import le

from autopar.cost_models.events.memory_terms import held_bytes
from autopar.cost_models.hardware.allocator import fragmentation
from autopar.cost_models.state.optimizers import optimizer_named
from autopar.cost_models.state.state_cost import StateCommunication
from autopar.cost_models.state.state_group import StateGroup, matrix_work, stored_elements
from autopar.ir.graph import Parameter
from autopar.ir.mesh import DATA_AXIS
from autopar.solve.problem.boundary import CallKind
from autopar.solve.problem.problem import Problem


@dataclass(frozen=True, slots=True)
class CallState(StateCommunication):
    """The state of one call under one ZeRO stage, on a pipeline stage: its communication, and the bytes that the allocator
    reserves."""

    bytes: float


def call_states(problem: Problem, name: str, micro_batches: int) -> dict[int, CallState]:
    """Return the state below every call of a block, by ZeRO stage. Parameters that other calls share, and those that arrive
    sharded, count for none."""
    every = [own_parameters(problem, kind) for kind in problem.boundary.kind_counts if kind.block == name]
    return {zero: least_of([_state(problem, name, own, zero, micro_batches) for own in every]) for zero in problem.zeros}


def least_of(states: Sequence[CallState]) -> CallState:
    """The least of each number."""
    return CallState(*(min((getattr(state, each.name) for state in states), default=0.0) for each in fields(CallState)))


def undominated(states: Iterable[CallState]) -> tuple[CallState, ...]:
    """Drop each state than which another one is nowhere larger."""
    kept: list[tuple[float, ...]] = []
    for numbers in sorted(set(map(astuple, states))):
        # one that is nowhere larger comes before it in this order
        if not any(all(map(le, other, numbers)) for other in kept):
            kept.append(numbers)
    return tuple(CallState(*numbers) for numbers in kept)


def own_parameters(problem: Problem, kind: CallKind) -> list[Parameter]:
    """Return the parameters that a kind of call owns alone, without buffers and those that arrive sharded."""
    table = problem.blocks[kind.block]
    return [
        parameter
        for parameter, alone in zip(table.block.parameters, kind.own, strict=True)
        if alone and not parameter.buffer and parameter not in table.costs.expert_degrees
    ]


def sharded_state(
    problem: Problem, block: str, parameters: Sequence[Parameter], zero: int, micro_batches: int
) -> tuple[StateCommunication, float]:
    """Return the communication of parameters that are sharded over all model axes, under a ZeRO stage, and the bytes that the
    allocator reserves for them when the last forward ends."""
    costs = problem.blocks[block].costs
    cut = problem.mesh.size // problem.mesh.size_of(DATA_AXIS)
    sizes = [stored_elements(each, problem.precision) for each in parameters]
    trained = sum(size for each, size in zip(parameters, sizes, strict=True) if each.trainable) / cut
    share, matrices = matrix_work(parameters)
    group = StateGroup(sum(sizes) / cut, trained, len(parameters), matrix_share=share, matrices=matrices)
    cost = costs.group_state_cost(group, zero, problem.precision, optimizer_named(problem.optimizer))
    sent = costs.state_communication(cost, zero, problem.precision, micro_batches)
    held, memory = 1 + fragmentation(problem.cluster.device), cost.memory
    return sent, memory.parameters + memory.optimizer + held * held_bytes(memory, micro_batches > 1)


def _state(problem: Problem, block: str, own: Sequence[Parameter], zero: int, micro_batches: int) -> CallState:
    sent, size = sharded_state(problem, block, own, zero, micro_batches)
    seconds = {each.name: getattr(sent, each.name) for each in fields(sent)}
    # weights that are gathered once arrive while a stage waits for its first micro-batch
    return CallState(**seconds | {"gather_first": 0.0}, bytes=size)
