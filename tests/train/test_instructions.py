"""Instruction data: what is read, what is learned, what a packed row sees, and what the user is told."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.training import MODEL, full, write_corpus
from tests.world import world
from tokenizers import processors

from ridgeline import catalog, experiments
from ridgeline.data import packing
from ridgeline.data.batches import IGNORE, TextBatches, load_tokens
from ridgeline.data.examples import TEMPLATES, Template, find_template, read_examples
from ridgeline.data.packing import InstructionBatches, load_instructions, pack
from ridgeline.data.tokenizer import load_tokenizer
from ridgeline.measure.cells.training_cell import metered_step
from ridgeline.nn.checkpoint.checkpoint import save_checkpoint
from ridgeline.nn.model import attention
from ridgeline.nn.model.flash_blocks import Sequences
from ridgeline.nn.model.init import build
from ridgeline.nn.model.mask import make_mask
from ridgeline.predict import predict
from ridgeline.runtime.train_build import LossModel
from ridgeline.spec.device import Cluster
from ridgeline.spec.errors import Incompatible, UserError
from ridgeline.spec.experiment import Experiment
from ridgeline.spec.plan import Plan
from ridgeline.spec.workload import FineTune
from ridgeline.techniques.matrix import CPU
from ridgeline.techniques.registry import check, normalize
from ridgeline.train.trainer import Trainer, whole_model

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Where is the roof?"},
    {"role": "assistant", "content": "Above."},
    {"role": "user", "content": "And the ridge?"},
    {"role": "assistant", "content": "Atop it."},
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny model with a tokenizer."""
    folder = tmp_path_factory.mktemp("base")
    corpus = write_corpus(folder / "corpus.txt")
    model = build(MODEL, torch.device("cpu"), torch.float32, 0)
    save_checkpoint(model, folder / "model")
    load_tokens(str(corpus), MODEL.vocab_size).tokenizer.save(str(folder / "model" / "tokenizer.json"))
    return folder / "model"


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """120 short conversations of different lengths."""
    rng = random.Random(0)
    words = ["roof", "ridge", "memory", "gradient", "of", "the", "a", "step", "model", "is", "peak"]
    say = lambda n: " ".join(rng.choices(words, k=n))  # noqa: E731
    rows = [
        {"messages": [{"role": "user", "content": say(rng.randint(1, 4))},
                      {"role": "assistant", "content": say(rng.randint(1, 6))}]}
        for _ in range(120)
    ]  # fmt: skip
    file = tmp_path_factory.mktemp("chat") / "chat.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    answer = "{% if add_generation_prompt %}a:{% endif %}"
    short = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}" + answer
    (file.parent / "short.jinja").write_text(short, encoding="utf-8")
    return file


def tuning(checkpoint, data, *plan, ranks=1, **fields):
    fields = {"seq_len": 64, "batch_size": 4, "steps": 3, "warmup_steps": 1, **fields}
    fields.setdefault("template", str(data.parent / "short.jinja"))
    return normalize(
        Experiment(
            model=MODEL,
            cluster=Cluster(device=CPU, devices_per_node=ranks),
            workload=FineTune(data=str(data), checkpoint=str(checkpoint), **fields),
            plan=Plan.parse(plan),
        )
    )


def test_a_checkpoint_of_another_model_is_refused(checkpoint, chat):
    e = tuning(checkpoint, chat)
    other = MODEL.model_copy(update={"intermediate_size": 96})
    with pytest.raises(UserError, match="has other tensors than model test-tiny"):
        whole_model(e.model_copy(update={"model": other}), torch.device("cpu"))
    assert whole_model(e, torch.device("cpu")).spec.intermediate_size == 64


# ---- records ---------------------------------------------------------------------------------------------------------


def learned(example):
    return [example.text[a:b] for a, b in example.learned]


