"""Steps that do not wait for each other: PipeDream-2BW (Narayanan et al., arXiv 2006.09503, section 3.1).

The pipeline is never drained: a stage runs forwards of one batch beside backwards of the one before, which it ends first. The
schedule is that of one step in the middle, a *window*: an action that stands before the forward of its micro-batch belongs to the
batch before. Weights have two versions: those that the batch before was computed with, and the newest.
"""

from __future__ import annotations

from autopar.errors import PlanError
from autopar.ir.schedule import BACKWARD, FORWARD, TRANSFERS, Action, Schedule
from autopar.schedules.check import check
from autopar.schedules.communicate import with_communication

_STEPS = 3
"""A first step, one in the middle, and a last one."""


def weight_version_window(stages: int, micro_batches: int) -> Schedule:
    """Return the window of a schedule: stage s runs a backward after each forward, that of the micro-batch ``p - 1 - s`` before.
    PlanError where there are fewer micro-batches than stages: two batches before would still be under way."""
    if micro_batches < stages:
        raise PlanError(f"two versions of weights take at least {stages} micro-batches (stages), not {micro_batches}")

    def actions(stage: int) -> tuple[Action, ...]:
        lag = stages - 1 - stage
        pairs = ((Action(stage, FORWARD, m), Action(stage, BACKWARD, (m - lag) % micro_batches)) for m in range(micro_batches))
        return tuple(each for pair in pairs for each in pair)

    return Schedule("2bw", tuple(map(actions, range(stages))))


def unroll_window(schedule: Schedule, steps: int) -> Schedule:
    """Return some windows as an ordinary schedule of all their micro-batches, filled and drained; PlanError if it cannot run."""
    many = schedule.micro_batches
    ranks = []
    for actions in schedule.ranks:
        line: list[Action] = []
        for step in range(steps):
            begun: set[int] = set()
            for action in actions:
                begun |= {action.micro_batch} if action.kind == FORWARD else set()
                number = action.micro_batch + many * (step if action.micro_batch in begun else step - 1)
                line += [Action(action.chunk, action.kind, number)] if number >= 0 else []
        done = {each.micro_batch for each in line if each.kind == BACKWARD}
        line += [
            Action(each.chunk, BACKWARD, each.micro_batch)
            for each in line
            if each.kind == FORWARD and each.micro_batch not in done
        ]
        ranks.append(tuple(line))
    unrolled = Schedule(schedule.name, tuple(ranks))
    check(unrolled)
    return unrolled


def window_with_transfers(schedule: Schedule) -> Schedule:
    """Return a window with its sends and receives. Nothing is posted in the window before that of its consumer."""
    many = schedule.micro_batches
    whole = with_communication(unroll_window(schedule, _STEPS))
    ranks = []
    for actions, line in zip(schedule.ranks, whole.ranks, strict=True):
        numbers = {_numbered(action, actions, many) for action in actions}
        out: list[Action] = []
        waiting: list[Action] = []
        for each in line:
            if each in numbers:
                out += [*waiting, each]
                waiting = []
            elif each.kind in TRANSFERS and _computes(each) in numbers:
                if each.kind.startswith("SEND"):
                    out.append(each)
                else:
                    waiting.append(each)
        ranks.append(tuple(Action(each.chunk, each.kind, each.micro_batch % many) for each in out))
    return Schedule(schedule.name, tuple(ranks))


def _numbered(action: Action, actions: tuple[Action, ...], many: int) -> Action:
    """Return an action of the window in the middle, by its number in all steps."""
    forward = Action(action.chunk, FORWARD, action.micro_batch)
    before = action.kind != FORWARD and actions.index(action) < actions.index(forward)
    return Action(action.chunk, action.kind, action.micro_batch + (0 if before else many))


def _computes(transfer: Action) -> Action:
    """Return the action that a transfer is for."""
    return Action(transfer.chunk, FORWARD if transfer.kind.endswith("F") else BACKWARD, transfer.micro_batch)
