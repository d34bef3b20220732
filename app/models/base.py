"""Declarative base, column types that recur, and the naming of constraints."""

from __future__ import annotations

import uuid
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

from sqlalchemy import BigInteger, DateTime, Identity, MetaData, Text, func
from sqlalchemy.dialects.postgresql import JSONB, UUID
from sqlalchemy.orm import DeclarativeBase, mapped_column

NAMES = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}


class Base(DeclarativeBase):
    metadata = MetaData(naming_convention=NAMES)
    type_annotation_map = {
        str: Text(),
        datetime: DateTime(timezone=True),
        dict[str, Any]: JSONB(),
        list[dict[str, Any]]: JSONB(),
        list[str]: JSONB(),
        uuid.UUID: UUID(as_uuid=True),
    }


UuidKey = Annotated[uuid.UUID, mapped_column(primary_key=True, default=uuid.uuid4)]
BigKey = Annotated[int, mapped_column(BigInteger, Identity(), primary_key=True)]
Created = Annotated[datetime, mapped_column(server_default=func.now())]
BigInt = Annotated[int, mapped_column(BigInteger)]


def one_of(column: str, values: type[StrEnum]) -> str:
    """The text of a CHECK constraint that keeps a column inside an enum."""
    return f"{column} IN ({', '.join(repr(v.value) for v in values)})"
