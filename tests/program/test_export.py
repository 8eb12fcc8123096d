"""An exported folder trains without autopar and prints the losses of the program that it came from."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from msgspec import structs
from support.harness.launch import launch
from support.harness.rank_pool import RankPool
from support.models.handwritten_blocks import gpt2_graph
from support.oracles.interpret_graph import make_state, run_graph
from support.plans.drawn_candidates import drawn_candidate
from support.plans.drawn_recomputation import with_replays
from support.plans.mesh import mesh_of
from torch import Tensor, nn

from autopar.cli.commands.export import initial_weights
from autopar.errors import FileError
from autopar.ir.graph import Graph
from autopar.passes.lower import lower
from autopar.passes.lowered import Lowered
from autopar.planning import make_plan
from autopar.program.build import render
from autopar.program.export import MARKER, export_program, global_input_shapes, random_batch

BLOCKED = "import sys\nclass No:\n    def find_spec(self, name, path=None, target=None):\n"
BLOCKED += "        if name.split('.')[0] == 'autopar': raise ImportError('autopar is blocked')\nsys.meta_path.insert(0, No())\n"


def torchrun(folder: Path, ranks: int, *args: str) -> list[float]:
    (folder / "sitecustomize.py").write_text(BLOCKED)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        str(folder / "train.py"),
    ]
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(folder))
    done = subprocess.run([*command, *args], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return losses(done.stdout)


def forked(ranks: RankPool, folder: Path, size: int, *args: str) -> list[float]:
    ended = launch(ranks, folder / "train.py", size, *args, without="autopar")
    assert not any(each.status for each in ended), ended
    return losses(ended[0].stdout)


def losses(text: str) -> list[float]:
    return [float(line.split()[-1]) for line in text.splitlines() if line.startswith("step ")]


def reference(graph, state, batch, steps: int, lr: float) -> list[float]:  # type: ignore[no-untyped-def]
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in state.items()}
    optimizer = torch.optim.AdamW(leaves.values(), lr=lr)
    losses = []
    for _ in range(steps):
        loss = run_graph(graph, leaves, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("everything", "real"), [(False, False), (True, False), pytest.param(True, True, marks=pytest.mark.slow)]
)
def test_exported_folder_trains_without_autopar(everything: bool, real: bool, tmp_path: Path, ranks: RankPool) -> None:
    """Also with micro-batches, recomputation and offload, and state sharded over pairs; torchrun is slow."""
    graph = gpt2_graph(2, 16, 4, 32, 8, 8, dtype="float64")
    candidate = drawn_candidate(graph, mesh_of(dp=2, tp=2), 1, zero=3, wild=0.2)
    if everything:
        candidate = drawn_candidate(graph, mesh_of(dp=4), 1, zero=3, wild=0.0)
        candidate = with_replays(graph, replace(candidate, micro_batches=2, zero_group=2), 1)
    lowered = lower(graph, candidate)
    batch = random_batch(lowered)
    assert {tensor.shape[0] for tensor in batch.values()} == {graph.batch}
    state = make_state(graph)
    words = ("zero_group = 2", "recompute.offload(", "recompute(F.", "micro_batches = 2")
    assert all((word in render(lowered)) == everything for word in words)
    folder = export_program(lowered, "{}", tmp_path / "out", weights=state, batch=batch, learning_rate=1e-2)
    found = (torchrun if real else partial(forked, ranks))(folder, 4, "--steps", "3")
    assert found == pytest.approx(reference(graph, state, batch, 3, 1e-2), rel=1e-9)


def test_random_batch_fits_the_tables() -> None:
    graph = gpt2_graph(1, 16, 4, 32, 8, 8)
    lowered = lower(graph, drawn_candidate(graph, mesh_of(dp=2, tp=2), 1))
    assert global_input_shapes(lowered) == {"input_ids": (8, 8), "labels": (8, 8)}
    batch = random_batch(lowered)
    assert set(batch) == {"input_ids", "labels"}
    assert all(int(tensor.min()) >= 0 and 16 < int(tensor.max()) < 32 for tensor in batch.values())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids).tanh()).square().mean()  # type: ignore[no-any-return]


def tied_model() -> tuple[nn.Module, dict[str, Tensor]]:
    return Tied().double(), {"ids": torch.arange(16).view(8, 2) % 8}


BOTH_NAMES = """
import copy, torch
from program import Program
from runtime.device.mesh import MeshHandle, shut_down
from runtime.parallel import Parallel
from runtime.step.inputs import NamedBatch
source = torch.load("weights.pt", weights_only=True)
parallel = Parallel(Program(MeshHandle(Program.mesh_axes)), source)
optimizer = torch.optim.SGD(parallel.parameters(), lr=0.5)
parallel(NamedBatch(torch.load("batch.pt", weights_only=True))).backward()
optimizer.step()
before = parallel.full_state()
assert list(before) == ["embed.weight", "head.weight"] == list(copy.deepcopy(parallel).full_state()), list(before)
assert set(parallel.state_dict()) == set(before) and torch.equal(*before.values())
for load in (parallel.load_state_dict, parallel.load_full_state):
    load({name: 2 * value for name, value in before.items()})
    assert torch.equal(parallel.full_state()["head.weight"], 2 * before["head.weight"])
