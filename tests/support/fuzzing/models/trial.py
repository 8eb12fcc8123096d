"""One random model all the way: written, run on one process, captured, planned, made a program, run on ranks, and compared."""

from __future__ import annotations

import copy
import gc
import re
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
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
from autopar.verification.draws import Draw, GiveDraws, RecordDraws, match_draws, with_given_draws
from support.fuzzing.models.on_ranks import Case, Steps, run_cases, two_steps
from support.fuzzing.models.writer import Unfit, Written, model_of, write_model
from support.harness.comparison import different_numbers, different_tensors
from support.harness.end_to_end import sharding_wins
from support.harness.rank_pool import RankError, RankPool
from support.plans.drawn_candidates import drawn_candidate

TOLERANCE, LOW_TOLERANCE = 1e-9, 3e-5
WIGGLE = 1e-13
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


def prepare(seed: int, folder: str, world: int = 0, asked: str | None = None, written: Written | None = None) -> Trial:
    """Everything that one process does. `world`, `asked` and `written` replace what the seed draws."""
    draw = Random(f"plan {seed}")
    drawn_world = draw.choice((2, 2, 4))
    trial = Trial(seed, world or drawn_world, asked or "", written)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _prepare(trial, folder, draw, asked is None)
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


def _prepare(trial: Trial, folder: str, draw: Random, free: bool) -> None:
    trial.stage = "written"
    written = trial.written = trial.written or write_model(trial.seed)
    path = Path(folder) / f"fuzzed_{trial.seed}.py"
    path.write_text(written.text)
    trial.stage = "single process"
    model = trial.model = model_of(written, trial.seed, str(path))
    trial.expected, draws = single(copy.deepcopy(model), written)
    trial.stage = "captured"
    graph = capture(model, (), {name: tensor.clone() for name, tensor in written.inputs.items()})
    trial.stage = "planned"
    wins = draw.random() < 0.6
    trial.asked = drawn_plan(draw, trial.world, graph) if free else trial.asked
    graph, candidate = planned(graph, trial, wins)
    trial.stage = "draws"
    given = {}
    if draws:
        graph, candidate, given = with_given_draws(graph, candidate, match_draws(graph, draws))
    trial.stage = "program"
    text = program_text(graph, candidate)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    state = {name: tensors[name].detach().clone() for name in graph.parameters()}
    form = graph.interface.returns if graph.interface else None
    named = {each.name for each in graph.inputs}
    inputs = {name: tensor for name, tensor in {**written.inputs, **given}.items() if name in named}
    trial.case = Case(text, state, inputs, tuple(given), form)
    trial.stage = "run"


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


# -- ranks, and the comparison


def run_trials(trials: Sequence[Trial], ranks: RankPool, timeout: float = 120.0) -> None:
    """Runs what was prepared on ranks, and compares. Cases that make their ranks fail together are found one by one."""
    for world in sorted({trial.world for trial in trials}):
        mine = [trial for trial in trials if trial.world == world and trial.case is not None]
        if not mine:
            continue
        try:
            _judge(mine, ranks.run(run_cases, [trial.case for trial in mine], world=world, timeout=timeout))
        except RankError:
            for trial in mine:
                try:
                    _judge([trial], ranks.run(run_cases, [trial.case], world=world, timeout=30.0))
                except RankError as error:
                    trial.wrong = str(error)


def _judge(trials: Sequence[Trial], answers: Sequence[Sequence[Steps | str]]) -> None:
    for number, trial in enumerate(trials):
        found = [answer[number] for answer in answers]
        said = [each for each in found if isinstance(each, str)]
        if said:
            refusals = [each for each in said if "\n" not in each]
            if len(refusals) == len(found):
                trial.refused = refusals[0]
            else:
                trial.wrong = max(said, key=len)
            continue
        trial.wrong = "\n".join(compared(trial, [each for each in found if isinstance(each, Steps)]))


