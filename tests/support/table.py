"""README's table of model families: what a plan for dp=2,tp=2 cuts of each.

``python tests/support/table.py [family ...]`` writes it anew (those rows, or all)."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from support.coverage import left_whole, uncut
from support.endtoend import Prepared, plan, prepare
from support.zoo import families

from autopar.solve.search import SearchResult

README = Path(__file__).parents[2] / "README.md"
FORCE = {"dp": 2, "tp": 2}
HEAD = (
    "| family | class | FLOPs cut on tp | traffic cut on tp | what every tp rank computes | notes of the capture |",
    "|---|---|---|---|---|---|",
)


def row(prepared: Prepared, result: SearchResult) -> str:
    """The line of one family."""
    found = left_whole(prepared.graph, result.candidate, "tp")
    never = uncut(prepared.graph, 2)
    whole = [text for text in (found.named(), f"no rule: {', '.join(never.without_rule)}" if never.without_rule else "") if text]
    notes = list(dict.fromkeys(_short(note) for note in prepared.graph.notes))
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
    """What README says, by family."""
    lines = README.read_text().splitlines()
    if HEAD[0] not in lines:
        return {}
    begin = lines.index(HEAD[0]) + len(HEAD)
    end = next((at for at in range(begin, len(lines)) if not lines[at].startswith("|")), len(lines))
    return {line.split("|")[1].strip(): line for line in lines[begin:end]}


def write(made: dict[str, str]) -> None:
    """Puts lines into README's table, in the order of the families."""
    text = README.read_text()
    before = "\n".join([*HEAD, *rows().values()])
    known = rows() | made
    after = "\n".join([*HEAD, *(known[name] for name in families() if name in known)])
    README.write_text(text.replace(before, after))


if __name__ == "__main__":
    for name in sys.argv[1:] or families():
        case = prepare(name)
        write({name: row(case, plan(case, FORCE))})
        print(rows()[name], flush=True)
