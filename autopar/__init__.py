"""autopar: the parallelization compiler for PyTorch.

>>> parallel = autopar.parallelize(model, "local:4", example_inputs=batch)

Names are loaded on first use: ``import autopar`` imports neither torch nor the solver.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autopar.errors import (
    AutoparError,
    BatchError,
    CaptureError,
    ClusterError,
    Infeasible,
    OperatorError,
    PlanError,
    PlanMismatch,
    StateError,
    UnsupportedOp,
)

if TYPE_CHECKING:
    from autopar.api import parallelize
    from autopar.cost_models.hardware.cluster import Cluster
    from autopar.ir.plan import Precision
    from autopar.ir.plan_file.plan_file import Plan
    from autopar.ops.opaque import opaque
    from autopar.plan_inputs import register_rule
    from autopar.planning import plan
    from autopar.runtime.checkpoint.entry import load_checkpoint
    from autopar.runtime.transfer.vllm_layout import VllmLayout
    from autopar.runtime.transfer.weight_transfer import receive_weights
    from autopar.weight_transfer import plan_weight_transfer

_LAZY = {
    "load_checkpoint": "autopar.runtime.checkpoint.entry",
    "opaque": "autopar.ops.opaque",
    "parallelize": "autopar.api",
    "plan": "autopar.planning",
    "plan_weight_transfer": "autopar.weight_transfer",
    "receive_weights": "autopar.runtime.transfer.weight_transfer",
    "register_rule": "autopar.plan_inputs",
    "Cluster": "autopar.cost_models.hardware.cluster",
    "Plan": "autopar.ir.plan_file.plan_file",
    "Precision": "autopar.ir.plan",
    "VllmLayout": "autopar.runtime.transfer.vllm_layout",
}

__all__ = [
    "AutoparError",
    "BatchError",
    "CaptureError",
    "Cluster",
    "ClusterError",
    "Infeasible",
    "OperatorError",
    "Plan",
    "PlanError",
    "PlanMismatch",
    "Precision",
    "StateError",
    "UnsupportedOp",
    "VllmLayout",
    "load_checkpoint",
    "opaque",
    "parallelize",
    "plan",
    "plan_weight_transfer",
    "receive_weights",
    "register_rule",
]


def __getattr__(name: str) -> Any:
    if name == "ops":
        return import_module("autopar.ops")
    if name not in _LAZY:
        raise AttributeError(f"module 'autopar' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
