"""Errors of the runtime. `autopar.errors` has the same for users of the package; an exported program has only these."""

from __future__ import annotations


class RuntimeProblem(Exception):
    """Base of all: one line that says what is wrong, where, and how to mend it."""

    exit_status = 2


class LaunchProblem(RuntimeProblem):
    """The program was launched with the wrong number of processes."""


class BatchProblem(RuntimeProblem):
    """A batch that does not fit the plan."""


class PeerProblem(RuntimeProblem):
    """Another process of the run failed, or does not answer."""

    exit_status = 1


class StateProblem(RuntimeProblem):
    """State that does not fit the program."""
