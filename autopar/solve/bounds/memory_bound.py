"""A lower bound with memory: what is saved, recomputed and offloaded, and how state is sharded, without placements.

Every tensor is taken at its smallest placement, every recomputed operation at its fastest strategy, recomputed conversions are
free, and memory is looked at once, when the last forward has ended: all calls have saved what their backward needs, and the state
is there. So the linear program is below every plan of the point; it has some hundred variables, whatever the mesh.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.cost_models.events.state_transfers import step_transfers, transfer_seconds
from autopar.cost_models.hardware.allocator import communicator_count, fragmentation, tensor_budget_bytes
from autopar.solve.bounds.block_relaxation import BlockRelaxation, add_block
from autopar.solve.bounds.call_state import own_parameters, sharded_state
from autopar.solve.ilp.linear_model import INFINITY, LinearModel, Status, total
from autopar.solve.ilp.solver import solve
from autopar.solve.problem.boundary import CallKind
from autopar.solve.problem.problem import Problem


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """The bubble that all pipelines of some stages have in common: before a stage begins, it waits for others, `wait_seconds` on
    average over the stages. Stages of the grid do not offload."""

    stages: int = 1
    wait_seconds: float = 0.0


NO_PIPELINE = PipelineShape()


def memory_bound(
    problem: Problem,
    blocks: Sequence[BlockRelaxation],
    micro_batches: int,
    flow_seconds: float,
    shape: PipelineShape = NO_PIPELINE,
) -> float:
    """Seconds below every plan of `problem`'s mesh and state group in `micro_batches` (a multiple of the tables'); infinite where
    nothing fits. `flow_seconds`: the bound of `FlowRelaxation`.

    Of a pipeline, below every partition of it and every schedule: the bottleneck stage takes at least as long as the stages do on
    average, all stages together have so many times the memory, and one micro-batch is in flight at least. `flow_seconds` are
    of one pipeline stage then.

    ``minimise t + optimizer``, where ``t >= wait + flow + recomputation + beside compute`` (what overlaps compute slows it by the
    contention, and what is exposed adds all of itself: `events.state_transfers`) and ``t >= state communication``.
    In a pipeline any call may be at the end of a chunk, so all of it counts as overlapped; the weights that are gathered once
    arrive while a stage waits, and the last reductions of a chunk run beside the backward of another one, which slows nothing
    (`stage_times`).
    """
    device, stages = problem.cluster.device, shape.stages
    budget_bytes = tensor_budget_bytes(device, communicator_count(problem.mesh, problem.zero_group, stages)) * stages
    if budget_bytes <= 0:
        return INFINITY
    flow_seconds *= stages
    relaxation = _MemoryRelaxation(problem, micro_batches, budget_bytes, max(flow_seconds, 1e-9), pipelined=stages > 1)
    relaxation.add_states()
    for each in blocks:
        relaxation.add_block(each)
    relaxation.add_seconds(flow_seconds, shape)
    # state + (1 + fragmentation) * sum S * bytes <= budget
    relaxation.model.row(relaxation.memory, -INFINITY, 1.0)
    outcome = solve(relaxation.model, relaxed=True)
    if outcome.status is Status.INFEASIBLE:
        return INFINITY
    seconds = max(flow_seconds, outcome.objective * relaxation.unit) if outcome.status is Status.OPTIMAL else flow_seconds
    return seconds / stages


class _MemoryRelaxation:
    """The linear program. Seconds are in `unit`, bytes in `budget_bytes`; `t` is the column of the step without the optimizer,
    `end` of the optimizer."""

    def __init__(self, problem: Problem, micro_batches: int, budget_bytes: float, unit: float, pipelined: bool) -> None:
        self.offloads, self.pipelined = not pipelined, pipelined
        self.problem, self.micro_batches, self.budget_bytes, self.unit = problem, micro_batches, budget_bytes, unit
        self.held = 1 + fragmentation(problem.cluster.device)
        self.model = LinearModel()
        self.t = self.model.variable()
        self.end = self.model.variable()
        self.model.minimise({self.t: 1.0, self.end: 1.0})
        self.recompute: dict[int, float] = {}
        self.optimizer: dict[int, float] = {}
        self.offload: dict[str, dict[int, float]] = {}
        self.communication: dict[int, float] = {}
        self.beside_compute: dict[int, float] = {}
        self.memory: dict[int, float] = {}

    def add_states(self) -> None:
        """Add the state: every parameter sharded over all model axes, and the state of each kind of call over the data axis as is
        best."""
        kinds = self.problem.boundary.call_kinds
        for kind in self.problem.boundary.kind_counts:
            ends = Counter((index == 0, index == len(kinds) - 1) for index, each in enumerate(kinds) if each == kind)
            self._add_state(kind, ends)
        # t >= state communication
        self.model.at_least(self.t, self.communication)

    def _add_state(self, kind: CallKind, ends: Mapping[tuple[bool, bool], int]) -> None:
        """Add the state of the calls of a kind. `ends`: how many of them are (not) the first and the last of all."""
        problem, model, own = self.problem, self.model, own_parameters(self.problem, kind)
        count, chosen = sum(ends.values()), {zero: model.variable(1.0) for zero in problem.zeros}
        # sum_zero z = 1
        model.row([(z, 1.0) for z in chosen.values()], 1.0, 1.0)
        passes = list(step_transfers(problem.cluster.overlap, self.pipelined).counted(self.micro_batches))
        for zero, z in chosen.items():
            communication, state_bytes = sharded_state(problem, kind.block, own, zero, self.micro_batches)
            if self.pipelined:
                hidden = communication.reduce_last + (0.0 if communication.gather_each else communication.gather_first)
                sent = overlapped = count * max(0.0, transfer_seconds(passes, communication).sent - hidden)
            else:
                moved = [(number, transfer_seconds(passes, communication, *end)) for end, number in ends.items()]
                sent = sum(number * each.sent for number, each in moved)
                overlapped = sum(number * each.overlapped for number, each in moved)
            self.communication[z] = sent / self.unit
            self.beside_compute[z] = (self.problem.cluster.overlap.contention * overlapped + sent - overlapped) / self.unit
            self.optimizer[z] = count * communication.optimizer_seconds / self.unit
            self.memory[z] = count * state_bytes / self.budget_bytes

    def add_block(self, block: BlockRelaxation) -> None:
        """Add S, O, A and r of one block. The tables' micro-batches are `repeats` in a step; memory is that of the smaller ones,
        of which one is in flight."""
        saved, offloaded, r = add_block(self.model, block, self.offloads)
        repeats, copied = self.problem.micro_batches, self.offload.setdefault(block.name, {})
        byte = self.held * repeats / self.micro_batches / self.budget_bytes
        for name, tensor in block.tensors.items():
            self.memory[saved[name]] = tensor.copies * tensor.bytes * byte
            if name in offloaded and block.offload_seconds_per_byte is not None:
                copied[offloaded[name]] = block.calls * repeats * tensor.bytes * block.offload_seconds_per_byte / self.unit
        for name, (seconds, _) in block.recompute.items():
            self.recompute[r[name]] = block.calls * repeats * seconds / self.unit

    def add_seconds(self, flow_seconds: float, shape: PipelineShape) -> None:
        """Add the seconds of the calls, with what a stage waits for others, and of the optimizer."""
        model = self.model
        model.at_least(self.end, self.optimizer)
        for copied in self.offload.values():
            # t >= copies of a block's tensors to the host and back
            model.at_least(self.t, copied)
        # t >= wait + flow + sum r * seconds + beside compute
        constant = (flow_seconds + shape.stages * shape.wait_seconds) / self.unit
        model.at_least(self.t, total((1.0, self.recompute), (1.0, self.beside_compute)), constant)
