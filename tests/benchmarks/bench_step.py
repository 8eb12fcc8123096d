"""Step time of autopar's program beside what an expert writes by hand for the same plan, on 4 gloo processes, alternating.

    python tests/benchmarks/bench_step.py [--pairs 7] [--compile inductor] [--only llama/tp] [--host]

A step is forward, backward and zero_grad. A pair is one step of each; what is printed is the median of the ratios
hand-written / autopar (above 1: autopar is faster) and their range. With ``--host`` the models are twelve layers of width 32, and
what is timed is the processor time of the main thread of rank 0, in each phase of a step with AdamW (foreach) and
``clip_grad_norm_``: on GPUs, the time in which kernels are launched. What is written by hand runs in processes without autopar.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn

sys.path.insert(0, str(Path(__file__).parent))

WORLD = 4
CASES: dict[str, tuple[str, str, dict[str, int]]] = {
    "gpt2/ddp": ("gpt2", "ddp", {"dp": 4, "zero": 0}),
    "gpt2/fsdp": ("gpt2", "fsdp", {"dp": 4, "zero": 3}),
    "llama/ddp": ("llama", "ddp", {"dp": 4, "zero": 0}),
    "llama/fsdp": ("llama", "fsdp", {"dp": 4, "zero": 3}),
    "llama/tp": ("llama", "tp", {"tp": 4}),
    "llama/fsdp+tp": ("llama", "fsdp+tp", {"dp": 2, "tp": 2, "zero": 3}),
}


def build(model: str, tiny: bool = False) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model and one global batch."""
    torch.manual_seed(0)
    if model == "llama":
        from plain_llama import Llama, LlamaSizes

        sizes = LlamaSizes(32, 64, 12, 4, 4, 256) if tiny else LlamaSizes()
        tokens = torch.randint(0, sizes.vocabulary, (8, 65))
        return Llama(sizes, 64), {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
    import transformers

    small = dict(n_embd=32, n_head=4, vocab_size=256) if tiny else {}
    config = transformers.GPT2Config(
        use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, loss_type="ForCausalLMLoss", **small
    )
    tokens = torch.randint(0, config.vocab_size, (8, 32))
    return transformers.GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}


def autopar_program(model: str, force: dict[str, int], tiny: bool = False) -> str:
    """What autopar makes of it."""
    from autopar.capture import capture
    from autopar.cost_models.hardware.cluster import Cluster
    from autopar.program.build import program_text
    from autopar.solve.search import search
    from autopar.solve.space.options import SearchOptions

    module, batch = build(model, tiny)
    graph = capture(module, (), batch)
    result = search(graph, Cluster.parse(f"local:{WORLD}"), SearchOptions(batch=graph.batch, force=force))
    return program_text(graph, result.candidate)


def by_hand(kind: str, model: nn.Module) -> tuple[nn.Module, int]:
    """The expert's model, and over how many ranks it splits the batch."""
    import handwritten_parallelism
    from torch.distributed.device_mesh import init_device_mesh

    layers = model.layers if hasattr(model, "layers") else model.transformer.h
    if kind == "ddp":
        return handwritten_parallelism.ddp(model), WORLD
    if kind == "fsdp":
        return handwritten_parallelism.fsdp(model, layers, init_device_mesh("cpu", (WORLD,))), WORLD
    if kind == "tp":
        return handwritten_parallelism.tensor_parallel(model, init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))), 1
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return handwritten_parallelism.fsdp(handwritten_parallelism.tensor_parallel(model, mesh["tp"]), layers, mesh["dp"]), 2


