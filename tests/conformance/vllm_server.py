"""A pytest plugin for vLLM's own tests: their fixture starts `ridgeline serve` on a small model.

Loaded with ``-p vllm_server``, from within an unpacked source release of vLLM (see ``run.py``). Nothing is fetched: a
name of a model on the hub stands for a small checkpoint of its kind, with random weights, which ``RIDGELINE_MODELS``
(a folder) holds.
"""

import json
import os
import subprocess
import sys
import time

import anthropic
import httpx
import openai
import pytest
import tests.conftest as conftest
import tests.utils as theirs
import transformers
import vllm.config
import vllm.model_executor.model_loader.weight_utils as weights
import vllm.platforms
import vllm.tokenizers
import vllm.transformers_utils.repo_utils as hub
from models import folder_for, lora_for

VALUES = {
    "--max-model-len": "--max-model-len", "--max-num-seqs": "--max-num-seqs", "--port": "--port", "--host": "--host",
    "--max-num-batched-tokens": "--max-num-batched-tokens", "--tool-call-parser": "--tool-call-parser",
    "--reasoning-parser": "--reasoning-parser", "--root-path": "--root-path", "--chat-template": "--chat-template",
    "--served-model-name": "--served-model-name", "--api-key": "--api-key", "--max-logprobs": "--max-logprobs",
}  # fmt: skip
"""Options with a value, and ours."""
SWITCHES = (
    "--enable-auto-tool-choice",
    "--enable-force-include-usage",
    "--enable-per-request-metrics",
    "--return-tokens-as-token-ids",
)
WITHOUT_EFFECT = {
    "--dtype", "--seed", "--gpu-memory-utilization", "--runner", "--max-lora-rank", "--max-cpu-loras", "--convert",
    "--structured-outputs-config.backend", "--hf-overrides", "--load-format", "--reasoning-config", "--pooler-config",
    "--pooler-config.task", "--chat-template-content-format", "--limit-mm-per-prompt", "--default-chat-template-kwargs",
}  # fmt: skip
"""Options with a value that say nothing about the protocol, or what our server does by itself."""


STARTS = 600
"""Seconds in which a server must answer, also on a machine that is busy."""


