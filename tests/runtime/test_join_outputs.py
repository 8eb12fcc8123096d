"""Outputs of micro-batches, put together on every rank, are the rows of the whole batch in their order, however they are cut."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.harness.rank_pool import RankPool

ROWS = 48
CASES = [
    ({"dp": "S(0)", "ep": "S(0)"}, 1), ({"dp": "S(0)", "ep": "S(0)"}, 2), ({"dp": "S(0,3)"}, 1), ({"dp": "S(0,3)"}, 4),
    ({"dp": "S(0)", "ep": "S(1)"}, 2), ({"dp": "S(0,3)", "ep": "S(0,3)"}, 2), ({"dp": "S(0)", "ep": "S(0,6)"}, 2),
    ({"dp": "R", "ep": "S(0)"}, 2), ({"dp": "S(1)", "ep": "S(0,2)"}, 1),
]  # fmt: skip


def part(full: torch.Tensor, text: str, size: int, coordinate: int, outer: int) -> torch.Tensor:
    """What a rank of one axis has: its chunk of every piece; pieces within what `outer` ranks have cut are fewer."""
    if not text.startswith("S"):
        return full
    dim, _, pieces = text[2:-1].partition(",")
    count = max(1, int(pieces or 1) // outer)
    return full.unflatten(int(dim), (count, -1)).chunk(size, int(dim) + 1)[coordinate].flatten(int(dim), int(dim) + 1)


def put_together(where: dict[str, str], parts: int) -> bool:
    """On a rank: micro-batches are consecutive examples of a data rank, within every piece of a compound dimension."""
    from autopar.runtime.device.mesh import MeshHandle
    from autopar.runtime.step.outputs import join_micro_batches, returned_outputs

    mesh = MeshHandle({"dp": 2, "ep": 2})
    full = torch.arange(ROWS * 4.0).view(ROWS, 4)
    dim, _, pieces = where["dp"][2:-1].partition(",") if where["dp"].startswith("S") else ("0", "", "1")
    mine = part(full, where["dp"], 2, mesh.dp.coordinate, 1)
    if where["dp"] == "R":
        micro = [mine] * parts
    else:
        split = mine.unflatten(int(dim), (int(pieces or 1), -1))
        micro = [each.flatten(int(dim), int(dim) + 1) for each in split.chunk(parts, int(dim) + 1)]
    nested = where["dp"].startswith("S") and where.get("ep", "R")[:3] == where["dp"][:3]
    outer = 2 if nested and where["ep"] != where["dp"] else 1
    local = [part(each, where.get("ep", "R"), 2, mesh.ep.coordinate, outer) for each in micro]
    program: Any = SimpleNamespace(outputs={"y": where}, output_kinds={}, micro_batches=parts, mesh=mesh, forward_only=False)
    (found,) = returned_outputs(program, join_micro_batches(program, [[each] for each in local])).values()
    assert found is not None
    return torch.equal(found.full_tensor(), full)


@pytest.mark.parametrize(("where", "parts"), CASES, ids=str)
def test_rows_keep_their_order(where: dict[str, str], parts: int, ranks: RankPool) -> None:
    assert all(ranks.run(put_together, where, parts))
