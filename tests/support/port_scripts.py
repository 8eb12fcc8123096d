"""The scripts of examples/ports: as their authors have them for one process, and with the lines that change for autopar.

A line that ends with ``# autopar`` is new, and a line ``# before: ...`` is what stood there before. Both scripts are run as they
are: in float64 where they say nothing of dtypes, and with the plan that is asked for. What they leave in `losses` and in every
variable that is a model is compared.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from support.harness.comparison import different_numbers, different_tensors

FOLDER = Path(__file__).parents[2] / "examples" / "ports"
NEW = "  # autopar"
BEFORE = re.compile(r"^( *)# before: ", re.MULTILINE)


class Result(NamedTuple):
    """Losses, and the state of each model by the variable's name."""

    losses: list[float]
    states: dict[str, dict[str, Tensor]]


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.py"))


def before(name: str) -> str:
    """The script of its author."""
    lines = (FOLDER / f"{name}.py").read_text().splitlines(keepends=True)
    return BEFORE.sub(r"\1", "".join(line for line in lines if not line.rstrip().endswith(NEW)))


def after(name: str) -> str:
    """The script with autopar, without the lines that it had before."""
    lines = (FOLDER / f"{name}.py").read_text().splitlines(keepends=True)
    return "".join(line.replace(NEW, "") for line in lines if not BEFORE.match(line))


def changed_lines(name: str) -> int:
    """Lines that are new, replaced or gone; empty ones do not count."""
    lines = ([line for line in text.splitlines() if line] for text in (before(name), after(name)))
    matcher = difflib.SequenceMatcher(None, *lines, autojunk=False)
    return sum(max(i2 - i1, j2 - j1) for kind, i1, i2, j1, j2 in matcher.get_opcodes() if kind != "equal")


# -- on a rank, or in a process of its own


def run_before(name: str, *changes: tuple[str, str]) -> Result:
    """On one process, with other text in places. A script that is distributed itself has the group of this process."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.init_process_group = lambda *args, **options: None
    return _run(_changed(before(name), changes), name)


def run_after(name: str, force: str, *changes: tuple[str, str]) -> Result:
    os.environ.setdefault("MASTER_ADDR", "localhost")  # torchrun sets it, and accelerate asks for it
    with _forced(force):
        return _run(_changed(after(name), changes), name)


def _changed(text: str, changes: tuple[tuple[str, str], ...]) -> str:
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text


def _run(text: str, name: str) -> Result:
    path = str(FOLDER / f"{name}.py")
    variables: dict[str, Any] = {"__name__": "__main__", "__file__": path}
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        exec(compile(text, path, "exec"), variables)
        models = {name: value for name, value in variables.items() if isinstance(value, nn.Module) and not _has_parts(value)}
        return Result(list(variables["losses"]), {name: _state_of(model) for name, model in models.items()})
    finally:
        torch.set_default_dtype(default)


def _has_parts(model: nn.Module) -> bool:
    """Whether a plain module holds a parallel one, which is a variable of its own: it has a rank's shards."""
    return not hasattr(model, "full_state") and any(hasattr(each, "full_tensor") for each in model.parameters())


def _state_of(model: nn.Module) -> dict[str, Tensor]:
    """Full tensors by name, without what wrappers put before the names."""
    state = model.full_state() if hasattr(model, "full_state") else model.state_dict()  # type: ignore[operator]
    return {re.sub(r"^(module|_orig_mod)\.", "", name): tensor.detach().clone() for name, tensor in state.items()}


@contextmanager
def _forced(force: str) -> Iterator[None]:
    """Whatever calls `parallelize` gets a plan of these degrees, from a short search that is not kept."""
    import autopar
    from autopar import api

    plain: Callable[..., Any] = api.parallelize

    def parallelize(*args: Any, **options: Any) -> Any:
        return plain(*args, **{"force": force, "time_limit_seconds": 10.0, "cache": False} | options)

    autopar.parallelize = api.parallelize = parallelize
    try:
        yield
    finally:
        autopar.parallelize = api.parallelize = plain


# -- comparison


def result_differences(found: Result, expected: Result, tolerance: float) -> list[str]:
    """What differs by more than `tolerance`; models on both sides are compared."""
    out = different_numbers("loss", found.losses, expected.losses, tolerance)
    both = found.states.keys() & expected.states.keys()
    if not both:
        return [*out, "no model was found on both sides"]
    for name in sorted(both):
        out += different_tensors(name, found.states[name], expected.states[name], tolerance, smallest=1e-9)
    return out
