"""One record per operation: `autopar.operations` names them, and every other room asks it. Read from the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from support.sources import syntax_tree

from autopar.operations.table import operations

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"(aten|ap)\.[a-z_]\w*(\.\w+)*")
"""An operation of a graph. (`torch.ops.aten.add`, and ``ap::opaque``, under which it is registered, are torch's.)"""

AT_HOME = ("autopar/operations", "autopar/capture/normalize", "autopar/checker")
"""The records; what matches names of torch to rewrite them; and the checker, which judges the records by a table of its own."""

NOT_YET = {
    "autopar/ir/describe.py": "words for people about a plan, which ir.plan_file writes: ir lies below the records",
    "autopar/ir/graph.py": "draws_masks, which ir.batch_totals asks",
    "autopar/ir/regions.py": "the two operations that have blocks inside, a part of the graph's form",
    "autopar/runtime/ops/control_flow.py": "runs what is inside of regions; the runtime stands alone",
    "autopar/capture/tracing/guards.py": "rrelu, random without torch's tag, which no graph has",
    "autopar/capture/tracing/data/concrete_values.py": "functions that are computed while tracing, before there is a graph",
}
"""Files that name operations, with the reason. None is to be added."""


def sources() -> Iterator[Path]:
    for part in ("autopar", "passes", "cost_models"):
        for path in sorted((ROOT / part).rglob("*.py")):
            if not any(parent.is_symlink() for parent in path.parents) and not name_of(path).startswith(AT_HOME):
                yield path


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def operations_named(path: Path) -> list[str]:
    """The names in strings that are no docstrings: whole (``aten.add``), or lists of at least three (``add sub mul``)."""
    tree = syntax_tree(path)
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    packets = {name.split(".")[1] for name in operations()}
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            words = node.value.split()
            found += filter(NAME.fullmatch, words)
            known = [word for word in words if word in packets]
            found += known if len(known) > 2 and 2 * len(known) > len(words) else []
    return found


def test_no_other_file_names_an_operation() -> None:
    named = {name_of(path): operations_named(path) for path in sources() if name_of(path) not in NOT_YET}
    wrong = [f"{name} names {each}" for name, each in named.items() if each]
    assert not wrong, "ask autopar.operations.table.operation, or give its record a trait: " + "; ".join(wrong)


def test_exceptions_are_needed() -> None:
    unneeded = [name for name in NOT_YET if not operations_named(ROOT / name)]
    assert not unneeded, f"{unneeded} name no operation any more: take them from the list"
