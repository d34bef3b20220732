"""Links to static files that change with the content, so that browsers may keep them for ever."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

from flask import Blueprint, url_for

STATIC = Path(__file__).parent / "static"


def install(console: Blueprint) -> None:
    console.app_template_global("asset")(asset)


def asset(name: str) -> str:
    """The address of `static/<name>`. Raises FileNotFoundError when there is none."""
    path = STATIC / name
    return url_for("console.static", filename=name, v=_digest(path, path.stat().st_mtime_ns))


@lru_cache(maxsize=256)
def _digest(path: Path, _changed: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
