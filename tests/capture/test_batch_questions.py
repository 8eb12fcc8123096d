"""Branches on the size of the batch: a graph says for which batches it holds."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.oracles.interpret_graph import takes_batch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.ir.graph import Graph
from autopar.ir.plan_file.codec import decode, encode

Ask = Callable[[Tensor], bool]


class Branch(nn.Module):
    def __init__(self, ask: Ask) -> None:
        super().__init__()
        self.linear, self.ask = nn.Linear(4, 4), ask

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return (y if self.ask(x) else y * 2).square().mean()  # type: ignore[no-any-return]


QUESTIONS: dict[str, Ask] = {
    "more than one": lambda x: x.shape[0] > 1,
    "none of one": lambda x: x.shape[0] != 1,
    "at least eight": lambda x: x.shape[0] >= 8,
    "just eight": lambda x: x.size(0) == 8,
    "few": lambda x: not x.shape[0] > 5,
    "even": lambda x: x.shape[0] % 2 == 0,
    "odd as a truth": lambda x: bool(x.shape[0] % 2),
    "no multiple of three": lambda x: (1 if x.shape[0] % 3 else 0) > 0,
    "bits": lambda x: bool(x.shape[0] >> 2 & 1) and not (x.shape[0] - 1) // 5,
    "a float as a truth": lambda x: bool(x.shape[0] % 2 * 1.0),
    "rows that are left": lambda x: bool(x[6:].shape[0]),
    "an index": lambda x: ["even", "odd"][x.shape[0] % 2] == "odd",
    "rounds of a loop": lambda x: sum(1 for _ in range(x.shape[0] % 4)) > 1,
    "rows without an end": lambda x: x[:6].shape[0] == 6,
    "the last rows": lambda x: x[-3:].shape[0] + x[:-2].shape[0] > 4,
    "rows between": lambda x: x[1:-1].shape[0] + x[2:].shape[0] > 3,
    "a number of Python": lambda x: int(x.shape[0] / 3) > 1,
    "quotients": lambda x: x.shape[0] // 3 < 2,
    "a part": lambda x: x.shape[0] / 3 - x.shape[0] % 4 / 2 > 1.5,
    "elements": lambda x: x.numel() > 30,
    "the smaller": lambda x: min(x.shape[0], 6) == 6,
    "several": lambda x: 2 < x.shape[0] <= 9,
    "one of": lambda x: x.shape[0] in (3, 8),
    "a truth as a number": lambda x: int(x.shape[0] > 6) + (x.shape[0] > 4) * 1.5 > 1,
    "the larger of floats": lambda x: max(1 / x.shape[0], 0.15) > 0.16,
    "the smaller of floats": lambda x: min(x.shape[0] / 4, 1.7) < 1.7,
    "a text": lambda x: str(x.shape[0]) == "8",
    "a text of a shape": lambda x: f"{x.shape}" == "torch.Size([8, 4])",
    "a text of a float": lambda x: repr(1 / x.shape[0]) == "0.125",
    "an exact type": lambda x: type(x.shape[0]) is int and type(x) is Tensor and x.shape[0] > 4,
    "a type": lambda x: isinstance(x.shape[0], int) and isinstance(x.shape[0] / 2, float) and x.shape[0] > 4,
}


def graph_of(ask: Ask, batch: int) -> Graph:
    return capture(Branch(ask), (torch.ones(batch, 4),))


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_graph_holds_for_batches_of_its_branch(name: str) -> None:
    """Only for them: another answer is another number of operations."""
    ask = QUESTIONS[name]
    for example in (8, 3):
        graph = graph_of(ask, example)
        if not graph.batch_is_symbolic:  # torch takes a size that equals a number for the number
            assert name in ("just eight", "one of") or (example == 3 and "rows" in name)
            continue
        assert graph.interface is not None
        for batch in (1, 2, 3, 5, 6, 8, 9, 10, 16):
            holds = takes_batch(graph, batch)
            assert not holds or ask(torch.empty(batch, 4)) == ask(torch.empty(example, 4)), (name, example, batch)
        assert takes_batch(graph, example)
        assert decode(Graph, encode(graph)) == graph


@pytest.mark.parametrize("name", ["more than one", "at least eight", "even"])
def test_every_batch_of_the_branch_is_taken(name: str) -> None:
    ask = QUESTIONS[name]
    graph = graph_of(ask, 8)
    for batch in (1, 2, 3, 7, 8, 10, 1000):
        assert takes_batch(graph, batch) == ask(torch.empty(batch, 1))


def test_a_batch_of_one_has_its_own_branch() -> None:
    """Torch takes every size for at least 2; where nobody asks, a batch of 1 is as any other."""
    graph = graph_of(QUESTIONS["more than one"], 1)
    assert not graph.batch_is_symbolic and any(node.op == "aten.mul.Tensor" for block in graph.blocks for node in block.nodes)
    assert graph_of(lambda x: x.shape[1] > 1, 1).batch_is_symbolic


def test_functions_of_other_files_know_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that a file of the model gets from a third."""
    far = "def counts(x):\n    return isinstance(x.shape[0], int) and type(x).__name__ == 'Tensor'"
    (tmp_path / "far_types.py").write_text(far)
    (tmp_path / "near_types.py").write_text("import far_types\n\ndef counts(x):\n    return far_types.counts(x)")
    monkeypatch.syspath_prepend(str(tmp_path))
    near = importlib.import_module("near_types")
    monkeypatch.setattr(sys.modules[__name__], "near_types", near, raising=False)
    graph = graph_of(lambda x: near.counts(x), 8)
    assert not any(node.op == "aten.mul.Tensor" for block in graph.blocks for node in block.nodes)
    assert "isinstance" not in vars(near) and "type" not in vars(sys.modules["far_types"])


