"""A random model up to its program: written, run on one process, captured, planned, rendered."""

from __future__ import annotations

import copy
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random

import torch
from torch import nn

from autopar.capture import capture
from autopar.cost_models.hardware.cluster import Cluster
from autopar.errors import AutoparError
from autopar.ir.graph import Graph
from autopar.ir.mesh import Axis, Mesh
from autopar.ir.plan import Candidate, Precision
from autopar.program.build import program_text
from autopar.solve.search import search
from autopar.solve.space.force import parse_force
from autopar.solve.space.options import SearchOptions
from autopar.verification.draws import Draw, GiveDraws, RecordDraws, match_draws, with_draws
from support.fuzzing.models.on_ranks import Case, Steps, two_steps
from support.fuzzing.models.writer import Unfit, Written, model_of, write_model
from support.harness.end_to_end import sharding_wins
from support.harness.training_loop import graph_state
from support.oracles.interpret_graph import takes_batch
from support.plans.drawn_candidates import drawn_candidate

FORCES = {
    2: ("dp=2", "dp=2,zero=3", "dp=2,zero=1", "tp=2", "tp=2", "pp=2", "pp=2,micro=2", "", "dp=2,zero=2"),
    4: ("dp=2,tp=2", "tp=2,tp2=2", "tp=4", "dp=4,zero=3", "dp=2,tp=2,zero=3", "pp=2,dp=2", "pp=2,tp=2", "", "dp=4"),
}
"""Degrees by number of ranks; none is the free choice."""
DRAWN = {2: ({"dp": 2}, {"tp": 2}, {"dp": 1, "tp": 2}), 4: ({"dp": 2, "tp": 2}, {"tp": 2, "tp2": 2}, {"tp": 4}, {"dp": 4})}
"""Meshes of plans that no solver made."""


@dataclass(slots=True)
class Trial:
    """A seed: its model, the plan that is asked for, and what came of it."""

    seed: int
    world: int
    asked: str
    written: Written | None = None
    expected: Steps | None = None
    model: nn.Module | None = None
    case: Case | None = None
    refused: str = ""
    wrong: str = ""
    stage: str = ""
    unsteady: bool = False
    """Whether one process with inputs that are off by a rounding differs as much from itself."""

    @property
    def headline(self) -> str:
        return f"seed {self.seed} on {self.world} ranks under {self.asked or 'the free choice'}"


@cache
def cluster_of(world: int, wins: bool) -> Cluster:
    return sharding_wins(world) if wins else Cluster.parse(f"local:{world}")


def prepare(
    seed: int,
    folder: str,
    world: int = 0,
    asked: str | None = None,
    written: Written | None = None,
    graphs: dict[str, Graph] | None = None,
) -> Trial:
    """Everything that one process does. `world`, `asked` and `written` replace what the seed draws. `graphs`: those of texts that
    were captured before; what is captured is added."""
    draw = Random(f"plan {seed}")
    drawn_world = draw.choice((2, 2, 4))
    trial = Trial(seed, world or drawn_world, asked or "", written)
    try:
        with warnings.catch_warnings(action="ignore"):
            _prepare(trial, folder, draw, asked is None, {} if graphs is None else graphs)
    except AutoparError as error:
        trial.refused = f"{type(error).__name__}: {error}"
    except Unfit:
        raise
    except Exception:
        trial.wrong = traceback.format_exc()
    return trial


def drawn_plan(draw: Random, world: int, graph: Graph) -> str:
    """What is asked of the plan: mostly what is possible for this model. ``drawn:`` is one that no solver made."""
    able = graph.interface is None or graph.interface.has_loss
    able &= graph.batch_is_symbolic and len(graph.calls) > 1 and graph.batch > 1
    often = draw.random() < 0.95
    forces = [text for text in FORCES[world] if not often or able or "pp" not in text]
    forces = [text for text in forces if not often or graph.batch % parse_force(text).degrees.get("dp", 1) == 0]
    meshes = [axes for axes in DRAWN[world] if graph.batch % axes.get("dp", 1) == 0]
    axes, zero = draw.choice(meshes), draw.choice((0, 0, 1, 3))
    if draw.random() < 0.3:
        return "drawn:" + ",".join(f"{name}={size}" for name, size in axes.items()) + f",zero={zero}"
    return draw.choice(forces)


