"""Pipelines beside the step: checkpoints that move to another cut, batches of other sizes and in parts, and what goes wrong."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.harness.end_to_end import prepare
from support.harness.launch import launch
from support.harness.rank_pool import RankPool
from support.harness.training_loop import parallel_model, train
from support.harness.training_script import Batch, on_one_process, steps
from support.models.small_models import make
from support.plans.pipeline_plans import candidate_text, pipeline_candidate, with_split_block
from torch import Tensor, nn

from autopar.ir.plan import Pipeline
from autopar.passes.lower import lower
from autopar.program.export import export_program
from autopar.verification.single import LiftCasts

State = dict[str, Tensor]


def moved(batch: Batch, step: int) -> Batch:
    return {name: tensor.roll(step, 0).roll(step, -1) for name, tensor in batch.items()}


def made(text: str, state: State) -> Any:

    return parallel_model(text, state)


def one_more_step(parallel: Any, optimizer: torch.optim.Optimizer, batch: Batch) -> tuple[float, State]:
    """The loss and the state after it, which need parameters and moments."""
    train(parallel, [moved(batch, 2)], optimizer)
    return parallel(**moved(batch, 3)).item(), parallel.full_state()


def save(text: str, state: State, batch: Batch, path: str) -> tuple[float, State]:
    """On a rank: two steps, a checkpoint, and what comes of one step more."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    parallel = made(text, state)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    train(parallel, [moved(batch, step) for step in range(2)], optimizer)
    model_state, optimizer_state = get_state_dict(parallel, optimizer, options=flat)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    return one_more_step(parallel, optimizer, batch)


def resume(text: str, state: State, batch: Batch, path: str) -> tuple[float, State]:
    """On a rank of another plan."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    parallel = made(text, {name: torch.zeros_like(tensor) for name, tensor in state.items()})
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    model_state, optimizer_state = get_state_dict(parallel, optimizer, options=flat)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    set_state_dict(parallel, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state, options=flat)
    return one_more_step(parallel, optimizer, batch)


def text(name: str, pipeline: Pipeline | None, many: int = 4, **force: int) -> str:
    case = prepare(name, batch=16)
    return candidate_text(case, pipeline_candidate(case, force, pipeline or Pipeline(), many))


def test_checkpoints_load_into_other_plans(ranks: RankPool, tmp_path: Path) -> None:
    """Tied embeddings: to a plan without stages, to other cuts and shards, and back. Flat, since each rank's optimizer has
    its own parameters: the groups of all ranks would be one object else."""
    case = prepare("gpt2", batch=16)
    plans = [
        text("gpt2", Pipeline(2), dp=2, zero=1),
        text("gpt2", Pipeline(4, 1, "zb-h1")),
        text("gpt2", Pipeline(2, 2, "zbv"), dp=2, zero=3),
        text("gpt2", None, dp=4, zero=2),
        text("gpt2", Pipeline(2, cuts=(3,)), tp=2),
    ]
    first = ranks.run(save, plans[0], case.state, case.batch, str(tmp_path / "0"))
    for index, each in enumerate(plans):
        for loss, state in ranks.run(resume, each, case.state, case.batch, str(tmp_path / "0")):
            assert loss == pytest.approx(first[0][0], rel=1e-9), index
            for name, tensor in first[0][1].items():
                torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-12)
    back = ranks.run(save, plans[3], case.state, case.batch, str(tmp_path / "1"))
    assert back[0][0] == pytest.approx(first[0][0], rel=1e-9)
    assert ranks.run(resume, plans[1], case.state, case.batch, str(tmp_path / "1"))[0][0] == pytest.approx(first[0][0], rel=1e-9)


@pytest.mark.slow
def test_checkpoint_of_a_stage_without_parameters(ranks: RankPool, tmp_path: Path) -> None:
    case = with_split_block(prepare("mlp", batch=16), "Main", (6,))
    each = candidate_text(case, pipeline_candidate(case, {}, Pipeline(2), 4))
    first = ranks.run(save, each, case.state, case.batch, str(tmp_path), world=2)
    assert ranks.run(resume, each, case.state, case.batch, str(tmp_path), world=2)[0][0] == pytest.approx(first[0][0], rel=1e-9)


def factored(path: str) -> None:
    """On a rank: rows and columns of Adafactor, whose shapes are no parameter's, saved by stages and resumed without any."""
    import autopar

    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(16, 16, dtype=torch.float64) for _ in range(4))
    x = torch.randn(8, 16, dtype=torch.float64)
    models = [
        autopar.parallelize(copy.deepcopy(_Stack(layers)), "local:4", (x,), force=force, cache=False)
        for force in ("pp=2,dp=2,micro=2,zero=1", "dp=4,zero=3")
    ]
    optimizers = [torch.optim.Adafactor(model.parameters(), lr=1e-2) for model in models]
    train(models[0], [{"x": x.roll(step, 0)} for step in range(2)], optimizers[0])
    models[0].save(path, optimizers[0], step=2)
    models[1].load(path, optimizers[1])
    found = [train(model, [{"x": x.roll(3, 0)}], optimizer) for model, optimizer in zip(models, optimizers, strict=True)]
    for name, tensor in found[0].state.items():
        torch.testing.assert_close(found[1].state[name], tensor, rtol=1e-9, atol=1e-11)


class _Stack(nn.Module):
    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x.square().mean()


