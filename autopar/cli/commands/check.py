"""``autopar check``: proves, without running it, that a program computes what its model does; and ``autopar check-module``: finds
the wrong line of a module that was parallelised by hand."""

from __future__ import annotations

import argparse
import json
import os
import re
from pathlib import Path

from autopar.cli.console import Console
from autopar.cli.evaluation import read_plan
from autopar.errors import AutoparError, PlanError
from autopar.files import check_target, read_bytes, write_whole
from autopar.ir.plan_file.plan_file import refuse_misfits


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Exit status 0 where the program is proven, or the module right; 1 where a line is not."""
    return _check_module(arguments, console) if arguments.command == "check-module" else _check_program(arguments, console)


def _check_program(arguments: argparse.Namespace, console: Console) -> int:
    if arguments.output:
        check_target(arguments.output)
    from autopar.checker.certificate import certify

    path = Path(arguments.what)
    exported = os.path.isdir(path)
    plan_path = path / "plan.json" if exported else path
    with refuse_misfits(str(plan_path)):
        plan = read_plan(str(plan_path))
        if exported:
            text = read_bytes(path / "program.py", PlanError, "the program").decode("utf-8", errors="replace")
        else:
            from autopar.program.build import program_text

            text = program_text(plan.graph, plan.candidate)
        certificate = certify(text, plan.graph, plan.candidate, plan_path.read_bytes(), plan.document.optimizer)
    console.text(f"{path}: {certificate.line()}")
    for claim in certificate.claims:
        console.text(f"  {claim.name:<10} {claim.says}")
    for line, says in certificate.assumptions:
        console.text(f"  assumed    line {line}: {says}")
    if certificate.bounds:
        predicted = plan.document.predicted.peak_memory_bytes
        beside = f" (predicted, with the allocator and the device's context: {predicted / 2**30:.3g} GiB)" if predicted else ""
        console.text(f"  memory     tensors take at most {max(certificate.bounds) / 2**30:.3g} GiB of a rank{beside}")
    if arguments.output:
        write_whole(arguments.output, certificate.to_json())
    console.document(json.loads(certificate.to_json()))
    return 0 if certificate.holds else 1


def _check_module(arguments: argparse.Namespace, console: Console) -> int:
    from autopar.capture.models import factory_of
    from autopar.checker.modules.module_check import check_module
    from autopar.dryrun.compat import fake_group

    sizes = [re.fullmatch(r"([a-z]\w*)=([1-9]\d{0,5})", each) for each in arguments.mesh.split(",")]
    mesh = {each[1]: int(each[2]) for each in sizes if each}
    if len(mesh) != len(sizes):
        raise AutoparError(f"--mesh {arguments.mesh} is no mesh: write its axes, outermost first, as dp=2,tp=2")
    verdict = check_module(factory_of(arguments.factory), mesh, fake_group)
    for line in verdict.wrong:
        console.text(line)
    for source, says in verdict.assumed.items():
        console.text(f"assumed  {source}: {says}")
    if not verdict.wrong:
        right = f"the loss and the gradients of {verdict.parameters} parameters are right"
        console.text(f"{arguments.factory}: {right} ({verdict.lines} lines)")
    console.document({"right": not verdict.wrong, "wrong": verdict.wrong, "assumed": dict(verdict.assumed)})
    return 1 if verdict.wrong else 0
