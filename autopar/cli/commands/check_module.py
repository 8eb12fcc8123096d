"""``autopar check-module``: finds the line of a module parallelised by hand whose result or gradient has the wrong kind."""

from __future__ import annotations

import argparse
import re

from autopar.cli.console import Console
from autopar.errors import AutoparError


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Exit status 0 where loss and gradients are right, 1 where a line is not."""
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
