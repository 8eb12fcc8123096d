"""Matrices of torch.optim.Muon, each updated by one rank: as on one process, once, balanced, in two collectives for a batch."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.harness.comparison import different_numbers, different_tensors
from support.harness.rank_pool import RankPool
from support.harness.training_loop import train
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import autopar
from autopar.runtime.compat.dtensor import matrix_part, own_part, placed_like, strided_shard
from autopar.runtime.compat.hooks import replaced
from autopar.runtime.device.mesh import MeshHandle
from autopar.runtime.state import owned_matrices
from autopar.runtime.state.offload_optimizer import offload_optimizer
from autopar.runtime.state.owned_matrices import batches_of, owners_of, updates_by_owners, work

WIDTHS = (16, 12, 24, 6, 10, 16)
"""Not all divisible by four ranks."""


class Layers(nn.Module):
    """Matrices, tall and wide, one that no gradient reaches, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(*sizes) for sizes in pairwise(WIDTHS))
        self.unused, self.frozen = nn.Linear(4, 4), nn.Linear(16, 16)
        self.frozen.requires_grad_(False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.frozen(x)
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return nn.functional.mse_loss(h, x)


def inputs(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(8, WIDTHS[0], generator=generator, dtype=torch.float64)}


def optimizer_of(model: nn.Module, **options: Any) -> torch.optim.Muon:
    return torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.05, **options)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range = range(3)) -> list[float]:
    return train(model, map(inputs, seeds), optimizer).losses


def parallel_of(force: str) -> Any:
    with warnings.catch_warnings(action="ignore"):
        return autopar.parallelize(Layers(), "local:4", inputs(0), force=force)


@contextmanager
def computed() -> Iterator[list[tuple[int, ...]]]:
    """The shapes of the matrices that Newton-Schulz is computed of on this rank, but for the one element that tells its dtype."""
    outer: Any = importlib.import_module("torch.optim._muon")
    usual, shapes = outer._zeropower_via_newtonschulz, list[tuple[int, ...]]()

    def note(matrix: Tensor, *options: Any) -> Tensor:
        assert not isinstance(matrix, DTensor) or matrix.device_mesh.size() == 1
        shapes.extend([tuple(matrix.shape)] * (matrix.numel() > 1))
        result: Tensor = usual(matrix, *options)
        return result

    with replaced(outer, "_zeropower_via_newtonschulz", note):
        yield shapes


@contextmanager
def sent_elements() -> Iterator[list[int]]:
    """The elements that this rank sends (to itself too), by collective."""
    usual, sent = owned_matrices.all_to_all_rows, list[int]()

    def note(rows: Tensor, *options: Any) -> Tensor:
        assert rows.dtype == torch.bfloat16
        sent.append(rows.numel())
        return usual(rows, *options)

    with replaced(owned_matrices, "all_to_all_rows", note):
        yield sent


# -- the exchange alone


def square(matrix: Tensor) -> Tensor:
    """A function of the whole matrix, in another dtype."""
    half = matrix.float()
    return half @ half.T @ half


PLACEMENTS: dict[str, tuple[dict[str, int], list[tuple[Any, ...]]]] = {
    "one axis": ({"dp": 4}, [(Shard(0),), (Shard(1),), (Replicate(),)]),
    "two axes": (
        {"dp": 2, "tp": 2},
        [
            *((a, b) for a in (Shard(0), Shard(1), Replicate()) for b in (Shard(0), Shard(1), Replicate())),
            *((strided_shard(0, 2), Shard(0)), (Replicate(), strided_shard(0, 3)), (strided_shard(1, 2), Shard(1))),
        ],
    ),
}


