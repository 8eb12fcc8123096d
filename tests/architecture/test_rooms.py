"""Rooms: small folders, one import direction between the rooms of a part, no file without a room, one name for one thing."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import networkx
from support.sources import syntax_nodes, syntax_tree

ROOT = Path(__file__).parents[2]
LIMIT = 15
"""Modules of a folder, beside its ``__init__``."""

ROOMS = {
    "cost_models": ("formulas", "hardware", "tensors", "comm", "compute", "state", "step", "breakdown", "calibrate"),
    "solve": ("problem", "space", "ilp", "fixed", "bounds", "mesh", "pipeline"),
    "runtime": (
        *("device", "comm", "ops", "state", "experts", "step", "pipeline", "plain", "checkpoint", "pretrained", "transfer"),
        "report",
    ),
}
"""Of the three large parts, each room imports those before it; files beside the rooms are described in HIGH and LOW."""

POSITIONAL_LIMIT = 8
OLD_WORDS = (
    *("again", "room", "behind", "moments", "moment", "kept", "parked", "later", "hopeless", "smallest", "keeping", "replay"),
    *("replays", "moves", "arcs", "arc", "routes", "traffic", "waited", "pieces", "piece"),
)
"""Words of our own that the field has terms for: recompute, memory budget, overlap, memory events, saved, offloaded, ..."""


def folders() -> list[Path]:
    parts = [ROOT / "autopar", ROOT / "passes", ROOT / "cost_models", ROOT / "tests"]
    found = {path.parent for part in parts for path in part.rglob("*.py") if "__pycache__" not in path.parts}
    return sorted(folder for folder in found if not any(parent.is_symlink() for parent in (folder, *folder.parents)))


def sources() -> list[Path]:
    return [path for folder in folders() if "tests" not in folder.parts for path in sorted(folder.glob("*.py"))]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_no_folder_grows_past_the_limit() -> None:
    modules = {
        name_of(folder): sum(path.name not in ("__init__.py", "conftest.py") for path in folder.glob("*.py"))
        for folder in folders()
    }
    wrong = [f"{name} has {count} modules: divide it into rooms" for name, count in modules.items() if count > LIMIT]
    assert not wrong, "; ".join(wrong)


def test_every_room_says_what_is_in_it() -> None:
    rooms = [path for path in sources() if path.name == "__init__.py"]
    wrong = [name_of(path) for path in rooms if len(ast.get_docstring(syntax_tree(path)) or "") <= 80]
    assert not wrong, f"{wrong}: say in a few sentences what is in the room, where to start, and what it imports"


def part_of(path: Path) -> tuple[str, tuple[str, ...]]:
    """``autopar/solve/ilp/decode.py`` -> ("solve", ("ilp", "decode"))."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "autopar" else parts
    return parts[0], parts[1:]


def imported(path: Path) -> Iterator[str]:
    """Absolute names without ``autopar.``; what only type checkers import counts too."""
    part, rest = part_of(path)
    package = [part, *(rest if path.name == "__init__.py" else rest[:-1])]
    for node in syntax_nodes(path):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *(node.module or "").split(".")]).strip(".").removeprefix("autopar.")
            yield stem
            yield from (f"{stem}.{alias.name}" for alias in node.names)


def test_rooms_import_one_way() -> None:
    wrong = []
    for path in sources():
        part, rest = part_of(path)
        order = ROOMS.get(part, ())
        if not rest or rest[0] not in order:
            continue
        for name in imported(path):
            words = name.split(".")
            if words[0] == part and len(words) > 1 and words[1] in order and order.index(words[1]) > order.index(rest[0]):
                wrong.append(f"{name_of(path)} imports {name}: rooms import one way, {order}")
    assert not wrong, "\n".join(wrong)


def test_no_file_imports_itself_round_a_circle() -> None:
    graph = networkx.DiGraph()
    modules = {".".join((part, *rest)) for part, rest in map(part_of, sources())}
    for path in sources():
        part, rest = part_of(path)
        here = ".".join((part, *rest)).removesuffix(".__init__")
        graph.add_edges_from((here, name) for name in imported(path) if name in modules and name != here)
    circles = [sorted(each) for each in networkx.strongly_connected_components(graph) if len(each) > 1]
    assert not circles, f"files that import each other: {circles}"


