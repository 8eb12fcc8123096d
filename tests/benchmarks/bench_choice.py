"""Is the chosen plan the fastest? Models under every forced plan and the chosen one, each built in the same four processes, whose
steps are timed in turn; on this machine, and in labs of two and four nodes (tests/support/network_lab.py).

    python tests/benchmarks/bench_choice.py [--where local,2x2@200mbit,4x1@1gbit] [--only gpt] [--rounds 8]

The cluster of each place comes from ``autopar calibrate`` there, unless ``--cluster`` names a file. What is printed of a plan:
the fastest of its steps (forward, backward, AdamW), what its ranks took of the cores' time (in brackets the update's), and the
prediction over the first; of a model the regret (chosen over fastest), the order (concordant less discordant pairs, of plans more
than 5 % apart), and how much faster than data parallelism. Other programs disturb: as root the ranks run at a high priority.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

WORLD = 4
FORCES = (
    *("dp=4,zero=0", "dp=4,zero=3", "tp=4", "dp=2,tp=2,zero=0", "dp=2,tp=2,zero=3"),
    *("pp=2,dp=2,zero=0", "pp=4", "pp=2,tp=2", "ep=4", "dp=2,ep=2"),
)
DATA_PARALLEL = FORCES[0]
APART = 1.05
PARTS = ("compute", "exposed", "stall", "bubble", "optimizer")


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
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            done = subprocess.run([*command, *words], env=env, capture_output=True, text=True, timeout=timeout, check=False)
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


def rank_main(folder: Path, name: str, rounds: int) -> None:
    """Builds every plan and times their steps in turn; rank 0 writes the times."""
    import torch
    import torch.distributed as dist
    from choice_models import build

    import autopar

    raise_priority()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cluster = autopar.Cluster.from_dict(json.loads((folder / "cluster.json").read_text()))
    made: dict[str, Any] = {}
    for path in sorted(folder.glob("plan*.json")):
        model, batch = build(name)
        parallel = autopar.parallelize(model, cluster, batch, plan=str(path), check_batch_every=0)
        made[path.stem] = parallel, torch.optim.AdamW(parallel.parameters(), lr=1e-4), batch
    clock: dict[str, list[float]] = {plan: [] for plan in made}
    own: dict[str, list[tuple[float, float]]] = {plan: [] for plan in made}
    order = list(made)
    for turn in range(rounds + 2):
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
            if turn >= 2:
                clock[plan].append(float(seconds[0]) / WORLD)
                own[plan].append((float(seconds[1]), float(seconds[2])))
    if dist.get_rank() == 0:
        (folder / "times.json").write_text(json.dumps({"clock": clock, "own": own}))
    dist.barrier()
    os._exit(0)


# -- in the parent


@dataclass(slots=True)
class Measured:
    """A plan: the forces that gave it, predicted and measured seconds, and the processor seconds of its ranks over the cores:
    of the step, and of the update in it. `parts` is what the prediction adds up to."""

    names: list[str]
    what: str
    predicted: float
    seconds: float = 0.0
    own: tuple[float, float] = (0.0, 0.0)
    parts: str = ""

    @property
    def ratio(self) -> float:
        return self.predicted / self.seconds


def calibrated(place: Place, folder: Path) -> Path:
    """The cluster file that calibrate writes there."""
    path = folder / "cluster.yaml"
    if place.nodes > 1:
        place.torchrun(__file__, "--calibrate", str(path))
    else:
        command = [sys.executable, __file__, "--calibrate", str(path)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return path


def calibrate(path: str) -> None:
    from autopar.cli import main as command_line

    raise_priority()
    alone = [] if "RANK" in os.environ else ["--processes", str(WORLD)]
    sys.exit(command_line(["calibrate", "-o", path, *alone]))


def plans(name: str, cluster: Any, folder: Path) -> list[Measured]:
    """The chosen plan first, and every forced one that is another; their files."""
    from choice_models import build

    import autopar
    from autopar.cost_models.step.evaluate import evaluate

    out: dict[str, Measured] = {}
    for force in ("", *FORCES):
        model, batch = build(name)
        try:
            plan = autopar.plan(model, cluster, batch, force=force, time_limit_seconds=10)
        except autopar.AutoparError as error:
            print(f"  {force:18} no plan: {str(error).splitlines()[0][:90]}")
            continue
        text = repr(plan.candidate)
        if text not in out:
            (folder / f"plan{len(out)}.json").write_text(plan.to_json())
            told = evaluate(plan.graph, plan.candidate, cluster)
            parts = ", ".join(f"{part} {1e3 * getattr(told, f'{part}_seconds'):.1f}" for part in PARTS)
            out[text] = Measured([], plan.describe(), told.step_seconds, parts=parts)
        out[text].names.append(force or "chosen")
    return list(out.values())


def order_of(found: list[Measured]) -> float:
    """Concordant less discordant pairs, over all pairs that are apart."""
    signs = [
        1 if (a.predicted < b.predicted) == (a.seconds < b.seconds) else -1
        for a, b in itertools.combinations(found, 2)
        if max(a.seconds, b.seconds) > APART * min(a.seconds, b.seconds)
    ]
    return sum(signs) / len(signs) if signs else 1.0


def bench(name: str, place: Place, cluster: Any, rounds: int) -> tuple[float, float, list[float], float]:
    """Regret, order, predicted over measured of each plan, and data parallelism over chosen, of one model."""
    from autopar.cost_models.calibrate.measure import available_cores

    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        (folder / "cluster.json").write_text(json.dumps(cluster.to_dict()))
        found = plans(name, cluster, folder)
        place.torchrun(__file__, "--ranks", text, "--only", name, "--rounds", str(rounds))
        times = json.loads((folder / "times.json").read_text())
    for index, each in enumerate(found):
        each.seconds = min(times["clock"][f"plan{index}"])
        least = min(times["own"][f"plan{index}"])
        each.own = least[0] / available_cores(), least[1] / available_cores()
    fastest, chosen = min(each.seconds for each in found), found[0]
    for each in sorted(found, key=lambda each: each.seconds):
        label = ", ".join(each.names)
        took = f"{1e3 * each.seconds:7.1f} ms, of cores {1e3 * each.own[0]:7.1f} ({1e3 * each.own[1]:5.1f})"
        print(
            f"  {took}, predicted {1e3 * each.predicted:7.1f} {each.ratio:5.2f}  {label} ({each.what}; {each.parts})", flush=True
        )
    data = next((each.seconds for each in found if DATA_PARALLEL in each.names), chosen.seconds)
    return chosen.seconds / fastest - 1, order_of(found), [each.ratio for each in found], data / chosen.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--where", default="local,2x2@200mbit")
    parser.add_argument("--only", default="", help="models whose names are these, separated by commas")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--cluster", default="", help="a file that calibrate has written")
    parser.add_argument("--ranks", default="", help=argparse.SUPPRESS)
    parser.add_argument("--calibrate", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.calibrate:
        calibrate(arguments.calibrate)
    if arguments.ranks:
        rank_main(Path(arguments.ranks), arguments.only, arguments.rounds)
    from choice_models import MODELS
    from support.network_lab import why_no_lab

    from autopar.cost_models.hardware.cluster import Cluster

    wanted = [name for name in arguments.only.split(",") if name] or list(MODELS)
    for text in arguments.where.split(","):
        place = Place.parse(text)
        if place.nodes > 1 and why_no_lab():
            print(f"{text}: skipped, {why_no_lab()}")
            continue
        with tempfile.TemporaryDirectory() as folder:
            cluster = Cluster.parse(arguments.cluster or str(calibrated(place, Path(folder))))
        print(f"{text}: {cluster.note}", flush=True)
        rows = []
        for name in wanted:
            print(f" {name}", flush=True)
            rows.append(bench(name, place, cluster, arguments.rounds))
            regret, order, ratios, gain = rows[-1]
            said = f"{min(ratios):.2f} to {max(ratios):.2f}, chosen {ratios[0]:.2f}"
            print(
                f" {name}: regret {100 * regret:.1f} %, order {order:.2f}, {gain:.2f} times data parallelism, {said}", flush=True
            )
        every = [ratio for row in rows for ratio in row[2]]
        within = sum(0.8 <= ratio <= 1.2 for ratio in every)
        regrets, order = [row[0] for row in rows], statistics.mean(row[1] for row in rows)
        print(
            f"{text}: regret mean {100 * statistics.mean(regrets):.1f} %, largest {100 * max(regrets):.1f} %; order {order:.2f};"
        )
        median = statistics.median(every)
        print(f"  predicted over measured 0.8 to 1.2 in {within} of {len(every)} plans, in the median {median:.2f}", flush=True)


if __name__ == "__main__":
    main()
