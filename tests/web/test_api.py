"""What the page is answered, against the library and the command line themselves."""

import http.server
import json
import math
import shlex
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ridgeline import catalog, experiments
from ridgeline.catalog import chips
from ridgeline.cli import app as commands
from ridgeline.hardware.device import chip_device
from ridgeline.predict import predict, predict_trace
from ridgeline.report.export import load_any
from ridgeline.search.chip_tables import chip_record
from ridgeline.search.design_space import read_space
from ridgeline.spec.device import Cluster
from ridgeline.spec.errors import UserError
from ridgeline.spec.model import ModelSpec
from ridgeline.store import Store
from ridgeline.web.app import create_app
from ridgeline.web.guard import Guard, hosts_of
from ridgeline.web.plans import EVENTS, timeline

ROOT = Path(__file__).parents[2]
QUESTION = {
    "model": "llama2-13b",
    "on": "8xrtx4090",
    "workload": {"kind": "finetune", "seq_len": 350, "batch_size": 8},
    "plan": ["zero:stage=3", "lora:rank=8"],
}


def call(site, path, body=None, headers=None, raw=False):
    """(status, answer)."""
    data = None if body is None else json.dumps(body).encode()
    given = {"Content-Type": "application/json"} if data else {}
    request = urllib.request.Request(f"{site.url}{path}", data, {**given, **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            text = answer.read().decode()
            return answer.status, text if raw else json.loads(text)
    except urllib.error.HTTPError as e:
        return e.code, json.loads(e.read())


# ---- plans ----------------------------------------------------------------------------------------------------------


def test_an_answer_is_the_librarys(site):
    status, found = call(site, "/api/plan", QUESTION)
    assert status == 200
    e = experiments.make(QUESTION["model"], QUESTION["on"], QUESTION["workload"], QUESTION["plan"])
    expected = json.loads(predict(e).to_json())
    found["result"].pop("created"), expected.pop("created")
    assert found["result"] == expected
    assert found["cluster"]["memory_bytes"] == e.cluster.device.memory_bytes
    assert found["states"]["lora"]["state"] == "on"
    assert found["tree"]["seconds"] == expected["metrics"]["step_time_s"]["value"]


CHIP = {"model": "llama2-7b", "on": "4xchip:ga100", "plan": ["tensor_parallel:degree=4"],
        "workload": {"kind": "generate", "batch_size": 8, "prompt_len": 512, "output_len": 128}}  # fmt: skip


def test_a_chip_is_that_of_the_command_line(site):
    status, found = call(site, "/api/plan", CHIP)
    assert status == 200
    device = chip_device(chips.chip("ga100"))
    e = experiments.make(CHIP["model"], Cluster(device=device, devices_per_node=4), CHIP["workload"], CHIP["plan"])
    assert found["result"]["metrics"] == json.loads(predict(e).to_json())["metrics"]
    shown = CliRunner().invoke(commands, ["hardware", "show", "ga100", "--json"])
    chip = found["chip"]
    assert json.loads(shown.stdout).items() <= chip.items()
    assert chip["total_mm2"] == pytest.approx(sum(chip["area_mm2"].values()))
    speed = found["result"]["metrics"]["tokens_per_s"]["value"]
    assert chip["tokens_per_s_per_dollar"] == pytest.approx(speed / 4 / (chip["die_dollars"] + chip["memory_dollars"]))
    for o in chip["operators"]:  # none is above its roofs
        assert o["rate"] <= 1.001 * max(chip["peak_flops"].values())
    assert call(site, "/api/plan", QUESTION)[1]["chip"] is None


def test_a_changed_design_is_one_of_a_sweep(site, tmp_path):
    changes = {
        "cores": 64,
        "memory.channels": 3,
        "cache_bytes": 2e7,
        "clock": 1e9,
        "core.array.rows": 32,
        "links.count": 6,
    }
    chip = call(site, "/api/plan", {**CHIP, "device": changes})[1]["chip"]
    own = chips.chip("ga100")
    half = f"active = {round(own.memory.active / 2)}, bytes = {own.memory.bytes / own.memory.channels * 3}"
    memory = f"{{ channels = 3, {half} }}"
    (tmp_path / "space.toml").write_text(
        f'base = "ga100"\n[vary]\ncores = [64]\nmemory = [{memory}]\ncache_bytes = [20000000]\nclock = [1e9]\n'
        '"core.array.rows" = [32]\n"links.count" = [6]\n'
    )
    design, _ = next(read_space(tmp_path / "space.toml").designs())
    expected = chip_record(design, chips.prices("2023-10"), "spare")
    for name in (
        "peak_flops",
        "memory_bandwidth",
        "memory_bytes",
        "area_mm2",
        "watts",
        "die_dollars",
        "memory_dollars",
    ):
        assert chip[name] == pytest.approx(expected[name]), name


@pytest.mark.parametrize(("change", "says"), [
    ({"on": "2x4xchip:ga100"}, "chips have no network"), ({"on": "chip:x"}, "unknown chip"),
    ({"device": {"watts": 1}}, "has no figure 'watts'"), ({"on": "0xchip:ga100"}, "is not a node of chips"),
    ({"on": "xchip:ga100"}, "is not a node of chips"), ({"on": "\u00b2xchip:ga100"}, "is not a node of chips"),
    ({"on": f"{'9' * 5000}xchip:ga100"}, "is not a node of chips"), ({"device": {"cores": math.nan}}, "cores = nan"),
    ({"device": {"clock": math.inf}}, "clock = inf"), ({"device": {"clock": 1e300}}, "clock = 1e+300"),
    ({"device": {"memory.channels": 0}}, "memory.channels = 0"), ({"device": {"cores": -5}}, "cores = -5"),
    ({"device": {"core.array.rows.x": 1}}, "has no figure 'core.array.rows.x'"),
])  # fmt: skip
def test_chips_that_are_none(site, change, says):
    status, found = call(site, "/api/plan", {**CHIP, **change})
    assert status == 422
    assert says in f"{found['error']['what']} {found['error']['fix']}"


def test_the_command_it_shows_gives_the_same(site):
    for question in (
        QUESTION,
        {"model": "llama2-7b", "on": "a100-80g-sxm", "workload": {"kind": "serve", "rate": 2.5, "engine": "vllm"}},
        {"model": "llama2-7b", "on": "a100-80g-sxm", "workload": {"kind": "serve", "rate": 2.3456789}},
        {"model": "llama2-7b", "on": "2x8xa100-80g-sxm", "workload": {"kind": "pretrain"}, "plan": ["zero:stage=1"]},
    ):
        _, found = call(site, "/api/plan", question)
        words = shlex.split(found["command"])
        assert words[0] == "ridgeline"
        shown = json.loads(CliRunner().invoke(commands, [*words[1:], "--json"]).stdout)
        assert shown["metrics"] == found["result"]["metrics"]


def test_the_file_it_offers_gives_the_same(site, tmp_path):
    _, found = call(site, "/api/plan", QUESTION)
    file = tmp_path / "plan.toml"
    file.write_text(found["toml"], encoding="utf-8")
    again = json.loads(predict(experiments.load(file)).to_json())
    assert again["metrics"] == found["result"]["metrics"]


def test_a_refusal_is_the_librarys_own(site):
    _, found = call(site, "/api/plan", QUESTION)
    refused = {name: s["why"] for name, s in found["states"].items() if s["state"] == "refused"}
    assert "tensor_parallel" not in refused
    for name in ("qlora", "gptq"):
        with pytest.raises(UserError) as caught:
            experiments.make(QUESTION["model"], QUESTION["on"], QUESTION["workload"], [*QUESTION["plan"], name])
        assert refused[name].startswith(caught.value.what)


def test_changed_figures_change_the_answer(site):
    nvlink = {**QUESTION, "on": "8xa100-80g-sxm"}
    fast = call(site, "/api/plan", {**nvlink, "device": {"memory_bytes": 80e9}})[1]
    slow = call(site, "/api/plan", {**nvlink, "device": {"link.bandwidth": 2e9}})[1]
    speed = [x["result"]["metrics"]["tokens_per_s"]["value"] for x in (slow, fast)]
    assert speed[1] > 2 * speed[0]
    assert fast["cluster"]["memory_bytes"] == 80e9
    assert call(site, "/api/plan", {**QUESTION, "device": {"watts_": 3}})[0] == 422
    assert call(site, "/api/plan", {**QUESTION, "device": {"memory_bandwidth": -3}})[0] == 422


def test_a_pasted_config_is_the_model_that_it_describes(site):
    config = {"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 10, "num_attention_heads": 16,
              "num_key_value_heads": 4, "intermediate_size": 5632, "vocab_size": 32000,
              "max_position_embeddings": 2048}  # fmt: skip
    _, found = call(site, "/api/plan", {**QUESTION, "model": config})
    e = experiments.make(ModelSpec.from_config(config), QUESTION["on"], QUESTION["workload"], QUESTION["plan"])
    assert found["result"]["metrics"]["tokens_per_s"]["value"] == predict(e).metrics["tokens_per_s"].value


def test_remedies_fit_as_they_say(site):
    _, found = call(site, "/api/plan", {**QUESTION, "plan": ["zero:stage=3"]})
    assert found["result"]["status"] == "infeasible"
    _, remedies = call(site, "/api/remedies", {**QUESTION, "plan": ["zero:stage=3"]})
    assert remedies
    for remedy in remedies:
        if remedy["call"]:
            _, then = call(site, "/api/plan", {**QUESTION, "plan": ["zero:stage=3", remedy["call"]]})
            assert (then["result"]["status"] == "ok") == remedy["fits"]
            assert then["result"]["metrics"]["peak_bytes"]["value"] == remedy["peak_bytes"]
    fits = [r["fits"] for r in remedies]
    assert fits == sorted(fits, reverse=True)


DEEP = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 10**9, "num_attention_heads": 1,
        "intermediate_size": 8, "vocab_size": 10}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"model": "llama9"}, {"on": "8xrtx9090"}, {"plan": ["zeroo"]}, {"plan": ["zero:stage=9"]},
        {"workload": {"kind": "dance"}}, {"workload": {"kind": "finetune", "batch_size": -1}}, {"model": {}},
        {"device": {"link": 1}}, {"device": {"name": 1}}, {"device": {"name.a": 1}}, {"device": {"link.a.b": 1}},
        {"device": {"memory_bandwidth": math.nan}}, {"on": f"{'9' * 180}xa100-80g-sxm"}, {"on": "a" * 5000},
        {"model": "a" * 5000}, {"model": DEEP},
    ],
)  # fmt: skip
def test_mistakes_are_one_message(site, change):
    status, found = call(site, "/api/plan", {**QUESTION, **change})
    assert status == 422
    assert found["error"]["what"]


