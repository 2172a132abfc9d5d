"""lm-eval (EleutherAI's evaluation harness) against our server; run where it is installed (the extra ``eval``)."""

import json

import pytest
import torch

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
from tests.serving import greedy

CONTEXT = 256
PAIRS = [("The cat", " sat"), ("", "Hello"), ("A longer context, of many tokens indeed,", " x"), ("The", " cat sat")]
ROLLED = ["Some words that roll. " * 30, "short"]


def client(server, folder, **options):
    """lm-eval's model of our server, with the checkpoint's tokenizer or (folder None) the server's."""
    own = {"tokenizer": str(folder), "custom_prefix_token_id": 0} if folder else {}
    url = server.url + "/v1/completions"
    return LocalCompletionsAPI(model="tiny", base_url=url, max_length=CONTEXT, max_retries=1, **own, **options)


def instances(kind, arguments):
    return [Instance(request_type=kind, doc={}, arguments=a, idx=i) for i, a in enumerate(arguments)]


@torch.inference_mode()
def loglikelihood(server, context, continuation):
    """(sum of log-probabilities, whether each token is the likeliest), by one whole pass of the model."""
    logp = server.engine.model(torch.tensor([context + continuation]))[0].log_softmax(-1)[len(context) - 1 : -1]
    ids = torch.tensor(continuation)
    return float(logp.gather(1, ids[:, None]).sum()), bool((logp.argmax(-1) == ids).all())


WAYS = [{"batch_size": 1}, {"batch_size": 3}, {"batch_size": 2, "num_concurrent": 4}]


@pytest.mark.parametrize("options", WAYS, ids=["single", "batches", "concurrent"])
@pytest.mark.parametrize("files", [True, False], ids=["own-tokenizer", "servers-tokenizer"])
def test_log_likelihoods_are_those_of_a_whole_pass(server, folder, files, options):
    lm = client(server, folder if files else None, **options)
    encode = server.service.vocabulary.encode
    sure = "The cat"  # and what the model itself goes on with: a continuation of likeliest tokens
    likeliest = greedy(server.engine.model, encode(sure), 1)
    pairs = [*PAIRS, (sure, server.service.vocabulary.decode(likeliest, skip_special=False))]
    got = lm.loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True)
    expected = [loglikelihood(server, encode(c) or [0], encode(t)) for c, t in pairs]
    assert [g for _, g in got] == [g for _, g in expected]
    assert {g for _, g in got} == {True, False}
    assert [p for p, _ in got] == pytest.approx([p for p, _ in expected], abs=1e-3)
    server.assert_idle()


def test_rolling_log_likelihoods_are_those_of_whole_passes(server):
    got = client(server, None).loglikelihood_rolling(
        instances("loglikelihood_rolling", [(text,) for text in ROLLED]), disable_tqdm=True
    )
    window, expected = CONTEXT - 2, []
    for text in ROLLED:
        ids = [0, *server.service.vocabulary.encode(text)]
        total, done = 0.0, 1
        while done < len(ids):
            upto = min(len(ids), done + window)
            first = max(0, upto - window - 1) if done > 1 else 0  # the last window reaches back to be a full one
            total += loglikelihood(server, ids[first:done], ids[done:upto])[0]
            done = upto
        expected.append(total)
    assert len(server.service.vocabulary.encode(ROLLED[0])) > 2 * window
    assert got == pytest.approx(expected, abs=1e-2)


@pytest.mark.parametrize("options", WAYS, ids=["single", "batches", "concurrent"])
def test_generations_are_greedy_ones_up_to_a_stop(server, options):
    vocabulary, prompts = server.service.vocabulary, ["The cat", "A dog is", "Once upon a time,"]
    free = [vocabulary.decode(greedy(server.engine.model, vocabulary.encode(p), 40, ends=(0,))) for p in prompts]
    stop = next(text[3] for text in free if len(text) > 3)
    asked = [(p, {"until": [stop, "never comes"], "max_gen_toks": 40, "do_sample": False}) for p in prompts]
    got = client(server, None, **options).generate_until(instances("generate_until", asked), disable_tqdm=True)
    assert got == [text.partition(stop)[0] for text in free]
    server.assert_idle()


def test_a_task_scores_as_it_does_in_transformers(server, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    import lm_eval
    from lm_eval.tasks import TaskManager

    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"q": f"number {i} is", "of": i % 3}) + "\n" for i in range(12)))
    data = f"dataset_path: json\ndataset_kwargs:\n  data_files: {{test: {rows}}}\ntest_split: test\n"
    choose, rolled = tmp_path / "choose.yaml", tmp_path / "rolled.yaml"
    choose.write_text(
        f"task: choose\n{data}output_type: multiple_choice\n"
        'doc_to_text: "{{q}}"\ndoc_to_choice: [odd, even, neither]\ndoc_to_target: of\nmetric_list:\n  - metric: acc\n'
    )
    rolled.write_text(
        f"task: rolled\n{data}output_type: loglikelihood_rolling\n"
        'doc_to_text: ""\ndoc_to_target: "{{q}}"\nmetric_list:\n  - metric: word_perplexity\n'
    )
    manager = TaskManager(include_defaults=False)

    def scores(kind, **args):
        options = {"task_manager": manager, "bootstrap_iters": 0, "batch_size": 4}
        found = lm_eval.simple_evaluate(model=kind, model_args=args, tasks=[str(choose), str(rolled)], **options)
        return found["results"]

    ours = scores("local-completions", model="tiny", base_url=server.url + "/v1/completions", max_length=CONTEXT)
    theirs = scores("hf", pretrained=str(folder), prefix_token_id=0, device="cpu")
    assert ours["choose"]["acc,none"] == theirs["choose"]["acc,none"]
    perplexity = "word_perplexity,none"
    assert ours["rolled"][perplexity] == pytest.approx(theirs["rolled"][perplexity], rel=1e-3)
