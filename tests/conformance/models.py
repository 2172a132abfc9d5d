"""Small checkpoints that stand for the models of vLLM's tests: random weights, a byte-level tokenizer, a template."""

import json
import os
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from ridgeline.nn.checkpoint.checkpoint import save_checkpoint
from ridgeline.nn.checkpoint.peft import save_lora, state_of
from ridgeline.nn.model.init import build
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.plan import Call
from ridgeline.techniques.registry import make

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>")
SIZES = {"vocab_size": 8192, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16,
         "intermediate_size": 128, "max_positions": 32768}  # fmt: skip
CAUSAL = {"family": "llama", **SIZES}
ENCODER = {"family": "bert", **SIZES, "num_kv_heads": 4, "max_positions": 512}
KINDS = {"e5": ENCODER, "bge-base": ENCODER, "bge-reranker": {**ENCODER, "num_labels": 1},
         "apeach": {**ENCODER, "num_labels": 2}}  # fmt: skip
"""By a part of the model's name; others are causal."""
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% elif m.content %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% if not (loop.last and continue_final_message) %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def _root() -> Path:
    return Path(os.environ["RIDGELINE_MODELS"])


def _tokenizer(folder: Path) -> None:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    text = (file.read_text(errors="replace") for file in sorted(Path(json.__file__).parent.parent.glob("*.py"))[:150])
    trainer = trainers.BpeTrainer(
        vocab_size=SIZES["vocab_size"] - len(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    made.train_from_iterator(text, trainer)
    made.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL[:3]])
    made.add_tokens([AddedToken(t, special=False) for t in SPECIAL[3:]])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
        "chat_template": TEMPLATE}))  # fmt: skip


def folder_for(name: str) -> Path:
    """The checkpoint that stands for a model's ``name``; a folder stands for itself."""
    if Path(name).is_dir():
        return Path(name)
    folder = _root() / name.replace("/", "--")
    if (folder / "tokenizer_config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    fields = next((f for part, f in KINDS.items() if part in name), CAUSAL)
    model = build(ModelSpec(**fields), dtype=torch.float32, seed=3)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(3)  # so that random weights have opinions
    save_checkpoint(model, folder)
    config = json.loads((folder / "config.json").read_text())
    config["eos_token_id"] = SIZES["vocab_size"] - len(SPECIAL) + 2
    (folder / "config.json").write_text(json.dumps(config))
    _tokenizer(folder)
    return folder


def lora_for(name: str) -> Path:
    """A LoRA of random weights for the causal model; another model's name is that model's folder."""
    if not any(part in name.lower() for part in ("lora", "alice", "meow", "cognition")):
        return folder_for(name)
    folder = _root() / f"lora--{name.replace('/', '--')}"
    if (folder / "adapter_config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    model = build(ModelSpec(**CAUSAL), seed=3)
    technique = make(Call(name="lora", options={"rank": 4, "targets": ["q_proj", "down_proj"]}))
    generator, state = torch.Generator().manual_seed(len(name)), {}
    for at, layer in list(model.named_modules()):
        if at.rpartition(".")[2] in technique.targets:
            plain = torch.nn.Linear(layer.in_features, layer.out_features, bias=False)
            for leaf, t in technique.around(plain).state().items():
                state[f"{at}.{leaf}"] = torch.randn(t.shape, generator=generator)
    save_lora(folder, model.spec, technique.model_dump(mode="json"), state_of(state, technique.leaves), "")
    return folder
