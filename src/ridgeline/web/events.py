"""Server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi.responses import StreamingResponse


def event_stream(events: AsyncIterator[dict[str, Any]]) -> StreamingResponse:
    """A response that sends each object as one event."""

    async def lines() -> AsyncIterator[str]:
        async for event in events:
            yield f"data: {json.dumps(event)}\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})
