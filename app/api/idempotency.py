"""The same POST twice makes one thing: by Idempotency-Key, or by body where OpenAI's client says that it retries.

The answer is stored in the transaction of what the request made, so that both are there or neither is.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from typing import Any

from flask import g, request
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from app.api.auth import caller, tenant_transaction
from app.api.blueprint import annotate
from app.api.errors import IdempotencyMismatch
from app.errors import InvalidRequest
from app.models import StoredAnswer

Answer = tuple[dict[str, Any], int]
HEADER = "Idempotency-Key"
RETRIES = "x-stainless-retry-count"  # sent by OpenAI's client, which sends no key
MAX_KEY = 255
RETRY_WINDOW = timedelta(minutes=10)


@dataclass(frozen=True)
class Mark:
    """What makes a request the same as another one."""

    tenant_id: uuid.UUID
    key_id: uuid.UUID
    key: str | None
    digest: bytes
    retry: bool


def mark(content: bytes | None = None) -> Mark:
    """Of this request. `content`: what stands for its body; by default the JSON body, whatever its spacing and order.

    Raises InvalidRequest for a key that is none.
    """
    who, key = caller(), request.headers.get(HEADER)
    if key is not None and not (1 <= len(key) <= MAX_KEY and key.isascii() and key.isprintable()):
        raise InvalidRequest(f"{HEADER} has 1 to {MAX_KEY} printable ASCII characters", param=HEADER)
    if content is None:
        document = request.get_json() if request.is_json else None
        content = json.dumps(document, sort_keys=True).encode()
    parts = (who.key_id.hex, request.method, request.path, hashlib.sha256(content).hexdigest())
    retry = request.headers.get(RETRIES, "0").isdecimal() and int(request.headers.get(RETRIES, "0")[:6]) > 0
    return Mark(who.tenant_id, who.key_id, key, hashlib.sha256("\n".join(parts).encode()).digest(), retry)


def stored_answer(session: Session, mark: Mark) -> Answer | None:
    """The first one's answer, where this request is one again. Holds off equal requests until the transaction ends.

    Raises IdempotencyMismatch where the key was used for something else.
    """
    name = f"idempotency:{mark.tenant_id}:{mark.key or mark.digest.hex()}"
    session.execute(select(func.pg_advisory_xact_lock(func.hashtextextended(name, 0))))
    mine = select(StoredAnswer).where(StoredAnswer.tenant_id == mark.tenant_id)
    if mark.key is not None:
        found = session.scalars(mine.where(StoredAnswer.key == mark.key)).first()
        if found is not None and found.request_digest != mark.digest:
            raise IdempotencyMismatch(
                f"This {HEADER} was used for another request. Use a new one for each thing to be made.", param=HEADER
            )
    elif mark.retry:
        found = session.scalars(
            mine.where(
                StoredAnswer.request_digest == mark.digest,
                StoredAnswer.created_at > func.now() - RETRY_WINDOW,
            )
            .order_by(StoredAnswer.created_at.desc(), StoredAnswer.id.desc())
            .limit(1)
        ).first()
    else:
        return None
    if found is None:
        return None
    g.replayed = True
    return found.answer, found.status


def store_answer(session: Session, mark: Mark, answer: dict[str, Any], status: int) -> None:
    session.add(
        StoredAnswer(
            tenant_id=mark.tenant_id,
            api_key_id=mark.key_id,
            key=mark.key,
            request_digest=mark.digest,
            status=status,
            answer=answer,
        )
    )


def idempotent(handler: Callable[..., Answer]) -> Callable[..., Answer]:
    """Makes `handler(session, **views' arguments) -> (answer, status)` run at most once; stands under all else.

    The handler runs in the tenant's transaction, in which nothing waits for the network. `answer` is plain JSON.
    """

    @wraps(handler)
    def wrapper(**arguments: Any) -> Answer:
        this = mark()
        with tenant_transaction() as session:
            known = stored_answer(session, this)
            if known is not None:
                return known
            answer, status = handler(session, **arguments)
            store_answer(session, this, answer, status)
        return answer, status

    annotate(wrapper, idempotent=True)
    return wrapper
