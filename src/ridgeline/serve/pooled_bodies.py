"""Bodies of requests whose texts are read, not continued: ``/v1/embeddings``, ``/classify``, ``/pooling``.

The texts are an ``input``, or one conversation as ``messages``, rendered by the chat template.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ridgeline.serve.chat import Message, template_variables
from ridgeline.serve.fields import Body, Inputs, Number, Salt, Side, StopText, Text, few
from ridgeline.serve.request import Invalid

Encoding = Literal["float", "base64", "bytes", "bytes_only"]
"""``bytes``: a body of bytes, whose header ``metadata`` says what is where; ``bytes_only``: without the header."""
DType = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]


class Read(Body):
    """What all of them have."""

    model: Text | None = None
    truncate_prompt_tokens: Annotated[Number, Field(ge=-1)] | None = None
    truncation_side: Side | None = None
    use_activation: bool | None = None
    """False: logits instead of probabilities, embeddings as long as they are."""
    user: Text | None = None
    """Without effect."""
    priority: Number = 0
    request_id: StopText | None = None
    """The answer's id ends with it."""


class Given(Read):
    """Texts, token ids, or a conversation."""

    input: Inputs | None = None
    add_special_tokens: bool | None = None
    """Whether the tokenizer puts its special tokens around a prompt: by default around texts, which a template that
    writes its own is not."""
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template_kwargs: Annotated[dict[str, Any], BeforeValidator(few)] | None = None
    cache_salt: Salt | None = None
    padding: Literal["max_length", "do_not_pad"] | None = None
    """``max_length``: pad prompts to the context, for models that were trained with padding and without a mask."""

    def check(self) -> None:
        """Raise :class:`Invalid` unless there is one of ``input`` and ``messages``."""
        if (self.input is None) == (self.messages is None):
            raise Invalid("input", "give an input, or messages, and not both", "leave one out")

    @property
    def variables(self) -> dict[str, Any]:
        """Variables of the chat template."""
        return template_variables(self.chat_template_kwargs, None)


class Encoded(Given):
    """Answered with numbers, in one of several encodings."""

    encoding_format: Encoding = "float"
    embed_dtype: DType = "float32"
    """Of encodings other than ``float``, like the next one."""
    endianness: Literal["native", "little", "big"] = "native"
    dimensions: Number | None = None
    """Length of the embeddings, of a model that is trained for several."""
    normalize: bool | None = None
    """False: leave embeddings as long as they are."""


class ChunkSize(Body):
    """How a text that is read as a whole is divided."""

    chunk_size: Annotated[int, Field(ge=1, lt=2**63)]
    """Tokens of a chunk."""


class EmbeddingRequest(Encoded):
    """``POST /v1/embeddings``."""

    late_chunking_params: ChunkSize | None = None
    """A vector for each chunk of a text, instead of one."""


class Classification(Given):
    """``POST /classify``, as vLLM has it."""


class PoolingRequest(Encoded):
    """``POST /pooling``."""

    task: Literal["embed", "classify", "token_embed", "token_classify"] | None = None
    """None: what the model is for. Of a token: one result for each, not pooled."""
