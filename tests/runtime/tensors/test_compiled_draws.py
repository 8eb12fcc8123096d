"""Random numbers of compiled code."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from autopar.runtime.device.rng import dropout, random, seed_stream

MESH = SimpleNamespace(seed=7)


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
