"""DeepSpeed: its JSON, beside a Hugging Face model or any other."""

from __future__ import annotations

from typing import Any

from autopar.decoders.decoder import Architecture
from autopar.software.configuration import Configuration
from autopar.software.files.entries import Entries
from autopar.software.known.common import batch_divides, heads_divide, keys_of, world_size
from autopar.software.record import Constraint, Given, Job, Lack, Software, Source
from autopar.software.space import Space

_REPOSITORY, _COMMIT = "deepspeedai/DeepSpeed", "edaa7221267243c7be7fb49c5d5f5c4fb97b4641"
_CONFIG = Source(_REPOSITORY, "deepspeed/runtime/config.py", _COMMIT)
_ZERO = Source(_REPOSITORY, "deepspeed/runtime/zero/config.py", _COMMIT)

RULES = (
    world_size(_CONFIG),
    heads_divide(_CONFIG),
    batch_divides(_CONFIG),
    Constraint(
        "the state is in groups of {group}, which does not divide {data} ranks: choose a divisor",
        lambda job, _: not job.configuration.group or (job.data > 0 and job.data % job.configuration.group == 0),
        _ZERO,
    ),
    Constraint("it has no context parallelism of its own here", lambda job, _: job.configuration.context == 1, _CONFIG),
    Constraint(
        "stages of a pipeline are written as a PipelineModule, not here", lambda job, _: job.configuration.stages == 1, _CONFIG
    ),
)


_BUCKET = 5e8
"""Elements of a bucket of gradients where the file does not say it (`reduce_bucket_size`, deepspeed/runtime/zero/config.py)."""
_LEAST_BUCKET = 2**16
_LIVE = 1e9
"""Elements that ZeRO-3 keeps gathered where the file does not say it (`stage3_max_live_parameters`)."""


