"""Frames: a header, a safetensors body, and a tag that proves who wrote it and in which order.

A frame is ``magic (4) | kind (1) | zero (3) | number (8) | length (8) | body | HMAC-SHA256 (32)``, numbers in little
endian. The tag covers header and body; its key is made anew for each connection and direction from the shared secret
and two nonces, and frames are counted from 0, so that none can be forged, dropped, repeated or put elsewhere. Bodies
are safetensors with a JSON message in their metadata: nothing that is read can run code.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import safetensors.torch
from torch import Tensor

MAGIC = b"RLK1"
HEADER = struct.Struct("<4sB3xQQ")
TAG = hashlib.sha256().digest_size
LARGEST = 64 << 20
"""Bytes of a body at most."""
SMALL = 4096
"""Bytes of a body at most, before a peer has shown that it knows the secret."""


class Kind(IntEnum):
    """What a frame says."""

    HELLO = 1
    """Nonce and fingerprint of the sender: the first frame of each side."""
    PREFILL = 2
    """Compute this prompt, and send its keys and values."""
    CANCEL = 3
    """They are no longer wanted."""
    KV = 4
    """Keys and values of some tokens in some layers."""
    FIRST = 5
    """The first token."""
    FAILED = 6
    """The prompt was not computed."""
    PING = 7
    """Still there."""
    ASK = 8
    """A question of a swarm's peer."""
    ANSWER = 9
    """The answer to one."""


class BadPeer(Exception):
    """A peer sent what it must not send: it is refused."""


@dataclass(frozen=True)
class Frame:
    """One frame as it was read."""

    kind: Kind
    message: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    nbytes: int = 0
    """With header and tag."""


def pack(kind: Kind, number: int, key: bytes, message: dict[str, Any], tensors: dict[str, Tensor]) -> list[bytes]:
    """A frame as pieces to write one after another."""
    body = safetensors.torch.save(tensors, {"message": json.dumps(message)})
    if len(body) > LARGEST:
        raise ValueError(f"a frame of {len(body)} bytes, of {LARGEST} at most")
    header = HEADER.pack(MAGIC, kind, number, len(body))
    tag = hmac.new(key, header, "sha256")
    tag.update(body)
    return [header, body, tag.digest()]


def body_length(header: bytes, number: int, most: int = LARGEST) -> int:
    """The length of the body behind a header. Raises :class:`BadPeer`, before anything of it is read."""
    magic, kind, given, length = HEADER.unpack(header)
    if magic != MAGIC:
        raise BadPeer("it sent something else than frames")
    if given != number:
        raise BadPeer(f"it sent frame {given} where frame {number} was due")
    if length > most:
        raise BadPeer(f"it sent a frame of {length} bytes, of {most} at most")
    if kind not in Kind.__members__.values():
        raise BadPeer(f"it sent a frame of unknown kind {kind}")
    return int(length)


def unpack(header: bytes, body: bytes, tag: bytes, key: bytes) -> Frame:
    """The frame. Raises :class:`BadPeer` for a wrong tag, or a body that is not what it should be."""
    expected = hmac.new(key, header, "sha256")
    expected.update(body)
    if not hmac.compare_digest(expected.digest(), tag):
        raise BadPeer("a frame's tag is wrong: another shared secret, or changed on the way")
    kind = Kind(HEADER.unpack(header)[1])
    try:
        size = int.from_bytes(body[:8], "little")
        message = json.loads(json.loads(body[8 : 8 + size])["__metadata__"]["message"])
        tensors = safetensors.torch.load(body)
    except Exception as e:  # the parsers raise several kinds
        raise BadPeer(f"a frame's body cannot be read: {type(e).__name__}") from None
    if not isinstance(message, dict):
        raise BadPeer("a frame's message is not an object")
    return Frame(kind, message, tensors, len(header) + len(body) + len(tag))
