"""Prefill and decode by vLLM's proxies, which hand what a prefill server answers to a decode server, in
``kv_transfer_params`` of two requests.

Here the decode server asks the prefill server for the cache, as behind a router of ours; what is handed over is where,
signed with the fleet's secret.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict

from ridgeline.serve.detokenize import ServeJob
from ridgeline.serve.fields import Body, Number, PromptTokens, Text
from ridgeline.serve.request import Invalid

if TYPE_CHECKING:
    from ridgeline.serve.transfer.member import FleetMember

FIELD = "kv_transfer_params"


class KvTransfer(Body):
    """``kv_transfer_params``, as vLLM's proxies send them; what other connectors add has no effect."""

    model_config = ConfigDict(extra="ignore")

    do_remote_decode: bool | None = None
    """The prompt's cache will be fetched: the answer says from where."""
    do_remote_prefill: bool | None = None
    """The prompt's cache is fetched, from where a prefill server's answer said."""
    remote_host: Text | None = None
    remote_port: Number | None = None
    remote_signature: Text | None = None
    remote_engine_id: Text | None = None
    """Without effect, like the next ones: servers here check each other's weights when they connect, and find blocks
    by their tokens."""
    remote_block_ids: list[Any] | None = None
    remote_request_id: Text | None = None
    tp_size: Number | None = None
    prompt_token_ids: PromptTokens | None = None
    """The tokens of a conversation's prompt, so that it is not rendered again."""


def hand_over(
    asked: KvTransfer, member: FleetMember | None, jobs: Iterable[ServeJob], host: str
) -> dict[str, Any] | None:
    """Have the prompts of ``jobs`` fetched from where ``asked`` says → what the answer hands over, of a server that is
    reached at ``host``. Raises :class:`Invalid`."""
    if not (asked.do_remote_decode or asked.do_remote_prefill):
        return None
    if member is None:
        what = "asks for a prompt's cache to be sent, and this server has no --role"
        raise Invalid(FIELD, what, "leave it out, or start servers with --role prefill and --role decode")
    if asked.do_remote_prefill:
        where = f"{_bracketed(asked.remote_host or '')}:{asked.remote_port} {asked.remote_signature}"
        if not member.assign(jobs, where):
            what = "is not signed with this fleet's secret"
            raise Invalid(FIELD, what, "hand over what a prefill server answered, unchanged")
    if not asked.do_remote_decode:
        return None
    address, _, signature = member.signed_at(_bracketed(host)).rpartition(" ")
    return {
        "do_remote_prefill": True, "do_remote_decode": False, "remote_host": host,
        "remote_port": int(address.rpartition(":")[2]), "remote_signature": signature,
        "remote_engine_id": member.fingerprint,
    }  # fmt: skip


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
