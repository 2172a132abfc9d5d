"""Mixed traffic: what many users of a server do at once, request for request a function of its number."""

from __future__ import annotations

import http.client
import json
import random
import string
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.serve import malformed

LEFT = 0
"""The status of a request whose client went away."""
BROKEN = 599
"""That of a stream which did not come to its end, or told of an error."""
PREFIXES = [f"You are assistant {c * 3}, and you answer in {c} words or so. " for c in string.ascii_lowercase[:6]]
WORDS = [c * n for c in string.ascii_lowercase[:8] for n in range(1, 9)]
"""As few as a text's: a tokenizer remembers the words it has met, up to some thousands."""
KINDS = {
    "plain": 6, "stream": 5, "cut": 3, "left": 2, "outputs": 2, "beams": 1, "stops": 2, "structured": 2, "chat": 2,
    "embedding": 1, "adapter": 3, "switch": 1, "long": 2, "malformed": 2,
}  # fmt: skip
"""Kinds of requests, and how many there are of each in thirty-four."""


class Traffic:
    """Requests to the server at ``url``. ``adapters``: folders to load and unload by ``admin``'s key, under names that
    are always new."""

    def __init__(self, url: str, adapters: list[Path] = (), admin: str = "") -> None:
        self.netloc, self.adapters, self.admin = urlsplit(url).netloc, adapters, admin
        self.statuses: Counter[int] = Counter()
        self.kinds: Counter[str] = Counter()
        self._loaded: list[str] = []
        self._lock = threading.Lock()

    def send(self, number: int) -> int:
        """Send request ``number`` and wait for its answer → the status."""
        rng = random.Random(number)
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
        if not self.adapters and kind in ("adapter", "switch"):
            kind = "plain"
        status = getattr(self, f"_{kind}", self._completion)(kind, rng)
        with self._lock:
            self.statuses[status] += 1
            self.kinds[kind] += 1
        return status

    def unload_all(self) -> None:
        """Forget every adapter; nobody may be using one."""
        while self._loaded:
            name = self._loaded.pop()
            assert self._post("/v1/unload_lora_adapter", {"lora_name": name}, key=self.admin) == 200, name

    # ---- kinds -------------------------------------------------------------------------------------------------------

    def _completion(self, kind: str, rng: random.Random) -> int:
        body: dict[str, Any] = {"prompt": _prompt(rng), "max_tokens": rng.randint(1, 10), "seed": rng.randrange(99)}
        if rng.random() < 0.3:
            body |= {"logprobs": 2, "echo": rng.random() < 0.5}
        if kind == "outputs":
            body |= {"n": rng.randint(2, 4), **({"best_of": 5} if rng.random() < 0.3 and "echo" not in body else {})}
        elif kind == "beams":
            body = {"prompt": body["prompt"], "max_tokens": 6, "use_beam_search": True, "n": 2, "best_of": 3}
        elif kind == "stops":
            body |= {"max_tokens": 24, "stop": rng.sample(string.ascii_letters, 8), "ignore_eos": True}
        elif kind == "long":
            body |= {"max_tokens": 48, "ignore_eos": True, "n": 2, "top_p": 0.9, "frequency_penalty": 0.5}
        elif kind == "structured":
            size = rng.randint(1, 6)
            body["structured_outputs"] = rng.choice(
                [{"regex": f"[a-f]{{{size}}}x"}, {"choice": [rng.choice(string.ascii_letters) * n for n in (1, 2)]},
                 {"json": {"type": "array", "items": {"type": "boolean"}, "maxItems": size}}]
            )  # fmt: skip
            body["max_tokens"] = 40
        return self._post("/v1/completions", body, stream=kind == "stream" or rng.random() < 0.2)

    def _cut(self, kind: str, rng: random.Random) -> int:
        """A stream whose client goes after the first bytes."""
        body = {"prompt": _prompt(rng), "max_tokens": 60, "ignore_eos": True, "n": rng.randint(1, 3), "stream": True}
        return self._post("/v1/completions", body, read=1)

    def _left(self, kind: str, rng: random.Random) -> int:
        return self._post("/v1/completions", {"prompt": _prompt(rng), "max_tokens": 60, "ignore_eos": True}, read=0)

    def _chat(self, kind: str, rng: random.Random) -> int:
        messages = [{"role": "system", "content": rng.choice(PREFIXES)}, {"role": "user", "content": "Hi"}]
        body = {"messages": messages, "max_tokens": rng.randint(1, 10)}
        return self._post("/v1/chat/completions", body, stream=rng.random() < 0.5)

    def _embedding(self, kind: str, rng: random.Random) -> int:
        return self._post("/v1/embeddings", {"input": [_prompt(rng), "a"]})

    def _adapter(self, kind: str, rng: random.Random) -> int:
        with self._lock:
            name = rng.choice(self._loaded) if self._loaded else None
        body = {"prompt": _prompt(rng), "max_tokens": rng.randint(1, 10), **({"model": name} if name else {})}
        return self._post("/v1/completions", body, stream=rng.random() < 0.3)

    def _switch(self, kind: str, rng: random.Random) -> int:
        """Unload the oldest of three adapters (it may be in use), or load another (the pool may be full)."""
        with self._lock:
            old = self._loaded.pop(0) if len(self._loaded) >= 3 else None
        if old is not None:
            verb, name, body = "unload", old, {"lora_name": old}
        else:
            name = f"adapter-{rng.getrandbits(64):x}"
            verb, body = "load", {"lora_name": name, "lora_path": str(rng.choice(self.adapters))}
        status = self._post(f"/v1/{verb}_lora_adapter", body, key=self.admin)
        if (status == 200) == (verb == "load"):
            with self._lock:
                self._loaded.append(name)
        return status

    def _malformed(self, kind: str, rng: random.Random) -> int:
        method, path, raw, headers = malformed.request(rng.getrandbits(40))
        return self._ask(method, path, raw, headers)

    # ---- the wire ----------------------------------------------------------------------------------------------------

    def _post(
        self, path: str, body: dict[str, Any], stream: bool = False, key: str = "", read: int | None = None
    ) -> int:
        headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
        if stream:
            body = {**body, "stream": True}
        return self._ask("POST", path, json.dumps(body).encode(), headers, read)

    def _ask(self, method: str, path: str, raw: bytes, headers: dict[str, str], read: int | None = None) -> int:
        """The status; ``read``: go away after so many bytes of the answer."""
        connection = http.client.HTTPConnection(self.netloc, timeout=60)
        try:
            connection.request(method, path, raw, headers)
            if read == 0:
                return LEFT
            reply = connection.getresponse()
            if read is not None:
                reply.read(read)
                return LEFT if reply.status == 200 else reply.status
            text = reply.read()
            if reply.getheader("content-type", "").startswith("text/event-stream"):
                whole = text.endswith(b"data: [DONE]\n\n") and b'data: {"error"' not in text
                return reply.status if whole else BROKEN
            return reply.status
        finally:
            connection.close()


def _prompt(rng: random.Random) -> str:
    return rng.choice(PREFIXES) + " ".join(rng.choices(WORDS, k=rng.randint(0, 5)))


def hammer(
    count: int, clients: int, send: Callable[[int], object], every: int = 0, mark: Callable[[int], object] = int
) -> None:
    """``send(0)`` to ``send(count - 1)`` by so many clients at a time; before each ``every``-th, ``mark`` it, by one at
    a time. Raises what a client raised."""
    numbers, lock, failures = iter(range(count)), threading.Lock(), []

    def client() -> None:
        try:
            while not failures:
                with lock:
                    number = next(numbers, None)
                    if number is not None and every and number % every == 0:
                        mark(number)
                if number is None:
                    return
                send(number)
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if failures:
        raise failures[0]