@pytest.mark.parametrize(
    "change",
    [
        {"model": "/etc/hostname"}, {"model": "./config.json"}, {"on": "/etc/x.toml"}, {"on": "8x~/x.toml"},
        {"workload": {"kind": "serve", "trace": "/etc/passwd"}}, {"workload": {"kind": "finetune", "data": "/etc"}},
        {"workload": {"kind": "serve"}, "plan": ["speculative:draft=/etc/passwd"]},
    ],
)  # fmt: skip
def test_no_file_is_read_for_a_page(site, change):
    status, found = call(site, "/api/plan", {**QUESTION, **change})
    assert status == 422
    assert "JSON" not in found["error"]["what"]  # of what is in a file


@pytest.mark.parametrize("on", ["box.toml", "8xbox.toml", "a100-80g-sxm+box.toml"])
def test_no_device_is_read_from_the_folder_where_it_was_started(site, on, tmp_path, monkeypatch):
    (tmp_path / "box.toml").write_text("secret = 1")
    monkeypatch.chdir(tmp_path)
    status, found = call(site, "/api/plan", {**QUESTION, "on": on})
    assert status == 422
    assert "not in the catalog" in found["error"]["what"]


def test_a_timeline_of_many_operators_is_merged():
    e = experiments.make("llama2-70b", "8xa100-80g-sxm", {"kind": "pretrain"}, ["zero:stage=3", "recompute"])
    events = predict_trace(e)
    end = max(v.start + v.seconds for v in events)
    many = [*events, *(type(v)(v.name, v.stream, v.start + end, v.seconds, v.phase) for v in events)] * 8
    for found in (timeline(events), timeline(many)):
        assert 0 < len(found) <= max(EVENTS, len({v.stream for v in events}))
    assert max(b[4] for b in timeline(events)) == pytest.approx(end)
    assert {b[0] for b in timeline(many)} == {v.stream for v in events}
    busy = {s: sum(v.seconds for v in events if v.stream == s) for s in {v.stream for v in events}}
    for stream, seconds in busy.items():
        assert sum(b[4] - b[3] for b in timeline(events) if b[0] == stream) >= 0.999 * seconds
    assert timeline([]) == []


