"""The search's plan against published ones: `python tests/benchmarks/bench_published_plans.py [FILE.csv] [--most 20]`.

The search gets the model, the cluster and the batch of a published run, and nothing of its configuration; its plan and the
published one are priced by the same cost model.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from autopar.cost_models.step.evaluate import evaluate
from autopar.errors import AutoparError
from autopar.solve.search import search
from autopar.solve.space.options import SearchOptions
from autopar.validate.price import Session, stack_of
from autopar.validate.rows import Row, bundled_table, read_table


def task_of(row: Row) -> tuple[object, ...]:
    """What the search is told: rows that differ in their configuration only are one task."""
    return row.model_family, row.layers, row.hidden, row.heads, row.gpu, row.n_gpus, row.seq_len, row.global_batch, row.precision


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", nargs="?", type=Path, default=None)
    parser.add_argument("--most", type=int, default=20, help="tasks, evenly picked")
    parser.add_argument("--stack", default="")
    parser.add_argument("--pipelines", action="store_true", help="also runs with a pipeline")
    arguments = parser.parse_args()
    session = Session()
    tasks: dict[tuple[object, ...], list[Row]] = {}
    for row in read_table(arguments.file or bundled_table()):
        plain = not row.n_experts and (row.cp or 1) == 1 and "fp8" not in row.precision
        if plain and row.step_seconds and arguments.stack in row.software_stack and (arguments.pipelines or (row.pp or 1) == 1):
            tasks.setdefault(task_of(row), []).append(row)
    ratios = []
    for rows in list(tasks.values())[:: max(1, -(-len(tasks) // arguments.most))]:
        best = None
        for row in rows:
            try:
                setting = session.setup(row)
                cluster = stack_of(setting.cluster, row, None)
                found = evaluate(setting.graph, setting.candidate, cluster)
            except AutoparError as error:
                print(f"{row.id}: {error}")
                continue
            if found.fits and (best is None or found.step_seconds < best[0]):
                best = found.step_seconds, setting, cluster, row
        if best is None:
            continue
        seconds, setting, cluster, row = best
        began = time.process_time()
        try:
            ours = search(setting.graph, cluster, SearchOptions(precision=setting.candidate.precision)).evaluation
        except AutoparError as error:
            print(f"{row.id}: {error}")
            continue
        ratios.append(ours.step_seconds / seconds)
        print(
            f"{row.id} {row.model_family} on {row.n_gpus} {row.gpu}: expert {seconds:.3f} s, search {ours.step_seconds:.3f} s, "
            f"{ratios[-1]:.3f} ({time.process_time() - began:.1f} s of CPU)",
            flush=True,
        )
    worse = sum(ratio > 1.03 for ratio in ratios)
    print(f"{len(ratios)} tasks, median {statistics.median(ratios):.3f}, worst {max(ratios):.3f}, {worse} more than 3 % behind")


if __name__ == "__main__":
    main()
