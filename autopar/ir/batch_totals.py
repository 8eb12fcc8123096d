"""Whether a batch can be split into micro-batches: they are one more axis that shards the batch, walked in time.

On it parameters are replicated and their gradients add up; only the loss may be a sum over the micro-batches. To such a sum each
micro-batch adds an equal share of a value that all of them have alike (a penalty of weights, the logarithm of a learned weight).
A value that the inputs determine and that is a sum (the number of valid tokens) is a *batch total*: it is computed for all
micro-batches first. Buffers (weights of classes) count as inputs, since no program with micro-batches writes them. Whatever else
needs the whole batch (batch norm, contrastive losses) forces one micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.errors import PlanError
from autopar.ir.dims import has_batch
from autopar.ir.graph import Block, Graph, Node, Value, ancestors, batch_input, draws_masks, lacks_batch
from autopar.ir.mesh import DATA_AXIS
from autopar.ir.pipeline.stage_values import BlockSlice, repeatable_values
from autopar.ir.placement import Invariant, Partial, Placement, Replicate, Shard
from autopar.ir.plan import BlockPlan, Candidate


@dataclass(frozen=True, slots=True)
class BatchTotal:
    """A value of a block, or an input of it, that is a reduction (`op`: sum, max, min) over the whole batch, and that the model's
    inputs and buffers determine."""

    block: str
    value: str
    op: str


@dataclass(frozen=True, slots=True)
class BatchAxisPlacements:
    """The placements of one block on the axis that shards the batch: those in which values are produced, those in which nodes
    read their operands (by the name of the node's first output), and those in which the block hands out its outputs."""

    produced: Mapping[str, Placement]
    operands: Mapping[str, tuple[Placement, ...]]
    outputs: tuple[Placement, ...]

    def uses(self, block: Block) -> Iterator[tuple[str, Placement, Node | None]]:
        """Every use of a value: its name, the placement there, and the node that reads it (None: the block's output)."""
        for node in block.nodes:
            yield from ((name, at, node) for name, at in zip(node.operands(), self.operands[node.name], strict=True))
        yield from ((name, at, None) for name, at in zip(block.outputs, self.outputs, strict=True))


FIXED_AT = "the batch is fixed, since it becomes a number at"
"""Begins the note of a graph whose batch is not symbolic; the line of the model follows."""

OPEN_BATCH = (
    "use x.shape[0] without int(), len() or a list, compute all examples at once in place of a loop, and pass tensors with one "
    "element per example (torch.linspace) as inputs"
)
"""The remedies for a batch that is fixed."""


def line_that_fixes(graph: Graph) -> str:
    """The line of the model that makes a number of the batch; empty where none is known."""
    return next((note.removeprefix(FIXED_AT).strip() for note in graph.notes if note.startswith(FIXED_AT)), "")


def why_fixed(graph: Graph) -> str:
    """Return why a graph whose batch is not symbolic is of this batch only, with the line of the model."""
    line = line_that_fixes(graph)
    at = f" (it becomes a number at {line}: {OPEN_BATCH})" if line else ""
    return f"{graph.name} was captured at a batch of {graph.batch} only{at}"


def why_one_graph(graph: Graph) -> str:
    """Return why the backward runs from outside of the program, which excludes micro-batches and pipelines: in a sentence; empty
    where the program has a loss, and gradients flow into parameters only."""
    for output in graph.outputs:
        if output.kind == "gradient":
            value, path = graph.value(output.value), output.path
            remedy = "loss_fn= puts the loss into it"
            if path and value is not None and not value.shape:
                remedy = f'if this is the loss, ask for outputs=("{path}:loss",)'
            name = f"the output {path}" if path else "the model's result"
            return f"gradients come into {name} from a loss outside of the program ({remedy})"
    for value in graph.inputs:
        if value.differentiable:
            return f"gradients flow into the input {value.name}"
    return ""


def countable_values(graph: Graph) -> Mapping[str, tuple[BlockSlice, ...]]:
    """Return the values between calls that may be computed before the micro-batches run, and the nodes of each call that compute
    them: inputs and buffers determine them."""
    return repeatable_values(graph, parameters=False)


def batch_totals(graph: Graph, along: Callable[[Block], BatchAxisPlacements]) -> tuple[BatchTotal, ...]:
    """Return what must be computed for the whole batch before its micro-batches run. PlanError, which names the operation, where
    micro-batches cannot give the loss and the gradients of the whole batch."""
    if not graph.batch_is_symbolic:
        raise PlanError(f"{why_fixed(graph)}: it takes one micro-batch")
    if reason := why_one_graph(graph):
        raise PlanError(f"{reason}: it takes one micro-batch")
    earlier = countable_values(graph)
    given = {value.name for value in graph.inputs} | earlier.keys()
    batched = {value.name for value in graph.inputs if value.shape and has_batch(value.shape[0])}
    out: list[BatchTotal] = []
    for block in graph.blocks:
        calls = [call for call in graph.calls if call.block == block.name]
        if not calls:
            continue
        at = along(block)
        inputs = {value.name: {call.inputs[index] for call in calls} for index, value in enumerate(block.inputs)}
        for name, graph_names in inputs.items():
            if graph_names & batched and not isinstance(at.produced[name], Shard):
                raise PlanError(f"{block.name} takes the whole of {min(graph_names & batched)} at once: it takes one micro-batch")
        ends = {call.outputs[index] for call in calls for index, name in enumerate(block.outputs)}
        known = {name for name, graph_names in inputs.items() if graph_names <= given}
        known |= {each.value.name for each in block.parameters if each.buffer}  # constants: what writes buffers is refused below
        out += _of_block(graph, block, at, known, graph.loss in ends)
    _check_not_nested(graph, out, earlier)
    return tuple(out)


def _of_block(graph: Graph, block: Block, at: BatchAxisPlacements, known: set[str], last: bool) -> list[BatchTotal]:
    values = block.values()
    call = next(call for call in graph.calls if call.block == block.name)
    if block.updates:
        written, value = block.updates[0]
        maker = next((node for node in block.nodes if any(each.name == value for each in node.outputs)), None)
        read = {operand for node in ancestors(block.nodes, {value}) for operand in node.operands()}
        if not any(has_batch(dim) for name in read for dim in values[name].shape):  # spectral norm: no statistics of the batch
            raise PlanError(
                f"{block.name} updates the buffer {written} once a forward, which would be once a micro-batch "
                f"({_place(maker) or 'the model'}; a training loop can count instead): it takes one micro-batch"
            )
        raise PlanError(
            f"{block.name} writes statistics of the whole batch into {written} ({_place(maker) or 'batch norm'}; nn.GroupNorm, "
            "or batch norm in eval mode, needs none): it takes one micro-batch"
        )
    found: dict[str, BatchTotal] = {}
    for name, need, node in at.uses(block):
        have = at.produced[name]
        is_loss = node is None and last and call.outputs[block.outputs.index(name)] == graph.loss
        if is_loss:
            if have != Partial():
                raise PlanError(f"{block.name}: the loss is no sum over the examples of the batch: it takes one micro-batch")
        elif have == need or _alike(have, need, values[name]):
            continue
        elif isinstance(have, Partial) and _equal(need) and _determined(block, name, known):
            found[name] = BatchTotal(block.name, name, have.op)
        else:
            maker = next((each for each in block.nodes if any(value.name == name for value in each.outputs)), None)
            raise PlanError(f"{block.name} needs {_named(name, maker, node)} of the whole batch: it takes one micro-batch")
    return list(found.values())


def _check_not_nested(graph: Graph, totals: Sequence[BatchTotal], earlier: Mapping[str, tuple[BlockSlice, ...]]) -> None:
    """Raise a PlanError where a total depends on another one, which would have to be reduced before it."""
    known = {(total.block, total.value) for total in totals}
    for total in totals:
        block = graph.block(total.block)
        nodes = ancestors(block.nodes, {total.value})
        read = {total.value, *(operand for node in nodes for operand in node.operands())}
        operands = {(block.name, operand) for node in nodes for operand in node.operands()}
        for call in (call for call in graph.calls if call.block == block.name):
            for outer in (outer for value, outer in zip(block.inputs, call.inputs, strict=True) if value.name in read):
                operands |= _operands(graph, earlier.get(outer, ()))
        if operands & known:
            maker = nodes[-1] if nodes else None
            raise PlanError(
                f"{block.name} needs {_named(total.value, maker)}, which depends on another total, of the whole batch: it takes "
                "one micro-batch"
            )


def _operands(graph: Graph, slices: Sequence[BlockSlice]) -> set[tuple[str, str]]:
    """Return what the nodes of slices read, each with its block."""
    out = set[tuple[str, str]]()
    for part in slices:
        block = graph.block(graph.calls[part.call].block)
        out |= {(block.name, operand) for node in block.nodes if node.name in part.nodes for operand in node.operands()}
    return out


def _named(name: str, maker: Node | None, reader: Node | None = None) -> str:
    """``aten.mean.dim (%mean, model.py:12, module head)``, with the operation that reads it."""
    if maker is None and reader is not None:
        return f"%{name} (read by {reader.op}, {_place(reader) or 'the model'})"
    read = f", which {reader.op} reads," if reader is not None else ""
    return f"{maker.op} (%{name}, {_place(maker) or 'the model'}){read}" if maker is not None else f"%{name}"


def _place(node: Node | None) -> str:
    if node is None:
        return ""
    return ", ".join(filter(None, (node.source, f"module {node.module}" if node.module else "")))


def _equal(placement: Placement) -> bool:
    return isinstance(placement, Replicate | Invariant)


def _alike(have: Placement, need: Placement, value: Value) -> bool:
    """Return whether all micro-batches have the value as it is read, or add shares of it (`ap.convert` with `micro_batches`)."""
    if have == Replicate() and need == Partial():
        return value.dtype.startswith(("float", "bfloat"))
    return not value.differentiable and _equal(have) and _equal(need)


def _determined(block: Block, name: str, known: set[str]) -> bool:
    """Return whether the inputs of the batch and constants alone determine the value (no parameters, no random numbers), and its
    number of examples."""
    nodes = ancestors(block.nodes, {name})
    made = {value.name for node in nodes for value in node.outputs}
    read = {name, *(operand for node in nodes for operand in node.operands())} - made
    if lacks_batch(nodes, [value for value in block.inputs if value.name in read]):
        read |= {value.name for value in batch_input(block.inputs)}  # as `extract_block` does
    return read <= known and not any(map(draws_masks, nodes))


def planned_placements(block: Block, plan: BlockPlan, axis: int) -> BatchAxisPlacements:
    """The placements of a planned block on the mesh axis of index `axis` (the data axis, also where its size is 1)."""
    produced = {value.name: at[axis] for value, at in zip(block.inputs, plan.inputs, strict=True)}
    produced |= {p.value.name: at[axis] for p, at in zip(block.parameters, plan.parameters, strict=True)}
    by_name = {node.node: node for node in plan.nodes}
    for node in block.nodes:
        produced |= {value.name: at[axis] for value, at in zip(node.outputs, by_name[node.name].results, strict=True)}
    operands = {name: tuple(at[axis] for at in node.operands) for name, node in by_name.items()}
    return BatchAxisPlacements(produced, operands, tuple(at[axis] for at in plan.outputs))


def candidate_totals(graph: Graph, candidate: Candidate) -> tuple[BatchTotal, ...]:
    """The batch totals of a candidate, see `batch_totals`."""
    axis = candidate.mesh.index(DATA_AXIS)
    return batch_totals(graph, lambda block: planned_placements(block, candidate.block(block.name), axis))
