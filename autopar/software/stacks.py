"""The software that recipes are run with: how each writes a decoder, who runs a recipe, and a cluster as the software uses it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.software_stacks import with_stack
from autopar.cost_models.hardware.stack_entries import stack_for
from autopar.decoders.decoder import Architecture
from autopar.decoders.recognize import RecognizedDecoder

WHOLE_EXPERTS = ("megatron-bridge", "megatron-core-moe", "automodel")
"""Stacks with an expert tensor parallelism of 1: the weights of an expert are not sharded where those of all else are."""
_PYTORCH_STACKS = ("torchtitan-fsdp2", "fms-fsdp1", "llm-foundry-fsdp1")
_MEGATRON_STACKS = ("nemo-megatron-core", "megatron-bridge", "megatron-core")
_NEWEST_STACKS = ("megatron-bridge", "megatron-core-moe", "nemo-megatron-core")
_NEAREST = {
    **{"blackwell": "hopper", "hopper": "ampere", "volta": "ampere", "cdna3": "hopper", "ampere": "hopper"},
    **{"ada": "ampere", "blackwell-rtx": "ampere", "cdna4": "hopper"},
}
"""The generation whose constants of a software stand for another that it was not measured on."""
SENDS_ONCE = ("megatron-bridge",)


@dataclass(frozen=True, slots=True)
class Implementation:
    """What the name of a software stack says about models without a gate (`dropout`, `bias`, `tied`) and about all. `tied` None:
    as the model is."""

    fused_projections: bool = False
    float_logits: bool = True
    loss_in_place: bool = False
    bias: bool = True
    dropout: float = 0.0
    tied: bool | None = None


_MEGATRON = Implementation(fused_projections=True, float_logits=False, loss_in_place=True)
_MEGATRON_SCRIPT = replace(_MEGATRON, dropout=0.1)
"""Runs of the training script as it is, which drops a tenth (Megatron-LM ``--hidden-dropout``; ``hidden_dropout: 0.1`` of GPT-3
in NeMo-Framework-Launcher, launcher_scripts/conf/training/gpt3)."""
_MPT = Implementation(fused_projections=True, float_logits=False, bias=False, tied=True)
"""llm-foundry's MPT has neither biases nor dropout, and ties its head."""
_STACKS = {
    "deepspeed-zero3-2021": _MEGATRON_SCRIPT,
    "megatron-lm-2021": _MEGATRON_SCRIPT,
    "megatron-lm-2022": _MEGATRON_SCRIPT,
    "megatron-core": replace(_MEGATRON_SCRIPT, tied=False),
    "nanotron": Implementation(tied=True),
}
"""By the whole name; BLOOM's runs train without dropout (bigscience tr11 scripts)."""
_STACK_PREFIXES = {"llm-foundry": _MPT, "megatron": _MEGATRON, "nemo": _MEGATRON_SCRIPT}


def implementation_of(name: str) -> Implementation:
    """What the name of a software stack says."""
    by_prefix = (stack for prefix, stack in _STACK_PREFIXES.items() if name.startswith(prefix))
    return _STACKS.get(name) or next(by_prefix, Implementation())


def written_by(software: str, decoder: RecognizedDecoder) -> Architecture:
    """The decoder as `software` writes it."""
    known = implementation_of(software)
    details = {name: getattr(known, name) for name in ("fused_projections", "float_logits", "loss_in_place")}
    return replace(decoder.sizes, **details)


def software_of(recipe: str, generation: str, mixture: bool) -> tuple[str, str] | None:
    """(software, generation of its constants) that a recipe is run on; None where nothing is known of any, as on CPUs."""
    names = (
        _PYTORCH_STACKS if recipe != "megatron" else _NEWEST_STACKS if mixture or generation == "blackwell" else _MEGATRON_STACKS
    )
    for known in (generation, _NEAREST.get(generation, "")):
        for name in names:
            stack = stack_for(name, known)
            if stack is not None and stack.name == name:
                return name, known
    return None


def cluster_with(
    software: str,
    known: str,
    cluster: Cluster,
    compiled: bool | None = None,
    async_tp: bool | None = None,
    ep_overlap: bool | None = None,
) -> Cluster:
    """The cluster as `software` uses it, with its constants on the generation `known`. PyTorch's recipes are compiled, where
    `compiled` does not say; the other switches are those of `with_stack`."""
    compiled = software in _PYTORCH_STACKS if compiled is None else compiled
    stack = stack_for(software, known, compiled)
    constants = dict(stack.constants) if stack is not None else None
    return with_stack(cluster, software, compiled=compiled, async_tp=async_tp, ep_overlap=ep_overlap, constants=constants)
