"""The errors of autopar, with one base class. Each message is one line: what is wrong, where, and how to fix it.

The base and what a running program raises too are in `runtime.errors`, which stands alone."""

from __future__ import annotations

from autopar.runtime.errors import AutoparError, BatchError, StateError

__all__ = [
    "AutoparError",
    "BatchError",
    "CaptureError",
    "ClusterError",
    "FileError",
    "Infeasible",
    "OperatorError",
    "PlanError",
    "PlanMismatch",
    "StateError",
    "UnsupportedOp",
]


class CaptureError(AutoparError):
    """The model cannot be captured faithfully; the message names the module path, or the file and line."""


class OperatorError(AutoparError):
    """An operator of `autopar.ops` was called with arguments that do not fit each other."""


class UnsupportedOp(AutoparError):
    """An operation has no sharding rule, under ``strict``."""


class Infeasible(AutoparError):
    """No plan fits the devices' memory. The message says by how much, and what would fit."""

    exit_status = 3
    several_lines = True


class ClusterError(AutoparError):
    """A cluster name or file is invalid."""


class PlanError(AutoparError):
    """A plan or plan file is invalid: truncated, of another schema version, or inconsistent."""


class PlanMismatch(AutoparError):
    """A plan was made for another model or another number of processes."""


class FileError(AutoparError):
    """A file or folder that cannot be written, or a file that is not what was asked for."""
