"""The container file's steps, carried out without a container: its wheel is built from what it copies, and serves where
there is no compiler."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from tests.serve.running import tiny

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "deploy/Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()


@pytest.mark.nightly  # compiles kernels for every level of instruction set; needs an index for the build backend
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")
def test_the_wheel_of_the_image_serves_without_a_compiler(tmp_path):
    context = tmp_path / "source"
    context.mkdir()
    for line in LINES:
        if line.startswith("COPY ") and "--from" not in line:
            *names, _ = shlex.split(line)[1:]
            for name in names:
                copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
                copy(ROOT / name, context / name)
    (build,) = [line.removeprefix("RUN ") for line in LINES if "pip wheel" in line]
    command = build.replace("pip wheel", f"{sys.executable} -m pip wheel").replace("/wheels", str(tmp_path / "wheels"))
    subprocess.run(command, shell=True, cwd=context, check=True, capture_output=True, timeout=600)
    (wheel,) = (tmp_path / "wheels").iterdir()
    installed = tmp_path / "installed"
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(installed), str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    model = tiny(tmp_path / "model")
    (start,) = [json.loads(line.removeprefix("CMD ")) for line in LINES if line.startswith("CMD ")]
    command = [sys.executable, "-m", "ridgeline", *[str(model) if a == "/model" else a for a in start], "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(installed), "PATH": str(tmp_path), "RIDGELINE_API_KEY": "key"}
    environment["RIDGELINE_HOME"] = str(tmp_path / "home")
    server = subprocess.Popen(command, env=environment, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    try:
        said = []
        for line in server.stderr:
            said.append(line)
            if "serving on" in line:
                break
        port = said[-1].rsplit(":", 1)[1].strip()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions",
            json.dumps({"model": "model", "prompt": "hello", "max_tokens": 4}).encode(),
            {"Content-Type": "application/json", "Authorization": "Bearer key"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 4
        assert not any("compiler" in line for line in said), said
        if Path("/proc").is_dir():
            assert str(installed / "ridgeline/nn/kernels/compiled") in Path(f"/proc/{server.pid}/maps").read_text()
        server.terminate()
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.wait()
