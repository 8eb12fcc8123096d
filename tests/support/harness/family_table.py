"""The table of model families in docs/models.md: what a plan for dp=2,tp=2 cuts of each.

``python tests/support/harness/family_table.py [family ...]`` writes it anew (those rows, or all)."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from autopar.ir.batch_totals import FIXED_AT
from autopar.solve.result import PlanResult
from support.harness.end_to_end import Prepared, plan, prepare
from support.models.model_families import families
from support.oracles.sharded_work import never_sharded, not_sharded

DOCUMENT = Path(__file__).parents[3] / "docs" / "models.md"
FORCE = {"dp": 2, "tp": 2}
HEAD = (
    "| family | class | FLOPs cut on tp | traffic cut on tp | what every tp rank computes | notes of the capture |",
    "|---|---|---|---|---|---|",
)


def row(prepared: Prepared, result: PlanResult) -> str:
    """The line of one family."""
    found = not_sharded(prepared.graph, result.candidate, "tp")
    never = never_sharded(prepared.graph, 2)
    whole = [text for text in (found.named(), f"no rule: {', '.join(never.without_rule)}" if never.without_rule else "") if text]
    notes = list(dict.fromkeys(_short(note) for note in prepared.graph.notes if not note.startswith(FIXED_AT)))
    if not prepared.graph.batch_is_symbolic:
        notes.insert(0, "the batch size is fixed")
    cells = (
        prepared.name, families()[prepared.name].model, _percent(1 - found.share), _percent(1 - found.traffic_share),
        "; ".join(whole) or "-", "; ".join(notes) or "-",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _short(note: str) -> str:
    """Without the shape."""
    before, _, after = note.partition(" (")
    return before + after.partition(")")[2]


def rows() -> dict[str, str]:
    """What the document says, by family."""
    lines = DOCUMENT.read_text().splitlines()
    if HEAD[0] not in lines:
        return {}
    begin = lines.index(HEAD[0]) + len(HEAD)
    end = next((at for at in range(begin, len(lines)) if not lines[at].startswith("|")), len(lines))
    return {line.split("|")[1].strip(): line for line in lines[begin:end]}


def write(made: dict[str, str]) -> None:
    """Puts lines into the table, in the order of the families."""
    text = DOCUMENT.read_text()
    before = "\n".join([*HEAD, *rows().values()])
    known = rows() | made
    after = "\n".join([*HEAD, *(known[name] for name in families() if name in known)])
    DOCUMENT.write_text(text.replace(before, after))


if __name__ == "__main__":
    for name in sys.argv[1:] or families():
        case = prepare(name)
        write({name: row(case, plan(case, FORCE))})
        print(rows()[name], flush=True)
