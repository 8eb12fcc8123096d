"""Random numbers of compiled code."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.runtime.device.rng import RngRecorder, SeedStreams, dropout, random, seed_stream
from autopar.runtime.errors import RuntimeProblem

MESH = SimpleNamespace(seed=7, seed_tensor=torch.tensor(7))


def draw(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Two masks of one tensor, as R-Drop draws them, and noise."""
    noise = random(x, "normal", 0.0, 1.0, torch.float64, MESH)  # type: ignore[arg-type]
    return dropout(x, 0.5, True, MESH), dropout(x, 0.5, True, MESH), noise  # type: ignore[arg-type]


def test_compiled_draws_are_those_of_the_program() -> None:
    """In the same order, none merged, and with the same gradients."""
    compiled = torch.compile(draw, backend="aot_eager_decomp_partition", fullgraph=True)
    found = []
    for run in (draw, compiled, compiled):
        seed_stream.restart()
        x = torch.ones(64, dtype=torch.float64, requires_grad=True)
        one, other, noise = run(x)
        (one + 2 * other).sum().backward()
        found.append((one, other, noise, x.grad))
    assert not torch.equal(found[0][0], found[0][1])
    for each in found[1:]:
        assert all(map(torch.equal, each, found[0]))


def test_draws_of_fake_tensors() -> None:
    """As a dry run has them: every tensor is fake."""
    with FakeTensorMode():
        drawn = draw(torch.ones(64, dtype=torch.float64, requires_grad=True))
    assert [tuple(each.shape) for each in drawn] == [(64,)] * 3


def test_the_order_of_draws_is_on_the_cpu() -> None:
    """Also where this is imported under another device: on meta the operation would be its fake one, without a seed."""
    with torch.device("meta"):
        assert SeedStreams().order.device.type == "cpu"


def test_bounds_of_integers_are_exact() -> None:
    last = 2**63 - 1
    drawn = random(torch.ones(64), "integers", last - 1, last, torch.int64, MESH)  # type: ignore[arg-type]
    assert (drawn == last - 1).all()


def test_a_recomputation_after_another_seed_is_refused() -> None:
    """It would draw other numbers than the forward."""
    recorder = RngRecorder()
    restored = recorder.restored  # torch's checkpoint is given both before the forward
    with recorder:
        first = dropout(torch.ones(64), 0.5, True, MESH)  # type: ignore[arg-type]
    with restored:
        assert torch.equal(dropout(torch.ones(64), 0.5, True, MESH), first)  # type: ignore[arg-type]
    seed_stream.restart()
    with pytest.raises(RuntimeProblem, match="call backward before"), restored:
        pass
