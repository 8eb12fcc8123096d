"""Reads the text of a program as data. Whatever is not of the few forms that programs are written in is refused with its line:
nothing that stands here can do anything but call known operations on tensors.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.checker.shards import NotProven, words_of

_IMPORTED = (
    r"torch", r"torch\.nn\.functional", r"torch\.(Tensor|nn)", r"(autopar\.)?runtime\.collectives",
    r"(autopar\.)?runtime\.step\.recompute\.Recompute", r"(autopar\.)?runtime\.module\.(BlockModule|ParameterSpec|Program)",
    r"(autopar\.)?runtime\.pipeline\.stage_modules\.(BoundaryTensor|ModelChunk|PipelineProgram)",
)  # fmt: skip
_NAMES = {
    "torch": "torch", "torch.nn.functional": "F", "torch.Tensor": "Tensor", "torch.nn": "nn", "runtime.collectives": "C",
    "runtime.module.Program": "Base", "runtime.pipeline.stage_modules.PipelineProgram": "Base",
}  # fmt: skip
"""The name that each import has in the text; of all others their own."""


RESERVED = frozenset(("self", "torch", "F", "C", "nn", "Tensor", "recompute", "float", "zip", "super", "range"))
"""Names that texts read, which nothing may take."""
_BASES = frozenset(("BlockModule", "ParameterSpec", "Base", "BoundaryTensor", "ModelChunk", "Recompute"))


@dataclass(frozen=True, slots=True)
class ParameterText:
    """A parameter or buffer: its path in the block, whole shape, dtype in which it is stored, and placement by axis."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    places: Mapping[str, str]
    trainable: bool = True
    buffer: bool = False


@dataclass(frozen=True, slots=True)
class BlockText:
    """The class of a block."""

    name: str
    line: int
    flags: Mapping[str, Any]
    stored: tuple[ParameterText, ...]
    arguments: tuple[str, ...]
    body: tuple[ast.stmt, ...]


@dataclass(frozen=True, slots=True)
class Instance:
    """A block of the model: the class, the module path, and the original names of parameters that are not path + name."""

    block: str
    prefix: str
    names: Mapping[str, str]

    def name_of(self, path: str) -> str:
        """The original name of a parameter."""
        return self.names.get(path, f"{self.prefix}.{path}" if self.prefix else path)


@dataclass(frozen=True, slots=True)
class CallsText:
    """A program or model chunk: its attributes, block modules by attribute (several are those of a loop) and methods."""

    name: str
    line: int
    flags: Mapping[str, Any]
    instances: Mapping[str, tuple[Instance, ...]]
    methods: Mapping[str, ast.FunctionDef]


@dataclass(frozen=True, slots=True)
class ProgramText:
    """The whole text."""

    blocks: Mapping[str, BlockText]
    chunks: tuple[CallsText, ...]
    program: CallsText
    boundaries: tuple[tuple[Boundary, ...], ...] = ()
    schedule: tuple[str, ...] = ()

    def parameters(self) -> Iterator[tuple[BlockText, str, ParameterText]]:
        """Each parameter of each block of the model with its original name."""
        for owner in self.chunks or (self.program,):
            for instance in (each for group in owner.instances.values() for each in group):
                for stored in self.blocks[instance.block].stored:
                    yield self.blocks[instance.block], instance.name_of(stored.path), stored


@dataclass(frozen=True, slots=True)
class Boundary:
    """A tensor between two model chunks: name, local shape (with the name of the size of the batch), dtype, gradient."""

    name: str
    line: int
    shape: ast.expr
    batch: str
    dtype: str
    gradient: bool = True


def refuse(node: ast.AST, reason: str) -> NotProven:
    return NotProven(getattr(node, "lineno", 0), reason)


