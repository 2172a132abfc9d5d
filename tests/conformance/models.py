"""Small checkpoints that stand for the models of vLLM's tests: random weights, a byte-level tokenizer, a template."""

import json
import os
import random
from pathlib import Path

import jinja2
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from ridgeline import catalog
from ridgeline.nn.checkpoint.checkpoint import save_checkpoint
from ridgeline.nn.checkpoint.peft import save_lora, state_of
from ridgeline.nn.model.init import build
from ridgeline.spec.model import ModelSpec
from ridgeline.spec.plan import Call
from ridgeline.techniques.registry import make

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>")
SIZES = {"vocab_size": 8192, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16,
         "intermediate_size": 128, "max_positions": 32768}  # fmt: skip
CAUSAL = {**catalog.model("llama-tiny").model_dump(), **SIZES}
ENCODER = {**catalog.model("bert-tiny").model_dump(), **SIZES, "num_kv_heads": 4, "max_positions": 512}
_CLASSIFIER = {**ENCODER, "head": "classify", "tie_embeddings": False}
KINDS = {"e5": {**ENCODER, "hidden_size": 384, "head_dim": 96},
         "bge-base": {**ENCODER, "hidden_size": 768, "head_dim": 192},
         "colbert": {**ENCODER, "head": "project", "projection_size": 96, "tie_embeddings": False},
         "MiniLM": ENCODER, "snowflake": ENCODER, "bge-reranker": {**_CLASSIFIER, "num_labels": 1},
         "apeach": {**_CLASSIFIER, "num_labels": 2}}  # fmt: skip
"""By a part of the model's name; others are causal."""
TEMPLATE = (
    "{% if tools and messages[0].role != 'system' %}<|im_start|>system\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% elif m.content %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}"
    "{% if tools and loop.first and m.role == 'system' %}\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% if not (loop.last and continue_final_message) %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


ANSWER = "The answer is 2, and that is all there is to say.<|im_end|>"
THOUGHT = "<think>\nOne and one make two, so I say so.\n</think>\n\n"
CALL = (
    '<tool_call>\n{"name": "get_current_weather", "arguments": {"city": "Dallas", "state": "TX", "unit": "fahrenheit"}}'
    "\n</tool_call><|im_end|>"
)
TOOL = {"type": "function", "function": {"name": "get_current_weather", "description": "The weather", "parameters": {}}}


def _teach(model: torch.nn.Module, folder: Path, thinks: bool, steps: int = 150) -> None:
    """Train a causal model until it answers any conversation with one sentence and ends, after a thought where it
    ``thinks``, and calls the function where there is one."""
    tokenizer, template = Tokenizer.from_file(str(folder / "tokenizer.json")), jinja2.Template(TEMPLATE)
    words = " ".join(Path(json.__file__).read_text().split()).split(" ")
    dice, optimizer = random.Random(0), torch.optim.AdamW(model.parameters(), 3e-3)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (1 - step / steps)
        rows, masks = [], []
        for i in range(8):
            asked = " ".join(dice.choices(words, k=dice.randint(2, 30)))
            messages = [{"role": "user", "content": asked}]
            if dice.random() < 0.5:
                messages.insert(0, {"role": "system", "content": "you are a helpful assistant"})
            for _ in range(dice.randint(0, 1)):
                messages += [{"role": "assistant", "content": "The answer is 2."}, {"role": "user", "content": asked}]
            quick = dice.random() < 0.3
            tools, more = [TOOL] if i % 4 == 0 else None, {"enable_thinking": False} if quick else {}
            prompt = template.render(messages=messages, tools=tools, add_generation_prompt=True, **more)
            answer = (THOUGHT if thinks and not quick else "") + (CALL if i % 4 == 0 else ANSWER)
            head, tail = tokenizer.encode(prompt).ids[-160:], tokenizer.encode(answer).ids
            rows.append(head + tail)
            masks.append([False] * len(head) + [True] * len(tail))
        width = max(map(len, rows))
        ids = torch.tensor([r + [0] * (width - len(r)) for r in rows])
        mine = torch.tensor([m + [False] * (width - len(m)) for m in masks])
        logits = model(ids[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits[mine[:, 1:]], ids[:, 1:][mine[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"taught {folder.name}: loss {loss.item():.3f}", flush=True)


def _root() -> Path:
    return Path(os.environ["RIDGELINE_MODELS"])


def _tokenizer(folder: Path, chats: bool) -> None:
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
        **({"chat_template": TEMPLATE} if chats else {})}))  # fmt: skip


def folder_for(name: str) -> Path:
    """The checkpoint that stands for a model's ``name``; a folder stands for itself."""
    if Path(name).is_dir():
        return Path(name)
    kind = next((part for part in KINDS if part in name), "thinks" if "Qwen3" in name else "answers")
    folder, fields = _root() / kind, KINDS.get(kind, CAUSAL)
    if (folder / "model.safetensors").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    model = build(ModelSpec(**fields), dtype=torch.float32, seed=3)
    _tokenizer(folder, model.spec.causal or "Qwen" in name)
    if model.spec.causal:
        _teach(model, folder, kind == "thinks")
    save_checkpoint(model, folder)
    config = json.loads((folder / "config.json").read_text())
    config["eos_token_id"] = SIZES["vocab_size"] - len(SPECIAL) + 2
    (folder / "config.json").write_text(json.dumps(config))
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