@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_are_what_the_assistant_says(name):
    example = Template(TEMPLATES[name], name, {"eos_token": "</s>", "bos_token": ""}).example(CHAT)
    first, second = learned(example)
    assert first.strip().startswith("Above.")
    assert second.strip().startswith("Atop it.")
    for text in (first, second):  # what closes the turn is learned, what opens the next is not
        assert "ridge?" not in text
        assert "Be brief" not in text
    assert first.strip() != "Above.", "the end of the turn must be learned too"


def test_llama_2_reads_the_system_text_in_the_first_instruction():
    """As https://github.com/meta-llama/llama builds its prompts (``chat_completion``)."""
    template = Template(TEMPLATES["llama2"], "llama2", {"bos_token": "<s>", "eos_token": "</s>"})
    asked, said = CHAT[1]["content"], CHAT[0]["content"]
    assert CHAT[0]["role"] == "system"
    text = template.example(CHAT).text
    assert text.startswith(f"<s>[INST] <<SYS>>\n{said}\n<</SYS>>\n\n{asked} [/INST] Above. </s><s>[INST] And")


def test_records_of_every_kind(tmp_path):
    rows = [
        {"instruction": "Add.", "input": "1 2", "output": "3"},
        {"instruction": "Sing.", "output": "La."},
        {"prompt": "Q: ", "completion": "A."},
        {"text": "All of it."},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]},
    ]
    template = Template(TEMPLATES["chatml"], "chatml")
    for file, text in (("a.jsonl", "\n".join(map(json.dumps, rows))), ("a.json", json.dumps(rows))):
        (tmp_path / file).write_text(text, encoding="utf-8")
        found, bad = read_examples(tmp_path / file, template)
        assert [learned(e) for e in found] == [["3<|im_end|>\n"], ["La.<|im_end|>\n"], ["A."], ["All of it."],
                                               ["Ho<|im_end|>\n"]]  # fmt: skip
        assert not bad
    plain, _ = read_examples_of(tmp_path, rows[:1])
    assert plain[0].text.endswith("### Response:\n3")
    assert learned(plain[0]) == ["3"]


CALLS = (
    "{% if tools %}[{{ tools | tojson }}]{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}!{{ c.function.name }}({{ c.function.arguments.at }}){% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
TALK = [
    {"role": "user", "content": "Look."},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "Blue."},
    {"role": "assistant", "content": "It is."},
]


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS), None])
def test_calls_of_functions_are_learned_and_the_functions_are_shown(tools, tmp_path):
    file = tmp_path / "calls.jsonl"
    file.write_text(json.dumps({"messages": TALK, "tools": tools}), encoding="utf-8")
    (example,), _ = read_examples(file, Template(CALLS, "calls"))
    assert learned(example) == ["!look(sky)</s>", "It is.</s>"]
    assert example.text.startswith("[[{" if tools else "<user>")
    with pytest.raises(UserError, match="does not write tool calls"):
        read_examples(file, Template(TEMPLATES["chatml"], "chatml"))
    file.write_text(json.dumps({"messages": CHAT, "tools": TOOLS}), encoding="utf-8")
    with pytest.raises(UserError, match="does not show tools"):
        read_examples(file, Template(TEMPLATES["chatml"], "chatml"))


def test_a_template_may_refuse_what_is_left_without_calls(tmp_path):
    """As Mistral's: users and the assistant take turns, but for its calls and what they give."""
    turns = (
        "{% set ns = namespace(turn=0) %}{% for m in messages if not m.tool_calls and m.role != 'tool' %}"
        "{% if (m.role == 'user') != (ns.turn % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
        "{% set ns.turn = ns.turn + 1 %}{% endfor %}"
    )
    file = tmp_path / "calls.jsonl"
    file.write_text(json.dumps({"messages": TALK, "conversations": None}), encoding="utf-8")
    (example,), _ = read_examples(file, Template(turns + CALLS, "turns"))
    assert learned(example) == ["!look(sky)</s>", "It is.</s>"]


