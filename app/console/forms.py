"""Fields of forms, read into what they mean. Each raises InvalidRequest naming the field."""

from __future__ import annotations

import math
from datetime import date

from flask import request

from app.errors import InvalidRequest


def integer(name: str, label: str) -> int:
    try:
        return int(request.form.get(name, ""))
    except ValueError:
        raise InvalidRequest(f"{label} must be a whole number.", param=name) from None


def decimal(name: str, label: str) -> float:
    try:
        value = float(request.form.get(name, ""))
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InvalidRequest(f"{label} must be a number.", param=name)
    return value


def asked(name: str) -> str | None:
    """A field of the query, or None where it is empty."""
    return request.args.get(name, "").strip() or None


MIN_YEAR, MAX_YEAR = 1970, 9000  # days that have one before and one after them in every time zone


def asked_day(name: str) -> date | None:
    text = asked(name)
    try:
        day = None if text is None else date.fromisoformat(text)
    except ValueError:
        day = date.max
    if day is not None and not MIN_YEAR <= day.year <= MAX_YEAR:
        raise InvalidRequest(f"{name} must be a day as in 2026-01-31.", param=name)
    return day


def asked_number(name: str) -> int | None:
    text = asked(name)
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise InvalidRequest(f"{name} must be a whole number.", param=name)
    return int(text)