def definitions() -> Iterator[tuple[Path, ast.ClassDef | ast.FunctionDef]]:
    for path in sources():
        for node in syntax_nodes(path):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                yield path, node


def test_no_two_public_classes_of_one_name() -> None:
    where = defaultdict(set)
    for path in sources():
        for node in syntax_tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].add(name_of(path))
    twice = {name: sorted(paths) for name, paths in where.items() if len(paths) > 1}
    assert not twice, f"one name, one thing: {twice}"


def words_of(name: str) -> list[str]:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("_").split("_")


def test_no_words_of_our_own_in_names() -> None:
    """Names of files, classes, functions, parameters and fields."""
    found = []
    for path in sources():
        found += [name_of(path)] if set(words_of(path.stem)) & set(OLD_WORDS) else []
    for path, node in definitions():
        names = [node.name]
        if isinstance(node, ast.FunctionDef):
            names += [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        else:
            names += [
                each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
            ]
        found += [f"{name_of(path)}:{node.lineno} {name}" for name in names if set(words_of(name)) & set(OLD_WORDS)]
    assert not found, "write the field's words (docs/glossary.md): " + "; ".join(found)


SPOKEN_ROOMS = ("runtime", "capture", "variants", "integrations", "verification", "cli")
"""Parts whose names and docstrings are held to the tests below."""

PARTICIPLES = ("found", "made", "told", "given", "said", "taken", "known", "mine")
FRAGMENT = re.compile(
    r"(Of|What|By|Without|How|Those|Where|That|Which|Who|When|Also|For|From|In|On|At|With|As|Before|After|Called)\b"
)
"""First words of docstrings that only the signature explains."""


def test_docstrings_stand_alone() -> None:
    found = []
    for path in sources():
        for node in syntax_nodes(path) if part_of(path)[0] in SPOKEN_ROOMS else ():
            text = ast.get_docstring(node) if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) else None
            if text and FRAGMENT.match(text):
                found.append(f"{name_of(path)}: {text[:60]}")
    assert not found, 'begin with an imperative or a noun ("Return the seconds of ..."): ' + "; ".join(found)


def test_names_are_no_participles() -> None:
    """Names of files, classes, functions and public attributes."""
    found = []
    for path in (path for path in sources() if part_of(path)[0] in SPOKEN_ROOMS):
        nodes = list(syntax_nodes(path))
        names = [path.stem, *(node.name for node in nodes if isinstance(node, (ast.ClassDef, ast.FunctionDef)))]
        names += [node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
        for node in nodes:
            for each in node.body if isinstance(node, ast.ClassDef) else ():
                names += [each.target.id] if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) else []
        found += [f"{name_of(path)} {name}" for name in names if set(words_of(name)) & set(PARTICIPLES)]
    assert set(found) <= {"autopar/cli/parser.py parse_known_args"}, "write a noun: " + "; ".join(found)


def test_no_function_takes_many_positional_arguments() -> None:
    """Beyond that they are keyword-only, or an object. What torch calls back with flat arguments is listed."""
    found = []
    for path, node in definitions():
        if isinstance(node, ast.FunctionDef):
            many = [each.arg for each in (*node.args.posonlyargs, *node.args.args) if each.arg not in ("self", "cls", "ctx")]
            if len(many) > POSITIONAL_LIMIT and (name_of(path), node.name) not in FLAT:
                found.append(f"{name_of(path)}:{node.lineno} {node.name} has {len(many)}")
    assert not found, found


FLAT = {
    ("autopar/ops/library.py", "moe_experts"),
    ("autopar/ops/library.py", "backward"),
    *(("autopar/capture/tracing/flex.py", name) for name in ("_attention", "_block_mask", "written_out")),
}
"""(file, function) whose signature torch or a user's model dictates."""