def exchanged(axes: dict[str, int], placements: list[tuple[Any, ...]], batch_elements: int) -> list[str]:
    """What is wrong with the results for matrices of all placements, transposed ones and uneven shards among them."""
    mesh, wrong = MeshHandle(axes).device_mesh, []
    matrices, wholes = [], []
    for number, each in enumerate(placements):
        even = any(type(placement).__name__ == "_StridedShard" for placement in each)
        for shape in ((12, 24),) if even else ((12, 24), (7, 5), (3, 8), (9, 2)):
            whole = torch.randn(shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
            wholes.append(whole if number % 2 else whole.T.contiguous().T)
            matrix = distribute_tensor(wholes[-1], mesh, [Replicate()] * mesh.ndim if even else each)
            if even:  # which torch itself distributes to ranks of one axis only
                layout = DTensor.from_local(whole, mesh, each, run_check=False, shape=whole.shape, stride=whole.stride())
                matrix = placed_like(own_part(layout, whole), layout)
            matrices.append(matrix)
    batches = batches_of(matrices, matrices, batch_elements)
    assert [at for batch in batches for at in batch] == list(range(len(matrices)))
    sent = ([matrices[at] for at in batch] for batch in batches)
    results = [each for batch in updates_by_owners(sent, square) for each in batch]
    for matrix, whole, result in zip(matrices, wholes, results, strict=True):
        own = matrix_part(matrix, mesh.get_coordinate()).of(square(whole))
        if result.placements != matrix.placements or result.dtype != torch.float32 or not torch.equal(result.to_local(), own):
            wrong.append(f"{matrix.placements} {tuple(matrix.shape)}")
    return wrong


@pytest.mark.parametrize("batch_elements", [1, 2**25], ids=["small batches", "one batch"])
@pytest.mark.parametrize("axes", PLACEMENTS)
def test_a_function_of_whole_matrices_of_any_placement(axes: str, batch_elements: int, ranks: RankPool) -> None:
    assert ranks.run(exchanged, *PLACEMENTS[axes], batch_elements) == [[]] * 4


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 64)), min_size=1, max_size=40), st.integers(1, 9))
@settings(max_examples=50, deadline=None)
def test_owners_are_balanced(shapes: list[tuple[int, int]], size: int) -> None:
    """As the largest first guarantees (Graham 1969): at most 4/3 of the least possible; and loads add up over batches."""
    loads = [0] * size
    owners = owners_of(shapes, loads)
    costs = [work(shape) for shape in shapes]
    assert loads == [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(size)]
    least = max(sum(costs) / size, *costs, *([sum(sorted(costs)[-size - 1 :][:2])] if len(costs) > size else [0]))
    assert max(loads) <= 4 / 3 * least + 1e-9
    assert owners_of(shapes, [0] * size) == owners


# -- torch.optim.Muon

OPTIONS: dict[str, dict[str, Any]] = {
    "usual": {},
    "no nesterov": {"nesterov": False, "weight_decay": 0.0},
    "match_rms_adamw": {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3, "momentum": 0.8},
}
PLANS = ("dp=4,zero=0", "dp=4,zero=3", "dp=2,tp=2,zero=1", "pp=2,dp=2,zero=2")
OTHER_PLANS = (
    *("dp=4,zero=1", "dp=4,zero=2", "dp=2,tp=2,zero=0", "dp=2,tp=2,zero=3", "dp=1,tp=4", "pp=4", "dp=4,zero=3,zero_group=2"),
)


def same_training(force: str, kinds: list[str]) -> list[Any]:
    """What differs from one process, and on this rank: the matrices computed in one step, and its collectives."""
    parallel, start = parallel_of(force), Layers().state_dict()
    wrong: list[str] = []
    for kind in kinds:
        reference = Layers()
        parallel.load_state_dict(start)
        mine, theirs = (optimizer_of(model, **OPTIONS[kind]) for model in (parallel, reference))
        wrong += different_numbers(kind, steps(parallel, mine), steps(reference, theirs), 1e-9)
        wrong += different_tensors(kind, parallel.full_state(), reference.state_dict(), 1e-9)
        found, expected = parallel.full_optimizer_state(mine), theirs.state_dict()
        assert found["state"].keys() == expected["state"].keys()
        for number, values in expected["state"].items():
            momenta = found["state"][number]["momentum_buffer"], values["momentum_buffer"]
            torch.testing.assert_close(*momenta, rtol=1e-9, atol=1e-12)
        # back, into an optimizer that has made no step
        again = optimizer_of(parallel, **OPTIONS[kind])
        parallel.load_full_optimizer_state(again, found)
        more = [steps(*each, range(3, 5)) for each in ((parallel, again), (reference, theirs))]
        wrong += different_numbers(f"{kind} again", *more, 1e-9)
    parallel(**inputs(0)).backward()
    with computed() as shapes, CommDebugMode() as mode, sent_elements() as sent:
        mine.step()
    return [wrong, sorted(shapes), {str(each): count for each, count in mode.get_comm_counts().items()}, sent]


