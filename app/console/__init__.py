"""The operators' console: server-rendered pages under /console. Managers query and change, pages only show.

Each page is a module that registers its routes on `console` when it is imported here.
"""

from __future__ import annotations

from functools import cache

from flask import Flask, redirect, url_for
from werkzeug.wrappers import Response

from app.console.blueprint import console


def register(app: Flask) -> None:
    """Adds the console to the web application."""
    from app.console import security

    security.configure(app)
    _assemble()
    app.register_blueprint(console)

    @app.get("/")
    def index() -> Response:
        return redirect(url_for("console.overview"))


@cache
def _assemble() -> None:
    """Once a process: a blueprint takes nothing more after an application has it."""
    from app.console import assets, auth, errors, formats, nav, security

    for part in (security, auth, errors, formats, nav, assets):
        part.install(console)
    _import_pages()


def _import_pages() -> None:
    from app.console import (  # noqa: F401
        audit,
        compare,
        data,
        job,
        jobs,
        login,
        new_job,
        overview,
        storage,
        tenants,
        trajectories,
        workers,
    )


__all__ = ["console", "register"]
