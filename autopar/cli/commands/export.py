"""``autopar export``: writes the generated program as a folder that needs torch only."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.cli.console import Console
from autopar.cli.evaluation import with_plan
from autopar.ir.plan_file.plan_file import Plan

if TYPE_CHECKING:
    import torch


MAX_PARAMETERS = 2_000_000_000
"""Models with more are exported without initial weights."""


def initial_weights(plan: Plan, trust: bool = False) -> dict[str, torch.Tensor] | None:
    """The model's initial weights with seed 0, by original name, tied ones under all their names. None where the plan does not
    say how to build the model (it was made by `autopar.plan`), the model is too large, or it is code that nobody told to `trust`
    (train.py initialises by name)."""
    source = plan.document.model.source
    if not source or plan.document.model.params > MAX_PARAMETERS or (is_code(source) and not trust):
        return None
    import torch

    from autopar.capture.models import load_model
    from autopar.capture.tracing.trace import tied_names
    from autopar.runtime.state.weight_source import named_tensors

    torch.manual_seed(0)
    batch = plan.document.batch
    model = load_model(source, batch.global_, batch.seq, plan.candidate.precision.master, device="cpu").model
    read, named = plan.graph.parameters(), named_tensors(model)
    return {name: named[name] for name, first in tied_names(model).items() if first in read}


def is_code(source: str) -> bool:
    """Return whether the model's source is a Python file, which building the model would run."""
    return ".py" in source


@with_plan
def run(plan: Plan, arguments: argparse.Namespace, console: Console) -> int:
    """Writes the folder and says how to start it."""
    from autopar.checker.certificate import certify
    from autopar.passes.lower import lower
    from autopar.program.build import render
    from autopar.program.export import export_program
    from autopar.rules.check import check_strategies
    from autopar.rules.registry import default_registry

    check_strategies(plan.graph, plan.candidate, default_registry())
    folder = Path(arguments.folder)
    weights = initial_weights(plan, arguments.trust)
    if is_code(plan.document.model.source) and not arguments.trust:
        console.progress(f"no initial weights: --trust runs {plan.document.model.source}, which the plan names")
    lowered = lower(plan.graph, plan.candidate)
    certificate = certify(render(lowered, "runtime"), plan.graph, plan.candidate, plan.to_json(), plan.document.optimizer)
    export_program(
        lowered, plan.to_json(), folder, weights=weights, compiled=plan.document.cluster.compiled,
        overwrite=arguments.overwrite, certificate=certificate.to_json(),
    )  # fmt: skip
    command = f"torchrun --nproc-per-node {plan.candidate.devices} {folder / 'train.py'}"
    console.text(f"written to {folder}; start it with\n  {command}")
    console.text(certificate.line())
    console.document(
        {"folder": str(folder), "files": sorted(str(p.relative_to(folder)) for p in folder.rglob("*.py")), "run": command}
    )
    return 0
