"""The proof of one block: each line of its forward is an operation of the captured block, on the shards that it needs.

`BlockProof.check` goes through the text once. It knows of each variable which captured value it is and what of it a rank holds
(`reader.PlacedTensor`). A line is one of these: a conversion (the value stays, its kind changes), an operation that the captured
block has on the same operands (the row of `table` gives the kind of the result), or a function that a lemma stands for.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from autopar.checker import conversions
from autopar.checker.blocks.block_result import BlockResult, Collective, Line
from autopar.checker.blocks.operation import OperationProof
from autopar.checker.captured import CapturedBlock
from autopar.checker.reader import Applied, AxisName, PlacedTensor, Reader
from autopar.checker.rows.operation_call import tensors_of
from autopar.checker.shards import Axes, Kinds, NotProven, alike, equal_kind, words
from autopar.checker.text import RESERVED, BlockText, refuse

RECOMPUTE = "Recompute(self.mesh.host_memory)"


class BlockProof:
    """One block of the text beside one captured block."""

    def __init__(
        self, text: BlockText, captured: CapturedBlock, axes: Axes, axis_names: frozenset[str],
        parameters: Mapping[str, PlacedTensor], examples: Mapping[str, int],
    ) -> None:  # fmt: skip
        """`examples`: how many this rank has, and all, where data ranks have uneven shards of the batch."""
        self.text, self.captured, self.axes, self.examples = text, captured, axes, examples
        self.reader = Reader(axis_names, parameters)
        self.result = BlockResult(parameters=tuple(parameters.values()))
        self.operations = OperationProof(captured, axes, axis_names, self.result)
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
            elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
                function = statement.value.func
                if isinstance(function, ast.Attribute) and function.attr == "copy_":
                    self._update(statement.value, function.value)
                else:
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

    def _update(self, call: ast.Call, target: ast.expr) -> None:
        """``self.running_mean.copy_(mean)``, without gradients."""
        if torch.is_grad_enabled() or len(call.args) != 1 or call.keywords:
            raise refuse(call, "buffers are updated by copy_ under torch.no_grad() only")
        buffer, new = self.reader.value(target), self.reader.value(call.args[0])
        wanted = {self.captured.name(b): self.captured.name(v) for b, v in self.captured.block.updates}
        if wanted.get(buffer.value) != new.value:
            raise refuse(call, f"the model does not write {new.value} into this buffer")
        if not alike(buffer.kinds, new.kinds):
            raise refuse(call, f"the buffer is {words(self.axes, buffer.kinds)}, its new value {words(self.axes, new.kinds)}")
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
        if name.startswith("linear_cross_entropy_"):
            return self._loss_in_chunks(applied, name)
        return self.operations.prove(applied)

    def _loss_in_chunks(self, applied: Applied, name: str) -> tuple[PlacedTensor, ...]:
        """The head, the model's casts of its logits, and their loss (that the function computes these: execution,
        tests/runtime/test_losses_in_chunks.py, on ranks in tests/e2e/losses)."""
        x, weight, bias, target, ignore, smoothing, *chunk = applied.args if len(applied.args) == 7 else (None,) * 7
        if not all(isinstance(each, PlacedTensor) for each in (x, weight, target)) or type(chunk[0]) is not int or chunk[0] < 1:
            raise NotProven(applied.line, f"{name} takes the operands of a head, targets, and how many tokens are a chunk")
        operands = (x, weight) if bias is None else (x, weight, bias)
        (logits,) = self.operations.prove(replace(applied, op="aten.linear", args=operands, kwargs={}))
        while casts := [each for each in self.captured.by_operands.get((logits.value,), []) if each.call.op == "aten.to"]:
            dtype = casts[0].call.arguments["dtype"]
            (logits,) = self.operations.prove(replace(applied, op="aten.to", args=(logits, dtype), kwargs={}))
        self.result.lemmas[applied.op] += 1
        loss = replace(applied, op=f"ap.{name.removeprefix('linear_')}", args=(logits, target, ignore, smoothing))
        return self.operations.prove(loss)

    def _conversion(self, applied: Applied, name: str) -> tuple[PlacedTensor, ...]:
        tensors, axis, text = applied.args if len(applied.args) == 3 else (None, None, None)
        several = tensors if name == "convert_many" and isinstance(tensors, tuple) else (tensors,)
        known = not applied.kwargs or (name == "convert" and applied.kwargs.keys() == {"micro_batches"})
        placed = all(isinstance(x, PlacedTensor) for x in several)
        if not isinstance(axis, AxisName) or not isinstance(text, str) or not placed or not known:
            raise NotProven(applied.line, "this is no conversion")
        out = []
        for tensor in several:
            flows, reasons = tensor.local.requires_grad, list[str]()
            kinds: Kinds | None = None
            for kind in (tensor.kinds, *tensor.others):
                try:
                    kinds = conversions.convert(self.axes, tensor.shape, kind, axis.name, text, flows)
                    if applied.kwargs:
                        kinds = conversions.share(self.axes, kinds, applied.kwargs["micro_batches"], tensor.local.dtype)
                    break
                except conversions.NoConversion as error:
                    reasons.append(str(error))
            if kinds is None:
                raise NotProven(applied.line, f"C.{name}: {reasons[0]}")
            local = self._local_of(tensor, kinds, applied.line)
            if axis.name in self.axes.names:
                dtype = str(tensor.local.dtype).removeprefix("torch.")
                self.result.collectives.append(Collective(applied.line, axis.name, text, tuple(tensor.local.shape), dtype, flows))
                self.result.lemmas["conversion " + " -> ".join(conversions.letters(text))] += 1
            out.append(replace(tensor, kinds=kinds, local=local, pending="start" if name == "start" else "", others=()))
        return tuple(out)

    def _local_of(self, tensor: PlacedTensor, kinds: Kinds, line: int) -> torch.Tensor:
        shape = self.axes.local_shape(tensor.shape, kinds)
        if shape is None:
            raise NotProven(line, f"{list(tensor.shape)} cannot be {words(self.axes, kinds)}")
        if alike(tensor.kinds, kinds):
            return tensor.local.view_as(tensor.local)  # no value moves: the same storage
        made = torch.empty(shape, dtype=tensor.local.dtype, device="meta")
        return made.requires_grad_() if tensor.local.requires_grad else made
