"""The proof of one block: each line of its forward is an operation of the captured block, on the shards that it needs.

`BlockProof.check` goes through the text once. It knows of each variable which captured value it is and what of it a rank holds
(`reader.PlacedTensor`). A line is one of these: a conversion (the value stays, its kind changes), an operation that the captured
block has on the same operands (the row of `table` gives the kind of the result), or a function that a lemma stands for.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from types import MappingProxyType
from typing import Any

import torch

from autopar.checker import conversions
from autopar.checker.captured import CapturedBlock, CapturedOperation, canonical
from autopar.checker.local_arguments import LocalArguments
from autopar.checker.local_run import run
from autopar.checker.reader import Applied, AxisName, Fixed, PlacedTensor, Reader
from autopar.checker.rows import table
from autopar.checker.rows.carry import NotCarried, carry
from autopar.checker.rows.lemmas import LEMMAS, Lemma, Unfit
from autopar.checker.rows.operation_call import TensorName, bind, schema_of, tensors_of
from autopar.checker.shards import MICRO, Axes, Cut, Kinds, NotProven, Shape, equal_kind, words
from autopar.checker.text import RESERVED, BlockText, refuse
from autopar.ir.dims import has_batch
from autopar.ir.placement import Placements

RECOMPUTE = "Recompute(self.mesh.host_memory)"


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective of a block, in the order of the text: axis, conversion, local shape and dtype of what it takes."""

    line: int
    axis: str
    text: str
    shape: tuple[int, ...]
    dtype: str
    backward: bool


@dataclass(frozen=True, slots=True)
class Line:
    """An operation of a block as it runs on a rank, and what it makes."""

    applied: Applied
    results: tuple[PlacedTensor, ...]
    gradients: bool


@dataclass(slots=True)
class BlockResult:
    """What a block returns, and what its proof rests on."""

    outputs: tuple[PlacedTensor, ...] = ()
    lemmas: dict[str, int] = field(default_factory=dict)
    """By name of a lemma or row, how many lines rest on it."""
    assumptions: dict[int, str] = field(default_factory=dict)
    collectives: list[Collective] = field(default_factory=list)
    inputs: tuple[PlacedTensor, ...] = ()
    parameters: tuple[PlacedTensor, ...] = ()
    lines: list[Line] = field(default_factory=list)
    elsewhere: list[PlacedTensor] = field(default_factory=list)
    """What is saved on the host, or in parts on the ranks of an axis."""


