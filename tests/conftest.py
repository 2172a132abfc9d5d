"""For every test: Ridgeline's own files go to a temporary directory, and torch uses one thread."""

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # also for the processes that tests start

import pytest


@pytest.fixture(autouse=True)
def _own_home(tmp_path_factory, monkeypatch):
    """Nothing touches the user's profile, cache or store, and no test leaves a stand-in for this machine behind."""
    from ridgeline import catalog

    monkeypatch.setenv("RIDGELINE_HOME", str(tmp_path_factory.mktemp("home")))
    monkeypatch.setattr(catalog, "_unprobed", [])


@pytest.fixture(autouse=True)
def _one_thread():
    """Only where torch is already loaded: half of the tests need none."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
