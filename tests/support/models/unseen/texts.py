"""Models of text."""

from __future__ import annotations

import torch

from support.models.model_families import CLASSES, SEQUENCE, VOCABULARY, Family, hugging_face, token_batch
from support.models.unseen.batches import DROPS, IDS, SIZES, TEXT, layouts, token_ids


def texts() -> list[Family]:
    masked, sizes = {**TEXT, **DROPS}, dict(vocab_size=VOCABULARY)
    funnel = dict(
        block_sizes=[1, 1],
        num_decoder_layers=1,
        d_model=32,
        n_head=4,
        d_head=8,
        d_inner=64,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        **sizes,
    )
    switch = dict(
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        num_experts=4,
        dropout_rate=0.0,
        router_jitter_noise=0.0,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        decoder_start_token_id=0,
        use_cache=False,
        **sizes,
    )
    jamba = dict(
        num_key_value_heads=2,
        num_experts=2,
        num_experts_per_tok=1,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_d_state=8,
        mamba_d_conv=2,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
        use_cache=False,
    )
    return [
        hugging_face(
            "FNetForMaskedLM",
            token_batch,
            hidden_dropout_prob=0.0,
            tpu_short_seq_length=SEQUENCE,
            max_position_embeddings=64,
            hidden_size=32,
            num_hidden_layers=2,
            intermediate_size=64,
            **sizes,
        ),
        hugging_face(
            "LongformerForMaskedLM", token_batch, attention_window=8, **{**masked, "max_position_embeddings": 68}, **IDS
        ),
        hugging_face("FunnelForMaskedLM", token_batch, **funnel),
        hugging_face(
            "XLNetLMHeadModel", token_batch, "XLNetConfig", d_model=32, n_layer=2, n_head=4, d_inner=64, dropout=0.0, **sizes
        ),
        hugging_face("LayoutLMForTokenClassification", layouts, num_labels=CLASSES, max_2d_position_embeddings=64, **masked),
        hugging_face(
            "RwkvForCausalLM",
            token_batch,
            hidden_size=32,
            num_hidden_layers=2,
            attention_hidden_size=32,
            intermediate_size=64,
            context_length=64,
            use_cache=False,
            **sizes,
        ),
        hugging_face("JambaForCausalLM", token_batch, **jamba, **TEXT, **IDS),
        hugging_face(
            "SwitchTransformersForConditionalGeneration",
            lambda b: {"input_ids": token_ids()(b), "labels": token_batch(b)["labels"]},
            **switch,
        ),
        hugging_face(
            "CanineForSequenceClassification",
            lambda b: {"input_ids": torch.randint(3, 200, (b, 32)), "labels": torch.randint(0, CLASSES, (b,))},
            num_labels=CLASSES,
            downsampling_rate=4,
            upsampling_kernel_size=2,
            num_hash_buckets=64,
            local_transformer_stride=16,
            max_position_embeddings=64,
            **SIZES,
            **DROPS,
        ),
    ]
