"""Pipelines of small models (the plan of one stage's mesh, in chunks on a schedule), and plans with other candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autopar.cost_models.hardware.cluster import Cluster
from autopar.ir.pipeline.split_blocks import split_block
from autopar.ir.pipeline.stage_values import repeatable_values
from autopar.ir.plan import Candidate, Pipeline
from autopar.ir.plan_file.plan_file import Plan, assemble_plan
from autopar.program.build import program_text
from autopar.schedules.pipeline_schedule import chunks_of_stages, schedule_of
from support.harness.end_to_end import Prepared, plan


def with_split_block(prepared: Prepared, block: str, places: Sequence[int]) -> Prepared:
    """With one block divided."""
    return replace(prepared, graph=split_block(prepared.graph, block, places))


def pipeline_candidate(prepared: Prepared, force: dict[str, int], pipeline: Pipeline, micro_batches: int) -> Candidate:
    """The search's answer for the mesh of one stage, on every stage; what can be is made by every chunk for itself."""
    stage = {"dp": 1, "tp": 1} | force
    size = stage["dp"] * stage["tp"]
    found = plan(prepared, {"zero": 0, **stage}, Cluster.parse(f"local:{size}")).candidate
    pipeline = replace(pipeline, repeated=tuple(repeatable_values(prepared.graph)))
    return replace(found, micro_batches=micro_batches, pipeline=pipeline)


def candidate_text(prepared: Prepared, candidate: Candidate) -> str:
    return program_text(prepared.graph, candidate)


def scheduled_actions(candidate: Candidate) -> list[list[str]]:
    """The computing actions of each stage."""
    return [[str(action) for action in rank] for rank in schedule_of(candidate.pipeline, candidate.micro_batches).ranks]


def with_candidate(plan: Plan, candidate: Candidate, **changes: Any) -> Plan:
    """A plan with another candidate, and without predictions unless they are among the `changes`."""
    document = plan.document
    own = dict(model=document.model, cluster=document.cluster, parallelism=document.parallelism, optimizer=document.optimizer)
    return assemble_plan(plan.graph, candidate, **{**own, "stage_chunks": chunks_of_stages(candidate.pipeline), **changes})
