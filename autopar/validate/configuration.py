"""The parallelization of a published run: its workload, and the configuration that the planner prices."""

from __future__ import annotations

import re
from dataclasses import replace

from autopar.cost_models.hardware.cluster import Cluster, preset_with_devices
from autopar.cost_models.hardware.cluster_file import GIB
from autopar.decoders.graphs import RunOptions
from autopar.ir.plan import Precision
from autopar.software.configuration import Configuration, Workload
from autopar.software.stacks import WHOLE_EXPERTS
from autopar.validate.architectures import NotExpressed, architecture_of, stated
from autopar.validate.rows import Row

PRESETS = {
    "V100": ("dgx-v100", 100.0),
    "A100-40GB": ("dgx-a100-40", 200.0),
    "A100-80GB": ("dgx-a100", 200.0),
    "A100": ("dgx-a100", 200.0),
    "H100": ("dgx-h100", 400.0),
    "H200": ("dgx-h200", 400.0),
    "B200": ("dgx-b200", 400.0),
    "B300": ("dgx-b300", 800.0),
    "GB200": ("gb200-nvl72", 400.0),
    "GB300": ("gb300-nvl72", 800.0),
    "GH200": ("gh200", 200.0),
    "MI300X": ("mi300x", 400.0),
    "MI325X": ("mi325x", 400.0),
    "MI355X": ("mi355x", 400.0),
}
"""The presets by device name: the bundled cluster, and the Gbit/s per device of the network in its data sheet. An A100 whose
memory is not stated is the one of 80 GB, of which most published runs are (`assumed_of`)."""

VARIANTS = {"h100-96gb-2.4TBps-500W": (94.5 * GIB, 2.4e12)}
"""Memory bytes and bandwidth of devices that differ from the preset (torchtitan benchmarks/llama3_h100_202412_torchtitan.md)."""

COMPUTE = {"bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16", "mxfp8": "bfloat16", "fp32": "float32", "tf32": "float32"}
"""The dtype of activations. With fp8 the matrix products of the layers are float8, everything else is bfloat16."""

FLOAT8 = ("fp8", "mxfp8")


def cluster_of(row: Row) -> Cluster:
    """The preset of the row's device, with the number of devices, the network and the device variant that the row states."""
    if row.gpu not in PRESETS:
        raise NotExpressed(f"no cluster for {row.gpu or 'an unnamed device'}: known are {', '.join(PRESETS)}")
    preset, sheet_gbit = PRESETS[row.gpu]
    cluster = preset_with_devices(preset, stated(row, "n_gpus"))
    links, device = cluster.links, cluster.device
    if row.nic_gbit_per_device == 0:
        raise NotExpressed("nic_gbit_per_device is 0")
    if row.nic_gbit_per_device is not None:
        links = (*links[:-1], links[-1].scaled(row.nic_gbit_per_device / sheet_gbit))
    if row.device_variant:
        if row.device_variant not in VARIANTS:
            raise NotExpressed(f"no device {row.device_variant}: known are {', '.join(VARIANTS)}")
        memory, bandwidth = VARIANTS[row.device_variant]
        device = replace(device, memory_bytes=int(memory), bandwidth_bytes_per_second=bandwidth)
    return replace(cluster, links=links, device=replace(device, tf32=row.precision == "tf32"))


ZERO = {"none": 0, "zero1": 1, "zero2": 2, "zero3": 3, "hsdp": 3}


_WITHOUT_SEQUENCE_PARALLELISM = ("megatron-lm-2021", "megatron-deepspeed")


def workload_of(row: Row) -> Workload:
    """The workload of a row, on the cluster of its data sheets. NotExpressed names what is not stated, or not modelled."""
    decoder, cluster, wanted = architecture_of(row), cluster_of(row), configuration_of(row)
    ranks = wanted.data(cluster.size) * wanted.context
    return Workload(
        decoder=decoder,
        layers=stated(row, "layers"),
        batch=stated(row, "global_batch"),
        cluster=cluster,
        precision=Precision(COMPUTE[row.precision], "float32", reduce=reduction_of(row)),
        options=RunOptions(
            float8=row.precision in FLOAT8,
            once=sends_once(row),
            permuted=dispatcher_permutes(row),
            fused=fuses_experts(row),
            ragged=row.routing == "balanced",
            packed=packed_samples(row),
        ),
        whole_experts=row.software_stack.startswith(WHOLE_EXPERTS) or wanted.experts > ranks,
        sequence_parallel=row.software_stack not in _WITHOUT_SEQUENCE_PARALLELISM,
    )


