"""The errors of autopar, with one base class. Each message is one line: what is wrong, where, and how to fix it."""

from __future__ import annotations


class AutoparError(Exception):
    """Base of all errors that a user can fix. `exit_status` is the exit status of the command line."""

    exit_status = 2


class CaptureError(AutoparError):
    """The model cannot be captured faithfully; the message names the module path, or the file and line."""


class OperatorError(AutoparError):
    """An operator of `autopar.ops` was called with arguments that do not fit each other."""


class UnsupportedOp(AutoparError):
    """Under ``strict``: an operation has no sharding rule."""


class Infeasible(AutoparError):
    """No plan fits the devices' memory. The message says by how much, and what would fit."""

    exit_status = 3


class ClusterError(AutoparError):
    """A cluster name or file is invalid."""


class BatchError(AutoparError):
    """A batch does not fit the plan."""


class PlanError(AutoparError):
    """A plan or plan file is invalid: truncated, of another schema version, or inconsistent."""


class PlanMismatch(AutoparError):
    """A plan was made for another model or another number of processes."""


class StateError(AutoparError):
    """Parameters are requested before they exist, or a state does not fit."""


class FileError(AutoparError):
    """A file or folder that cannot be written."""
