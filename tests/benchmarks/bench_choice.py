"""Is the chosen plan the fastest? Models under every forced plan and the chosen one, each built in the same four processes, whose
steps are timed in turn; on this machine, and in labs of two and four nodes (tests/support/network_lab.py).

    python tests/benchmarks/bench_choice.py [--where local,2x2@200mbit,4x1@1gbit] [--models gpt,llama] [--rounds 8]
        [--minutes 8] [--keep FOLDER [--prepare]] [--most 6]

The cluster of each place comes from ``autopar calibrate`` there, unless ``--cluster`` names a file. What is printed of a plan:
the fastest of its steps (forward, backward, AdamW), what its ranks took of the cores' time (in brackets the update's), and the
prediction over both; of a model the regret (chosen over fastest), the order (concordant less discordant pairs, of plans more
than 5 % apart), and how much faster than data parallelism. Other programs disturb: as root the ranks run at a high priority.

``--keep`` keeps clusters, plans and times in a folder, and takes what is there: with ``--prepare`` everything but the times is
made (no idle machine needed), a run on an idle machine measures what is missing within ``--minutes``, and any later run prices
the kept plans anew. ``--cores`` compares with the processor time of all ranks over the cores, which other programs do not change.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from choice_plans import FORCES, Row, make_plans, predictions, print_plans, print_table  # noqa: E402

WORLD = 4
RANK_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_TRIM_THRESHOLD_": str(2**32), "MALLOC_MMAP_THRESHOLD_": str(2**32)}
"""As docs/benchmarks.md recommends for ranks on CPUs: else glibc gives freed memory back, and steps get it page by page again."""

LEAST_ROUNDS = 2
"""Of each plan, besides one that sets things up, however little time is left."""


@dataclass(frozen=True, slots=True)
class Place:
    """`nodes` of a lab over links of `rate`; one node without a rate is this machine."""

    nodes: int
    rate: str

    @staticmethod
    def parse(text: str) -> Place:
        if text == "local":
            return Place(1, "")
        shape, _, rate = text.partition("@")
        return Place(int(shape.partition("x")[0]), rate)

    def torchrun(self, *words: str, timeout: float = 600.0) -> None:
        """Runs a script on the four ranks. SystemExit with what it said where it fails."""
        from support.network_lab import NetworkLab

        if self.nodes == 1:
            command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(WORLD), "--master-port", "29478"]
            done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=timeout, check=False)
            ended = [(done.returncode, done.stderr)]
        else:
            with NetworkLab(self.nodes, self.rate) as lab:
                agents = lab.torchrun(WORLD // self.nodes, *words, timeout=timeout)
                ended = [(agent.status, agent.stderr) for agent in agents]
        if any(status for status, _ in ended):
            raise SystemExit("\n".join(error[-3000:] for _, error in ended))


def raise_priority() -> None:
    """Where root may: other programs on this machine then wait, and not the ranks."""
    with contextlib.suppress(OSError):
        os.nice(-15)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("-15")


# -- in the ranks


def rank_main(folder: Path, name: str, rounds: int, seconds: float) -> None:
    """Builds every plan and times their steps in turn, until `seconds` are over; rank 0 writes the times."""
    end = time.monotonic() + seconds
    import torch
    import torch.distributed as dist
    from choice_models import build

    import autopar

    raise_priority()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cluster = autopar.Cluster.from_dict(json.loads((folder.parent / "cluster.json").read_text()))
    made: dict[str, Any] = {}
    for path in sorted(folder.glob("plan*.json")):
        model, batch = build(name)
        parallel = autopar.parallelize(model, cluster, batch, plan=str(path), check_batch_every=0)
        made[path.stem] = parallel, torch.optim.AdamW(parallel.parameters(), lr=1e-4), batch
    clock: dict[str, list[float]] = {plan: [] for plan in made}
    own: dict[str, list[tuple[float, float]]] = {plan: [] for plan in made}
    order = list(made)
    for turn in range(rounds + 1):
        late = torch.tensor(float(time.monotonic() > end))
        dist.all_reduce(late, op=dist.ReduceOp.MAX)
        if late.item() and turn > LEAST_ROUNDS:
            break
        for plan in order if turn % 2 else order[::-1]:
            parallel, optimizer, batch = made[plan]
            dist.barrier()
            began, used = time.perf_counter(), time.process_time()
            result = parallel(**batch)
            (result if isinstance(result, torch.Tensor) else result.loss).backward()
            computed = time.process_time()
            optimizer.step()
            optimizer.zero_grad()
            updated = time.process_time()
            dist.barrier()
            seconds = torch.tensor([time.perf_counter() - began, time.process_time() - used, updated - computed])
            dist.all_reduce(seconds)
            if turn >= 1:
                clock[plan].append(float(seconds[0]) / WORLD)
                own[plan].append((float(seconds[1]), float(seconds[2])))
    if dist.get_rank() == 0:
        (folder / "times.json").write_text(json.dumps({"clock": clock, "own": own}))
    dist.barrier()
    os._exit(0)


# -- in the parent


def calibrated(place: Place, path: Path) -> None:
    """Writes the cluster file that calibrate makes there."""
    if place.nodes > 1:
        place.torchrun(__file__, "--calibrate", str(path))
    else:
        command = [sys.executable, __file__, "--calibrate", str(path)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def calibrate(path: str) -> None:
    from autopar.cli import main as command_line

    raise_priority()
    alone = [] if "RANK" in os.environ else ["--processes", str(WORLD)]
    sys.exit(command_line(["calibrate", "-o", path, *alone]))


def bench(text: str, folder: Path, wanted: list[str], arguments: argparse.Namespace, end: float) -> None:
    """One place: its cluster, the plans of each model, their times, and the table."""
    from autopar.cost_models.hardware.cluster import Cluster

    place = Place.parse(text)
    folder.mkdir(parents=True, exist_ok=True)
    path = Path(arguments.cluster or folder / "cluster.yaml")
    if not path.exists():
        calibrated(place, path)
    cluster = Cluster.parse(str(path))
    (folder / "cluster.json").write_text(json.dumps(cluster.to_dict()))
    print(f"{text}: {cluster.note}", flush=True)
    rows, missing = [], []
    for index, name in enumerate(wanted):
        inside = folder / name.replace(" ", "-")
        share = (end - time.monotonic()) / (len(wanted) - index)
        if not (inside / "names.json").exists() and share <= 0:
            missing.append(name)
            continue
        make_plans(name, cluster, inside, arguments.most)
        if not (inside / "times.json").exists():
            share = (end - time.monotonic()) / (len(wanted) - index)
            if arguments.prepare or share <= 0:
                missing.append(name)
                continue
            limits = ("--rounds", str(arguments.rounds), "--seconds", f"{share:.0f}")
            try:
                place.torchrun(__file__, "--ranks", str(inside), "--models", name, *limits, timeout=max(120.0, 2 * share))
            except (SystemExit, AssertionError, subprocess.TimeoutExpired) as error:
                print(f" {name}: not measured: {str(error).strip()[-300:]}", flush=True)
                missing.append(name)
                continue
        print(f" {name}", flush=True)
        found = predictions(inside, cluster)
        print_plans(found)
        rows.append(Row(name, tuple(found), not arguments.cores))
    print_table(text, rows, missing)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--where", default="local,2x2@200mbit")
    parser.add_argument("--models", default="", help="models whose names are these, separated by commas")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=60.0, help="of all places together; what was not reached is said")
    parser.add_argument("--most", type=int, default=1 + len(FORCES), help="plans of each model")
    parser.add_argument("--keep", default="", help="a folder of clusters, plans and times, taken and added to")
    parser.add_argument("--prepare", action="store_true", help="clusters and plans only")
    parser.add_argument("--cores", action="store_true", help="compare with processor time over the cores")
    parser.add_argument("--cluster", default="", help="a file that calibrate has written")
    parser.add_argument("--ranks", default="", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=60.0, help=argparse.SUPPRESS)
    parser.add_argument("--calibrate", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ.update(RANK_ENVIRONMENT)
    if arguments.calibrate:
        calibrate(arguments.calibrate)
    if arguments.ranks:
        rank_main(Path(arguments.ranks), arguments.models, arguments.rounds, arguments.seconds)
    from choice_models import MODELS
    from support.network_lab import why_no_lab

    end = time.monotonic() + 60 * arguments.minutes
    wanted = [name for name in arguments.models.split(",") if name] or list(MODELS)
    places = arguments.where.split(",")
    with tempfile.TemporaryDirectory() as temporary:
        for index, text in enumerate(places):
            if Place.parse(text).nodes > 1 and why_no_lab():
                print(f"{text}: skipped, {why_no_lab()}")
                continue
            now = time.monotonic()
            bench(text, Path(arguments.keep or temporary) / text, wanted, arguments, now + (end - now) / (len(places) - index))


if __name__ == "__main__":
    main()
