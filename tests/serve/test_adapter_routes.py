"""Adapters that come and go while the server runs."""

import json

import pytest
from tests.serve.running import lora, running
from tests.serve.test_reliability import LONG, Slow, call, error, opened

from ridgeline.spec.errors import UserError

BODY = {"prompt": "one prompt for all of them", "max_tokens": 12, "ignore_eos": True, "temperature": 0.0, "logprobs": 0}


@pytest.fixture(scope="module")
def server(folder):
    with running(folder, plan=["multi_adapter"], keys=["k"], admin=["boss"]) as s:
        yield s


@pytest.fixture(scope="module")
def adapter(server, tmp_path_factory):
    return lora(tmp_path_factory.mktemp("lora"), server.engine.model)


def admin(server, verb, **body):
    return call(server, f"/v1/{verb}_lora_adapter", body, key="boss")


def said(server, model):
    status, _, text = call(server, "/v1/completions", {**BODY, "model": model}, key="k")
    assert status == 200, text
    return json.loads(text)["choices"][0]["logprobs"]["token_logprobs"]


def test_an_adapter_is_loaded_used_and_unloaded(server, adapter):
    base = said(server, "tiny")
    assert call(server, "/v1/completions", {**BODY, "model": "mine"}, key="k")[0] == 404
    assert admin(server, "load", lora_name="mine", lora_path=str(adapter))[0] == 200
    listed = json.loads(call(server, "/v1/models", key="k")[2])["data"]
    assert [(m["id"], m["parent"]) for m in listed] == [("tiny", None), ("mine", "tiny")]
    assert said(server, "mine") != base
    assert said(server, "tiny") == pytest.approx(base, abs=1e-4)
    assert admin(server, "unload", lora_name="mine")[0] == 200
    assert call(server, "/v1/completions", {**BODY, "model": "mine"}, key="k")[0] == 404
    assert admin(server, "unload", lora_name="mine")[0] == 404


def test_an_adapter_in_use_stays(folder, adapter):
    with running(folder, plan=["multi_adapter"], admin=["boss"]) as server, Slow(server.engine, 0.01):
        assert admin(server, "load", lora_name="mine", lora_path=str(adapter))[0] == 200
        s = opened(server, {**LONG, "model": "mine"})
        server.wait(lambda: server.engine.groups)
        status, _, text = admin(server, "unload", lora_name="mine")
        assert status == 400
        assert "using" in error(text)["message"]
        assert [m["id"] for m in service_models(server)] == ["tiny", "mine"]
        s.close()
        server.wait(lambda: not server.engine.groups)
        assert admin(server, "unload", lora_name="mine")[0] == 200


def test_an_adapter_is_replaced_in_place(server, adapter, tmp_path_factory):
    other = lora(tmp_path_factory.mktemp("other"), server.engine.model, seed=5)
    base = said(server, "tiny")
    for folder in (adapter, other):
        assert admin(server, "load", lora_name="one", lora_path=str(folder), load_inplace=True)[0] == 200
        free = server.engine.blocks.borrowed
    found = said(server, "one")
    assert admin(server, "load", lora_name="two", lora_path=str(other))[0] == 200
    assert said(server, "two") == pytest.approx(found, abs=1e-4)
    assert found != pytest.approx(base, abs=1e-4)
    assert server.engine.blocks.borrowed == 2 * free
    status, _, text = admin(server, "load", lora_name="one", lora_path=str(adapter))
    assert status == 400
    assert "already been loaded" in error(text)["message"]
    assert admin(server, "load", lora_name="one", lora_path="/nowhere", load_inplace=True)[0] == 404
    assert said(server, "one") == pytest.approx(found, abs=1e-4)
    for name in ("one", "two"):
        assert admin(server, "unload", lora_name=name)[0] == 200


def service_models(server):
    return json.loads(call(server, "/v1/models")[2])["data"]


def test_only_the_admin_changes_adapters(server, adapter):
    body = {"lora_name": "x", "lora_path": str(adapter)}
    assert call(server, "/v1/load_lora_adapter", body, key="k")[0] == 401
    assert call(server, "/v1/load_lora_adapter", body)[0] == 401
    status, _, text = admin(server, "load", lora_name="x", lora_path="/nowhere")
    assert status == 404
    assert "nowhere" in error(text)["message"]
    assert admin(server, "load", lora_name="x", lora_path="a" * 300)[0] == 404
    assert admin(server, "load", lora_name="tiny", lora_path=str(adapter))[0] == 400


def test_a_folder_of_adapters_is_served_from_the_start(folder, adapter, tmp_path):
    from tests.serve.running import Running

    (tmp_path / "first").symlink_to(adapter)
    server = Running(folder, plan=["multi_adapter"])
    order, engine = [], server.engine
    plain, engine.warm_up_adapters = engine.load_adapter, lambda: order.append("captured")
    engine.load_adapter = lambda name, path: order.append(name) or plain(name, path)
    server.service.load_all(tmp_path)
    assert order == ["first", "captured"]
    server.start()
    try:
        assert [m["id"] for m in service_models(server)] == ["tiny", "first"]
        assert call(server, "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "b"})[0] == 403
    finally:
        server.stop()


def test_an_adapter_named_like_the_model_is_refused(folder, adapter, tmp_path):
    from tests.serve.running import Running

    (tmp_path / "tiny").symlink_to(adapter)
    server = Running(folder, plan=["multi_adapter"])
    with pytest.raises(UserError, match="name of the model"):
        server.service.load_all(tmp_path)
    assert [m["id"] for m in server.service.models()] == ["tiny"]
