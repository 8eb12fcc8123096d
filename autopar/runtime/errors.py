"""Errors of the runtime, and their bases, which `autopar.errors` has too: an exported program has only this file."""

from __future__ import annotations


class AutoparError(Exception):
    """Base of all errors that a user can fix. `exit_status` is the exit status of the command line.

    The message is one line, whatever names and texts of the user's stand in it, but for `several_lines`.
    """

    exit_status = 2
    several_lines = False

    def __str__(self) -> str:
        text = super().__str__()
        if self.several_lines:
            return text
        text = text if text.isprintable() else one_line(text)
        return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"


_LONGEST = 1000
"""Characters of a message, whatever stands in it: what is wrong stands at its beginning, the remedy at its end."""


def one_line(text: str) -> str:
    """The text without line breaks and other control characters; lone surrogates as ``?``."""
    plain = " ".join(text.split()).encode(errors="replace").decode()
    return "".join(letter if letter.isprintable() else "?" for letter in plain)


class RuntimeProblem(AutoparError):
    """Base of all errors of a running program: one line that says what is wrong, where, and how to mend it. `on_all_ranks`: all
    ranks raise it, so that none waits for another."""

    on_all_ranks = False


class LaunchProblem(RuntimeProblem):
    """The program was launched with the wrong number of processes."""


class BatchError(RuntimeProblem):
    """A batch that does not fit the model or the plan, or that differs between ranks."""

    on_all_ranks = True


class LengthsError(BatchError):
    """Lengths of packed documents that do not fit their tokens. Seen where they are read: on one rank alone where only its batch
    says so, or its stage of a pipeline reads them."""

    on_all_ranks = False


class PeerProblem(RuntimeProblem):
    """Another process of the run failed, or does not answer."""

    exit_status = 1
    on_all_ranks = True


class MismatchProblem(RuntimeProblem):
    """The ranks of a run have different models, programs, versions or batches."""

    on_all_ranks = True


class NotFiniteProblem(RuntimeProblem):
    """The loss of a step is infinite or no number."""

    on_all_ranks = True


class ReplicaProblem(RuntimeProblem):
    """Ranks that hold copies of one parameter or buffer have different values of it."""

    on_all_ranks = True


class MemoryProblem(RuntimeProblem):
    """A device, or the host, has too little memory for the plan."""


class StateError(RuntimeProblem):
    """State that does not fit the program, or parameters that are requested before they exist."""


class StateMismatch(StateError, RuntimeError):
    """A state dict that does not fit the model: torch raises RuntimeError there, which scripts catch."""


class AttributeProblem(RuntimeProblem, AttributeError):
    """An attribute that a parallel model has not, or whose value it does not have; `hasattr` says so too."""


class PlacementProblem(StateError):
    """Experts that cannot be placed anew, or a use of them that does not find them where they are."""

    on_all_ranks = True


class CheckpointProblem(StateError):
    """A checkpoint that cannot be saved or loaded; all ranks raise it."""

    on_all_ranks = True


class DamagedCheckpoint(CheckpointProblem):
    """A checkpoint that is not whole: a file of it is missing, cut or changed."""


class TransferProblem(StateError):
    """Weights that cannot be sent to another job, or received from it; all ranks raise it."""

    on_all_ranks = True
