"""One small model per family, and the real twin of a training experiment."""

import re

import pytest
import torch
from tests.crossings import crossing

from ridgeline import experiments, nn
from ridgeline.graph import training_graph
from ridgeline.predict.common import rewritten
from ridgeline.runtime.train_build import TrainBuild
from ridgeline.spec.errors import Incompatible
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.targets import linears
from ridgeline.techniques.registry import check

_LLAMA = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
_GPT = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
        "max_position_embeddings": 64}  # fmt: skip
_DEEPSEEK = {**_LLAMA, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
             "v_head_dim": 6, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 2,
             "moe_intermediate_size": 24, "first_k_dense_replace": 1}  # fmt: skip
_LLAMA4 = {**_LLAMA, "head_dim": 8, "intermediate_size_mlp": 56, "num_local_experts": 4, "num_experts_per_tok": 1,
           "attention_chunk_size": 5, "no_rope_layer_interval": 2, "floor_scale": 4}  # fmt: skip
_T5 = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4}

FAMILIES = {
    "llama": {**_LLAMA, "model_type": "llama"},
    "llama-mha": {**_LLAMA, "model_type": "llama", "num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True,
                  "tie_word_embeddings": True},
    "mistral": {**_LLAMA, "model_type": "mistral", "sliding_window": 5},
    "qwen2": {**_LLAMA, "model_type": "qwen2"},
    "qwen3": {**_LLAMA, "model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "qwen3_moe": {**_LLAMA, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
                  "moe_intermediate_size": 24},
    "granite": {**_LLAMA, "model_type": "granite", "embedding_multiplier": 3.0, "attention_multiplier": 0.2,
                "residual_multiplier": 0.6, "logits_scaling": 1.5},
    "phi3": {**_LLAMA, "model_type": "phi3", "sliding_window": 5},
    "llama4": {**_LLAMA4, "model_type": "llama4_text"},
    "llama4_dense_between": {**_LLAMA4, "model_type": "llama4_text", "interleave_moe_layer_step": 2,
                             "use_qk_norm": False, "num_experts_per_tok": 2},
    "mixtral": {**_LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma2": {**_LLAMA, "model_type": "gemma2", "head_dim": 8, "sliding_window": 5},
    "gemma3": {**_LLAMA, "model_type": "gemma3_text", "head_dim": 8, "sliding_window": 5},
    "olmo2": {**_LLAMA, "model_type": "olmo2"},
    "gpt_neox": {**_GPT, "model_type": "gpt_neox", "intermediate_size": 64, "rotary_pct": 0.5},
    "falcon": {**_GPT, "model_type": "falcon"},
    "falcon_grouped": {**_GPT, "model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 2},
    "gpt_oss": {**_LLAMA, "model_type": "gpt_oss", "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
                "sliding_window": 5},
    "deepseek_v2": {**_DEEPSEEK, "model_type": "deepseek_v2", "q_lora_rank": None, "topk_method": "greedy"},
    "deepseek_v3": {**_DEEPSEEK, "model_type": "deepseek_v3", "n_group": 2, "topk_group": 1,
                    "routed_scaling_factor": 2.5},
    "t5": {**_T5, "model_type": "t5"},
    "t5_gated": {**_T5, "model_type": "t5", "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
                 "num_decoder_layers": 2},
    "switch": {**_T5, "model_type": "switch_transformers", "num_layers": 2, "num_decoder_layers": 2,
               "num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    "bloom": {"model_type": "bloom", "vocab_size": 96, "hidden_size": 32, "n_layer": 3, "n_head": 4, "seq_length": 64},
    "gpt2": {"model_type": "gpt2", "vocab_size": 96, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64},
    "opt": {**_GPT, "model_type": "opt", "word_embed_proj_dim": 32, "ffn_dim": 64},
    "bert": {**_GPT, "model_type": "bert", "intermediate_size": 64},
}  # fmt: skip


_IN_LATENT = {"q_proj": "q_b_proj", "k_proj": "kv_a_proj", "v_proj": "kv_b_proj"}


def fitting(spec, plan):
    """``plan`` with LoRA's targets by the names that latent attention has for them, or in an encoder."""
    if spec.is_encoder_decoder:
        return [call.replace("targets=layers.1", "targets=encoder.1") for call in plan]
    if not spec.is_latent:
        return list(plan)
    known = {name.rpartition(".")[2] for name in linears(spec)}
    plan = [call.replace("rank=4", "rank=4,targets=q_proj+v_proj") if call == "lora:rank=4" else call for call in plan]
    for name, theirs in _IN_LATENT.items():
        if name not in known:
            plan = [re.sub(rf"\b{name}", theirs, call) for call in plan]
    return plan


RARE = ("t5", "llama4_dense_between")
"""What these have, others have too."""


def crossed(options, first=""):
    """Cases of a family, by which ``spec`` is parametrized indirectly, and an option: ``first`` with every family, of
    the others half of the crossings by day."""
    for family in FAMILIES:
        for option in options:
            name = f"{family} {option}"
            nightly = [pytest.mark.nightly] if family in RARE else [] if option == first else crossing(name, 2)
            yield pytest.param(family, option, marks=nightly, id=name)


@pytest.fixture(params=[pytest.param(f, marks=pytest.mark.nightly) if f in RARE else f for f in FAMILIES])
def spec(request):
    return ModelSpec.from_config(FAMILIES[request.param], name=request.param)


class Twins:
    """Both sides of one training experiment on one rank, predicted for the device ``on``."""

    def __init__(self, spec, plan=(), on="a100", **workload):
        fields = {"kind": "pretrain", "seq_len": 24, "batch_size": 2, **workload}
        if spec.is_encoder_decoder and "flash_attention" in plan:
            with pytest.raises(Incompatible, match="relative positions"):
                experiments.make(spec.model_dump(), "a100", fields, list(plan))
            pytest.skip("refused: its kernels have no gradient for a learned bias")
        self.experiment = experiments.make(spec.model_dump(), on, fields, list(plan))
        self.techniques = check(self.experiment)

    def graph(self):
        return rewritten(training_graph(self.experiment), self.experiment, self.techniques)

    def real(self, device="cpu"):
        """The engine's own builder after every technique's ``build``, as the trainer drives it."""
        model = nn.build(self.experiment.model, device=device)
        model.set_attention("naive")
        run = TrainBuild(self.experiment, model, torch.device(device))
        for t in self.techniques:
            t.build(run)
            run.assert_trainable()
        for finish in run.hooks.filled:
            finish()
        run.assert_trainable()
        return run

    def batch(self, device="cpu"):
        e = self.experiment
        rng = torch.Generator().manual_seed(0)
        ids = torch.randint(e.model.vocab_size, (e.micro_batch_size, e.training.seq_len), generator=rng)
        return ids.to(device)

    def inputs(self, device="cpu"):
        """What the model with its loss is called with."""
        ids = self.batch(device)
        return (ids, ids, None, None, ids.flip(1)) if self.experiment.model.is_encoder_decoder else (ids, ids)


@pytest.fixture
def twins():
    return Twins
