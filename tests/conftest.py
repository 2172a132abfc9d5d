"""For every test: Ridgeline's own files go to a temporary directory, torch uses one thread (``OMP_NUM_THREADS``)."""

import fcntl
import gc
import itertools
import os
import pickle
import sys
from importlib.metadata import version
from pathlib import Path

import ridgeline

ROOT = Path(__file__).parents[1]
os.environ.setdefault("OMP_NUM_THREADS", "1")  # also for the processes that tests start
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # they would compile every module again
sys.dont_write_bytecode = False
# The same for all: ranks of jobs are forked from one process for each of these paths.
if Path(ridgeline.__file__).is_relative_to(ROOT):  # not where an installed wheel is tested
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
HOME = ROOT / ".pytest_cache" / "home"
os.environ["RIDGELINE_HOME"] = str(HOME)  # while tests are collected
# On a machine with a GPU too, tests run on the CPU, which they expect; the kernels' own are asked for natively.
NATIVE = os.environ.get("RIDGELINE_TESTS_ON_GPU") == "1" and "+cpu" not in version("torch")
if not (NATIVE and Path("/dev/nvidiactl").exists()):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

settings.register_profile("nightly", max_examples=300, deadline=None)
settings.register_profile("day", max_examples=30, deadline=None, derandomize=True)  # the same examples in every run
settings.load_profile("day")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is imported and collected stays: no search for garbage goes through it, now and between the tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
        gc.set_threshold(*gc.get_threshold()[:2], 50)  # what tests import later is as large, and stays too


@pytest.fixture(scope="session")
def _homes(tmp_path_factory):
    """Homes, empty but for compiled kernels, which all share, those of the next run too: a file for each source. A
    home in which a test has left nothing is the next one's. ``mktemp`` would list all earlier homes each time."""
    folder = tmp_path_factory.mktemp("homes")
    kernels = HOME / "cache" / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)

    def homes():
        for n in itertools.count():
            cache = folder / str(n) / "cache"
            cache.mkdir(parents=True)
            (cache / "kernels").symlink_to(kernels, target_is_directory=True)
            yield cache.parent
            while os.listdir(cache.parent) == ["cache"] and os.listdir(cache) == ["kernels"]:
                yield cache.parent

    return homes()


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """``once(name, make)``: what ``make()`` returns, pickled by the first process of a run that asks for it. Processes
    that help another with its file, and those that come back to a file, would make again what its tests share."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder

    def shared(name, make):
        file = folder / f"once-{name}"
        with (folder / f"once-{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not file.exists():
                made = pickle.dumps(make())
                file.write_bytes(made)
            return pickle.loads(file.read_bytes())

    return shared


@pytest.fixture(autouse=True)
def _own_home(_homes, monkeypatch):
    """Nothing touches the user's profile, cache or store, and no test leaves a stand-in for this machine behind."""
    from ridgeline import catalog

    monkeypatch.setenv("RIDGELINE_HOME", str(next(_homes)))
    monkeypatch.setattr(catalog, "_unprobed", [])


@pytest.fixture(autouse=True)
def _threads():
    """Only where torch is already loaded: half of the tests need none."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