def configuration_of(row: Row) -> Configuration:
    """The configuration of a row. NotExpressed names what is not stated, or not modelled."""
    tp, pp, cp = (getattr(row, name) or 1 for name in ("tp", "pp", "cp"))
    if cp > 1 and (row.seq_len or 0) % cp:
        raise NotExpressed(f"cp={cp} does not divide the sequence of {row.seq_len}")
    if row.zero_stage_or_fsdp not in ZERO:
        raise NotExpressed("the state sharding is not stated")
    if row.precision not in COMPUTE:
        raise NotExpressed(f"precision {row.precision or 'is not stated'}")
    size, micro = stated(row, "n_gpus"), stated(row, "micro_batch")
    if size % (tp * pp * cp):
        raise NotExpressed(f"tp x pp x cp = {tp * pp * cp} does not divide {size} devices")
    data = size // (tp * pp * cp)
    group = row.zero_group_size or 0
    if row.zero_stage_or_fsdp == "hsdp" and not group:
        group = 8
    ep = row.ep or 1
    sliced_experts = tp > 1 and not (ep > data * cp or row.software_stack.startswith(WHOLE_EXPERTS))
    if ep > (data * cp if sliced_experts else data * cp * tp):
        raise NotExpressed(f"ep={ep} is more than the {data * cp} data ranks")
    share = layer_share(row)
    recompute = recompute_of(row) if share != 0 else "none"
    again = ("layernorm", "mla_up_proj", *["moe_act"] * recomputes_activation(row)) if recompute == "modules" else ()
    return Configuration(
        tensor=tp,
        sequence_parallel=bool(row.sequence_parallel),
        context=cp,
        experts=ep,
        stages=pp,
        virtual=(row.virtual_pp or 1) if pp > 1 else 1,
        layers=layers_of(row),
        zero=ZERO[row.zero_stage_or_fsdp],
        group=group if group < data * cp else 0,
        micro=micro,
        recompute=recompute,
        modules=again,
        share=share or 1.0,
    )


REDUCES_IN_COMPUTE = ("fms-fsdp1", "llm-foundry-fsdp1")
"""Stacks of FSDP1 that sum gradients in the compute dtype: ``bfSixteen`` has ``reduce_dtype=torch.bfloat16``
(foundation-model-stack/fms-fsdp, fms_fsdp/policies/mixed_precision.py), and llm-foundry's benchmarks run with Composer's ``PURE``
(scripts/train/benchmarking/submit_benchmarks.py: ``--fsdp_config_mixed_precision``), in which all three dtypes are the run's."""


def reduction_of(row: Row) -> str:
    """The dtype in which FSDP sums gradients where it is not that of the master weights (`Precision.reduce`)."""
    compute = COMPUTE[row.precision]
    return compute if row.software_stack in REDUCES_IN_COMPUTE and compute != "float32" else ""


REENTRANT = ("megatron", "nemo", "internevo")
"""Stacks whose own ``CheckpointFunction`` recomputes a layer to its end; torch's stops when it has all saved tensors."""


