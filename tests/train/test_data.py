"""Text to batches: order, labels, masking, tokenizers, the cache, and what unusable sources get."""

import dataclasses
import importlib.util
import itertools
import sys
import sysconfig
import time
import types
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from tests.training import MODEL, experiment, write_corpus
from tests.world import world
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from ridgeline.data import batches as data_batches
from ridgeline.data.batches import END, IGNORE, MASK, TextBatches, load_tokens, train_tokenizer
from ridgeline.data.packing import load_instructions
from ridgeline.data.text import PARTS, documents
from ridgeline.data.tokenizer import load_tokenizer
from ridgeline.paths import cache_dir
from ridgeline.spec.errors import UserError
from ridgeline.spec.workload import FineTune
from ridgeline.train.trainer import global_batches


@pytest.fixture
def tokens(corpus):
    return load_tokens(str(corpus), 300)


def test_batches_are_a_function_of_seed_and_step(tokens):
    a, b = TextBatches(tokens, 16, 4, 300), TextBatches(tokens, 16, 4, 300)
    b.batch(7)  # order of asking does not matter
    for step in (3, 0, 11):
        assert torch.equal(a.batch(step)[0], b.batch(step)[0])
    assert not torch.equal(a.batch(0)[0], a.batch(1)[0])
    assert not torch.equal(a.batch(0)[0], TextBatches(tokens, 16, 4, 300, seed=1).batch(0)[0])


def test_labels_are_the_next_tokens(tokens):
    ids, labels, *_ = TextBatches(tokens, 16, 4, 300).batch(0)
    assert ids.shape == labels.shape == (4, 16)
    assert ids.dtype == torch.int64
    assert torch.equal(ids[:, 1:], labels[:, :-1])


def test_an_epoch_shows_each_sequence_once_and_the_next_in_another_order(tokens):
    batches = TextBatches(tokens, 16, 1, 300)
    n = batches.sequences
    rows = [batches.batch(i)[0][0].numpy() for i in range(2 * n)]
    windows = tokens.ids[: n * 16].reshape(n, 16)

    def sort(r):
        return sorted(map(tuple, r))

    assert sort(rows[:n]) == sort(windows)
    assert sort(rows[n:]) == sort(windows)
    assert any(not np.array_equal(a, b) for a, b in zip(rows[:n], rows[n:], strict=True))
    # A batch may reach over the end of an epoch: its first rows end one, the others begin the next.
    size = next(k for k in range(2, n) if TextBatches(tokens, 16, k, 300).sequences % k)
    wide = TextBatches(tokens, 16, size, 300)
    last = wide.sequences // size
    seen = [row.numpy() for i in range(last + 1) for row in wide.batch(i)[0]]
    assert sort(seen[: wide.sequences]) == sort(windows[: wide.sequences])
    assert len(seen) > wide.sequences


def test_orders_of_past_epochs_are_forgotten(tokens):
    batches = TextBatches(tokens, 16, 1, 300)
    for epoch in range(20):
        batches.batch(epoch * batches.sequences)
    assert data_batches.permutation.cache_info().currsize < 10


def test_a_negative_seed_is_refused(corpus):
    with pytest.raises(ValidationError, match="seed"):
        experiment(corpus, seed=-1)


