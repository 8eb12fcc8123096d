"""Megatron-LM's arguments, and Megatron Bridge's overrides of a recipe: the same knobs under two spellings."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from autopar.decoders.decoder import Architecture, Latent
from autopar.decoders.recognize import RecognizedDecoder
from autopar.software.configuration import Configuration
from autopar.software.files.entries import Entries
from autopar.software.files.text import text_of
from autopar.software.known.common import (
    batch_divides,
    context_divides,
    experts_divide,
    heads_divide,
    kv_heads_divide,
    layers_fill_chunks,
    world_size,
)
from autopar.software.record import Constraint, Given, Job, Lack, Software, Source
from autopar.software.space import Space
from autopar.software.stacks import software_of
from autopar.solve.fixed.recomputation import MODULES

_LM, _COMMIT = "NVIDIA/Megatron-LM", "d98e8a64ddf34856e74b24714e3bedb2f5a39553"
_ARGUMENTS = Source(_LM, "megatron/training/arguments.py", _COMMIT)
_PARALLEL = Source(_LM, "megatron/core/model_parallel_config.py", _COMMIT)
_TRANSFORMER = Source(_LM, "megatron/core/transformer/transformer_config.py", _COMMIT)
_SCHEDULES = Source(_LM, "megatron/core/pipeline_parallel/schedules.py", _COMMIT)

_SIZES = ("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size", "expert-model-parallel-size")


def _offloads(job: Job, model: RecognizedDecoder | None) -> bool:
    each = job.configuration
    few = model is None or each.host_layers < model.layers
    return not each.host_layers or (few and each.stages == 1 and each.recompute == "none")


RULES = (
    world_size(_ARGUMENTS),
    heads_divide(_TRANSFORMER),
    kv_heads_divide(_TRANSFORMER, either=True),
    batch_divides(_ARGUMENTS),
    context_divides(_ARGUMENTS),
    experts_divide(_ARGUMENTS),
    Constraint(
        "ep={experts} does not divide the ranks of a stage (dp={data} x cp={context} x tp={tensor}): choose a divisor",
        lambda job, _: job.data * job.configuration.context * job.configuration.tensor % job.configuration.experts == 0,
        _PARALLEL,
    ),
    Constraint(
        "{layers} layers do not fill pp={stages} x {virtual} chunks: choose fewer",
        layers_fill_chunks,
        _ARGUMENTS,
    ),
    Constraint(
        "{steps} micro-batches are no multiple of pp={stages}, which several chunks a stage ask for: change the batch",
        lambda job, _: job.configuration.virtual == 1 or job.steps % job.configuration.stages == 0,
        _SCHEDULES,
    ),
    Constraint(
        "several chunks a stage need pp of at least 2: take out the virtual pipeline",
        lambda job, _: job.configuration.virtual == 1 or job.configuration.stages > 1,
        _ARGUMENTS,
    ),
    Constraint(
        "cpu_offloading of {host_layers} layers goes with one stage, without recomputation, and with fewer than {layers} layers",
        _offloads,
        _TRANSFORMER,
    ),
    Constraint(
        "ep={experts} with tp={tensor} needs --sequence-parallel",
        lambda job, _: job.configuration.experts == 1 or job.configuration.tensor == 1 or job.configuration.sequence_parallel,
        _PARALLEL,
    ),
)


def _name(key: str) -> tuple[str, ...]:
    """Spellings of an argument: Megatron-LM's, and Bridge's under each of its sections."""
    word = key.replace("-", "_")
    return key, word, f"model.{word}", f"train.{word}", f"ddp.{word}", f"optimizer.{word}", f"comm_overlap.{word}"


def recognizes(entries: Entries) -> bool:
    """Whether it is Megatron's: any of its degrees or its sizes."""
    names = {spelling for key in (*_SIZES, "num-layers", "micro-batch-size") for spelling in _name(key)}
    return bool(names & set(entries.values)) and not any(key.startswith("parallelism.") for key in entries.values)


