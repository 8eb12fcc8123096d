"""Prints the entries of cost_models/hardware/software_stacks.yaml, fitted to published runs (autopar/validate/constants.py):
`python tests/benchmarks/fit_stacks.py [FILE.csv] [--stack PARTS] [--own]`.

Every source weighs the same. A stack with no more runs than constants has no entry (those of one family are fitted together).
`--own`: the constants of our own programs, from the runs of FSDP1 and FSDP2 of all stacks, with the rate of attention that its
kernels reach. What the errors are on sources that the constants have not seen is said by `autopar validate
--leave-one-source-out`.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from dataclasses import replace
from pathlib import Path

from autopar.validate.constants import Fitter, Group, Item, grouped, step_seconds
from autopar.validate.price import Session
from autopar.validate.rows import bundled_table, read_table

KERNELS = {"ampere": 0.62, "hopper": 0.34}
"""Share of the peak of attention's kernels in torch, FlashAttention-2, causal and with heads of 128: 0.50 to 0.73 on A100 (arXiv
2307.08691, abstract); forward 335 of 989 TFLOP/s on H100, backward 322 without mask (arXiv 2407.08608, figures 5 and 6; cuDNN
539 and 516, FlashAttention-3 616 and 561)."""


def own(groups: dict[Group, list[Item]]) -> dict[Group, list[Item]]:
    """The runs of plain PyTorch, as if our programs had made them, compiled ones apart; with at least two sources."""
    out: dict[Group, list[Item]] = {}
    for (_, generation), items in groups.items():
        for row, setup in items:
            if "fsdp" in row.software_stack:
                name = "autopar, compiled: true" if row.compiled == 1 else "autopar"
                out.setdefault((name, generation), []).append((replace(row, software_stack=name), setup))
    return {group: items for group, items in out.items() if len({row.source for row, _ in items}) > 1}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", nargs="?", type=Path, default=None)
    parser.add_argument("--stack", default="", help="comma-separated parts of names")
    parser.add_argument("--own", action="store_true")
    arguments = parser.parse_args()
    rows = read_table(arguments.file or bundled_table())
    groups = grouped(Session(), [row for row in rows if any(part in row.software_stack for part in arguments.stack.split(","))])
    for (family, generation), items in sorted((own(groups) if arguments.own else groups).items()):
        given = {"attention": KERNELS[generation]} if arguments.own else {}
        constants = Fitter(items, given=given).fit()
        if constants is None:
            print(f"  # {family} on {generation}: {len(items)} rows are too few", flush=True)
            continue
        found: dict[str, list[float]] = {}
        for row, setup in items:
            found.setdefault(row.source, []).append(abs(step_seconds((row, setup), constants) / (row.step_seconds or 1.0) - 1))
        left = [error for each in found.values() for error in each]
        text = ", ".join(f"{key}: {value:.3f}" for key, value in constants.items())
        said = f"fitted on {len(items)} rows of {len(found)} sources" + (", attention by its kernels" if given else "")
        middle, most = statistics.median(map(statistics.median, found.values())), sorted(left)[int(0.9 * len(left))]
        errors = f"median of sources {middle:.1%}, p90 {most:.1%}"
        for stack in sorted(Counter(row.software_stack for row, _ in items)):
            print(f'  - {{stack: {stack}, generation: {generation}, {text}, how: "{said}"}}  # {errors}', flush=True)


if __name__ == "__main__":
    main()
