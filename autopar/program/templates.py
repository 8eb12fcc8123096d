"""Files of an exported folder: train.py and README.md."""

from __future__ import annotations

TRAIN = '''"""Trains the program of this folder: torchrun --nproc-per-node {ranks} train.py [--steps 5] [--lr {learning_rate}]

Needs torch and the files beside it, nothing else. Reads batch.pt (the global batch by input name) and weights.pt (full tensors
by original name, tied ones under all their names), which may be replaced; without weights.pt parameters are initialised by
name.
"""

import argparse
import importlib.util
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from program import Program
from runtime.errors import RuntimeProblem
from runtime.step.inputs import NamedBatch
from runtime.device.mesh import MeshHandle, shut_down
from runtime.parallel import Parallel

HERE = Path(__file__).parent


def initial(program):
    """Full tensors by name, the same on every rank: matrices at random, scales one, biases zero."""
    roots = [root for stage in program.roots() for root in stage]
    specs = {{block.original_names[spec.path]: spec for root in roots for block in root.blocks() for spec in block.specs}}

    def tensor(name):
        spec = specs[name]
        if spec.buffer:
            raise SystemExit(f"buffer {{name}} needs its value: put weights.pt beside train.py (torch.save of the state by name)")
        if len(spec.shape) < 2:
            return (torch.zeros if name.endswith("bias") else torch.ones)(spec.shape)
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        return torch.randn(spec.shape, generator=generator) * 0.02

    return tensor


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--lr", type=float, default={learning_rate})
    able = torch.cuda.is_available() and importlib.util.find_spec("triton") is not None
    compiled = {compiled} and able  # as the plan is priced
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=compiled, help="torch.compile each block")
    options = parser.parse_args()

    program = Program(MeshHandle(Program.mesh_axes))
    weights = HERE / "weights.pt"
    source = torch.load(weights, map_location="cpu", weights_only=True) if weights.exists() else initial(program)
    parallel = Parallel(program, source, compile=options.compile)
    batch = torch.load(HERE / "batch.pt", map_location="cpu", weights_only=True)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=options.lr)
    for step in range(options.steps):
        result = parallel(NamedBatch(batch))
        loss = getattr(result, "loss", result)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {{step}} loss {{loss.item():.17g}}", flush=True)
    shut_down()


if __name__ == "__main__":
    try:
        main()
    except RuntimeProblem as problem:
        raise SystemExit(str(problem)) from None
'''

README = """# {name} on {mesh}

Written by autopar. Needs torch only:

    torchrun --nproc-per-node {ranks} train.py

* `program.py`: the whole step of one rank; the same file on all ranks.
* `runtime/`: collectives, state and the handle `Parallel`, an nn.Module whose call takes the global batch and returns the loss,
  or a namespace of the loss and the outputs that were asked for.
* `plan.json`: the plan that the program was generated from.
* `certificate.json`: what is proven of the program, and from what (`autopar check` proves it again).
* `batch.pt`: the global batch, a dict of tensors by input name. `weights.pt`, where there is one: full tensors by original name.
"""
