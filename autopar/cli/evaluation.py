"""The evaluator's numbers for a plan that was read from a file, where the file describes its cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopar.ir.plan_file.plan_file import Plan, check_graph, load_plan

if TYPE_CHECKING:
    from autopar.cost_models.hardware.cluster import Cluster
    from autopar.cost_models.step.evaluate import Evaluation


def read_plan(path: str) -> Plan:
    """A plan that is used without its model. PlanError where its graph is not the captured one or it has no schedule."""
    from autopar.schedules.pipeline_schedule import check_schedule

    plan = check_graph(load_plan(path), path)
    check_schedule(plan.candidate)
    return plan


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