def compared(trial: Trial, found: Sequence[Steps]) -> list[str]:
    """What differs from one process; nothing where one process with inputs that are off by a rounding differs as much."""
    written, expected = trial.written, trial.expected
    assert written is not None and expected is not None and trial.model is not None
    tolerance = LOW_TOLERANCE if written.low else TOLERANCE
    wrong = [text for each in found for text in different_numbers("loss", each.losses, expected.losses, tolerance)]
    wrong += step_differences(found[0], expected, tolerance)
    if not wrong:
        return []
    moved = copy.deepcopy(trial.model)
    with torch.no_grad():
        for tensor in moved.parameters():
            tensor.mul_(1 + WIGGLE * torch.randn_like(tensor))
    inputs = {name: x * (1 + WIGGLE * torch.randn_like(x)) if x.is_floating_point() else x for name, x in written.inputs.items()}
    other, _ = single(moved, replace(written, inputs=inputs))
    unsteady = step_differences(other, expected, tolerance / 10)
    unsteady += different_numbers("loss", other.losses, expected.losses, tolerance / 10)
    trial.unsteady = bool(unsteady)
    return [] if unsteady else wrong


def step_differences(found: Steps, expected: Steps, tolerance: float) -> list[str]:
    """Gradients, state and results; a gradient that one side lacks is zero."""
    names = found.gradients.keys() | expected.gradients.keys()
    whole = {name: found.gradients.get(name, expected.gradients.get(name)) for name in names}
    gradients = [
        {name: each.gradients.get(name, torch.zeros_like(whole[name])) for name in names}  # type: ignore[arg-type]
        for each in (found, expected)
    ]
    wrong = different_tensors("gradient", *gradients, tolerance, noise=1e-3)
    both = found.state.keys() & expected.state.keys()
    wrong += different_tensors(
        "state", {name: found.state[name] for name in both}, {name: expected.state[name] for name in both}, tolerance
    )
    there = found.returned.keys() & expected.returned.keys()
    wrong += different_tensors(
        "result", {name: found.returned[name] for name in there}, {name: expected.returned[name] for name in there}, tolerance
    )
    if not there:
        wrong.append(f"results {sorted(found.returned)} instead of {sorted(expected.returned)}")
    return wrong


# -- refusals

PLACE = re.compile(r"\.py:\d+|\b(input|output|module|parameter|buffer|block|stage|batch|force|Layer\d+|Model)\b")
REMEDY = re.compile(
    r"\b(pass|use|write|give|return|make|leave|plan|take|lower|choose|call|keep|move|drop|force|add|wrap|register|ask|let|raise|"
    r"set|launch|change|put|mark|load|go|select|try)\b"
)


def is_said_well(refusal: str) -> bool:
    """Whether a refusal is one line that says where, and how to mend it."""
    line, *more = refusal.splitlines()
    return (not more or line.startswith("Infeasible")) and bool(PLACE.search(refusal)) and bool(REMEDY.search(refusal))


@dataclass(slots=True)
class Tally:
    """What came of many trials."""

    equal: int = 0
    unsteady: int = 0
    wrong: list[Trial] = field(default_factory=list)
    badly_said: list[Trial] = field(default_factory=list)
    refusals: list[Trial] = field(default_factory=list)

    @property
    def refused(self) -> int:
        return len(self.refusals)

    @property
    def failures(self) -> str:
        """Each failure with what makes it again."""
        return "\n\n".join(
            f"{trial.headline} ({trial.stage}): {trial.wrong or trial.refused}\n"
            f"  again: python -m support.fuzzing.models --seed {trial.seed} --show   (in tests/)"
            for trial in (*self.wrong, *self.badly_said)
        )


def many_trials(
    seeds: Iterable[int], ranks: RankPool, world: int = 0, together: int = 25, say: Callable[[str], None] = lambda line: None
) -> Tally:
    """Trials of all seeds, `together` of them at once on the ranks (`world` of them, or what each seed draws)."""
    tally, waiting = Tally(), list[Trial]()

    def finish() -> None:
        run_trials(waiting, ranks)
        for trial in waiting:
            if trial.wrong:
                tally.wrong.append(trial)
                say(f"WRONG {trial.headline} ({trial.stage}): {trial.wrong.strip().splitlines()[-1][:300]}")
            elif trial.refused:
                tally.refusals.append(trial)
                if not is_said_well(trial.refused):
                    tally.badly_said.append(trial)
                    say(f"BADLY SAID {trial.headline} ({trial.stage}): {trial.refused[:300]}")
            elif trial.unsteady:
                tally.unsteady += 1
            else:
                tally.equal += 1
            trial.model = trial.expected = trial.case = None
        waiting.clear()

    gc.disable()  # captures make many objects, and a collection of all costs more than a capture
    try:
        with tempfile.TemporaryDirectory() as folder:
            for seed in seeds:
                waiting.append(prepare(seed, folder, world))
                if len(waiting) == together:
                    finish()
                    gc.collect()
            finish()
    finally:
        gc.enable()
    return tally
