"""``autopar verify``: runs the plan on local processes and the model on one; compares loss, gradients and an optimizer step."""

from __future__ import annotations

import argparse
import copy
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.spawn import spawn

from autopar.cli.commands.plan import make
from autopar.cli.console import Console
from autopar.errors import ClusterError, PlanError, PlanMismatch
from autopar.ir.describe import describe
from autopar.ir.graph import draws_masks
from autopar.ir.plan_file.plan_file import Plan, load_plan

LEARNING_RATE = 0.1
NOISE = 1e-5
"""A gradient whose values are all below this fraction of the largest gradient is taken for rounding noise."""
TOLERANCE = {"float64": 1e-9, "float32": 1e-5, "bfloat16": 5e-2}
"""By compute dtype; for the loss also by its own dtype, which is float32 in some models."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest difference of one tensor, relative to its own largest value (for noise: to a tenth of the largest gradient)."""

    what: str
    name: str
    relative: float


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Exit status 0 where all agree, 1 where they do not: a plan that computes something else is a bug."""
    plan, model, example = _plan(arguments, console)
    size = plan.candidate.devices
    console.progress(f"running {describe(plan.graph, plan.candidate)} on {size} local processes")
    if any(node.op == "ap.random" for block in plan.graph.blocks for node in block.nodes):
        raise PlanError(f"{plan.graph.name} draws random numbers beside dropout: two runs of it differ")
    dtype = getattr(torch, plan.candidate.precision.master)
    model = model.to(dtype).train(not _random(plan))
    batch = {name: value.to(dtype) if value.is_floating_point() else value for name, value in _named(plan, example).items()}
    distributed = _distributed(plan, model, batch)
    console.progress("running the model on one process")
    from autopar.cli.commands.verify_rank import step

    reference = step(copy.deepcopy(model), batch, LEARNING_RATE)
    differences = compare(reference, distributed)
    allowed = tolerances(plan.candidate.precision.compute, reference["loss"].dtype)
    passed = all(difference.relative <= allowed[difference.what] for difference in differences)
    _report(plan, differences, allowed, passed, reference, distributed, console)
    return 0 if passed else 1


def _plan(arguments: argparse.Namespace, console: Console) -> tuple[Plan, nn.Module, dict[str, Any] | tuple[Any, ...]]:
    """The plan to verify, and a model with values."""
    if not arguments.cluster.startswith("local"):
        raise ClusterError(f"verify runs on this machine: write --cluster local:4, not {arguments.cluster}")
    torch.manual_seed(0)
    if arguments.plan is None:
        return make(arguments, console, device="cpu")
    from autopar.api import check_plan
    from autopar.capture.models import load_model
    from autopar.cost_models.hardware.cluster import Cluster

    plan = load_plan(arguments.plan)
    batch = plan.document.batch
    if arguments.batch not in (None, batch.global_):
        raise PlanMismatch(f"the plan is for a batch of {batch.global_}, not {arguments.batch}: leave --batch out, or plan again")
    loaded = load_model(arguments.model, batch.global_, arguments.seq or batch.seq, device="cpu")
    checked = check_plan(plan, loaded.model, Cluster.parse(f"local:{plan.candidate.devices}"), loaded.example_inputs)
    return checked, loaded.model, loaded.example_inputs


def _random(plan: Plan) -> bool:
    """Whether the model drops out: then both sides run in eval mode, since their random masks differ."""
    return any(draws_masks(node) for block in plan.graph.blocks for node in block.nodes)


def _named(plan: Plan, example: dict[str, Any] | tuple[Any, ...]) -> dict[str, torch.Tensor]:
    if isinstance(example, tuple):
        return {value.name: tensor for value, tensor in zip(plan.graph.inputs, example, strict=True)}
    return {name: tensor for name, tensor in example.items() if isinstance(tensor, torch.Tensor)}


def _distributed(plan: Plan, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    """One step on spawned processes: they get the program's text and full tensors, and import no model library."""
    from autopar.cli.commands.verify_rank import work
    from autopar.program.build import program_text

    state = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    job = {
        "program": program_text(plan.graph, plan.candidate),
        "state": {name: tensor.detach() for name, tensor in state.items()},
        "batch": {value.name: batch[value.name].to(getattr(torch, value.dtype)) for value in plan.graph.inputs},
        "learning_rate": LEARNING_RATE,
        "training": model.training,
    }
    with tempfile.TemporaryDirectory() as folder:
        torch.save(job, Path(folder) / "job.pt")
        size = plan.candidate.devices
        spawn(work, args=(size, folder), nprocs=size)
        result: dict[str, Any] = torch.load(Path(folder) / "result.pt", weights_only=True)
        return result


def tolerances(compute: str, loss: torch.dtype) -> dict[str, float]:
    """The largest relative difference that counts as equal."""
    each = TOLERANCE[compute]
    return {"loss": max(each, TOLERANCE.get(str(loss).removeprefix("torch."), each)), "gradients": each, "parameters": each}


def compare(reference: dict[str, Any], found: dict[str, Any]) -> list[Difference]:
    """Every tensor of two steps, side by side."""
    largest = max((float(g.abs().max()) for g in reference["gradients"].values() if g.numel()), default=0.0)
    out = [Difference("loss", "loss", _relative(reference["loss"], found["loss"], 0.0))]
    for what, scale in (("gradients", largest), ("parameters", LEARNING_RATE * largest)):
        for name, tensor in reference[what].items():
            there = found[what].get(name)
            if there is None and what == "gradients":
                there = torch.zeros_like(tensor)  # a parameter that nothing reaches has none
            out.append(Difference(what, name, float("inf") if there is None else _relative(tensor, there, scale)))
    return out


def _relative(reference: torch.Tensor, found: torch.Tensor, largest: float) -> float:
    if reference.shape != found.shape:
        return float("inf")
    a, b = reference.double(), found.double()
    if not a.numel():
        return 0.0
    difference, peak = float((a - b).abs().max()), float(a.abs().max())
    scale = peak if peak > NOISE * largest else 0.1 * largest
    return difference / max(scale, 1e-300) if math.isfinite(difference) else float("inf")


def _report(
    plan: Plan,
    differences: list[Difference],
    allowed: dict[str, float],
    passed: bool,
    reference: dict[str, Any],
    distributed: dict[str, Any],
    console: Console,
) -> None:
    rows, data = [], {}
    tolerance = allowed["gradients"]
    for what, most in allowed.items():
        group = [d for d in differences if d.what == what]
        worst = max(group, key=lambda d: d.relative)
        bad = [d.name for d in group if d.relative > most]
        label = "parameters after one step" if what == "parameters" else what
        label += f" (within {most:g})" if most > tolerance else ""
        rows.append((label, len(group), f"{worst.relative:.2e}", worst.name, f"{len(bad)} differ" if bad else "equal"))
        data[what] = {"tensors": len(group), "worst": worst.relative, "worst_name": worst.name, "different": bad}
    title = f"{plan.document.model.name}: {describe(plan.graph, plan.candidate)} against one process"
    console.table(title, ("", "tensors", "largest difference", "of", f"within {tolerance:g}"), rows)
    console.text("equal" if passed else "DIFFERENT")
    losses = {"single": float(reference["loss"]), "distributed": float(distributed["loss"])}
    console.document({"passed": passed, "tolerance": tolerance, "mesh": str(plan.candidate.mesh), "losses": losses, **data})
