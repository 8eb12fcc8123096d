"""Arguments that make no sense: one line each, whatever they are; and those that do, work."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.plans.mutations import resealed
from support.plans.tiny_plans import tiny_document
from torch import nn

import autopar
from autopar.cli import main
from autopar.cli.console import Console, TableConsole
from autopar.cost_models.hardware.cluster import Cluster


class Net(nn.Module):
    """A linear and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.a(x), y)


class Chosen(Net):
    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return iter([self.a.bias])


def batch(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {"x": torch.zeros(4, 8, dtype=dtype), "y": torch.zeros(4, 8, dtype=dtype)}


CALL: dict[str, Any] = dict(model=Net(), cluster="local:2", example_inputs=batch(), force="dp=2")
HUGE = 10**400

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "class": (dict(model=Net), "Net is a class: pass an instance"),
    "function": (dict(model=torch.relu), "relu is a function: write it as the forward"),
    "state dict": (dict(model=Net().state_dict()), "a state dict has no forward"),
    "own parameters": (dict(model=nn.Sequential(Chosen())), r"Chosen.parameters overrides .*another name \(trained_parameters\)"),
    "no model": (dict(model=None), "has to be an nn.Module"),
    "cluster 4": (dict(cluster=4), 'cluster=4 names none: write "local:4"'),
    "no cluster": (dict(cluster=None), "cluster=None names none"),
    "no outputs": (dict(outputs=None), "outputs=None is no list of names"),
    "outputs text": (dict(outputs="hidden"), r'outputs=\'hidden\' is no list of names: write outputs=\("hidden",\)'),
    "batch nan": (dict(batch=float("nan")), "batch=nan is no count"),
    "huge batch": (dict(batch=HUGE), "batch=a number of 1329 bits"),
    "seconds": (dict(time_limit_seconds="x"), "is no number of seconds"),
    "huge seconds": (dict(time_limit_seconds=HUGE), "is no number of seconds"),
    "nan seconds": (dict(time_limit_seconds=float("nan")), "is no number of seconds"),
    "huge margin": (dict(memory_margin=HUGE), "is no share of memory"),
    "huge load": (dict(expert_load=HUGE), "is no load"),
    "huge degree": (dict(force={"tp": HUGE}), "is no degree"),
    "force 3": (dict(force=3), "force=3 says no degrees"),
    "twice": (dict(force="tp=2,tp=4"), "tp is written twice, as 2 and 4"),
    "batch_dim": (dict(batch_dim=5), r"batch_dim=5 is a dimension of no input: x \(4, 8\), y \(4, 8\)"),
    "huge batch_dim": (dict(batch_dim=HUGE), "is no dimension"),
    "optimizer": (dict(optimizer="nope"), "optimizer 'nope' is not known"),
    "int8": (dict(precision=torch.int8), "torch.int8 is not known"),
    "precision 7": (dict(precision=7), "precision=7 is no dtype"),
    "loss_fn": (dict(loss_fn=3), "loss_fn=3 is no function"),
    "long cluster": (dict(cluster="x" * 5000), "no cluster 'xxx"),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("function", ["plan", "parallelize"])
def test_one_line(what: str, function: str) -> None:
    change, line = REFUSED[what]
    call = CALL | change
    if function == "parallelize":
        call = {name: value for name, value in call.items() if name != "batch"} | (
            {} if "cluster" in change else {"cluster": "local:1"}
        )
        call = call if "force" in change else call | {"force": ""}
        if "batch" in change:
            return  # an option of planning alone
    with pytest.raises(autopar.AutoparError, match=line) as error:
        getattr(autopar, function)(**call)
    assert len(str(error.value)) <= 1000 and "\n" not in str(error.value)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("dtype", "compute", "master"),
    [
        (torch.bfloat16, "bfloat16", "float32"),
        (torch.float16, "float16", "float32"),
        (torch.half, "float16", "float32"),
        (torch.float32, "float32", "float32"),
        (torch.double, "float64", "float64"),
        ("torch.bfloat16", "bfloat16", "float32"),
    ],
)
def test_dtypes_of_torch(dtype: Any, compute: str, master: str) -> None:
    precision = autopar.plan(**CALL, precision=dtype).candidate.precision
    assert (precision.compute, precision.master) == (compute, master)


