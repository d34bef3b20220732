"""Numbers, sizes and times for people, as template filters."""

from __future__ import annotations

from datetime import UTC, datetime

from flask import Blueprint


def install(console: Blueprint) -> None:
    for filter_ in (ago, until, duration, size, count, percent, number, moment):
        console.app_template_filter(filter_.__name__)(filter_)


def duration(seconds: float | None) -> str:
    """`12 s`, `3 min`, `2 h 07 min`, `4 d 3 h`."""
    if seconds is None:
        return "–"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min" if whole >= 600 else f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def ago(when: datetime | None) -> str:
    if when is None:
        return "never"
    seconds = (datetime.now(UTC) - when).total_seconds()
    return "just now" if seconds < 2 else f"{_coarse(seconds)} ago"


def until(when: datetime) -> str:
    seconds = (when - datetime.now(UTC)).total_seconds()
    return "now" if seconds < 1 else f"in {_coarse(seconds)}"


def _coarse(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{seconds:.0f} s"


def moment(when: datetime) -> str:
    return f"{when.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def size(amount: float) -> str:
    """Bytes, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def count(amount: float) -> str:
    """`950`, `12.3k`, `4.56M`."""
    for unit, length in (("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if amount >= length:
            return f"{amount / (1e3 if unit == 'k' else length):.3g}{unit}"
    return f"{amount:,.0f}"


def number(amount: float | None, digits: int = 3) -> str:
    return "–" if amount is None else f"{amount:.{digits}g}"


def percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"
