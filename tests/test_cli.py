"""The command line: exit codes, messages, clean streams, a quick start."""

import ast
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from ridgeline import catalog, cli, experiments
from ridgeline.cli.base import ctrl_c_between_steps, data_override
from ridgeline.cli.other_options import OTHERS
from ridgeline.spec.plan import Plan
from ridgeline.techniques.matrix import CPU
from ridgeline.techniques.registry import make


@pytest.fixture
def ridgeline(monkeypatch, capsys):
    """Run the command line in this process: (exit code, standard output, standard error)."""

    def _run(*args):
        monkeypatch.setattr(sys, "argv", ["ridgeline", *args])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return stop.value.code or 0, out, err

    return _run


FILE = "examples/llama2-70b-64xa100.toml"
SERVE = ("plan", "gpt2", "--on", "a100-40g-sxm", "--task", "serve")
SERVE_BERT = ("plan", "bert-base", "--on", "a100", "--task", "serve", "--prompt-len", "128", "--output-len", "1")
PREDICT = ("predict", "llama2-7b", "--on", "8xa100", "--batch-size", "8")


# ---- starting -------------------------------------------------------------------------------------------------------

LOADED = """
import sys
sys.argv = ["ridgeline", *{args!r}]
from ridgeline.cli import main
try:
    main()
except SystemExit:
    pass
print([m for m in ("torch", "transformers") if m in sys.modules], file=sys.stderr)
"""


@pytest.mark.parametrize("args", [["--help"], [*PREDICT, "--json"], ["techniques", "--json"]], ids=lambda a: a[0])
def test_no_heavy_import(args):
    code = LOADED.format(args=args)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "[]"
    assert done.stdout


def test_import_is_light():
    code = "import sys, ridgeline; print([m for m in ('torch', 'pydantic', 'numpy', 'typer') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]"]


def test_help_names_every_command():
    done = subprocess.run([sys.executable, "-m", "ridgeline", "--help"], capture_output=True, text=True, check=True)
    for command in ("probe", "predict", "bench", "ablate", "dissect", "train", "runs", "compare", "report",
                    "techniques", "models", "devices"):  # fmt: skip
        assert command in done.stdout


def test_the_version_is_told(ridgeline):
    import ridgeline as package

    assert ridgeline("--version")[:2] == (0, f"ridgeline {package.__version__}\n")


def test_a_calibration_that_fits_nothing_keeps_no_profile(ridgeline, tmp_path):
    rows, out = tmp_path / "gemm.csv", tmp_path / "device.toml"
    rows.write_text("device,dtype,m,n,k,seconds\na100-80g-sxm,bf16,64,64,64,1e-5\n")
    code, _, err = ridgeline("calibrate", str(rows), "--device", "a100-80g-sxm", "--out", str(out))
    assert code == 1
    assert "too few rows of any family" in err
    assert "kept in" not in err
    assert not out.exists()


