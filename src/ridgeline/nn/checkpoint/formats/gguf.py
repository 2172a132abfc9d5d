"""GGUF, llama.cpp's single-file format: 4- and 8-bit weights map to Q4_0, Q4_1 and Q8_0 without rounding again.

All three are affine in groups of 32 inputs: Q4_0 is d·(q - 8), Q4_1 is d·q + m, Q8_0 is d·q with signed q. So a weight
whose groups are multiples of 32 keeps its exact values (m = -scale·zero is rounded to fp16). Llama's queries and keys
are stored with the two halves of each head interleaved, which only permutes rows.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ridgeline.nn.checkpoint.checkpoint import Reader
from ridgeline.nn.model.init import assign, build
from ridgeline.nn.model.rotary import Rotary
from ridgeline.nn.model.transformer import Transformer
from ridgeline.nn.quant.packed import Packed
from ridgeline.spec.errors import UserError
from ridgeline.spec.model import ModelSpec

BLOCK = 32
_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_NAMES = {
    "embed.tokens": "token_embd", "norm": "output_norm", "head.out": "output", "attention_norm": "attn_norm",
    "attention.q_proj": "attn_q", "attention.k_proj": "attn_k", "attention.v_proj": "attn_v",
    "attention.o_proj": "attn_output", "attention.q_norm": "attn_q_norm", "attention.k_norm": "attn_k_norm",
    "mlp_norm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
_NORMAL, _CONTROL, _BYTE = 1, 3, 6
"""Kinds of tokens in the file's vocabulary."""


def require_gguf(spec: ModelSpec) -> None:
    """Raise :class:`UserError` where GGUF cannot be written: the package is missing, or for the model's family."""
    if importlib.util.find_spec("gguf") is None:
        raise UserError("GGUF needs the package gguf, which is not installed", "pip install 'ridgeline[compress]'")
    if spec.family not in _ARCHITECTURES:
        raise UserError(f"models of family {spec.family!r} are not written as GGUF", f"{', '.join(_ARCHITECTURES)} are")
    rope = spec.rope_scaling
    if rope is not None and rope.kind not in ("llama3", "linear"):
        raise UserError(f"GGUF holds one factor per rotary frequency, rope scaling {rope.kind!r} needs more",
                        "keep the model in Hugging Face's format")  # fmt: skip


def their_name(ours: str) -> str:
    """``layers.3.attention.q_proj.weight`` → ``blk.3.attn_q.weight``."""
    stem, _, kind = ours.rpartition(".")
    if not stem.startswith("layers."):
        return f"{_NAMES[stem]}.{kind}"
    _, layer, inner = stem.split(".", 2)
    return f"blk.{layer}.{_NAMES[inner]}.{kind}"


