"""Lists in OpenAI's shape, page by page: `after` is the id of the last entry that the caller has."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, Generic, Literal, TypeVar, TypeVarTuple

import pydantic
from sqlalchemy import Row, Select, tuple_
from sqlalchemy.orm import InstrumentedAttribute, Session

from app.api.ids import not_found

Item = TypeVar("Item")
Columns = TypeVarTuple("Columns")


class PageQuery(pydantic.BaseModel):
    """Query of a list. Parse `after` with the function of its kind in `app.api.ids`."""

    after: str | None = pydantic.Field(None, max_length=512, description="id of the last entry of the page before")
    limit: int = pydantic.Field(20, ge=1, le=100)


class ListOf(pydantic.BaseModel, Generic[Item]):
    """Derive from it to document a list: `class FileList(ListOf[FileObject])`."""

    object: Literal["list"] = "list"
    data: list[Item]
    has_more: bool
    first_id: str | None
    last_id: str | None


def page(data: Sequence[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": list(data),
        "has_more": has_more,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
    }


def select_page(
    session: Session,
    statement: Select[*Columns],
    created: InstrumentedAttribute[Any],
    key: InstrumentedAttribute[uuid.UUID],
    after: uuid.UUID | None,
    limit: int,
    order: Literal["asc", "desc"] = "desc",
) -> tuple[Sequence[Row[*Columns]], bool]:
    """(rows, whether there are more) of `statement` by (created, key), from behind the row whose key is `after`.

    The statement filters by tenant; a row that it does not see is no place to go on from: NotFound.
    """
    if after is not None:
        last = session.execute(statement.with_only_columns(created).where(key == after)).first()
        if last is None:
            raise not_found("entry", str(after), "after")
        place, here = tuple_(created, key), tuple_(last[0], after)
        statement = statement.where(place > here if order == "asc" else place < here)
    by = (created.asc(), key.asc()) if order == "asc" else (created.desc(), key.desc())
    rows = session.execute(statement.order_by(*by).limit(limit + 1)).all()
    return rows[:limit], len(rows) > limit
