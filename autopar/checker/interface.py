"""The interface of a program: how callers pass arguments, inputs, parameters, the loss, and outputs."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.checker.blocks.local_run import meta_tensor
from autopar.checker.captured import GraphCalls, Identity
from autopar.checker.reader import PlacedTensor
from autopar.checker.shards import MICRO, PARTIAL, Axes, Cut, Kind, Kinds, NotProven, alike, words
from autopar.checker.text import CallsText
from autopar.ir.dims import has_batch, shape_at
from autopar.ir.graph import Graph, Value
from autopar.ir.interface import BatchCondition
from autopar.ir.mesh import CONTEXT_AXIS, DATA_AXIS
from autopar.ir.plan import Candidate


@dataclass(frozen=True, slots=True)
class Passed:
    """A variable of the program: the tensor, and which value of the graph it is."""

    identity: Identity
    tensor: PlacedTensor


@dataclass(frozen=True, slots=True)
class ProgramInterface:
    """The program beside the graph."""

    program: CallsText
    graph: Graph
    candidate: Candidate
    axes: Axes
    calls: GraphCalls

    def check_mesh(self, mesh: Mapping[str, int], micro_batches: int) -> None:
        """The mesh and the batch are the plan's: they say of which cluster and batch the proof is."""
        planned = dict(zip(self.candidate.mesh.names, self.candidate.mesh.sizes, strict=True))
        if {k: v for k, v in mesh.items() if v > 1} != {k: v for k, v in planned.items() if v > 1}:
            raise NotProven(self.program.line, f"mesh_axes are {dict(mesh)}, the plan is for {planned}")
        if micro_batches != self.candidate.micro_batches:
            raise NotProven(self.program.line, f"micro_batches is {micro_batches}, in the plan {self.candidate.micro_batches}")

    def check_flags(self) -> None:
        """Check what the runtime reads beside the forward: whether the program trains, and how callers pass their arguments."""
        flags, line, interface = self.program.flags, self.program.line, self.graph.interface
        flowing = tuple(value.name for value in self.graph.inputs if value.differentiable)
        wanted: dict[str, tuple[Any, Any]] = {
            "forward_only": (self.graph.forward_only, False),
            "differentiable_inputs": (flowing, ()),
            "weight_versions": (self.candidate.pipeline.weight_versions, 1),
            "has_loss": (interface is None or interface.has_loss, True),
        }
        if interface is not None:
            inputs = {each.path: each.input for each in interface.arguments if each.input and each.path != each.input}
            others = [each for each in interface.arguments if not each.input]
            wanted |= {
                "positional": (tuple(interface.positional), ()),
                "arguments": (inputs, {}),
                "constants": ({each.path: each.constant for each in others if not each.optional}, {}),
                "defaults": ({each.path: each.constant for each in others if each.optional}, {}),
                "batch_dims": (dict(interface.batch_dims), {}),
            }
            self._check_branches(interface.batch_conditions)
        for name, (value, default) in wanted.items():
            if flags.get(name, default) != value:
                raise NotProven(line, f"{name} is {str(flags.get(name, default))[:60]}, and {str(value)[:60]} for the model")

    def _check_branches(self, conditions: Sequence[BatchCondition]) -> None:
        """The batches for which callers are told that the program is the model: those of its branches."""
        method = self.program.methods.get("takes_batch")
        said = "" if method is None else "\n".join(map(ast.unparse, method.body))
        sizes = (f"({each.size}) {each.sign} 0".replace("B", "B_all") for each in conditions)
        wanted = ast.unparse(ast.parse(f"return {' and '.join(sizes)}")) if conditions else ""
        if said != wanted or (method is not None and ast.unparse(method.args) != "B_all"):
            raise NotProven(self.program.line, f"takes_batch is {said[:60]!r}, and {wanted[:60]!r} for the model")

    def input(self, value: Value) -> Passed:
        flags, line = self.program.flags, self.program.line
        shape = shape_at(value.shape, self.candidate.batch)
        places = dict(flags.get("input_placements", {}).get(value.name, {}))
        batched = next((dim for dim, size in enumerate(value.shape) if has_batch(size)), None)
        if batched is not None:
            places[MICRO] = f"S({batched})"
        flowing = value.name in flags.get("differentiable_inputs", ())
        try:
            kinds = self.axes.placed(shape, places, dict.fromkeys(self.axes.names, "R"))  # the runtime adds up what flows back
        except ValueError as error:
            raise NotProven(line, f"input {value.name}: {error}") from None
        dtype = flags.get("input_dtypes", {}).get(value.name, value.dtype)
        if dtype != value.dtype:
            raise NotProven(line, f"input {value.name} is {dtype}, and {value.dtype} in the model")
        return Passed(self.calls.value(value.name), self.tensor(value.name, shape, kinds, dtype, flowing, line))

    def tensor(self, name: str, shape: Sequence[int], kinds: Kinds, dtype: str, gradient: bool, line: int) -> PlacedTensor:
        local = self.axes.local_shape(tuple(shape), kinds)
        if local is None:
            raise NotProven(line, f"{name} of {list(shape)} cannot be {words(self.axes, kinds)}")
        return PlacedTensor(name, tuple(shape), kinds, meta_tensor(local, dtype, gradient))

    def stored_kinds(self, shape: Sequence[int], places: Mapping[str, str], line: int) -> Kinds:
        """A parameter is invariant on model axes. Over data ranks, whether they share examples or sequences, and micro-batches
        the runtime adds its gradients up: there it is replicated."""
        summed = {DATA_AXIS, CONTEXT_AXIS, MICRO}
        otherwise: dict[str, Kind] = {name: "R" if name in summed else "I" for name in self.axes.names}
        if set(places) & summed:
            raise NotProven(line, "parameters are sharded over data ranks by the runtime, and not by their placement")
        try:
            return self.axes.placed(tuple(shape), places, otherwise)
        except ValueError as error:
            raise NotProven(line, str(error)) from None

    def check_results(self, results: Sequence[tuple[Passed, bool]], line: int) -> None:
        """The loss is the model's, equal on all ranks, each of which starts the backward with the whole of its gradient; over
        micro-batches it adds up. `results`: what is returned, and whether it is detached."""
        (loss, detached), *others = results
        if loss.identity != self.calls.value(self.graph.loss):
            raise NotProven(line, f"the loss is {loss.identity[1]}, the model's is {self.graph.loss}")
        wanted = tuple(PARTIAL if name == MICRO else "R" if self.graph.forward_only else "I" for name in self.axes.names)
        flows = loss.tensor.local.requires_grad
        if detached or flows == self.graph.forward_only:
            raise NotProven(line, "no gradient flows into the loss" if not flows else "a model that is frozen has a backward")
        if loss.tensor.kinds != wanted and (flows or not alike(loss.tensor.kinds, wanted)):
            raise NotProven(
                line, f"the loss is {words(self.axes, loss.tensor.kinds)} where it must be {words(self.axes, wanted)}"
            )
        placed = self.program.flags.get("outputs", {})
        kinds = self.program.flags.get("output_kinds", {})
        if len(others) != len(self.graph.outputs) or list(placed) != [each.path for each in self.graph.outputs]:
            raise NotProven(line, "it does not return the outputs of the model that were asked for")
        for (found, cut_off), output in zip(others, self.graph.outputs, strict=True):
            gradient = kinds.get(output.path, output.kind) == "gradient"
            if found.identity != self.calls.value(output.value) or gradient == cut_off:
                raise NotProven(line, f"the output {output.path} is {found.identity[1]}, the model's is {output.value}")
            self._output(found, placed[output.path], output.path, gradient, line)

    def _output(self, found: Passed, places: Mapping[str, str], path: str, gradient: bool, line: int) -> None:
        own = {name: kind for name, kind in zip(self.axes.names, found.tensor.kinds, strict=True) if name != MICRO}
        axes = Axes(tuple(own), tuple(size for name, size in zip(self.axes.names, self.axes.sizes, strict=True) if name != MICRO))
        try:
            said = axes.placed(found.tensor.shape, places, dict.fromkeys(axes.names, "R"))
        except ValueError as error:
            raise NotProven(line, f"the output {path}: {error}") from None
        for name, kind, other in zip(axes.names, own.values(), said, strict=True):
            ends = isinstance(kind, Cut) and isinstance(other, Cut) and MICRO in self.axes.names and kind.dim == other.dim
            same = kind == other or (not gradient and alike((kind,), (other,)))
            if not same and not ends:
                raise NotProven(line, f"the output {path} is {kind} on {name}, and put together as {other}")