def read_program(text: str) -> ProgramText:
    """The program of a text. NotProven at the first line that is of no known form."""
    try:
        module = ast.parse(text)
    except (SyntaxError, RecursionError, ValueError) as error:
        raise NotProven(getattr(error, "lineno", 0) or 0, f"this is no Python: {str(error)[:80]}") from None
    blocks: dict[str, BlockText] = {}
    chunks: list[CallsText] = []
    program: CallsText | None = None
    boundaries: tuple[tuple[Boundary, ...], ...] = ()
    for node in module.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            _check_import(node)
        elif isinstance(node, ast.ClassDef) and program is None and not node.decorator_list and not node.keywords:
            base = ast.unparse(node.bases[0]) if len(node.bases) == 1 else ""
            if node.name in RESERVED | _BASES:
                raise refuse(node, f"{node.name} hides a name that programs read")
            if node.name in blocks or node.name in {chunk.name for chunk in chunks}:
                raise refuse(node, f"{node.name} is defined twice")
            if base == "BlockModule":
                blocks[node.name] = _block(node)
            elif base == "ModelChunk":
                chunks.append(_calls(node, blocks)[0])
            elif base == "Base" and node.name == "Program":
                program, boundaries = _calls(node, blocks)
            else:
                raise refuse(node, f"{node.name} is no class of a program")
        elif not _is_docstring(node):
            raise refuse(node, "a program has imports and classes only")
    if program is None:
        raise NotProven(0, "the text has no class Program")
    schedule = program.flags.get("schedule", ())
    if [chunk.name for chunk in chunks] != list(program.flags.get("chunks", ())):
        raise NotProven(program.line, "`chunks` are not the model chunks of the text")
    return ProgramText(blocks, tuple(chunks), program, boundaries, tuple(schedule))


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _check_import(node: ast.Import | ast.ImportFrom) -> None:
    for alias in node.names:
        full = alias.name if isinstance(node, ast.Import) else f"{node.module}.{alias.name}"
        known = any(re.fullmatch(pattern, full) for pattern in _IMPORTED) and getattr(node, "level", 0) == 0
        plain = _NAMES.get(full.removeprefix("autopar."), alias.name)
        if not known or (alias.asname or alias.name) != plain:
            raise refuse(node, f"it imports {full}, which no program does")


STATIC = {"takes_batch": ["staticmethod"]}
"""The decorators of methods that have one."""


def _members(node: ast.ClassDef) -> Iterator[tuple[str, ast.stmt]]:
    """Attributes and methods by name, each once."""
    seen = set[str]()
    for each in node.body:
        if _is_docstring(each):
            continue
        if isinstance(each, ast.Assign) and len(each.targets) == 1 and isinstance(each.targets[0], ast.Name):
            name = each.targets[0].id
        elif isinstance(each, ast.FunctionDef) and [*map(ast.unparse, each.decorator_list)] == STATIC.get(each.name, []):
            name = each.name
        else:
            raise refuse(each, "a class has attributes and methods only")
        if name in seen:
            raise refuse(each, f"{name} is defined twice")
        seen.add(name)
        yield name, each


def arguments_of(function: ast.FunctionDef) -> tuple[str, ...]:
    """The names after ``self``."""
    given = function.args
    names = [each.arg for each in given.args]
    if given.vararg or given.kwarg or given.kwonlyargs or given.defaults or given.posonlyargs or names[:1] != ["self"]:
        raise refuse(function, f"{function.name} has other arguments than programs have")
    if len(set(names)) != len(names) or set(names[1:]) & RESERVED:
        raise refuse(function, f"the arguments of {function.name} hide a name that programs read")
    return tuple(names[1:])


