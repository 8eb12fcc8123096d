"""``autopar export``: the standalone program."""

from __future__ import annotations

import argparse
from pathlib import Path

from autopar.cli.output import Output
from autopar.errors import PlanError
from autopar.ir.planfile import load


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
    export(lower(plan.graph, plan.candidate), plan.to_json(), folder)
    command = f"torchrun --nproc-per-node {plan.candidate.mesh.size} {folder / 'train.py'}"
    output.text(f"written to {folder}; start it with\n  {command}")
    output.document(
        {"folder": str(folder), "files": sorted(str(p.relative_to(folder)) for p in folder.rglob("*.py")), "run": command}
    )
    return 0
