"""Cache blocks that leave the pool and come back: the same tokens, fewer of them computed, files that survive a restart
and whatever happens to them."""

import os
import resource
import subprocess
import sys
import threading
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.compressing import LLAMA, checkpoint
from tests.forked import Fork
from tests.serving import ask, run

from ridgeline.nn.memory.block_store import BlockStore
from ridgeline.serve.build_engine import load_engine
from ridgeline.serve.scheduler import share
from ridgeline.spec.errors import Incompatible, UserError

PLAN = ("paged_kv:block_size=4", "continuous_batching", "chunked_prefill", "padding_free", "flash_attention")
FIRST, OTHER = list(range(1, 42)), list(range(100, 148))
BLOCK = 2 * 4 * LLAMA["num_layers"] * LLAMA["num_kv_heads"] * LLAMA["head_dim"] * 4
"""Bytes of a block in fp32."""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("kv") / "m", LLAMA)


def engine(source, *more, blocks=16):
    """One with a pool of this many blocks of 4 tokens, as fp32 has them."""
    return load_engine(source, [*PLAN, *more], kv_cache_bytes=blocks * BLOCK, max_num_seqs=4, max_model_len=60)


def served(e, *prompts, **fields):
    """Tokens of each prompt, one after the other, and how many of its tokens were found."""
    out = []
    for p in prompts:
        before = e.stats().cached_tokens
        tokens, _ = run(e, ask(f"r{e.stats().steps}", p, 6, **fields))
        out.append((next(iter(tokens.values())), e.stats().cached_tokens - before))
    return out


@pytest.fixture(scope="module")
def want(source):
    e = engine(source, blocks=64)
    return {len(p): served(e, p)[0][0] for p in (FIRST, OTHER)}


@pytest.mark.parametrize("store", ["kv_offload:host=1MB", "kv_offload:host=1,disk=1MB", "kv_offload:host=9kB,disk=1MB",
                                   "prefix_store:host=1,disk=1MB"])  # fmt: skip
def test_a_prompt_of_before_comes_back(source, want, tmp_path, store):
    """The pool holds one prompt; the other one's blocks are evicted by it, and come back."""
    e = engine(source, f"{store},path={tmp_path / 'kv'}")
    answers = served(e, FIRST, OTHER, FIRST, OTHER, FIRST)
    for (tokens, _), p in zip(answers, (FIRST, OTHER, FIRST, OTHER, FIRST), strict=True):
        assert tokens == want[len(p)]
    assert [found for _, found in answers] == [0, 0, 40, 44, 40]
    stats = e.stats()
    assert stats.restored_blocks >= 10 + 11 + 10 - 16
    assert stats.saved_blocks >= 10
    plain = engine(source)
    assert sum(found for _, found in served(plain, FIRST, OTHER, FIRST)) <= 8  # what of the head was not evicted


def test_what_would_be_found_is_told_before_anything_is_taken(source):
    e = engine(source, "kv_offload:host=1MB")
    match, told = e.blocks.match, []

    def matched(seq):
        told.append(e.blocks.find(seq))
        assert not seq.blocks
        assert match(seq) == told[-1]
        return told[-1]

    e.blocks.match = matched
    served(e, FIRST, OTHER, FIRST)
    assert told == [0, 0, 40]


def test_a_reset_forgets_what_is_stored_too(source, want, tmp_path):
    e = engine(source, f"kv_offload:host=1MB,path={tmp_path / 'kv'}")
    served(e, FIRST, OTHER)
    assert e.reset_prefix_cache() > 0
    e.check()
    assert e.stats().blocks_cached == 0
    answers = served(e, FIRST, OTHER, FIRST)
    assert [tokens for tokens, _ in answers] == [want[len(p)] for p in (FIRST, OTHER, FIRST)]
    assert [found for _, found in answers] == [0, 0, 40]


@pytest.mark.parametrize(("dtype", "blocks"), [("int8", 5), ("int4", 4), ("fp8", 4)])
def test_quantized_blocks(source, tmp_path, dtype, blocks):
    want = [t for t, _ in served(engine(source, f"kv_quant:dtype={dtype}", blocks=64), FIRST, OTHER)]
    e = engine(source, f"kv_quant:dtype={dtype}", f"kv_offload:host=1MB,path={tmp_path}", blocks=blocks)
    answers = served(e, FIRST, OTHER, FIRST, OTHER)
    assert [t for t, _ in answers] == want * 2
    assert e.stats().restored_blocks > 0