def test_held_out_windows_are_never_trained_on(tokens):
    batches = TextBatches(tokens, 16, 2, 300)
    held, *_ = batches.held_out_batch()
    steps = -(-batches.sequences // 2)
    trained = {tuple(row.numpy()) for i in range(steps) for row in batches.batch(i)[0]}
    assert held.shape == (2, 16)
    assert not trained & {tuple(row.numpy()) for row in held}
    assert TextBatches(tokens, 16, batches.windows, 300).held_out_batch() is None


def test_masking_has_its_published_shares(tokens):
    batches = TextBatches(tokens, 64, 16, 300, causal=False)
    plain = TextBatches(tokens, 64, 16, 300)
    mask = tokens.tokenizer.token_to_id(MASK)
    counts = np.zeros(4)
    for step in range(20):
        ids, labels, *_ = batches.batch(step)
        original = plain.batch(step)[0]
        chosen = labels != IGNORE
        assert torch.equal(labels[chosen], original[chosen])
        assert torch.equal(ids[~chosen], original[~chosen])
        kept, masked = ids[chosen] == original[chosen], ids[chosen] == mask
        counts += [ids.numel(), chosen.sum(), masked.sum(), kept.sum()]
    total, chosen, masked, kept = counts
    # Binomial spreads of 20 480 positions: 0.25 %, 0.7 %, 0.5 %; four of them each.
    assert chosen / total == pytest.approx(0.15, abs=0.01)
    assert masked / chosen == pytest.approx(0.8, abs=0.03)
    assert kept / chosen == pytest.approx(0.1, abs=0.025)
    assert torch.equal(batches.batch(3)[0], TextBatches(tokens, 64, 16, 300, causal=False).batch(3)[0])


@pytest.mark.parametrize("text", ["the ridge", "naïve café\n\n\ttab", "日本語 🏔️ \x00\x7f", "  two  spaces  "])
def test_the_byte_tokenizer_gives_any_text_back(text, tokens):
    encoded = tokens.tokenizer.encode(text)
    assert tokens.tokenizer.decode(encoded.ids) == text
    assert max(encoded.ids) < 300


def test_documents_are_separated_by_the_end_token(tmp_path):
    for i in range(3):
        write_corpus(tmp_path / f"{i}.txt", lines=20)
    tokens = load_tokens(str(tmp_path), 300)
    assert (tokens.ids == tokens.end).sum() == 3
    assert tokens.ids[-1] == tokens.end == tokens.tokenizer.token_to_id(END)


def test_training_reads_a_file_to_its_end(tmp_path, monkeypatch):
    """Not only its first characters, of which a vocabulary is made; pieces at a time."""
    file = write_corpus(tmp_path / "text.txt", lines=300)
    monkeypatch.setattr(data_batches, "MAX_CHARACTERS", 1000)
    e = experiment(file, seq_len=16, batch_size=2)
    batches = global_batches(e, 0, 1)
    text = file.read_text()
    assert len(text) > 5000
    assert batches.tokenizer.decode(batches.tokens.ids[:-1].tolist()) == text
    assert (batches.tokens.ids == batches.tokens.end).sum() == 1
    assert len(load_tokens(str(file), MODEL.vocab_size).ids) < len(batches.tokens.ids) / 2


TEXT = (
    "def ridge(x):\n    return x + 1\n\n\n    # naïve café, 日本語\n\tindented   twice\n"
    "The  roof   of the model.\r\nA line\n\n\n   \n" + "wide " * 40 + "\n" + "0123456789abcdef" * 30 + "\n"
)


def _bytes_in_words(tokenizer):
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)


def _bytes_between_specials(tokenizer):
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )


def _llama(tokenizer):
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])


def _metaspace(tokenizer):
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")


def _llama_2(tokenizer):
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])