def recognizes(entries: Entries) -> bool:
    """Whether it is DeepSpeed's JSON."""
    sections = {key.partition(".")[0] for key in entries.values}
    return (
        entries.style == "json"
        and bool(
            sections & {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps"}
        )
        and "per_device_train_batch_size" not in sections
    )


def read(entries: Entries, given: Given, prefix: str = "") -> Job:
    """The job; values that are ``auto`` come from the caller."""
    keys = keys_of("deepspeed")
    entries.check_known({f"{prefix}zero_optimization": keys["zero_optimization"]} | ({} if prefix else {"": keys[""]}))
    values = {key: entry for key, entry in entries.values.items() if entry.value != "auto"}
    automatic = sorted(set(entries.values) - set(values))
    entries = Entries(entries.path, entries.style, entries.text, values, entries.used)
    tensor = entries.whole(f"{prefix}tensor_parallel.autotp_size", default=1)
    data = max(1, given.devices // tensor)
    stage = entries.whole(f"{prefix}zero_optimization.stage", default=0, least=0)
    if stage > 3:
        raise entries.error(f"{prefix}zero_optimization.stage", f"stage {stage} is no ZeRO stage: write 0, 1, 2 or 3")
    batch = entries.whole(f"{prefix}train_batch_size")
    micro = entries.whole(f"{prefix}train_micro_batch_size_per_gpu")
    steps = entries.whole(f"{prefix}gradient_accumulation_steps")
    assumed = [f"{', '.join(automatic[:3])}: auto"] if automatic else []
    if batch and micro and steps and batch != micro * steps * data:
        raise entries.error(
            f"{prefix}train_batch_size",
            f"train_batch_size {batch} is not {micro} x {steps} steps x {data} ranks = {micro * steps * data}: write that, or "
            "leave one out",
        )
    if not micro and batch and steps and batch % (steps * data) == 0:
        micro = batch // (steps * data)
    micro = micro or given.micro or (batch // data if batch and batch % data == 0 and not steps else 1)
    batch = batch or (micro * steps * data if steps else given.batch or micro * data)
    offload = entries.raw(f"{prefix}zero_optimization.offload_optimizer.device") in ("cpu", "nvme") or entries.truth(
        f"{prefix}zero_optimization.cpu_offload"
    )
    bucket = entries.raw(f"{prefix}zero_optimization.reduce_bucket_size") or _BUCKET
    if stage and isinstance(bucket, int | float) and bucket >= _BUCKET:
        assumed.append(f"reduce_bucket_size {bucket:.1e}: its buffer, {2 * bucket / 2**30:.1f} GiB in 16 bits, is not counted")
    live = entries.raw(f"{prefix}zero_optimization.stage3_max_live_parameters") or _LIVE
    if stage == 3 and isinstance(live, int | float) and live >= _LIVE:
        assumed.append(f"stage3_max_live_parameters {live:.1e}: so many gathered ones are not counted")
    checkpointing = any(key.startswith(f"{prefix}activation_checkpointing") for key in entries.values)
    if checkpointing:
        assumed.append("layers are recomputed, as activation_checkpointing is set up")
    group = entries.whole(
        f"{prefix}zero_optimization.zero_hpz_partition_size", f"{prefix}zero_optimization.mics_shard_size", default=0, least=-1
    )
    precision = (
        "fp16"
        if entries.truth(f"{prefix}fp16.enabled")
        else "bf16"
        if entries.truth(f"{prefix}bf16.enabled", f"{prefix}bfloat16.enabled")
        else ""
    )
    if not precision and {f"{prefix}bf16.enabled", f"{prefix}fp16.enabled"} & set(automatic):
        precision = "bf16"
    configuration = Configuration(
        tensor=tensor, zero=stage, group=group if 1 < group < data else 0, micro=micro, offload=offload, sequence_parallel=False,
        recompute=given.recompute or ("full" if checkpointing else "none"),
    )  # fmt: skip
    return Job(
        configuration=configuration, devices=given.devices, batch=batch, seq=given.seq, precision=precision or "fp32",
        assumed=tuple(assumed),
    )  # fmt: skip


def _layer_elements(sizes: Architecture) -> int:
    """Elements of a layer's matrices."""
    attention = sizes.hidden * sizes.head_dim * 2 * (sizes.heads + sizes.kv_heads)
    return attention + sizes.hidden * (3 if sizes.gated else 2) * (sizes.ffn * max(1, sizes.experts) + sizes.shared_ffn)


def write(job: Job) -> dict[str, Any]:
    """The keys of the JSON. Buckets have the size of a square matrix of the model, as the Trainer makes them: DeepSpeed allocates
    them whole, and their default of 5e8 elements is a gigabyte. ZeRO-3 keeps two layers gathered, as is priced; by default 1e9
    elements, all of a small model (`stage3_max_live_parameters`)."""
    each = job.configuration
    bucket = max(job.decoder.sizes.hidden**2, _LEAST_BUCKET) if job.decoder is not None else None
    live = 2 * _layer_elements(job.decoder.sizes) if job.decoder is not None and each.zero == 3 else None
    return {
        "train_batch_size": job.batch,
        "train_micro_batch_size_per_gpu": each.micro,
        "gradient_accumulation_steps": job.steps,
        "bf16.enabled": True if job.precision == "bf16" else None,
        "fp16.enabled": True if job.precision == "fp16" else None,
        "zero_optimization.stage": each.zero,
        "zero_optimization.overlap_comm": True if each.zero else None,
        "zero_optimization.contiguous_gradients": True if each.zero else None,
        "zero_optimization.reduce_bucket_size": bucket if each.zero else None,
        "zero_optimization.stage3_max_live_parameters": live,
        "zero_optimization.stage3_max_reuse_distance": live,
        "zero_optimization.zero_hpz_partition_size": each.group or None,
        "zero_optimization.offload_optimizer.device": "cpu" if each.offload else None,
        "zero_optimization.offload_optimizer.pin_memory": True if each.offload else None,
        "activation_checkpointing.partition_activations": False if each.recompute != "none" else None,
        "gradient_clipping": 1.0,
    }


DEEPSPEED = Software(
    name="deepspeed",
    title="DeepSpeed",
    style="json",
    file="ds_config.json",
    space=Space((0, 1, 2, 3), ("none", "full"), offload=(False, True)),
    rules=RULES,
    stack=lambda generation, _: ("deepspeed", generation),
    recognizes=recognizes,
    read=read,
    write=write,
    run="deepspeed train.py --deepspeed_config ds_config.json; with recomputation, call model.gradient_checkpointing_enable()",
    lacks=(
        Lack("tensor parallelism", {"tensor": True}, sequence_parallel=True),
        Lack("context parallelism", {"context": True}),
        Lack("expert parallelism", {"experts": True}),
        Lack("pipelines (in this file)", {"pipeline": True}),
        Lack("recomputation of a part of a layer", {"recompute": ("products",)}),
    ),
)
