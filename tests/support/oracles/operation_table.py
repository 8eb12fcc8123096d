"""The section of ``docs/models.md`` about operations that every rank computes whole; as a script, writes it."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from autopar.capture.tracing.decomposition.program import COMPOSITE, TABLED
from autopar.operations.factories import whole_rule
from autopar.rules.registry import default_registry

DOCUMENT = Path(__file__).parents[3] / "docs" / "models.md"
HEAD = "## Operations that every rank computes whole"
_WIDTH = 138


def by_nature() -> list[str]:
    """Operations of the table that never shard, but for plain numbers."""
    rules, plain = default_registry().rules, ("aten.arange", "aten.scalar_tensor", "ap.constant")
    return sorted(op.removeprefix("aten.") for op, rule in rules.items() if rule.line is whole_rule and op not in plain)


def without_rule() -> list[str]:
    """Operations of ATen's core opset that the table does not know, and that capture does not take apart."""
    registry, apart = default_registry(), {*COMPOSITE.split(), *TABLED.split()}
    out = []
    for name in dir(torch.ops.aten):
        if name.startswith("sym_"):  # of sizes; and `dir` lists them as they are met
            continue
        packet = getattr(torch.ops.aten, name)
        overloads = packet.overloads() if hasattr(packet, "overloads") else []
        core = [each for each in overloads if torch.Tag.core in getattr(packet, each).tags]
        functional = [each for each in core if not getattr(packet, each)._schema.is_mutable]
        ops = [f"aten.{name}" if each == "default" else f"aten.{name}.{each}" for each in functional]
        if ops and name not in apart and all(registry.rule(op) is None for op in ops):
            out.append(name)
    return sorted(out)


def _wrapped(names: list[str]) -> list[str]:
    lines, current = [], ""
    for name in names:
        word = f"`{name}`"
        if current and len(current) + len(word) + 2 > _WIDTH:
            lines.append(f"{current},")
            current = word
        else:
            current = f"{current}, {word}" if current else word
    return [*lines, current]


def section() -> str:
    """The text, from its headline to its last line."""
    return "\n".join(
        [
            HEAD,
            "",
            "`python tests/support/oracles/operation_table.py` writes this section from the rules; "
            "`make test-submit` compares it.",
            "A model may call all of them: every rank of an axis then computes the whole operation, on gathered tensors, and",
            "`autopar doctor` names the line. `autopar.register_rule` takes a rule of your own ([extending.md](extending.md)).",
            "",
            "By nature, since each result reads everything, or since they are small:",
            "",
            *_wrapped(by_nature()),
            "",
            "For lack of a rule, of ATen's core opset (some are never met: export writes them in another way):",
            "",
            *_wrapped(without_rule()),
        ]
    )


def written() -> str:
    """What the document has."""
    text = DOCUMENT.read_text()
    return text[text.index(HEAD) :].rstrip() if HEAD in text else ""


if __name__ == "__main__":
    before = DOCUMENT.read_text()
    kept = before[: before.index(HEAD)].rstrip() if HEAD in before else before.rstrip()
    DOCUMENT.write_text(f"{kept}\n\n{section()}\n")
    sys.stdout.write(f"{len(by_nature())} by nature, {len(without_rule())} without a rule\n")
