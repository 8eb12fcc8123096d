"""Joins the process group under a heartbeat: who never comes is named (`device.rendezvous`), and so is who fails while the others
connect to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from ..device.mesh import join_process_group
from ..device.rendezvous import JOIN_SECONDS, Meeting
from .heartbeat import Heartbeat, start_heartbeat
from .peer_watch import PATIENCE_SECONDS


def join(
    size: int,
    axes: Mapping[str, int],
    describe: Callable[[int], str],
    *,
    patience_seconds: float = PATIENCE_SECONDS,
    join_seconds: float = JOIN_SECONDS,
) -> Heartbeat | None:
    """Joins the process group unless this process has; the heartbeat, None where there are no other ranks. LaunchProblem where
    another number of processes was launched, or one does not come within `join_seconds`; PeerProblem where one fails."""
    started: list[Heartbeat] = []

    @contextmanager
    def connecting(meeting: Meeting) -> Iterator[None]:
        if meeting.size == 1:
            yield
            return
        heartbeat = Heartbeat(meeting.store.clone(), meeting.rank, meeting.size, describe, patience_seconds)
        heartbeat.start()
        try:
            with heartbeat.watching(lambda: "joining the process group"):
                yield
        except BaseException:
            heartbeat.close()
            raise
        started.append(heartbeat)

    join_process_group(size, axes, join_seconds=join_seconds, connecting=connecting)
    return started[0] if started else start_heartbeat(describe, patience_seconds)