def test_rows_and_columns_of_adafactor(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(factored, str(tmp_path / "step-2"))


def full(texts: list[str], state: State, batch: Batch) -> list[float]:
    """On a rank: the loss on the state that another plan gave, one after the other."""
    losses = []
    for each in texts:
        parallel = made(each, {name: torch.zeros_like(tensor) for name, tensor in state.items()})
        parallel.load_full_state(state)
        losses.append(parallel(**batch).item())
        state = parallel.full_state()
    return losses


@pytest.mark.slow
def test_full_state_round_trip(ranks: RankPool) -> None:
    case = prepare("gpt2", batch=16)
    plans = [
        text("gpt2", Pipeline(2, 2, "zbv"), dp=2, zero=3),
        text("gpt2", None, dp=4, zero=3),
        text("gpt2", Pipeline(4, 1, "gpipe")),
        text("gpt2", Pipeline(2), tp=2),
    ]
    for losses in ranks.run(full, plans, case.state, case.batch):
        assert losses == pytest.approx([case.expected[0]] * 4, rel=1e-9)


def sizes(text: str, state: State, given: list[Batch]) -> tuple[list[float], list[str], list[int]]:
    """On a rank: losses of batches of several sizes, and what is said of the others; then parts of a batch."""
    from autopar.runtime.errors import BatchError

    parallel = made(text, state)
    losses, said = [], []
    for batch in given:
        try:
            loss = parallel(**batch)
            loss.backward()
            losses.append(loss.item())
        except BatchError as problem:
            said.append(str(problem))
    dp = parallel.program.mesh.dp
    mine = {name: tensor.chunk(dp.size)[dp.coordinate] for name, tensor in given[0].items()}
    losses.append(parallel(parallel.local_batch(**mine)).item())
    return losses, said, list(parallel.sampler(range(8), shuffle=False))  # type: ignore[arg-type]


def test_other_batch_sizes(ranks: RankPool) -> None:
    """Any batch that divides; the next one after one that does not is right. A rank may have its own part."""
    case = prepare("llama", batch=16)
    given = [
        {name: torch.cat([tensor, tensor.roll(3, 0)])[:size] for name, tensor in case.batch.items()}
        for size in (8, 12, 16, 32, 1, 24)
    ]
    model, _ = make("llama", torch.float64, 16)
    with LiftCasts():
        expected = [model(**given[index]).loss.item() for index in (0, 2, 3, 5, 0)]
    for each in (Pipeline(2, 1, "zb-h1"), Pipeline(2, 2, "zbv")):
        told = ranks.run(sizes, text("llama", each, dp=2, zero=3), case.state, given)
        for rank, (losses, said, places) in enumerate(told):
            assert losses == pytest.approx(expected, rel=1e-9)
            assert "12 examples of input" in said[0] and "2 data-parallel ranks and 4 micro-batches" in said[0], said
            assert "does not divide over 2" in said[1]
            assert places == [[0, 2, 4, 6], [1, 3, 5, 7]][rank % 2]


def misused(text: str, state: State, batch: Batch) -> tuple[list[str], float, State, State]:
    """On a rank: a backward that cannot be, one that can, and what a good step makes after them."""
    parallel = made(text, state)
    said = []
    loss = parallel(**batch)
    loss.backward()
    for _ in range(2):
        try:
            loss.backward()
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
        parallel.zero_grad()
        loss = parallel(**batch)
        loss.backward(retain_graph=True)
    parallel(**moved(batch, 1))  # nobody calls its backward
    parallel.zero_grad()
    loss = parallel(**batch)
    loss.backward()
    (parallel(**batch) * 0.0).backward()
    parallel.zero_grad()
    loss = parallel(**batch)
    with torch.no_grad():
        parallel(**moved(batch, 2))
    parallel.zero_grad()
    loss.backward()
    return said, loss.item(), parallel.full_gradients(), parallel.full_state()


def test_a_second_backward(ranks: RankPool) -> None:
    case = prepare("gpt2", batch=16)
    for pipeline, force in ((Pipeline(2, 2, "zbv"), {"dp": 2, "zero": 3}), (Pipeline(2, 1, "zb-h1"), {"dp": 2, "zero": 1})):
        for said, loss, gradients, state in ranks.run(misused, text("gpt2", pipeline, **force), case.state, case.batch):
            assert len(said) == 1 and "run the one before with retain_graph=True" in said[0], said
            assert loss == pytest.approx(case.expected[0], rel=1e-9)
            for name, tensor in case.expected[1].items():
                torch.testing.assert_close(gradients[name], tensor, rtol=1e-8, atol=1e-10)
            assert all(torch.equal(state[name], tensor) for name, tensor in case.state.items() if name in state)


def test_an_exported_pipeline_trains_without_autopar(ranks: RankPool, tmp_path: Path) -> None:
    """All stages in one file; with weights, and with initial ones by name."""
    case = prepare("gpt2", batch=16)
    model, _ = make("gpt2", torch.float64, 16)
    lowered = lower(case.graph, pipeline_candidate(case, {"dp": 2, "zero": 3}, Pipeline(2, 2, "zbv"), 4))
    folder = export_program(lowered, "{}", tmp_path / "out", weights=case.state, batch=case.batch, learning_rate=1e-2)
    assert "pp=2 x dp=2" in (folder / "README.md").read_text()
    one = steps(3)
    with LiftCasts():
        expected = on_one_process(model, one, [case.batch] * 3)[0]
    found = launch(ranks, folder / "train.py", 4, "--steps", "3", without="autopar")
    assert not any(each.status for each in found), found
    assert [float(line.split()[-1]) for line in found[0].stdout.splitlines()] == pytest.approx(expected, rel=1e-9)
    (folder / "weights.pt").unlink()
    drawn = launch(ranks, folder / "train.py", 4, "--steps", "2", without="autopar")
    assert not any(each.status for each in drawn), drawn
    assert float(drawn[0].stdout.splitlines()[0].split()[-1]) == pytest.approx(math.log(64), rel=0.05)