METACLASS = """
class Meta(type):
    def __new__(mcs, name, bases, namespace):
        return type.__new__(mcs, name, bases, namespace | {"factor": 2})

class Plain:
    pass

def answers(x):
    class Made(metaclass=Meta):
        pass
    class Other(type):
        pass
    def annotated(kinds: list[type[int]]) -> type | None:
        return None
    return [
        type(Plain) is type, type(int) == type, {type: 2}.get(type(Plain)), type.__name__, str(type), Made.factor,
        isinstance(Made, type), issubclass(Meta, type), type(Other("Third", (), {})) is Other,
        type("Fourth", (Plain,), {})().__class__.__name__,
        type(x).__name__, type(x.shape[0]) in (int, float), type([x])((x,))[0] is x, isinstance(x.shape[0], (str, int)),
    ]
"""


def test_type_does_as_pythons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for values of a trace; a module that has a name of its own like that keeps it."""
    (tmp_path / "own_types.py").write_text(METACLASS)
    (tmp_path / "own_name.py").write_text('type = "relu"\n\ndef answers(x):\n    return type == "relu"')
    (tmp_path / "late_names.py").write_text("from own_types import *")
    monkeypatch.syspath_prepend(str(tmp_path))
    own, named = importlib.import_module("own_types"), importlib.import_module("own_name")
    found: list[object] = []

    def ask(x: Tensor) -> bool:
        importlib.import_module("late_names")
        found[:] = [*own.answers(x), named.answers(x)]
        return True

    monkeypatch.setattr(sys.modules[__name__], "functions", {"own": own.answers, "named": named.answers}, raising=False)
    graph_of(ask, 8)
    assert found == [*own.answers(torch.ones(8, 4)), named.answers(torch.ones(8, 4))]
    assert not {"type", "isinstance"} & (vars(own).keys() | vars(sys.modules["late_names"]).keys()) and named.type == "relu"


class Checked(nn.Module):
    """Refuses large numbers, which it reads from the data."""

    def forward(self, x: Tensor) -> Tensor:
        if x.max().item() >= 5:
            raise ValueError("too large")
        return x.square().mean()


@pytest.mark.parametrize("batch", [4, 8])
def test_a_question_about_data_is_none_about_the_batch(batch: int) -> None:
    graph = capture(Checked(), (torch.ones(batch, dtype=torch.long) + 0.0,))
    assert graph.batch_is_symbolic and graph.interface is not None and not graph.interface.batch_conditions


def test_what_torch_asks_is_no_condition() -> None:
    graph = capture(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), (torch.ones(8, 4),))
    assert graph.interface is not None and not graph.interface.batch_conditions
