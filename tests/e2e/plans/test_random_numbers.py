"""Random numbers on real ranks: equal on replicas, bit by bit; independent between shards, micro-batches, layers, stages and
steps, statistically; the same again from one seed."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.harness.end_to_end import plan, program, sharding_wins
from support.harness.rank_pool import RankPool
from support.harness.training_loop import parallel_model
from support.plans.captured_models import Case, case_of
from torch import Tensor, nn

from autopar.capture import capture
from autopar.errors import CaptureError
from autopar.solve.result import PlanResult

KEEP = {"dropout": 0.75, "bernoulli": 0.4, "path": 0.7, "channels": 0.8, "chance": 0.5}
"""The share of elements that are kept."""
MASKS = (*KEEP, "uniform", "normal", "gumbel", "table", "integers")
WIDTH = 64


class Noisy(nn.Module):
    """A layer with every kind of noise. What was drawn is part of the result."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        h = torch.tanh(self.up(x))
        one = torch.ones_like(h)
        drawn = {
            "dropout": F.dropout(one, 0.25),
            "bernoulli": torch.empty_like(h).bernoulli_(0.4),
            "path": (0.7 + torch.rand(x.shape[0], 1, dtype=x.dtype, device=x.device)).floor(),
            "channels": F.dropout2d(one[:, :, None, None], 0.2).flatten(1),
            "chance": torch.bernoulli(one * 0.5),
            "uniform": torch.rand_like(h),
            "normal": torch.randn_like(h),
            "gumbel": -torch.empty_like(h).exponential_().log(),
            "table": torch.rand(WIDTH, dtype=x.dtype, device=x.device),
            "integers": torch.randint(0, 5, (x.shape[0], WIDTH), device=x.device),
        }
        noise = sum(drawn.values(), torch.zeros_like(h))
        return self.down(h * noise), {name: value.detach() for name, value in drawn.items()}


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Noisy() for _ in range(2))

    def forward(self, x: Tensor) -> dict[str, Any]:
        drawn = []
        for layer in self.layers:
            x, found = layer(x)
            drawn.append(found)
        return {"loss": x.square().mean(), "drawn": drawn}


@cache
def deep() -> Case:
    torch.manual_seed(0)
    return case_of(Deep().double(), (batch(),), outputs=("drawn:dtensor",))


@cache
def planned(force: tuple[tuple[str, int], ...], cut: bool) -> PlanResult:
    return plan(deep(), {"pp": 1, **dict(force)}, sharding_wins() if cut else None)  # type: ignore[arg-type]


