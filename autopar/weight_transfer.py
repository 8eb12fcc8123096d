"""Plans of weight transfers from plan files, before any process runs: who sends what to whom, and how long it takes at least."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from autopar.ir.plan_file.plan_file import Plan, load_plan
from autopar.program.build import build_program
from autopar.runtime.device.axis import AxisHandle
from autopar.runtime.device.mesh import MeshHandle
from autopar.runtime.state.parameter_table import parameter_index, parameter_tables
from autopar.runtime.transfer.transfer_plan import TransferPlan, plan_transfer
from autopar.runtime.transfer.vllm_layout import VllmLayout
from autopar.runtime.transfer.weight_layout import WeightLayout, layout_of_program
from autopar.runtime.transfer.weight_transfer import BUFFER_BYTES


def plan_weight_transfer(
    source: Plan | str | Path,
    target: Plan | VllmLayout | str | Path,
    *,
    dtype: torch.dtype | None = None,
    memory_bytes: int = BUFFER_BYTES,
) -> TransferPlan:
    """Return the plan that `parallel.send_weights` follows between a job of the plan `source` (or the path of a plan.json) and
    one of the plan or layout `target`, with its bytes, rounds and lower bounds. `dtype`: that in which floating-point weights
    are sent.

    StateError names a parameter that only one of them has, or has in another shape or dtype."""
    layout = _layout_of_plan(source, dtype)
    receivers = target.of(layout) if isinstance(target, VllmLayout) else _layout_of_plan(target, None)
    return plan_transfer(layout, receivers, memory_bytes)


def _layout_of_plan(plan: Plan | str | Path, dtype: torch.dtype | None) -> WeightLayout:
    """Return the layout of the weights of a plan, as its program has it."""
    whole = plan if isinstance(plan, Plan) else load_plan(plan)
    program = build_program(whole.graph, whole.candidate).Program
    mesh = _PlannedMesh(program.mesh_axes)
    roots = program(mesh).roots()
    zero_dims = {
        name: entry.zero_dim for stage in parameter_tables(roots, mesh) for table in stage for name, entry in table.items()
    }
    return layout_of_program(mesh, parameter_index(roots), zero_dims, dtype)


class _PlannedMesh(MeshHandle):
    """The mesh of a plan, without processes: sizes of its axes, as its first rank sees them."""

    def _join(self, axes: Mapping[str, int]) -> torch.device:
        return torch.device("meta")

    def _meshes(self, axes: Mapping[str, int]) -> tuple[Any, Any]:
        return None, None

    def _handle(self, name: str, size: int, mesh: Any) -> AxisHandle:
        return AxisHandle(name, size)
