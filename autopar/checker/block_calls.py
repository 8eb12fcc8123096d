"""Calls of blocks in the forward of a program: loops over layers, and which call of the model each one is.

A block of one text is proven once for each kind of its inputs; a loop over layers carries tensors whose kinds are the same before
and after each layer, so that one proof serves all of them.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from autopar.checker.blocks.block import BlockProof
from autopar.checker.blocks.block_result import BlockResult
from autopar.checker.captured import GraphCalls, Identity
from autopar.checker.interface import Passed, ProgramInterface
from autopar.checker.reader import PlacedTensor
from autopar.checker.shards import Kinds, NotProven, words_of
from autopar.checker.text import ATTRIBUTES, BLOCK_ATTRIBUTES, RESERVED, CallsText, Instance, ProgramText, arguments_of, refuse
from autopar.ir.graph import Call


@dataclass(frozen=True, slots=True)
class BlockCall:
    """A call of a block: its class, its proof, and which values go in and out."""

    block: str
    proof: BlockResult
    inputs: tuple[Identity, ...]
    outputs: tuple[Identity, ...]


@dataclass(slots=True)
class ProgramResult:
    """Proofs of distinct blocks by class and kinds of inputs, and what was counted on the way."""

    blocks: dict[tuple[Any, ...], BlockResult] = field(default_factory=dict)
    calls: dict[str, list[BlockCall]] = field(default_factory=dict)
    """calls of blocks by program or chunk, in order"""
    parameters: dict[str, Kinds] = field(default_factory=dict)
    assumptions: list[tuple[int, str]] = field(default_factory=list)

@dataclass
class CallsProof:
    """The calls of blocks of one text. `examples`: those of a rank and of all, where data ranks have uneven shards."""

    text: ProgramText
    interface: ProgramInterface
    calls: GraphCalls
    axis_names: frozenset[str]
    examples: Mapping[str, int]
    result: ProgramResult = field(default_factory=ProgramResult)
    used: set[str] = field(default_factory=set)

    def run(
        self, owner: CallsText, method: ast.FunctionDef, given: Mapping[str, Passed], totals: Mapping[str, Passed]
    ) -> dict[str, Passed]:
        """The variables of a forward, by going through its calls."""
        names = arguments_of(method)
        available = {**given, **totals}
        if set(names) != set(available) or len(names) != len(available):
            raise refuse(method, f"{method.name} takes {', '.join(names)}, and gets {', '.join(available)}")
        variables = {name: available[name] for name in names}
        calls = self.result.calls.setdefault(f"{owner.name}.{method.name}", [])
        if not isinstance(method.body[-1], ast.Return):
            raise refuse(method, "a forward ends with what it returns")
        for statement in method.body[:-1]:
            if isinstance(statement, ast.For) and not statement.orelse:
                self._loop(owner, statement, variables, calls)
            else:
                self._statement(owner, statement, variables, {}, calls)
        return variables

    def _loop(self, owner: CallsText, loop: ast.For, variables: dict[str, Passed], calls: list[Any]) -> None:
        lists = [loop.iter] if not isinstance(loop.iter, ast.Call) else list(loop.iter.args)
        if isinstance(loop.iter, ast.Call) and (
            ast.unparse(loop.iter.func) != "zip" or [k.arg for k in loop.iter.keywords] != ["strict"]
        ):
            raise refuse(loop, "a loop goes over blocks")
        names = [each.id for each in loop.target.elts if isinstance(each, ast.Name)] if isinstance(loop.target, ast.Tuple) else [
            ast.unparse(loop.target)]  # fmt: skip
        columns = [self._instances(owner, each) for each in lists]
        if len(names) != len(columns) or len({len(column) for column in columns}) != 1:
            raise refuse(loop, "a loop goes over lists of blocks of one length")
        for row in zip(*columns, strict=True):
            bound = dict(zip(names, row, strict=True))
            for statement in loop.body:
                self._statement(owner, statement, variables, bound, calls)

    def _instances(self, owner: CallsText, node: ast.expr) -> tuple[Instance, ...]:
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self" and node.attr in owner.instances:
            return owner.instances[node.attr]
        raise refuse(node, f"{ast.unparse(node)[:60]} is no block of {owner.name}")

    def _statement(
        self, owner: CallsText, statement: ast.stmt, variables: dict[str, Passed], bound: Mapping[str, Instance], calls: list[Any]
    ) -> None:
        """``a, b = self.layer(x, y)`` or ``a = b``."""
        if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
            raise refuse(statement, f"{ast.unparse(statement).splitlines()[0][:60]} is no line of a program")
        target, value = statement.targets[0], statement.value
        names = [ast.unparse(each) for each in (target.elts if isinstance(target, ast.Tuple) else [target])]
        if set(names) & (RESERVED | bound.keys()):
            raise refuse(statement, f"{ast.unparse(target)[:60]} is no variable of a program")
        if isinstance(value, ast.Name) and value.id in variables and len(names) == 1:
            variables[names[0]] = variables[value.id]
            return
        if not isinstance(value, ast.Call) or value.keywords or not all(name.isidentifier() for name in names):
            raise refuse(statement, f"{ast.unparse(value)[:60]} calls no block")
        if isinstance(value.func, ast.Name) and value.func.id in bound:
            instance = bound[value.func.id]
        else:
            (instance,) = self._instances(owner, value.func)
        unknown = [ast.unparse(each) for each in value.args if ast.unparse(each) not in variables]
        if unknown:
            raise refuse(statement, f"{unknown[0]} is not defined")
        results = self._call(instance, [variables[ast.unparse(each)] for each in value.args], statement.lineno, calls)
        if len(results) != len(names):
            raise refuse(statement, f"{instance.block} returns {len(results)} tensors for {len(names)} variables")
        variables.update(zip(names, results, strict=True))

    def _call(self, instance: Instance, given: Sequence[Passed], line: int, calls: list[Any]) -> list[Passed]:
        reasons = []
        for takes_results, (number, call) in itertools.product((False, True), self.calls.calls_at(instance)):
            try:
                names = self.calls.arguments(number, call, [each.identity for each in given], takes_results)
                inputs = [replace(each.tensor, value=name) for each, name in zip(given, names, strict=True)]
                self._check_names(instance, call, line)
            except NotProven as error:
                reasons.append(error)
                continue
            result = self._block(instance, call, inputs)
            passed = [Passed(self.calls.identity(number, call, each.value), each) for each in result.outputs]
            names_in, names_out = (tuple(each.identity for each in side) for side in (given, passed))
            calls.append(BlockCall(instance.block, result, names_in, names_out))
            return passed
        raise reasons[0] if reasons else NotProven(line, f"the model has no {instance.block} at {instance.prefix or 'its top'}")

    def _check_names(self, instance: Instance, call: Call, line: int) -> None:
        """Parameters have the original names that the model's call reads, and equal placements wherever they are read."""
        block, text = self.calls.graph.block(call.block), self.text.blocks[instance.block]
        paths = {parameter.path: name for parameter, name in zip(block.parameters, call.parameters, strict=True)}
        for stored in text.stored:
            name = instance.name_of(stored.path)
            if paths.get(stored.path) != name:
                raise NotProven(
                    line, f"{instance.block} at {instance.prefix or 'the top'} reads {name}, the model {paths.get(stored.path)}"
                )
            kinds = self.interface.stored_kinds(stored.shape, stored.places, text.line)
            if self.result.parameters.setdefault(name, kinds) != kinds:
                raise NotProven(text.line, f"{name} is stored in two ways: the parts of it would be summed as if they were alike")

    def _block(self, instance: Instance, call: Call, inputs: Sequence[PlacedTensor]) -> BlockResult:
        """The proof of a block for inputs of these kinds."""
        text = self.text.blocks[instance.block]
        self.used.add(instance.block)
        key = (instance.block, call.block, *((x.value, x.kinds, x.local.dtype, x.local.requires_grad) for x in inputs))
        if key not in self.result.blocks:
            captured = self.calls.block(call.block)
            by_path = {parameter.path: parameter for parameter in captured.block.parameters}
            parameters = {}
            for stored in text.stored:
                parameter = by_path[stored.path]
                value = captured.name(parameter.value.name)
                same = stored.trainable == parameter.trainable and stored.buffer == parameter.buffer
                if tuple(stored.shape) != captured.shape(value) or not same:
                    raise NotProven(text.line, f"{stored.path} is not the model's {parameter.path}")
                kinds = self.interface.stored_kinds(stored.shape, stored.places, text.line)
                gradient = stored.trainable and not stored.buffer and not self.calls.graph.forward_only
                tensor = self.interface.tensor(value, stored.shape, kinds, stored.dtype, gradient, text.line)
                attribute = attribute_of(stored.path)
                if attribute in parameters:
                    raise NotProven(text.line, f"two parameters are the attribute {attribute}")
                parameters[attribute] = replace(tensor, stored=stored.dtype != parameter.value.dtype)
            proof = BlockProof(text, captured, self.interface.axes, self.axis_names, parameters, self.examples)
            self.result.blocks[key] = proof.check(inputs)
        return self.result.blocks[key]


def attribute_of(path: str) -> str:
    """The attribute of a parameter. The runtime has the same rule, and adds ``_`` to names that it has itself."""
    name = re.sub(r"\W", "_", path)
    if name[0].isdigit():
        return f"p{name}"
    return f"{name}_" if hasattr(torch.nn.Module, name) or name in _TAKEN else name


_TAKEN = ATTRIBUTES | BLOCK_ATTRIBUTES | frozenset(
    words_of("""mesh prefix original_names specs training split_backward shared_parameters blocks roots position count
    micro_batch_size weight_grads all_chunks own_chunks chunk_stages actions state_program""")
)