def test_a_search_ends_in_the_answer_of_the_library(site):
    small = {"model": "llama2-7b", "on": "2xa100-80g-sxm", "workload": {"kind": "pretrain", "seq_len": 512}}
    _, text = call(site, "/api/search", {**small, "goal": "throughput"}, raw=True)
    events = [json.loads(line[6:]) for line in text.splitlines() if line]
    best = events[-1]["answer"]["best"]
    assert best
    given = CliRunner().invoke(commands, ["plan", "llama2-7b", "--on", "2xa100-80g-sxm", "--seq-len", "512", "--json"])
    assert [b["plan"] for b in json.loads(given.stdout)["best"]] == [b["plan"] for b in best]
    assert any("at" in e for e in events)


def test_a_search_that_cannot_be_is_one_message(site):
    assert call(site, "/api/search", {**QUESTION, "goal": "luck"})[0] == 422


def test_the_matrix_is_symmetric_and_says_what_is_refused(site):
    question = {**QUESTION, "plan": ["zero:stage=3"], "techniques": ["lora", "qlora", "recompute"]}
    _, cells = call(site, "/api/matrix", question)
    assert "why" in cells[0][1]
    assert cells[0][2]["ratio"] == pytest.approx(cells[2][0]["ratio"])
    assert cells[2][2]["ratio"] < 1  # recomputation alone costs time