parallel.load_full_state({"head.weight": before["head.weight"]})
torch.save(parallel.full_state(), "after.pt")
shut_down()
"""


@pytest.mark.parametrize("force", ["dp=2,zero=3", "tp=2,dp=1"])
def test_tied_weights_have_all_their_names(force: str, tmp_path: Path, ranks: RankPool) -> None:
    model, batch = tied_model()
    plan = make_plan(model, "local:2", batch, force=force)
    facts = structs.replace(plan.document.model, source=f"{__file__}:tied_model")
    plan = replace(plan, document=replace(plan.document, model=facts))
    weights = initial_weights(plan, trust=True)
    assert weights is not None and list(weights) == ["embed.weight", "head.weight"]
    folder = export_program(lower(plan.graph, plan.candidate), "{}", tmp_path / "out", weights=weights, batch=batch)
    model.load_state_dict(torch.load(folder / "weights.pt"))
    (folder / "both.py").write_text(f"import os; os.chdir({str(folder)!r})" + BOTH_NAMES)
    ended = launch(ranks, folder / "both.py", 2, without="autopar")
    assert not any(each.status for each in ended), ended
    model(**batch).backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    torch.testing.assert_close(torch.load(folder / "after.pt"), dict(model.state_dict()), rtol=1e-9, atol=1e-12)


EVALUATION = """
import torch
import torch.distributed as dist
from program import Program
from runtime.device.mesh import MeshHandle, shut_down
from runtime.errors import RuntimeProblem
from runtime.parallel import Parallel
from runtime.step.inputs import NamedBatch
parallel = Parallel(Program(MeshHandle(Program.mesh_axes)), torch.load("weights.pt", weights_only=True))
try:
    parallel.eval()(NamedBatch(torch.load("batch.pt", weights_only=True)))
except RuntimeProblem as problem:
    open(f"refused{dist.get_rank()}", "w").write(str(problem))
parallel.train()(NamedBatch(torch.load("batch.pt", weights_only=True))).backward()
shut_down()
"""


def refusals_of_evaluation(model: nn.Module, force: str, folder: Path, ranks: RankPool) -> list[str]:
    """The line of each rank."""
    batch = {"x": torch.randn(8, 4, dtype=torch.float64)}
    plan = make_plan(model, "local:2", batch, force=force)
    folder = export_program(lower(plan.graph, plan.candidate), "{}", folder, weights=model.state_dict(), batch=batch)
    (folder / "evaluate.py").write_text(f"import os; os.chdir({str(folder)!r})" + EVALUATION)
    ended = launch(ranks, folder / "evaluate.py", 2, without="autopar")
    assert not any(each.status for each in ended), ended
    return [(folder / f"refused{rank}").read_text() for rank in range(2)]


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).pow(4).mean()  # type: ignore[no-any-return]


def test_all_stages_refuse_evaluation_of_the_statistics_of_the_batch(tmp_path: Path, ranks: RankPool) -> None:
    """The first stage has no batch norm: it waited for the last one, which refused alone."""
    first, last = refusals_of_evaluation(Normalised().double(), "pp=2,micro=8", tmp_path / "out", ranks)
    assert first == last and "statistics of" in first and first.endswith("the original model with parallel.full_state()")


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += (x > 0).sum()
        return self.linear(x).square().mean()  # type: ignore[no-any-return]


def test_a_count_is_not_called_a_statistic_that_normalises(tmp_path: Path, ranks: RankPool) -> None:
    first, last = refusals_of_evaluation(Counting().double(), "dp=2", tmp_path / "out", ranks)
    assert first == last and "where the forward writes buffers" in first and "normalises" not in first


def small_program() -> tuple[Graph, Lowered]:
    graph = gpt2_graph(1, 16, 4, 32, 8, 8)
    return graph, lower(graph, drawn_candidate(graph, mesh_of(dp=2), 0, wild=0))


NAMES = {"program.py", "plan.json", "runtime", "train.py", "README.md", "batch.pt", MARKER}


def test_export_replaces_an_earlier_one_where_told_to(tmp_path: Path) -> None:
    graph, lowered = small_program()
    export_program(lowered, "{}", tmp_path, weights=make_state(graph))
    (tmp_path / "mine.txt").write_text("left alone")
    (tmp_path / "runtime" / "mine.py").write_text("left alone")
    with pytest.raises(FileError, match="earlier export: write --overwrite"):
        export_program(lowered, "{}", tmp_path)
    export_program(lowered, "[]", tmp_path, overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == NAMES | {"mine.txt"}
    assert (tmp_path / "plan.json").read_text() == "[]" and (tmp_path / "runtime" / "mine.py").read_text() == "left alone"
    assert "autopar.runtime" not in (tmp_path / "program.py").read_text()
    assert [path.name for path in tmp_path.parent.iterdir() if tmp_path.name in path.name] == [tmp_path.name]


def test_export_refuses_a_folder_of_the_user(tmp_path: Path) -> None:
    """Its ``runtime`` folder was deleted once."""
    (tmp_path / "runtime").mkdir()
    (tmp_path / "runtime" / "mine.py").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(FileError, match="files that no export wrote"):
            export_program(small_program()[1], "{}", tmp_path, overwrite=overwrite)
    assert (tmp_path / "runtime" / "mine.py").read_text() == "mine"


def test_an_export_that_fails_leaves_the_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, lowered = small_program()
    export_program(lowered, "{}", tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("autopar.program.export.torch.save", full)
    with pytest.raises(FileError, match="No space left on device; what was there before is unchanged"):
        export_program(lowered, "[]", tmp_path, overwrite=True)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert [path.name for path in tmp_path.parent.iterdir() if tmp_path.name in path.name] == [tmp_path.name]
