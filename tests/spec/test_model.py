"""config.json → ModelSpec, from transformers' own configuration classes, and what a bad one gets."""

import json

import pytest

from ridgeline import catalog
from ridgeline.spec.errors import UserError
from ridgeline.spec.families import FAMILIES as READERS
from ridgeline.spec.model import FROZEN, ModelSpec
from ridgeline.spec.unsupported import UNLIKE

LLAMA = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4,
}  # fmt: skip

_LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
           "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 2, "moe_intermediate_size": 24,
           "first_k_dense_replace": 1}  # fmt: skip
SMALL = {  # transformers' class, its model class, arguments
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"num_key_value_heads": 2, "sliding_window": 7}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"num_key_value_heads": 1, "head_dim": 24}),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {"num_key_value_heads": 1, "head_dim": 24, "num_experts": 3,
                  "num_experts_per_tok": 2, "moe_intermediate_size": 20}),
    "granite": ("GraniteConfig", "GraniteForCausalLM", {"num_key_value_heads": 2, "attention_multiplier": 0.5}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {"num_key_value_heads": 2, "sliding_window": 7, "pad_token_id": 0}),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4}),
    "bloom": ("BloomConfig", "BloomForCausalLM", {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "deepseek_v2": ("DeepseekV2Config", "DeepseekV2ForCausalLM", _LATENT),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", {**_LATENT, "n_group": 2, "topk_group": 1}),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {"num_key_value_heads": 1, "head_dim": 16}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {"num_key_value_heads": 2, "head_dim": 16}),
    "gemma3_text": ("Gemma3TextConfig", "Gemma3ForCausalLM", {"num_key_value_heads": 2, "head_dim": 16}),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {"num_key_value_heads": 2}),
    "olmo3": ("Olmo3Config", "Olmo3ForCausalLM", {"num_key_value_heads": 2}),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {}),
    "falcon": ("FalconConfig", "FalconForCausalLM", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {"num_key_value_heads": 4, "num_local_experts": 3}),
    "llama4_text": ("Llama4TextConfig", "Llama4ForCausalLM", {"num_key_value_heads": 2, "num_local_experts": 3,
                    "head_dim": 8, "intermediate_size_mlp": 56, "interleave_moe_layer_step": 2, "pad_token_id": 0}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 80}),
    "opt": ("OPTConfig", "OPTForCausalLM", {"ffn_dim": 72, "word_embed_proj_dim": 32}),
    "bert": ("BertConfig", "BertForMaskedLM", {"type_vocab_size": 3}),
    "t5": ("T5Config", "T5ForConditionalGeneration", {"d_model": 32, "d_kv": 8, "d_ff": 40, "num_heads": 4,
           "num_layers": 2, "num_decoder_layers": 3, "feed_forward_proj": "gated-gelu"}),
    "switch_transformers": ("SwitchTransformersConfig", "SwitchTransformersForConditionalGeneration",
           {"d_model": 32, "d_kv": 8, "d_ff": 40, "num_heads": 4, "num_layers": 4, "num_decoder_layers": 4,
            "num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2, "num_experts": 3}),
}  # fmt: skip
_COMMON = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
           "intermediate_size": 48}  # fmt: skip


def test_every_reader_has_its_case():
    assert set(SMALL) == set(READERS)


@pytest.mark.parametrize("family", SMALL)
def test_transformers_own_configuration(family):
    """What transformers writes is read, and counts as many parameters as the model it builds from it."""
    tf = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    config_class, model_class, own = SMALL[family]
    shared = () if family in ("gpt2", "t5", "switch_transformers", "bloom") else _COMMON.items()
    sizes = dict(shared) | own
    config = getattr(tf, config_class)(**{"vocab_size": 96, **sizes})
    spec = ModelSpec.from_config(json.loads(json.dumps(config.to_dict())), name="mine")
    assert (spec.name, spec.vocab_size, spec.hidden_size) == ("mine", 96, 32)
    assert spec.family == family
    with torch.device("meta"):
        model = getattr(tf, model_class)(config)
    frozen = sum(p.numel for p in spec.parameters() if p.name.endswith(FROZEN))  # theirs are buffers
    assert spec.num_parameters == sum({id(p): p.numel() for p in model.parameters()}.values()) + frozen
    # The class's defaults, which are a published model's sizes, are read too.
    chosen = {"num_experts_per_tok": 6} if family == "deepseek_v2" else {}  # which its defaults leave open
    assert ModelSpec.from_config(getattr(tf, config_class)(**chosen).to_dict()).num_parameters > 15e6


def test_llama3_rope_scaling_in_both_spellings():
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}  # fmt: skip
    old = ModelSpec.from_config({**LLAMA, "rope_scaling": scaling, "rope_theta": 5e5})
    new = ModelSpec.from_config({**LLAMA, "rope_parameters": {**scaling, "rope_theta": 5e5}})
    assert old == new
    assert old.rope_scaling is not None
    assert (old.rope_theta, old.rope_scaling.factor, old.rope_scaling.original_max_positions) == (5e5, 8.0, 8192)


