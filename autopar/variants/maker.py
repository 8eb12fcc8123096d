"""Makes the program of a call that is of another kind than those before: captured and planned on rank 0, built on all. Its graph
is exported anew, or from the export of an earlier call that differs in its batch or lengths alone.

Inputs that a call gives as DTensors keep their placements on model axes, and so do the results of the same path.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.capture.bind import TARGET, batch_of, bind_inputs
from autopar.capture.export import Export
from autopar.capture.modes import CapturedModes
from autopar.capture.options import CaptureOptions
from autopar.capture.state.reads import recorded_reads
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.tensors.sizes import value_bytes
from autopar.errors import CaptureError
from autopar.ir.dims import Shape
from autopar.ir.graph import Graph
from autopar.ir.mesh import CONTEXT_AXIS, DATA_AXIS
from autopar.ir.placement import Placement, parse_placement
from autopar.ir.plan import Candidate
from autopar.ir.plan_file.plan_file import Plan
from autopar.program.build import build_program, check_proof
from autopar.rules.registry import Registry
from autopar.runtime.call_keys import KeyedCall
from autopar.runtime.comm.agreement import on_first_rank
from autopar.runtime.device.axis import shares_of
from autopar.runtime.plain.frozen_reads import Change, FrozenReads, Reads
from autopar.runtime.plain.plain_model import preserved_modes
from autopar.runtime.progress import working
from autopar.runtime.step.arguments import argument_parts, flatten_arguments, map_arguments
from autopar.runtime.step.inputs import model_placements, path_word
from autopar.runtime.step.layouts import empty_of, layout_of
from autopar.runtime.step.outputs import EVERYTHING
from autopar.runtime.step.results import Missing
from autopar.runtime.variants import LOGGER, VariantParts
from autopar.variants.planner import plan_variant

MOST_BYTES = 2**30
"""The largest field that a call without gradients returns unasked; a larger one (logits of a large vocabulary) is left out."""


@dataclass(eq=False)
class VariantMaker:
    """Makes the programs of calls. `frozen`: what the first program read of a copy of the model on the meta device, in the modes
    in which the plan's graph was captured; `options` are those of `capture`, `loss_fn` included. `proof`: each must be proven
    (else rank 0 warns of one that is not)."""

    frozen: FrozenReads
    plan: Plan
    cluster: Cluster
    registry: Registry
    options: Mapping[str, Any]
    modes: CapturedModes
    proof: bool = False
    answers: dict[bool, bool] = field(default_factory=dict)
    exports: Exports = field(init=False)

    def __post_init__(self) -> None:
        self.exports = Exports({value.name: value.shape for value in self.plan.graph.inputs})

    def make(self, call: KeyedCall, model: nn.Module) -> VariantParts:
        """The program of a call of `model`, a copy on the meta device, with its attributes of now. All ranks must call.
        AutoparError where it cannot be captured or planned."""
        with working(f"making a program for a call with {call.words()}"):
            graph, candidate, reads, lacks = on_first_rank(lambda: self._planned(call, model))
        ranks = candidate.mesh.size_of(DATA_AXIS)
        uneven = candidate.batch % ranks != 0
        module: Any = build_program(graph, candidate, uneven=uneven)
        check_proof(self.plan, (graph, candidate), uneven, required=self.proof)
        context = candidate.mesh.size_of(CONTEXT_AXIS)
        shared = context > 1 or ranks == self.plan.candidate.mesh.size_of(DATA_AXIS)
        form = graph.interface.returns if graph.interface else None
        fixed = 0 if graph.batch_is_symbolic else graph.batch
        return VariantParts(module.Program, form, fixed, not shared, uneven, reads, context, lacks)

    def _planned(self, call: KeyedCall, model: nn.Module) -> tuple[Graph, Candidate, Reads, Missing]:
        with recorded_reads() as record, in_modes(model, call.key.modes), unfrozen(model, call.key.unfrozen):
            graph, lacks = self._captured(call, model)
        found = plan_variant(graph, self.plan, self.cluster, self.registry, placed_values(graph, call))
        LOGGER.info("another program for a call with %s%s", call.words(), self._division(found[1]))
        return *found, record.reads, lacks

    def _division(self, candidate: Candidate) -> str:
        """Return the words for how data ranks share a batch that does not divide."""
        ranks, most = candidate.mesh.size_of(DATA_AXIS), self.plan.candidate.mesh.size_of(DATA_AXIS)
        if (context := candidate.mesh.size_of(CONTEXT_AXIS)) > 1:
            return f", sequences over {context} data ranks"
        if ranks != most:
            return f", whole on each of {most} data ranks"
        shares = shares_of(candidate.batch, ranks)
        return f", {candidate.batch} examples as {' + '.join(map(str, shares))} over {DATA_AXIS}" if len(set(shares)) > 1 else ""

    def _captured(self, call: KeyedCall, model: nn.Module) -> tuple[Graph, Missing]:
        """The graph of a call, and what it lacks of all fields where these are asked for."""
        own = call.batch // call.times

        interface = self.plan.graph.interface
        dims = {each.path: each.batch_dim for each in interface.arguments} if interface is not None else {}

        seen: dict[int, torch.Tensor] = {}  # one tensor for one that is passed twice

        def on_meta(keys: tuple[Any, ...], given: Any) -> Any:
            x = seen.get(id(given), given)
            if x is not given:
                return x
            if not isinstance(x, torch.Tensor):
                if not (hasattr(x, "__array__") and x.shape):  # no array; numpy's numbers are constants
                    return x
                x = torch.as_tensor(x)
            shape, dim = list(x.shape), dims.get(".".join(map(path_word, keys)), 0)
            if x.dim() > dim and shape[dim] == own:
                shape[dim] = call.batch
            empty = empty_of(shape, layout_of(x), dtype=x.dtype, device="meta")
            return seen.setdefault(id(given), empty.requires_grad_(x.requires_grad and torch.is_grad_enabled()))

        arguments = map_arguments(on_meta, dict(call.arguments))
        options = dict(self.options)
        options["where_returned"], options["outputs"] = options["outputs"], call.key.outputs
        if TARGET not in arguments:
            options["loss_fn"] = None
        options["autocast"] = call.key.autocast
        outside = self.plan.candidate.pipeline.stages > 1 and not call.key.gradients
        chosen = CaptureOptions(**options, usual_kind="full" if outside else "")
        graph = self.exports.graph(model, call.key.modes, arguments, chosen, call.key.changed)
        lacks = tuple(_lacking(graph, self.plan.graph)) if EVERYTHING in call.key.outputs else ()
        if not lacks:
            return graph, ()
        kept = (output.asked for output in graph.outputs if output.path not in dict(lacks))
        chosen = replace(chosen, outputs=tuple(kept))
        return self.exports.graph(model, call.key.modes, arguments, chosen, call.key.changed), lacks

    def right_in(self, training: bool) -> bool:
        """Return whether the first program, switched to this mode, is the model, switched to this mode: in evaluation it leaves
        dropout out, and nothing else of it depends on the mode. All ranks must call."""
        if training not in self.answers:
            self.answers[training], reads = on_first_rank(lambda: self._compared(training))
            self.frozen.add(reads)
        return self.answers[training]

    def _compared(self, training: bool) -> tuple[bool, Reads]:
        with recorded_reads() as record:
            return self.modes.right_in(training), record.reads


def _lacking(graph: Graph, first: Graph) -> Iterator[tuple[str, str]]:
    """Yield the outputs that a call without gradients leaves out, each with the reason: those that no rank can hold as a whole,
    or that need weights which the program of the `first` graph has not."""
    foreign = _computed_with(graph, graph.parameters().keys() - first.parameters().keys())
    for output in graph.outputs:
        value = graph.value(output.value)
        if output.value in foreign:
            yield output.path, f"it is computed with {foreign[output.value]}, which the first program does not read"
        elif value is not None and value_bytes(value, graph.batch) > MOST_BYTES:
            yield output.path, f"it has more than {MOST_BYTES >> 30} GiB"


def _computed_with(graph: Graph, parameters: Collection[str]) -> dict[str, str]:
    """Return the values of a graph that one of these parameters has a part in, each with the parameter."""
    found: dict[str, str] = {}
    for call in graph.calls if parameters else ():
        block = graph.block(call.block)
        inside = {value.name: found[name] for value, name in zip(block.inputs, call.inputs, strict=True) if name in found}
        own = zip(block.parameters, call.parameters, strict=True)
        inside |= {parameter.value.name: path for parameter, path in own if path in parameters}
        for node in block.nodes:
            if read := [inside[name] for name in node.operands() if name in inside]:
                inside |= {value.name: read[0] for value in node.outputs}
        found |= {name: inside[own] for own, name in zip(block.outputs, call.outputs, strict=True) if own in inside}
    return found


@contextmanager
def unfrozen(model: nn.Module, names: Collection[str]) -> Iterator[None]:
    """The model with these parameters taking gradients, and as it was afterwards."""
    own = dict(model.named_parameters(remove_duplicate=False))
    frozen = [own[name] for name in names if not own[name].requires_grad]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


@contextmanager
def in_modes(model: nn.Module, modes: tuple[bool, ...]) -> Iterator[None]:
    """Put each module of the model into its mode, and afterwards back."""
    with preserved_modes(model):
        for module, mode in zip(model.modules(), modes, strict=True):
            module.training = mode
        yield


def placed_values(graph: Graph, call: KeyedCall) -> dict[str, Mapping[str, Placement]]:
    """Return the placements by name in the graph, by model axis, of the DTensors of a call. A result that has the path of such
    an argument (``past_key_values.keys.0``) is what the next call is given, and is placed like it."""
    leaves, _ = flatten_arguments(call.arguments)
    given = {".".join(map(path_word, keys)): _placements(leaf) for keys, leaf in leaves if isinstance(leaf, DTensor)}
    arguments = graph.interface.arguments if given and graph.interface is not None else ()
    out: dict[str, Mapping[str, Placement]] = {each.input: given[each.path] for each in arguments if each.path in given}
    return out | {output.value: given[output.path] for output in (graph.outputs if given else ()) if output.path in given}


def _placements(tensor: DTensor) -> dict[str, Placement]:
    return {axis: parse_placement(text) for axis, text in model_placements(tensor).items()}


MOST_EXPORTS = 16
"""Exports with a symbolic batch or lengths that are kept; the least recently used one goes first."""

Structure = tuple[Hashable, ...]


class Exports:
    """The exports of calls. `shapes` are those of the inputs of the first program, by name."""

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        self.sizes: dict[tuple[str, int], set[int | str]] = {
            (name, dim): {size} for name, shape in shapes.items() for dim, size in enumerate(shape)
        }
        self.exports: OrderedDict[tuple[Structure, int], Export] = OrderedDict()
        self.closed: set[Structure] = set()
        self.count = 0

    def graph(
        self,
        model: nn.Module,
        modes: tuple[bool, ...],
        arguments: Mapping[str, Any],
        options: CaptureOptions,
        changed: tuple[Change, ...] = (),
    ) -> Graph:
        """The graph of a call of the model, which is in these modes, with these attributes `changed`. A size that differed
        between calls stays a symbol."""
        bound = bind_inputs(model, (), arguments, loss_fn=options.loss_fn, batch_dim=options.batch_dim)
        layouts = [layout_of(x) if bound.keeps_layout else () for x in bound.tensors.values()]
        kinds = tuple((name, x.dtype, x.dim(), x.requires_grad) for name, x in bound.tensors.items())
        containers = tuple(argument_parts(name, value)[1] for name, value in arguments.items())
        trained = tuple(parameter.requires_grad for parameter in model.parameters())
        if not all(isinstance(leaf, Hashable) for leaf in bound.leaves):  # a constant that cannot be compared
            return Export(model, (), arguments, options).graph
        structure = (id(model), modes, changed, trained, kinds, *layouts, containers, bound.interface, bound.leaves, options)
        for key, export in reversed(self.exports.items()):
            if key[0] == structure and (graph := export.graph_at(bound.tensors)) is not None:
                self.exports.move_to_end(key)
                return graph
        dims = self._open(bound.tensors)
        if dims and structure not in self.closed:
            with suppress(CaptureError):
                export = Export(model, (), arguments, options, dims)
                if export.lengths:
                    return self._keep(structure, export)
            self.closed.add(structure)
        return self._keep(structure, Export(model, (), arguments, options))

    def _keep(self, structure: Structure, export: Export) -> Graph:
        """Return the graph of an export, and keep the export where it may hold for other calls."""
        if not export.is_open:
            return export.graph
        self.count += 1
        self.exports[structure, self.count] = export
        while len(self.exports) > MOST_EXPORTS:
            self.exports.popitem(last=False)
        return export.graph

    def _open(self, tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
        """The dimensions of each input, beside the batch, that had several sizes by now."""
        found: dict[str, tuple[int, ...]] = {}
        batch = batch_of(tensors)
        for name, tensor in tensors.items():
            own = [(dim, int(size)) for dim, size in enumerate(tensor.shape) if dim or size != batch]
            for dim, size in own:
                self.sizes.setdefault((name, dim), set()).add(size)
            found[name] = tuple(dim for dim, _ in own if len(self.sizes[name, dim]) > 1)
        return {name: dims for name, dims in found.items() if dims}
