"""One base for everything that a user can mend. Each message is one line: what, where, and how to mend it."""

from __future__ import annotations


class AutoparError(Exception):
    """Base of all errors that are the user's to mend. `exit_status` is what the command line ends with."""

    exit_status = 2


class CaptureError(AutoparError):
    """The model cannot be captured faithfully: names the module path or the file and line."""


class OperatorError(AutoparError):
    """An operator of `autopar.ops` was called with arguments that do not fit each other."""


class UnsupportedOp(AutoparError):
    """Under ``strict``: an operation has no sharding rule."""


class Infeasible(AutoparError):
    """No plan fits. Says what is short, by how much, and what would do."""

    exit_status = 3


class ClusterError(AutoparError):
    """A cluster name or file that cannot be read."""


class BatchError(AutoparError):
    """A batch that does not fit the plan."""


class PlanError(AutoparError):
    """A plan file that is truncated, of another schema version, or nonsense."""


class PlanMismatch(AutoparError):
    """A plan that was made for another model or another number of processes."""


class StateError(AutoparError):
    """Parameters asked for too early, or state that does not fit."""