def layers_of(row: Row) -> tuple[int, ...]:
    """The layers of each stage where they are not distributed evenly: DeepSpeed fills one stage after the other if the layers do
    not divide. 78 on 12 stages are eleven times 7, and 1 (BigScience, tr11 chronicles-prequel, "Re-do")."""
    layers, stages = row.layers or 0, row.pp or 1
    if "deepspeed" not in row.software_stack or not layers % stages or stages == 1:
        return ()
    most = -(-layers // stages)
    sizes = [max(0, min(most, layers - most * stage)) for stage in range(stages)]
    return tuple(sizes) if all(sizes) else ()


def recompute_of(row: Row) -> str:
    """The recomputation of a row, as a value of `FixedConfiguration.recompute`; ``none`` where it is not stated."""
    if row.act_ckpt in ("", "none"):
        return "none"
    if row.act_ckpt == "full" or layer_share(row) is not None:
        return "everything" if row.software_stack.startswith(REENTRANT) else "full"
    if row.act_ckpt != "selective":
        raise NotExpressed(f"recomputation {row.act_ckpt}")
    if re.search(r"recompute (layer)?norm|recompute mla_up_proj", row.notes):
        return "modules"
    return "products" if row.software_stack.startswith("torchtitan") else "selective"


def recomputes_activation(row: Row) -> bool:
    """Whether the activation function of experts is recomputed (``moe_act`` among Megatron's modules)."""
    return recompute_of(row) == "modules" and re.search(r"recompute \S*act\b", row.notes) is not None


def layer_share(row: Row) -> float | None:
    """The share of the layers that is recomputed, where ``selective`` means that: fms-fsdp and torchtitan's mode per layer.

    HFU counts recomputed FLOPs, MFU does not, and a forward is a third of a step: ``3 (HFU / MFU - 1)``. Without HFU: 0.5.
    """
    per_layer = row.software_stack.startswith("fms") or "ac per layer" in row.notes.lower()
    if row.act_ckpt != "selective" or not per_layer:
        return None
    said = re.search(r"HFU=([\d.]+)", row.notes)
    if said is None or not row.metric_mfu_pct:
        return 0.5
    return min(1.0, max(0.0, 3 * (float(said[1]) / row.metric_mfu_pct - 1)))


def assumed_of(row: Row) -> tuple[str, ...]:
    """Return what is assumed where the source does not state it."""
    out = []
    if not row.act_ckpt:
        out.append("no recomputation")
    if row.vocab is None:
        out.append("a vocabulary of 51200")
    if row.gpu == "A100":
        out.append("80 GB of memory")
    return tuple(out)


def sends_once(row: Row) -> bool:
    """Whether a token is sent to each node once: the dispatchers DeepEP and HybridEP. (Megatron's default sends every copy.)"""
    return any(name in row.notes.lower() for name in ("deepep", "hybridep"))


def dispatcher_permutes(row: Row) -> bool:
    """Whether the dispatcher writes token copies sorted by expert and padded (`ExpertsCost`): HybridEP does."""
    return "hybridep" in row.notes.lower()


def fuses_experts(row: Row) -> bool:
    """Whether the run's release has grouped products with activation and casts in one kernel (`ExpertsCost`), and uses them."""
    return "fused grouped mlp" in row.notes.lower()


def uses_cuda_graphs(row: Row) -> bool:
    """Whether CUDA graphs replay a step, or the attention of each layer. Of the latter nothing is known that tells what remains
    for the host: it is taken to be ahead, as in the former."""
    return any(name in row.notes for name in ("full-iteration CUDA graph", "CUDA graphs of attn"))


def release_of(row: Row) -> str:
    """The release of the software that a run was measured with; empty where the source does not say it."""
    said = re.search(r"\brelease (\d[\d.]*)", row.notes)
    return said[1] if said else ""


SQUAD_TOKENS = 220
"""The tokens of a sample of SQuAD 1.1, on which NeMo's fine-tuning is measured (NeMo-Framework-Launcher, examples/README.md: "we
use SQuAD-v1.1, and the inputs are packed to 4096 tokens"): 98,169 samples have 94.06 MiB (tensorflow.org/datasets/catalog/squad),
1,005 bytes each, some 4.5 of them a token. Samples in a pack do not see each other (docs.nvidia.com/nemo-framework, Sequence
Packing)."""


def packed_samples(row: Row) -> int:
    """Tokens of a sample where a run packs several into a sequence (`RunOptions.packed`); else 0."""
    return SQUAD_TOKENS if "sft" in row.notes.lower() and "packed" in row.notes.lower() else 0