def test_prompts_and_completions_of_messages_parts_and_a_system_text_beside_them(tmp_path):
    rows = [
        {"prompt": CHAT[:4], "completion": CHAT[4:]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "you"}]},
                      {"role": "assistant", "content": [{"type": "text", "text": "Ho"}]}]},
        {"system": "Sing.", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]},
    ]  # fmt: skip
    (tmp_path / "a.json").write_text(json.dumps(rows), encoding="utf-8")
    found, _ = read_examples(tmp_path / "a.json", Template(TEMPLATES["chatml"], "chatml"))
    assert [learned(e) for e in found] == [["Atop it.<|im_end|>\n"], ["Ho<|im_end|>\n"], ["Ho<|im_end|>\n"]]
    assert "Above." in found[0].text
    assert "Hi\nyou<|im_end|>" in found[1].text
    assert found[2].text.startswith("<|im_start|>system\nSing.<|im_end|>")


def test_lines_end_at_newlines_only(tmp_path):
    texts = ["a\u2028b", "c\x85d\u2029"]
    lines = "\r\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts)
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines.encode())
    assert [e.text for e in read_examples(tmp_path / "a.jsonl", None)[0]] == texts


def test_half_a_character_is_a_bad_record(tmp_path):
    whole = {"text": "A whole \U0001f3d4."}  # which json.dumps writes in two halves
    assert read_examples_of(tmp_path, [whole])[0][0].text == whole["text"]
    with pytest.raises(UserError, match=r"some.jsonl:2: .* surrogate pair, '\\ud83c'"):
        read_examples_of(tmp_path, [whole, {"text": "A half \ud83c."}])


def read_examples_of(folder, rows):
    file = folder / "some.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return read_examples(file, None)


CALLING = '{"messages": [{"role": "assistant", "tool_calls": [{"function": %s}]}]}'


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"messages": [', "not JSON"),
        ('{"text": ' + "[" * 100_000 + "]" * 100_000 + "}", "not JSON: maximum recursion depth"),
        ('{"messages": []}', "at least one message"),
        ('{"messages": [{"role": "user", "content": "?"}]}', "nothing to learn"),
        ('{"messages": [{"role": "user"}]}', "needs a role and a content"),
        ('{"messages": [{"role": "assistant", "tool_calls": [{"name": "f"}]}]}', "message 1 needs tool_calls"),
        (CALLING % '{"name": "f", "arguments": "5"}', "message 1 needs tool_calls"),
        (CALLING % '{"arguments": {}}', "message 1 needs tool_calls"),
        (CALLING % '["ab", "cd"]', "message 1 needs tool_calls"),
        ('{"prompt": [{"role": "assistant", "content": "x"}], "completion": []}', "nothing to learn"),
        ('{"messages": null}', "its keys: messages"),
        ('{"messages": [{"role": "assistant", "content": "x"}], "tools": "["}', "tools are not JSON"),
        ('{"instruction": "x"}', "'output' is missing"),
        ('{"question": "x"}', "its keys: question"),
        ("[1]", "must be an object"),
    ],
)
def test_a_bad_line_is_named_or_skipped_and_counted(line, said, tmp_path):
    file = tmp_path / "bad.jsonl"
    file.write_text('{"text": "one"}\n\n' + line + '\n{"text": "two"}\n', encoding="utf-8")
    template = Template(TEMPLATES["chatml"], "chatml")
    with pytest.raises(UserError, match=r"bad\.jsonl:3") as told:
        read_examples(file, template)
    assert said in str(told.value)
    assert "--skip-bad" in told.value.fix
    found, bad = read_examples(file, template, skip_bad=True)
    assert len(found) == 2
    assert [place for place, _ in bad] == [f"{file}:3"]
    assert said in bad[0][1]


def test_templates_that_are_missing_or_wrong(tmp_path, chat):
    with pytest.raises(UserError, match="need a chat template"):
        read_examples(chat, find_template(None, str(tmp_path)))
    with pytest.raises(UserError, match="no chat template 'chatmi'"):
        find_template("chatmi", None)
    (tmp_path / "t.jinja").write_text("{% for m in %}", encoding="utf-8")
    with pytest.raises(UserError, match="not valid Jinja"):
        find_template(str(tmp_path / "t.jinja"), None)