def _prepare(trial: Trial, folder: str, draw: Random, free: bool, graphs: dict[str, Graph]) -> None:
    trial.stage = "written"
    written = trial.written = trial.written or write_model(trial.seed)
    path = Path(folder) / f"fuzzed_{trial.seed}.py"
    path.write_text(written.text)
    trial.stage = "single process"
    model = trial.model = model_of(written, trial.seed, str(path))
    trial.expected, draws = single(copy.deepcopy(model), written)
    trial.stage = "captured"
    if written.text not in graphs:
        graphs[written.text] = capture(model, (), {name: tensor.clone() for name, tensor in written.inputs.items()})
    graph = graphs[written.text]
    trial.stage = "planned"
    wins = draw.random() < 0.6
    trial.asked = drawn_plan(draw, trial.world, graph) if free else trial.asked
    graph, candidate = planned(graph, trial, wins)
    trial.stage = "draws"
    given = {}
    if draws:
        graph, candidate, given = with_draws(graph, candidate, match_draws(graph, draws))
    trial.stage = "program"
    text = program_text(graph, candidate)
    uneven = "" if draws else _uneven_program(trial, graph, candidate)
    written = trial.written
    state = graph_state(graph, model)
    form = graph.interface.returns if graph.interface else None
    named = {each.name for each in graph.inputs}
    inputs = {name: tensor for name, tensor in {**written.inputs, **given}.items() if name in named}
    trial.case = Case(text, state, inputs, tuple(given), form, uneven)
    trial.stage = "run"


def _uneven_program(trial: Trial, graph: Graph, candidate: Candidate) -> str:
    """The program of every second trial, which takes one example less, so that data ranks have uneven shards; empty where the
    model or its plan cannot."""
    ranks, batch, written = candidate.mesh.size_of("dp"), graph.batch - 1, trial.written
    assert written is not None and trial.model is not None
    if trial.seed % 2 or not graph.batch_is_symbolic or candidate.micro_batches > 1 or not batch % ranks or batch <= ranks:
        return ""
    if any(x.shape[:1] != (graph.batch,) for x in written.inputs.values()) or not takes_batch(graph, batch):
        return ""
    less = replace(written, inputs={name: x[:batch] for name, x in written.inputs.items()})
    try:
        trial.expected, _ = single(copy.deepcopy(trial.model), less)
    except (RuntimeError, ValueError, IndexError):  # a model of its batch alone
        return ""
    try:
        text = program_text(replace(graph, batch=batch), replace(candidate, batch=batch), uneven=True)
    except AutoparError:
        trial.expected, _ = single(copy.deepcopy(trial.model), written)
        return ""
    trial.written = less
    return text


def single(model: nn.Module, written: Written) -> tuple[Steps, Sequence[Draw]]:
    """One process: both steps draw the same random numbers."""
    recorded: list[Draw] = []

    def call() -> object:
        arguments = {name: tensor.clone() for name, tensor in written.inputs.items()}
        if not written.random:
            return model(**arguments)
        if recorded:
            with GiveDraws(recorded):
                return model(**arguments)
        with RecordDraws(model) as recorder:
            result = model(**arguments)
        recorded.extend(recorder.draws)
        return result

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return two_steps(model, call), recorded


def planned(graph: Graph, trial: Trial, wins: bool) -> tuple[Graph, Candidate]:
    """A plan of the search, or one that was drawn."""
    precision = Precision("float64", "float64")
    if trial.asked.startswith("drawn:"):
        sizes = dict(parse_force(trial.asked.removeprefix("drawn:")).degrees)
        zero = sizes.pop("zero", 0)
        mesh = Mesh(tuple(Axis(name, size) for name, size in ({"dp": 1} | sizes).items()))
        drawn_zero = zero if mesh.size_of("dp") > 1 else 0
        return graph, drawn_candidate(graph, mesh, trial.seed, zero=drawn_zero, precision=precision)
    asked = parse_force(trial.asked)
    options = SearchOptions(
        batch=graph.batch, precision=precision, force=asked.degrees, schedule=asked.schedule, optimizer="sgd"
    )  # fmt: skip
    found = search(graph, cluster_of(trial.world, wins), options)
    return found.graph or graph, found.candidate
