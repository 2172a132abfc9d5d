"""A checkpoint's tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer

from ridgeline.spec.errors import UserError

_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "generation_config.json")
_ENDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def load_tokenizer(path: str) -> Tokenizer:
    """A ``tokenizer.json``, or the one in a checkpoint directory, for texts of any length: what it says of truncation
    and padding is left out, as Hugging Face ``transformers`` does unless asked. Raises :class:`UserError` when it is
    not one."""
    file = Path(path)
    file = file / "tokenizer.json" if file.is_dir() else file
    if not file.is_file():
        raise UserError(f"no tokenizer at {path}", "give a tokenizer.json or a directory that holds one")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as e:
        raise UserError(f"{file} is not a tokenizer: {str(e).splitlines()[0]}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def added_around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The tokens that a tokenizer itself puts before and behind a text."""
    encoded = tokenizer.encode("a")
    added = [sequence is None for sequence in encoded.sequence_ids]
    first = added.index(False) if False in added else 0
    last = len(added) - added[::-1].index(False) if False in added else 0
    return encoded.ids[:first], encoded.ids[last:]


def copy_settings(checkpoint: Path, to: Path) -> None:
    """Copy what a checkpoint directory has beside weights and vocabulary: chat template, special tokens, and settings
    of generation, among them the token that ends it, which ``config.json`` may name instead."""
    if checkpoint.resolve() == to.resolve():
        return
    for name in _SETTINGS:
        if (checkpoint / name).is_file():
            shutil.copyfile(checkpoint / name, to / name)  # which can be written again, unlike some checkpoints
    config = checkpoint / "config.json"
    if config.is_file() and not (checkpoint / "generation_config.json").is_file():
        named = json.loads(config.read_text(encoding="utf-8"))
        ends = {name: named[name] for name in _ENDS if named.get(name) is not None}
        if ends:
            (to / "generation_config.json").write_text(json.dumps(ends, indent=2), encoding="utf-8")