def batch() -> Tensor:
    return torch.randn(64, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def drawn(text: str, state: dict[str, Tensor], form: Any, x: Tensor) -> Any:
    """On a rank, each with another seed of its own: what was drawn in two steps, and again from the first seed: (local, places)
    by layer and name; and the gradient of a parameter that is equal on replicas."""
    import torch.distributed as dist

    torch.manual_seed(dist.get_rank())
    parallel = parallel_model(text, state, form=form)
    steps = []
    for seed in (None, None, 0, 1):
        if seed is not None:
            parallel.reseed(seed)
        result = parallel(x)
        result["loss"].backward()
        here = [layer for layer in result["drawn"] if layer["dropout"] is not None]  # in a pipeline: on the last stage
        steps.append(
            [{name: (v.to_local().detach(), list(map(str, v.placements))) for name, v in layer.items()} for layer in here]
        )
    return steps, parallel.program.mesh.describe(dist.get_rank())


def shards(places: list[str], coordinates: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(c for place, c in zip(places, coordinates, strict=True) if place.startswith("S"))


FORCED = [
    ({"dp": 2, "tp": 2, "zero": 0, "micro": 2}, True),
    pytest.param({"pp": 2, "dp": 2, "zero": 0, "micro": 2}, False, marks=pytest.mark.slow),
    pytest.param({"dp": 4, "zero": 3, "micro": 1}, False, marks=pytest.mark.slow),
    pytest.param({"tp": 4, "micro": 1}, True, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("force", "cut"), FORCED, ids=str)
def test_replicas_agree_and_shards_do_not(force: dict[str, int], cut: bool, ranks: RankPool) -> None:
    case = deep()
    found = planned(tuple(force.items()), cut)
    text = program(case, found)  # type: ignore[arg-type]
    assert "C.random(" in text and "C.dropout(" in text
    given = ranks.run(drawn, text, case.state, case.form, batch())
    size = found.candidate.mesh.sizes[-1]
    last = [(rank, (rank // size % (len(given) // force.get("pp", 1) // size), rank % size)) for rank in range(len(given))]
    steps = {rank: given[rank][0] for rank, _ in last if given[rank][0][0]}
    width = len(found.candidate.mesh.sizes)
    coordinates = {rank: at[-width:] for rank, at in last if rank in steps}
    assert len(steps) == 4 // force.get("pp", 1)
    kinds: set[str] = set()
    samples: list[Tensor] = []
    for layer in (0, 1):
        for name in MASKS:
            groups: dict[tuple[int, ...], list[int]] = {}
            places = steps[min(steps)][0][layer][name][1]
            kinds.update(places)
            for rank, at in coordinates.items():
                groups.setdefault(shards(places, at), []).append(rank)
            for members in groups.values():  # replicas, bit by bit, in every step
                for rank in members[1:]:
                    for step in range(4):
                        assert torch.equal(steps[rank][step][layer][name][0], steps[members[0]][step][layer][name][0])
            if name in ("path", "table"):
                continue
            pieces = [steps[members[0]][0][layer][name][0].double() for members in groups.values()]
            parts = [part for piece in pieces for part in (piece.chunk(2) if force["micro"] > 1 else [piece])]
            later = [steps[members[0]][1][layer][name][0].double() for members in groups.values()]
            independent([part.flatten() for part in parts], name)
            independent([torch.cat([x.flatten() for x in pieces]), torch.cat([x.flatten() for x in later])], name)
            samples.append(torch.cat([x.flatten() for x in pieces]))
            if name in KEEP:
                kept = torch.cat([(piece != 0).double().flatten() for piece in pieces])
                share, n = KEEP[name], kept.numel()
                assert abs(float(kept.mean()) - share) < 5 * (share * (1 - share) / n) ** 0.5, name
    independent([each for each in samples if each.shape == samples[0].shape], "names and layers")
    if cut:
        assert "S(1)" in kinds, "nothing is cut on the tensor axis"
    for rank in steps:  # from one seed the same numbers, bit by bit; from another one others
        for layer in (0, 1):
            for name in MASKS:
                first, again, other = (steps[rank][step][layer][name][0] for step in (0, 2, 3))
                assert torch.equal(first, again)
                assert not torch.equal(first, other) or name == "path"


def independent(samples: list[Tensor], what: str) -> None:
    """The correlation of every two is that of chance."""
    for i, one in enumerate(samples):
        for two in samples[:i]:
            size = min(one.numel(), two.numel())
            pair = torch.stack([one[:size], two[:size]])
            assert abs(float(torch.corrcoef(pair)[0, 1])) < 5.5 / size**0.5, what


REFUSED = {
    "permutation": lambda x: x[:, torch.randperm(4, device=x.device)],
    "multinomial": lambda x: x * torch.multinomial(x.softmax(-1), 1),
    "poisson": lambda x: x * torch.poisson(x.abs()),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "cauchy": lambda x: x * torch.empty_like(x).cauchy_(),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_random_operations_that_shards_cannot_draw(name: str) -> None:
    class Net(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return REFUSED[name](super().forward(x)).sum()

    with pytest.raises(
        CaptureError, match="test_random_numbers.py.* draws random numbers that shards cannot draw apart; use"
    ) as caught:
        capture(Net(4, 4), (torch.randn(8, 4),))
    assert "\n" not in str(caught.value)


def test_random_streams_of_axes_differ() -> None:
    """A rank of one axis shares no stream with a rank of another one, which others would not advance."""
    from autopar.runtime.device.axis import AxisHandle
    from autopar.runtime.device.rng import shard_key

    class Mesh:
        seed = 0

        def axis(self, name: str) -> AxisHandle:
            return AxisHandle(name, 2, 0, "")

    keys = {shard_key(Mesh(), axes) for axes in ((), ("dp",), ("tp",), ("dp", "tp"))}
    assert len(keys) == 4


def repeated(texts: list[str], state: dict[str, Tensor], form: Any, x: Tensor) -> list[dict[str, Tensor]]:
    """On a rank: the gradients of each program, from one seed."""
    out = []
    for text in texts:
        parallel = parallel_model(text, state, form=form)
        parallel(x)["loss"].backward()
        out.append(parallel.full_gradients())
    return out


def test_recomputed_operations_draw_the_same(ranks: RankPool) -> None:
    """Gradients are those of the plan that keeps everything, bit by bit."""
    case = deep()
    found = planned((("dp", 2), ("tp", 2), ("zero", 0), ("micro", 2)), True)
    kept = tuple(
        replace(block, recompute=False, recompute_nodes=(), recompute_conversions=(), offload=())
        for block in found.candidate.blocks
    )
    again = tuple(replace(block, recompute=True) for block in kept)
    texts = [program(case, replace(found, candidate=replace(found.candidate, blocks=blocks))) for blocks in (kept, again)]  # type: ignore[arg-type]
    assert "uses_rng = True" in texts[1] and "uses_rng = True" not in texts[0]
    for one, two in ranks.run(repeated, texts, case.state, case.form, batch()):
        assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
