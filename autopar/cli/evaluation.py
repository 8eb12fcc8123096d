"""The evaluator's numbers for a plan that was read from a file, where the file describes its cluster."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from autopar.ir.plan_file.plan_file import Plan, check_graph, load_plan, refuse_misfits

if TYPE_CHECKING:
    from autopar.cli.console import Console
    from autopar.cost_models.hardware.cluster import Cluster
    from autopar.cost_models.step.evaluate import Evaluation


def read_plan(path: str) -> Plan:
    """A plan that is used without its model. PlanError where its graph is not the captured one or it has no schedule."""
    from autopar.schedules.pipeline_schedule import check_schedule

    plan = check_graph(load_plan(path), path)
    check_schedule(plan.candidate)
    return plan


def with_plan(command: Callable[[Plan, argparse.Namespace, Console], int]) -> Callable[[argparse.Namespace, Console], int]:
    """A command that is called with the plan of its file; what it then runs into is the file's fault, and one line. What autograd
    saves is what the file says: torch, whose import takes longer than the command, is not needed to ask it."""

    @functools.wraps(command)
    def run(arguments: argparse.Namespace, console: Console) -> int:
        from autopar.cost_models.tensors.saved_tensors import saves_from_file

        with refuse_misfits(arguments.plan):
            plan = read_plan(arguments.plan)
            with saves_from_file(plan.saves):
                return command(plan, arguments, console)

    return run


def cluster_of(plan: Plan) -> Cluster | None:
    """The plan's cluster; None where the file has only its name and size."""
    from autopar.cost_models.hardware.cluster import Cluster

    description = plan.document.cluster.description
    return Cluster.from_dict(description) if description else None


def evaluation_of(plan: Plan) -> Evaluation | None:
    """The predicted step, with the tables of every pipeline stage: the file has those of the fullest one only."""
    from autopar.cost_models.step.evaluate import evaluate

    cluster = cluster_of(plan)
    return evaluate(plan.graph, plan.candidate, cluster, plan.document.optimizer) if cluster is not None else None