def read(entries: Entries, given: Given) -> Job:
    """The job of arguments or overrides."""

    def whole(key: str, default: int = 0, least: int = 1) -> int:
        return entries.whole(*_name(key), default=default, least=least)

    def truth(key: str, default: bool = False) -> bool:
        return entries.truth(*_name(key), default=default)

    assumed: list[str] = []
    tensor, stages, context, experts = (whole(key, 1) for key in _SIZES)
    bridge = any(key.startswith("model.") for key in entries.values)
    decoder = _decoder(entries, assumed) if entries.raw(*_name("num-layers")) is not None else None
    layers = decoder.layers if decoder is not None else 0
    virtual = entries.whole(
        *_name("num-virtual-stages-per-pipeline-rank"), "model.virtual_pipeline_model_parallel_size", default=0
    )
    each = whole("num-layers-per-virtual-pipeline-stage", 0)
    if each and not virtual:
        virtual = max(1, layers // (stages * each))
    layout = layers_of(str(entries.raw(*_name("pipeline-model-parallel-layout")) or ""))
    if len(layout) > 1:
        virtual = max(1, len(layout) // stages)
    word, share, modules = _recompute(entries, layers // max(1, stages * max(1, virtual)) if layers else 0)
    sharding = entries.word(*_name("data-parallel-sharding-strategy"), default="optim_grads_params")
    fsdp = truth("use-torch-fsdp2") or truth("use-megatron-fsdp") or truth("use-custom-fsdp")
    zero = (
        {"no_shard": 0, "optim": 1, "optim_grads": 2}.get(sharding, 3)
        if fsdp
        else int(truth("use-distributed-optimizer", bridge))
    )
    micro, batch = whole("micro-batch-size", given.micro or 1), whole("global-batch-size", given.batch)
    unpriced = [name for name in modules if name not in (*MODULES, "moe_act")]
    if unpriced:
        assumed.append(f"{', '.join(unpriced)}: saved, where the file recomputes it")
    if truth("fine-grained-activation-offloading"):
        assumed.append("what offload_modules move to the host counts as if it stayed")
    devices = given.devices or whole("world-size") or _script_devices(entries)
    data = max(1, devices // (tensor * stages * context))
    if not batch:
        batch = data * micro
        assumed.append("one micro-batch a data rank, as no --global-batch-size is given")
    fp8 = entries.word(*_name("fp8-format"), *_name("fp8"), default="") or (
        "fp8" in str(entries.raw("mixed_precision") or "") and "fp8"
    )
    precision = "fp8" if fp8 else "fp16" if truth("fp16") else "bf16" if bridge or truth("bf16", False) else "fp32"
    seq = entries.whole(*_name("seq-length"), "dataset.seq_length", "dataset.sequence_length", default=given.seq)
    on_host = whole("cpu-offloading-num-layers", least=0) if truth("cpu-offloading") else 0
    configuration = Configuration(
        tensor=tensor, context=context, experts=experts, stages=stages, virtual=max(1, virtual), zero=zero, micro=micro,
        recompute=given.recompute or word, share=share, modules=modules if not given.recompute else (),
        host_layers=on_host, offload=truth("optimizer-cpu-offload"),
        layers=layout if _is_dealt(layout, stages * max(1, virtual), layers) else (),
        sequence_parallel=truth("sequence-parallel", False) and tensor > 1,
    )  # fmt: skip
    overlap = entries.truth(*_name("tp-comm-overlap"), default=bridge and tensor > 1)
    return Job(
        configuration=configuration, devices=devices, batch=batch, seq=seq, precision=precision, decoder=decoder,
        model=str(entries.raw("recipe", "--recipe", "model.name") or ""), async_tp=overlap,
        ep_overlap=truth("overlap-moe-expert-parallel-comm", False), assumed=tuple(assumed),
    )  # fmt: skip


def _is_dealt(layout: tuple[int, ...], chunks: int, layers: int) -> bool:
    """Whether a layout gives layers to every chunk (one with the loss alone is priced as if layers were dealt evenly)."""
    return len(layout) == chunks > 1 and min(layout) > 0 and (not layers or sum(layout) == layers)


def _script_devices(entries: Entries) -> int:
    """The processes that torchrun starts, where the script says so."""
    nodes, each = entries.raw("nnodes"), entries.raw("nproc_per_node", "nproc-per-node")
    try:
        return int(nodes or 1) * int(each) if each else 0
    except ValueError:
        return 0


def _recompute(entries: Entries, layers: int) -> tuple[str, float, tuple[str, ...]]:
    """(word of `FixedConfiguration.recompute`, share of the layers, modules of a layer)."""
    granularity = entries.word(*_name("recompute-granularity"), of=("full", "selective", "", "None", "none", "null"), default="")
    if entries.truth(*_name("recompute-activations"), default=False):
        granularity = "selective"
    modules = entries.raw(*_name("recompute-modules"))
    names = tuple(
        modules if isinstance(modules, list) else str(modules or "").strip("[]").replace(",", " ").replace("'", "").split()
    )
    if granularity == "full":
        number = entries.whole(*_name("recompute-num-layers"), default=1)
        block = entries.word(*_name("recompute-method"), default="uniform") == "block"
        return "everything", min(1.0, number / layers) if block and layers else 1.0, ()
    if granularity == "selective" or names:
        return ("selective", 1.0, ()) if set(names) <= {"core_attn"} else ("modules", 1.0, names)
    return "none", 1.0, ()


def _decoder(entries: Entries, assumed: list[str]) -> RecognizedDecoder:
    """The sizes that arguments state. What Megatron has a default for has it here."""

    def whole(key: str, default: int = 0) -> int:
        return entries.whole(*_name(key), default=default)

    def truth(key: str) -> bool:
        return entries.truth(*_name(key), default=False)

    hidden, heads = whole("hidden-size"), whole("num-attention-heads")
    for key, value in (("hidden-size", hidden), ("num-attention-heads", heads)):
        if not value:
            raise entries.error("num-layers", f"--{key} is missing: write it beside --num-layers")
    experts = entries.whole(*_name("num-experts"), *_name("num-moe-experts"), default=0)
    gated, ffn = truth("swiglu") or truth("gated-linear-unit"), whole("ffn-hidden-size")
    ffn = ffn or (int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden)
    vocab = whole("padded-vocab-size") or whole("vocab-size")
    if not vocab:
        vocab = 50304 if "GPT2" in str(entries.raw(*_name("tokenizer-type"))) else 128256
        assumed.append(f"a vocabulary of {vocab}")
    rope = entries.word(*_name("position-embedding-type"), default="learned_absolute") in ("rope", "mrope", "yarn")
    rms = entries.word(*_name("normalization"), default="LayerNorm") == "RMSNorm"
    latent = None
    if truth("multi-latent-attention"):
        names = ("q-lora-rank", "kv-lora-rank", "qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim")
        defaults = (1536, 512, 128, 64, 128)
        latent = Latent(*(whole(name, default) for name, default in zip(names, defaults, strict=True)))
    own = whole("moe-ffn-hidden-size", ffn)
    groups = whole("num-query-groups", heads) if truth("group-query-attention") or whole("num-query-groups") else heads
    sizes = Architecture(
        hidden=hidden, ffn=own if experts else ffn, heads=heads, kv_heads=heads if latent else groups,
        head_dim=latent.value_dim if latent else whole("kv-channels", hidden // heads), vocab=vocab,
        seq=whole("seq-length", 2048), gated=gated, gelu=not truth("squared-relu"), rms_norm=rms, rope=rope or latent is not None,
        learned_positions=not rope and latent is None, bias=not truth("disable-bias-linear"),
        tied=not truth("untie-embeddings-and-output-weights"), fused_projections=True, float_logits=False, loss_in_place=True,
        norm_heads=truth("qk-layernorm"), experts=experts, top_k=whole("moe-router-topk", 2) if experts else 0,
        shared_ffn=whole("moe-shared-expert-intermediate-size"), latent=latent,
    )  # fmt: skip
    if sizes.bias and (gated or rms):
        sizes = replace(sizes, bias=False)
    return RecognizedDecoder(sizes, whole("num-layers"))


def layout_of(layers: int, chunks: int) -> str:
    """``Et*4|t*4|t*3L``: the layers of each chunk, with the embedding in the first and the loss in the last, where they do not
    divide: the outermost chunks have one less, the last one first (`ir.pipeline.chunk_calls`)."""
    order = sorted(range(chunks), key=lambda place: (min(place, chunks - 1 - place), place < chunks / 2))
    less = set(order[: chunks - layers % chunks])
    sizes = [layers // chunks + (place not in less) for place in range(chunks)]
    parts = [f"t*{size}" for size in sizes]
    return "|".join(["E" + parts[0], *parts[1:-1], parts[-1] + "L"])


def layers_of(layout: str) -> tuple[int, ...]:
    """The layers of each chunk of a layout: ``Et|(tt|)*30mL`` repeats the part in brackets."""
    text = re.sub(r"\(([^()]*)\)\*(\d+)", lambda found: found[1] * min(int(found[2]), 1000), layout.strip("\"' "))
    text = re.sub(r"(\w)\*(\d+)", lambda found: found[1] * min(int(found[2]), 1000), text)
    return tuple(part.count("t") for part in text.split("|"))


def write(job: Job) -> dict[str, Any]:
    """The arguments that set a job."""
    each = job.configuration
    layers, chunks = job.decoder.layers if job.decoder else 0, each.stages * each.virtual
    padded = layers % chunks and (layers + 2) % chunks == 0
    full = each.recompute in ("full", "everything")
    return {
        "tensor-model-parallel-size": each.tensor,
        "pipeline-model-parallel-size": each.stages,
        "num-virtual-stages-per-pipeline-rank": each.virtual if each.virtual > 1 else None,
        "account-for-embedding-in-pipeline-split": True if padded else None,
        "account-for-loss-in-pipeline-split": True if padded else None,
        "pipeline-model-parallel-layout": layout_of(layers, chunks) if layers % chunks and not padded else None,
        "context-parallel-size": each.context,
        "expert-model-parallel-size": each.experts if each.experts > 1 else None,
        "expert-tensor-parallel-size": 1 if each.experts > 1 and each.tensor > 1 else None,
        "sequence-parallel": True if each.tensor > 1 and each.sequence_parallel else None,
        "micro-batch-size": each.micro,
        "global-batch-size": job.batch,
        "seq-length": job.seq,
        "use-distributed-optimizer": True if each.zero else None,
        "use-megatron-fsdp": True if each.zero > 1 else None,
        "data-parallel-sharding-strategy": {2: "optim_grads", 3: "optim_grads_params"}.get(each.zero),
        "overlap-grad-reduce": True if job.data * each.context > 1 else None,
        "overlap-param-gather": True if each.zero == 1 and job.data * each.context > 1 else None,
        "recompute-granularity": "full" if full else "selective" if each.recompute in ("selective", "modules") else None,
        "recompute-method": "uniform" if full else None,
        "recompute-num-layers": 1 if full else None,
        "recompute-modules": "core_attn" if each.recompute == "selective" else " ".join(each.modules) or None,
        "cpu-offloading": True if each.host_layers else None,
        "cpu-offloading-num-layers": each.host_layers or None,
        "tp-comm-overlap": True if each.tensor > 1 and job.async_tp else None,
        "optimizer-cpu-offload": True if each.offload else None,
        "bf16": True if job.precision in ("bf16", "fp8") else None,
        "fp16": True if job.precision == "fp16" else None,
        "fp8-format": "hybrid" if job.precision == "fp8" else None,
    }


_BRIDGE_NAMES = {
    **{"num-virtual-stages-per-pipeline-rank": "model.virtual_pipeline_model_parallel_size"},
    **{"micro-batch-size": "train.micro_batch_size", "global-batch-size": "train.global_batch_size"},
    **{"tp-comm-overlap": "comm_overlap.tp_comm_overlap", "optimizer-cpu-offload": "optimizer.optimizer_cpu_offload"},
    **{f"overlap-{name}": f"ddp.overlap_{name.replace('-', '_')}" for name in ("grad-reduce", "param-gather")},
    **{name: f"ddp.{name.replace('-', '_')}" for name in ("use-distributed-optimizer", "use-megatron-fsdp")},
    **{"data-parallel-sharding-strategy": "ddp.data_parallel_sharding_strategy"},
}


def write_bridge(job: Job) -> dict[str, Any]:
    """The overrides of a Megatron Bridge recipe."""
    out: dict[str, Any] = {}
    for key, value in write(job).items():
        if key not in ("bf16", "fp16", "fp8-format", "overlap-grad-reduce", "overlap-param-gather"):
            out[_BRIDGE_NAMES.get(key, f"model.{key.replace('-', '_')}")] = value
    if out.get("model.recompute_modules"):
        out["model.recompute_modules"] = out["model.recompute_modules"].split()
    return out


def spelling(entries: Entries) -> dict[str, str]:
    """Bridge's names, where the file has them."""
    if not any(key.startswith("model.") for key in entries.values):
        return {}
    return {key: _BRIDGE_NAMES.get(key, f"model.{key.replace('-', '_')}") for key in write(Job())}


MEGATRON = Software(
    name="megatron",
    title="Megatron-LM, Megatron Bridge",
    style="arguments",
    file="megatron_arguments.sh",
    space=Space((1,), ("none", "selective", "everything"), tensor=True, pipeline=True, context=True, experts=True, uneven=True),
    rules=RULES,
    stack=lambda generation, mixture: software_of("megatron", generation, mixture) or ("megatron-core", generation),
    recognizes=recognizes,
    read=read,
    write=write,
    run="torchrun ... pretrain_gpt.py $(grep -v '^#' megatron_arguments.sh) ...; Bridge: bridge_overrides.txt after the recipe",
    lacks=(
        Lack("recomputation chosen per operation", {"recompute": ("products",)}),
        Lack("schedules with split backwards", {"schedules": ("zb-h1", "zbv")}),
        Lack("ZeRO-3 beside pipelines", {"zero": (3,)}),
    ),
    whole_experts=True,
    precisions=("bf16", "fp16", "fp32", "fp8"),
    also=lambda job: {"bridge_overrides.txt": text_of("overrides", write_bridge(job))},
    spelling=spelling,
)
