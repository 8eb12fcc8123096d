"""autopar: the parallelization compiler for PyTorch.

>>> parallel = autopar.parallelize(model, "local:4", example_inputs=batch)

Names are loaded on first use: ``import autopar`` imports neither torch nor the solver.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# "as", here and below: type checkers export a name that is imported so, and do not look up `_LAZY`.
from autopar.errors import AutoparError as AutoparError
from autopar.errors import BatchError as BatchError
from autopar.errors import CaptureError as CaptureError
from autopar.errors import ClusterError as ClusterError
from autopar.errors import Infeasible as Infeasible
from autopar.errors import OperatorError as OperatorError
from autopar.errors import PlanError as PlanError
from autopar.errors import PlanMismatch as PlanMismatch
from autopar.errors import StateError as StateError
from autopar.errors import UnsupportedOp as UnsupportedOp

if TYPE_CHECKING:
    from autopar.api import parallelize as parallelize
    from autopar.cost_models.hardware.cluster import Cluster as Cluster
    from autopar.ir.plan import Precision as Precision
    from autopar.ir.plan_file.plan_file import Plan as Plan
    from autopar.ops.opaque import opaque as opaque
    from autopar.plan_inputs import register_rule as register_rule
    from autopar.planning import plan as plan
    from autopar.runtime.checkpoint.entry import load_checkpoint as load_checkpoint
    from autopar.runtime.transfer.vllm_layout import VllmLayout as VllmLayout
    from autopar.runtime.transfer.weight_transfer import receive_weights as receive_weights
    from autopar.weight_transfer import plan_weight_transfer as plan_weight_transfer

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
    *_LAZY,
    *("AutoparError", "BatchError", "CaptureError", "ClusterError", "Infeasible", "OperatorError", "PlanError"),
    *("PlanMismatch", "StateError", "UnsupportedOp"),
]


def __getattr__(name: str) -> Any:
    if name == "ops":
        return import_module("autopar.ops")
    if name not in _LAZY:
        raise AttributeError(f"module 'autopar' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
