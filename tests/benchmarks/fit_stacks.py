"""Fits the constants of cost_models/hardware/software_stacks.yaml to published runs:
`python tests/benchmarks/fit_stacks.py [FILE.csv]`.

Per (software stack, device generation): coordinate descent on the mean absolute logarithm of predicted over measured seconds,
sources weighted by the root of their rows, with a small pull towards usual figures (stacks with few rows stay near them).
Prints the entries for the file, and with --leave-out the errors on sources that were left out of the fit.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from math import exp, log
from pathlib import Path

from autopar.cost_models.step.evaluate import evaluate
from autopar.errors import AutoparError
from autopar.validate.price import RowSetup, Session, stack_of
from autopar.validate.rows import Row, bundled_table, read_table

PULL = 0.01
MAX_ERROR = 0.4
"""Largest absolute logarithm that one run contributes: a run that is off by more has another cause than a constant."""

Item = tuple[Row, RowSetup]
START = {"matmul": 0.62, "memory": 0.6, "attention": 0.4, "network": 0.9}


def names_of(items: Iterable[Item]) -> tuple[str, ...]:
    """The constants of a stack: attention has one where it is one kernel (flash attention), else the network has one."""
    flash = any(row.attention != "naive" for row, _ in items)
    return ("matmul", "memory", "attention") if flash else ("matmul", "memory", "network")


def errors(items: Iterable[Item], constants: Mapping[str, float]) -> list[float]:
    """log(predicted / measured)"""
    priced = ((row, evaluate(each.graph, each.candidate, stack_of(each.cluster, row, constants))) for row, each in items)
    return [log(found.step_seconds / row.step_seconds) for row, found in priced]


def loss(items: list[Item], constants: Mapping[str, float]) -> float:
    many = Counter(row.source for row, _ in items)
    weights = [many[row.source] ** -0.5 for row, _ in items]
    found = sum(min(abs(e), MAX_ERROR) * w for e, w in zip(errors(items, constants), weights, strict=True)) / sum(weights)
    return found + PULL * sum(log(value / START[name]) ** 2 for name, value in constants.items())


def fit(items: list[Item], names: tuple[str, ...]) -> dict[str, float]:
    best = {name: START[name] for name in names}
    least, step = loss(items, best), 0.3
    while step > 0.03:
        for name in names:
            for sign in (1, -1):
                tried = best | {name: min(1.0, best[name] * exp(sign * step))}
                value = loss(items, tried)
                if value < least - 1e-4:
                    best, least = tried, value
                    break
            else:
                continue
            break
        else:
            step /= 2
    return best


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", nargs="?", type=Path, default=None)
    parser.add_argument("--stack", default="", help="comma-separated parts of names")
    parser.add_argument("--join", action="store_true", help="one entry per generation for all of these stacks")
    parser.add_argument("--most", type=int, default=40, help="rows of one fit, evenly picked")
    parser.add_argument("--leave-out", action="store_true")
    arguments = parser.parse_args()
    session, groups = Session(), defaultdict(list)
    for row in read_table(arguments.file or bundled_table()):
        if not row.step_seconds or not any(name in row.software_stack for name in arguments.stack.split(",")):
            continue
        try:
            setting = session.setup(row)
            evaluate(setting.graph, setting.candidate, setting.cluster)
        except AutoparError as error:
            print(f"# without {row.id}: {error}", file=sys.stderr)
            continue
        name = arguments.stack if arguments.join else row.software_stack
        groups[name, setting.cluster.device.generation].append((row, setting))
    for (name, generation), items in sorted(groups.items(), key=str):
        names = names_of(items)
        picked = items[:: -(-len(items) // arguments.most)]
        constants = fit(picked, names)
        left = [abs(e) for e in errors(items, constants)]
        text = ", ".join(f"{key}: {value:.3f}" for key, value in constants.items())
        print(
            f'  - {{stack: {name}, generation: {generation}, {text}, how: "fitted on {len(picked)} rows"}}'
            f"  # {len(items)} rows, median error {statistics.median(left):.1%}, p90 {sorted(left)[int(0.9 * len(left))]:.1%}",
            flush=True,
        )
        if arguments.leave_out:
            sources = sorted({row.source for row, _ in items})
            for source in sources if len(sources) > 1 else ():
                constants = fit([item for item in picked if item[0].source != source] or picked, names)
                left = [abs(e) for e in errors([item for item in items if item[0].source == source], constants)]
                print(f"    # without {source[-60:]}: median {statistics.median(left):.1%} of {len(left)}", flush=True)


if __name__ == "__main__":
    main()
