"""Which servers compute a request's prompt and its output: the shortest queue of each pool, for both at once.

Splitwise's cluster scheduler (arXiv:2311.18677, section 4.2): a prompt goes to the prefill server with the fewest
tokens queued, its output to the decode server with the fewest sequences. Where these have too much already, a mixed
server is used, or one of the other pool, which becomes mixed until it has no work of the other kind left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ridgeline.fleet.members import Member

CHARACTERS = 4
"""Characters of a token, about."""
ITERATIONS = 4
"""Full batches of prompt tokens that may be queued before another pool helps."""

Load = Callable[[Member], tuple[int, int]]


class Pools:
    """Chooses pairs of servers. ``say`` gets a line when a server changes its pool."""

    def __init__(self, say: Callable[[str], None] = lambda _: None) -> None:
        self.say = say
        self.flips = 0
        """How often a server of one pool became mixed."""
        self._told: set[tuple[str, str]] = set()

    @staticmethod
    def divided(members: Iterable[Member]) -> bool:
        """Whether any server prefers one of the two kinds of work."""
        return any(m.role in ("prefill", "decode") for m in members)

    def choose(self, able: Sequence[Member], prompts: Sequence[Member], prompt: str) -> tuple[Member, Member | None]:
        """The decode server among ``able``, and the prefill server among ``prompts``, or None where the first computes
        the prompt itself."""
        self._settle({*able, *prompts})
        decode = self._pick(able, "decode", _sequences, lambda m: m.sequences >= m.most_sequences)
        sources = [m for m in prompts if m.source and m.fingerprint == decode.fingerprint] or [decode]
        if all(m.role == "decode" for m in sources):
            self._tell(decode, (m for m in prompts if m.source and m.role != "decode"))
        prefill = self._pick(sources, "prefill", _tokens, lambda m: m.queued_tokens >= ITERATIONS * m.most_tokens)
        decode.sequences += 1
        prefill.queued_tokens += 1 + len(prompt) // CHARACTERS
        return decode, prefill if prefill is not decode and decode.source else None

    def _pick(self, able: Sequence[Member], role: str, load: Load, full: Callable[[Member], bool]) -> Member:
        """The least loaded server of a role; a mixed one where that has too much, and one of the other where those
        have, too."""
        own = [m for m in able if m.role == role]
        mixed = [m for m in able if m.role not in ("prefill", "decode") or (m.role != role and m.lent)]
        other = [m for m in able if m not in own and m not in mixed]
        for some in (own, mixed, other):
            if some and not full(best := min(some, key=load)):
                if some is other:
                    self._lend(best, "the other servers have enough to do" if own or mixed else "no other can help")
                return best
        return min(own or mixed or other, key=load)

    def _lend(self, member: Member, why: str) -> None:
        member.lent = True
        self.flips += 1
        self.say(f"{member.url} is mixed: {why}")

    def _tell(self, decode: Member, unlike: Iterable[Member]) -> None:
        """Say once that ``decode`` cannot use the caches of ``unlike``: a fleet of such servers does without."""
        for m in unlike:
            if (pair := (m.url, decode.url)) not in self._told:
                self._told.add(pair)
                self.say(
                    f"{decode.url} cannot use prompts of {m.url}: give both the same checkpoint, --dtype and --with"
                )

    def _settle(self, members: Iterable[Member]) -> None:
        """Let servers return to their pool that have no work of the other kind left."""
        for m in members:
            if m.lent and not (m.queued_tokens if m.role == "decode" else m.sequences):
                m.lent = False
                self.say(f"{m.url} is for {m.role} again")


def _sequences(m: Member) -> tuple[int, int]:
    return m.sequences, m.sent


def _tokens(m: Member) -> tuple[int, int]:
    return m.queued_tokens, m.sent
