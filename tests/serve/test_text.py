"""Text never depends on how it was cut into tokens, and never shows halves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from ridgeline.data.batches import train_tokenizer
from ridgeline.serve.detokenize import Detokenizer, ServeJob, Vocabulary
from ridgeline.serve.request import EngineRequest, OutputEvent, Sampling
from ridgeline.spec.errors import UserError

BYTES = Vocabulary(train_tokenizer(["the cat sat on the mat, thé 猫"] * 3, 300), 300)
TEXT = st.text(alphabet="abcé猫🙂 \n", max_size=40)


def ending(text, stops):
    """What is left of ``text``: the stop string that is complete first ends it, the longest of those."""
    ends = [(i + len(s), i) for s in stops for i in range(len(text)) if text.startswith(s, i)]
    return text[: min(ends)[1]] if ends else text


def said(vocabulary, tokens, stops=(), **options):
    """The pieces that come out for ``tokens``, and the detokenizer."""
    d, pieces = Detokenizer(vocabulary, stops, **options), []
    for token in tokens:
        pieces.append(d.push(token))
        if d.stop is not None:
            return pieces, d
    return [*pieces, d.flush()], d


@given(st.lists(st.integers(0, 299), max_size=60))
def test_pieces_add_up_to_the_whole_for_any_tokens(tokens):
    pieces, d = said(BYTES, tokens)
    assert "".join(pieces) == BYTES.tokenizer.decode(tokens, skip_special_tokens=True)
    assert d.sent == len("".join(pieces))


@given(TEXT, st.lists(st.text(alphabet="abcé猫 \n", min_size=1, max_size=5), max_size=4), st.data())
def test_stop_strings_end_text_the_same_way_however_it_is_cut(text, stops, data):
    raw = text.encode()
    byte_tokens = {b: i for i, b in enumerate(BYTES.bytes) if len(b) == 1}
    cut = data.draw(st.integers(0, len(text)))
    tokens = BYTES.encode(text[:cut]) + [byte_tokens[bytes([b])] for b in raw[len(text[:cut].encode()) :]]
    pieces, d = said(BYTES, tokens, stops)
    wanted = ending(text, stops)
    assert "".join(pieces) == wanted
    assert (d.stop is not None) == (wanted != text or any(s in text for s in stops))
    shown = ""
    for piece in pieces:  # nothing was ever shown that is not part of the answer
        shown += piece
        assert wanted.startswith(shown)


def test_text_is_not_held_longer_than_it_must_be():
    d = Detokenizer(BYTES, ["stop!"])
    one = {b: i for i, b in enumerate(BYTES.bytes)}
    given = [d.push(one[c.encode()]) for c in "astos"]
    assert given == ["a", "", "", "", "sto"]


def test_a_character_in_several_tokens_comes_whole_and_half_of_one_at_the_end_as_a_mark():
    one = {b: i for i, b in enumerate(BYTES.bytes)}
    cat = [one[bytes([b])] for b in "猫".encode()]
    assert said(BYTES, cat)[0] == ["", "", "猫", ""]
    assert said(BYTES, cat[:2])[0] == ["", "", "�"]


def test_stop_strings_can_be_kept_and_wait_for_min_tokens():
    one = {b: i for i, b in enumerate(BYTES.bytes)}
    tokens = [one[c.encode()] for c in "xyxyz"]
    assert "".join(said(BYTES, tokens, ["xy"], include_stop=True)[0]) == "xy"
    assert "".join(said(BYTES, tokens, ["xy"], min_tokens=3)[0]) == "xy"
    assert "".join(said(BYTES, tokens, ["yz"], min_tokens=3)[0]) == "xyx"


def test_a_sentencepiece_vocabulary_with_byte_fallback():
    vocab = {"<unk>": 0, "▁the": 1, "▁cat": 2, "s": 3, "<0xE7>": 4, "<0x8C>": 5, "<0xAB>": 6, "▁": 7}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    v = Vocabulary(tokenizer, 8)
    assert said(v, [1, 2, 3, 7, 4, 5, 6])[0] == [" the", " cat", "s", " ", "", "", "猫", ""]
    assert v.name(4) == "bytes:\\xe7"


def test_a_tokenizer_whose_bytes_are_not_known_is_refused():
    tokenizer = Tokenizer(models.BPE({"a": 0}, []))
    tokenizer.decoder = decoders.CTC()
    with pytest.raises(UserError, match="CTC"):
        Vocabulary(tokenizer, 1)


def test_log_probabilities_come_with_the_text_of_their_tokens_and_not_for_what_was_cut():
    from ridgeline.serve.request import TokenLogprob

    one = {b: i for i, b in enumerate(BYTES.bytes)}
    job = ServeJob(EngineRequest("r", [1], Sampling(logprobs=0)), BYTES, stops=("stop",))
    seen = []
    for c in "as stop!":
        token = one[c.encode()]
        delta = job.read(OutputEvent("r", 0, [token], [TokenLogprob(token, -1.0)]))
        if delta is not None:
            assert len(delta.entries) == len(delta.text)
            seen += delta.entries
    assert delta is None  # "!" came after the end
    assert [e.offset for e in seen] == [0, 1, 2]
