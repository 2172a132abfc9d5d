import pytest

pytest.importorskip("fastapi")

from tests.serve.running import running, tiny


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="module")
def server(folder):
    with running(folder) as s:
        yield s