def _turned(spec: ModelSpec, ours: str, rows: int, inverse: bool = False) -> Tensor | None:
    """The order of a weight's (or bias's) rows in the file, or the inverse; None: unchanged."""
    if _ARCHITECTURES[spec.family] != "llama" or (".q_proj." not in ours and ".k_proj." not in ours):
        return None
    order = torch.arange(rows).view(-1, 2, spec.head_dim // 2).transpose(1, 2).reshape(-1)
    return torch.argsort(order) if inverse else order


# ---- writing ---------------------------------------------------------------------------------------------------------


def blocks_of(packed: Packed, name: str) -> tuple[np.ndarray, str]:
    """(bytes uint8 [out, bytes], type) of a weight. Raises :class:`UserError` for weights that no type represents
    exactly."""
    out, width = packed.shape
    fits = packed.group_size % BLOCK == 0 and packed.outliers is None
    if not fits or packed.bits not in (4, 8) or (packed.bits == 8 and packed.zero is not None):
        kind = f"{packed.bits} bits, {'a' * (packed.zero is not None)}symmetric, groups of {packed.group_size}"
        raise UserError(f"GGUF cannot hold {name} exactly: {kind}",
                        "use 4 bits or symmetric 8 bits, and groups that 32 divides")  # fmt: skip
    repeat = packed.group_size // BLOCK
    scale = packed.scale.to(torch.float16).repeat_interleave(repeat, 1)
    codes = packed.codes.view(out, width // BLOCK, BLOCK)
    head = [scale.unsqueeze(-1).view(torch.uint8)]
    if packed.bits == 8:
        body = (codes.to(torch.int16) - 128).to(torch.int8).view(torch.uint8)
        return torch.cat([*head, body], -1).view(out, -1).numpy(), "Q8_0"
    body = codes[..., : BLOCK // 2] | (codes[..., BLOCK // 2 :] << 4)
    if packed.zero is not None:
        least = (-packed.scale.float() * packed.zero.float()).to(torch.float16).repeat_interleave(repeat, 1)
        head.append(least.unsqueeze(-1).view(torch.uint8))
    return torch.cat([*head, body], -1).view(out, -1).numpy(), "Q4_1" if packed.zero is not None else "Q4_0"


def write_gguf(checkpoint: Path, file: Path) -> None:
    """Write a (compressed) checkpoint directory as one GGUF file, tensor by tensor.

    Dense matrices are written as fp16 (bf16 and fp32 ones in their own type), norms and biases as fp32. Raises
    :class:`UserError` for families, tokenizers and codes that the format does not have.
    """
    import gguf

    spec = ModelSpec.from_path(checkpoint)
    require_gguf(spec)
    reader = Reader(checkpoint, spec)
    out = gguf.GGUFWriter(file, _ARCHITECTURES[spec.family])
    _write_sizes(out, spec)
    _write_tokenizer(out, checkpoint)
    # Headers need every tensor's size first; the data follow in a second pass, so that one tensor is held at a time.
    for name, data, kind in _tensors(reader, spec):
        raw = None if kind is None else gguf.GGMLQuantizationType[kind]
        out.add_tensor_info(name, data.shape, data.dtype, data.nbytes, raw)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_ti_data_to_file()
    for _, data, _ in _tensors(reader, spec):
        out.write_tensor_data(data)
    out.close()


def _tensors(reader: Reader, spec: ModelSpec) -> Iterator[tuple[str, np.ndarray, str | None]]:
    for p in spec.parameters():
        packed = reader.packed(p.name)
        order = _turned(spec, p.name, p.shape[0])
        if isinstance(packed, Packed):
            data, kind = blocks_of(packed, p.name)
            yield their_name(p.name), data if order is None else data[order.numpy()], kind
            continue
        tensor = reader.read(p.name)
        tensor = tensor if order is None else tensor[order]
        if tensor.dim() == 1:
            yield their_name(p.name), tensor.float().numpy(), None
        elif tensor.dtype == torch.bfloat16:
            yield their_name(p.name), tensor.contiguous().view(torch.uint8).numpy(), "BF16"
        else:
            yield their_name(p.name), tensor.contiguous().numpy(), None
    if spec.rope_scaling is not None:
        plain = Rotary(spec.model_copy(update={"rope_scaling": None})).inverse_frequencies(torch.device("cpu"))
        slow = Rotary(spec).inverse_frequencies(torch.device("cpu"))
        yield "rope_freqs.weight", (plain / slow).numpy(), None


def _write_sizes(out: Any, spec: ModelSpec) -> None:
    out.add_name(spec.name)
    out.add_context_length(spec.max_positions)
    out.add_embedding_length(spec.hidden_size)
    out.add_block_count(spec.num_layers)
    out.add_feed_forward_length(spec.intermediate_size)
    out.add_head_count(spec.num_heads)
    out.add_head_count_kv(spec.num_kv_heads)
    out.add_key_length(spec.head_dim)
    out.add_value_length(spec.head_dim)
    out.add_rope_dimension_count(spec.head_dim)
    out.add_layer_norm_rms_eps(spec.norm_eps)
    out.add_rope_freq_base(spec.rope_theta)
    out.add_vocab_size(spec.vocab_size)
    if spec.sliding_window:
        out.add_sliding_window(spec.sliding_window)


def _write_tokenizer(out: Any, checkpoint: Path) -> None:
    """A byte-level BPE as "gpt2", one with byte fallback (SentencePiece's) as "llama"."""
    file = checkpoint / "tokenizer.json"
    if not file.is_file():
        return
    table = json.loads(file.read_text(encoding="utf-8"))
    model = table["model"]
    if model.get("type") != "BPE":
        raise UserError(f"{file} holds a {model.get('type')} tokenizer, GGUF is written with BPE ones only",
                        "leave the tokenizer out of the directory, and give llama.cpp its own")  # fmt: skip
    added = {t["id"]: t["content"] for t in table.get("added_tokens", ())}
    special = {t["id"] for t in table.get("added_tokens", ()) if t.get("special")}
    tokens = {**{i: t for t, i in model["vocab"].items()}, **added}
    ids = range(max(tokens) + 1)
    fallback = bool(model.get("byte_fallback"))
    kinds = [_CONTROL if i in special else _BYTE if fallback and tokens.get(i, "").startswith("<0x") else _NORMAL
             for i in ids]  # fmt: skip
    out.add_tokenizer_model("llama" if fallback else "gpt2")
    out.add_token_list([tokens.get(i, f"<unused{i}>") for i in ids])
    out.add_token_types(kinds)
    if fallback:
        out.add_token_scores([-float(i) for i in ids])  # pieces are numbered in merge order
    else:
        out.add_tokenizer_pre("gpt-2")
        out.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in model["merges"]])
    ends = [i for i, t in added.items() if t in ("<|endoftext|>", "</s>", "<|end_of_text|>", "<|im_end|>")]
    if ends:
        out.add_eos_token_id(ends[0])


# ---- reading ---------------------------------------------------------------------------------------------------------


def spec_of(file: Path) -> ModelSpec:
    """The architecture in a GGUF file. Raises :class:`UserError` for any other than Llama, Qwen2, Qwen3."""
    return _spec(_open(file), file)


def _open(file: Path) -> Any:
    if importlib.util.find_spec("gguf") is None:
        raise UserError("GGUF needs the package gguf, which is not installed", "pip install 'ridgeline[compress]'")
    import gguf

    try:
        return gguf.GGUFReader(file)
    except (OSError, ValueError, IndexError) as e:
        raise UserError(f"{file} is not a usable GGUF file: {e}", "download or write it again") from None


def _spec(found: Any, file: Path) -> ModelSpec:
    def field(name: str) -> Any:
        entry = found.get_field(name)
        return None if entry is None else entry.contents()

    kind = field("general.architecture")
    if kind not in set(_ARCHITECTURES.values()):
        raise UserError(f"{file} holds a model of architecture {kind!r}", "llama, qwen2 and qwen3 are read")
    shapes = {t.name: [int(n) for n in t.shape] for t in found.tensors}
    if "rope_freqs.weight" in shapes or any(".ffn_gate_inp." in name for name in shapes):
        raise UserError(f"{file} has scaled rotary frequencies or experts", "such GGUF files are not read here")
    key = {n: field(f"{kind}.{n}") for n in (
        "embedding_length", "block_count", "attention.head_count", "attention.head_count_kv", "feed_forward_length",
        "context_length", "attention.layer_norm_rms_epsilon", "rope.freq_base", "attention.key_length",
    )}  # fmt: skip
    heads = key["attention.head_count"]
    return ModelSpec(
        name=str(field("general.name") or file.stem), family=kind, vocab_size=shapes["token_embd.weight"][-1],
        hidden_size=key["embedding_length"], num_layers=key["block_count"], num_heads=heads,
        num_kv_heads=key["attention.head_count_kv"] or heads,
        head_dim=key["attention.key_length"] or key["embedding_length"] // heads,
        intermediate_size=key["feed_forward_length"], max_positions=key["context_length"],
        norm_eps=key["attention.layer_norm_rms_epsilon"], rope_theta=key["rope.freq_base"] or 10000.0,
        qkv_bias="blk.0.attn_q.bias" in shapes, qk_norm="blk.0.attn_q_norm.weight" in shapes,
        tie_embeddings="output.weight" not in shapes,
    )  # fmt: skip


@torch.no_grad()
def load_gguf(file: Path, dtype: torch.dtype = torch.float32) -> Transformer:
    """The model in a GGUF file of any quantization type, expanded to ``dtype``. Raises as :func:`spec_of` does."""
    import gguf

    found = _open(file)
    spec = _spec(found, file)
    tensors = {t.name: t for t in found.tensors}
    model = build(spec, dtype=dtype)
    for name, parameter in model.named_parameters():
        theirs = tensors.get(their_name(name))
        if theirs is None:
            raise UserError(f"tensor {their_name(name)!r} is missing in {file}", "download or write it again")
        data = torch.from_numpy(np.array(gguf.quants.dequantize(theirs.data, theirs.tensor_type)))
        order = _turned(spec, name, parameter.shape[0], inverse=True)
        assign(parameter, data.view(parameter.shape) if order is None else data.view(parameter.shape)[order])
    return model
