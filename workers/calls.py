"""The worker's side of a call (see `app.calls`): take its payload once, answer as long as somebody listens."""

from __future__ import annotations

import json
import time

from app.calls import END, GRACE_SECONDS, Message, client, payload_key, stream_key


def take(call_id: str) -> Message | None:
    """The payload, for the first who asks, with `until`, when its caller gives up, by this machine's clock.

    None: late, a duplicate, taken back, or forged. What is left is told by Redis, as hosts' clocks may differ.
    """
    with client().pipeline() as pipe:
        pipe.pttl(payload_key(call_id))
        pipe.getdel(payload_key(call_id))
        left, found = pipe.execute()
    if not found:
        return None
    payload: Message = json.loads(found)
    return payload | {"until": time.time() + left / 1000 - GRACE_SECONDS}


class Reply:
    """Answers one call. Methods return False once the caller has gone: stop working for it."""

    def __init__(self, call_id: str) -> None:
        self._stream = stream_key(call_id)

    def send(self, message: Message) -> bool:
        return client().xadd(self._stream, {"message": json.dumps(message)}, nomkstream=True) is not None

    def end(self, message: Message | None = None) -> bool:
        """The last message."""
        return self.send({**(message or {}), END: True})

    def alive(self) -> bool:
        """A sign of life, as a caller gives up a worker that is silent for `app.calls.SILENT_SECONDS`."""
        return self.send({})

    def wanted(self) -> bool:
        """Whether the caller still listens."""
        return bool(client().exists(self._stream))
