"""Writes ``autopar/decoders/data/decoders.json.gz``: a graph for each kind of decoder that the public table and the bundled
models need. ``python tests/benchmarks/store_decoders.py``; takes two minutes.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.capture import capture
from autopar.capture.models import load_model
from autopar.decoders.decoder import Architecture
from autopar.decoders.graphs import kind_of, traced
from autopar.decoders.recognize import recognize
from autopar.decoders.stored_graphs import store, stored_key, stored_path
from autopar.errors import AutoparError
from autopar.ir.graph import Graph
from autopar.software.stacks import written_by
from autopar.validate.architectures import architecture_of
from autopar.validate.configuration import COMPUTE
from autopar.validate.rows import bundled_table, read_table

MODELS = ("gpt2", "gpt2-xl", "llama3-8b", "llama3-70b", "llama3-405b", "qwen3-8b", "mixtral-8x22b", "deepseek-v3")
SOFTWARE = ("nemo-megatron-core", "torchtitan-fsdp2")
DTYPES = ("bfloat16", "float32")
"""What bundled models are priced in: what most name, and what a plan has that names none."""


def needed() -> dict[str, tuple[Architecture, str]]:
    """(kind, dtype) by key."""
    found: dict[str, tuple[Architecture, str]] = {}

    def need(architecture: Architecture, dtype: str) -> None:
        kind = replace(kind_of(architecture), loss_in_place=False)
        found[stored_key(kind, dtype)] = kind, dtype

    for row in read_table(bundled_table()):
        try:
            need(architecture_of(row), COMPUTE[row.precision])
        except (AutoparError, KeyError):
            continue
    for name in MODELS:
        loaded = load_model(name, 8, 1024 if name.startswith("gpt2") else 4096, device="meta")
        decoder = recognize(capture(loaded.model, (), loaded.example_inputs, compute_dtype="bfloat16"))
        assert decoder is not None, name
        for software in SOFTWARE:
            for dtype in DTYPES:
                need(written_by(software, decoder), dtype)
    return found


def main() -> None:
    graphs: dict[str, Graph] = {}
    for key, (kind, dtype) in needed().items():
        graphs[key] = traced(kind, dtype)
        print(f"{len(graphs)}: {dtype}, {'experts' if kind.experts else 'dense'}, {kind.heads} heads", flush=True)
    store(graphs, stored_path())
    print(f"{len(graphs)} graphs, {stored_path().stat().st_size} bytes")


if __name__ == "__main__":
    main()