def test_a_locale_that_lacks_a_sign_gets_another():
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}
    done = subprocess.run([sys.executable, "-m", "ridgeline", "techniques"], capture_output=True, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"?" in done.stdout
    done.stdout.decode("ascii")


@pytest.mark.parametrize(("command", "option"), [(c, o) for c, others in OTHERS.items() for o in others])
def test_an_option_of_another_program_is_refused_with_what_does_it_here(command, option, ridgeline, tmp_path):
    """And that is taken."""
    here = OTHERS[command][option][0]
    for spelled in (f"--{option}", f"--{option.replace('-', '_')}"):
        code, out, err = ridgeline(command, ".", spelled, "2")
        assert (code, out) == (2, "")
        assert err.splitlines()[-1].startswith(f"Error: No such option: {spelled}. Here it is `{here}`")
    needed = ["--data", "stdlib", "--out", "out"] if command == "finetune" else []
    words = here.replace("=N", "=4").replace(" N", " 4").replace("X", "0.001").split()
    parsed = get_command(cli.app).commands[command].make_context(command, [".", *needed, *words]).params
    for call in parsed.get("with_") or ():
        make(Plan.parse([call]).calls[0])
    file = tmp_path / "e.toml"
    file.write_text('model = "gpt2"\non = "a100"\n[workload]\nkind = "pretrain"\nseq_len = 64\nbatch_size = 4')
    assert experiments.load(file, parsed.get("overrides"))


# ---- answers --------------------------------------------------------------------------------------------------------


def test_what_fits_exits_with_0(ridgeline):
    code, out, err = ridgeline(*PREDICT, "--with", "zero:stage=3", "--with", "recompute", "--seq-len", "1k", "--json")
    result = json.loads(out)
    assert (code, result["status"], err) == (0, "ok", "")
    assert result["schema"] == "ridgeline.result/1"
    assert "zero:stage=3,backward_prefetch=pre,prefetch=1" in result["experiment"]["plan"]
    assert result["experiment"]["workload"]["seq_len"] == 1024


def test_what_does_not_fit_exits_with_1_and_says_why(ridgeline):
    question = ("predict", "llama2-70b", "--on", "8xa800-80g", "--task", "pretrain", "--seq-len", "4096",
                "--batch-size", "8", "--with", "zero:stage=3", "--with", "recompute")  # fmt: skip
    code, out, _ = ridgeline(*question, "--json")
    result = json.loads(out)
    assert (code, result["status"]) == (1, "infeasible")
    assert "largest category: optimizer" in result["reason"]
    assert re.search(r"15\d\.\d GiB per rank of 80.0 GiB on a800-80g", result["reason"])
    code, out, _ = ridgeline(*question)
    assert code == 1
    assert "largest category: optimizer" in " ".join(out.split())


@pytest.mark.parametrize(
    "args",
    [("techniques",), ("techniques", "zero"), ("techniques", "megatron_ptdp"), ("techniques", "--matrix"), ("models",),
     ("models", "llama2-7b"),
     ("devices",), ("devices", "h200"), ("runs",), PREDICT],
    ids=" ".join,
)  # fmt: skip
def test_json_is_alone_on_standard_output(ridgeline, args):
    code, out, err = ridgeline(*args, "--json")
    assert code in (0, 1)
    assert err == ""
    found = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    code, text, _ = ridgeline(*args)
    assert text.strip() or args == ("runs",)
    if args == ("techniques",):
        assert {"zero", "lora", "rtn", "zero_3", "megatron_ptdp"} <= {c["name"] for c in found}
    if args == ("models",):
        assert len(found) >= 25
    if args == ("devices",):
        assert len(found) >= 16


def test_a_stored_prediction_comes_back(ridgeline, tmp_path):
    code, out, err = ridgeline(*PREDICT, "--save", "--json")
    assert "stored as" in err
    stored = err.split("stored as")[1].split()[0]
    (row,) = json.loads(ridgeline("runs", "--json")[1])
    assert row["id"] == stored
    assert json.loads(ridgeline("report", stored, "--json")[1]) == json.loads(out)
    file = tmp_path / "r.json"
    file.write_text(out)
    code, comparison, _ = ridgeline("compare", stored, str(file), "--json")
    assert code == 0
    json.loads(comparison)


def test_predicted_trace(ridgeline, tmp_path):
    file = tmp_path / "trace.json"
    ridgeline(*PREDICT, "--with", "zero", "--trace", str(file))
    events = json.loads(file.read_text())["traceEvents"]
    assert {"forward", "backward", "optimizer", "communication"} <= {
        e["args"]["phase"] for e in events if "phase" in e.get("args", {})
    }


EXPERIMENT = """
model = "llama-tiny"
on = "ON"
[workload]
seq_len = 64
batch_size = 8
[plans]
baseline = []
flash = ["flash_attention"]
"""


@pytest.fixture
def experiment(tmp_path):
    def _file(on="8xa100", **replaced):
        text = EXPERIMENT.replace("ON", on)
        for old, new in replaced.items():
            text = text.replace(old, new)
        file = tmp_path / "e.toml"
        file.write_text(text)
        return str(file)

    return _file


def test_dry_run(ridgeline, experiment):
    code, out, _ = ridgeline("ablate", experiment(), "--dry-run", "--json")
    assert code == 0
    assert list(json.loads(out)) == ["baseline", "flash"]
    code, out, _ = ridgeline("ablate", experiment(), "--dry-run")
    assert code == 0
    assert "flash" in out


def test_one_plan_of_a_file(ridgeline, experiment):
    """Only the chosen plan is looked at: another one may need a machine that was never probed."""
    file = experiment(**{"flash =": 'other = { with = [], on = "2xlocal" }\nflash ='})
    code, out, _ = ridgeline("predict", file, "--plan", "flash", "--json")
    assert code == 0
    assert json.loads(out)["experiment"]["plan"] == ["data_parallel:bucket_mb=25.0,overlap=true", "flash_attention"]
    code, _, err = ridgeline("predict", file, "--plan", "flsh")
    assert code == 2
    assert "unknown plan 'flsh'" in err
    assert "'flash'" in err


# ---- mistakes -------------------------------------------------------------------------------------------------------

MISTAKES = [
    (["predict", "lama2-7b", "--on", "a100"], ["unknown model 'lama2-7b'", "'llama2-7b'"]),
    (["predict", "./nowhere", "--on", "a100"], ["no file or directory ./nowhere"]),
    (["predict", "llama2-7b", "--on", "8xa1000"], ["unknown device 'a1000'", "'a100'"]),
    (["predict", "llama2-7b"], ["no profile of this machine yet", "ridgeline probe"]),
    ([*PREDICT, "--with", "zeroo"], ["unknown technique 'zeroo'", "'zero'"]),
    ([*PREDICT, "--with", "zero:stge=3"], ["unknown option 'stge'", "'stage'"]),
    ([*PREDICT, "--with", "zero:stage=9"], ["stage = 9 is not valid", "1, 2 or 3"]),
    ([*PREDICT, "--with", "zero:stage"], ["'stage' is not option=value"]),
    ([*PREDICT, "--with", "rtn"], ["integer base cannot be trained", "--with lora"]),
    ([*PREDICT, "--with", "zero", "--on", "a100"], ["only 1 process", "--on 2xa100-80g-sxm"]),
    ([*PREDICT, "--seq-len", "8k"], ["8192 tokens is longer than the 4096 positions", "at most 4096"]),
    ([*PREDICT, "--seq-len", "long"], ["--seq-len 'long' is not a whole number", "4k"]),
    ([*PREDICT, "--task", "pretrian"], ["unknown task 'pretrian'", "'pretrain'"]),
    ([*PREDICT, "--dtype", "fp9"], ["dtype = 'fp9' is not valid", "bf16"]),
    (["predict", "bert-base", "--on", "a100", "--task", "generate"], ["bert-base is an encoder"]),
    (["predict", "none.toml"], ["no experiment file at none.toml"]),
    (["predict", FILE, "--on", "local"], ["--on does not go with an experiment file", "change examples/"]),
    (["predict", FILE, "--with", "zero"], ["--with does not go with an experiment file"]),
    (["predict", FILE, "--task", "pretrain"], ["--task does not go with an experiment file"]),
    (["predict", FILE, "--seq-len", "64"], ["--seq-len does not go with an experiment file"]),
    (["predict", FILE, "--arrivals", "x.csv"], ["--arrivals does not go with an experiment file"]),
    (["explain", FILE, "--on", "a100"], ["--on does not go with an experiment file"]),
    ([*PREDICT, "--plan", "one"], ["--plan one does not go with a model", "an ablation's file"]),
    ([*SERVE, "--goal", "memory"], ["goal memory", "the cache takes what the weights leave", "kv_cache_tokens"]),
    ([*SERVE, "--slo", "peak_bytes=9GB"], ["a limit on peak_bytes", "the cache takes what the weights leave"]),
    ([*SERVE, "--goal", "memory", "--engine", "ridgeline"], ["the cache of ridgeline takes its share of what"]),
    ([*SERVE_BERT, "--goal", "memory"], ["bert-base is an encoder: its serving can be run, not predicted"]),
    (["plan", FILE], ["is a TOML file, not a model", "config.json", "predict, explain, bench"]),
    (["plan", "none.toml"], ["none.toml is a TOML file, not a model"]),
    (["predict", "README.md"], ["README.md is no model", "ridgeline models", "config.json"]),
    (["techniques", "zeroo"], ["unknown technique 'zeroo'", "'zero'"]),
    (["models", "gpt22"], ["unknown model 'gpt22'", "'gpt2'"]),
    (["devices", "h2000"], ["unknown device 'h2000'", "'h200'"]),
    (["report", "x", "--format", "pfd"], ["unknown format 'pfd'"]),
    (["report", "zzz"], ["no run 'zzz'"]),
    (["compare", "a", "b"], ["no run 'a'"]),
    (["merge", "examples", "studies", "--out", "studies"], ["--out studies is the adapter itself"]),
    (["predict", "gpt2", "--on", "a100", "--task", "serve", "--shared-prefix", "600"], ["raise prompt_len"]),
    (["runs", "--limit", "0"], ["--limit"]),
    (["predcit", "x"], ["predcit", "predict"]),
    (["predict"], ["model"]),
    (["techniques", "--jsn"], ["--jsn", "--json"]),
]


@pytest.mark.parametrize(("args", "says"), MISTAKES, ids=[" ".join(m[0][-3:]) for m in MISTAKES])
def test_mistake(ridgeline, args, says):
    code, out, err = ridgeline(*args)
    assert (code, out) == (2, "")
    for text in says:
        assert text in err
    assert len(err) < 600


def test_a_plan_of_which_none_is_predicted_says_why(ridgeline, tmp_path):
    args = (
        "plan",
        "gpt2",
        "--on",
        "h100-sxm",
        "--with",
        "zero:stage=3",
        "--only",
        "flash_attention",
        "--seq-len",
        "64",
    )
    code, out, _ = ridgeline(*args, "--workers", "1", "--out", str(tmp_path))
    assert code == 1
    assert "refused:\n" in out
    assert "there is only 1 process" in out.partition("refused:")[2]


def test_lengths_that_vary_are_an_option(ridgeline):
    args = ("predict", "gpt2", "--on", "a100-40g-sxm", "--task", "serve", "--requests", "8", "--json")
    code, out, _ = ridgeline(*args, "--length-cv", "0.5")
    assert code == 0
    both = json.loads(out)
    assert both["experiment"]["workload"]["length_cv"] == 0.5
    assert ridgeline(*args, "--length-cv", "9")[0] == 2
    code, out, _ = ridgeline(*args, "--length-cv", "0.5", "--output-cv", "0")
    assert code == 0
    one = json.loads(out)
    assert one["experiment"]["workload"]["output_cv"] == 0
    assert one["metrics"]["tokens_per_s"] != both["metrics"]["tokens_per_s"]
    assert ridgeline(*args, "--output-cv", "9")[0] == 2


FILES = [
    ({"seq_len = 64": "seq_len = "}, ["e.toml is not valid TOML", "line 5"]),
    ({"seq_len": "seqlen"}, ["unknown key 'seqlen'", "e.toml", "[workload]", "'seq_len'"]),
    ({"model =": "modle ="}, ["unknown key 'modle'", "e.toml", "'model'"]),
    ({"flash_attention": "flash_atention"}, ["unknown technique 'flash_atention'", "'flash_attention'"]),
    ({"seq_len = 64": "seq_len = 4096"}, ["4096 tokens is longer than the 1024"]),
    ({"[plans]": "[measure]\nrepeat = 3\n[plans]"}, ["unknown key 'repeat'", "[measure]", "'repeats'"]),
]


@pytest.mark.parametrize(("change", "says"), FILES, ids=[f[1][0] for f in FILES])
def test_mistake_in_a_file(ridgeline, experiment, change, says):
    code, out, err = ridgeline("ablate", experiment(**change), "--dry-run")
    assert (code, out) == (2, "")
    for text in says:
        assert text in err


@pytest.mark.parametrize("command", ["bench", "dissect", "train", "ablate"])
def test_measuring_needs_the_hardware(ridgeline, experiment, command):
    plan = [] if command == "ablate" else ["--plan", "flash"]
    code, out, err = ridgeline(command, experiment(), *plan)
    assert (code, out) == (2, "")
    assert "8xa100-80g-sxm is not this machine" in err
    assert 'on = "local"' in err
    assert "ridgeline predict" in err


@pytest.mark.parametrize("command", ["predict", "explain"])
def test_a_plan_that_does_not_fit_exits_with_1_and_prints_its_notes(ridgeline, command):
    """Here: that the weights are published in fewer bits than the plan has them in."""
    code, out, err = ridgeline(command, "deepseek-v3", "--on", "8xh100", "--task", "generate")
    assert code == 1, err
    if command == "predict":
        assert "does not fit: " in out
        assert "published in fp8" in " ".join(out.split())


UNWRITABLE = [
    ["ablate", "--out", "{}"], ["ablate", "--report", "{}/report.html"], ["ablate", "--report", "."],
    ["dissect", "--out", "{}", "--plan", "flash"], ["train", "--out", "{}", "--plan", "flash"],
]  # fmt: skip


@pytest.mark.parametrize("name", ["2024", "true", "1e5", "[a].txt", "a, b.txt", '"quoted".txt', "c:\\x", "é🏔.txt"])
def test_data_is_a_text_whatever_it_looks_like(name, tmp_path):
    file = tmp_path / "e.toml"
    file.write_text('model = "gpt2"\non = "a100"\n[workload]\nkind = "pretrain"\nseq_len = 128\n')
    assert experiments.load(file, data_override(name)).workload.data == name


@pytest.mark.parametrize("args", UNWRITABLE, ids=" ".join)
def test_a_place_that_cannot_be_written_is_found_before_the_work(ridgeline, experiment, tmp_path, args):
    catalog.save_device(CPU)
    taken = tmp_path / "taken"
    taken.write_text("a file")
    command, *options = [a.format(taken) for a in args]
    code, out, err = ridgeline(command, experiment("local"), *options)
    assert (code, out) == (2, "")
    assert "error: cannot write" in err
    assert f"for {args[1]}" in err
    assert "step" not in err
    assert taken.read_text() == "a file"


@pytest.mark.parametrize(("option", "path"), [("--csv", "taken"), ("--report", "taken/r.html"), ("--report", "r.pdf")])
def test_a_study_that_cannot_be_written_is_refused_first(ridgeline, tmp_path, option, path):
    (tmp_path / "taken").touch()
    code, out, err = ridgeline("study", "studies/systems.toml", option, str(tmp_path / path))
    assert (code, out) == (2, "")
    assert option in err
    assert "cells" not in err


def test_ctrl_c_is_taken_between_steps_and_the_second_at_once():
    before = signal.getsignal(signal.SIGINT)
    with ctrl_c_between_steps() as check:
        check()
        signal.raise_signal(signal.SIGINT)  # nothing is raised here: a finalizer would have swallowed it
        with pytest.raises(KeyboardInterrupt):
            check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_suggested_commands_exist():
    """Literal names and options of every ``next_command`` are those of a command."""
    known = {c.name: {o for p in c.params for o in p.opts} for c in get_command(cli.app).commands.values()}
    suggested = []
    for file in sorted(Path(cli.__file__).parent.glob("*.py")):
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "next_command":
                words = [n.value for n in ast.walk(call) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
                names = [w for w in words if w in known]
                options = {w for w in words if re.fullmatch(r"--[a-z-]+|-[a-z]", w)}
                assert names, f"{file.name}: no command in {words}"
                assert options <= set.union(*(known[n] for n in names)), f"{file.name}: {words}"
                suggested += names
    assert len(suggested) >= 10


AUTO = ("plan", "gpt2", "--on", "2xrtx4090", "--batch-size", "8", "--seq-len", "256", "--only", "tensor_parallel",
        "--only", "pipeline", "--only", "data_parallel")  # fmt: skip


def test_a_found_plan_can_be_predicted_and_planned_again(ridgeline, tmp_path):
    code, out, err = ridgeline(*AUTO, "--method", "alpa", "--workers", "1", "--out", str(tmp_path), "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["gain"] >= 1
    assert [row["stage"] for row in found["stages"]] == list(range(len(found["stages"])))
    code, out, _ = ridgeline("predict", str(tmp_path / "alpa.toml"), "--json")
    assert code == 0
    assert json.loads(out)["metrics"]["step_time_s"]["value"] == pytest.approx(found["metrics"]["step_time_s"])
    again = ("plan", "gpt2", "--running", str(tmp_path / "alpa.toml"), "--on", "1xrtx4090", "--workers", "1")
    again = (*again, "--out", str(tmp_path))
    code, out, _ = ridgeline(*again, "--json")
    assert code == 0
    assert json.loads(out)["on"] == "rtx4090"
    code, out, _ = ridgeline(*again)
    assert "of parameters and optimizer states move" in out


@pytest.mark.parametrize("devices", [2, 3])
def test_a_batch_of_fewer_sequences_than_devices_is_planned(ridgeline, tmp_path, devices):
    """Plans that divide the model have fewer replicas."""
    asked = ("plan", "gpt2", "--on", f"{devices}xrtx4090", "--batch-size", "1", "--seq-len", "256")
    asked = (*asked, "--only", "tensor_parallel", "--workers", "1", "--out", str(tmp_path))
    code, out, _ = ridgeline(*asked, "--json")
    assert code == 0
    assert f"tensor_parallel:degree={devices}" in str(json.loads(out)["best"])


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((*AUTO, "--method", "alph"), "did you mean 'alpa'?"),
        ((*AUTO, "--method", "alpa", "--goal", "memory"), "goals throughput and latency"),
        (("plan", "gpt2", "--on", "4xa100-80g-sxm+2xxeon"), "only GPUs can be combined"),
    ],
)
def test_questions_that_automatic_parallelization_refuses(ridgeline, args, says):
    code, _, err = ridgeline(*args)
    assert code == 2
    assert says in err
