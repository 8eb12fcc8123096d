"""The Trainer of transformers: the JSON of `TrainingArguments` (with `fsdp_config`, or a DeepSpeed section), and that of
`DistributedConfig`, which a model is loaded with, beside it: tensor parallelism (``tp_plan``) and groups of shards are there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from autopar.software.configuration import Configuration
from autopar.software.files.entries import Entries
from autopar.software.files.formats import read_entries
from autopar.software.files.text import text_of
from autopar.software.known import deepspeed
from autopar.software.known.accelerate import ON_DEVICES
from autopar.software.known.common import batch_divides, heads_divide, keys_of, kv_heads_divide, world_size
from autopar.software.record import Constraint, Given, Job, Lack, Software, Source
from autopar.software.space import Space

_ARGUMENTS = Source("huggingface/transformers", "src/transformers/training_args.py", "v5.23.0")
_DISTRIBUTED = Source("huggingface/transformers", "src/transformers/distributed/configuration_utils.py", "v5.23.0")
_BESIDE = "distributed_config.json"

RULES = (
    world_size(_ARGUMENTS),
    batch_divides(_ARGUMENTS),
    Constraint(
        "the Trainer has no pipeline stages: use megatron or torchtitan", lambda job, _: job.configuration.stages == 1, _ARGUMENTS
    ),
    Constraint(
        "tensor parallelism and groups of shards come with FSDP that gathers again, or none: take ZeRO-3 or 0, or tp=1",
        lambda job, _: job.configuration.zero in (0, 3) or not _places_itself(job.configuration),
        _DISTRIBUTED,
    ),
    Constraint(
        "FSDP needs devices that accelerate has it for, and a CPU is none: take ZeRO 0, or --for deepspeed",
        lambda job, _: not job.cpu or not job.configuration.zero,
        ON_DEVICES,
    ),
    heads_divide(_DISTRIBUTED),
    kv_heads_divide(_DISTRIBUTED),
)


def recognizes(entries: Entries) -> bool:
    """Whether it is the JSON of `TrainingArguments`."""
    return entries.style == "json" and bool(
        {"per_device_train_batch_size", "output_dir", "gradient_checkpointing"} & set(entries.values)
    )


def read(entries: Entries, given: Given) -> Job:
    """The job."""
    entries.check_known(keys_of("transformers"))
    devices = given.devices or 1
    micro = entries.whole("per_device_train_batch_size", default=given.micro or 8)
    steps = entries.whole("gradient_accumulation_steps", default=1)
    recompute = entries.truth("gradient_checkpointing") or entries.truth("fsdp_config.activation_checkpointing")
    word = given.recompute or ("full" if recompute else "none")
    precision = "bf16" if entries.truth("bf16") else "fp16" if entries.truth("fp16") else "fp32"
    placed = _placement(entries)
    whole = micro * steps * (devices // placed["tp_size"])
    if any(key.startswith("deepspeed.") for key in entries.values):
        job = deepspeed.read(entries, replace(given, devices=devices, micro=micro, batch=whole, recompute=word), "deepspeed.")
        return replace(job, batch=whole, configuration=replace(job.configuration, micro=micro), precision=precision)
    said = entries.raw("fsdp")
    words = " ".join(said) if isinstance(said, list) else str(said or "")
    zero = 0
    if said is True or words not in ("", "False", "None"):
        kept = "shard_grad_op" in words or not entries.truth("fsdp_config.reshard_after_forward", default=True)
        zero = 0 if "no_shard" in words else 2 if kept else 3
    shards, replicas = placed["fsdp_size"], placed["dp_replicate_size"]
    if placed["tp_size"] * shards * replicas > 1:
        zero = 3 if shards > 1 else 0
        if placed["tp_size"] * shards * replicas != devices:
            product = f"tp_size {placed['tp_size']} x fsdp_size {shards} x dp_replicate_size {replicas}"
            raise entries.error("output_dir", f"{_BESIDE} beside it has {product}, not {devices} devices: write as many")
    configuration = Configuration(
        tensor=placed["tp_size"], zero=zero, group=shards if shards > 1 and replicas > 1 else 0, micro=micro, recompute=word,
        offload="offload" in words or entries.truth("fsdp_config.cpu_offload"), sequence_parallel=False,
    )  # fmt: skip
    optimizer = str(entries.raw("optim") or "adamw")
    return Job(
        configuration=configuration, devices=devices, batch=whole, seq=given.seq, precision=precision,
        model=str(entries.raw("model_name_or_path") or ""), compiled=entries.truth("torch_compile"),
        optimizer="sgd" if optimizer.startswith("sgd") else "adamw",
    )  # fmt: skip


def write(job: Job) -> dict[str, Any]:
    """The keys of the JSON. A model that is loaded with a `DistributedConfig` places itself: then there is no FSDP here."""
    each = job.configuration
    sharded = each.zero > 0 and not _places_itself(each)
    again = each.recompute != "none"
    return {
        "output_dir": "output",
        "per_device_train_batch_size": each.micro,
        "gradient_accumulation_steps": job.steps,
        "bf16": job.precision == "bf16",
        "fp16": job.precision == "fp16",
        "gradient_checkpointing": True if again and not sharded else None,
        "use_cpu": True if job.cpu else None,
        "optim": "adamw_torch",
        "fsdp": True if sharded else None,
        "fsdp_config.version": 2 if sharded else None,
        "fsdp_config.reshard_after_forward": each.zero == 3 if sharded else None,
        "fsdp_config.activation_checkpointing": again if sharded else None,
        "fsdp_config.cpu_offload": True if sharded and each.offload else None,
        "fsdp_config.auto_wrap_policy": "TRANSFORMER_BASED_WRAP" if sharded else None,
    }


def _places_itself(each: Configuration) -> bool:
    return each.tensor > 1 or each.group > 0


def _placement(entries: Entries) -> dict[str, int]:
    """The degrees of the `DistributedConfig` beside the file, 1 where there is none."""
    path = Path(entries.path).with_name(_BESIDE)
    found = read_entries(str(path)) if path.is_file() else Entries(str(path), "json", "", {})
    return {name: found.whole(name, default=1) for name in ("tp_size", "fsdp_size", "dp_replicate_size")}


def _beside(job: Job) -> dict[str, str]:
    each = job.configuration
    if not _places_itself(each):
        return {}
    shards = (each.group or job.data) if each.zero else 1
    values = {"tp_size": each.tensor, "tp_plan": "auto" if each.tensor > 1 else None, "fsdp_size": shards}
    values |= {"dp_replicate_size": job.data // shards, "fsdp_mixed_precision": True if job.precision != "fp32" else None}
    return {_BESIDE: text_of("json", values)}


def spelling(entries: Entries) -> dict[str, str]:
    """Recomputation under the name that the file has for it."""
    return {"fsdp_config.activation_checkpointing": "gradient_checkpointing"} if "gradient_checkpointing" in entries else {}


TRANSFORMERS = Software(
    name="transformers",
    title="the Trainer of transformers",
    style="json",
    file="training_arguments.json",
    space=Space((0, 2, 3), ("none", "full"), tensor=True, hybrid=True),
    rules=RULES,
    stack=lambda generation, _: ("autopar", generation),
    recognizes=recognizes,
    read=read,
    write=write,
    run="torchrun ... train.py training_arguments.json (HfArgumentParser.parse_json_file); a distributed_config.json is for "
    "from_pretrained(..., distributed_config=DistributedConfig(**json))",
    beside=_beside,
    lacks=(
        Lack("sequence parallelism beside tp", {"tensor": True}, sequence_parallel=True),
        Lack("context parallelism", {"context": True}),
        Lack("expert parallelism", {"experts": True}),
        Lack("pipelines", {"pipeline": True}),
        Lack("recomputation of a part of a layer", {"recompute": ("products",)}),
    ),
    sequence_parallel=False,
    spelling=spelling,
)
"""Priced with our own constants, as accelerate is, which it calls."""