def test_preempted_requests_take_up_what_they_had(source, want):
    """More than the pool holds at once: who is preempted computes less of it again."""
    prompts = [list(range(20 * i + 1, 20 * i + 15)) for i in range(6)]
    requests = [ask(f"r{i}", p, 30) for i, p in enumerate(prompts)]
    plain, stored = engine(source, blocks=20), engine(source, "kv_offload:host=1MB", blocks=20)
    tokens, _ = run(plain, *requests)
    again, _ = run(stored, *requests)
    assert again == tokens
    assert plain.stats().preemptions > 0
    assert stored.stats().restored_blocks > 0


def test_salts_stay_apart(source):
    e = engine(source, "kv_offload:host=1MB")
    served(e, FIRST, OTHER)
    before = e.stats().cached_tokens
    run(e, replace(ask("salted", FIRST, 2), salt=b"mine"))
    assert e.stats().cached_tokens == before


def test_files_end_with_the_process(source, tmp_path):
    e = engine(source, f"kv_offload:host=1,disk=1MB,path={tmp_path}")
    served(e, FIRST, OTHER, FIRST)
    assert any((tmp_path / "kv-blocks").glob("*.kv"))
    e.close()
    assert os.listdir(tmp_path) == []


# ---- a store that stays ----------------------------------------------------------------------------------------------


def stored(source, folder, *more, **options):
    text = ",".join(f"{k}={v}" for k, v in {"host": "1MB", "disk": "1MB", **options}.items())
    return engine(source, f"prefix_store:{text},path={folder}", *more)


def test_a_restart_finds_the_prefix(source, want, tmp_path):
    e = stored(source, tmp_path)
    assert served(e, FIRST)[0] == (want[len(FIRST)], 0)
    e.close()
    e = stored(source, tmp_path, host="2MB", disk="3MB")
    assert served(e, FIRST)[0] == (want[len(FIRST)], 40)
    assert e.stats().restored_blocks == 10


