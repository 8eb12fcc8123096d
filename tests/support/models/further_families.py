"""Families beyond the promised ones.

``python tests/support/models/further_families.py [family ...]`` says of each how it is captured, and what a tensor axis of 2
leaves whole.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from support.models.model_families import (
    CLASSES,
    ENCODER,
    GROUPED,
    TOKENS,
    TOWERS,
    VOCABULARY,
    Batch,
    Family,
    hugging_face,
    image_batch,
    token_batch,
    translation_batch,
)

REFUSED: dict[str, str] = {}
"""What capture says of those that it does not take."""
DRAWS = ("phimoe",)
"""Those that draw numbers in training (the router's), so that two runs differ: they are captured and planned only."""


def segmentation_batch(batch: int) -> Batch:
    return {"pixel_values": torch.randn(batch, 3, 32, 32), "labels": torch.randint(0, CLASSES, (batch, 32, 32))}


def audio_batch(batch: int) -> Batch:
    return {"input_values": torch.randn(batch, 320), "labels": torch.randint(0, CLASSES, (batch,))}


def further_families() -> dict[str, Family]:
    """Decoders, encoders, images and sound."""
    text = dict(vocab_size=VOCABULARY, max_position_embeddings=64, **ENCODER)
    pyramid = dict(num_labels=CLASSES, image_size=32, patch_size=4, depths=[2, 2], num_heads=[2, 4], embed_dim=16)
    return {
        "falcon": hugging_face(
            "FalconForCausalLM",
            token_batch,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=8,
            vocab_size=VOCABULARY,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            alibi=False,
            new_decoder_architecture=True,
            num_kv_heads=4,
            **TOKENS,
        ),
        "bloom": hugging_face(
            "BloomForCausalLM",
            token_batch,
            hidden_size=64,
            n_layer=2,
            n_head=8,
            vocab_size=VOCABULARY,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            **TOKENS,
        ),
        "mpt": hugging_face(
            "MptForCausalLM", token_batch, d_model=64, n_heads=8, n_layers=2, vocab_size=VOCABULARY, max_seq_len=64
        ),
        "gptj": hugging_face(
            "GPTJForCausalLM",
            token_batch,
            n_embd=64,
            n_layer=2,
            n_head=8,
            rotary_dim=4,
            vocab_size=VOCABULARY,
            n_positions=64,
            **TOKENS,
        ),
        "gpt_neo": hugging_face(
            "GPTNeoForCausalLM",
            token_batch,
            hidden_size=64,
            num_layers=2,
            num_heads=8,
            vocab_size=VOCABULARY,
            window_size=8,
            attention_types=[[["global", "local"], 1]],
            max_position_embeddings=64,
            embed_dropout=0.0,
            **TOKENS,
        ),
        "phi": hugging_face("PhiForCausalLM", token_batch, **GROUPED),
        "stablelm": hugging_face("StableLmForCausalLM", token_batch, **GROUPED),
        "starcoder2": hugging_face("Starcoder2ForCausalLM", token_batch, embedding_dropout=0.0, residual_dropout=0.0, **GROUPED),
        "granite": hugging_face("GraniteForCausalLM", token_batch, **GROUPED),
        "olmo2": hugging_face("Olmo2ForCausalLM", token_batch, **GROUPED),
        "cohere2": hugging_face("Cohere2ForCausalLM", token_batch, sliding_window=8, **GROUPED),
        "glm4": hugging_face("Glm4ForCausalLM", token_batch, head_dim=8, **GROUPED),
        "nemotron": hugging_face("NemotronForCausalLM", token_batch, **GROUPED),
        "qwen2": hugging_face("Qwen2ForCausalLM", token_batch, **GROUPED),
        "smollm3": hugging_face("SmolLM3ForCausalLM", token_batch, **GROUPED),
        "gemma": hugging_face("GemmaForCausalLM", token_batch, head_dim=8, **GROUPED),
        "llama4": hugging_face(
            "Llama4ForCausalLM",
            token_batch,
            "Llama4TextConfig",
            head_dim=8,
            intermediate_size_mlp=128,
            num_local_experts=4,
            **GROUPED,
        ),
        "olmoe": hugging_face(
            "OlmoeForCausalLM", token_batch, num_experts=4, num_experts_per_tok=2, output_router_logits=True, **GROUPED
        ),
        "phimoe": hugging_face("PhimoeForCausalLM", token_batch, num_local_experts=4, num_experts_per_tok=2, **GROUPED),
        "glm4_moe": hugging_face(
            "Glm4MoeForCausalLM",
            token_batch,
            head_dim=8,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            first_k_dense_replace=1,
            **GROUPED,
        ),
        "mamba": hugging_face(
            "MambaForCausalLM",
            token_batch,
            hidden_size=32,
            state_size=8,
            num_hidden_layers=2,
            vocab_size=VOCABULARY,
            use_cache=False,
        ),
        "electra": hugging_face("ElectraForMaskedLM", token_batch, embedding_size=32, **text),
        "deberta": hugging_face(
            "DebertaV2ForMaskedLM", token_batch, relative_attention=True, pos_att_type=["p2c", "c2p"], **text
        ),
        "distilbert": hugging_face(
            "DistilBertForMaskedLM",
            token_batch,
            dim=32,
            hidden_dim=64,
            n_layers=2,
            n_heads=4,
            vocab_size=VOCABULARY,
            dropout=0.0,
            attention_dropout=0.0,
            max_position_embeddings=64,
        ),
        "albert": hugging_face("AlbertForMaskedLM", token_batch, embedding_size=16, **text),
        "mbart": hugging_face("MBartForConditionalGeneration", translation_batch, max_position_embeddings=64, **TOWERS),
        "pegasus": hugging_face("PegasusForConditionalGeneration", translation_batch, max_position_embeddings=64, **TOWERS),
        "swin": hugging_face("SwinForImageClassification", image_batch(32), window_size=4, drop_path_rate=0.0, **pyramid),
        "deit": hugging_face(
            "DeiTForImageClassification", image_batch(16), image_size=16, patch_size=4, num_labels=CLASSES, **ENCODER
        ),
        "dinov2": hugging_face(
            "Dinov2ForImageClassification",
            image_batch(16),
            image_size=16,
            patch_size=4,
            num_labels=CLASSES,
            drop_path_rate=0.0,
            **ENCODER,
        ),
        "beit": hugging_face(
            "BeitForImageClassification",
            image_batch(16),
            image_size=16,
            patch_size=4,
            num_labels=CLASSES,
            drop_path_rate=0.0,
            **ENCODER,
        ),
        "segformer": hugging_face(
            "SegformerForSemanticSegmentation",
            segmentation_batch,
            num_labels=CLASSES,
            num_encoder_blocks=2,
            depths=[1, 1],
            sr_ratios=[2, 1],
            hidden_sizes=[16, 32],
            num_attention_heads=[2, 4],
            patch_sizes=[7, 3],
            strides=[4, 2],
            mlp_ratios=[2, 2],
            decoder_hidden_size=32,
            drop_path_rate=0.0,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            classifier_dropout_prob=0.0,
        ),
        "mobilenet_v2": hugging_face(
            "MobileNetV2ForImageClassification",
            image_batch(32),
            num_labels=CLASSES,
            depth_multiplier=0.25,
            image_size=32,
            classifier_dropout_prob=0.0,
        ),
        "regnet": hugging_face(
            "RegNetForImageClassification",
            image_batch(32),
            num_labels=CLASSES,
            embedding_size=8,
            hidden_sizes=[16, 32],
            depths=[1, 1],
            groups_width=8,
        ),
        "wav2vec2": hugging_face(
            "Wav2Vec2ForSequenceClassification",
            audio_batch,
            num_labels=CLASSES,
            conv_dim=(16, 16),
            conv_stride=(5, 2),
            conv_kernel=(10, 3),
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=4,
            layerdrop=0.0,
            mask_time_prob=0.0,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            hidden_dropout=0.0,
            activation_dropout=0.0,
            attention_dropout=0.0,
            feat_proj_dropout=0.0,
            final_dropout=0.0,
            classifier_proj_size=16,
        ),
        "qwen2_vl_text": hugging_face(
            "Qwen2VLForConditionalGeneration",
            token_batch,
            "Qwen2VLConfig",
            text_config=dict(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}, **GROUPED),
            vision_config=dict(depth=1, embed_dim=16, num_heads=2, hidden_size=64),
        ),
    }


def report(name: str) -> str:
    """One line."""
    from autopar.errors import AutoparError
    from support.harness.end_to_end import plan, prepare
    from support.oracles.sharded_work import never_sharded, not_sharded

    try:
        prepared = prepare(name)
    except AutoparError as error:
        return f"{name}: {error}"
    found, never = (
        not_sharded(prepared.graph, plan(prepared, {"dp": 2, "tp": 2}).candidate, "tp"),
        never_sharded(prepared.graph, 2),
    )
    rules = f"; no rule: {', '.join(never.without_rule)}" if never.without_rule else ""
    return f"{name}: whole {found.share:.1%} of FLOPs, {found.traffic_share:.0%} of traffic {found.named()}{rules}"


if __name__ == "__main__":
    for each in sys.argv[1:] or further_families():
        print(report(each), flush=True)