@pytest.mark.parametrize("kind", [_bytes_in_words, _bytes_between_specials, _llama, _metaspace, _llama_2])
def test_a_document_in_pieces_has_the_tokens_of_the_whole(kind, monkeypatch):
    """Also where a piece is cut in whitespace or in a word, and what the tokenizer adds to a text it adds once."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    special = ["<unk>", "<s>", "</s>", END]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=special, show_progress=False, max_token_length=12,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    # Of lines, as SentencePiece reads them: a tokenizer without a pre-tokenizer would learn merges across them.
    tokenizer.train_from_iterator(TEXT.replace(" ", "▁").splitlines(), trainer)
    kind(tokenizer)
    long, short = TEXT * 8, "The roof."
    end = tokenizer.token_to_id(END)
    whole = [*tokenizer.encode(long).ids, end, *tokenizer.encode(short).ids, end]
    monkeypatch.setattr(data_batches, "MAX_CHARACTERS", 800)
    assert data_batches._encoded([long, short], tokenizer).tolist() == whole


def test_files_are_read_whole_beside_a_source_without_end(tmp_path, monkeypatch):
    file, folder = write_corpus(tmp_path / "text.txt", lines=100), tmp_path / "folder"
    folder.mkdir()
    write_corpus(folder / "other.txt", lines=200)
    monkeypatch.setattr(data_batches, "MAX_CHARACTERS", 1000)
    monkeypatch.setattr("ridgeline.data.text._hugging_face", lambda name: itertools.repeat("endless row. "))
    tokens = load_tokens(f"{file},hf:endless,{folder}", 300, whole=True)
    texts = tokens.tokenizer.decode(tokens.ids.tolist(), skip_special_tokens=False).split(END)[:-1]
    assert texts[:3] == [file.read_text(), "endless row. ", (folder / "other.txt").read_text()]
    assert len("".join(texts[1:2] + texts[3:])) == 1000
    assert len(load_tokens("hf:endless", 300, whole=True).ids) < 1000


def test_empty_rows_of_a_dataset_are_no_documents(monkeypatch):
    rows = [{"text": "one row"}, {"text": ""}, {"text": None}, {"text": " \n"}, {"text": "another"}]
    stub = types.SimpleNamespace(load_dataset=lambda name, **options: rows)
    monkeypatch.setitem(sys.modules, "datasets", stub)
    assert list(documents("hf:rows")) == ["one row", "another"]


def test_tokens_are_cached_by_content(tmp_path):
    file = write_corpus(tmp_path / "text.txt", lines=60)
    first = load_tokens(str(file), 300)
    kept = sorted(cache_dir().rglob("ids.npy"))
    assert len(kept) == 1
    stamp = kept[0].stat().st_mtime_ns
    again = load_tokens(str(file), 300)
    assert np.array_equal(first.ids, again.ids)
    assert again.tokenizer.to_str() == first.tokenizer.to_str()
    assert sorted(cache_dir().rglob("ids.npy")) == kept
    assert kept[0].stat().st_mtime_ns == stamp
    file.write_text(file.read_text() + "more of the ridge")
    assert len(load_tokens(str(file), 300).ids) > len(first.ids)
    load_tokens(str(file), 320)
    assert len(list(cache_dir().rglob("ids.npy"))) == 3
    assert not list(cache_dir().rglob("*.new"))


@pytest.mark.parametrize("name", ["ids.npy", "tokenizer.json"])
def test_a_broken_cache_is_made_again(name, tmp_path):
    file = write_corpus(tmp_path / "text.txt", lines=60)
    first = load_tokens(str(file), 300)
    (kept,) = cache_dir().rglob(name)
    whole = kept.read_bytes()
    for size in (0, len(whole) // 2):
        kept.write_bytes(whole[:size])
        assert np.array_equal(load_tokens(str(file), 300).ids, first.ids)
        assert kept.read_bytes() == whole


def test_the_same_text_in_other_documents_is_not_served_from_the_cache(tmp_path):
    text = write_corpus(tmp_path / "text.txt", lines=60).read_text()
    for name, parts in (("one", [text]), ("two", [text[:500], text[500:]])):
        (tmp_path / name).mkdir()
        for file, part in zip("ab", parts, strict=False):
            (tmp_path / name / f"{file}.txt").write_text(part)
    one, two = (load_tokens(str(tmp_path / name), 300) for name in ("one", "two"))
    assert ((one.ids == one.end).sum(), (two.ids == two.end).sum()) == (1, 2)


def test_text_is_read_where_nothing_can_be_cached(tmp_path, monkeypatch):
    file = write_corpus(tmp_path / "text.txt", lines=60)
    cached = load_tokens(str(file), 300)
    (tmp_path / "taken").touch()  # no directory can be made below a file, whoever asks
    monkeypatch.setenv("RIDGELINE_HOME", str(tmp_path / "taken"))
    assert np.array_equal(load_tokens(str(file), 300).ids, cached.ids)


def test_a_tokenizer_that_changed_in_its_place_is_not_served_from_the_cache(tmp_path):
    file, vocabulary = write_corpus(tmp_path / "text.txt", lines=60), tmp_path / "tokenizer.json"
    train_tokenizer([file.read_text()], 280).save(str(vocabulary))
    few = load_tokens(str(file), 400, str(vocabulary))
    train_tokenizer([file.read_text()], 380).save(str(vocabulary))
    many = load_tokens(str(file), 400, str(tmp_path))
    assert len(many.ids) < len(few.ids)


def load_here(rank, source):
    torch.distributed.barrier()
    tokens = load_tokens(source, 300)
    return tokens.ids.tolist()


def test_ranks_that_tokenize_at_once_do_not_disturb_each_other(corpus):
    a, b = world(2).run(load_here, str(corpus))
    assert a == b
    assert not list(cache_dir().rglob("*.new"))


def test_a_tokenizer_that_truncates_reads_documents_to_their_end(corpus, tmp_path):
    """Those of encoders often come with the length of their model."""
    tokenizer = train_tokenizer([corpus.read_text()], 300)
    whole = tokenizer.encode(corpus.read_text()).ids
    tokenizer.enable_truncation(64)
    tokenizer.enable_padding(length=128)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load_tokens(str(corpus), 300, str(tmp_path)).ids.tolist()[:-1] == whole


def tokens_of(folder, texts, **special):
    """Documents, tokenized by a tokenizer without our end token but with what ``special`` puts around a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    names = ["[PAD]", "[CLS]", "[SEP]", "[MASK]"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=names, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(
            **special, special_tokens=[(name, i) for i, name in enumerate(names)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "texts").mkdir()
    for i, text in enumerate(texts):
        (folder / "texts" / f"{i}.txt").write_text(text)
    return load_tokens(str(folder / "texts"), 300, str(folder))


TEXTS = ["One roof! And a ridge! " * 8, "Another roof! " * 9, "A step! Of the model! " * 50]


@pytest.mark.parametrize("around", ["[CLS] $A", "$A [SEP]", "[CLS] $A [SEP]"])
def test_documents_are_told_apart_by_what_the_tokenizer_puts_around_them(around, tmp_path):
    tokens = tokens_of(tmp_path, TEXTS, single=around)
    batch = TextBatches(tokens, len(tokens.ids) - 1, 1, 300, separate=True).batch(0)
    lengths = [len(tokens.tokenizer.encode(text).ids) for text in documents(str(tmp_path / "texts"))]
    assert sum(lengths) == len(tokens.ids)
    begins = np.flatnonzero(batch.positions[0] == 0)
    assert np.diff([*begins, len(tokens.ids)]).tolist() == lengths
    assert batch.documents[0].unique().tolist() == [0, 1, 2]


def test_documents_that_nothing_separates_are_not_masked(tmp_path):
    tokens = tokens_of(tmp_path, TEXTS)
    with pytest.raises(UserError, match="no token between documents"):
        TextBatches(tokens, 16, 1, 300, separate=True).batch(0)
    TextBatches(tokens, 16, 1, 300).batch(0)


def test_the_mask_is_the_tokenizers_own_and_special_tokens_are_not_predicted(tmp_path):
    tokens = tokens_of(tmp_path, TEXTS, single="[CLS] $A [SEP]")
    names = tokens.tokenizer.get_vocab()
    tokens = dataclasses.replace(tokens, ids=np.tile(tokens.ids, 20))
    ids, labels, *_ = TextBatches(tokens, 64, 64, 300, causal=False).batch(0)
    chosen = labels != IGNORE
    assert (ids[chosen] == names["[MASK]"]).float().mean() == pytest.approx(0.8, abs=0.08)  # of some 600
    assert not torch.isin(labels[chosen], torch.tensor([names["[CLS]"], names["[SEP]"]])).any()


def test_an_encoder_without_a_mask_token_is_not_trained(corpus):
    own = load_tokens(str(corpus), 300)
    bare = Tokenizer.from_str(own.tokenizer.to_str().replace(MASK, "<|another|>"))
    with pytest.raises(UserError, match=r"no mask token .*\[MASK\]"):
        TextBatches(dataclasses.replace(own, tokenizer=bare), 16, 4, 300, causal=False).batch(0)


def batches_of_slow_ranks(rank, e, slow, timeout):
    """The tokens on this rank, and whether it made them itself; making them takes longer than collectives may."""
    made = []

    def encode(texts, tokenizer):
        made.append(rank)
        time.sleep(slow)
        return encoded(texts, tokenizer)

    encoded, data_batches._encoded = data_batches._encoded, encode
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout))
    try:
        batches = global_batches(e, rank, 2)
        dist.barrier()
    finally:
        data_batches._encoded = encoded
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=300))
    return batches.tokens.ids.tolist(), made