class BlockProof:
    """One block of the text beside one captured block."""

    def __init__(
        self, text: BlockText, captured: CapturedBlock, axes: Axes, axis_names: frozenset[str],
        parameters: Mapping[str, PlacedTensor], forward_only: bool = False, examples: Mapping[str, int] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """`examples`: how many this rank has, and all, where data ranks have uneven shards of the batch."""
        self.examples = examples
        self.text, self.captured, self.axes, self.forward_only = text, captured, axes, forward_only
        self.reader = Reader(axis_names, parameters)
        self.result = BlockResult(parameters=tuple(parameters.values()))
        self.updates: dict[str, str] = {}

    def check(self, inputs: Sequence[PlacedTensor]) -> BlockResult:
        if len(inputs) != len(self.text.arguments):
            raise NotProven(self.text.line, f"{self.text.name} takes {len(self.text.arguments)} inputs, not {len(inputs)}")
        self.reader.variables.update(zip(self.text.arguments, inputs, strict=True))
        if self.text.flags.get("recompute") and self.captured.draws and not self.text.flags.get("uses_rng"):
            raise NotProven(self.text.line, f"{self.text.name} is recomputed with other random numbers: uses_rng is not set")
        self.result.inputs = tuple(inputs)
        self._statements(self.text.body, outermost=True)
        expected = {self.captured.name(new) for _, new in self.captured.block.updates}
        missing = expected - set(self.updates.values()) if self._is_whole() else set()
        if missing:
            raise NotProven(self.text.line, f"{self.text.name} does not update the buffer that {min(missing)} is written into")
        return self.result

    def _is_whole(self) -> bool:
        return bool(self.updates) or self.text.name == self.captured.block.name

    # -- statements

    def _statements(self, body: Sequence[ast.stmt], outermost: bool = False) -> None:
        for index, statement in enumerate(body):
            last = index + 1 == len(body)
            if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                self._assign(statement.targets[0], statement.value)
            elif isinstance(statement, ast.With) and len(statement.items) == 1:
                self._with(statement)
            elif isinstance(statement, ast.Return) and last and statement.value is not None and not self.result.outputs:
                self._return(statement)
            elif isinstance(statement, ast.If) and ast.unparse(statement.test) == "self.training" and not statement.orelse:
                self._updates(statement)
            elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
                self._saved_elsewhere(statement.value)
            else:
                raise refuse(statement, f"{ast.unparse(statement).splitlines()[0][:60]} is no line of a block")
        if outermost and not self.result.outputs:
            raise NotProven(self.text.line, f"{self.text.name} returns nothing")

    def _with(self, statement: ast.With) -> None:
        (item,) = statement.items
        source = ast.unparse(item.context_expr)
        if source == "torch.no_grad()" and item.optional_vars is None:
            with torch.no_grad():
                self._statements(statement.body)
        elif source == RECOMPUTE and isinstance(item.optional_vars, ast.Name) and item.optional_vars.id == "recompute":
            self._statements(statement.body)
        else:
            raise refuse(statement, f"a block is not run within {source[:60]}")

    def _return(self, statement: ast.Return) -> None:
        assert statement.value is not None
        items = statement.value.elts if isinstance(statement.value, ast.Tuple) else [statement.value]
        found = [self.reader.value(each) for each in items]
        if not all(isinstance(each, PlacedTensor) and not each.pending for each in found):
            raise refuse(statement, "a block returns tensors, after their conversions have ended")
        self.result.outputs = tuple(found)

    def _updates(self, statement: ast.If) -> None:
        """``if self.training: with torch.no_grad(): self.running_mean.copy_(mean)``."""
        (inner,) = statement.body if len(statement.body) == 1 else (statement,)
        if not isinstance(inner, ast.With) or ast.unparse(inner.items[0].context_expr) != "torch.no_grad()":
            raise refuse(statement, "a mode decides updates of buffers only")
        for each in inner.body:
            call = each.value if isinstance(each, ast.Expr) else None
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or call.func.attr != "copy_":
                raise refuse(each, "buffers are updated by copy_ only")
            buffer, new = self.reader.value(call.func.value), self.reader.value(call.args[0])
            wanted = {self.captured.name(b): self.captured.name(v) for b, v in self.captured.block.updates}
            if wanted.get(buffer.value) != new.value:
                raise refuse(each, f"the model does not write {new.value} into this buffer")
            same = all(a == b or (equal_kind(a) and equal_kind(b)) for a, b in zip(buffer.kinds, new.kinds, strict=True))
            if not same:
                raise refuse(each, f"the buffer is {words(self.axes, buffer.kinds)}, its new value {words(self.axes, new.kinds)}")
            self.updates[buffer.value] = new.value

    def _saved_elsewhere(self, call: ast.Call) -> None:
        """``recompute.offload(x)``, ``recompute.partition(x, tp)``."""
        function = ast.unparse(call.func)
        values = [self.reader.value(each) for each in call.args]
        if function == "recompute.offload" and len(values) == 1 and isinstance(values[0], PlacedTensor):
            self.result.elsewhere.append(values[0])
            return
        if function == "recompute.partition" and len(values) == 2 and isinstance(values[1], AxisName):
            self.result.elsewhere.append(values[0])
            axis = values[1].name
            if axis in self.axes.names and not equal_kind(values[0].kinds[self.axes.names.index(axis)]):
                raise refuse(call, f"the ranks of {axis} save parts of a tensor that is not equal on them")
            return
        raise refuse(call, f"{ast.unparse(call)[:60]} is no line of a block")

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        targets = list(target.elts) if isinstance(target, ast.Tuple) else [target]
        names = [each.id for each in targets if isinstance(each, ast.Name)]
        own = [name for name in names if name != "_"]
        if len(names) != len(targets) or len(set(own)) != len(own) or set(own) & RESERVED:
            raise refuse(target, f"{ast.unparse(target)[:60]} is no variable")
        for name in names:
            if name != "_" and name in self.reader.variables:
                raise refuse(target, f"{name} is assigned twice")
        if isinstance(value, ast.Attribute) and names == [value.attr] and ast.unparse(value) == f"self.mesh.{value.attr}":
            self.reader.variables[names[0]] = self.reader.value(value)
            return
        examples = self.examples.get(ast.unparse(value))
        if examples is not None and len(names) == 1:
            self.reader.variables[names[0]] = examples
            return
        found = self.reader.applied(value)
        results: tuple[PlacedTensor | int, ...]
        if isinstance(found, Applied):
            results = made = self.apply(found)
            self.result.lines.append(Line(found, made, torch.is_grad_enabled()))
        else:
            results = (found,)
        if len(results) != len(names):
            raise refuse(value, f"{len(results)} results for {len(names)} variables")
        for name, each in zip(names, results, strict=True):
            self.reader.variables[name] = each

    # -- operations

    def apply(self, applied: Applied) -> tuple[PlacedTensor, ...]:
        """The results of one operation of the text. NotProven where it is none of the model's on these shards."""
        name = applied.op.removeprefix("ap.") if applied.op.startswith("ap.") else ""
        for tensor in tensors_of((*applied.args, applied.kwargs), PlacedTensor):
            if tensor.pending and name not in ("wait", "moe_experts_wait"):
                raise NotProven(applied.line, f"{tensor.value} is read before its conversion has ended: C.wait is missing")
        if name in ("convert", "start", "convert_many"):
            return self._conversion(applied, name)
        if name in ("wait", "moe_experts_wait"):
            (pending,) = applied.args
            wanted = "start" if name == "wait" else "moe_experts_start"
            if not isinstance(pending, PlacedTensor) or pending.pending != wanted:
                raise NotProven(applied.line, f"nothing was started that {name} could wait for")
            return (replace(pending, pending=""),)
        return self._operation(applied)

    def _conversion(self, applied: Applied, name: str) -> tuple[PlacedTensor, ...]:
        tensors, axis, text = applied.args if len(applied.args) == 3 and not applied.kwargs else (None, None, None)
        several = tensors if name == "convert_many" and isinstance(tensors, tuple) else (tensors,)
        if not isinstance(axis, AxisName) or not isinstance(text, str) or not all(isinstance(x, PlacedTensor) for x in several):
            raise NotProven(applied.line, "this is no conversion")
        out = []
        for tensor in several:
            flows, reasons = tensor.local.requires_grad, list[str]()
            kinds: Kinds | None = None
            for kind in (tensor.kinds, *tensor.others):
                try:
                    kinds = conversions.convert(self.axes, tensor.shape, kind, axis.name, text, flows)
                    break
                except conversions.NoConversion as error:
                    reasons.append(str(error))
            if kinds is None:
                raise NotProven(applied.line, f"C.{name}: {reasons[0]}")
            local = self._local_of(tensor, kinds, applied.line)
            if axis.name in self.axes.names:
                dtype = str(tensor.local.dtype).removeprefix("torch.")
                self.result.collectives.append(Collective(applied.line, axis.name, text, tuple(tensor.local.shape), dtype, flows))
                key = "conversion " + " -> ".join(conversions.letters(text))
                self.result.lemmas[key] = self.result.lemmas.get(key, 0) + 1
            out.append(replace(tensor, kinds=kinds, local=local, pending="start" if name == "start" else "", others=()))
        return tuple(out)

    def _local_of(self, tensor: PlacedTensor, kinds: Kinds, line: int) -> torch.Tensor:
        shape = self.axes.local_shape(tensor.shape, kinds)
        if shape is None:
            raise NotProven(line, f"{list(tensor.shape)} cannot be {words(self.axes, kinds)}")
        if all(a == b or (equal_kind(a) and equal_kind(b)) for a, b in zip(tensor.kinds, kinds, strict=True)):
            return tensor.local.view_as(tensor.local)  # no value moves: the same storage
        made = torch.empty(shape, dtype=tensor.local.dtype, device="meta")
        return made.requires_grad_() if tensor.local.requires_grad else made

    def _operation(self, applied: Applied) -> tuple[PlacedTensor, ...]:
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

            def given(value: Any, kinds: Mapping[int, PlacedTensor] = kinds) -> Any:
                if isinstance(value, tuple):
                    return tuple(map(given, value))
                return kinds.get(id(value), value)

            yield replace(applied, args=given(applied.args), kwargs={k: given(v) for k, v in applied.kwargs.items()})

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
                self.result.lemmas["cast of a stored parameter"] = self.result.lemmas.get("cast of a stored parameter", 0) + 1
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
        key = lemma.name if lemma is not None else call.op
        self.result.lemmas[key] = self.result.lemmas.get(key, 0) + 1
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
        others = Axes(self._but(self.axes.names, index), self._but(self.axes.sizes, index))
        rest = carry(row, others, [self._but(each, index) for each in operands], flows,
                     [None if each is None else self._but(each, index) for each in wanted])  # fmt: skip
        for tensor_kinds, tensor in zip(operands, tensors, strict=True):
            own = tensor_kinds[index]
            shared = isinstance(own, Cut) and any(isinstance(k, Cut) and k.dim == own.dim for k in self._but(tensor_kinds, index))
            if shared and not (lemma.of == "ap.moe_experts" and tensor in tensors[:3]):
                raise Unfit(f"another axis cuts the dimension of {tensor.value} that {applied.op} works along")
        along = applied.kwargs.get("dim")
        image = operands[0][index]
        if along is not None and (not isinstance(image, Cut) or image.dim != along):
            raise Unfit(f"{applied.op} works along dimension {along}, and its operand is {image}")
        kind = lemma.on_axis(call, [each[index] for each in operands], self.axes.sizes[index], flows)
        return [(*each[:index], kind, *each[index:]) for each in rest]

    def _by_rule(
        self, applied: Applied, operation: CapturedOperation, tensors: Sequence[PlacedTensor], flows: Sequence[bool]
    ) -> list[Kinds]:
        """Of an operator that a user registered, a module that was left whole, or a branch: what the plan says of these operands,
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
            whole = carry(table.redundant(call), *self._without(cut, [each.kinds for each in tensors]), flows, [None] * len(made))
            kept = [i for i in range(len(names)) if i not in cut]
            on = ", ".join(names[i] for i in cut)
            self.result.assumptions[applied.line] = f"{call.op} on shards makes shards of its results on {on}, as its rule says"
            return [
                tuple(each[i] if i in cut else rest[kept.index(i)] for i in range(len(names)))
                for each, rest in zip(made, whole, strict=True)
            ]
        raise NotCarried(f"{call.op} has no row, and its rule does not say what it makes of these shards")

    def _without(self, cut: Sequence[int], kinds: Sequence[Kinds]) -> tuple[Axes, list[Kinds]]:
        def others(items: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(each for i, each in enumerate(items) if i not in cut)

        return Axes(others(self.axes.names), others(self.axes.sizes)), [others(each) for each in kinds]

    @staticmethod
    def _but(items: tuple[Any, ...], index: int) -> tuple[Any, ...]:
        return items[:index] + items[index + 1 :]

    def _wanted(self, operation: CapturedOperation) -> Iterator[list[Kinds | None]]:
        """What the plan says of the results, as kinds: read only where numbers are made, of which any part is right."""
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
        micro = [name for name in self.axes.names if name not in self.reader.axes]
        cut = {name for name, kind in zip(self.axes.names, kinds[0], strict=True) if isinstance(kind, Cut)} - set(micro)
        if not isinstance(axes, tuple) or len(set(axes)) != len(axes) or set(axes) & set(self.axes.names) != cut:
            raise ValueError(f"random numbers differ on {axes}, the tensor is cut on {tuple(sorted(cut))}")
        for name, kind in zip(self.axes.names, kinds[0], strict=True):
            if name in micro and not isinstance(kind, Cut):
                self.result.assumptions[applied.line] = "each micro-batch draws its own numbers for a tensor that all have alike"


__all__ = ["BlockProof", "BlockResult", "Collective", "Fixed", "TensorName", "bind", "schema_of"]
