"""Completions with a ``suffix``: what is written between two texts, by a model that has tokens for a gap."""

import json

import openai
import pytest
from tests.serve.running import running, tiny
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from ridgeline.data.batches import train_tokenizer
from ridgeline.serve.detokenize import Vocabulary
from ridgeline.serve.infill import MARKS, Infill


def with_marks(marks, tokenizer=None):
    """A vocabulary of bytes, and the marks."""
    made = tokenizer or train_tokenizer(["a"], 258)
    made.add_special_tokens([AddedToken(t, special=True) for t in (marks.before, marks.after, marks.fill) if t])
    return made


@pytest.mark.parametrize("marks", MARKS, ids=lambda m: m.before)
def test_every_family_writes_its_gap(marks):
    tokenizer = with_marks(marks)
    vocabulary = Vocabulary(tokenizer, tokenizer.get_vocab_size())
    infill = Infill.of(vocabulary)
    found = vocabulary.decode(infill.prompt("ab", infill.alone("cd"), True), skip_special=False)
    whole = f"{marks.before}ab{marks.after}cd{marks.fill}" if marks.fill else f"{marks.after}cd{marks.before}ab"
    assert found == whole
    ids = vocabulary.encode("ab")
    assert infill.prompt(ids, [7, 8], False) == infill.prompt("ab", [7, 8], False)


def test_a_text_after_the_gap_gets_no_space_from_sentencepiece():
    words = ["<unk>", *"\n abcd▁"]
    tokenizer = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [], unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    marks = next(m for m in MARKS if m.before == "▁<PRE>")
    vocabulary = Vocabulary(with_marks(marks, tokenizer), tokenizer.get_vocab_size())
    infill = Infill.of(vocabulary)
    made = infill.prompt("ab", infill.alone("cd"), False)
    assert vocabulary.entries(made) == ["▁<PRE>", "▁", "a", "b", "▁<SUF>", "c", "d", "▁<MID>"]


def test_a_vocabulary_without_marks_fills_no_gaps():
    assert Infill.of(Vocabulary(train_tokenizer(["a"], 258), 258)) is None
    known = with_marks(MARKS[0])
    assert Infill.of(Vocabulary(known, known.get_vocab_size() - 1)) is None  # the model has fewer tokens


def test_the_server_fills_gaps(tmp_path):
    folder = tiny(tmp_path / "tiny", vocab_size=270)
    with_marks(MARKS[0]).save(str(folder / "tokenizer.json"))
    with running(folder) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as c:
        ask = {"model": "tiny", "max_tokens": 4, "temperature": 0, "extra_body": {"return_token_ids": True}}
        made = c.completions.create(prompt=["ab", "x"], suffix="cd", **ask)
        written = [server.service.vocabulary.decode(o.prompt_token_ids, skip_special=False) for o in made.choices]
        assert written == [f"<|fim_prefix|>{t}<|fim_suffix|>cd<|fim_middle|>" for t in ("ab", "x")]
        same = c.completions.create(prompt=written[0], **ask)
        assert (same.choices[0].text, same.choices[0].prompt_token_ids) == (
            made.choices[0].text, made.choices[0].prompt_token_ids,
        )  # fmt: skip
        for more, said in (({"echo": True}, "echo"), ({"suffix": "a" * 300}, "suffix"), ({"prompt": [269]}, None)):
            if said is None:  # a token that the model has, and the tokenizer does not
                assert c.completions.create(**{"prompt": "a", "suffix": "b", **ask, **more}).choices
                continue
            with pytest.raises(openai.BadRequestError) as e:
                c.completions.create(**{"prompt": "a", "suffix": "b", **ask, **more})
            assert json.loads(e.value.response.text)["error"]["param"] == said
        server.assert_idle()
