"""Plans of the report's tests: one stage, a pipeline, and 16,384 devices. None is searched for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.plans.pipeline_plans import with_candidate

import autopar
from autopar.capture.models import load_model
from autopar.cost_models.hardware.cluster import Cluster
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Pipeline
from autopar.ir.plan_file.plan_file import Plan


@pytest.fixture(scope="session")
def one_stage() -> Plan:
    """GPT-2 under ZeRO-3 and tensor parallelism on eight GPUs."""
    loaded = load_model("gpt2-tiny", 16, None)
    cluster = Cluster.parse("dgx-h100:1")
    return autopar.plan(loaded.model, cluster, loaded.example_inputs, force="dp=4,tp=2,zero=3", name="gpt2-tiny", batch=16)


@pytest.fixture(scope="session")
def pipelined(one_stage: Plan) -> Callable[..., Plan]:
    """The same blocks on a pipeline, on a node for each stage or on more."""

    def make(pipeline: Pipeline, micro_batches: int, nodes: int = 0) -> Plan:
        document, stages = one_stage.document, pipeline.stages
        cluster = Cluster.parse(f"dgx-h100:{nodes or stages}")
        data = cluster.size // stages // 2
        axes = tuple(replace(axis, size=data if axis.name == "dp" else axis.size) for axis in one_stage.candidate.mesh.axes)
        blocks = one_stage.candidate.blocks
        if pipeline.weight_versions > 1:  # they take whole state
            blocks = tuple(replace(block, zero=0) for block in blocks)
        candidate = replace(one_stage.candidate, mesh=Mesh(axes), blocks=blocks, batch=data * micro_batches)
        info = replace_struct(document.cluster, name=cluster.name, devices=cluster.size, description=cluster.to_dict())
        return with_candidate(
            one_stage, replace(candidate, micro_batches=micro_batches, pipeline=pipeline), cluster=info,
            predicted=document.predicted, search=document.search, baselines=document.baselines, saves=document.saves,
        )  # fmt: skip

    return make


def replace_struct(struct: object, **changes: object) -> object:
    import msgspec

    return msgspec.structs.replace(struct, **changes)  # type: ignore[type-var]


@pytest.fixture(scope="session")
def plan_path(one_stage: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "plan.json"
    one_stage.save(path)
    return path
