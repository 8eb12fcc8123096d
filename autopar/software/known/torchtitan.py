"""torchtitan: the TOML of its releases until 0.2, and the arguments (``--section.key value``) that all of them take."""

from __future__ import annotations

from typing import Any

from autopar.software.configuration import Configuration
from autopar.software.files.entries import Entries
from autopar.software.files.text import text_of
from autopar.software.known.common import (
    batch_divides,
    context_divides,
    experts_divide,
    heads_divide,
    keys_of,
    kv_heads_divide,
    layers_fill_chunks,
    world_size,
)
from autopar.software.record import Constraint, Given, Job, Lack, Software, Source
from autopar.software.space import Space
from autopar.software.stacks import software_of

_REPOSITORY, _COMMIT = "pytorch/torchtitan", "b5bcd76c66d0acb1a08b176d9639425bc55e0b2a"
_DIMS = Source(_REPOSITORY, "torchtitan/distributed/parallel_dims.py", _COMMIT)
_CONFIGS = Source(_REPOSITORY, "torchtitan/config/configs.py", _COMMIT)
_PIPELINES = Source("pytorch/pytorch", "torch/distributed/pipelining/schedules.py", "v2.13.0")

_NAMES = {
    **{("llama3", "8b"): "llama3-8b", ("llama3", "70b"): "llama3-70b", ("llama3", "405b"): "llama3-405b"},
    **{("deepseek_v3", "671b"): "deepseek-v3", ("qwen3", "0.6b"): "qwen3-0.6b", ("qwen3", "1.7b"): "qwen3-1.7b"},
    **{("qwen3", "4b"): "qwen3-4b", ("qwen3", "8b"): "qwen3-8b", ("qwen3", "14b"): "qwen3-14b", ("qwen3", "32b"): "qwen3-32b"},
    **{("qwen3", "30b-a3b"): "qwen3-30b-a3b", ("qwen3", "235b-a22b"): "qwen3-235b-a22b", ("llama3", "1b"): "llama3.2-1b"},
    **{("llama3", "3b"): "llama3.2-3b", ("qwen3", "30b_a3b"): "qwen3-30b-a3b"},
}
"""By name of a model and flavour, as its files have them."""
_REGISTRY = (
    *("llama3_8b", "llama3_70b", "llama3_405b", "deepseek_v3_671b", "qwen3_0_6b", "qwen3_1_7b", "qwen3_14b", "qwen3_30b_a3b"),
    "qwen3_32b",
)
"""Configurations that release 0.3.0 has of these models (torchtitan/models/*/config_registry.py)."""
_SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe", "zbv": "ZBVZeroBubble"}


RULES = (
    world_size(_DIMS),
    heads_divide(_CONFIGS),
    kv_heads_divide(_CONFIGS),
    batch_divides(_CONFIGS),
    context_divides(_CONFIGS),
    Constraint(
        "ep={experts} does not divide dp x cp x tp: choose a divisor",
        lambda job, _: job.data * job.configuration.context * job.configuration.tensor % job.configuration.experts == 0,
        _DIMS,
    ),
    experts_divide(_CONFIGS),
    Constraint("{stages} x {virtual} stages are more than {layers} layers can fill: choose fewer", layers_fill_chunks, _CONFIGS),
    Constraint(
        "{steps} micro-batches are fewer than pp={stages}: the pipeline is never full, give more of them",
        lambda job, _: job.configuration.stages == 1 or job.steps >= job.configuration.stages,
        _PIPELINES,
    ),
    Constraint(
        "{steps} micro-batches are no multiple of pp={stages}, which Interleaved1F1B asks for: change the batch",
        lambda job, _: job.configuration.virtual == 1 or job.steps % job.configuration.stages == 0,
        _PIPELINES,
    ),
    Constraint(
        "it computes in bfloat16 or float32, not {precision}", lambda job, _: job.precision in ("bf16", "fp32", "fp8"), _CONFIGS
    ),
)