def literal(node: ast.expr) -> Any:
    """The value of a literal."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        raise refuse(node, f"{ast.unparse(node)[:60]} is no literal") from None


def _block(node: ast.ClassDef) -> BlockText:
    flags: dict[str, Any] = {}
    stored: tuple[ParameterText, ...] = ()
    forward: ast.FunctionDef | None = None
    for name, each in _members(node):
        if isinstance(each, ast.FunctionDef):
            if name != "forward":
                raise refuse(each, f"a block has no method {name}")
            forward = each
        elif isinstance(each, ast.Assign) and name == "specs":
            if not isinstance(each.value, ast.Tuple):
                raise refuse(each, "specs are no tuple")
            stored = tuple(map(_stored, each.value.elts))
        elif isinstance(each, ast.Assign):
            if name not in BLOCK_ATTRIBUTES:
                raise refuse(each, f"a block has no attribute {name}")
            flags[name] = literal(each.value)
    if forward is None:
        raise refuse(node, f"{node.name} has no forward")
    return BlockText(node.name, node.lineno, flags, stored, arguments_of(forward), tuple(forward.body))


def _call_of(node: ast.expr, name: str) -> ast.Call:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
        return node
    raise refuse(node, f"this is no {name}")


def _stored(node: ast.expr) -> ParameterText:
    call = _call_of(node, "ParameterSpec")
    if len(call.args) != 4:
        raise refuse(node, "a ParameterSpec has four arguments")
    path, shape, dtype, places = map(literal, call.args)
    more = {str(each.arg): literal(each.value) for each in call.keywords}
    if set(more) - {"trainable", "buffer", "persistent"}:
        raise refuse(node, f"a ParameterSpec has no {', '.join(sorted(set(more)))}")
    return ParameterText(path, tuple(shape), dtype, places, more.get("trainable", True), more.get("buffer", False))


BLOCK_ATTRIBUTES = frozenset(words_of("zero recompute selective_recompute uses_rng training_noise writes_buffers"))
ATTRIBUTES = frozenset(
    words_of("""mesh_axes input_placements input_shapes input_dtypes differentiable_inputs positional arguments constants defaults
    outputs output_kinds has_loss forward_only batch_dims precision reduce_dtype micro_batches zero_group
    offload_optimizer totals chunks boundaries schedule weight_versions loss_dtype batch_inputs""")
)


def _calls(node: ast.ClassDef, blocks: Mapping[str, BlockText]) -> tuple[CallsText, tuple[tuple[Boundary, ...], ...]]:
    flags: dict[str, Any] = {}
    instances: dict[str, tuple[Instance, ...]] = {}
    methods: dict[str, ast.FunctionDef] = {}
    boundaries: tuple[tuple[Boundary, ...], ...] = ()
    for name, each in _members(node):
        if isinstance(each, ast.FunctionDef):
            if name == "__init__":
                instances = dict(_instances(each, blocks))
            elif name in ("forward", "count", "micro_batch_size", "takes_batch"):
                methods[name] = each
            else:
                raise refuse(each, f"a program has no method {name}")
        elif isinstance(each, ast.Assign):
            if name not in ATTRIBUTES:
                raise refuse(each, f"a program has no attribute {name}")
            if name == "boundaries":
                boundaries = tuple(tuple(map(_boundary, group.elts)) for group in _tuple(each.value))
            elif name == "chunks":
                flags[name] = tuple(ast.unparse(item) for item in _tuple(each.value, ast.Name))
            else:
                flags[name] = literal(each.value)
    return CallsText(node.name, node.lineno, flags, instances, methods), boundaries


def _tuple(node: ast.expr, kind: type[ast.expr] = ast.Tuple) -> Sequence[Any]:
    if not isinstance(node, ast.Tuple) or not all(isinstance(item, kind) for item in node.elts):
        raise refuse(node, "this is no tuple of what programs have here")
    return node.elts


def _boundary(node: ast.expr) -> Boundary:
    call = _call_of(node, "BoundaryTensor")
    more = {each.arg: literal(each.value) for each in call.keywords}
    if len(call.args) != 3 or set(more) - {"gradient"} or not isinstance(call.args[1], ast.Lambda):
        raise refuse(node, "a BoundaryTensor has a name, a shape and a dtype")
    shape = call.args[1]
    (batch,) = (each.arg for each in shape.args.args)
    return Boundary(literal(call.args[0]), node.lineno, shape.body, batch, literal(call.args[2]), more.get("gradient", True))


def _instances(init: ast.FunctionDef, blocks: Mapping[str, BlockText]) -> Iterator[tuple[str, tuple[Instance, ...]]]:
    """The block modules that ``__init__`` makes."""
    if arguments_of(init) != ("mesh",) or ast.unparse(init.body[0]) != "super().__init__(mesh)":
        raise refuse(init, "__init__ does not begin as those of programs do")
    seen = set[str]()
    for each in init.body[1:]:
        target = each.targets[0] if isinstance(each, ast.Assign) and len(each.targets) == 1 else None
        if not isinstance(each, ast.Assign) or not isinstance(target, ast.Attribute) or ast.unparse(target.value) != "self":
            raise refuse(each, "__init__ makes blocks only")
        if target.attr in seen:
            raise refuse(each, f"{target.attr} is made twice")
        seen.add(target.attr)
        value = each.value
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "nn.ModuleList":
            (inside,) = value.args
            items = list(_repeated(inside, blocks)) if isinstance(inside, ast.GeneratorExp) else None
            yield target.attr, tuple(items if items is not None else [_instance(x, blocks) for x in getattr(inside, "elts", ())])
        else:
            yield target.attr, (_instance(value, blocks),)


def _repeated(node: ast.GeneratorExp, blocks: Mapping[str, BlockText]) -> Iterator[Instance]:
    """``Layer(mesh, f"layers.{i}") for i in range(2)``."""
    (loop,) = node.generators
    if loop.ifs or ast.unparse(loop.target) != "i":
        raise refuse(node, "this is no list of blocks")
    for number in range(*(literal(each) for each in _call_of(loop.iter, "range").args)):
        yield _instance(node.elt, blocks, number)


def _instance(node: ast.expr, blocks: Mapping[str, BlockText], number: int | None = None) -> Instance:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in blocks or node.keywords:
        raise refuse(node, f"{ast.unparse(node)[:60]} makes no block of this text")
    if len(node.args) not in (2, 3) or ast.unparse(node.args[0]) != "mesh":
        raise refuse(node, "a block takes the mesh, its path, and names")
    prefix = node.args[1]
    if isinstance(prefix, ast.JoinedStr) and number is not None:
        words = [str(number) if isinstance(part, ast.FormattedValue) else str(literal(part)) for part in prefix.values]
        path = "".join(words)
    else:
        path = str(literal(prefix))
    return Instance(node.func.id, path, literal(node.args[2]) if len(node.args) > 2 else {})
