"""Every catalog model against what its publisher says, and against transformers' own classes."""

import json

import pytest

from ridgeline import catalog
from ridgeline.catalog.toml import parse
from ridgeline.spec.errors import UserError
from ridgeline.spec.huggingface import to_hf_config

EXACT = {
    "llama2-7b": 6_738_415_616,
    "llama2-70b": 68_976_648_192,
    "llama3.1-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-32b": 32_762_123_264,
    "qwen3-235b-a22b": 235_093_634_560,
    "bloom-176b": 176_247_271_424,
    "gpt2": 124_439_808,
    "t5-11b": 11_307_321_344,
}


@pytest.mark.parametrize("name", catalog.models())
def test_count_agrees_with_the_published_one(name):
    published = catalog.published(name)
    if published is None:
        # The only models without a published count of exactly these parameters.
        assert name.startswith("switch-base-") or name in ("gpt2-1.5b", "swarm-1b")
        return
    error = abs(catalog.model(name).num_parameters / published.parameters - 1)
    assert error <= published.tolerance, f"{error:.4f} off"


@pytest.mark.parametrize("name", catalog.models())
def test_entry_is_complete(name):
    spec = catalog.model(name)
    assert spec.name == name
    assert spec.source
    if not spec.is_encoder_decoder:
        own_width = spec.family.startswith(("qwen3", "gpt_oss", "gemma", "deepseek", "llama4"))
        assert spec.head_dim * spec.num_heads == spec.hidden_size or own_width


@pytest.mark.parametrize("name", catalog.models())
def test_a_model_trained_from_the_catalog_can_be_saved(name):
    spec = catalog.model(name)
    if spec.gated and spec.family in ("gpt2", "switch_transformers"):  # of papers that published no configuration
        with pytest.raises(UserError, match="gated"):
            to_hf_config(spec)
    else:
        assert to_hf_config(spec)["model_type"] == spec.family


def test_exact_counts_are_held_exactly():
    for name, count in EXACT.items():
        assert catalog.model(name).num_parameters == count
        assert catalog.published(name) == (count, 0.0)


def test_size_of_the_catalog():
    names = catalog.models()
    assert len(names) == len(set(names)) >= 50
    assert {"llama-tiny", "llama-mini", "mixtral-tiny", "gpt2-tiny", "bert-tiny"} <= set(names)
    assert sum(catalog.published(n) is None for n in names) == 7


def test_active_parameters_of_a_mixture():
    assert catalog.model("mixtral-8x7b").num_active_parameters == pytest.approx(12.9e9, rel=0.01)  # arXiv:2401.04088
    assert catalog.model("mixtral-8x22b").num_active_parameters == pytest.approx(39e9, rel=0.01)
    assert catalog.model("qwen3-235b-a22b").num_active_parameters == pytest.approx(22e9, rel=0.01)  # arXiv:2505.09388
    assert catalog.model("gpt-oss-120b").num_active_parameters == pytest.approx(5.13e9 + 0.58e9, rel=0.01)
    # arXiv:2508.10925 counts 5.13e9 without the embedding, which is 0.58e9.


def test_counts_agree_with_transformers():
    """Built on the meta device from the same numbers, transformers' classes hold exactly as many parameters."""
    torch = pytest.importorskip("torch")
    tf = pytest.importorskip("transformers")

    def build(m):
        llama = {
            "vocab_size": m.vocab_size, "hidden_size": m.hidden_size, "num_hidden_layers": m.num_layers,
            "num_attention_heads": m.num_heads, "num_key_value_heads": m.num_kv_heads, "head_dim": m.head_dim,
            "intermediate_size": m.intermediate_size, "tie_word_embeddings": m.tie_embeddings,
        }  # fmt: skip
        t5 = {
            "vocab_size": m.vocab_size, "d_model": m.hidden_size, "d_kv": m.head_dim, "d_ff": m.intermediate_size,
            "num_layers": m.encoder_layers, "num_decoder_layers": m.num_layers, "num_heads": m.num_heads,
        }  # fmt: skip
        bert = {k: v for k, v in llama.items() if k not in ("num_key_value_heads", "head_dim", "tie_word_embeddings")}
        if m.family == "gpt2":
            return tf.GPT2LMHeadModel(
                tf.GPT2Config(
                    vocab_size=m.vocab_size, n_embd=m.hidden_size, n_layer=m.num_layers, n_head=m.num_heads,
                    n_positions=m.max_positions,
                )
            )  # fmt: skip
        if m.family == "opt":
            opt = {k: v for k, v in bert.items() if k != "intermediate_size"}
            width = {"ffn_dim": m.intermediate_size, "word_embed_proj_dim": m.hidden_size}
            return tf.OPTForCausalLM(tf.OPTConfig(**opt, **width, max_position_embeddings=m.max_positions))
        if m.family == "bert":
            return tf.BertForMaskedLM(tf.BertConfig(**bert, max_position_embeddings=m.max_positions))
        if m.family == "switch_transformers":
            sparse = m.num_layers // m.moe_every
            moe = {"num_experts": m.num_experts, "num_sparse_encoder_layers": sparse}
            config = tf.SwitchTransformersConfig(**t5, **moe, num_sparse_decoder_layers=sparse)
            return tf.SwitchTransformersForConditionalGeneration(config)
        if m.family == "t5":
            return tf.T5ForConditionalGeneration(tf.T5Config(**t5))
        moe = {"num_local_experts": m.num_experts} if m.num_experts else {}
        kind = m.family.capitalize()
        return getattr(tf, f"{kind}ForCausalLM")(getattr(tf, f"{kind}Config")(**llama, **moe))

    one_of_each = [
        "llama3.2-1b", "llama2-7b", "mistral-7b", "mixtral-8x7b", "qwen2-7b", "qwen3-0.6b", "gpt2", "opt-1.3b",
        "bert-base", "t5-base", "switch-base-8", "switch-base-16",
    ]  # fmt: skip
    for name in one_of_each:
        spec = catalog.model(name)
        with torch.device("meta"):
            theirs = build(spec)
        assert sum(p.numel() for p in theirs.parameters()) == spec.num_parameters, name