# ---- runs -----------------------------------------------------------------------------------------------------------


def test_runs_are_found_sorted_and_tagged(site, store):
    e = experiments.make("llama2-7b", "a100-80g-sxm", {"kind": "pretrain"}, ["mixed_precision"], name="tagged")
    run = store.add_result(predict(e))
    assert call(site, f"/api/runs/{run}/tags", {"tags": ["b", " a ", "a"]}) == (200, ["a", "b"])
    _, found = call(site, "/api/runs?name=tagg&tag=a")
    assert [r["id"] for r in found["runs"]] == [run]
    assert found["runs"][0]["tags"] == ["a", "b"]
    assert found["tags"] == ["a", "b"]
    _, one = call(site, f"/api/runs/{run}")
    assert one["kind"] == "result"
    assert one["tree"]["seconds"] == predict(e).metrics["step_time_s"].value
    assert call(site, "/api/runs?sort=id;drop")[0] == 422
    assert call(site, "/api/runs/ffffffffffff")[0] == 422
    assert call(site, f"/api/runs/{run}/tags", {"tags": ["x" * 99]})[0] == 422


def test_a_page_of_runs_beyond_all_of_them(site):
    assert call(site, f"/api/runs?offset={(1 << 63) - 1}")[1]["runs"] == []
    assert call(site, f"/api/runs?offset={1 << 63}")[0] == 422


def test_the_catalog_is_whole(site):
    _, found = call(site, "/api/catalog")
    assert [m["name"] for m in found["models"]] == catalog.models()
    assert {d["name"] for d in found["devices"]} >= set(catalog.devices())
    assert {s["name"] for s in found["systems"]} == set(catalog.systems())


