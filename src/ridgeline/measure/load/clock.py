"""An event loop whose timers fire on time: ``epoll`` waits whole milliseconds, rounded up; ``select``, microseconds."""

from __future__ import annotations

import asyncio
import select
import selectors
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

if sys.platform == "linux":

    class _Precise(selectors.EpollSelector):
        """Waits with ``select`` on the one descriptor of the epoll, then asks the epoll what there is."""

        def select(self, timeout: float | None = None) -> list[Any]:
            if timeout is not None and timeout > 0:
                select.select([self.fileno()], [], [], timeout)
                timeout = 0
            return super().select(timeout)

    def event_loop() -> asyncio.AbstractEventLoop:
        """A new event loop with timers good to some tens of microseconds."""
        return asyncio.SelectorEventLoop(_Precise())

else:

    def event_loop() -> asyncio.AbstractEventLoop:
        """A new event loop."""
        return asyncio.new_event_loop()


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end on such a loop."""
    loop = event_loop()
    try:
        return loop.run_until_complete(main)
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left))
        loop.close()
