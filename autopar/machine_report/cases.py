"""The cases of a machine's report: which models are verified, and which steps are measured beside their predictions."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class StepCase:
    """One rank's step of a bundled model, while collectives move nothing, under a fixed configuration of `devices`. The batch is
    as large as the constants say that the step takes `step_seconds` at most. `offload`: all that repeated blocks save lies in
    host memory until their backward. `compiler`: of torch.compile; none: blocks run as they are."""

    model: str
    seq: int | None = None
    devices: int = 1
    tp: int = 1
    pp: int = 1
    zero: int = 0
    micro_batches: int = 1
    recompute: str = "none"
    offload: bool = False
    compiler: str = ""
    precision: str = "bf16"
    step_seconds: float = 0.5

    @property
    def name(self) -> str:
        """The model, its degrees and what is done with its memory."""
        degrees = [f"{key}={value}" for key in ("tp", "pp", "zero") if (value := getattr(self, key)) > (key != "zero")]
        memory = [f"recompute {self.recompute}"] * (self.recompute != "none") + ["offloaded"] * self.offload
        return ", ".join([self.model, f"1 of {self.devices}", *degrees, *memory, *["compiled"] * bool(self.compiler)])


@dataclass(frozen=True, slots=True)
class Case:
    """A part of the report: the command that measures it, which prints one JSON document; `kind` is ``verify`` or ``step``."""

    kind: str
    name: str
    command: tuple[str, ...]


def verify_case(model: str, devices: int, force: str = "") -> Case:
    """Return the case of a model on ranks of this machine beside one process, in float32."""
    words = ["verify", model, "--cluster", f"local:{devices}", "--json", *(["--force", force] if force else [])]
    shown = f"{model} on {devices} rank{'s' * (devices > 1)}{', ' * bool(force)}{force}"
    return Case("verify", shown, (sys.executable, "-m", "autopar", *words))


def step_case(case: StepCase, cluster: dict[str, Any]) -> Case:
    """Return the case of a step, predicted for devices of the `cluster`."""
    job = json.dumps({"case": asdict(case), "cluster": cluster})
    return Case("step", case.name, (sys.executable, "-m", "autopar.machine_report.step", job))


_ON_GPU = (
    StepCase("gpt2", 1024, 8),
    StepCase("gpt2-xl", 1024, 8, zero=3),
    StepCase("bert-large", 512, 8, zero=2),
    StepCase("vit-huge", None, 8),
    StepCase("llama3-8b", 8192, 8, tp=8),
    StepCase("qwen3-8b", 4096, 16, tp=8, zero=1, micro_batches=2),
    StepCase("llama3-70b", 4096, 128, tp=8, pp=16, micro_batches=16),
    StepCase("mixtral-8x22b", 4096, 224, tp=8, pp=28, micro_batches=28),
)
"""Eight models on one rank of as many devices as they take."""

_ON_CPU = (
    StepCase("mlp", None, 2),
    StepCase("convnet", None, 2),
    StepCase("gpt2-tiny", None, 2, zero=3),
    StepCase("bert-tiny", None, 2, zero=2),
    StepCase("vit-tiny", None, 2, zero=1),
    StepCase("llama-tiny", None, 2, tp=2),
    StepCase("qwen3-tiny", None, 4, tp=2, pp=2, micro_batches=2),
    StepCase("mixtral-tiny", None, 2, tp=2),
)


def cases(gpus: int) -> Iterator[StepCase | tuple[str, int, str]]:
    """Yield models to verify (with ranks and forced degrees) and steps to measure, the most telling first: a budget ends the list
    somewhere. On one GPU a single rank beside the CPU is what can be verified."""
    ranks = next(size for size in (8, 4, 2, 1) if size <= max(gpus, 1)) if gpus else 2
    forces = ("",) if ranks == 1 else (f"dp={ranks},zero=3", f"tp={min(ranks, 2)}", "pp=2")
    compiler = "inductor" if gpus else "aot_eager_decomp_partition"
    steps = _ON_GPU if gpus else tuple(replace(each, precision="float32", step_seconds=0.02) for each in _ON_CPU)
    telling = steps[4 if gpus else 5]
    yield "llama-tiny", ranks, forces[-1]
    yield from (telling, replace(telling, compiler=compiler))
    yield from (step for step in steps if step != telling)
    yield from (("gpt2-tiny", ranks, force) for force in forces)
    for changed in ({"recompute": "full"}, {"recompute": "selective"}, {"offload": True}):
        yield replace(telling, **changed)
        yield replace(telling, compiler=compiler, **changed)
    yield from ((model, ranks, forces[0]) for model in ("mixtral-tiny", "convnet"))