def test_hub_ids_are_aliases():
    assert catalog.model("meta-llama/Llama-2-70b-hf") is catalog.model("llama2-70b")
    assert catalog.model("qwen/qwen3-32b").name == "qwen3-32b"
    assert catalog.model("meta-llama/Llama-3.1-70B").name == "llama3.1-70b"
    assert catalog.model("mistralai/Mixtral-8x7B-v0.1").name == "mixtral-8x7b"
    for variant in ("Qwen/Qwen3-235B-A22B-FP8", "Qwen/Qwen3-235B-A22B-Instruct-2507", "some-org/qwen3-235b-a22b-awq"):
        assert catalog.model(variant).name == "qwen3-235b-a22b"
    assert catalog.model("nvidia/Llama-3.1-8B-Instruct-FP8").name == "llama3.1-8b"
    assert catalog.model_aliases("gpt2") == ("openai-community/gpt2",)


def test_no_two_models_share_a_name_or_an_alias():
    names = [n.lower() for n in catalog.models()]
    names += [a.lower() for n in catalog.models() for a in catalog.model_aliases(n)]
    assert len(names) == len(set(names))


def test_unknown_name_gets_the_nearest():
    with pytest.raises(UserError, match="unknown model 'llama2-7'") as e:
        catalog.model("llama2-7")
    assert "llama2-7b" in e.value.fix
    with pytest.raises(UserError, match="unknown model") as e:
        catalog.model("meta-llama/Llama-2-70b-h")
    assert "meta-llama/Llama-2-70b-hf" in e.value.fix
    with pytest.raises(UserError, match="unknown model"):
        catalog.published("nothing-of-the-kind")
    with pytest.raises(UserError, match="unknown model"):
        catalog.model_aliases("nothing-of-the-kind")


CONFIG = {
    "model_type": "llama", "vocab_size": 100, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 32,
}  # fmt: skip


def test_paths_resolve_to_their_config(tmp_path):
    directory = tmp_path / "my-checkpoint"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    assert catalog.model(str(directory)).name == "my-checkpoint"
    assert catalog.model(str(directory / "config.json")).hidden_size == 16


def test_a_catalog_name_wins_over_a_directory(tmp_path, monkeypatch):
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.chdir(tmp_path)
    assert catalog.model("gpt2").family == "gpt2"
    assert catalog.model("./gpt2").family == "llama"


def test_a_directory_wins_over_an_id_that_only_resembles_a_catalog_name(tmp_path, monkeypatch):
    for name in ("models/gpt2", "llama2-7b-chat"):
        assert catalog.model(name).name in ("gpt2", "llama2-7b")
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text(json.dumps(CONFIG))
        monkeypatch.chdir(tmp_path)
        assert catalog.model(name).hidden_size == 16
        assert catalog.model(name, files=False).hidden_size > 16
        monkeypatch.chdir("/")


def test_missing_paths_are_told_from_unknown_names(tmp_path):
    with pytest.raises(UserError, match="no file or directory"):
        catalog.model(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"no config\.json"):
        catalog.model(str(tmp_path))


def test_every_file_says_where_its_figures_come_from():
    for file in catalog._data_files("models"):
        text = file.read_text(encoding="utf-8")
        assert text.startswith("# "), file.name
        document = parse(text.encode(), file.name)
        assert set(document) == {"family", "models"}, file.name
