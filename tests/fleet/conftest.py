import pytest

from ridgeline.fleet import members


@pytest.fixture
def often(monkeypatch):
    """Servers are asked for their state twenty times a second."""
    monkeypatch.setattr(members, "EVERY", 0.05)
