"""Plans that were found before, one file each, under the fingerprint of all that the search reads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from autopar.cost_models.hardware.cluster import Cluster
from autopar.errors import AutoparError, FileError
from autopar.files import write_whole
from autopar.ir.graph import Graph
from autopar.ir.plan_file import plan_file as planfile
from autopar.ir.plan_file.plan_file import Plan
from autopar.solve.space.options import SearchOptions

_SOURCES = ("rules", "cost_models", "solve", "ir", "capture")
"""Parts of autopar that decide what a search finds."""


@dataclass(frozen=True, slots=True)
class PlanCache:
    """A folder of plans. A file that is damaged, or of another model after all, counts as absent and is written again."""

    folder: Path

    def load(self, key: str, graph: Graph, cluster: Cluster, options: SearchOptions) -> Plan | None:
        """The decisions under the key on the captured `graph`; None where there are none, or they answer another question."""
        path = self._path(key)
        try:
            found = planfile.load_plan(path)
            return found.with_graph(graph) if _answers(found, graph, cluster, options) else None
        except AutoparError:
            return None

    def store(self, key: str, plan: Plan) -> None:
        """Only what was solved to the end: a longer time limit may find more. A folder that cannot be written is no error."""
        search = plan.document.search
        if search.cut_short:
            return
        with suppress(OSError, FileError):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self._path(key), plan.to_json())

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"


def _answers(plan: Plan, graph: Graph, cluster: Cluster, options: SearchOptions) -> bool:
    """Whether the file under a key is what was asked for: a name is no proof."""
    document, candidate = plan.document, plan.candidate
    degrees = {axis.name: axis.size for axis in candidate.mesh.axes} | {"pp": candidate.pipeline.stages}
    precision = candidate.precision
    if options.may_offload_optimizer and not options.precision.offload_optimizer:
        precision = replace(precision, offload_optimizer="")  # the search may have taken it
    return (
        plan.graph.fingerprint == graph.fingerprint
        and document.cluster.description == json.loads(json.dumps(cluster.to_dict()))
        and (candidate.batch, precision, document.optimizer) == (options.batch, options.precision, options.optimizer)
        and all(degrees.get(name, 1) == size for name, size in options.force.items() if name in ("dp", "tp", "tp2", "ep", "pp"))
    )


def cache_key(
    graph: Graph, cluster: Cluster, options: SearchOptions, rules: Mapping[str, str], described: Mapping[str, object]
) -> str:
    """Of the captured model, cluster, options (but the time limit), rules that a user added, what the plan says beside
    (`described`: name, source), and autopar: its version, and its files, so that an edited checkout meets no old plan."""
    asked = {
        "batch": options.batch, "precision": asdict(options.precision), "optimizer": options.optimizer, "strict": options.strict,
        "force": dict(sorted(options.force.items())), "pins": dict(sorted(options.pins.items())),
        "offload": options.may_offload_optimizer,
        "gap": (options.relative_gap, options.sharp_gap, options.min_improvement),
    }  # fmt: skip
    parts = (graph.fingerprint, graph.batch, cluster.to_dict(), asked, dict(sorted(rules.items())), dict(described), _version())
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _version() -> list[object]:
    root = Path(__file__).resolve().parent.parent
    try:
        said = version("autopar")
    except PackageNotFoundError:
        said = ""
    out: list[object] = [said]
    for part in _SOURCES:
        for path in sorted((root / part).resolve().rglob("*")):
            if path.suffix in (".py", ".yaml"):
                status = path.stat()
                out.append((path.name, status.st_size, status.st_mtime_ns))
    return out