class Server:
    """``ridgeline serve`` in a process of its own, with the interface of vLLM's ``RemoteOpenAIServer``."""

    show_hidden_metrics = False
    DUMMY_API_KEY = theirs.RemoteOpenAIServer.DUMMY_API_KEY

    def __init__(self, model, vllm_serve_args, *, env_dict=None, seed=0, auto_port=True, max_wait_seconds=None,
                 override_hf_configs=None, **_) -> None:  # fmt: skip
        args = [str(a) for a in vllm_serve_args]
        self.host, self.port = "127.0.0.1", theirs.get_open_port()
        command = [sys.executable, "-m", "ridgeline", "serve", str(folder_for(model)), "--generation-config", "vllm"]
        named, keys, loras = [model], [], []
        while args:
            name, _, value = args.pop(0).partition("=")
            if name in VALUES or name in WITHOUT_EFFECT or name == "--lora-modules":
                values = [value] if value else []
                while not value and args and not args[0].startswith("--"):
                    values.append(args.pop(0))
                if name == "--lora-modules":
                    loras = values
                elif name == "--served-model-name":
                    named = values
                elif name == "--api-key":
                    keys = values
                elif name == "--port":
                    self.port = int(values[0])
                elif name in VALUES and values:
                    command += [VALUES[name], *values]
            elif name in SWITCHES:
                command.append(name)
        env = {**os.environ, **(env_dict or {})}
        if env.get("VLLM_API_KEY"):
            keys.append(env["VLLM_API_KEY"])
        for key in keys:
            command += ["--api-key", key]
        key = keys[0] if keys else self.DUMMY_API_KEY
        command += ["--port", str(self.port), "--served-model-name", named[0], "--admin-key", key]
        env["PYTHONPATH"] = os.environ["RIDGELINE_SOURCE"]
        print("starting:", *command, flush=True)
        self.proc = subprocess.Popen(command, env=env)
        until = time.monotonic() + max(max_wait_seconds or 0, STARTS)
        while True:
            try:
                if httpx.get(self.url_for("health"), timeout=5).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            if self.proc.poll() is not None or time.monotonic() > until:
                self.proc.kill()
                raise RuntimeError(f"the server did not start: {self.proc.poll()}")
            time.sleep(0.1)
        for module in loras:  # NAME=PATH, or JSON
            name, _, path = module.partition("=")
            given = json.loads(module) if module.startswith("{") else {"name": name, "path": path}
            body = {"lora_name": given["name"], "lora_path": given["path"]}
            url = self.url_for("v1/load_lora_adapter")
            httpx.post(url, json=body, headers={"Authorization": f"Bearer {key}"}, timeout=60).raise_for_status()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.proc.terminate()
        try:
            self.proc.wait(20)
        except subprocess.TimeoutExpired:
            self.proc.kill()

    @property
    def url_root(self):
        return f"http://{self.host}:{self.port}"

    def url_for(self, *parts):
        return f"{self.url_root}/{'/'.join(p.strip('/') for p in parts if p)}"

    def _client(self, kind, base, more):
        return kind(base_url=base, api_key=self.DUMMY_API_KEY, **{"timeout": 120, "max_retries": 0, **more})

    def get_client(self, **more):
        return self._client(openai.OpenAI, self.url_for("v1"), more)

    def get_async_client(self, **more):
        return self._client(openai.AsyncOpenAI, self.url_for("v1"), more)

    def get_client_anthropic(self, **more):
        return self._client(anthropic.Anthropic, self.url_root, more)

    def get_async_client_anthropic(self, **more):
        return self._client(anthropic.AsyncAnthropic, self.url_root, more)


theirs.RemoteOpenAIServer = Server


def _local(make):
    """``make``, of the folder that stands for a model's name."""

    def made(name=None, *args, tokenizer_name=None, revision=None, **kwargs):
        return make(str(folder_for(name or tokenizer_name)), *args, **kwargs)

    return made


class _Hub:
    """The hub: what is asked of it is made here."""

    def snapshot_download(self, repo_id, **_):
        return str(lora_for(repo_id))

    def hf_hub_download(self, repo_id, filename, **_):
        return str(folder_for(repo_id) / filename)


vllm.tokenizers.get_tokenizer = theirs.get_tokenizer = _local(
    lambda folder, **_: transformers.AutoTokenizer.from_pretrained(folder)
)
transformers.AutoTokenizer.from_pretrained = staticmethod(_local(transformers.AutoTokenizer.from_pretrained))
transformers.AutoModel.from_pretrained = staticmethod(_local(transformers.AutoModel.from_pretrained))
transformers.AutoConfig.from_pretrained = staticmethod(_local(transformers.AutoConfig.from_pretrained))
conftest.maybe_model_redirect = lambda name: str(folder_for(name))
conftest.HfRunner.get_default_device = lambda _: "cpu"
hub.hf_api = _Hub
weights.download_weights_from_hf = lambda name, *_, **__: str(folder_for(name))
vllm.platforms.current_platform.device_count = lambda: 0


class _ModelConfig:
    """What the tests ask of vLLM's configuration of a model."""

    def __init__(self, model, **_):
        self.hf_config = transformers.AutoConfig.from_pretrained(str(folder_for(model)))

    def get_vocab_size(self):
        return self.hf_config.vocab_size


vllm.config.ModelConfig = _ModelConfig


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """A minute for each test: a server that does not answer must not hold up the rest."""
    for item in items:
        item.add_marker(pytest.mark.timeout(120))
        item.add_marker(pytest.mark.skip_global_cleanup)
