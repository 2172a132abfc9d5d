"""A user's mistake, as one readable message: what was requested, why it is impossible, and what would work."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any


class UserError(Exception):
    """A mistake in the user's input. The command line prints it without a traceback and exits with code 2.

    ``what`` states the problem (naming the offending value and where it is); ``fix`` says what would work.
    """

    def __init__(self, what: str, fix: str = "") -> None:
        self.what = what
        self.fix = fix
        super().__init__(f"{what}\n  fix: {fix}" if fix else what)

    def __reduce__(self) -> tuple[Any, ...]:
        """For another process: whatever the arguments of its class."""
        return _again, (type(self), self.args, self.__dict__)


def _again(kind: type[UserError], args: tuple[Any, ...], state: dict[str, Any]) -> UserError:
    made = kind.__new__(kind, *args)
    made.__dict__.update(state)
    return made


class Incompatible(UserError):
    """A plan that cannot work: raised by a technique's ``check`` with the reason and the fix."""


def nearest(name: str, choices: Iterable[str], n: int = 3) -> list[str]:
    """The up to ``n`` choices most similar to ``name``, in whole or in one of their words, best first (any case)."""
    by_lower = {choice.lower(): choice for choice in choices}
    hits = difflib.get_close_matches(name.lower(), by_lower, n=n, cutoff=0.55)
    hits += [low for low in by_lower if len(name) > 2 and name.lower() in low and low not in hits]
    words = {word: low for low in reversed(by_lower) for word in re.split(r"[-_./ ]", low) if len(word) > 2}
    close = (words[word] for word in difflib.get_close_matches(name.lower(), words, n=n, cutoff=0.75))
    hits += [low for low in dict.fromkeys(close) if low not in hits]
    return [by_lower[hit] for hit in hits[:n]]


def unknown(kind: str, name: str, choices: Iterable[str], where: str = "") -> UserError:
    """The error for a name that is not in ``choices``: names it, where it stands, and the nearest valid names."""
    known = sorted(set(choices))
    close = nearest(name, known)
    place = f" in {where}" if where else ""
    if close:
        fix = f"did you mean {' or '.join(repr(c) for c in close)}?"
    elif len(known) <= 40:
        fix = f"known: {', '.join(known)}"
    else:
        fix = f"known: {', '.join(known[:40])}, … ({len(known)} in all)"
    return UserError(f"unknown {kind} {name!r}{place}", fix)
