"""Families of models from their libraries' own classes, small, with random weights; whatever is stochastic is off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 64
SEQUENCE = 16
CLASSES = 8
Batch = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Family:
    """`model` names the class. `build` makes it (CPU, float32), `batch` one global batch of a given size."""

    model: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]


def token_batch(batch: int, first: int = 3) -> Batch:
    """Token ids from `first` on, and labels; the first rows ignore many labels, the last none."""
    ids = torch.randint(first, VOCABULARY, (batch, SEQUENCE))
    labels = ids.clone()
    labels[0, : SEQUENCE // 2 + 1] = -100
    labels[1, :2] = -100
    return {"input_ids": ids, "labels": labels}


def translation_batch(batch: int) -> Batch:
    """A source of another length than the target."""
    return {"input_ids": torch.randint(3, VOCABULARY, (batch, 12)), "labels": token_batch(batch)["labels"]}


def image_batch(size: int) -> Callable[[int], Batch]:
    def make(batch: int) -> Batch:
        return {"pixel_values": torch.randn(batch, 3, size, size), "labels": torch.randint(0, CLASSES, (batch,))}

    return make


def caption_batch(batch: int) -> Batch:
    ids = torch.randint(3, VOCABULARY - 1, (batch, SEQUENCE))
    ids[:, -1] = VOCABULARY - 1
    return {"input_ids": ids, "pixel_values": torch.randn(batch, 3, 16, 16), "return_loss": True}


def speech_batch(batch: int) -> Batch:
    return {"input_features": torch.randn(batch, 8, 32), "labels": token_batch(batch)["labels"]}


def noise_batch(size: int, channels: int = 4) -> Callable[[int], Batch]:
    def make(batch: int) -> Batch:
        shape = (batch, channels, size, size)
        return {"sample": torch.randn(shape), "target": torch.randn(shape), "timestep": torch.randint(0, 1000, (batch,))}

    return make


def noise_batch_with(**more: Callable[[int], Tensor]) -> Callable[[int], Batch]:
    return lambda batch: {**noise_batch(8)(batch), **{name: make(batch) for name, make in more.items()}}


class Denoiser(nn.Module):
    """What trains a diffusion model: the squared error of its prediction."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, sample: Tensor, target: Tensor, timestep: Tensor, **given: Tensor) -> Tensor:
        return F.mse_loss(self.model(sample, timestep=timestep, return_dict=False, **given)[0], target)


def hugging_face(name: str, batch: Callable[[int], Batch], config: str = "", **sizes: object) -> Family:
    def build() -> nn.Module:
        import transformers

        configuration = config or name.split("For")[0].removesuffix("Model") + "Config"
        model: nn.Module = getattr(transformers, name)(getattr(transformers, configuration)(**sizes))
        return model

    return Family(name, build, batch)


def from_diffusers(name: str, batch: Callable[[int], Batch], **sizes: object) -> Family:
    def build() -> nn.Module:
        import diffusers

        model: nn.Module = getattr(diffusers, name)(**sizes)
        for module in model.modules():
            if hasattr(module, "dropout_prob"):  # of class labels
                module.dropout_prob = 0.0
        return Denoiser(model)

    return Family(name, build, batch)


TOKENS = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
PLAIN = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8, vocab_size=VOCABULARY,
    max_position_embeddings=64, use_cache=False, **TOKENS,
)  # fmt: skip
GROUPED = PLAIN | dict(num_key_value_heads=4)
ENCODER = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
TOWERS = dict(
    d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
    decoder_ffn_dim=64, vocab_size=VOCABULARY, dropout=0.0, use_cache=False, decoder_start_token_id=2, **TOKENS,
)  # fmt: skip
_ALTERNATING = dict(sliding_window=8, layer_types=["sliding_attention", "full_attention"])
_ROUTED = dict(num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)


def families() -> dict[str, Family]:
    """Those that are promised, by name."""
    return {**_decoders(), **_experts(), **_encoders(), **_two_towers(), **_images(), **_others()}


def _decoders() -> dict[str, Family]:
    gpt2 = dict(
        n_embd=32, n_layer=2, n_head=4, vocab_size=VOCABULARY, n_positions=64, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2, loss_type="ForCausalLMLoss",
    )  # fmt: skip
    opt = dict(
        hidden_size=64, ffn_dim=128, num_hidden_layers=2, num_attention_heads=8, vocab_size=VOCABULARY, word_embed_proj_dim=64,
        max_position_embeddings=64, use_cache=False, dropout=0.0, **TOKENS,
    )  # fmt: skip
    return {
        "gpt2": hugging_face("GPT2LMHeadModel", token_batch, "GPT2Config", **gpt2),
        "llama": hugging_face("LlamaForCausalLM", token_batch, **GROUPED),
        "qwen3": hugging_face("Qwen3ForCausalLM", token_batch, head_dim=8, **GROUPED),
        "gemma2": hugging_face("Gemma2ForCausalLM", token_batch, head_dim=8, **_ALTERNATING, **GROUPED),
        "gemma3": hugging_face("Gemma3ForCausalLM", token_batch, "Gemma3TextConfig", head_dim=8, **_ALTERNATING, **GROUPED),
        "mistral": hugging_face("MistralForCausalLM", token_batch, sliding_window=8, **GROUPED),
        "gpt_neox": hugging_face("GPTNeoXForCausalLM", token_batch, **PLAIN),
        "opt": hugging_face("OPTForCausalLM", token_batch, **opt),
        "phi3": hugging_face("Phi3ForCausalLM", token_batch, **GROUPED),
    }


