"""Steps of a plan on two nodes joined by a slow link, beside the larger of compute and communication, which no program beats.

    python tests/benchmarks/network/bench_lab_step.py [--rates 200mbit 1gbit] [--plans dp zero3 tp] [--compile inductor]
        [--by-messages]

A node is a network namespace with one rank (`support.network_lab`; rights of root). Compute: the same steps with collectives that
move nothing, on both ranks at once. Communication: the bytes that a step sends or receives, over the rate of the link. Medians.
Processors: what processes and the kernel take of the cores, which compute and send; a step in which they are busy all the time
can only be made shorter by computing or copying less. The machine has to be idle.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "tests" / "benchmarks"), str(ROOT / "tests"), str(ROOT)]

from bench_step import build  # noqa: E402

NODES, MODEL, WARM_UP = 2, "llama", 2
PLANS = {"dp": {"dp": 2, "zero": 0}, "zero3": {"dp": 2, "zero": 3}, "tp": {"tp": 2}}
BYTES_PER_SECOND = {"mbit": 1e6 / 8, "gbit": 1e9 / 8}


def rate_of(text: str) -> float:
    """Bytes per second of a rate as tc writes it: ``200mbit``."""
    return float(text[:-4]) * BYTES_PER_SECOND[text[-4:]]


def program_of(force: dict[str, int], rate: str, compile: str, by_messages: bool) -> tuple[str, dict[str, int]]:
    """The program of a plan for this link, and its axes on which collectives run in pieces with products."""
    from autopar.capture import capture
    from autopar.cost_models.hardware.cluster import Cluster
    from autopar.cost_models.hardware.device_specs import Link
    from autopar.cost_models.hardware.software_stacks import with_compilation
    from autopar.cost_models.hardware.software_traits import Overlap
    from autopar.cost_models.step.evaluate import async_tp_of
    from autopar.program.build import program_text
    from autopar.solve.search import search
    from autopar.solve.space.options import SearchOptions

    module, batch = build(MODEL)
    graph = capture(module, (), batch)
    cluster = replace(
        Cluster.parse(f"local:{NODES}"),
        links=(Link("network", NODES, rate_of(rate), 1e-4),),
        overlap=Overlap(async_tp_by_messages=by_messages),
    )
    cluster = with_compilation(cluster, compile == "inductor")
    candidate = search(graph, cluster, SearchOptions(batch=graph.batch, force=force)).candidate
    return program_text(graph, candidate), async_tp_of(graph, candidate, cluster)


def seconds_of_steps(text: str, axes: dict[str, int], compile: str, steps: int) -> tuple[float, float, float]:
    """Median seconds of a step, the bytes that one sends or receives over the link, and the share of the cores that is busy."""
    from autopar.program.load import load_program
    from autopar.runtime.comm.async_tp import async_tp_groups
    from autopar.runtime.device.mesh import MeshHandle
    from autopar.runtime.parallel import Parallel

    model, batch = build(MODEL)
    program = load_program(text).Program
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    mesh = MeshHandle(program.mesh_axes)
    mesh.async_tp = async_tp_groups(mesh, axes, compile == "inductor", by_messages=True)
    ours = Parallel(program(mesh), tensors, compile=compile)
    seconds, sent, busy = list[float](), list[int](), list[float]()
    for step in range(WARM_UP + steps):
        dist.barrier()
        before, began, taken = link_bytes(), time.perf_counter(), processor_seconds()
        ours(**batch).backward()
        ours.zero_grad()
        dist.barrier()
        if step >= WARM_UP:
            seconds.append(time.perf_counter() - began)
            busy.append((processor_seconds() - taken) / seconds[-1] / len(os.sched_getaffinity(0)))
            sent.append(max(after - first for after, first in zip(link_bytes(), before, strict=True)))
    return median(seconds), median(sent), median(busy)


def processor_seconds() -> float:
    """Seconds of all cores that were not idle so far."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(fields) - sum(fields[3:5])) / os.sysconf("SC_CLK_TCK")


def link_bytes() -> tuple[int, int]:
    """Bytes received and sent by this node's link so far; none where there is no link."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "eth0":
            fields = counts.split()
            return int(fields[0]), int(fields[8])
    return 0, 0


def rank_main(text_file: str, axes: dict[str, int], compile: str, steps: int) -> None:
    """One rank in the lab: prints compute seconds, step seconds and bytes."""
    from autopar.dryrun.compat import fake_group

    torch.set_num_threads(1)
    text = Path(text_file).read_text()
    dist.init_process_group("gloo")
    dist.barrier()
    step_seconds, step_bytes, busy = seconds_of_steps(text, axes, compile, steps)
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    with fake_group(rank, NODES):
        compute_seconds, *_ = seconds_of_steps(text, axes, compile, steps)
    print(json.dumps({"compute": compute_seconds, "step": step_seconds, "bytes": step_bytes, "busy": busy}), flush=True)


def main() -> None:
    from support.network_lab import NetworkLab

    parser = argparse.ArgumentParser()
    parser.add_argument("--rates", nargs="+", default=["200mbit", "1gbit"])
    parser.add_argument("--plans", nargs="+", default=list(PLANS), choices=list(PLANS))
    parser.add_argument("--compile", default="")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--by-messages", action="store_true", help="collectives in pieces beside products")
    parser.add_argument("--rank", default="")
    parser.add_argument("--axes", type=json.loads, default={})
    arguments = parser.parse_args()
    if arguments.rank:
        rank_main(arguments.rank, arguments.axes, arguments.compile, arguments.steps)
        return
    with tempfile.TemporaryDirectory() as folder:
        for plan in arguments.plans:
            for rate in arguments.rates:
                path = Path(folder) / f"{plan}.py"
                text, axes = program_of(PLANS[plan], rate, arguments.compile, arguments.by_messages)
                path.write_text(text)
                words = (__file__, "--rank", str(path), "--axes", json.dumps(axes), "--compile", arguments.compile)
                words = (*words, "--steps", str(arguments.steps))
                with NetworkLab(NODES, rate) as lab:
                    ranks = lab.torchrun(1, *words, timeout=900.0)
                found = [json.loads(each.stdout.splitlines()[-1]) for each in ranks]
                step, compute = (max(each[what] for each in found) for what in ("step", "compute"))
                communication = max(each["bytes"] for each in found) / rate_of(rate)
                busy = max(each["busy"] for each in found)
                print(
                    f"{plan} {rate}: step {step:.3f} s, compute {compute:.3f} s, communication {communication:.3f} s; step over "
                    f"the larger {step / max(compute, communication):.2f}, processors {busy:.0%} busy",
                    flush=True,
                )


if __name__ == "__main__":
    main()
