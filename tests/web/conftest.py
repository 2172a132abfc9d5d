"""One web app for all tests of a worker, with a store of its own, and one browser."""

import shutil
import socket
import threading
import time

import pytest
import uvicorn

from ridgeline.store import Store
from ridgeline.web.app import create_app


class Served:
    """An app behind a real socket."""

    def __init__(self, app):
        listening = socket.create_server(("127.0.0.1", 0))
        self.port = listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
        self.thread = threading.Thread(target=self.server.run, args=([listening],), daemon=True)

    def __enter__(self):
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        return self

    def __exit__(self, *_):
        self.server.should_exit = True
        self.thread.join()


@pytest.fixture(scope="session")
def store(tmp_path_factory):
    return Store(tmp_path_factory.mktemp("web") / "runs.sqlite")


@pytest.fixture(scope="session")
def site(store):
    with Served(create_app(store)) as served:
        yield served


@pytest.fixture(scope="module")
def browser():
    """Chromium as the system has it: nothing is downloaded. While Playwright runs, no other event loop can: a process
    may go on with tests of something else."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no chromium on this machine: pages are not tested here")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as p:
        found = p.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def page(browser, site):
    """A fresh page; what its console or its scripts complain of fails the test."""
    context = browser.new_context(base_url=site.url, viewport={"width": 1280, "height": 900}, accept_downloads=True)
    context.set_default_timeout(60_000)
    tab = context.new_page()
    trouble = []
    tab.on("pageerror", lambda e: trouble.append(str(e)))
    tab.on("console", lambda m: trouble.append(m.text) if m.type == "error" and "422" not in m.text else None)
    yield tab
    context.close()
    assert not trouble
