"""The proof of a whole program: calls of blocks, loops over layers, model chunks, the loss, and every parameter's gradient.

A block of one text is proven once for each kind of its inputs; a loop over layers carries tensors whose kinds are the same before
and after each layer, so that one proof serves all of them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.checker.block import BlockProof, BlockResult
from autopar.checker.captured import CapturedBlock
from autopar.checker.local_run import meta_tensor
from autopar.checker.reader import AxisName, PlacedTensor, Reader
from autopar.checker.shards import MICRO, PARTIAL, Axes, Cut, Kind, Kinds, NotProven, equal_kind, words, words_of
from autopar.checker.text import RESERVED, CallsText, Instance, ProgramText, arguments_of, refuse
from autopar.ir.dims import has_batch, shape_at
from autopar.ir.graph import Call, Graph, Value
from autopar.ir.mesh import DATA_AXIS
from autopar.ir.plan import Candidate

Identity = tuple[int, str]
"""A value of the graph: (-1, its name between calls), or (number of a call, its name within the block)."""


@dataclass(frozen=True, slots=True)
class Passed:
    """A variable of the program: the tensor, and which value of the graph it is."""

    identity: Identity
    tensor: PlacedTensor


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


class ProgramProof:
    """One text beside one graph."""

    def __init__(self, text: ProgramText, graph: Graph, candidate: Candidate) -> None:
        data = candidate.mesh.size_of(DATA_AXIS)
        self.examples: dict[str, int] = {}
        if candidate.batch % data and graph.batch_is_symbolic:
            # uneven shards: proven for equal ones of as many examples as the largest, of the same text
            own = -(-candidate.batch // data)
            self.examples = {"self.mesh.own_examples": own, "self.mesh.all_examples": own * data}
            candidate = replace(candidate, batch=own * data)
        self.text, self.graph, self.candidate = text, graph, candidate
        flags = text.program.flags
        self.micro_batches = int(flags.get("micro_batches", 1))
        mesh = {name: int(size) for name, size in flags.get("mesh_axes", {}).items() if name != "pp"}
        self._check_mesh(mesh)
        self.axes = Axes.of(mesh, self.micro_batches)
        self.axis_names = frozenset(mesh)
        self.result = ProgramResult()
        self.captured: dict[str, CapturedBlock] = {}
        self.alias = self._aliases()
        self.used = set[str]()

    def _check_mesh(self, mesh: Mapping[str, int]) -> None:
        """The mesh and the batch are the plan's: they say of which cluster and batch the proof is."""
        planned = dict(zip(self.candidate.mesh.names, self.candidate.mesh.sizes, strict=True))
        if {k: v for k, v in mesh.items() if v > 1} != {k: v for k, v in planned.items() if v > 1}:
            raise NotProven(self.text.program.line, f"mesh_axes are {dict(mesh)}, the plan is for {planned}")
        if self.micro_batches != self.candidate.micro_batches:
            raise NotProven(
                self.text.program.line, f"micro_batches is {self.micro_batches}, in the plan {self.candidate.micro_batches}"
            )

    # -- the captured graph

    def captured_block(self, name: str) -> CapturedBlock:
        if name not in self.captured:
            plan = next((each for each in self.candidate.blocks if each.block == name), None)
            self.captured[name] = CapturedBlock(self.graph.block(name), self.candidate.batch, plan, self.candidate.mesh.names)
        return self.captured[name]

    def _aliases(self) -> dict[str, str]:
        """Values between calls that are others: a block hands on an input, returns one value twice, or is called twice alike."""
        out: dict[str, str] = {}
        first: dict[Any, Call] = {}
        for call in self.graph.calls:
            block = self.captured_block(call.block)
            inputs = tuple(out.get(name, name) for name in call.inputs)
            same = first.setdefault((call.block, call.prefix, inputs, call.parameters), call)
            if same is not call and not block.draws:
                out.update((name, out.get(other, other)) for name, other in zip(call.outputs, same.outputs, strict=True))
                continue
            known = {
                block.name(value.name): out.get(name, name) for value, name in zip(block.block.inputs, call.inputs, strict=True)
            }
            for inner, name in zip(block.block.outputs, call.outputs, strict=True):
                out[name] = known.setdefault(block.name(inner), name)
        return out

    def _graph_value(self, name: str) -> Identity:
        return -1, self.alias.get(name, name)

    # -- the program

    def _check_flags(self) -> None:
        """What the runtime reads of the program beside its forward: whether it trains, and how callers pass their arguments."""
        flags, line, interface = self.text.program.flags, self.text.program.line, self.graph.interface
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
        for name, (value, default) in wanted.items():
            if flags.get(name, default) != value:
                raise NotProven(line, f"{name} is {str(flags.get(name, default))[:60]}, and {str(value)[:60]} for the model")

    def check(self) -> ProgramResult:
        program = self.text.program
        self._check_flags()
        inputs = {value.name: self._input(value) for value in self.graph.inputs}
        totals = self._totals(inputs)
        if self.text.chunks:
            self._chunks(inputs, totals)
        else:
            self._one_program(program, inputs, totals)
        unused = set(self.text.blocks) - self.used
        if unused:
            raise NotProven(self.text.blocks[min(unused)].line, f"nothing calls {min(unused)}")
        missing = {name for name, parameter in self.graph.parameters().items() if parameter.trainable and not parameter.buffer}
        missing -= set(self.result.parameters)
        if missing:
            raise NotProven(program.line, f"the program does not have the parameter {min(missing)}")
        return self.result

    def _input(self, value: Value) -> Passed:
        flags, line = self.text.program.flags, self.text.program.line
        shape = shape_at(value.shape, self.candidate.batch)
        places = dict(flags.get("input_placements", {}).get(value.name, {}))
        batched = next((dim for dim, size in enumerate(value.shape) if has_batch(size)), None)
        if batched is not None:
            places[MICRO] = f"S({batched})"
        flowing = value.name in flags.get("differentiable_inputs", ())
        try:
            kinds = self.axes.placed(shape, places, dict.fromkeys(self.axes.names, "I" if flowing else "R"))
        except ValueError as error:
            raise NotProven(line, f"input {value.name}: {error}") from None
        dtype = flags.get("input_dtypes", {}).get(value.name, value.dtype)
        if dtype != value.dtype:
            raise NotProven(line, f"input {value.name} is {dtype}, and {value.dtype} in the model")
        return Passed(self._graph_value(value.name), self._tensor(value.name, shape, kinds, dtype, flowing, line))

    def _tensor(self, name: str, shape: Sequence[int], kinds: Kinds, dtype: str, gradient: bool, line: int) -> PlacedTensor:
        local = self.axes.local_shape(tuple(shape), kinds)
        if local is None:
            raise NotProven(line, f"{name} of {list(shape)} cannot be {words(self.axes, kinds)}")
        return PlacedTensor(name, tuple(shape), kinds, meta_tensor(local, dtype, gradient))

    def _totals(self, inputs: Mapping[str, Passed]) -> dict[str, Passed]:
        """What ``count`` returns, after the runtime has reduced it over the micro-batches."""
        program = self.text.program
        ops, method = program.flags.get("totals", {}), program.methods.get("count")
        if method is None:
            if ops:
                raise NotProven(program.line, "`totals` are reduced, and nothing counts them")
            return {}
        variables = self._run(program, method, dict(inputs), {})
        statement = method.body[-1]
        if not isinstance(statement, ast.Return) or not isinstance(statement.value, ast.Dict):
            raise refuse(statement, "`count` returns its numbers by name")
        out = {}
        for key, item in zip(statement.value.keys, statement.value.values, strict=True):
            name, found = ast.literal_eval(key) if key is not None else "", variables.get(ast.unparse(item))
            if found is None or name not in ops:
                raise refuse(statement, f"{name} is no total")
            wanted = PARTIAL if ops[name] == "sum" else f"P{ops[name]}"
            kinds = dict(zip(self.axes.names, found.tensor.kinds, strict=True))
            if kinds.pop(MICRO, wanted) != wanted or found.tensor.local.requires_grad:
                raise refuse(
                    statement,
                    f"{name} is {words(self.axes, found.tensor.kinds)}, and is reduced by {ops[name]} over micro-batches",
                )
            reduced = tuple(
                "R" if axis == MICRO else kind for axis, kind in zip(self.axes.names, found.tensor.kinds, strict=True)
            )
            out[name] = Passed(found.identity, replace(found.tensor, kinds=reduced))
        return out

    def _one_program(self, program: CallsText, inputs: dict[str, Passed], totals: dict[str, Passed]) -> None:
        forward = program.methods.get("forward")
        if forward is None:
            raise NotProven(program.line, "the program has no forward")
        variables = self._run(program, forward, inputs, totals)
        self._results(forward, variables)

    def _chunks(self, inputs: dict[str, Passed], totals: dict[str, Passed]) -> None:
        if len(self.text.boundaries) != len(self.text.chunks) - 1:
            raise NotProven(self.text.program.line, f"{len(self.text.chunks)} chunks have {len(self.text.boundaries)} boundaries")
        self._micro_batch_size(inputs)
        received: dict[str, Passed] = {}
        for number, chunk in enumerate(self.text.chunks):
            forward = chunk.methods.get("forward")
            if forward is None:
                raise NotProven(chunk.line, f"{chunk.name} has no forward")
            named = chunk.flags.get("batch_inputs", ())
            unknown = [name for name in named if name not in inputs and name not in totals]
            if unknown or set(arguments_of(forward)) != {*received, *named}:
                raise refuse(
                    forward, f"{chunk.name} takes {', '.join(arguments_of(forward))}, and gets {', '.join((*received, *named))}"
                )
            given = {name: inputs[name] if name in inputs else totals[name] for name in named}
            variables = self._run(chunk, forward, {**given, **received}, {})
            if number + 1 == len(self.text.chunks):
                self._results(forward, variables)
            else:
                received = dict(self._sent(forward, variables, number))

    def _micro_batch_size(self, inputs: Mapping[str, Passed]) -> None:
        """``B`` of the shapes of receive buffers."""
        method = self.text.program.methods.get("micro_batch_size")
        if method is None:
            raise NotProven(self.text.program.line, "nothing says how large a micro-batch is")
        reader = Reader(self.axis_names, {}, {name: each.tensor for name, each in inputs.items()})
        statement = method.body[-1]
        assert isinstance(statement, ast.Return) and statement.value is not None
        size = reader.value(statement.value)
        ranks = self.candidate.mesh.size_of(DATA_AXIS) * self.micro_batches
        if size * ranks != self.candidate.batch:
            raise refuse(statement, f"a micro-batch of {size} on {ranks} shards is not the batch of {self.candidate.batch}")
        self.micro_batch = size

    def _sent(self, forward: ast.FunctionDef, variables: Mapping[str, Passed], number: int) -> Iterator[tuple[str, Passed]]:
        """What the next chunk receives: as the boundary says, which is what buffers are made for."""
        items = self._returned(forward, variables)
        boundary = self.text.boundaries[number]
        if len(items) != len(boundary):
            raise refuse(forward, f"{len(items)} results are sent, {len(boundary)} received")
        for (found, _), each in zip(items, boundary, strict=True):
            local = found.tensor.local
            reader = Reader(frozenset(), {}, {each.batch: self.micro_batch})
            shape = reader.value(each.shape)
            if tuple(local.shape) != shape or str(local.dtype) != f"torch.{each.dtype}":
                raise NotProven(
                    each.line,
                    f"{each.name} is received as {list(shape)} {each.dtype}, and sent as {list(local.shape)} {local.dtype}",
                )
            if each.gradient != local.requires_grad:
                sent, needed = ("", "not ") if each.gradient else ("not ", "")
                raise NotProven(each.line, f"{each.name}: a gradient is {sent}sent back, and {needed}needed")
            yield each.name, replace(found, tensor=replace(found.tensor, local=meta_tensor(shape, each.dtype, each.gradient)))

    def _returned(self, forward: ast.FunctionDef, variables: Mapping[str, Passed]) -> list[tuple[Passed, bool]]:
        """The values of the return statement, and whether each is detached."""
        statement = forward.body[-1]
        if not isinstance(statement, ast.Return) or statement.value is None:
            raise refuse(forward, "a forward ends with what it returns")
        out = []
        for item in statement.value.elts if isinstance(statement.value, ast.Tuple) else [statement.value]:
            text = ast.unparse(item)
            name = text.removesuffix(".detach()")
            if name not in variables:
                raise refuse(item, f"{text[:60]} is no variable of the forward")
            out.append((variables[name], name != text))
        return out

    def _results(self, forward: ast.FunctionDef, variables: Mapping[str, Passed]) -> None:
        """The loss is the model's, equal on all ranks, each of which starts the backward with the whole of its gradient; over
        micro-batches it adds up."""
        (loss, detached), *others = self._returned(forward, variables)
        line = forward.body[-1].lineno
        if loss.identity != self._graph_value(self.graph.loss):
            raise NotProven(line, f"the loss is {loss.identity[1]}, the model's is {self.graph.loss}")
        wanted = tuple(PARTIAL if name == MICRO else "R" if self.graph.forward_only else "I" for name in self.axes.names)
        flows = loss.tensor.local.requires_grad
        if detached or flows == self.graph.forward_only:
            raise NotProven(line, "no gradient flows into the loss" if not flows else "a model that is frozen has a backward")
        same = [a == b or (not flows and equal_kind(a) and equal_kind(b)) for a, b in zip(loss.tensor.kinds, wanted, strict=True)]
        if not all(same):
            raise NotProven(
                line, f"the loss is {words(self.axes, loss.tensor.kinds)} where it must be {words(self.axes, wanted)}"
            )
        placed = self.text.program.flags.get("outputs", {})
        kinds = self.text.program.flags.get("output_kinds", {})
        if len(others) != len(self.graph.outputs) or list(placed) != [each.path for each in self.graph.outputs]:
            raise NotProven(line, "it does not return the outputs of the model that were asked for")
        for (found, cut_off), output in zip(others, self.graph.outputs, strict=True):
            gradient = kinds.get(output.path, output.kind) == "gradient"
            if found.identity != self._graph_value(output.value) or gradient == cut_off:
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
            alike = equal_kind(kind) and equal_kind(other) and (not gradient or kind == other)
            if kind != other and not alike and not ends:
                raise NotProven(line, f"the output {path} is {kind} on {name}, and put together as {other}")

    # -- calls of blocks

    def _run(
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
        for number, call in self._candidates(instance):
            try:
                names = self._arguments(number, call, given)
                inputs = [replace(each.tensor, value=name) for each, name in zip(given, names, strict=True)]
                self._check_names(instance, call, line)
            except NotProven as error:
                reasons.append(error)
                continue
            result = self._block(instance, call, inputs)
            passed = [Passed(self._identity(number, call, each.value), each) for each in result.outputs]
            names_in, names_out = (tuple(each.identity for each in side) for side in (given, passed))
            calls.append(BlockCall(instance.block, result, names_in, names_out))
            return passed
        raise reasons[0] if reasons else NotProven(line, f"the model has no {instance.block} at {instance.prefix or 'its top'}")

    def _candidates(self, instance: Instance) -> Iterator[tuple[int, Call]]:
        """The calls of the graph at this path whose block the class is named after."""
        for number, call in enumerate(self.graph.calls):
            name = re.sub(r"\W", "_", call.block)
            if call.prefix == instance.prefix and re.fullmatch(rf"(Model)?_?{name}((Totals|Repeated)(_\d+)?)*", instance.block):
                yield number, call

    def _arguments(self, number: int, call: Call, given: Sequence[Passed]) -> list[str]:
        """The inputs of the block that the arguments are."""
        block, out, free = self.captured_block(call.block), list[str](), list(range(len(call.inputs)))
        for each in given:
            if each.identity[0] == number:  # a total, which the block has computed before
                out.append(each.identity[1])
                continue
            found = next((k for k in free if self._graph_value(call.inputs[k]) == each.identity), None)
            if found is None:
                raise NotProven(0, f"the model does not pass {each.identity[1]} to {call.block} at {call.prefix or 'its top'}")
            free.remove(found)
            out.append(block.name(block.block.inputs[found].name))
        return out

    def _identity(self, number: int, call: Call, value: str) -> Identity:
        block = self.captured_block(call.block)
        for slot, name in enumerate(block.block.outputs):
            if block.name(name) == value:
                return self._graph_value(call.outputs[slot])
        return number, value

    def _check_names(self, instance: Instance, call: Call, line: int) -> None:
        """Parameters have the original names that the model's call reads, and equal placements wherever they are read."""
        block, text = self.graph.block(call.block), self.text.blocks[instance.block]
        paths = {parameter.path: name for parameter, name in zip(block.parameters, call.parameters, strict=True)}
        for stored in text.stored:
            name = instance.name_of(stored.path)
            if paths.get(stored.path) != name:
                raise NotProven(
                    line, f"{instance.block} at {instance.prefix or 'the top'} reads {name}, the model {paths.get(stored.path)}"
                )
            kinds = self.stored_kinds(stored.shape, stored.places, text.line)
            if self.result.parameters.setdefault(name, kinds) != kinds:
                raise NotProven(text.line, f"{name} is stored in two ways: the parts of it would be summed as if they were alike")

    def stored_kinds(self, shape: Sequence[int], places: Mapping[str, str], line: int) -> Kinds:
        """A parameter is invariant on model axes. Over data ranks and micro-batches the runtime adds its gradients up: there it
        is replicated."""
        otherwise: dict[str, Kind] = {name: "R" if name in (DATA_AXIS, MICRO) else "I" for name in self.axes.names}
        if set(places) & {DATA_AXIS, MICRO}:
            raise NotProven(line, "parameters are sharded over data ranks by the runtime, and not by their placement")
        try:
            return self.axes.placed(tuple(shape), places, otherwise)
        except ValueError as error:
            raise NotProven(line, str(error)) from None

    def _block(self, instance: Instance, call: Call, inputs: Sequence[PlacedTensor]) -> BlockResult:
        """The proof of a block for inputs of these kinds."""
        text = self.text.blocks[instance.block]
        self.used.add(instance.block)
        key = (instance.block, call.block, *((x.value, x.kinds, x.local.dtype, x.local.requires_grad) for x in inputs))
        if key not in self.result.blocks:
            captured = self.captured_block(call.block)
            by_path = {parameter.path: parameter for parameter in captured.block.parameters}
            parameters = {}
            for stored in text.stored:
                parameter = by_path[stored.path]
                value = captured.name(parameter.value.name)
                same = stored.trainable == parameter.trainable and stored.buffer == parameter.buffer
                if tuple(stored.shape) != captured.shape(value) or not same:
                    raise NotProven(text.line, f"{stored.path} is not the model's {parameter.path}")
                kinds = self.stored_kinds(stored.shape, stored.places, text.line)
                gradient = stored.trainable and not stored.buffer and not self.graph.forward_only
                tensor = self._tensor(value, stored.shape, kinds, stored.dtype, gradient, text.line)
                attribute = attribute_of(stored.path)
                if attribute in parameters:
                    raise NotProven(text.line, f"two parameters are the attribute {attribute}")
                parameters[attribute] = replace(tensor, stored=stored.dtype != parameter.value.dtype)
            proof = BlockProof(text, captured, self.axes, self.axis_names, parameters, self.graph.forward_only, self.examples)
            self.result.blocks[key] = proof.check(inputs)
        return self.result.blocks[key]


def attribute_of(path: str) -> str:
    """The attribute of a parameter. The runtime has the same rule, and adds ``_`` to names that it has itself."""
    import torch

    name = re.sub(r"\W", "_", path)
    if name[0].isdigit():
        return f"p{name}"
    return f"{name}_" if hasattr(torch.nn.Module, name) or name in _TAKEN else name


_TAKEN = frozenset(
    words_of("""mesh prefix original_names zero recompute selective_recompute uses_rng training_noise batch_statistics specs
    training split_backward shared_parameters blocks roots position precision mesh_axes micro_batches zero_group totals count
    loss_dtype weight_versions offload_optimizer input_placements input_shapes input_dtypes positional arguments constants
    defaults outputs batch_dims reduce_dtype forward_only chunks boundaries schedule batch_inputs micro_batch_size
    weight_grads all_chunks own_chunks chunk_stages actions output_kinds has_loss differentiable_inputs state_program""")
)
__all__ = ["AxisName", "ProgramProof", "ProgramResult"]
