"""`ridgeline finetune` and `ridgeline merge` from the command line, and what the user is told."""

from __future__ import annotations

import json
import shutil
import stat

import pytest
import torch
from tests.train.test_instructions import chat, checkpoint  # noqa: F401  (fixtures)
from typer.testing import CliRunner

from ridgeline.cli import app
from ridgeline.data.examples import find_template, special_tokens
from ridgeline.data.tokenizer import copy_settings
from ridgeline.nn.checkpoint.checkpoint import load_checkpoint
from ridgeline.nn.checkpoint.files import read_config
from ridgeline.serve.build_engine import ends_of
from ridgeline.spec.errors import UserError
from ridgeline.train.adapter_folder import attach, load_adapter

FAST = ["--seq-len", "32", "--batch-size", "4", "--lr", "1e-2", "--eval-batches", "1", "--json"]


def finetune(checkpoint, chat, out, *options):  # noqa: F811
    args = ["finetune", str(checkpoint), "--data", str(chat), "--template", str(chat.parent / "short.jinja"),
            "--out", str(out), *FAST, *options]  # fmt: skip
    got = CliRunner().invoke(app, args)
    if got.exception and not isinstance(got.exception, SystemExit):
        raise got.exception
    assert got.exit_code == 0, got.output
    return json.loads(got.stdout)


@pytest.fixture(scope="module")
def tuned(checkpoint, chat, tmp_path_factory):  # noqa: F811
    out = tmp_path_factory.mktemp("tuned") / "adapter"
    return out, finetune(checkpoint, chat, out, "--with", "lora:rank=4,targets=all-linear", "--steps", "12",
                         "--eval-every", "3")  # fmt: skip


def test_the_best_weights_are_kept(tuned, checkpoint, chat):  # noqa: F811
    out, result = tuned
    steps = [step for step, _ in result["evaluations"]]
    assert steps == [0, 3, 6, 9, 12]
    first, best = result["evaluations"][0][1], min(result["evaluations"][1:], key=lambda e: e[1])
    assert result["best"] == best
    assert best[1] < first - 0.05
    assert (out / "adapter_config.json").is_file()
    assert not (out / "model.safetensors").exists()
    again = finetune(checkpoint, chat, out, "--with", "lora:rank=4,targets=all-linear", "--steps", "12",
                     "--eval-every", "3")  # fmt: skip
    assert again["step"] == 12, "there was nothing left to do"
    assert again["losses"] == result["losses"]


@pytest.fixture
def speaking(checkpoint, tmp_path):  # noqa: F811
    """The checkpoint with a chat template and an end of output, as Hugging Face has them. It cannot be written."""
    folder = shutil.copytree(checkpoint, tmp_path / "speaking")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 0}))
    for file in folder.iterdir():
        file.chmod(0o444)
    return folder


def unwritable(folder):
    """Files that the same command could not write again."""
    return [file.name for file in folder.iterdir() if not file.stat().st_mode & stat.S_IWUSR]


def test_a_whole_model_keeps_its_template_and_its_end(speaking, chat, tmp_path):  # noqa: F811
    """Of its base, but for the template that it has learned."""
    out = tmp_path / "whole"
    finetune(speaking, chat, out, "--steps", "1", "--eval-every", "0")
    learned = (chat.parent / "short.jinja").read_text()
    assert find_template(None, str(out)).source == learned
    assert special_tokens(str(out))["eos_token"] == "<|endoftext|>"
    assert ends_of(str(out)) == {0}
    assert not unwritable(out)


def test_a_merged_model_keeps_its_template_and_its_end(tuned, speaking, tmp_path):
    out = tmp_path / "merged"
    (speaking / "generation_config.json").write_text('{"eos_token_id": [0, 7]}')
    got = CliRunner().invoke(app, ["merge", str(speaking), str(tuned[0]), "--out", str(out)])
    assert got.exit_code == 0, got.output
    assert find_template(None, str(out)).source == "{{ messages[0].content }}"
    assert ends_of(str(out)) == {0, 7}
    assert not unwritable(out)


def test_settings_of_generation_stay_where_another_tokenizer_is_named(tmp_path):
    """But for token ids, which are of the vocabulary."""
    model, tokenizer, out = tmp_path / "model", tmp_path / "tokenizer", tmp_path / "out"
    for folder in (model, tokenizer, out):
        folder.mkdir()
    (model / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": 1, "pad_token_id": 2}')
    (tokenizer / "config.json").write_text('{"eos_token_id": 7, "hidden_size": 64}')
    for source in (model, tokenizer):
        copy_settings(source, out)
    assert json.loads((out / "generation_config.json").read_text()) == {"temperature": 0.6, "eos_token_id": 7}


@pytest.mark.parametrize("text", ["{", "[1]", "\0"])
def test_a_damaged_config_is_told(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    for read in (read_config, lambda folder: ends_of(str(folder))):
        with pytest.raises(UserError, match=r"config\.json is not"):
            read(tmp_path)


def test_data_that_is_missing_is_found_before_a_directory_is_made(checkpoint, tmp_path):  # noqa: F811
    out = tmp_path / "out"
    got = CliRunner().invoke(app, ["finetune", str(checkpoint), "--data", "nowhere.jsonl", "--out", str(out), *FAST])
    assert isinstance(got.exception, UserError)
    assert "data 'nowhere.jsonl' is neither a file nor a directory" in str(got.exception)
    assert not out.exists()


def test_going_on_from_the_adapter_and_merging_it(tuned, checkpoint, chat, tmp_path):  # noqa: F811
    out, result = tuned
    further = finetune(checkpoint, chat, tmp_path / "more", "--adapter", str(out), "--steps", "1", "--eval-every", "1")
    assert further["evaluations"][0][1] == pytest.approx(result["best"][1], abs=1e-5)
    got = CliRunner().invoke(app, ["merge", str(checkpoint), str(out), "--out", str(tmp_path / "whole")])
    assert got.exit_code == 0, got.output
    ids = torch.arange(20)[None]
    base = load_checkpoint(checkpoint)
    before = base(ids)
    attach(base, load_adapter(out, base.spec))
    whole = load_checkpoint(tmp_path / "whole")
    assert torch.allclose(whole(ids), base(ids), atol=1e-5)
    assert not torch.allclose(before, base(ids), atol=1e-3)
    assert (tmp_path / "whole" / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("options", "said", "mend"),
    [
        (["--with", "lora:targets=q_prj"], "matches no linear layer", "q_proj"),
        (["--with", "lora:rank=64"], "rank 64 is not below", "rank below"),
        (["--with", "bottleneck_adapter", "--merged"], "not linear", "save the adapter"),
        (["--template", "nothing.jinja"], "no chat template", "chatml"),
    ],
)
def test_mistakes_are_told_before_anything_is_written(options, said, mend, checkpoint, chat, tmp_path):  # noqa: F811
    with pytest.raises(UserError) as told:
        finetune(checkpoint, chat, tmp_path / "out", *options)
    assert said in told.value.what
    assert mend in told.value.fix
    assert not (tmp_path / "out").exists()


def test_an_adapter_of_another_base(tuned, checkpoint, tmp_path):  # noqa: F811
    wide = load_checkpoint(checkpoint).spec.model_copy(update={"hidden_size": 64, "head_dim": 16})
    with pytest.raises(UserError, match="q_proj"):
        load_adapter(tuned[0], wide)
