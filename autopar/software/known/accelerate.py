"""accelerate: the YAML of ``accelerate launch``, with FSDP2 and `ParallelismConfig`, or FSDP1 and DeepSpeed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autopar.software.configuration import Configuration
from autopar.software.files.entries import Entries
from autopar.software.known.common import batch_divides, context_divides, heads_divide, keys_of, kv_heads_divide, world_size
from autopar.software.record import Constraint, Given, Job, Lack, Software, Source
from autopar.software.space import Space

_REPOSITORY, _COMMIT = "huggingface/accelerate", "16cb6eb80dd9aa8b4df1a63ef57863e455d53b83"
_PARALLEL = Source(_REPOSITORY, "src/accelerate/parallelism_config.py", _COMMIT)
_PLUGIN = Source(_REPOSITORY, "src/accelerate/utils/dataclasses.py", _COMMIT)
ON_DEVICES = Source(_REPOSITORY, "src/accelerate/state.py", _COMMIT)
"""Where FSDP is refused on CPUs: only kinds with devices become ``DistributedType.FSDP``."""
_SIZES = "parallelism_config.parallelism_config_"
_TYPES = ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP", "DEEPSPEED", "MEGATRON_LM", "MULTI_XPU", "MULTI_NPU", "TP")


def _composes(job: Job, _: object) -> bool:
    """Tensor or context parallelism beside replicas needs sharding too."""
    each = job.configuration
    return (each.tensor == 1 and each.context == 1) or each.zero > 0 or job.data == 1


RULES = (
    world_size(_PARALLEL),
    heads_divide(_PARALLEL),
    kv_heads_divide(_PARALLEL),
    batch_divides(_PLUGIN),
    context_divides(_PARALLEL),
    Constraint("tp or cp beside data parallelism without sharding: set dp_shard_size above 1", _composes, _PARALLEL),
    Constraint(
        "FSDP needs devices, and a CPU is none: take ZeRO 0, or --for deepspeed",
        lambda job, _: not job.cpu or not job.configuration.zero,
        ON_DEVICES,
    ),
    Constraint("it has no pipeline stages: use megatron or torchtitan", lambda job, _: job.configuration.stages == 1, _PARALLEL),
)


def recognizes(entries: Entries) -> bool:
    """Whether it is the YAML of ``accelerate config``."""
    return entries.style == "yaml" and bool({"distributed_type", "compute_environment", "num_processes"} & set(entries.values))


def read(entries: Entries, given: Given) -> Job:
    """The job. Batch sizes are the script's: the caller's, or one sequence."""
    entries.check_known(keys_of("accelerate"))
    kind = entries.word("distributed_type", of=_TYPES, default="NO")
    devices = entries.whole("num_processes", default=given.devices or 1)
    if kind == "DEEPSPEED":
        return _deepspeed(entries, replace(given, devices=given.devices or devices))
    sizes = {name: entries.whole(f"{_SIZES}{name}_size", default=1) for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")}
    product = sizes["dp_replicate"] * sizes["dp_shard"] * sizes["tp"] * sizes["cp"] * sizes["sp"]
    if product > 1 and product != devices:
        raise entries.error(
            "num_processes",
            f"num_processes {devices} is not the product {product} of parallelism_config's sizes: write {product}",
        )
    tensor, context = sizes["tp"], sizes["cp"] * sizes["sp"]
    ranks = devices // tensor
    sharded = sizes["dp_shard"] * context if product > 1 else ranks
    zero = 0
    if kind == "FSDP":
        strategy = str(entries.raw("fsdp_config.fsdp_sharding_strategy") or "FULL_SHARD").upper()
        names = {"1": 3, "FULL_SHARD": 3, "2": 2, "SHARD_GRAD_OP": 2, "3": 0, "NO_SHARD": 0, "4": 3, "HYBRID_SHARD": 3, "5": 2}
        zero = names.get(strategy, 2 if "HYBRID" in strategy else -1)
        if zero < 0:
            raise entries.error(
                "fsdp_config.fsdp_sharding_strategy", f"{strategy[:40]} is no strategy: write FULL_SHARD or SHARD_GRAD_OP"
            )
        reshard = str(entries.raw("fsdp_config.fsdp_reshard_after_forward")).lower()
        zero = 2 if reshard in ("false", "shard_grad_op") else zero
        if "HYBRID" in strategy or strategy in ("4", "5"):
            sharded = devices // entries.whole("num_machines", default=1)
    micro = given.micro or 1
    data = max(1, devices // (tensor * context))
    configuration = Configuration(
        tensor=tensor, context=context, zero=zero, group=sharded if zero and 1 < sharded < ranks else 0, micro=micro,
        recompute=given.recompute or ("full" if entries.truth("fsdp_config.fsdp_activation_checkpointing") else "none"),
        offload=entries.truth("fsdp_config.fsdp_offload_params"), sequence_parallel=False,
    )  # fmt: skip
    precision = entries.word("mixed_precision", of=("no", "fp16", "bf16", "fp8", "False"), default="no")
    return Job(
        configuration=configuration, devices=devices, batch=given.batch or micro * data, seq=given.seq,
        precision={"no": "fp32", "False": "fp32"}.get(precision, precision),
        assumed=() if given.batch else (f"batches of {micro} sequence a rank: say --batch and --micro",),
    )  # fmt: skip


def _deepspeed(entries: Entries, given: Given) -> Job:
    """The job of a ``deepspeed_config`` in the YAML, whose keys are flat."""
    at = "deepspeed_config"
    steps = (
        entries.whole(f"{at}.gradient_accumulation_steps", default=1)
        if entries.raw(f"{at}.gradient_accumulation_steps") != "auto"
        else 1
    )
    micro, devices = given.micro or 1, given.devices
    offload = str(entries.raw(f"{at}.offload_optimizer_device") or "none") in ("cpu", "nvme")
    configuration = Configuration(
        zero=entries.whole(f"{at}.zero_stage", default=2, least=0), micro=micro, offload=offload, sequence_parallel=False,
        recompute=given.recompute or "none",
    )  # fmt: skip
    precision = entries.word("mixed_precision", default="no")
    batch = given.batch or micro * steps * devices
    note = (f"deepspeed_config_file {entries.raw(f'{at}.deepspeed_config_file')} is not read: check that file too",)
    return Job(
        configuration=configuration, devices=devices, batch=batch, seq=given.seq,
        precision={"no": "fp32"}.get(precision, precision),
        assumed=note if f"{at}.deepspeed_config_file" in entries else (),
    )  # fmt: skip


def write(job: Job) -> dict[str, Any]:
    """The keys of the YAML."""
    each = job.configuration
    sharded = each.group or job.data * each.context
    out: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if each.zero else "MULTI_CPU" if job.cpu else "MULTI_GPU",
        "use_cpu": True if job.cpu else None,
        "mixed_precision": "no" if job.precision == "fp32" else job.precision,
        "num_machines": 1,
        "num_processes": job.devices,
        "machine_rank": 0,
        "rdzv_backend": "static",
        "same_network": True,
    }
    if each.zero:
        out |= {
            "fsdp_config.fsdp_version": 2,
            "fsdp_config.fsdp_reshard_after_forward": each.zero == 3,
            "fsdp_config.fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_config.fsdp_activation_checkpointing": each.recompute != "none",
            "fsdp_config.fsdp_cpu_ram_efficient_loading": False,
            "fsdp_config.fsdp_offload_params": each.offload,
            "fsdp_config.fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
    if each.tensor > 1 or each.context > 1 or each.group:
        out |= {
            f"{_SIZES}dp_replicate_size": job.data * each.context // sharded,
            f"{_SIZES}dp_shard_size": max(1, sharded // each.context),
            f"{_SIZES}tp_size": each.tensor,
            f"{_SIZES}cp_size": each.context,
        }
    return out


ACCELERATE = Software(
    name="accelerate",
    title="accelerate (FSDP2)",
    style="yaml",
    file="accelerate.yaml",
    space=Space((3, 2, 0), ("none", "full"), tensor=True, context=True, hybrid=True),
    rules=RULES,
    stack=lambda generation, _: ("autopar", generation),
    recognizes=recognizes,
    read=read,
    write=write,
    run="accelerate launch --config_file accelerate.yaml train.py (batch size and accumulation are the script's)",
    lacks=(
        Lack("pipelines", {"pipeline": True}),
        Lack("expert parallelism", {"experts": True}),
        Lack("sequence parallelism beside tp", {"tensor": True}, sequence_parallel=True),
        Lack("recomputation of a part of a layer", {"recompute": ("products",)}),
    ),
    sequence_parallel=False,
)
"""Nothing of the public table was run with accelerate: its programs are plain PyTorch under FSDP2, as ours, so our constants
stand for it, which were fitted on runs of FSDP1 and FSDP2 of all software."""