def rank_main(rank: int, text: str, case: str, pairs: int, compile: str, folder: str) -> None:
    """Alternates the two and writes the times of rank 0."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    from autopar.program.load import load_program
    from autopar.runtime.device.mesh import MeshHandle
    from autopar.runtime.parallel import Parallel

    name, kind, _ = CASES[case]
    model, batch = build(name)
    program = load_program(text).Program
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    ours = Parallel(program(MeshHandle(program.mesh_axes)), {k: v.detach().clone() for k, v in tensors.items()}, compile=compile)
    expert, ways = by_hand(kind, model)
    if compile:
        # FSDP2 by layers, as torchtitan does, DDP as a whole, as its documentation says; DTensors too: on 2.13.0 the backward
        # of layers compiled each ends in an AttributeError of their redistribution ("no attribute '_local_tensor'").
        layers = model.layers if hasattr(model, "layers") else model.transformer.h
        for each in layers if kind == "fsdp" else (expert,):
            each.compile(backend=compile)
    part = rank // (WORLD // ways)
    rows = next(iter(batch.values())).shape[0] // ways
    local = {key: value[part * rows : (part + 1) * rows] for key, value in batch.items()}

    def theirs() -> Any:
        output = expert(**local)
        return output if isinstance(output, torch.Tensor) else output.loss

    times: dict[str, list[float]] = {"autopar": [], "by hand": []}
    steps: tuple[tuple[str, nn.Module, Callable[[], Any]], ...] = (
        ("autopar", ours, lambda: ours(**batch)),
        ("by hand", expert, theirs),
    )
    for pair in range(pairs + 2):
        for what, module, forward in steps if pair % 2 else steps[::-1]:
            dist.barrier()
            began = time.perf_counter()
            forward().backward()
            module.zero_grad()
            dist.barrier()
            if pair >= 2:
                times[what].append(time.perf_counter() - began)
    if rank == 0:
        torch.save(times, f"{folder}/times")
    dist.destroy_process_group()


def host_main(rank: int, text: str, case: str, steps: int, folder: str) -> None:
    """Write the median processor seconds of each phase of rank 0: of the program, or of what is written by hand without one."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    name, kind, _ = CASES[case]
    model, batch = build(name, tiny=True)
    module: nn.Module
    if text:
        from autopar.program.load import load_program
        from autopar.runtime.device.mesh import MeshHandle
        from autopar.runtime.parallel import Parallel

        program = load_program(text).Program
        module = Parallel(program(MeshHandle(program.mesh_axes)), dict(model.named_parameters()) | dict(model.named_buffers()))
    else:
        module, ways = by_hand(kind, model)
        rows = next(iter(batch.values())).shape[0] // ways
        begin = rank // (WORLD // ways) * rows
        batch = {key: value[begin : begin + rows] for key, value in batch.items()}
    optimizer = torch.optim.AdamW(module.parameters(), foreach=True)
    phases: dict[str, list[float]] = {"forward": [], "backward": [], "clip": [], "step": []}
    for _ in range(steps + 2):
        dist.barrier()
        now = [time.thread_time()]
        output = module(**batch)
        now.append(time.thread_time())
        (output if isinstance(output, torch.Tensor) else output.loss).backward()
        now.append(time.thread_time())
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        now.append(time.thread_time())
        optimizer.step()
        now.append(time.thread_time())
        optimizer.zero_grad()
        for times, begun, ended in zip(phases.values(), now, now[1:], strict=False):
            times.append(ended - begun)
    if rank == 0:
        torch.save({phase: statistics.median(times[2:]) for phase, times in phases.items()}, f"{folder}/times")
    dist.destroy_process_group()


def compare_hosts(case: str, steps: int) -> None:
    """Print the processor time of each phase of both."""
    name, _, force = CASES[case]
    for what, text in (("autopar", autopar_program(name, force, tiny=True)), ("by hand", "")):
        with tempfile.TemporaryDirectory() as folder:
            spawn(host_main, args=(text, case, steps, folder), nprocs=WORLD)
            times = torch.load(f"{folder}/times")
        print(f"{case:16} {what:8}", *(f"{phase} {1e3 * seconds:6.1f} ms" for phase, seconds in times.items()))


def measure(case: str, pairs: int, compile: str) -> dict[str, list[float]]:
    """Times of both, by pair."""
    name, _, force = CASES[case]
    text = autopar_program(name, force)
    with tempfile.TemporaryDirectory() as folder:
        spawn(rank_main, args=(text, case, pairs, compile, folder), nprocs=WORLD)
        return torch.load(f"{folder}/times")  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--compile", default="", help="backend: inductor or aot_eager")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--host", action="store_true", help="the processor time of the main thread, by phase")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    if arguments.host:
        for case in CASES:
            if arguments.only in case:
                compare_hosts(case, 3 * arguments.pairs)
        return
    print(f"{'case':16} {'autopar':>10} {'by hand':>10} {'by hand / autopar':>20}")
    for case in CASES:
        if arguments.only in case:
            times = measure(case, arguments.pairs, arguments.compile)
            ratios = [b / a for a, b in zip(times["autopar"], times["by hand"], strict=True)]
            medians = [f"{1e3 * statistics.median(times[what]):7.0f} ms" for what in ("autopar", "by hand")]
            print(
                f"{case:16} {medians[0]} {medians[1]} {statistics.median(ratios):12.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            )


if __name__ == "__main__":
    main()
