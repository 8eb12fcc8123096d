"""Captured decoders that are shipped with the package, so that pricing a published run or a usual recipe captures nothing.

``data/decoders.json.gz`` has a graph for each kind of decoder (`graphs`) that the public table and the bundled models need; any
other kind is captured when it is asked for. ``python tests/benchmarks/store_decoders.py`` writes the file again after a change of
`modules` or of capture; ``tests/decoders/test_stored_graphs.py`` says when that is due.
"""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

import msgspec

from autopar.decoders.decoder import Architecture
from autopar.ir.graph import Graph
from autopar.ir.plan_file.codec import decode, encode


def stored_path() -> Path:
    """The file of the package."""
    return Path(str(files("autopar.decoders") / "data" / "decoders.json.gz"))


def stored_key(kind: Architecture, dtype: str) -> str:
    """Return the key of a kind of decoder. What is put into its graph afterwards (`graphs.graph_of`) is no part of the kind."""
    return msgspec.json.encode([asdict(kind) | {"loss_in_place": False, "top_k": kind.top_k}, dtype]).decode()


def stored_graph(kind: Architecture, dtype: str) -> Graph | None:
    """The graph of a kind, if it is in the file."""
    found = _stored().get(stored_key(kind, dtype))
    return decode(Graph, msgspec.json.decode(found)) if found is not None else None


def store(graphs: Mapping[str, Graph], path: Path) -> None:
    """Writes the file: graphs by `stored_key`. The same graphs give the same bytes."""
    data = {key: encode(graph) for key, graph in sorted(graphs.items())}
    path.write_bytes(gzip.compress(msgspec.json.encode(data), mtime=0))


@lru_cache(maxsize=1)
def _stored() -> Mapping[str, msgspec.Raw]:
    path = stored_path()
    if not path.exists():
        return {}
    return msgspec.json.decode(gzip.decompress(path.read_bytes()), type=dict[str, msgspec.Raw])
