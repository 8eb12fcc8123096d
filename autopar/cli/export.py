"""``autopar export``: the standalone program."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.cli.output import Output
from autopar.errors import PlanError
from autopar.ir.planfile import Plan, load

if TYPE_CHECKING:
    import torch


LARGEST = 2_000_000_000
"""Parameters up to which an export carries initial weights."""


def initial_weights(plan: Plan) -> dict[str, torch.Tensor] | None:
    """What the plan's model starts from with seed 0, by original name; None where the plan does not say how to build it (made by
    `autopar.plan`), or it is too large to write down: then the script initialises by name."""
    source = plan.document.model.source
    if not source or plan.document.model.params > LARGEST:
        return None
    import torch

    from autopar.capture.models import load_model

    torch.manual_seed(0)
    batch = plan.document.batch
    model = load_model(source, batch.global_, batch.seq, plan.candidate.precision.master, device="cpu").model
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: named[name] for name in plan.graph.parameters() if name in named}


def run(arguments: argparse.Namespace, output: Output) -> int:
    """Writes the folder and says how to start it."""
    from autopar.passes.pipeline import lower
    from autopar.program.export import export
    from autopar.rules.check import check_strategies
    from autopar.rules.registry import default_registry

    plan = load(arguments.plan)
    check_strategies(plan.graph, plan.candidate, default_registry())
    folder = Path(arguments.folder)
    if folder.exists() and not folder.is_dir():
        raise PlanError(f"cannot write to {folder}: it is a file; name a folder")
    weights = initial_weights(plan)
    export(lower(plan.graph, plan.candidate), plan.to_json(), folder, weights=weights)
    command = f"torchrun --nproc-per-node {plan.candidate.devices} {folder / 'train.py'}"
    output.text(f"written to {folder}; start it with\n  {command}")
    output.document(
        {"folder": str(folder), "files": sorted(str(p.relative_to(folder)) for p in folder.rglob("*.py")), "run": command}
    )
    return 0
