"""Random state in a checkpoint: each rank goes on with its own, and streams go on where they were."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from autopar.runtime.checkpoint.random_state import RandomState, generators, set_generators
from autopar.runtime.checkpoint.tensor_file import object_bytes, object_of
from autopar.runtime.device.rng import seed_stream

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _as_before() -> Any:
    with torch.random.fork_rng():
        before = random.getstate()
        yield
        random.setstate(before)
        seed_stream.restart()


def drawn() -> tuple[list[float], float, float]:
    import numpy

    return torch.rand(3).tolist(), random.gauss(0, 1), float(numpy.random.normal())


def saved(every: list[Any], axes: dict[str, int]) -> RandomState:
    state = RandomState.of_all(every, 7, axes)
    return RandomState.from_dict(object_of(object_bytes(state.to_dict()), "objects.pt"))


def test_generators_go_on() -> None:
    torch.manual_seed(3), drawn()
    found, expected = generators(CPU), drawn()
    state = saved([(found, {})] * 4, {"dp": 4})
    assert len(state.states) == 1 and not state.moved(2)
    drawn()
    set_generators(*state.generators_of(3)[:1], CPU)
    assert drawn() == expected


def test_ranks_with_different_states() -> None:
    every, expected = [], []
    for rank in range(2):
        torch.manual_seed(rank)
        every.append((generators(CPU), {}))
        expected.append(torch.rand(3).tolist())
    state, found = saved(every, {"dp": 2}), []
    for rank in range(4):
        mine, different = state.generators_of(rank)
        set_generators(mine, CPU, different)
        found.append(torch.rand(3).tolist())
    assert found[:2] == expected and len({tuple(each) for each in found}) == 4
    assert state.moved(4) and not state.moved(2)


def test_streams_go_on() -> None:
    """Under the same mesh all of them, also those that were not used yet; under another one new streams repeat nothing."""
    seed_stream.restart()
    for _ in range(5):
        seed_stream(11).next_seed()
    state = saved([(generators(CPU), seed_stream.counts()), (generators(CPU), {12: 3})], {"dp": 2})
    expected = seed_stream(11).next_seed(), seed_stream(13).next_seed()
    state.restart_streams({"dp": 2})
    assert (seed_stream(11).next_seed(), seed_stream(13).next_seed()) == expected and seed_stream(12).count == 3
    state.restart_streams({"tp": 2})
    assert seed_stream(11).next_seed() == expected[0] and seed_stream(13).count == 5
    assert seed_stream.counts() == {11: 6, 12: 3, 13: 5}
