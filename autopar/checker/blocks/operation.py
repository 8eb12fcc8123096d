"""The proof of one line: an operation that the captured block has on the same operands, on the shards that it needs.

The row of `table`, or the lemma of a function of the runtime, gives the kinds of the results; torch on the meta device gives what
one rank makes, which must be that part of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from autopar.checker.blocks.block_result import BlockResult
from autopar.checker.blocks.local_arguments import LocalArguments
from autopar.checker.blocks.local_run import run
from autopar.checker.captured import CapturedBlock, CapturedOperation, canonical
from autopar.checker.reader import Applied, AxisName, PlacedTensor
from autopar.checker.rows import table
from autopar.checker.rows.carry import NotCarried, carry
from autopar.checker.rows.lemmas import LEMMAS, Lemma, Unfit
from autopar.checker.rows.operation_call import tensors_of
from autopar.checker.shards import MICRO, Axes, Cut, Kinds, NotProven, Shape, equal_kind, words
from autopar.ir.dims import has_batch
from autopar.ir.placement import Placements


@dataclass(frozen=True, slots=True)
class OperationProof:
    """Finds the lines of one block in the captured one. `mesh_axes`: those of the mesh, which micro-batches are not."""

    captured: CapturedBlock
    axes: Axes
    mesh_axes: frozenset[str]
    result: BlockResult

    def prove(self, applied: Applied) -> tuple[PlacedTensor, ...]:
        tensors = tuple(tensors_of((*applied.args, applied.kwargs), PlacedTensor))
        lemma = LEMMAS.get(applied.op)
        reasons: list[str] = []
        for candidate in self._candidates(applied, lemma, tensors):
            for given in self._alternatives(applied, tensors):
                try:
                    return self._as(given, candidate, lemma)
                except (NotCarried, Unfit, ValueError, TypeError, IndexError, KeyError, RuntimeError) as error:
                    reasons.append(str(error).splitlines()[0][:200])
        same = self._stays(applied, tensors)
        if same is not None:
            return (same,)
        if reasons:
            raise NotProven(applied.line, reasons[0])
        read = ", ".join(tensor.value for tensor in tensors) or "nothing"
        raise NotProven(applied.line, f"the model does not apply {applied.op} to {read}")

    def _candidates(self, applied: Applied, lemma: Lemma | None, tensors: Sequence[PlacedTensor]) -> list[CapturedOperation]:
        """The operations of the captured block of this name on these values."""
        args, kwargs = lemma.whole(applied.args, applied.kwargs) if lemma is not None else (applied.args, applied.kwargs)
        names = tuple(tensor.value for tensor in tensors_of((*args, kwargs), PlacedTensor))
        found = self.captured.by_operands.get(names, [])
        if not found and len(names) == 2:  # rsub, and kwargs in another order
            found = self.captured.by_operands.get(names[::-1], [])
        return [each for each in found if self._same_name(applied.op, each, lemma)]

    @staticmethod
    def _alternatives(applied: Applied, tensors: Sequence[PlacedTensor]) -> Iterator[Applied]:
        """The line with each of the kinds that its operands are."""
        flexible = list({id(each): each for each in tensors if each.others}.values())
        for chosen in product(*((each.kinds, *each.others) for each in flexible)):
            kinds = {id(each): replace(each, kinds=kind, others=()) for each, kind in zip(flexible, chosen, strict=True)}

            def chosen_kind(value: Any, kinds: Mapping[int, PlacedTensor] = kinds) -> Any:
                if isinstance(value, tuple):
                    return tuple(map(chosen_kind, value))
                return kinds.get(id(value), value)

            yield replace(applied, args=chosen_kind(applied.args), kwargs={k: chosen_kind(v) for k, v in applied.kwargs.items()})

    @staticmethod
    def _same_name(op: str, operation: CapturedOperation, lemma: Lemma | None) -> bool:
        wanted = canonical(operation.node.op)
        if lemma is not None:
            return wanted in table.SAME.get(lemma.of, (lemma.of,))
        return canonical(op) == wanted or (canonical(op), wanted) in table.SPELLINGS

    def _stays(self, applied: Applied, tensors: Sequence[PlacedTensor]) -> PlacedTensor | None:
        """A copy, or a cast of a parameter from the dtype of its storage: the value stays."""
        if len(tensors) != 1:
            return None
        (tensor,) = tensors
        wanted = getattr(torch, self.captured.values[tensor.value].dtype) if tensor.value in self.captured.values else None
        if applied.op == "aten.clone" and len(applied.args) == 1 and not applied.kwargs:
            return tensor
        if applied.op == "aten.to" and tensor.stored and len(applied.args) == 2:
            (local,) = run(applied) or (tensor.local,)
            if local.dtype == wanted:
                self.result.lemmas["cast of a stored parameter"] += 1
                return replace(tensor, local=local, stored=False)
        return None

    def _as(self, applied: Applied, operation: CapturedOperation, lemma: Lemma | None) -> tuple[PlacedTensor, ...]:
        """The results of a line that is this operation of the model. ValueError where it is not, or not on these shards."""
        call = operation.call
        args, kwargs = lemma.whole(applied.args, applied.kwargs) if lemma is not None else (applied.args, applied.kwargs)
        given = table.bound(operation, applied.op, args, kwargs)
        tensors = tuple(tensors_of(given, PlacedTensor))
        if tuple(each.value for each in tensors) != operation.operands:
            raise ValueError(f"the model applies {call.op} to {', '.join(operation.operands)}")
        if operation.node.no_grad == torch.is_grad_enabled():
            raise ValueError(
                f"{operation.results[0]} is {'' if operation.node.no_grad else 'not '}within torch.no_grad() in the model"
            )
        locals_ = run(applied)
        flowing = locals_ is None or any(each.requires_grad for each in locals_)
        flows = [flowing and tensor.local.requires_grad for tensor in tensors]
        given_kinds = list(self._fitting(applied, operation, lemma, tensors, flows, locals_))
        kinds = given_kinds[0]
        LocalArguments(self.axes, call, given, tensors, kinds).check(table.exempt(call.op))
        self._check_random(applied, kinds)
        out = []
        for index, (value, shape, dtype) in enumerate(zip(operation.results, call.results, call.result_dtypes, strict=True)):
            expected = self.axes.local_shape(shape, kinds[index])
            if expected is None:
                raise ValueError(f"{list(shape)} cannot be {words(self.axes, kinds[index])}")
            local = locals_[index] if locals_ is not None else self._of_shape(expected, dtype, tensors)
            if tuple(local.shape) != expected:
                where = f"{words(self.axes, kinds[index])} of {list(shape)}"
                raise ValueError(f"{value} is {list(local.shape)} on a rank; {where} is {list(expected)}")
            if str(local.dtype) != f"torch.{dtype}":
                self._check_wider(applied, call.op, value, local.dtype, dtype, tensors)
            pending = "moe_experts_start" if applied.op == "ap.moe_experts_start" else ""
            others = () if local.requires_grad else tuple(dict.fromkeys(each[index] for each in given_kinds[1:]))
            out.append(PlacedTensor(value, shape, kinds[index], local, pending=pending, others=others))
        if locals_ is None and lemma is None:
            self.result.assumptions.setdefault(applied.line, f"{applied.op} makes what the captured graph says")
        for op in {call.op, applied.op} & table.ASSUMED.keys():
            self.result.assumptions[applied.line] = table.ASSUMED[op]
        self.result.lemmas[lemma.name if lemma is not None else call.op] += 1
        return tuple(out)

    def _check_wider(
        self, applied: Applied, op: str, value: str, own: torch.dtype, dtype: str, tensors: Sequence[PlacedTensor]
    ) -> None:
        """Losses are summed in float32, and counts: what is made of them is wider than in the model."""
        wider = any(str(x.local.dtype) != f"torch.{self.captured.values[x.value].dtype}" for x in tensors if not x.stored)
        allowed = op == "ap.count_valid" or (dtype in ("bfloat16", "float16") and (wider or op == "ap.cross_entropy_sum"))
        if own != torch.float32 or not allowed:
            raise ValueError(f"{value} is {own} on a rank, and {dtype} in the model")
        if op != "ap.count_valid":
            self.result.assumptions[applied.line] = f"{value} is computed in float32, and in {dtype} in the model"

    @staticmethod
    def _of_shape(shape: Sequence[int], dtype: str, tensors: Sequence[PlacedTensor]) -> torch.Tensor:
        """A tensor whose shape follows from its kind."""
        made = torch.empty(tuple(shape), dtype=getattr(torch, dtype), device="meta")
        gradient = any(each.local.requires_grad for each in tensors) and torch.is_grad_enabled() and made.is_floating_point()
        return made.requires_grad_() if gradient else made

    def _fitting(
        self, applied: Applied, operation: CapturedOperation, lemma: Lemma | None, tensors: Sequence[PlacedTensor],
        flows: Sequence[bool], found: Sequence[torch.Tensor] | None,
    ) -> Iterator[list[Kinds]]:  # fmt: skip
        """The kinds of the results; several where ranks make numbers, of which any part of the right shape is right."""
        seen: list[list[Kinds]] = []
        for wanted in self._wanted(operation):
            kinds = self._kinds(applied, operation, lemma, tensors, flows, wanted)
            shapes = [self.axes.local_shape(shape, each) for shape, each in zip(operation.call.results, kinds, strict=True)]
            if kinds not in seen and (found is None or shapes == [tuple(each.shape) for each in found]):
                seen.append(kinds)
                yield kinds
        if not seen:
            yield self._kinds(applied, operation, lemma, tensors, flows, [None] * len(operation.results))

    def _kinds(
        self, applied: Applied, operation: CapturedOperation, lemma: Lemma | None, tensors: Sequence[PlacedTensor],
        flows: Sequence[bool], wanted: Sequence[Kinds | None],
    ) -> list[Kinds]:  # fmt: skip
        call = operation.call
        operands = [tensor.kinds for tensor in tensors]
        row = lemma.row(call) if lemma is not None else table.row(call)
        if row is None:
            row = table.redundant(call)
            if any(not equal_kind(kind) for kinds in operands for kind in kinds):
                return self._by_rule(applied, operation, tensors, flows)
            if call.op not in table.DETERMINISTIC and not call.op.startswith("aten."):
                self.result.assumptions[applied.line] = (
                    f"{call.op} is deterministic: equal operands give equal results on all ranks"
                )
        if lemma is None:
            return carry(row, self.axes, operands, flows, wanted)
        axis = applied.kwargs.get("axis")
        if not isinstance(axis, AxisName):
            raise Unfit(f"{applied.op} names no mesh axis")
        if axis.name not in self.axes.names:
            raise Unfit(f"{applied.op} is on {axis.name}, which has one rank")
        index = self.axes.names.index(axis.name)
        for tensor in tensors:
            own = tensor.kinds[index]
            shared = isinstance(own, Cut) and len(self.axes.digits(tensor.kinds, own.dim)) > 1
            if shared and not (lemma.of == "ap.moe_experts" and tensor in tensors[:3]):
                raise Unfit(f"another axis cuts the dimension of {tensor.value} that {applied.op} works along")
        along = applied.kwargs.get("dim")
        image = operands[0][index]
        if along is not None and (not isinstance(image, Cut) or image.dim != along):
            raise Unfit(f"{applied.op} works along dimension {along}, and its operand is {image}")
        kind = lemma.on_axis(call, [each[index] for each in operands], self.axes.sizes[index], flows)
        return carry(row, self.axes, operands, flows, wanted, {axis.name: [kind] * len(call.results)})

    def _by_rule(
        self, applied: Applied, operation: CapturedOperation, tensors: Sequence[PlacedTensor], flows: Sequence[bool]
    ) -> list[Kinds]:
        """The plan's word on an operator that a user registered, a module that was left whole, or a branch: on these operands,
        which is assumed. On axes that do not cut it, every rank computes the whole."""
        call, names = operation.call, self.axes.names
        if call.op.startswith("aten."):
            raise NotCarried(f"{call.op} has no row: it may run on whole tensors only")
        cut = [i for i in range(len(names)) if any(not equal_kind(tensor.kinds[i]) for tensor in tensors)]
        values = [*zip(operation.node.operands(), call.shapes, strict=True)]
        values += [(value.name, shape) for value, shape in zip(operation.node.outputs, call.results, strict=True)]
        for operands, results in self.captured.planned(operation):
            places = zip(values, (*operands, *results), strict=True)
            said = [each for (name, shape), where in places if (each := self._placed(name, shape, where)) is not None]
            inputs, made = said[: len(tensors)], said[len(tensors) :]
            pairs = zip(inputs, tensors, strict=False)
            if len(said) < len(values) or any(each[i] != tensor.kinds[i] for each, tensor in pairs for i in cut):
                continue
            on = ", ".join(names[i] for i in cut)
            self.result.assumptions[applied.line] = f"{call.op} on shards makes shards of its results on {on}, as its rule says"
            known = {names[i]: [each[i] for each in made] for i in cut}
            return carry(table.redundant(call), self.axes, [each.kinds for each in tensors], flows, [None] * len(made), known)
        raise NotCarried(f"{call.op} has no row, and its rule does not say what it makes of these shards")

    def _wanted(self, operation: CapturedOperation) -> Iterator[list[Kinds | None]]:
        """Return the kinds of the results by the plan: read only where numbers are made, of which any part is right."""
        for _, planned in self.captured.planned(operation):
            yield [
                self._placed(value.name, shape, placements)
                for placements, shape, value in zip(planned, operation.call.results, operation.node.outputs, strict=True)
            ]
        yield [None] * len(operation.results)

    def _placed(self, name: str, shape: Shape, placements: Placements) -> Kinds | None:
        """The kinds of placements of the plan; micro-batches are parts of the batch."""
        places = {axis: str(place) for axis, place in zip(self.captured.axis_names, placements, strict=True)}
        batched = next((dim for dim, size in enumerate(self.captured.values[name].shape) if has_batch(size)), None)
        places |= {MICRO: f"S({batched})"} if batched is not None else {}
        try:
            return self.axes.placed(shape, places, dict.fromkeys(self.axes.names, "R"))
        except ValueError:
            return None

    def _check_random(self, applied: Applied, kinds: Sequence[Kinds]) -> None:
        """Ranks draw numbers of their own where they hold different elements, and the same where they hold the same."""
        axes = applied.kwargs.get("sharded_axes")
        if axes is None:
            if applied.op in ("ap.dropout", "ap.random"):
                raise ValueError("a draw names the axes on which its numbers differ")
            return
        micro = [name for name in self.axes.names if name not in self.mesh_axes]
        cut = {name for name, kind in zip(self.axes.names, kinds[0], strict=True) if isinstance(kind, Cut)} - set(micro)
        if not isinstance(axes, tuple) or len(set(axes)) != len(axes) or set(axes) & set(self.axes.names) != cut:
            raise ValueError(f"random numbers differ on {axes}, the tensor is cut on {tuple(sorted(cut))}")
        for name, kind in zip(self.axes.names, kinds[0], strict=True):
            if name in micro and not isinstance(kind, Cut):
                self.result.assumptions[applied.line] = "each micro-batch draws its own numbers for a tensor that all have alike"