def check_price(force: str, sent: list[list[int]]) -> None:
    """What the ranks send is what is priced: the elements of all matrices to the owners, and back to each copy of the state."""
    degrees = {name: int(size) for name, size in (each.split("=") for each in force.split(","))}
    data = degrees.get("dp", 1)
    copies = data // degrees.get("zero_group", data) if degrees.get("zero") else data
    elements = sum(tall * wide for tall, wide in pairwise(WIDTHS))
    if any(sent) and degrees.get("tp") != 4:  # of one rank nothing; four do not shard (10, 6)
        assert [sum(each) for each in zip(*sent, strict=True)] == [elements, elements * copies]


def check_training(force: str, kinds: list[str], ranks: RankPool) -> None:
    out = ranks.run(same_training, force, kinds, timeout=200)
    assert [wrong for wrong, *_ in out] == [[]] * 4
    check_price(force, [sent for *_, sent in out])
    every = [tuple(sizes[::-1]) for sizes in pairwise(WIDTHS)]
    assert sorted(shape for _, shapes, *_ in out for shape in shapes) == sorted(every)  # each on one rank, once
    for _, _, counts, _ in out:
        assert counts in ({"c10d_functional.all_to_all_single": 2}, {}) and (counts or "pp=" in force), counts


@pytest.mark.parametrize("force", PLANS)
def test_muon_equals_one_process(force: str, ranks: RankPool) -> None:
    check_training(force, list(OPTIONS)[:1], ranks)


@pytest.mark.slow
@pytest.mark.parametrize("force", (*PLANS, *OTHER_PLANS))
def test_muon_with_other_options_equals_one_process(force: str, ranks: RankPool) -> None:
    check_training(force, list(OPTIONS), ranks)


def offloaded(force: str) -> list[str]:
    """What differs where the state of the optimizer is offloaded by parts. They have to be the same on all ranks, though the last
    has less of one matrix, and could take the next into the same part."""
    parallel, reference = parallel_of(force), Layers()
    mine, theirs = optimizer_of(parallel), optimizer_of(reference)
    offload_optimizer(mine, torch.device("cpu"), part_bytes=700)
    wrong = different_numbers("loss", steps(parallel, mine), steps(reference, theirs), 1e-9)
    return wrong + different_tensors("parameter", parallel.full_state(), reference.state_dict(), 1e-9)


def test_muon_with_offloaded_state(ranks: RankPool) -> None:
    assert ranks.run(offloaded, "dp=4,zero=3") == [[]] * 4


def grouped(force: str) -> list[str]:
    """What differs with groups of other options, and with a momentum in bfloat16, which torch changes: that is left to torch."""

    def make(model: nn.Module) -> torch.optim.Muon:
        matrices = [p for p in model.parameters() if p.dim() == 2]
        groups = [{"params": matrices[:1], "ns_steps": 3}, {"params": matrices[1:], "lr": 0.01, "nesterov": False}]
        return torch.optim.Muon(groups, lr=0.05)

    parallel, reference = parallel_of(force), Layers()
    wrong = different_numbers("loss", steps(parallel, make(parallel)), steps(reference, make(reference)), 1e-9)
    half = distribute_tensor(torch.eye(8).bfloat16(), parallel.program.mesh.device_mesh, [Replicate()])
    parameter = nn.Parameter(half)
    parameter.grad = half.clone()
    alone = nn.Parameter(torch.eye(8).bfloat16())
    alone.grad = torch.eye(8).bfloat16()
    for each in (parameter, alone):
        optimizer = torch.optim.Muon([each], nesterov=False)
        optimizer.step()
        each.grad = optimizer.state[each]["momentum_buffer"]
    same = torch.equal(parameter.grad.to_local(), alone.grad) and torch.equal(parameter.detach().to_local(), alone.detach())
    return wrong + ["bfloat16"] * (not same)


def test_groups_and_a_momentum_in_bfloat16(ranks: RankPool) -> None:
    assert ranks.run(grouped, "dp=4,zero=3") == [[]] * 4


def compiled_steps(force: str) -> list[str]:
    """What differs where the step of the optimizer is compiled."""
    parallel, reference = parallel_of(force), Layers()
    mine, theirs = optimizer_of(parallel), optimizer_of(reference)
    mine.step = torch.compile(mine.step, backend="eager")  # type: ignore[method-assign]
    wrong = different_numbers("loss", steps(parallel, mine), steps(reference, theirs), 1e-9)
    return wrong + different_tensors("parameter", parallel.full_state(), reference.state_dict(), 1e-9)


def test_a_compiled_step(ranks: RankPool) -> None:
    assert ranks.run(compiled_steps, "dp=4,zero=3") == [[]] * 4
