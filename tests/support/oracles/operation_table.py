"""The section of ``docs/models.md`` about operations that every rank computes whole; as a script, writes it."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[3])]

from autopar.capture.tracing.decompose import COMPOSITE, TABLED
from autopar.rules.registry import default_registry
from autopar.rules.table.aten import WHOLE
from support.oracles.operation_samples import sampled_operations

DOCUMENT = Path(__file__).parents[3] / "docs" / "models.md"
HEAD = "## Operations that every rank computes whole"
_WIDTH = 138
KNOWN_BY_OTHER_NAMES = ("view", "_unsafe_view", "native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update")
"""Capture writes them as operations that have rules."""


def by_nature() -> list[str]:
    """Operations of the table that never shard."""
    return sorted(WHOLE.split())


def without_rule() -> list[str]:
    """Operations that torch's own tests have samples for, that the table does not know, and that capture does not rewrite."""
    registry, rewritten = default_registry(), {*COMPOSITE.split(), *TABLED.split(), *KNOWN_BY_OTHER_NAMES}
    names = {info.aten_name or info.name.replace(".", "_") for info in sampled_operations()}
    out = []
    for name in sorted(names - rewritten):
        packet = getattr(torch.ops.aten, name, None)
        overloads = [] if packet is None else [(each, getattr(packet, each)) for each in packet.overloads()]
        ops = [f"aten.{name}" if each == "default" else f"aten.{name}.{each}" for each, op in overloads if _is_plain(op)]
        if ops and all(registry.rule(op) is None for op in ops):
            out.append(name)
    return out


def _is_plain(op: torch._ops.OpOverload) -> bool:
    """Whether it takes and gives tensors, writes into nothing, and has sizes that do not depend on data."""
    schema, odd = op._schema, {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output, torch.Tag.nondeterministic_seeded}
    takes = any("Tensor" in str(each.type) for each in schema.arguments)
    return takes and not schema.is_mutable and any("Tensor" in str(each.type) for each in schema.returns) and not odd & set(op.tags)


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
            "`python tests/support/oracles/operation_table.py` writes this section from the rules; `make test` compares it.",
            "A model may call all of them: every rank of an axis then computes the whole operation, on gathered tensors, and",
            "`autopar doctor` names the line. `autopar.register_rule` takes a rule of your own ([extending.md](extending.md)).",
            "",
            "By nature, since each result reads everything, or since they are small:",
            "",
            *_wrapped(by_nature()),
            "",
            "For lack of a rule, of the operations that torch's own tests have samples for:",
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