@pytest.mark.parametrize("kept", [True, False])
def test_ranks_wait_for_text_longer_than_for_collectives(kept, corpus, tmp_path, monkeypatch):
    """Rank 0 tokenizes for both; where it cannot pass that on, the other one needs as long."""
    if not kept:
        (tmp_path / "taken").touch()
        monkeypatch.setenv("RIDGELINE_HOME", str(tmp_path / "taken"))
    e = experiment(corpus, ranks=2)
    (a, first), (b, second) = world(2).run(batches_of_slow_ranks, e, 3.5, 3.0)
    assert a == b
    assert (first, second) == ([0], [] if kept else [1])


def test_sources_file_directory_and_standard_library(tmp_path, corpus):
    assert list(documents(str(corpus))) == [corpus.read_text()]
    (tmp_path / "tests" / "deep").mkdir(parents=True)
    (tmp_path / "tests" / "deep" / "a.md").write_text("first")
    (tmp_path / "tests" / "b.txt").write_text("second")
    (tmp_path / "tests" / "c.bin").write_text("not text")
    (tmp_path / "tests" / "d.txt").write_text("   \n")
    assert sorted(documents(str(tmp_path / "tests"))) == ["first", "second"]
    some = list(itertools.islice(documents("stdlib"), 5))
    assert sum(map(len, some)) > 1000
    assert some == list(itertools.islice(documents("stdlib"), 5))