def recognizes(entries: Entries) -> bool:
    """Whether a section of its is there."""
    sections = {key.partition(".")[0].replace("-", "_") for key in entries.values if "." in key}
    return (
        bool(sections & {"parallelism", "experimental"})
        and entries.style in ("toml", "arguments")
        or ("module" in entries.values and "config" in entries.values)
        or (entries.style == "toml" and {"training", "model"} <= sections)
    )


def read(entries: Entries, given: Given) -> Job:
    """The job of a TOML or of arguments; dashes in arguments are underscores."""
    if entries.style == "arguments":
        entries.values = {key.replace("-", "_") if "." in key else key: entry for key, entry in entries.values.items()}
    keys = keys_of("torchtitan")
    entries.check_known(keys if entries.style == "toml" else {name: keys[name] for name in ("parallelism", "training")})

    def degree(key: str, default: int = 1, least: int = 1) -> int:
        return entries.whole(f"parallelism.{key}_parallel_degree", default=default, least=least)

    assumed: list[str] = []
    tensor, stages, context, experts = (degree(name) for name in ("tensor", "pipeline", "context", "expert"))
    tensor = entries.whole("training.tensor_parallel_degree", default=tensor)
    stages = entries.whole("experimental.pipeline_parallel_degree", default=stages)
    context = entries.whole("experimental.context_parallel_degree", default=context)
    replicas = entries.whole("parallelism.data_parallel_replicate_degree", "training.data_parallel_replicate_degree", default=1)
    shards = entries.whole("parallelism.data_parallel_shard_degree", "training.data_parallel_shard_degree", default=-1, least=-1)
    model, default_micro, default_seq = _model(entries)
    devices = given.devices or entries.whole("nproc_per_node") * entries.whole("nnodes", default=1)
    devices = devices or (replicas * shards * tensor * stages * context if shards > 0 else 0)
    seq = entries.whole("training.seq_len", "training.max_context_length", default=given.seq or default_seq)
    rank_tokens = entries.whole("training.num_tokens_per_microbatch_per_dp_rank")
    local = entries.whole("training.local_batch_size", "training.batch_size")
    local = local or (max(1, rank_tokens // seq) if seq and rank_tokens else given.micro or default_micro)
    data = max(1, devices // (tensor * stages * context))
    schedule = entries.word("parallelism.pipeline_parallel_schedule", default="1F1B")
    number = entries.whole("parallelism.num_pp_microbatches") if stages > 1 else 0
    micro = local if number or stages == 1 else entries.whole("parallelism.pipeline_parallel_microbatch_size", default=1)
    tokens = entries.whole("training.num_tokens_per_train_step", default=0, least=-1)
    batch = entries.whole("training.global_batch_size", default=-1, least=-1)
    batch = batch if batch > 0 else tokens // seq if tokens > 0 and seq else given.batch or local * max(1, number) * data
    reshard = entries.word(
        "parallelism.fsdp_reshard_after_forward", of=("default", "always", "never", "true", "false"), default="default"
    )
    kept = reshard == "never" or (reshard == "default" and stages > 1)
    ranks = data * context
    sharded = ranks // replicas
    fp8 = "float8" in str(entries.raw("model.converters") or "") or any("float8" in key for key in entries.values)
    if shards > 0 and devices and replicas * shards * tensor * stages * context != devices:
        raise entries.error(
            "parallelism.data_parallel_shard_degree",
            f"dp_replicate={replicas} x dp_shard={shards} x cp={context} x tp={tensor} x pp={stages} are not {devices} devices: "
            "write degrees whose product is the world size, or a shard degree of -1",
        )
    configuration = Configuration(
        tensor=tensor, context=context, experts=experts, stages=stages,
        virtual=_chunks(entries, schedule, stages), zero=0 if sharded <= 1 else 2 if kept else 3,
        group=sharded if 1 < sharded < ranks else 0, micro=micro, recompute=given.recompute or _recompute(entries, assumed),
        schedule=_schedule(schedule), offload=entries.truth("training.enable_cpu_offload"), share=_share(entries),
        sequence_parallel=entries.truth("parallelism.enable_sequence_parallel", default=True),
    )  # fmt: skip
    dtype = entries.word("training.mixed_precision_param", of=("bfloat16", "float32"), default="bfloat16")
    compiled = entries.truth("compile.enable", "training.compile", default=False)
    overlapped = entries.truth(
        "parallelism.enable_async_tensor_parallel", "compile.enable_async_tensor_parallel",
        "experimental.enable_async_tensor_parallel", default=False,
    )  # fmt: skip
    return Job(
        configuration=configuration, devices=devices, batch=batch, seq=seq,
        precision="fp8" if fp8 else "bf16" if dtype == "bfloat16" else "fp32", model=model, compiled=compiled,
        async_tp=overlapped, assumed=tuple(assumed),
    )  # fmt: skip


def _model(entries: Entries) -> tuple[str, int, int]:
    """(name of the model, sequences of a rank, tokens of a sequence) where the file leaves the latter two to its defaults."""
    name, flavor = str(entries.raw("model.name") or "llama3"), str(entries.raw("model.flavor") or "")
    default = 8 if entries.style == "toml" or not entries.raw("config") else 1
    config = str(entries.raw("config", "job.config_file") or "").rpartition("/")[2].removesuffix(".toml").lower()
    module = str(entries.raw("module") or "").lower()
    if config:
        known = sorted(_NAMES.items(), key=lambda item: -len(item[0][1]))
        words = _word(config)
        flavor = next((key[1] for key, _ in known if f"_{_word(key[1])}" in words), flavor)
        name = module or next((key[0] for key, _ in known if config.startswith(key[0])), name)
    return _NAMES.get((name.lower(), flavor.lower()), ""), default, 8192 if config and "debug" not in config else 2048


def _word(name: str) -> str:
    return name.replace("-", "_").replace(".", "_")


def _chunks(entries: Entries, schedule: str, stages: int) -> int:
    parts = entries.raw("parallelism.module_fqns_per_model_part")
    if isinstance(parts, list) and stages > 1:
        return max(1, len(parts) // stages)
    return (
        2 if stages > 1 and schedule.lower() in ("interleaved1f1b", "zbvzerobubble", "interleavedzerobubble", "dualpipev") else 1
    )


def _schedule(name: str) -> str:
    return {"gpipe": "gpipe", "zbvzerobubble": "zbv"}.get(name.lower(), "1f1b")


def _recompute(entries: Entries, assumed: list[str]) -> str:
    mode = entries.word("activation_checkpoint.mode", of=("none", "selective", "full", "memory_budget"), default="")
    mode = mode or entries.word("activation_checkpoint", default="")
    if not mode:
        if "config" in entries.values or entries.style == "toml":
            assumed.append("selective recomputation per operation, the default")
            return "products"
        return "none"
    option = str(entries.raw("activation_checkpoint.selective_ac_option") or "op")
    if mode == "memory_budget":
        assumed.append("a memory budget recomputes as selective does")
    return {"none": "none", "full": "full"}.get(mode, "full" if option.isdigit() else "products")


def _share(entries: Entries) -> float:
    option = str(entries.raw("activation_checkpoint.selective_ac_option") or "op")
    selective = entries.raw("activation_checkpoint.mode") in ("selective", None)
    return 1 / int(option) if selective and option.isdigit() and int(option) > 0 else 1.0


def write(job: Job) -> dict[str, Any]:
    """The TOML's keys; `_also` has the arguments of today's."""
    each = job.configuration
    ranks = job.data * each.context
    shards = (each.group or ranks) if each.zero else 1
    names = {name: key for key, name in _NAMES.items()}
    model, flavor = names.get(job.model, (None, None))
    return {
        "model.name": model,
        "model.flavor": flavor.upper() if flavor else None,
        "model.converters": ["float8"] if job.precision == "fp8" else None,
        "training.local_batch_size": each.micro if each.stages == 1 else each.micro * job.steps,
        "training.global_batch_size": job.batch,
        "training.seq_len": job.seq,
        "training.enable_cpu_offload": True if each.offload else None,
        "training.mixed_precision_param": "float32" if job.precision == "fp32" else "bfloat16",
        "parallelism.data_parallel_replicate_degree": ranks // shards,
        "parallelism.data_parallel_shard_degree": max(1, shards // each.context),
        "parallelism.fsdp_reshard_after_forward": {0: None, 2: "never"}.get(each.zero, "always"),
        "parallelism.tensor_parallel_degree": each.tensor,
        "parallelism.enable_async_tensor_parallel": True if job.async_tp and each.tensor > 1 else None,
        "parallelism.pipeline_parallel_degree": each.stages,
        "parallelism.pipeline_parallel_schedule": _schedule_name(each) if each.stages > 1 else None,
        "parallelism.pipeline_parallel_microbatch_size": each.micro if each.stages > 1 else None,
        "parallelism.context_parallel_degree": each.context,
        "parallelism.expert_parallel_degree": each.experts,
        "activation_checkpoint.mode": {"none": "none", "products": "selective", "selective": "selective"}.get(
            each.recompute, "full"
        ),
        "activation_checkpoint.selective_ac_option": "op" if each.recompute in ("products", "selective") else None,
        "compile.enable": job.compiled is not False,
    }


def _schedule_name(each: Configuration) -> str:
    return "Interleaved1F1B" if each.virtual > 1 and each.schedule == "1f1b" else _SCHEDULES[each.schedule]


def write_arguments(job: Job) -> dict[str, Any]:
    """The arguments of release 0.3, which has no TOML: a configuration of its registry, and what differs."""
    each, toml = job.configuration, write(job)
    skipped = ("model.", "activation_checkpoint.", "compile.", "parallelism.enable_async")
    names = {name: key for key, name in _NAMES.items()}
    model, flavor = names.get(job.model, ("", ""))
    config = f"{model}_{_word(flavor)}"
    known = config in _REGISTRY
    return {
        "module": model if known else None,
        "config": config if known else None,
        **{key: value for key, value in toml.items() if not key.startswith(skipped)},
        "training.disable_cuda_graphs": True if each.stages > 1 or each.experts > 1 else None,
        "compile.enable": True if job.compiled is not False else None,
        "compile.enable_async_tensor_parallel": True if job.async_tp and each.tensor > 1 else None,
    }


def arguments_text(job: Job) -> str:
    """The arguments, with the policy of recomputation after all others, as tyro has it."""
    policy = {"none": "none", "products": "selective", "selective": "selective"}.get(job.configuration.recompute, "full")
    values = write_arguments(job)
    head = "" if values["module"] else f"its registry has no {job.model}: add --module and --config of your own"
    return text_of("arguments", values, head) + f"activation-checkpoint:{policy}\n"


def spelling(entries: Entries) -> dict[str, str]:
    """Where arguments have other keys than the TOML."""
    return {"activation_checkpoint.mode": "activation_checkpoint"} if "activation_checkpoint" in entries.values else {}


TORCHTITAN = Software(
    name="torchtitan",
    title="torchtitan",
    style="toml",
    file="torchtitan.toml",
    space=Space(
        (3, 2),
        ("none", "products", "full"),
        tensor=True,
        pipeline=True,
        context=True,
        experts=True,
        hybrid=True,
        most_chunks=2,
    ),  # fmt: skip
    rules=RULES,
    stack=lambda generation, mixture: software_of("fsdp", generation, mixture) or ("torchtitan-fsdp2", generation),
    recognizes=recognizes,
    read=read,
    write=write,
    run="torchrun ... -m torchtitan.train --job.config_file torchtitan.toml; from 0.3 on: $(cat torchtitan_arguments.txt)",
    lacks=(
        Lack("more than two chunks a stage", {"most_chunks": 0}),
        Lack("recomputation chosen per operation"),
    ),
    whole_experts=True,
    precisions=("bf16", "fp32", "fp8"),
    spelling=spelling,
    also=lambda job: {"torchtitan_arguments.txt": arguments_text(job)},
)
