"""The tenants' REST API, in the shape of OpenAI's: `api` is the blueprint; each module puts its routes on it."""

from __future__ import annotations

from app.api import (  # noqa: F401
    checkpoints,
    completions,
    files,
    graders,
    jobs,
    models,
    preflights,
    trajectories,
    usage,
)
from app.api.blueprint import api

__all__ = ["api"]
