"""Requests whose prompts are read, not continued, as the engine's: embeddings, classes, pairs that are compared."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ridgeline.serve.detokenize import ServeJob
from ridgeline.serve.fields import prompts_of
from ridgeline.serve.late_chunking import Chunks
from ridgeline.serve.pooled_bodies import Classification, EmbeddingRequest, Given, PoolingRequest, Read
from ridgeline.serve.prepared_request import PreparedRequest
from ridgeline.serve.request import EngineRequest, Invalid
from ridgeline.serve.scoring import RerankRequest, ScoreRequest
from ridgeline.serve.service import Service, salt_of

MOST_PADDED = 1 << 20
"""Largest number of tokens of all prompts of a body that are padded."""
MOST_NUMBERS = 1 << 23
"""Largest number of numbers in an answer with results of every token."""


@dataclass(frozen=True)
class Prompt:
    """Tokens, and for each the kind that it is of (none: all of kind 0)."""

    tokens: list[int]
    kinds: list[int] = field(default_factory=list)


class Reading:
    """The requests of one service. Everything may take long for long prompts, and runs off the event loop."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def embedding(self, body: EmbeddingRequest, key: bytes) -> PreparedRequest:
        """The jobs of embeddings. Raises :class:`Invalid`."""
        self._cuttable(body.dimensions)
        if self._late and body.late_chunking_params is not None:
            what = "needs embeddings of texts; this model has embeddings of tokens only"
            raise Invalid("late_chunking_params", what, "ask /pooling for token_embed")
        prompts, chunks = self._inputs(body), []
        if body.late_chunking_params is not None:
            self._bounded(prompts, self.service.loop.engine.spec.hidden_size)
            chunks = self._chunks(body, body.late_chunking_params.chunk_size)
        prepared = self._read("embd", body, prompts, key, False, body.cache_salt, bool(chunks))
        return replace(prepared, chunks=chunks)

    def _chunks(self, body: EmbeddingRequest, size: int) -> list[Chunks]:
        """The chunks of each input. Raises :class:`Invalid` where they are not texts that are read as they are."""
        texts = [] if body.input is None else prompts_of(body.input, "input")
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise Invalid("late_chunking_params", "is for texts, none of them empty", "give texts as input")
        for name, plain in (("truncate_prompt_tokens", None), ("padding", "do_not_pad"), ("add_special_tokens", True)):
            if getattr(body, name) not in (None, plain):
                raise Invalid(name, "changes a text that is divided into chunks", "leave it out")
        return [Chunks(size, self.service.vocabulary.offsets(text)) for text in texts]

    @property
    def _late(self) -> bool:
        """Whether texts are compared by vectors of their tokens (late interaction)."""
        return self.service.loop.engine.spec.head == "project"

    @property
    def _width(self) -> int:
        """Numbers in a vector."""
        spec = self.service.loop.engine.spec
        return spec.projection_size or spec.hidden_size

    def _bounded(self, prompts: Sequence[Prompt], width: int, param: str = "input") -> None:
        """Raise :class:`Invalid` where ``width`` numbers for each token are too many."""
        numbers = sum(len(p.tokens) for p in prompts) * width
        if numbers > MOST_NUMBERS:
            fix = "ask in several requests" if len(prompts) > 1 else "send a shorter input"
            raise Invalid(param, f"makes {numbers} numbers, of {MOST_NUMBERS} at most", fix)

    def classification(self, body: Classification, key: bytes) -> PreparedRequest:
        """The jobs of classifications. Raises :class:`Invalid`."""
        return self._read("classify", body, self._inputs(body), key, True, body.cache_salt)

    def pooled(self, body: PoolingRequest, key: bytes) -> PreparedRequest:
        """The jobs of ``/pooling``. Raises :class:`Invalid`."""
        classify = self.service.labels is not None if body.task is None else body.task.endswith("classify")
        for name in ("dimensions", "normalize") if classify else ():
            if getattr(body, name) is not None:
                raise Invalid(name, "has an effect on embeddings only", "leave it out")
        self._cuttable(body.dimensions)
        each = self._late if body.task is None else body.task.startswith("token_")
        prompts, spec = self._inputs(body), self.service.loop.engine.spec
        if each:
            self._bounded(prompts, spec.num_labels if classify else body.dimensions or self._width)
        return self._read("pooling", body, prompts, key, classify, body.cache_salt, each)

    def scored(self, body: ScoreRequest | RerankRequest, key: bytes) -> PreparedRequest:
        """The jobs of the texts that are compared: the first ones of all pairs, then the second ones; or of the pairs,
        where the model is a cross-encoder. Raises :class:`Invalid`."""
        first, second = body.texts()
        if isinstance(body, RerankRequest) and body.max_tokens_per_doc:
            second = [self._beginning(text, body.max_tokens_per_doc) for text in second]
        if self.service.labels is not None:
            return self._read("score", body, self._pairs(body, first, second), key, True)
        prompts = [
            Prompt(p)
            for name, texts in zip(body.names, (first, second), strict=True)
            for p in self.service.prompts(texts, name, True, body.truncate_prompt_tokens, body.truncation_side)
        ]
        if self._late:
            self._bounded(prompts, self._width, body.names[1])
        return self._read("score", body, prompts, key, False, each=self._late)

    def _pairs(self, body: ScoreRequest | RerankRequest, first: list[str], second: list[str]) -> list[Prompt]:
        """The prompts of a cross-encoder: both texts of a pair, told apart by the kinds of their tokens."""
        service, most = self.service, body.truncate_prompt_tokens
        assert service.labels is not None
        if len(service.labels.names) != 1:
            what = f"has {len(service.labels.names)} classes, where a cross-encoder has one"
            raise Invalid("model", what, "ask /classify, or serve a cross-encoder")
        if body.truncation_side == "left":
            raise Invalid("truncation_side", "is the right one of pairs, of whose longer text is cut", "leave it out")
        for name, texts in zip(body.names, (first, second), strict=True):
            for text in texts:
                service.short(text, name)
        longest = service.longest_kept(most)
        found = []
        for a, b in zip(first * (len(second) if len(first) == 1 else 1), second, strict=True):
            tokens, kinds = service.vocabulary.pair(a, b, longest)
            service.fits(tokens, body.names[1])
            found.append(Prompt(tokens, kinds))
        return found

    def _beginning(self, text: str, most: int) -> str:
        """The first ``most`` tokens of a text. Raises :class:`Invalid`."""
        self.service.short(text, "documents")
        tokens = self.service.vocabulary.encode(text, special=False)
        return text if len(tokens) <= most else self.service.vocabulary.decode(tokens[:most])

    def _inputs(self, body: Given) -> list[Prompt]:
        body.check()
        cut = (body.truncate_prompt_tokens, body.truncation_side)
        service = self.service
        if body.messages is not None:
            found = [service.chat_prompt(body, body.messages, *cut, special=bool(body.add_special_tokens))]
        else:
            assert body.input is not None
            special = body.add_special_tokens is not False
            found = service.prompts(prompts_of(body.input, "input"), "input", special, *cut)
        if body.padding == "max_length":
            pad = service.vocabulary.tokenizer.token_to_id(service.special.get("pad_token", ""))
            if pad is None:
                raise Invalid("padding", "needs a padding token, which this tokenizer lacks", "leave it out")
            if len(found) * service.max_model_len > MOST_PADDED:
                what = f"makes {len(found)} prompts of {service.max_model_len} tokens, of {MOST_PADDED} tokens at most"
                raise Invalid("padding", what, "ask in several requests")
            found = [prompt + [pad] * (service.max_model_len - len(prompt)) for prompt in found]
        return [Prompt(prompt) for prompt in found]

    def _cuttable(self, dimensions: int | None) -> None:
        """Raise :class:`Invalid` where embeddings cannot be cut to ``dimensions``."""
        known = self.service.dimensions
        if dimensions is None:
            return
        if known is not None and dimensions not in known:
            what = f"is {dimensions}, and the model was not trained for embeddings of this length"
            named = ", ".join(map(str, sorted(known)))
            raise Invalid("dimensions", what, f"give one of {named}" if named else "leave it out")
        width = self._width
        if not 1 <= dimensions <= width:
            raise Invalid("dimensions", f"is {dimensions}, outside 1 to {width}", "give a length inside")

    def _read(self, kind: str, body: Read, prompts: Sequence[Prompt], key: bytes, classify: bool,
              own: str | None = None, each: bool = False) -> PreparedRequest:  # fmt: skip
        """The jobs of ``prompts``."""
        service, salt, client = self.service, salt_of(key, own), salt_of(key, None)
        adapter, base = service.adapter(body.model), f"{kind}-{uuid.uuid4().hex}"
        jobs = [
            ServeJob(
                EngineRequest(f"{base}-{i}", prompt.tokens, adapter=adapter, salt=salt, priority=body.priority,
                              embed=True, pooling=service.pooling, classify=classify, token_types=prompt.kinds,
                              client=client, each=each),
                service.vocabulary, i,
            )
            for i, prompt in enumerate(prompts)
        ]  # fmt: skip
        name = base if body.request_id is None else f"{kind}-{body.request_id}"
        return PreparedRequest(name, body.model or service.name, jobs)
