"""Tokens a second on documents of natural lengths: rows of packed documents that all ranks shard, beside static padding, padding
to few lengths, static packing and one fixed degree of context parallelism; predicted beside measured. Here and in labs of nodes:

    python tests/benchmarks/batches/bench_lengths.py [--where local,2x2@200mbit,4x1@1gbit] [--documents 160] [--keep FOLDER]

Documents are as long as the functions and classes of Python's standard library have tokens (its own `tokenize`), cut at 2,048: a
distribution with a long tail that every machine has. Packed batches have four times that, padded ones four documents. All ways
train the same Llama on the same documents, padded ones under the plan that the search takes, packed ones under the degree in
question. Tokens are those with a label. Each way is timed over its batches (of padded ones a few) twice, in turn; the
shorter time counts.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import sys
import tempfile
import time
import tokenize
from collections.abc import Callable
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from random import Random
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent)]

from bench_choice import RANK_ENVIRONMENT, WORLD, Place, calibrated, raise_priority  # noqa: E402

ROW, WORDS = 2048, 512


def document_lengths(count: int) -> list[int]:
    """Return the tokens of so many definitions at the top level of the standard library, in an order of their own."""
    lengths = []
    for path in sorted(Path(ast.__file__).parent.glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        for node in ast.parse(text).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                source = ast.get_source_segment(text, node) or ""
                lengths.append(sum(1 for _ in tokenize.generate_tokens(StringIO(source).readline)))
    Random(0).shuffle(lengths)
    return [min(length, ROW) for length in lengths if length > 8][:count]


# -- in the ranks


@dataclass(frozen=True)
class Way:
    """A way to train on the documents: a parallel model, and its batches."""

    name: str
    parallel: Any
    batches: list[dict[str, Any]]


def padded(documents: list[Any], length: int) -> dict[str, Any]:
    import torch

    ids = torch.stack([torch.nn.functional.pad(each, (0, length - len(each))) for each in documents])
    mask = torch.stack([(torch.arange(length) < len(each)).long() for each in documents])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def in_groups(items: list[Any], size: int) -> list[list[Any]]:
    """Return groups of this size; the rest is left out."""
    return [items[at : at + size] for at in range(0, len(items) - size + 1, size)]


def ways(cluster: Any, lengths: list[int]) -> list[Way]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import autopar
    from autopar.runtime.data.packed_sampler import PackedBatchSampler

    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(0, WORDS, (length,), generator=generator) for length in lengths]
    sizes = torch.tensor(lengths)

    def model(example: dict[str, Any], **options: Any) -> Any:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=WORDS, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=8,
            num_key_value_heads=4, max_position_embeddings=WORLD * ROW,
        )  # fmt: skip
        return autopar.parallelize(LlamaForCausalLM(config), cluster, example, document_lengths=lengths, cache=False, **options)

    def rows(tokens: int) -> list[dict[str, Any]]:
        sampler = PackedBatchSampler(sizes, packed_tokens=tokens)
        full = [row for row in sampler if sum(lengths[each] for each in row) > 0.9 * tokens]  # not the rest of an epoch
        return [sampler.collate([{"input_ids": documents[each]} for each in row]) for row in full]

    per_rank = rows(ROW)
    packing = [{name: torch.cat([row[name] for row in group]) for name in group[0]} for group in in_groups(per_rank, WORLD)]
    static = [padded(group, ROW) for group in in_groups(documents, WORLD)][:4]
    by_length = model(static[0])
    sampler = by_length.sampler(documents, lengths=lengths, batch_size=WORLD, programs=5)
    few = [
        padded([documents[each] for each in batch], sampler.padded_length(max(lengths[each] for each in batch)))
        for batch in sampler.global_batches().tolist()[:12]
    ]
    row = rows(WORLD * ROW)
    return [
        Way("padded to one length", model(static[0]), static),
        Way("padded to five lengths", by_length, few),
        Way("packed, a row for each rank", model(packing[0], force=f"dp={WORLD}"), packing),
        Way("packed, fixed context parallelism", model(row[0], force=f"tp={WORLD}"), row),
        Way("packed, a row for all ranks", model(packing[0], force=f"dp={WORLD}"), row),
    ]


def rank_main(folder: Path, count: int) -> None:
    """Time all ways in turn; rank 0 writes tokens, seconds, programs and the predicted seconds of each."""
    import torch
    import torch.distributed as dist

    import autopar
    from autopar.cost_models.step.evaluate import evaluate
    from autopar.variants import maker

    raise_priority()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cluster = autopar.Cluster.from_dict(json.loads((folder / "cluster.json").read_text()))
    prices: list[float] = []
    plan_variant: Callable[..., Any] = maker.plan_variant

    def priced(graph: Any, plan: Any, cluster: Any, *rest: Any) -> Any:
        made = plan_variant(graph, plan, cluster, *rest)
        prices.append(evaluate(*made, cluster, plan.document.optimizer).step_seconds)
        return made

    maker.plan_variant = priced
    found: list[dict[str, Any]] = []
    each_way = ways(cluster, document_lengths(count))
    optimizers = [torch.optim.AdamW(way.parallel.parameters(), 1e-4) for way in each_way]

    def step(way: Way, optimizer: Any, batch: dict[str, Any]) -> None:
        way.parallel(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for way, optimizer in zip(each_way, optimizers, strict=True):
        predicted: dict[Any, float] = {}
        for batch in way.batches:
            kind = tuple(batch["input_ids"].shape)
            if kind not in predicted:
                before = len(prices)
                step(way, optimizer, batch)
                first = way.parallel.predicted_step()["step_seconds"]
                predicted[kind] = prices[-1] if len(prices) > before else first
        found.append({
            "name": way.name, "tokens": sum(int((batch["labels"] != -100).sum()) for batch in way.batches),
            "programs": len(predicted), "seconds": [],
            "predicted": sum(predicted[tuple(batch["input_ids"].shape)] for batch in way.batches),
            "mesh": str(way.parallel.plan.candidate.mesh.sizes), "steps": len(way.batches),
        })  # fmt: skip
    for turn in range(2):
        for index in range(len(each_way))[:: -1 if turn else 1]:
            dist.barrier()
            began = time.perf_counter()
            for batch in each_way[index].batches:
                step(each_way[index], optimizers[index], batch)
            dist.barrier()
            found[index]["seconds"].append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        (folder / "times.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


# -- in the parent


def bench(text: str, folder: Path, arguments: argparse.Namespace) -> None:
    from autopar.cost_models.hardware.cluster import Cluster

    place = Place.parse(text)
    folder.mkdir(parents=True, exist_ok=True)
    if not (path := folder / "cluster.yaml").exists():
        calibrated(place, path)
    (folder / "cluster.json").write_text(json.dumps(Cluster.parse(str(path)).to_dict()))
    if not (folder / "times.json").exists():
        place.torchrun(__file__, "--ranks", str(folder), "--documents", str(arguments.documents))
    rows = json.loads((folder / "times.json").read_text())
    rates = [(each["tokens"] / min(each["seconds"]), each["tokens"] / each["predicted"]) for each in rows]
    print(f"{text}\n\n| batches | steps, programs | tokens a second | predicted | last over this one |\n|---|---|---|---|---|")
    for each, (measured, predicted) in zip(rows, rates, strict=True):
        counts, ratio = f"{each['steps']}, {each['programs']}", rates[-1][0] / measured
        print(f"| {each['name']} | {counts} | {measured:.0f} | {predicted:.0f} | {ratio:.2f} |")
    pairs = [(a, b) for at, a in enumerate(rates) for b in rates[at + 1 :] if max(a[0], b[0]) > 1.05 * min(a[0], b[0])]
    right = sum((a[0] > b[0]) == (a[1] > b[1]) for a, b in pairs)
    print(f"\norder as predicted in {right} of {len(pairs)} pairs that are more than 5 % apart\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--where", default="local,2x2@200mbit,4x1@1gbit")
    parser.add_argument("--documents", type=int, default=160)
    parser.add_argument("--keep", default="", help="a folder of clusters and times, taken and added to")
    parser.add_argument("--ranks", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ.update(RANK_ENVIRONMENT)
    if arguments.ranks:
        rank_main(Path(arguments.ranks), arguments.documents)
    from support.network_lab import why_no_lab

    with tempfile.TemporaryDirectory() as temporary:
        for text in arguments.where.split(","):
            if Place.parse(text).nodes > 1 and why_no_lab():
                print(f"{text}: skipped, {why_no_lab()}")
                continue
            bench(text, Path(arguments.keep or temporary) / text, arguments)


if __name__ == "__main__":
    main()
