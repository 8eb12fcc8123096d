"""Habits of ``torch.compile`` (docs/compile.md), and of options and metrics, on real ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from support.harness.comparison import same_gradients
from support.harness.habits import (  # noqa: F401
    ROWS,
    cluster,
    equals_one_process,
    refusal,
    test_habit,
    test_habit_under_other_plans,
    warning_of,
)
from support.models.habit_model import net
from support.models.zoo.output_model import Classifier, classifier, examples
from torch import Tensor, nn

import autopar


def parallel_of(model: nn.Module, force: str | None, example: Any = None, **options: Any) -> Any:
    options = {"cache": False, "time_limit_seconds": 5, **options}
    return autopar.parallelize(model, cluster(), example or examples(), force=force, **options)


def compile_after(force: str) -> None:
    """``torch.compile(parallel)``, ``parallel.compile()``, and a compiled function that calls it: traced around, not into."""
    plain = classifier()

    def step(model: Any) -> Tensor:
        loss: Tensor = model(**examples()).loss * 1.0
        loss.backward()
        return loss.detach()

    for kind in ("wrapped", "in place", "inside"):
        parallel = parallel_of(classifier(), force)
        model: Any = torch.compile(parallel, backend="eager") if kind == "wrapped" else parallel
        if kind == "in place":
            parallel.compile(backend="eager")
        expected = step(plain)
        call = torch.compile(model.__call__, backend="eager") if kind == "inside" else model
        for _ in range(2):
            parallel.zero_grad()
            loss = call(**examples()).loss * 1.0
            loss.backward()
            torch.testing.assert_close(loss.detach(), expected, rtol=1e-9, atol=0)
        same_gradients(parallel, plain)
        with torch.no_grad():
            torch.testing.assert_close(call(**examples()).logits, plain(**examples()).logits.detach(), rtol=1e-9, atol=1e-11)
        torch.compiler.reset()


def compile_before(force: str) -> str:
    """It computes what it did, and says what compiles."""
    plain, line = classifier(), ROWS["compile_before"][1]
    plain(**examples()).loss.backward()
    made: list[Any] = []
    said = warning_of(lambda: made.append(parallel_of(torch.compile(classifier(), backend="eager"), force)))
    assert dist.get_rank() or line in said
    made[0](**examples()).loss.backward()
    found = {name.removeprefix("_orig_mod."): gradient for name, gradient in made[0].full_gradients().items()}
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-9, atol=1e-11)
    by_position = tuple(examples().values())
    wrapped = parallel_of(torch.compile(classifier(), backend="eager"), force, by_position)
    torch.testing.assert_close(wrapped(*by_position).loss.detach(), plain(**examples()).loss.detach(), rtol=1e-9, atol=0)
    model = classifier()
    model.compile(backend="eager")
    said = warning_of(lambda: made.append(parallel_of(model, force)))
    assert dist.get_rank() or line in said
    made[1](**examples()).loss.backward()
    same_gradients(made[1], plain)
    return line


def force_is_none(force: str) -> None:
    """An option of a script's own that is None by default."""
    from support.models.habit_model import batch

    equals_one_process(parallel_of(net(), force or None, batch()), net())


class Metrics(Classifier):
    """Returns a number beside its loss, and keeps one: of a tensor, or taken by ``.item()``."""

    def __init__(self, item: bool) -> None:
        super().__init__()
        self.item = item

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Any]:
        logits = super().forward(x)
        accuracy = (logits.argmax(-1) == labels).double().mean()
        return {"loss": nn.functional.cross_entropy(logits, labels), "accuracy": accuracy.item() if self.item else accuracy}


def metric_by_item(force: str) -> str:
    """As a tensor it is there where it is asked for."""
    torch.manual_seed(0)
    plain = Metrics(item=False).double()
    parallel = parallel_of(plain, force, outputs=("accuracy",))
    assert parallel(**examples())["accuracy"].item() == plain(**examples())["accuracy"].item()
    return refusal(lambda: parallel_of(Metrics(item=True).double(), force))
