"""A backward that raises (out of memory, and the script leaves out the batch) leaves nothing to the steps after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.harness.comparison import differences
from support.harness.end_to_end import prepare
from support.harness.rank_pool import RankPool
from support.harness.training_loop import full_gradients, parallel_model
from support.plans.drawn_candidates import drawn_candidate
from support.plans.mesh import mesh_of
from torch import Tensor

from autopar.ir.plan import Precision
from autopar.program.build import program_text

TIMES = 6
"""The places in the backward where it raises."""


class Full(Exception):
    """In the place of an error of the device."""


def unpack_until(model: Any, batch: Mapping[str, Tensor], last: int) -> int:
    """A forward and backward that raises at its `last` saved tensor; return how many it took."""
    count = 0

    def unpack(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        if count == last:
            raise Full
        return x

    try:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            model(**batch).backward()
    except Full:
        pass
    return count


def steps_after_failures(text: str, state: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> list[Any]:
    """On a rank: loss and gradients of the steps after backwards that raised at some places."""
    parallel = parallel_model(text, state)
    out, total = [], unpack_until(parallel, batch, 0)
    for place in range(TIMES):
        assert unpack_until(parallel, batch, 1 + place * (total - 1) // (TIMES - 1))
        for parameter in parallel.parameters():
            parameter.grad = None
        loss = parallel(**batch)
        loss.backward()
        out.append((loss.item(), full_gradients(parallel)))
    return out


@pytest.mark.parametrize(("zero", "micro_batches"), [(0, 2), (1, 1), (3, 1), (2, 2)], ids=str)
def test_the_next_step_is_right(zero: int, micro_batches: int, ranks: RankPool) -> None:
    """FSDP2 would reduce nothing any more, and buckets would sum what the failed backward left."""
    prepared = prepare("gpt2")
    plain = drawn_candidate(prepared.graph, mesh_of(dp=2), zero=zero, wild=0.0, precision=Precision("float64", "float64"))
    text = program_text(prepared.graph, replace(plain, micro_batches=micro_batches))
    for found in ranks.run(steps_after_failures, text, prepared.state, prepared.batch, world=2, timeout=100):
        for loss, gradients in found:
            wrong = differences((loss, gradients, {}, {}), prepared.expected, 1e-9, parameters=False)
            assert not wrong, wrong[:5]
