"""Storage: who holds how much, what is kept, what goes next."""

from __future__ import annotations

from flask import render_template

from app.console.auth import role
from app.console.blueprint import console
from app.console.cached import Cached
from app.db import transaction
from app.manager import storage_report
from app.manager.storage_report import Storage
from app.settings import get_settings

# What is marked, by kind.
MARKED = {
    "optimizer": "optimizer states of older versions, or without a commit",
    "adapter_model": "adapter weights that are not kept, of ended preflights, or without a commit",
    "adapter_config": "configurations of such adapters",
    "adapter_zip": "zips of such adapters",
    "file": "files that tenants deleted",
}


def _compute() -> Storage:
    with transaction() as session:
        return storage_report.storage(session)


shared = Cached(_compute, seconds=30.0)


@console.get("/storage")
@role("viewer")
def storage() -> str:
    return render_template(
        "console/storage.html",
        report=shared.get(),
        settings=get_settings(),
        marked=MARKED,
        deletion_wait=storage_report.deletion_wait().total_seconds(),
    )
