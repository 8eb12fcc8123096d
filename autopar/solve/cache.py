"""Plans that were found before, one file each, under the fingerprint of all that the search reads."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from autopar.cost_models.hardware import Cluster
from autopar.errors import PlanError
from autopar.ir import planfile
from autopar.ir.graph import Graph
from autopar.ir.planfile import Plan
from autopar.solve.options import SearchOptions

_READ = ("rules", "cost_models", "solve", "ir", "capture")
"""Parts of autopar that decide what a search finds."""


@dataclass(frozen=True, slots=True)
class PlanCache:
    """A folder of plans. A file that is damaged, or of another model after all, counts as absent and is written again."""

    folder: Path

    def load(self, key: str) -> Plan | None:
        """The plan under the key, verified; None where there is none."""
        path = self._path(key)
        try:
            found = planfile.decode(path.read_bytes(), str(path))
        except (OSError, PlanError):
            return None
        return found

    def store(self, key: str, plan: Plan) -> None:
        """Only what was solved to the end: a longer time limit may find more. A folder that cannot be written is no error."""
        search = plan.document.search
        ended = search.status == "FEASIBLE" and all(each.status != "TIMEOUT" for each in search.meshes)
        if search.status != "OPTIMAL" and not ended:
            return
        path = self._path(key)
        part = path.with_suffix(f".{os.getpid()}.part")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            part.write_text(plan.to_json(), encoding="utf-8")
            part.replace(path)
        except OSError:
            with suppress(OSError):
                part.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"


def cache_key(
    graph: Graph, cluster: Cluster, options: SearchOptions, rules: Mapping[str, str], described: Mapping[str, object]
) -> str:
    """Of the captured model, cluster, options (but the time limit), rules that a user added, what the plan says beside
    (`described`: name, source), and autopar: its version, and its files, so that an edited checkout meets no old plan."""
    asked = {
        "batch": options.batch, "precision": asdict(options.precision), "optimizer": options.optimizer, "strict": options.strict,
        "force": dict(sorted(options.force.items())), "pins": dict(sorted(options.pins.items())),
        "gap": (options.relative_gap, options.worth),
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
    for part in _READ:
        for path in sorted((root / part).resolve().rglob("*")):
            if path.suffix in (".py", ".yaml"):
                status = path.stat()
                out.append((path.name, status.st_size, status.st_mtime_ns))
    return out
