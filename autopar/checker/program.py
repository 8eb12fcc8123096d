"""The proof of a whole program: its forward or its model chunks, totals over micro-batches, and every parameter."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import replace

from autopar.checker.block_calls import CallsProof, ProgramResult
from autopar.checker.blocks.local_run import meta_tensor
from autopar.checker.captured import GraphCalls
from autopar.checker.interface import Passed, ProgramInterface
from autopar.checker.reader import Reader
from autopar.checker.shards import MICRO, PARTIAL, Axes, NotProven, words
from autopar.checker.text import CallsText, ProgramText, arguments_of, refuse
from autopar.ir.graph import Graph
from autopar.ir.mesh import DATA_AXIS
from autopar.ir.pipeline.stage_values import values_with_gradients
from autopar.ir.plan import Candidate


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
        self.axes = Axes.of(mesh, self.micro_batches)
        self.axis_names = frozenset(mesh)
        calls = GraphCalls(graph, candidate)
        self.interface = ProgramInterface(text.program, graph, candidate, self.axes, calls)
        self.interface.check_mesh(mesh, self.micro_batches)
        self.with_gradients = values_with_gradients(graph)
        self.blocks = CallsProof(text, self.interface, calls, self.axis_names, self.examples)

    def check(self) -> ProgramResult:
        program = self.text.program
        self.interface.check_flags()
        inputs = {value.name: self.interface.input(value) for value in self.graph.inputs}
        totals = self._totals(inputs)
        if self.text.chunks:
            self._chunks(inputs, totals)
        else:
            self._end(program, self.blocks.run(program, self._forward(program), inputs, totals))
        unused = set(self.text.blocks) - self.blocks.used
        if unused:
            raise NotProven(self.text.blocks[min(unused)].line, f"nothing calls {min(unused)}")
        missing = {name for name, parameter in self.graph.parameters().items() if parameter.trainable and not parameter.buffer}
        missing -= set(self.blocks.result.parameters)
        if missing:
            raise NotProven(program.line, f"the program does not have the parameter {min(missing)}")
        return self.blocks.result

    def _totals(self, inputs: Mapping[str, Passed]) -> dict[str, Passed]:
        """What ``count`` returns, after the runtime has reduced it over the micro-batches."""
        program = self.text.program
        ops, method = program.flags.get("totals", {}), program.methods.get("count")
        if method is None:
            if ops:
                raise NotProven(program.line, "`totals` are reduced, and nothing counts them")
            return {}
        variables = self.blocks.run(program, method, dict(inputs), {})
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

    @staticmethod
    def _forward(owner: CallsText) -> ast.FunctionDef:
        if "forward" not in owner.methods:
            raise NotProven(owner.line, f"{owner.name} has no forward")
        return owner.methods["forward"]

    def _end(self, owner: CallsText, variables: Mapping[str, Passed]) -> None:
        forward = self._forward(owner)
        self.interface.check_results(self._returned(forward, variables), forward.body[-1].lineno)

    def _chunks(self, inputs: dict[str, Passed], totals: dict[str, Passed]) -> None:
        if len(self.text.boundaries) != len(self.text.chunks) - 1:
            raise NotProven(self.text.program.line, f"{len(self.text.chunks)} chunks have {len(self.text.boundaries)} boundaries")
        self._micro_batch_size(inputs)
        received: dict[str, Passed] = {}
        for number, chunk in enumerate(self.text.chunks):
            forward, named = self._forward(chunk), chunk.flags.get("batch_inputs", ())
            unknown = [name for name in named if name not in inputs and name not in totals]
            if unknown or set(arguments_of(forward)) != {*received, *named}:
                takes, gets = (", ".join(each) for each in (arguments_of(forward), (*received, *named)))
                raise refuse(forward, f"{chunk.name} takes {takes}, and gets {gets}")
            variables = self.blocks.run(chunk, forward, {**{name: (totals | inputs)[name] for name in named}, **received}, {})
            if number + 1 == len(self.text.chunks):
                self._end(chunk, variables)
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
            if each.gradient not in self._gradients(found):
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

    def _gradients(self, sent: Passed) -> set[bool]:
        """Whether the loss sends a gradient into a value: both where one of equal values is detached, and another is not."""
        calls = self.interface.calls
        names = (name for call in self.graph.calls for name in call.outputs if calls.value(name) == sent.identity)
        return {sent.tensor.local.requires_grad and name in self.with_gradients for name in names}
