"""Files of other software: what is written is read back as the same, rubbish is one line with file and line number."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autopar.decoders.recognize import decoder_of
from autopar.model_configs import named_configs
from autopar.software.configuration import Configuration
from autopar.software.files.entries import ConfigError
from autopar.software.files.formats import read_entries
from autopar.software.files.text import changed_text, text_of
from autopar.software.fit import read_job
from autopar.software.known.megatron import layers_of, layout_of
from autopar.software.known.registry import known_software
from autopar.software.record import Given, Job, Software

MODEL = decoder_of(named_configs()["llama3-8b"], 8192)
MIXTURE = decoder_of(named_configs()["qwen3-30b-a3b"], 4096)
CONFIGURATIONS = (
    Configuration(zero=3, micro=2),
    Configuration(zero=2, micro=1, recompute="full"),
    Configuration(zero=1, tensor=4, stages=2, virtual=4, micro=1, recompute="everything"),
    Configuration(zero=1, tensor=2, context=2, micro=1, recompute="selective"),
    Configuration(zero=3, tensor=2, context=2, micro=1),
    Configuration(zero=3, tensor=2, stages=2, virtual=2, micro=1, recompute="products"),
    Configuration(zero=3, group=8, micro=4),
    Configuration(zero=3, micro=1, offload=True),
    Configuration(zero=0, micro=1),
    Configuration(zero=1, experts=8, micro=2),
    Configuration(zero=1, tensor=2, stages=4, micro=1),
    Configuration(zero=2, tensor=8, micro=1),
    Configuration(zero=3, tensor=4, micro=2),
    Configuration(zero=1, micro=1, host_layers=8),
    Configuration(zero=1, tensor=2, micro=1, recompute="modules", modules=("mlp", "layernorm")),
)


def job_of(configuration: Configuration) -> Job:
    decoder = MIXTURE if configuration.experts > 1 else MODEL
    name = "qwen3-30b-a3b" if configuration.experts > 1 else "llama3-8b"
    return Job(configuration, devices=64, batch=512, seq=4096, model=name, decoder=decoder)


def expressible(software: Software, job: Job) -> bool:
    """Whether the software has these knobs at all."""
    each, space = job.configuration, software.space
    pairs = ((each.tensor, space.tensor), (each.context, space.context), (each.experts, space.experts))
    degrees = [degree > 1 and not has for degree, has in pairs]
    pipeline = each.stages > 1 and (not space.pipeline or (space.most_chunks and each.virtual > space.most_chunks))
    zero = (*space.zero, 0, *[3] * (software.name == "megatron" and each.stages == 1))
    state = each.zero not in zero or (each.group and not space.hybrid)
    state = state or (each.zero == 0 and software.name == "torchtitan")
    state = state or (each.tensor > 1 and each.zero == 2 and software.name == "transformers")
    again = each.recompute not in (*space.recompute, *["modules"] * (software.name == "megatron")) or (
        each.host_layers and software.name != "megatron"
    )
    offload = each.offload and software.name not in ("deepspeed", "accelerate")
    return not (any(degrees) or pipeline or state or again or offload)


CASES = [
    (name, index)
    for name, software in known_software().items()
    for index, each in enumerate(CONFIGURATIONS)
    if expressible(software, job_of(each))
]


@pytest.mark.parametrize(("name", "index"), CASES)
def test_what_is_written_is_read_back(name: str, index: int, tmp_path: Path) -> None:
    software, job = known_software()[name], job_of(CONFIGURATIONS[index])
    path = tmp_path / software.file
    path.write_text(text_of(software.style, software.write(job), "a comment"))
    for file, text in software.beside(job).items():
        (tmp_path / file).write_text(text)
    found, _, again = read_job(str(path), Given(devices=64, batch=512, seq=4096, micro=job.configuration.micro))
    assert found.name == name
    wanted = job.configuration
    if not software.sequence_parallel or wanted.tensor == 1:
        again = replace(again, configuration=replace(again.configuration, sequence_parallel=wanted.sequence_parallel))
    assert again.configuration == wanted
    assert (again.batch, again.devices, again.precision) == (512, 64, "bf16")


@pytest.mark.parametrize("name", ["torchtitan", "megatron"])
def test_the_other_spelling_is_the_same(name: str, tmp_path: Path) -> None:
    """torchtitan's arguments from 0.3 on, and Bridge's overrides."""
    software = known_software()[name]
    wanted = Configuration(zero=3 if name == "torchtitan" else 1, tensor=2, micro=1, recompute="none")
    job = job_of(wanted)
    for file, text in software.also(job).items():
        path = tmp_path / file
        path.write_text(text)
        found, _, again = read_job(str(path), Given(devices=64, seq=4096))
        assert found.name == name and again.configuration == wanted and again.batch == 512


@pytest.mark.parametrize(("name", "index"), CASES)
def test_a_change_of_a_file_is_what_it_is_said_to_be(name: str, index: int, tmp_path: Path) -> None:
    """The first configuration that the software has, changed into another one: read, it is that one."""
    software, then = known_software()[name], job_of(CONFIGURATIONS[index])
    first = next(index for each, index in CASES if each == name)
    now = replace(job_of(CONFIGURATIONS[first]), decoder=then.decoder, model=then.model)
    path = tmp_path / software.file
    path.write_text(text_of(software.style, software.write(now), "a comment"))
    given = Given(devices=64, batch=512, seq=4096, micro=then.configuration.micro)
    _, entries, _ = read_job(str(path), given)
    path.write_text(changed_text(entries, software.write(then), software.write(now)))
    for file, text in software.beside(then).items():
        (tmp_path / file).write_text(text)
    _, _, again = read_job(str(path), given)
    assert replace(again.configuration, sequence_parallel=True) == replace(then.configuration, sequence_parallel=True)


def test_a_layout_is_as_stages_are_cut() -> None:
    for layers, chunks in ((61, 8), (126, 16), (61, 32), (94, 24), (7, 3)):
        sizes = layers_of(layout_of(layers, chunks))
        assert len(sizes) == chunks and sum(sizes) == layers and max(sizes) - min(sizes) <= 1 and sizes[-1] == min(sizes)
    assert layers_of("Et|(tt|)*30mL") == (1, *[2] * 30, 0)


RUBBISH = {
    "cut.yaml": ("distributed_type: FSDP\nfsdp_config: {a: [1, 2\n", 3),
    "tab.yaml": ("compute_environment: LOCAL\n\tdistributed_type: FSDP\n", 2),
    "key.toml": ("[parallelism]\ntensor_parallel_degre = 2\n", 2),
    "value.toml": ("[parallelism]\ntensor_parallel_degree = 2\n[training]\nseq_len = 'long'\n", 4),
    "cut.toml": ("[parallelism\ntensor_parallel_degree = 2\n", 1),
    "product.toml": ("[parallelism]\ntensor_parallel_degree = 2\ndata_parallel_shard_degree = 3\n", 3),
    "stage.json": ('{"train_batch_size": 64,\n "zero_optimization": {"stage": 5}}', 2),
    "near.json": ('{"train_batch_size": 64,\n "zero_optimization": {"stge": 3}}', 2),
    "cut.json": ('{"train_batch_size": 64\n "zero', 2),
    "product.json": ('{"train_batch_size": 65,\n "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}', 1),
    "deep.json": ('{"a":' * 20000, 1),
    "deep.yaml": ("- " * 20000 + "\n", 1),
    "empty.yaml": ("\n", 1),
    "word.sh": ("# x\n--tensor-model-parallel-size eight --num-layers 3", 2),
    "less.sh": ("--num-layers 3\n--tensor-model-parallel-size 0", 2),
    "none.sh": ("echo hello", 1),
    "other.json": ('{"a": 1}', 1),
    "processes.yaml": ("distributed_type: FSDP\nnum_processes: 8\nparallelism_config:\n  parallelism_config_tp_size: 3\n", 2),
    "type.yaml": ("distributed_type: FDSP\n", 1),
}


@pytest.mark.parametrize("name", RUBBISH)
def test_rubbish_is_one_line(name: str, tmp_path: Path) -> None:
    text, line = RUBBISH[name]
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError) as told:
        read_job(str(path), Given(devices=8))
    assert str(told.value).startswith(f"{path}:{line}: ") and "\n" not in str(told.value) and len(str(told.value)) < 400


def test_large_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    path.write_text('{"a":' * 2_000_000)
    with pytest.raises(ConfigError, match="longer than"):
        read_entries(str(path))


def test_a_script_has_variables_comments_and_arrays(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(
        "TP=8\nPP=${PP:-4}\n# --tensor-model-parallel-size 3\nARGS=(\n  --num-layers 80 --hidden-size 8192\n"
        "  --num-attention-heads 64 --bf16\n)\ntorchrun --nproc_per_node=8 --nnodes=8 pretrain_gpt.py ${ARGS[@]} \\\n"
        "  --tensor-model-parallel-size $TP --pipeline-model-parallel-size ${PP} --micro-batch-size 1 --global-batch-size 64\n"
    )
    software, _, job = read_job(str(path), Given())
    assert software.name == "megatron" and job.devices == 64
    assert (job.configuration.tensor, job.configuration.stages, job.batch) == (8, 4, 64)
    assert job.decoder is not None and (job.decoder.layers, job.decoder.sizes.hidden) == (80, 8192)