def test_a_dump_without_later_fields_keeps_stored_ids():
    """Experiments hash what a model dumps: a scaling that could be said before must dump as it did."""
    scaling = catalog.model("llama3.1-8b").model_dump()["rope_scaling"]
    assert set(scaling) == {"factor", "low_freq_factor", "high_freq_factor", "original_max_positions"}


def test_a_window_counts_only_where_it_is_used():
    qwen = {**LLAMA, "model_type": "qwen2", "sliding_window": 9, "max_window_layers": 0}
    assert ModelSpec.from_config({**qwen, "use_sliding_window": False}).sliding_window is None
    everywhere = {**qwen, "use_sliding_window": True, "max_window_layers": 0}
    assert ModelSpec.from_config(everywhere).sliding_window == 9
    assert ModelSpec.from_config({**LLAMA, "model_type": "mistral", "sliding_window": 9}).sliding_window == 9


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "lama"}, ["unknown model_type 'lama'", "'llama'"]),
        ({"model_type": None}, ["unknown model_type"]),
        ({"model_type": ["llama"]}, ["unknown model_type"]),
        ({"hidden_size": None}, ["'llama'", "wrong kind"]),
        ({"hidden_size": "32"}, ["'llama'", "wrong kind"]),
        ({"num_attention_heads": 0}, ["'llama'", "wrong kind"]),
        ({"num_key_value_heads": 3}, ["num_heads 4 is not a multiple of num_kv_heads 3"]),
        ({"num_hidden_layers": 0}, ["num_layers 0 is not at least 1"]),
        ({"vocab_size": -1}, ["vocab_size -1 is not at least 1"]),
        ({"hidden_act": "mish"}, ["activation 'mish' is not supported", "silu"]),
        ({"partial_rotary_factor": 0.5}, ["rotary embedding of 50% of each head is not supported"]),
        ({"rope_scaling": {"rope_type": "xpos"}}, ["rope scaling 'xpos' is not supported", "llama3", "longrope"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": -1.0}}, ["must be positive"]),
        (
            {
                "rope_scaling": {
                    "type": "longrope",
                    "short_factor": [1.0],
                    "long_factor": [2.0],
                    "original_max_position_embeddings": 8,
                },
                "max_position_embeddings": 8,
            },
            ["8 rotated dimensions"],
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, ["no key 'low_freq_factor'"]),
    ],
)
def test_bad_configuration(change, says):
    with pytest.raises(UserError) as caught:
        ModelSpec.from_config({**LLAMA, **change})
    for text in says:
        assert text in str(caught.value)


@pytest.mark.parametrize("kind", UNLIKE)
def test_an_architecture_that_is_not_read_names_the_nearest_and_what_differs(kind):
    transformers = pytest.importorskip("transformers")
    assert kind in transformers.CONFIG_MAPPING
    family, differs = UNLIKE[kind]
    assert family in READERS
    with pytest.raises(UserError) as caught:
        ModelSpec.from_config({"model_type": kind})
    assert f"nearest is {family}" in caught.value.what
    assert differs in caught.value.what


@pytest.mark.parametrize("key", [k for k in LLAMA if k != "model_type"])
def test_a_missing_key_is_named(key):
    config = {k: v for k, v in LLAMA.items() if k != key}
    with pytest.raises(UserError, match=f"model_type 'llama' has no key '{key}'"):
        ModelSpec.from_config(config)


def test_opt_350m_is_refused():
    opt = {"model_type": "opt", "hidden_size": 1024, "num_attention_heads": 16, "word_embed_proj_dim": 512}
    with pytest.raises(UserError, match="opt-350m"):
        ModelSpec.from_config(opt)


@pytest.mark.parametrize(
    ("text", "says"),
    [(b"", "not valid JSON"), (b'{"model_type": "llama",', "not valid JSON"), (b"\xff\xfe\x00", "not valid JSON"),
     (b"[1, 2]", "does not hold a JSON object"), (b"{}", "unknown model_type")],
)  # fmt: skip
def test_corrupt_file(tmp_path, text, says):
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(UserError, match=says):
        ModelSpec.from_path(tmp_path)


def test_path_is_a_file_a_directory_or_an_error(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    with pytest.raises(UserError, match=r"no config\.json at"):
        ModelSpec.from_path(folder)
    (folder / "config.json").write_text(json.dumps(LLAMA))
    by_folder, by_file = ModelSpec.from_path(folder), ModelSpec.from_path(folder / "config.json")
    assert by_folder == by_file == catalog.model(str(folder))
    assert by_folder.name == "my-model"


def test_parameter_list_has_no_name_twice():
    for name in catalog.models():
        names = [p.name for p in catalog.model(name).parameters()]
        assert len(names) == len(set(names))
