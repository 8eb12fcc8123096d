"""A script of a seed: a model, a plan, and statements; and how it runs, on one process or on a rank."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from string import Template
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autopar.errors import AutoparError
from support.fuzzing.habits.statements import CHOICES, GRAMMAR

KINDS = ("loss", "output", "dict", "batch_norm")
FORCES = ("dp=2,tp=2", "dp=2,tp=2", "dp=4,zero=3", "tp=4", "")
WIDTH, OUT, SIZES = 16, 4, (8, 8, 8, 8, 4, 7)
Batch = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Script:
    seed: int
    kind: str
    force: str
    statements: tuple[str, ...]

    @property
    def text(self) -> str:
        head = f"# seed {self.seed}: a model of kind {self.kind!r} under {self.force or 'the free choice'}"
        return "\n".join((head, *self.statements))


def write_script(seed: int) -> Script:
    """The script of that seed: 3 to 8 statements, each followed by a step."""
    draw = Random(f"habits {seed}")
    lines = [_statement(draw) for _ in range(draw.randint(3, 8))]
    steps = [f"step({draw.randrange(4)})" for _ in range(len(lines) + 1)]
    between = [text for pair in zip(lines, steps[1:], strict=True) for text in pair]
    return Script(seed, draw.choice(KINDS), draw.choice(FORCES), (steps[0], *between))


def single_scripts(force: str = "dp=2,tp=2", kind: str = "loss") -> list[Script]:
    """A script for each line of the grammar: a step, the statement, and two more steps."""
    draw = Random("each")
    every = [text for lines in GRAMMAR.values() for text in lines]
    scripts = [("step(0)", _filled(text, draw), "step(1)", "step(2)") for text in every]
    return [Script(number, kind, force, statements) for number, statements in enumerate(scripts)]


def _statement(draw: Random) -> str:
    return _filled(draw.choice(GRAMMAR[draw.choice(list(GRAMMAR))]), draw)


def _filled(text: str, draw: Random) -> str:
    return Template(text).substitute({name: draw.choice(values) for name, values in CHOICES.items()})


# -- the model


class Net(nn.Module):
    """Two square layers, a norm, dropout that drops nothing, a buffer, and attributes that scale the result."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.alpha, self.config = kind, 0.5, SimpleNamespace(alpha=1.0)
        self.a, self.b, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, OUT)
        self.norm = nn.BatchNorm1d(WIDTH) if kind == "batch_norm" else nn.LayerNorm(WIDTH)
        self.act, self.drop = nn.ReLU(), nn.Dropout(0.0)
        self.register_buffer("t", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        h = x + self.drop(self.b(self.act(self.a(self.norm(x)))) * self.t)
        out = self.head(h) * self.alpha * self.config.alpha
        if self.kind == "output":
            return out
        loss = nn.functional.mse_loss(out, y)
        return {"loss": loss, "logits": out} if self.kind == "dict" else loss


def net(kind: str, seed: int = 0) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Net(kind).double()


def batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    draw = lambda size, width: torch.randn(size, width, generator=generator, dtype=torch.float64)  # noqa: E731
    return [{"x": draw(size, WIDTH), "y": draw(size, OUT)} for size in SIZES]


# -- running


class Ended(NamedTuple):
    """Numbers that were noted and the state at the end; the statement that raised, with what it said. `refused`: by autopar."""

    notes: list[float]
    state: dict[str, Tensor]
    at: int = -1
    error: str = ""
    refused: bool = False


def run_script(script: Script, parallelize: Callable[[nn.Module], Any] | None = None) -> Ended:
    """Runs the script's statements one after the other until one raises. `parallelize` makes the model that is trained."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(script.seed)
    try:
        with warnings.catch_warnings(action="ignore"):
            return _run(script, parallelize or (lambda model: model))
    finally:
        torch.set_default_dtype(default)


def _run(script: Script, parallelize: Callable[[nn.Module], Any]) -> Ended:
    notes: list[float] = []
    plain = net(script.kind)
    names = _names(script.kind, plain, parallelize(plain), notes)
    for number, statement in enumerate(script.statements):
        try:
            exec(statement, names)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            return Ended(notes, {}, number, text, isinstance(error, AutoparError))
    model: Any = names["model"]
    state = model.full_state() if hasattr(model, "full_state") else model.state_dict()
    return Ended(notes, {name: value.detach().clone() for name, value in state.items()})


def _names(kind: str, plain: nn.Module, model: Any, notes: list[float]) -> dict[str, Any]:
    """What statements refer to."""
    data = batches()

    def loss_of(result: Any, number: int) -> Tensor:
        if kind == "output":
            return nn.functional.mse_loss(result, data[number]["y"])
        return result["loss"] if kind == "dict" else result  # type: ignore[no-any-return]

    def result_loss(of: Any, number: int) -> Tensor:
        return loss_of(of(**data[number]), number)

    def loss_on(number: int) -> Tensor:
        return result_loss(names["model"], number)

    def update() -> None:
        names["optimizer"].step()
        names["optimizer"].zero_grad()

    def step(number: int) -> None:
        loss = loss_on(number)
        if loss.requires_grad:
            loss.backward()
        update()
        note(loss.detach())

    def note(value: Any) -> None:
        notes.append(float(_full(value)))

    names: dict[str, Any] = {
        "torch": torch, "nn": nn, "copy": copy, "io": io, "plain": plain, "model": model, "batches": data,
        "loss_of": loss_of, "result_loss": result_loss, "loss_on": loss_on, "update": update, "step": step, "note": note,
        "distinct": _distinct, "fresh": lambda: net(kind, 1), "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }  # fmt: skip
    return names


def _full(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _distinct(value: Tensor) -> int:
    """How many different numbers a tensor has: as many as elements, where each was drawn."""
    return len(torch.unique(_full(value.detach())))
