"""The zoo of small models after public papers: sharded over dp=2,tp=2 on real processes, each equals one process."""

from __future__ import annotations

import pytest
from support.harness.comparison import Outcome, differences, different_tensors
from support.harness.end_to_end import Prepared, plan
from support.harness.rank_pool import RankPool
from support.harness.run_program import train_programs
from support.harness.training_loop import graph_state, train
from support.models.zoo.catalog import specimen, zoo

from autopar.capture import capture
from autopar.program.build import program_text
from autopar.verification.single import LiftCasts, lift_casts

QUICK = ("tied_autoencoder", "custom_functions", "complex_llama", "dlrm", "slots", "clip")
FORCE = {"dp": 2, "tp": 2}
LIFTED = ("dit", "complex_llama", "mae", "sequence_first")
"""These cast to float32 themselves: both sides do it in float64."""


def prepared(name: str) -> Prepared:
    """The graph of a model, and what one process makes of one step."""
    model, batch = specimen(name)
    graph = capture(model, (), batch)
    state = graph_state(graph, model)
    if name in LIFTED:
        with LiftCasts():
            found = train(model, [batch])
        graph = lift_casts(graph)
    else:
        found = train(model, [batch])
    buffers = {key: found.state[key] for key, _ in model.named_buffers() if key in state}
    return Prepared(name, graph, state, batch, Outcome(found.losses[0], found.gradients, {}, buffers))


def check(names: tuple[str, ...], ranks: RankPool) -> None:
    """One step of each model on the ranks: loss, gradients and buffers."""
    cases, texts = [], []
    for name in names:
        cases.append(prepared(name))
        found = plan(cases[-1], FORCE)
        texts.append(program_text(found.graph or cases[-1].graph, found.candidate))
    given = [(text, case.state, case.batch) for text, case in zip(texts, cases, strict=True)]
    results = ranks.run(train_programs, given, 1, timeout=200)
    for rank in (0, 3):
        for case, text, found in zip(cases, texts, results[rank], strict=True):
            wrong = differences(found, case.expected, 1e-9, parameters=False)
            mine = {key: found.buffers[key] for key in case.expected.buffers}
            wrong += different_tensors("buffer", mine, case.expected.buffers, 1e-9)
            assert not wrong, f"{case.name}, rank {rank}: {wrong[:5]}\n{text}"


def test_some_equal_one_process(ranks: RankPool) -> None:
    check(QUICK, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(zoo()))
def test_each_equals_one_process(name: str, ranks: RankPool) -> None:
    check((name,), ranks)
