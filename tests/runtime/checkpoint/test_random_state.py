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


def saved(every: list[Any], place: int = 0) -> RandomState:
    state = RandomState.of_all(every, 7, place)
    return RandomState.from_dict(object_of(object_bytes(state.to_dict()), "objects.pt"))


def test_generators_go_on() -> None:
    torch.manual_seed(3), drawn()
    found, expected = generators(CPU), drawn()
    state = saved([found] * 4)
    assert len(state.states) == 1 and not state.moved(2)
    drawn()
    set_generators(*state.generators_of(3)[:1], CPU)
    assert drawn() == expected


def test_ranks_with_different_states() -> None:
    every, expected = [], []
    for rank in range(2):
        torch.manual_seed(rank)
        every.append(generators(CPU))
        expected.append(torch.rand(3).tolist())
    state, found = saved(every), []
    for rank in range(4):
        mine, different = state.generators_of(rank)
        set_generators(mine, CPU, different)
        found.append(torch.rand(3).tolist())
    assert found[:2] == expected and len({tuple(each) for each in found}) == 4
    assert state.moved(4) and not state.moved(2)


def test_streams_go_on() -> None:
    """From the place of the run that was saved, also of a checkpoint that has the draws of each stream."""
    seed_stream.restart(saved([generators(CPU)], 5).place)
    with seed_stream.call(training=True):
        drawn = seed_stream(11).next_seed(), seed_stream(12).next_seed(), seed_stream(11).next_seed()
    assert len(set(drawn)) == 3 and seed_stream.place == 6
    state = saved([generators(CPU)], 5).to_dict()
    del state["place"]
    assert RandomState.from_dict(state | {"counts": {11: 4, 12: 9}, "axes": {"dp": 2}}).place == 9


def test_place_of_calls() -> None:
    """An evaluation without draws leaves it; a move inside of a call ends with the call."""
    seed_stream.restart()
    seen = []
    for training, draws in ((True, False), (False, False), (False, True), (True, True)):
        with seed_stream.call(training):
            if draws:
                seen.append(seed_stream(11).next_seed())
            seed_stream.move(0)
        assert seed_stream.place_of_script() == seed_stream.place
    assert seed_stream.place == 3 and len(set(seen)) == 2
    seed_stream.move(1)
    seed_stream.follow(seed_stream.place_of_script(), None)
    with seed_stream.call(training=True):
        assert seed_stream(11).next_seed() == seen[0]