def test_the_checkpoints_own_template_and_special_tokens(tmp_path, chat):
    source = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    config = {"chat_template": source, "eos_token": {"content": "</s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    template = find_template(None, str(tmp_path))
    assert template is not None
    # This template has no opening for the assistant: the role's mark is then part of what is learned.
    assert learned(template.example(CHAT[1:3])) == ["<assistant>Above.</s>"]
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
    assert find_template(None, str(tmp_path)).render(CHAT) == "Be brief."


def test_templates_render_as_transformers_does(tmp_path, checkpoint):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(checkpoint / "tokenizer.json"))
    source = (
        "{% for m in messages %}\n{%- if loop.first %}{{ bos_token }}{% endif %}"
        "[{{ m.role | upper }}] {{ m.content | trim }}\n"
        "{% endfor %}{% if add_generation_prompt %}[ASSISTANT]{% endif %}"
    )
    for text in (*TEMPLATES.values(), source):
        tokenizer.chat_template, tokenizer.eos_token, tokenizer.bos_token = text, "<|endoftext|>", "<s>"
        ours = Template(text, "same", {"eos_token": "<|endoftext|>", "bos_token": "<s>"})
        for prompt in (False, True):
            want = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=prompt)
            assert ours.render(CHAT, prompt) == want


# ---- rows ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 50), min_size=1, max_size=300), st.integers(50, 120), st.integers(0, 3))
def test_packing_loses_and_doubles_nothing(lengths, size, seed):
    rows = pack(lengths, size, np.random.default_rng(seed).permutation(len(lengths)))
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= size for row in rows)
    assert len(rows) <= 2 * -(-sum(lengths) // size), "never more than twice the least possible"


def test_rows_hold_the_examples_and_only_answers_are_labels(checkpoint, chat):
    w = tuning(checkpoint, chat).training
    data = load_instructions(w, MODEL.vocab_size)
    batches = InstructionBatches(data, 64, 4)
    assert len(batches.split[0]) < 120 / 2, "short examples share rows"
    ids, labels, positions, documents, *_ = batches.batch(3)
    again = InstructionBatches(data, 64, 4).batch(3)
    assert all(torch.equal(a, b) for a, b in zip((ids, labels, positions, documents), again[:4], strict=True))
    for row in range(4):
        for number in documents[row].unique().tolist()[:-1]:
            here = documents[row] == number
            assert positions[row][here].tolist() == list(range(int(here.sum())))
            text = data.tokenizer.decode(ids[row][here].tolist(), skip_special_tokens=False)
            said = data.tokenizer.decode(labels[row][here][labels[row][here] != IGNORE].tolist())
            assert text.startswith("u:")
            assert said.strip() == text.split("\na:")[1].strip()
    everything = InstructionBatches(load_instructions(w.model_copy(update={"train_on_prompt": True}), 300), 64, 4)
    assert (everything.batch(3).labels != IGNORE).sum() > (labels != IGNORE).sum()


def test_many_examples_keep_their_order(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "AT_ONCE", 7)
    rows = [{"prompt": "Q", "completion": str(i)} for i in range(20)]
    (tmp_path / "many.jsonl").write_text("\n".join(map(json.dumps, rows)))
    e = tuning(checkpoint, tmp_path / "many.jsonl", template=None)
    data = load_instructions(e.workload, MODEL.vocab_size)
    assert [data.tokenizer.decode(one.ids.tolist()) for one in data.examples] == [f"Q{i}" for i in range(20)]


@pytest.mark.parametrize(("config", "begins"), [(None, True), ({"add_bos_token": True}, True),
                                                ({"add_bos_token": False}, False)])  # fmt: skip
def test_an_example_without_a_template_begins_as_the_tokenizer_begins_a_text(config, begins, checkpoint, tmp_path):
    tokenizer = load_tokenizer(str(checkpoint))
    tokenizer.add_special_tokens(["<s>"])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    if config:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", **config}))
    (tmp_path / "one.jsonl").write_text(json.dumps({"prompt": "Q", "completion": "A"}))
    e = tuning(checkpoint, tmp_path / "one.jsonl", template=None, tokenizer=str(tmp_path))
    (one,) = load_instructions(e.workload, MODEL.vocab_size + 1).examples
    assert (one.ids[0] == bos) == begins
    assert one.learned.tolist() == [False] * begins + [False, True, True]


def test_no_example_is_both_trained_on_and_held_out(checkpoint, chat):
    batches = InstructionBatches(load_instructions(tuning(checkpoint, chat).training, 300), 64, 2, eval_batches=3)
    trained, held = batches.split
    assert len(held) == 6
    assert not {i for r in trained for i in r} & {i for r in held for i in r}


def test_long_examples_are_cut_and_counted(checkpoint, chat):
    data = load_instructions(tuning(checkpoint, chat, seq_len=12).training, 300)
    assert data.cut > 0
    assert all(len(e.ids) <= 13 for e in data.examples)
    assert len(data.examples) + data.dropped == 120
    with pytest.raises(UserError, match="no example of"):
        load_instructions(tuning(checkpoint, chat, seq_len=3).training, 300)


# ---- packed rows see only themselves ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
@pytest.mark.parametrize("backend", ["naive", "flash"])
def test_a_packed_row_is_its_examples_one_by_one(family, backend, checkpoint, chat):
    """Loss and gradients; without the mask both differ."""
    fields = {"family": family, "num_kv_heads": 4, "gated": False, "activation": "gelu", "position": "learned"}
    changes = {"llama": {}, "gpt2": fields, "mistral": {"sliding_window": 9}}
    spec = MODEL.model_copy(update=changes[family])
    batches = InstructionBatches(load_instructions(tuning(checkpoint, chat).training, 300), 64, 4)
    packed = batches.batch(0)

    def result(parts):
        model = build(spec, torch.device("cpu"), torch.float64, 0)
        model.set_attention(backend)
        loss = sum(LossModel(model)(*p) for p in parts)
        loss.backward()
        return float(loss), torch.cat([p.grad.flatten() for p in model.parameters()])

    alone = []
    for row in range(4):
        for number in packed.documents[row].unique():
            here = packed.documents[row] == number
            alone.append((packed.ids[row][here][None], packed.labels[row][here][None]))
    loss, grad = result([tuple(packed)])
    want, want_grad = result(alone)
    assert loss == pytest.approx(want, rel=1e-10)
    assert torch.allclose(grad, want_grad, atol=1e-9)
    blind, _ = result([tuple(packed._replace(documents=None))])
    assert abs(blind - want) > 1e-4


def test_a_cpu_attends_within_documents(checkpoint, chat, monkeypatch):
    """Where only documents and causality mask: then no score is computed between documents."""
    packed = InstructionBatches(load_instructions(tuning(checkpoint, chat).training, 300), 64, 4).batch(0)
    scores = []
    fused = attention.fused

    def counted(q, k, *rest, **more):
        scores[-1] += q.shape[0] * q.shape[2] * k.shape[2]
        return fused(q, k, *rest, **more)

    monkeypatch.setattr(attention, "fused", counted)
    for change, splits in (({}, True), ({}, False), ({"sliding_window": 9}, True)):
        model = build(MODEL.model_copy(update=change), torch.device("cpu"), torch.float32, 0)
        model.set_attention("flash")
        model.splits_documents = splits
        scores.append(0)
        with torch.no_grad():
            model(packed.ids, packed.positions, documents=packed.documents)
    within = sum(int((row == n).sum()) ** 2 for row in packed.documents for n in row.unique())
    assert scores[0] == within * MODEL.num_layers
    assert scores[1:] == [4 * 64**2 * MODEL.num_layers] * 2


def test_documents_of_text_are_told_apart_by_their_end(corpus):
    folder_tokens = load_tokens(str(corpus), 300)
    ids = folder_tokens.ids.copy()
    ids[::7] = folder_tokens.end
    batch = TextBatches(type(folder_tokens)(ids, folder_tokens.tokenizer, "x"), 16, 2, 300, separate=True).batch(0)
    for row, places, numbers in zip(batch.ids, batch.positions, batch.documents, strict=True):
        number = place = 0
        for t in range(16):
            assert (int(numbers[t]), int(places[t])) == (number, place)
            place += 1
            if row[t] == folder_tokens.end:
                number, place = number + 1, 0


def losses_of(rank, e):
    trainer = Trainer(e, torch.device("cpu"), rank, e.world)
    out = [trainer.step().loss for _ in range(3)]
    return [*out, trainer.evaluate()], {n: full(p) for n, p in trainer.run.root.named_parameters()}


@pytest.mark.parametrize(("ranks", "plan"), [
    (2, ("pipeline:degree=2",)),
    (2, ("tensor_parallel:degree=2", "sequence_parallel")),
    (2, ("zero:stage=3", "recompute")),
    (2, ("ring_attention:degree=2", "flash_attention", "recompute")),
    (4, ("ring_attention:degree=2", "flash_attention", "pipeline:degree=2")),
    (1, ("flash_attention", "recompute")),
    (1, ("fused_layers",)),
], ids=str)  # fmt: skip
def test_layouts_pack_alike(ranks, plan, checkpoint, chat):
    sgd = {"optimizer": "sgd", "lr": 1.0, "grad_clip": 0.1}
    want, _ = losses_of(0, tuning(checkpoint, chat, **sgd))
    micro = {"micro_batch_size": 2} if "pipeline:degree=2" in plan else {}
    e = tuning(checkpoint, chat, *plan, ranks=ranks, **sgd, **micro)
    got, _ = losses_of(0, e) if ranks == 1 else world(ranks).run(losses_of, e)[0]
    assert want[0] - want[2] > 1e-3
    assert got == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize("plan", [(), ("flash_attention",), ("flash_attention", "recompute"), ("lora",)], ids=str)
def test_memory_of_packed_rows_is_as_predicted(plan, checkpoint, chat):
    e = tuning(checkpoint, chat, *plan)
    trainer = Trainer(e)
    trainer.step(), trainer.step()
    usage, said = metered_step(trainer), {m.category: m.bytes for m in predict(e).memory}
    print(f"predicted {said}\nmeasured  {usage.categories} at {usage.instant}")
    assert usage.total == pytest.approx(sum(said.values()), rel=0.05)


def test_a_mask_of_documents_in_windowed_layers_is_predicted():
    """A mask for each row, on a CPU too."""
    model = MODEL.model_copy(update={"sliding_window": 16})
    work = {"kind": "pretrain", "seq_len": 64, "batch_size": 4, "document_mask": True}
    catalog.allow_unprobed()
    e = experiments.make(model, "local", work, ["flash_attention"])
    alone = experiments.make(model, "local", {**work, "document_mask": False}, ["flash_attention"])
    said, one = ({m.category: m.bytes for m in predict(x).memory}["buffers"] for x in (e, alone))
    documents = torch.zeros(4, 64, dtype=torch.long)
    args = (model, True, None, 0, 64, False, torch.device("cpu"), torch.float32)
    runs = Sequences.of_documents(documents)
    masks = [make_mask(*args, d, sequences=runs).bias for d in (documents, None)]
    assert said - one == sum(s * m.numel() * 4 for s, m in zip((1, -1), masks, strict=True))


def test_a_ring_on_gpus_refuses_packed_examples(checkpoint, chat):
    e = tuning(checkpoint, chat, "ring_attention:degree=2", "flash_attention", ranks=2)
    check(e)
    gpus = e.model_copy(update={"cluster": catalog.cluster("2xa100")})
    with pytest.raises(Incompatible, match="packing=false"):
        check(gpus)
    check(gpus.model_copy(update={"workload": e.training.model_copy(update={"packing": False})}))