def test_what_is_no_text_is_not_read(tmp_path):
    """Hidden files and those with zero bytes in a directory; one that is named is refused. A byte order mark is none of
    the text."""
    folder = tmp_path / "folder"
    (folder / ".venv").mkdir(parents=True)
    (folder / ".venv" / "library.py").write_text("hidden")
    (folder / "mark.txt").write_bytes("\ufeffmarked\r\nlines".encode())
    (folder / "latin.txt").write_bytes("na\xefve".encode("latin-1"))
    (folder / "wide.txt").write_text("sixteen bits", encoding="utf-16")
    assert sorted(documents(str(folder))) == ["marked\nlines", "na\ufffdve"]
    with pytest.raises(UserError, match=r"wide\.txt is not UTF-8 text"):
        list(documents(str(folder / "wide.txt")))


def test_records_with_a_text_are_documents(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('\n{"text": "one\\nline", "id": 1}\r\n{"text": ""}\n{"text": "half \\ud83c"}\n', encoding="utf-8")
    assert list(documents(str(file))) == ["one\nline", "half ?"]
    other = '{"code": "x"}\n{"text": "y"}\n'
    (tmp_path / "b.jsonl").write_text(other)
    assert sorted(documents(str(tmp_path))) == ["half ?", "one\nline", other]
    with file.open("a") as f:
        f.write('{"txt": "no"}\n')
    with pytest.raises(UserError, match=r"a\.jsonl:5 is not a JSON record"):
        list(documents(str(file)))
    file.write_text('{"text": null}\n{"text": "y"}')
    with pytest.raises(UserError, match=r"a\.jsonl:1 is not a JSON record"):
        list(documents(str(file)))


def test_a_standard_library_that_lies_below_a_test_directory_is_read(tmp_path, monkeypatch):
    root = tmp_path / "test" / "lib"
    (root / "test").mkdir(parents=True)
    (root / "json.py").write_text("import this")
    (root / "test" / "skipped.py").write_text("no")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(root))
    assert list(documents("stdlib")) == ["import this"]


