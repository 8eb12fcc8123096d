"""Peak memory of every pipeline stage of a candidate, and at which operation it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from autopar.cost_models.hardware import Cluster
from autopar.cost_models.memory import call_kept
from autopar.cost_models.peak import CallMemory, Moment, Peak, peak_of
from autopar.cost_models.pipeline import held_apart
from autopar.cost_models.sizes import held_by_user
from autopar.cost_models.stage_groups import stage_parts
from autopar.cost_models.stages import Owned
from autopar.cost_models.state import StateMemory
from autopar.cost_models.trace import Run
from autopar.ir.chunks import chunks_of_ranks
from autopar.ir.graph import Graph
from autopar.ir.plan import Candidate


@dataclass(frozen=True, slots=True)
class StageMemory:
    """The table of one stage at its peak in bytes by kind, the moment (``backward`` of a call, ...) and the operation; and the
    memory of its devices."""

    table: dict[str, int]
    phase: str
    call: int
    prefix: str
    node: str
    source: str
    capacity_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        return sum(self.table.values())

    @property
    def tensor_bytes(self) -> int:
        """Without what no tensor shows: the allocator's slack, and the base."""
        return self.peak_bytes - self.table["slack"] - self.table["base"]

    @property
    def place(self) -> str:
        """``backward of model.layers.31, at cross_entropy_sum (modeling_llama.py:500)``."""
        if self.phase == "optimizer":
            return "optimizer step"
        phase = {"reduction": "end of the backward", "gather": "start of the backward"}.get(self.phase, self.phase)
        where = f"{phase} of {self.prefix}"
        at = f", at {self.node}" if self.node else ""
        return where + at + (f" ({self.source})" if self.source else "")


def stage_memories(
    graph: Graph, candidate: Candidate, cluster: Cluster, runs_of: Sequence[Mapping[str, Run]], owned: Sequence[Owned]
) -> tuple[StageMemory, ...]:
    """One per stage. A stage keeps the tensors of all its micro-batches in flight; `owned` are the chunks' states, `runs_of` the
    blocks on each stage."""
    kept = call_kept(graph, {name: run.memory for name, run in runs_of[0].items()})
    pipeline = candidate.pipeline
    devices = [part.device for part in stage_parts(cluster, pipeline.stages)]
    inputs = held_by_user(graph, candidate.batch, candidate.mesh)
    out = []
    for stage, places in enumerate(chunks_of_ranks(pipeline)):
        mine, runs, device = [owned[index] for index in places], runs_of[stage], devices[stage]
        own = [sum(kept[index] for index in each.calls) for each in mine]
        late = [sum(runs[graph.calls[index].block].late_bytes for index in each.calls) for each in mine]
        many = held_apart(pipeline, stage, candidate.micro_batches, own, late)
        numbers = [index for each in mine for index in each.calls]
        calls = []
        for each, count in zip(mine, many, strict=True):
            for index, state in zip(each.calls, each.states, strict=True):
                run, one = runs[graph.calls[index].block], kept[index]
                memory, every = run.memory, one * count.whole + run.late_bytes * count.late
                calls.append(CallMemory(every, memory.made, memory.working, memory.ending, state.memory, one))
        root = together([each.root.memory for each in mine])
        peak = peak_of(
            calls, root, device.base_bytes, device.kind != "cpu", candidate.micro_batches, inputs, device.allocator_slack
        )
        if pipeline.weight_versions > 1:
            peak = _two_versions(peak, calls, root, stage + 1 < pipeline.stages, device.kind != "cpu")
        out.append(replace(_named(graph, runs, peak, numbers), capacity_bytes=device.memory_bytes))
    return tuple(out)


def _two_versions(peak: Peak, calls: Sequence[CallMemory], root: StateMemory, behind: bool, foreach: bool) -> Peak:
    """Beside: gradients of the batch that has begun, and (`behind`: backwards of the batch before are left over) the weights that
    it was computed with. The optimizer steps while micro-batches are in flight."""
    states = [*(call.state for call in calls), root]
    table = dict(peak.table)
    table["parameters"] += sum(state.parameters for state in states) if behind else 0.0
    table["gradients"] += sum(state.gradients for state in states)
    update = dict(table, gathered=0.0, collectives=0.0, gradients=2 * sum(state.gradients for state in states))
    update["activations"] = sum(call.kept - (call.kept if call.latest is None else call.latest) for call in calls)
    update["temporaries"] = sum(state.updated for state in states) if foreach else 2 * max(state.largest for state in states)
    if sum(update.values()) <= sum(table.values()):
        return replace(peak, table=table)
    return Peak(Moment("optimizer", -1, update["gradients"], 0.0, update["activations"], update["temporaries"]), update)


def together(states: Sequence[StateMemory]) -> StateMemory:
    """Several groups as one."""
    first = states[0]
    sums = {
        field.name: sum(getattr(state, field.name) for state in states)
        for field in fields(StateMemory)
        if field.name not in ("gathered_is_transient", "in_place", "standing", "largest")
    }
    return replace(first, **sums, largest=max(state.largest for state in states))


def _named(graph: Graph, runs: Mapping[str, Run], peak: Peak, numbers: Sequence[int]) -> StageMemory:
    table = {kind: round(size) for kind, size in peak.table.items()}
    moment = peak.moment
    if moment.call < 0:
        return StageMemory(table, moment.phase, -1, "", "", "")
    index = numbers[moment.call]
    call = graph.calls[index]
    run = runs[call.block]
    node = run.memory.peak_nodes[moment.phase != "forward"] if moment.phase in ("forward", "backward") else ""
    source = run.costs.nodes[node].source if node else ""
    return StageMemory(table, moment.phase, index, call.prefix or call.block, node, source or "")
