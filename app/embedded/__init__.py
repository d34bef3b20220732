"""Postgres, Valkey and SeaweedFS from their PyPI wheels: real servers, no Docker, no root, one state directory."""

from app.embedded.stack import EmbeddedStack

__all__ = ["EmbeddedStack"]