def test_unusable_sources_are_said(tmp_path):
    with pytest.raises(UserError, match="neither a file nor a directory"):
        load_tokens(str(tmp_path / "nothing"), 300)
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(UserError, match="only 9 characters"):
        load_tokens(str(tmp_path / "short.txt"), 300)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="only 0 characters"):
        load_tokens(str(tmp_path / "empty"), 300)
    with pytest.raises(UserError, match="vocab_size 100"):
        load_tokens(str(write_corpus(tmp_path / "text.txt")), 100)
    with pytest.raises(UserError, match="no tokenizer at"):
        load_tokenizer(str(tmp_path / "nothing"))
    with pytest.raises(UserError, match="is not a tokenizer"):
        load_tokenizer(str(tmp_path / "text.txt"))


def test_text_shorter_than_a_sequence_is_said(tmp_path):
    file = write_corpus(tmp_path / "text.txt", lines=30)
    tokens = load_tokens(str(file), 300)
    with pytest.raises(UserError, match="less than one sequence of 100000"):
        TextBatches(tokens, 100_000, 1, 300).batch(0)


def test_a_tokenizer_larger_than_the_model_is_said(tmp_path, corpus):
    train_tokenizer([corpus.read_text()], 380).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="380 entries, the model only 300"):
        load_tokens(str(corpus), 300, str(tmp_path))


def test_a_token_beyond_the_model_is_said(tmp_path, corpus):
    """Of a vocabulary with gaps, which has fewer entries than its largest id."""
    words = Tokenizer(models.WordLevel({"ridge": 0, "<unk>": 300}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="ids up to 300, the model has 300 tokens"):
        load_tokens(str(corpus), 300, str(tmp_path))
    assert load_tokens(str(corpus), 301, str(tmp_path)).ids.max() == 300
    (tmp_path / "one.jsonl").write_text('{"prompt": "the", "completion": " ridge"}')
    w = FineTune(data=str(tmp_path / "one.jsonl"), tokenizer=str(tmp_path))
    with pytest.raises(UserError, match="ids up to 300, the model has 300 tokens"):
        load_instructions(w, 300)


@pytest.mark.skipif(importlib.util.find_spec("datasets") is not None, reason="datasets is installed")
def test_hugging_face_data_needs_its_package():
    with pytest.raises(UserError, match="needs the `datasets` package") as error:
        load_tokens("hf:anything", 300)
    assert "pip install" in error.value.fix


def test_two_domains_that_share_no_sentence(monkeypatch):
    package = Path(sysconfig.get_path("stdlib")) / "asyncio"  # the whole takes half a minute
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(package))
    prose, code = ("\n".join(documents(part)) for part in PARTS)
    assert "coroutine" in prose.lower()
    assert "return" in code
    assert min(len(prose), len(code)) > 30_000
    sentences = {line.strip() for line in prose.splitlines() if len(line.split()) > 8}
    assert not sentences & {line.strip() for line in code.splitlines()}