def test_other_weights_or_plans_do_not(source, tmp_path):
    e = stored(source, tmp_path / "kv")
    served(e, FIRST)
    e.close()
    other = checkpoint(tmp_path / "other", LLAMA, seed=5)
    assert served(stored(other, tmp_path / "kv"), FIRST)[0][1] == 0
    assert served(stored(source, tmp_path / "kv", "kv_quant:dtype=fp8"), FIRST)[0][1] == 0
    assert served(stored(source, tmp_path / "kv"), FIRST)[0][1] == 40


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "gone"])
def test_a_damaged_file_is_computed_again(source, want, tmp_path, damage):
    e = stored(source, tmp_path)
    served(e, FIRST)
    e.close()
    e = stored(source, tmp_path, host=1)
    for file in tmp_path.glob("*.kv"):
        data = bytearray(file.read_bytes())
        if damage == "gone":
            file.unlink()
        elif damage == "flipped":
            data[-3] ^= 1
            file.write_bytes(bytes(data))
        else:
            file.write_bytes(bytes(data[: len(data) // 2 if damage == "truncated" else 0]))
    assert served(e, FIRST)[0] == (want[len(FIRST)], 0)
    e.blocks.check([])


def test_what_a_killed_process_left_is_cleaned(source, tmp_path):
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True,
                          check=True)  # fmt: skip
    (tmp_path / f"{'0' * 64}.{int(dead.stdout)}.tmp").write_bytes(b"half")
    (tmp_path / f"{'0' * 64}.{os.getpid()}.tmp").write_bytes(b"being written")
    stored(source, tmp_path)
    assert [f.name.split(".")[1] for f in tmp_path.glob("*.tmp")] == [str(os.getpid())]


def writing(send, source, folder):
    e = stored(source, folder, host=1)
    while True:
        served(e, FIRST, OTHER, list(range(200, 248)))
        e.blocks.store._files.clear()  # forgotten, so that they are written again and again
        send("written")


def test_killed_in_the_middle_of_writing(source, want, tmp_path):
    process = Fork(writing, source, tmp_path)
    for _ in range(3):
        assert process.answer() == "written"
    process.kill()
    process.wait()
    e = stored(source, tmp_path)
    for prompt in (FIRST, OTHER):
        tokens, found = served(e, prompt)[0]
        assert (tokens, found % 4) == (want[len(prompt)], 0)
    assert e.stats().restored_blocks > 0
    assert not list(tmp_path.glob("*.tmp"))


def test_a_disk_that_fills_costs_computation_alone(source, want, tmp_path):
    """The system refuses to write a whole block."""
    e = stored(source, tmp_path, host=1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK // 2, before[1]))
    try:
        assert [t for t, _ in served(e, FIRST, OTHER, FIRST)] == [want[len(p)] for p in (FIRST, OTHER, FIRST)]
        e.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path) == []


def test_the_disk_keeps_to_its_bytes(source, tmp_path):
    e = stored(source, tmp_path, host=1, disk=5 * BLOCK)
    served(e, FIRST, OTHER, FIRST)
    e.close()
    assert len(list(tmp_path.glob("*.kv"))) == 5


def test_a_folder_that_cannot_be_written(source, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        stored(source, tmp_path / "file")


def test_refusals(source):
    with pytest.raises(Incompatible, match="known by a version"):
        engine(source, "kv_offload", "multi_adapter")
    with pytest.raises(Incompatible, match="where blocks of the cache go"):
        engine(source, "kv_offload", "prefix_store")


# ---- layer by layer --------------------------------------------------------------------------------------------------


LONGER = [*FIRST, *range(60, 66)]
"""Begins like FIRST, and leaves a chunk to compute."""


def damaged(folder, layer, which=3):
    """One block's file with another byte in a layer's part; the file."""
    file = sorted(folder.glob("*.kv"))[which]
    data = bytearray(file.read_bytes())
    part = BLOCK // LLAMA["num_layers"]
    data[len(data) - BLOCK + layer * part + part // 2] ^= 1
    file.write_bytes(bytes(data))
    return file


@pytest.mark.parametrize("layer", range(LLAMA["num_layers"]))
def test_a_damaged_layer_is_found_in_the_middle_of_a_pass(source, tmp_path, caplog, layer):
    """A layer's part has a checksum of its own. Who shares what has just been restored is computed again with it, and
    others of the same pass are not."""
    prompts = {"a": LONGER, "b": [*FIRST, 80, 81], "other": OTHER[:9]}
    want = {name: served(engine(source, blocks=64), p)[0][0] for name, p in prompts.items()}
    e = stored(source, tmp_path)
    served(e, FIRST)
    e.close()
    damaged(tmp_path, layer)
    e = engine(source, f"prefix_store:host=1,disk=1MB,path={tmp_path}", blocks=64)
    again: list[str] = []
    compute_again = e.scheduler.compute_again
    e.scheduler.compute_again = lambda seq: (again.append(seq.group.request.id), compute_again(seq))
    tokens, _ = run(e, *(ask(name, p, 6) for name, p in prompts.items()))
    assert {name: t for (name, _), t in tokens.items()} == want
    assert again == ["a", "b"]
    assert e.stats().restored_blocks == 9
    assert "1 stored blocks of the cache are gone or damaged: what 2 sequences had" in caplog.text
    assert e.stats().preemptions == 0
    e.check()


def test_what_failed_once_is_stored_again(source, want, tmp_path):
    e = stored(source, tmp_path)
    served(e, FIRST)
    e.close()
    damaged(tmp_path, 1)
    for found in (None, 40):
        e = stored(source, tmp_path, host=1)
        answer = served(e, FIRST)[0]
        assert answer[0] == want[len(FIRST)]
        assert found is None or answer[1] == found
        e.close()


def test_a_file_that_vanishes_between_two_layers(source, want, tmp_path, monkeypatch):
    e = stored(source, tmp_path)
    served(e, FIRST)
    e.close()
    e = stored(source, tmp_path, host=1)
    victim = sorted(tmp_path.glob("*.kv"))[0]
    read = BlockStore._read

    def reading(self, coming, layer, into):
        if layer:
            victim.unlink(missing_ok=True)
        return read(self, coming, layer, into)

    monkeypatch.setattr(BlockStore, "_read", reading)
    assert served(e, FIRST)[0][0] == want[len(FIRST)]
    assert e.stats().restored_blocks == 9
    e.check()


def test_short_reads_are_continued(source, want, tmp_path, monkeypatch):
    """A read may return less than it was asked for (a signal, a network disk)."""
    e = stored(source, tmp_path)
    served(e, FIRST)
    e.close()
    e, whole = stored(source, tmp_path, host=1), os.preadv
    monkeypatch.setattr(os, "preadv", lambda f, into, at: whole(f, [into[0][: max(1, len(into[0]) // 3)]], at))
    assert served(e, FIRST)[0] == (want[len(FIRST)], 40)


def test_a_layer_is_computed_before_the_next_ones_are_there(source, want, tmp_path, monkeypatch):
    """Layer 1's reads wait until layer 0 has been computed."""
    e = stored(source, tmp_path)
    expected = served(engine(source, blocks=64), LONGER)[0][0]
    served(e, FIRST)
    e.close()
    e = stored(source, tmp_path, host=1)
    computed, read = threading.Event(), BlockStore._read
    e.runner.after_layer = lambda layer: computed.set()

    def reading(self, coming, layer, into):
        assert layer == 0 or computed.wait(60)
        return read(self, coming, layer, into)

    monkeypatch.setattr(BlockStore, "_read", reading)
    assert served(e, LONGER)[0] == (expected, 40)
    assert computed.is_set()


def test_files_of_the_format_before_are_ignored(source, want, tmp_path):
    e = stored(source, tmp_path)
    served(e, FIRST)
    e.close()
    for file in tmp_path.glob("*.kv"):  # as they were: one checksum, of the whole block
        data = file.read_bytes()
        body = data[-BLOCK:]
        file.write_bytes(b"RLKV0001" + data[8:40] + zlib.crc32(body).to_bytes(4, "little") + body)
    assert served(stored(source, tmp_path), FIRST)[0] == (want[len(FIRST)], 0)


def test_one_that_cannot_join_leaves_nothing_half_restored(source, want, tmp_path):
    """The pool is taken by another request: what was taken from the store for one that then has to wait is not there,
    and must not be found or saved as if it were."""
    e = stored(source, tmp_path, host="1MB")
    served(e, FIRST)
    e.close()
    e, left = engine(source, f"prefix_store:host=1MB,disk=1MB,path={tmp_path}", blocks=14), 0
    restore = e.blocks.restore

    def restoring():
        nonlocal left
        left += sum(not e.blocks.refs[b] for b in e.blocks.coming)
        return restore()

    e.blocks.restore = restoring
    tokens, _ = run(e, ask("long", OTHER[:15], 40), ask("first", FIRST, 6), ask("again", LONGER, 6))
    plain = engine(source, blocks=64)
    expected, _ = run(plain, ask("long", OTHER[:15], 40), ask("first", FIRST, 6), ask("again", LONGER, 6))
    assert tokens == expected
    assert left
    e.check()


def test_fair_shares_are_charged_once(source, tmp_path):
    """For a prompt that joins twice: what it computes in the end."""
    e = stored(source, tmp_path)
    served(e, FIRST)
    e.close()
    damaged(tmp_path, 0, which=0)
    e = stored(source, tmp_path, host=1)
    share(e.scheduler, "fair")
    run(e, replace(ask("r", FIRST, 1), client=b"c"))
    found = e.stats().cached_tokens
    assert e.scheduler.fair.served[b"c"] == pytest.approx(
        (len(FIRST) - found) * e.scheduler.fair.prompt_weight + e.scheduler.fair.output_weight
    )


# ---- the store -------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_goes_first():
    """Host memory for three blocks and a disk for two: of six, the last three, and the two before."""
    pool = [torch.arange(2 * 32 * 3, dtype=torch.float32).view(1, 2, 32, 3)]
    keys = [bytes([i]) * 32 for i in range(6)]
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        store = BlockStore([pool], 4, "x", 3 * 96, 2 * 96, Path(folder) / "kv")
        assert store.block_bytes == 96
        for i, key in enumerate(keys):
            store.save(key, i)
        assert [store.known([k]) for k in keys] == [0, 1, 1, 1, 1, 1]
        assert store.known(keys[1:]) == 5
        before = pool[0].clone()
        pool[0].zero_()
        assert store.restore(keys[1:4], [7, 6, 5]).finish() == set()
        for i, block in ((1, 7), (2, 6), (3, 5)):
            assert torch.equal(pool[0][:, :, 4 * block : 4 * block + 4], before[:, :, 4 * i : 4 * i + 4])
        store.close()
        assert not (Path(folder) / "kv").exists()