def test_measurements_of_a_technique_are_those_of_stored_ablations(site, store):
    ablation = load_any(ROOT / "benchmarks" / "results" / "quickstart.json")
    run = store.add_ablation(ablation)
    _, rows = call(site, "/api/techniques/recompute/measured")
    mine = [r for r in rows if r["run"] == run]
    having = [o for o in ablation.outcomes if o.speedup and any(c.startswith("recompute") for c in o.plan)]
    assert [r["plan"] for r in mine] == [o.plan for o in having]
    assert [r["speedup"] for r in mine] == [o.speedup.value for o in having]
    assert having
    status, answer = call(site, "/api/techniques/recomputed/measured")
    assert status == 422
    assert "recompute" in answer["error"]["fix"]


class Recorder(http.server.BaseHTTPRequestHandler):
    """An inference server that keeps what it was asked and answers with nothing."""

    asked = []

    def do_POST(self):
        self.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_):
        """Quiet."""


def test_the_playground_keeps_a_request_apart_from_the_prefix_cache(store):
    from tests.web.conftest import Served

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Recorder) as peer:
        threading.Thread(target=peer.serve_forever, daemon=True).start()
        with Served(create_app(store, f"http://127.0.0.1:{peer.server_port}")) as served:
            ask = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
            for more in ({}, {"prefix_cache": False}, {"prefix_cache": False}):
                request = urllib.request.Request(
                    f"{served.url}/api/chat", json.dumps({**ask, **more}).encode(), {"Content-Type": "application/json"}
                )
                urllib.request.urlopen(request).read()
        peer.shutdown()
    plain, first, second = Recorder.asked
    assert "cache_salt" not in plain
    assert "prefix_cache" not in first
    assert first["cache_salt"] != second["cache_salt"]


# ---- who may ask ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
        ({}, 200),
    ],
)
def test_requests_of_other_sites_are_refused(site, headers, status):
    assert call(site, "/api/plan", QUESTION, headers)[0] == status


def test_a_form_cannot_post(site):
    assert call(site, "/api/plan", QUESTION, {"Content-Type": "text/plain"})[0] == 415


def test_headers_keep_other_pages_out(site):
    with urllib.request.urlopen(f"{site.url}/") as answer:
        assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
        assert "default-src 'self'" in answer.headers["Content-Security-Policy"]


def test_a_token_is_needed_beyond_this_machine(store):
    from tests.web.conftest import Served

    with Served(create_app(store, hosts=hosts_of("0.0.0.0"), token="right")) as site:
        assert call(site, "/api/catalog")[0] == 401
        assert call(site, "/api/catalog", headers={"Authorization": "Bearer wrong"})[0] == 401
        assert call(site, "/api/catalog", headers={"Cookie": "ridgeline-token=wrong"})[0] == 401
        assert call(site, "/api/catalog", headers={"Authorization": "Bearer right"})[0] == 200
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        page = opener.open(f"{site.url}/?token=right").read().decode()
        assert '<div id="app">' in page
        assert json.load(opener.open(f"{site.url}/api/catalog"))["models"]
    with pytest.raises(ValueError, match="token"):
        Guard(None, None, "")


def test_hosts():
    assert "example.org" in hosts_of("example.org")
    assert hosts_of("0.0.0.0") is None
    assert hosts_of("::") is None
    assert "[::1]" in hosts_of("::1")


@pytest.mark.parametrize(
    ("options", "says"), [(["--token", ""], "empty"), (["--server", "file:///etc"], "not an address")]
)
def test_command_line_mistakes(options, says):
    found = CliRunner().invoke(commands, ["web", *options])
    assert says in str(found.exception)


def test_a_page_that_was_not_built_is_named(tmp_path):
    with pytest.raises(UserError, match="not in this installation"):
        create_app(Store(tmp_path / "runs.sqlite"), static=tmp_path)
