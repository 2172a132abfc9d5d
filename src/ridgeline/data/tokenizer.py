"""A checkpoint's tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer

from ridgeline.spec.errors import UserError
from ridgeline.spec.json_file import read_json

_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_GENERATION = "generation_config.json"
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
    of generation, among them the token that ends it, which ``config.json`` may name instead. Settings of generation
    that ``to`` has and ``checkpoint`` does not name stay there, but for token ids where it names any."""
    if checkpoint.resolve() == to.resolve():
        return
    for name in _SETTINGS:
        if (checkpoint / name).is_file():
            shutil.copyfile(checkpoint / name, to / name)  # which can be written again, unlike some checkpoints
    source, target = checkpoint / _GENERATION, to / _GENERATION
    if source.is_file() and not target.is_file():
        shutil.copyfile(source, target)
        return
    config = read_json(checkpoint / "config.json")
    found = read_json(source) or {name: config[name] for name in _ENDS if config.get(name) is not None}
    if found:
        kept = read_json(target)
        if any(name.endswith("_token_id") for name in found):
            kept = {name: value for name, value in kept.items() if not name.endswith("_token_id")}
        target.write_text(json.dumps(kept | found, indent=2), encoding="utf-8")
