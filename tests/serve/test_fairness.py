"""Sharing one engine between clients, and refusing what would come too late."""

import pytest
from tests.serving import engine, model, run

from ridgeline.serve.fair_shares import FairShares
from ridgeline.serve.queue_limits import QueueSpeed
from ridgeline.serve.request import EngineRequest, Sampling
from ridgeline.serve.scheduler import share
from ridgeline.spec.errors import UserError

PROMPT, OUTPUT, SEQS = 8, 6, 2


def request(name, client, priority=0, prompt=PROMPT):
    sampling = Sampling(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
    return EngineRequest(
        name, list(range(1, prompt + 1)), sampling, priority=priority, salt=name.encode(), client=client
    )


def made(policy="fair"):
    eng = engine(model(), max_num_seqs=SEQS)
    share(eng.scheduler, policy)
    return eng


def served(eng, *requests):
    """The requests, in the order in which they end."""
    return [event.request for event in run(eng, *requests)[1] if event.finish]


def test_a_flood_does_not_hold_up_another_client():
    flood, others = [request(f"a{i}", b"a") for i in range(12)], [request(f"b{i}", b"b") for i in range(2)]
    order = {policy: served(made(policy), *flood, *others) for policy in ("priority", "fair")}
    assert order["priority"][-2:] == ["b0", "b1"]
    assert {"b0", "b1"} <= set(order["fair"][:6])
    assert len(order["fair"]) == 14


def test_clients_with_waiting_requests_are_served_alike():
    """Theorem 4.4 of the paper: counters differ by 2 max(w_p L, w_q M) at most, L tokens being the longest prompt and M
    those that are in the batch."""
    eng = made()
    for i in range(20):
        eng.add(request(f"a{i}", b"a", prompt=PROMPT))
        eng.add(request(f"b{i}", b"b", prompt=3 * PROMPT))
    fair, bound = eng.scheduler.fair, 2 * max(3 * PROMPT, 2 * SEQS * (3 * PROMPT + OUTPUT))
    apart = []
    while {s.group.request.client for s in eng.scheduler.waiting} == {b"a", b"b"}:
        eng.step()
        apart.append(abs(fair.served[b"a"] - fair.served[b"b"]))
    assert len(apart) > 20
    assert 0 < max(apart) <= bound


def test_a_client_that_was_away_saves_nothing_up():
    shares = FairShares()
    shares.arrive(b"a", ())
    for _ in range(5):
        shares.admit(b"a", 100)
    shares.arrive(b"b", {b"a"})
    assert shares.served[b"b"] == shares.served[b"a"] == 500
    shares.admit(b"b", 10)
    shares.arrive(b"c", ())  # nobody waits: where the last one that left stood
    assert shares.served[b"c"] == 510
    shares.generated(b"c")
    assert shares.served[b"c"] == 512
    shares.arrive(b"a", {b"c"})
    assert shares.served[b"a"] == 512
    assert shares.first({b"a", b"b", b"c"}) == b"b"


@pytest.mark.parametrize("next_in_line", ["short", "long"])
def test_the_next_prompt_decides_whether_it_goes_in_a_step_of_its_own(next_in_line):
    """Not the oldest one, whose client has been served: of those that fit beside the running sequence only a short one
    does."""
    eng = engine(model(), "-chunked_prefill", max_num_seqs=8, max_num_batched_tokens=32)
    share(eng.scheduler, "fair")
    eng.add(request("running", b"a"))
    eng.step()
    lengths = {"short": (32, 8), "long": (8, 32)}[next_in_line]
    for name, client, prompt in zip(("old", "next"), (b"a", b"b"), lengths, strict=True):
        eng.add(request(name, client, prompt=prompt))
    eng.scheduler.fair.generated(b"a")  # no tie
    batch = {s.group.request.id: n for s, n in eng.scheduler.schedule().tokens.items()}
    assert batch == ({"running": 1, "next": 8} if next_in_line == "short" else {"next": 32})


def test_priority_goes_before_fairness():
    flood = [request(f"a{i}", b"a") for i in range(4)]
    ends = served(made(), *flood, request("b", b"b"), request("now", b"a", priority=-1))
    assert ends.index("now") < ends.index("b") < ends.index("a3")


def test_policies_that_cannot_be():
    eng = made("priority")
    assert eng.scheduler.fair is None
    eng.scheduler.order = lambda queue: len(queue)
    with pytest.raises(UserError, match="batches' cost"):
        share(eng.scheduler, "fair")


def test_how_long_prompts_wait_is_what_steps_have_taken():
    speed = QueueSpeed()
    assert speed.seconds(1000) == 0
    speed.observe(200, 1.0)
    assert speed.seconds(100) == pytest.approx(0.5)
    for _ in range(1000):
        speed.observe(0, 0.01)  # all places are taken
    assert speed.seconds(100) == pytest.approx(0.5)
    speed.observe(200, 1.0)  # one was free: it had been waited for
    assert speed.seconds(100) == pytest.approx(100 * (0.9 + 11) / (0.9 * 200 + 200))
    for _ in range(100):
        speed.observe(10, 1.0)
    assert speed.seconds(100) == pytest.approx(10, rel=1e-3)


def test_who_asks_changes_no_token():
    asked = [request(f"{client}{i}", client.encode()) for i in range(3) for client in "ab"]
    assert run(made("fair"), *asked)[0] == run(made("priority"), *asked)[0]
