"""Questions of a forward's code that its inputs' values do not answer: whether two arguments are one tensor, how a tensor lies in
memory, whether autograd made it. A call is told apart by the answers only where the user's own code asks."""

from __future__ import annotations

import dis
from functools import lru_cache
from types import CodeType

IDENTITY, LAYOUT, LEAF = "identity", "layout", "leaf"
_WORDS = {"id": IDENTITY, "is_contiguous": LAYOUT, "stride": LAYOUT, "is_leaf": LEAF}
_CONSTANTS = ("LOAD_CONST", "LOAD_GLOBAL", "LOAD_NAME")


@lru_cache(maxsize=4096)  # each capture asks for the same code
def questions_of(code: CodeType) -> frozenset[str]:
    """Return what some code asks. ``x is y`` is a question of identity, unlike ``x is None`` and ``kind is dict``."""
    asked = {_WORDS[name] for name in code.co_names if name in _WORDS}
    before = ""
    for each in dis.get_instructions(code):
        if each.opname == "IS_OP" and before not in _CONSTANTS:
            asked.add(IDENTITY)
        before = each.opname
    return frozenset(asked)