def _experts() -> dict[str, Family]:
    deepseek = PLAIN | dict(
        num_hidden_layers=3, num_key_value_heads=8, n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1,
        moe_intermediate_size=32, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16,
        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    )  # fmt: skip
    qwen = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=8, output_router_logits=True)
    return {
        "mixtral": hugging_face("MixtralForCausalLM", token_batch, **_ROUTED, **GROUPED),
        "qwen3_moe": hugging_face("Qwen3MoeForCausalLM", token_batch, **qwen, **GROUPED),
        "deepseek_v3": hugging_face("DeepseekV3ForCausalLM", token_batch, **deepseek),
        "gpt_oss": hugging_face("GptOssForCausalLM", token_batch, head_dim=8, **_ALTERNATING, **_ROUTED, **GROUPED),
    }


def _encoders() -> dict[str, Family]:
    modern = dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, vocab_size=VOCABULARY,
        max_position_embeddings=64, local_attention=8, cls_token_id=1, sep_token_id=2, **TOKENS,
    )  # fmt: skip
    texts = dict(vocab_size=VOCABULARY, max_position_embeddings=64, **ENCODER)
    return {
        "bert": hugging_face("BertForMaskedLM", token_batch, **texts),
        "roberta": hugging_face("RobertaForMaskedLM", token_batch, pad_token_id=1, **texts),
        "modernbert": hugging_face("ModernBertForMaskedLM", token_batch, **modern),
    }


def _two_towers() -> dict[str, Family]:
    t5 = dict(
        d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=VOCABULARY, dropout_rate=0.0, use_cache=False,
        decoder_start_token_id=0,
    )  # fmt: skip
    side = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, projection_dim=16)
    ends = dict(bos_token_id=1, eos_token_id=VOCABULARY - 1, pad_token_id=0)
    clip = dict(
        text_config=dict(vocab_size=VOCABULARY, max_position_embeddings=SEQUENCE, **side, **ends),
        vision_config=dict(image_size=16, patch_size=4, **side),
        projection_dim=16,
    )
    whisper = dict(
        num_mel_bins=8, max_source_positions=16, max_target_positions=32, begin_suppress_tokens=None, suppress_tokens=None
    )
    return {
        "t5": hugging_face("T5ForConditionalGeneration", translation_batch, **t5),
        "bart": hugging_face(
            "BartForConditionalGeneration", translation_batch, max_position_embeddings=64, forced_eos_token_id=None, **TOWERS
        ),
        "clip": hugging_face("CLIPModel", caption_batch, **clip),
        "whisper": hugging_face("WhisperForConditionalGeneration", speech_batch, **whisper, **TOWERS),
    }


def _images() -> dict[str, Family]:
    stages = dict(num_labels=CLASSES, hidden_sizes=[16, 32], depths=[2, 2])
    efficient = dict(
        num_labels=CLASSES, image_size=32, width_coefficient=0.25, depth_coefficient=1.0, dropout_rate=0.0,
        drop_connect_rate=0.0, in_channels=[32, 64], out_channels=[64, 128], kernel_sizes=[3, 5], strides=[1, 2],
        num_block_repeats=[1, 2], expand_ratios=[1, 4], hidden_dim=320,
    )  # fmt: skip
    return {
        "vit": hugging_face(
            "ViTForImageClassification", image_batch(16), image_size=16, patch_size=4, num_labels=CLASSES, **ENCODER
        ),
        "resnet": hugging_face(
            "ResNetForImageClassification", image_batch(32), embedding_size=8, layer_type="bottleneck", **stages
        ),
        "convnext": hugging_face("ConvNextForImageClassification", image_batch(32), num_stages=2, **stages),
        "efficientnet": hugging_face("EfficientNetForImageClassification", image_batch(32), **efficient),
    }


def _others() -> dict[str, Family]:
    mamba = dict(
        hidden_size=32, num_heads=8, head_dim=8, state_size=16, n_groups=2, chunk_size=8, num_hidden_layers=2,
        vocab_size=VOCABULARY, use_cache=False, expand=2, **TOKENS,
    )  # fmt: skip
    dit = dict(
        num_attention_heads=4, attention_head_dim=8, in_channels=4, num_layers=2, sample_size=8, patch_size=2,
        num_embeds_ada_norm=CLASSES, norm_num_groups=4,
    )  # fmt: skip
    unet = dict(
        sample_size=8, in_channels=4, out_channels=4, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16, attention_head_dim=4,
    )  # fmt: skip
    labels = noise_batch_with(class_labels=lambda batch: torch.randint(0, CLASSES, (batch,)))
    prompts = noise_batch_with(encoder_hidden_states=lambda batch: torch.randn(batch, 6, 16))
    return {
        "mamba2": hugging_face("Mamba2ForCausalLM", token_batch, **mamba),
        "dit": from_diffusers("DiTTransformer2DModel", labels, **dit),
        "unet": from_diffusers("UNet2DConditionModel", prompts, **unet),
    }
