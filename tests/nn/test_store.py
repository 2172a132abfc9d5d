"""The tiered store: what comes back is what went in, every move is counted, and a bad folder is one clear message."""

import errno
import os
import shutil
from collections import namedtuple

import pytest
import torch

from ridgeline.nn.memory import tiered_store as module
from ridgeline.nn.memory.meter import Meter
from ridgeline.nn.memory.tiered_store import TieredStore, check_folder, is_host, making, mark_host, on_host
from ridgeline.spec.errors import UserError

CPU = torch.device("cpu")
TIERS = ("cpu", "disk")


def tensors(seed=0):
    g = torch.Generator().manual_seed(seed)
    return [
        torch.randn(33, 7, generator=g),
        torch.randn(5, generator=g).bfloat16(),
        torch.arange(-3, 4, dtype=torch.int8),
        torch.empty(0),
    ]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def blank():
    return [torch.zeros_like(t) for t in tensors()]


@pytest.fixture(params=["direct", "buffered"])
def disk(request, tmp_path, monkeypatch):
    """A store with a disk tier: with O_DIRECT if the file system has it, and as if it refused."""
    if request.param == "buffered":
        whole = os.open

        def refuse(path, flags, *more):
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return whole(path, flags, *more)

        monkeypatch.setattr(module.os, "open", refuse)
    made = TieredStore(CPU, tmp_path / "made for it", 10**6)
    assert made.direct == (request.param == "direct") or request.param == "direct"
    return made


@pytest.mark.parametrize("tier", TIERS)
def test_what_comes_back_is_what_went_in(tier, disk):
    for i in range(6):
        disk.put(f"k{i}", tensors(i), tier)
    disk.finish()
    for i in reversed(range(6)):
        if i:
            disk.prefetch(f"k{i - 1}")
        back = blank()
        disk.get(f"k{i}", back)()
        assert same(back, tensors(i))
    disk.drop("k3")
    assert "k3" not in disk
    assert "k4" in disk


@pytest.mark.parametrize("tier", TIERS)
def test_work_between_open_and_close_stays(tier, disk):
    host = disk.put("k", tensors(), tier)
    assert all((t.untyped_storage().nbytes() == 0) == (tier == "disk" or not t.numel()) for t in host)
    for _ in range(3):
        opened = disk.open("k")
        assert opened is host
        opened[0].mul_(2)
        disk.close("k")
    disk.open("k")[0].mul_(100) if tier == "disk" else None
    disk.close("k", changed=False)
    back = blank()
    disk.prefetch("k")  # behind the last write
    disk.get("k", back)
    assert torch.equal(back[0], tensors()[0] * 8)


@pytest.mark.parametrize("tier", TIERS)
def test_sums_and_their_norms(tier, disk):
    a, b = tensors(1)[:2], tensors(2)[:2]
    disk.put("g", a, tier)
    disk.send("g", a)
    norms = disk.send("g", b, add=True)
    want = [x + y for x, y in zip(a, b, strict=True)]
    if tier == "cpu":
        assert norms is None, "they are at hand"
    else:
        assert same(norms, [w.norm() for w in want])
    got = [torch.zeros_like(t) for t in a]
    disk.get("g", got)
    assert same(got, want)


def test_a_read_ahead_does_not_survive_a_write(disk):
    disk.put("k", tensors(1)[:2], "disk")
    disk.prefetch("k")
    disk.send("k", tensors(2)[:2])
    back = blank()[:2]
    disk.get("k", back)
    assert same(back, tensors(2)[:2])


def test_every_move_is_counted(disk):
    some = tensors()[:2]
    size = sum(t.nbytes for t in some)
    disk.put("k", some, "disk")
    disk.prefetch("k")
    disk.get("k", [torch.zeros_like(t) for t in some])
    disk.send("k", some)
    disk.send("k", some, add=True)
    disk.finish()
    counted = {n: (t.bytes, t.count) for n, t in disk.traffic.items()}
    assert counted == {"d2h": (2 * size, 2), "h2d": (size, 1), "disk_read": (2 * size, 2), "disk_write": (3 * size, 3)}
    assert all(t.bandwidth > 0 for t in disk.traffic.values())
    assert (disk.size("disk"), disk.size("cpu")) == (size, 0)


def test_the_file_is_gone_whatever_happens(disk):
    disk.put("k", tensors(), "disk")
    disk.finish()
    assert list(disk.folder.iterdir()) == []


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/x cannot be written \(Not a directory\)") as error:
        TieredStore(CPU, tmp_path / "file" / "x", 5_000_000_000)
    assert "5.00 GB (5000000000 bytes)" in error.value.what
    assert "path=" in error.value.fix


def test_a_folder_that_is_too_small(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 9, 3_000))
    with pytest.raises(UserError, match="has 3000 bytes free, 4096 bytes are needed") as error:
        check_folder(tmp_path, 4096)
    assert "free 1096 bytes there" in error.value.fix
    check_folder(tmp_path, 3_000)


def test_space_that_goes_before_it_is_reserved(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.os, "posix_fallocate", full)
    with pytest.raises(UserError, match="are needed"):
        TieredStore(CPU, tmp_path, 4096)


def test_host_memory_is_not_the_devices():
    meter = Meter(torch.nn.Linear(1, 1))
    with meter:
        with on_host():
            host = torch.ones(1000)
        marked = mark_host(torch.empty(500))
        device = torch.zeros(10)
        device.sum()
        marked.add_(1)
        with making("activations"), on_host():
            inner = torch.ones(10)
    assert is_host(marked.untyped_storage())
    assert meter.host == host.nbytes + marked.nbytes + inner.nbytes == meter.peak.host
    assert meter.peak.total <= device.nbytes + 4 + 2000, "all but a moment before it was marked"


def test_resized_storage_is_measured_when_it_is_used_again():
    meter = Meter(torch.nn.Linear(1, 1))
    with meter:
        t = torch.ones(1000)
        t.untyped_storage().resize_(0)
        meter.require("now")
        assert meter.total == 0
        t.untyped_storage().resize_(4000)
        t.zero_()
        assert meter.total == 4000


def test_a_limit_is_kept():
    meter = Meter(torch.nn.Linear(1, 1), limit=5000)
    with meter:
        torch.ones(1000)
        held = torch.ones(1000)
        with pytest.raises(torch.OutOfMemoryError, match=r"limited to 0\.0 MB: activations"):
            torch.ones(1000)
        del held
        torch.ones(1000)
