"""Peak memory of every pipeline stage of a candidate, and at which operation it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from autopar.cost_models.hardware import Cluster
from autopar.cost_models.memory import call_kept
from autopar.cost_models.peak import CallMemory, Peak, peak_of
from autopar.cost_models.pipeline import chunks_of, held
from autopar.cost_models.sizes import value_bytes
from autopar.cost_models.stages import Owned
from autopar.cost_models.state import StateMemory
from autopar.cost_models.trace import Run
from autopar.ir.graph import Graph
from autopar.ir.plan import Candidate


@dataclass(frozen=True, slots=True)
class StageMemory:
    """The table of one stage at its peak in bytes by kind, the moment (``backward`` of a call, ...) and the operation."""

    table: dict[str, int]
    phase: str
    call: int
    prefix: str
    node: str
    source: str

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
    graph: Graph, candidate: Candidate, cluster: Cluster, runs: Mapping[str, Run], owned: Sequence[Owned]
) -> tuple[StageMemory, ...]:
    """One per stage. A stage keeps the tensors of all its micro-batches in flight; `owned` are the chunks' states."""
    kept = call_kept(graph, {name: run.memory for name, run in runs.items()})
    device, pipeline = cluster.device, candidate.pipeline
    inputs = float(sum(value_bytes(value, candidate.batch) for value in graph.inputs))
    out = []
    for stage in range(pipeline.stages):
        mine = [owned[index] for index in chunks_of(pipeline, stage)]
        own = [sum(kept[index] for index in each.calls) for each in mine]
        many = held(pipeline, stage, candidate.micro_batches, own)
        numbers = [index for each in mine for index in each.calls]
        calls = []
        for each, count in zip(mine, many, strict=True):
            for index, state in zip(each.calls, each.states, strict=True):
                memory, one = runs[graph.calls[index].block].memory, kept[index]
                calls.append(CallMemory(one * count, memory.made, memory.working, memory.ending, state.memory, one))
        root = together([each.root.memory for each in mine])
        peak = peak_of(
            calls, root, device.base_bytes, device.kind != "cpu", candidate.micro_batches, inputs, device.allocator_slack
        )
        out.append(_named(graph, runs, peak, numbers))
    return tuple(out)


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