def test_a_torch_dtype_trains() -> None:
    parallel = autopar.parallelize(Net(), "local:1", batch(), precision=torch.bfloat16, cache=False)
    parallel(**batch()).backward()
    assert {each.grad.dtype for each in parallel.parameters()} == {torch.float32}
    with pytest.raises(autopar.AutoparError, match="this model is parallel already"):
        autopar.parallelize(parallel, "local:1", batch())
    with pytest.raises(autopar.StateError, match="step=1 is no number of steps|is no number of steps"):
        parallel.save("nowhere", step="1")
    torch.distributed.destroy_process_group()


def test_float64_inputs_of_a_float32_model_are_warned_of() -> None:
    with pytest.warns(UserWarning, match="float64, and are cast to float32"):
        autopar.plan(**CALL | dict(example_inputs=batch(torch.float64)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        autopar.plan(**CALL | dict(example_inputs=batch(torch.float64), precision="float64"))


def test_long_values_of_cluster_files_are_cut() -> None:
    data = {**Cluster.parse("local:2").to_dict(), "device": "x" * 5000}
    with pytest.raises(autopar.ClusterError) as error:
        Cluster.from_dict(data)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("words", [["--optimizer", "nope"], ["--force", "tp=2,tp=4"]])
def test_the_command_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "gpt2-tiny", "--cluster", "local:2", *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith("autopar: error: ") and err.count("\n") == 1


# -- plan files


def nodes(document: dict[str, Any]) -> list[Any]:
    found: list[Any] = document["graph"]["blocks"][1]["nodes"]
    return found


MUTANTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "node doubled": lambda d: nodes(d).insert(1, nodes(d)[1]),
    "node first": lambda d: nodes(d).insert(0, nodes(d).pop()),
    "no result": lambda d: nodes(d)[1].update(outputs=[]),
    "block doubled": lambda d: d["graph"]["blocks"].append(d["graph"]["blocks"][1]),
    "call doubled": lambda d: d["graph"]["calls"].insert(1, d["graph"]["calls"][1]),
    "call of none": lambda d: d["graph"]["calls"][1].update(block="none"),
    "input doubled": lambda d: d["graph"]["inputs"].append(d["graph"]["inputs"][0]),
    "parameter of a call gone": lambda d: d["graph"]["calls"][1]["parameters"].pop(),
    "loss of nothing": lambda d: d["graph"].update(loss="nothing"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("command", [["inspect", "--program"], ["explain"]])
def test_a_graph_that_is_none(mutant: str, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    path.write_text(resealed(tiny_document("dense"), MUTANTS[mutant]))
    assert main([command[0], str(path), *command[1:]]) == 2
    err = capsys.readouterr().err
    assert err.startswith("autopar: error: ") and err.count("\n") == 1, err


class Halves(nn.Module):
    """Slices within heads, which the tensor axis shards."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.up(x).unflatten(-1, (4, 8))
        return self.down((heads[..., :4] * heads[..., 4:].tanh()).flatten(-2)).square().mean()


def test_shapes_that_lost_an_entry(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The graph is one, and lowering runs into it: one line, without an exception's name."""
    path = tmp_path / "plan.json"
    example = {"x": torch.rand(16, 4, 16)}
    made = json.loads(autopar.plan(Halves(), "dgx-h100:1", example, force="dp=2,tp=4", batch=16).to_json())
    lost = []

    def lose(document: dict[str, Any]) -> None:
        nodes = (node for block in document["graph"]["blocks"] for node in block["nodes"])
        lost.extend(node["outputs"][0]["shape"].pop() for node in nodes if "slice" in node["op"])

    path.write_text(resealed(made, lose))
    assert lost
    assert main(["inspect", str(path), "--program"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "plan the model again" in err and "Error" not in err, err


# -- narrow terminals


def test_text_is_as_wide_as_the_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(TableConsole, "is_terminal", True)
    monkeypatch.setenv("COLUMNS", "40")
    Console().text("  " + "word " * 60 + "x" * 90)
    Console().table("A title of more than forty columns, which is too long", ("a", "b"), [("c " * 90, "d" * 90)] * 2)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert max(map(len, shown.splitlines())) <= 40
