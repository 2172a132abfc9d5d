"""Outputs of encoder-decoders, prompt by prompt: the engine batches decoders only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from ridgeline.data.batches import END
from ridgeline.nn.checkpoint.checkpoint import load_checkpoint
from ridgeline.nn.model.generate import generate
from ridgeline.serve.build_engine import ends_of
from ridgeline.serve.offline import Prompt
from ridgeline.serve.request import Invalid


def answers(
    checkpoint: Path, prompts: Iterable[Prompt], tokenizer: Tokenizer, max_tokens: int, temperature: float, seed: int,
    ignore_eos: bool, dtype: torch.dtype | None, before_step: Callable[[], None],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Results as :func:`ridgeline.serve.offline.generate` gives them. A prompt is read with the end token behind it."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_checkpoint(checkpoint, dtype, device)
    end = min(ends_of(str(checkpoint)), default=tokenizer.token_to_id(END))
    for prompt in prompts:
        before_step()
        try:
            prompt.require_unicode()
            ids = tokenizer.encode(prompt.text, add_special_tokens=prompt.special).ids
            ids = ids if end is None or ids[-1:] == [end] else [*ids, end]
            if not ids:
                raise Invalid("prompt", "is empty", "give some text")
        except Invalid as e:
            yield {"id": prompt.id, "error": f"{e.what}: {e.fix}"}
            continue
        most = prompt.max_tokens or max_tokens
        found = generate(
            model, torch.tensor([ids], device=device), most, temperature, None if ignore_eos else end, seed
        )
        made = found[0, 1:].tolist()
        stopped = not ignore_eos and made[-1:] == [end]
        yield {
            "id": prompt.id, "prompt": prompt.text,
            "outputs": [{"text": tokenizer.decode(made), "finish_reason": "stop" if stopped else "length",
                         "tokens": len(made)}],
            "prompt_tokens": len(ids), "cached_tokens": 0,
        }  # fmt: skip
