"""The product's source files, each parsed once."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def syntax_tree(path: Path) -> ast.Module:
    """The tree of a file, which nobody changes."""
    return ast.parse(path.read_text())


@cache
def syntax_nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file's tree."""
    return tuple(ast.walk(syntax_tree(path)))
