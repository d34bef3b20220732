"""The entries of the navigation."""

from __future__ import annotations

from dataclasses import dataclass

from flask import Blueprint, request, url_for


@dataclass(frozen=True)
class Entry:
    label: str
    page: str  # the endpoint, and the name in static/console/icons.svg

    @property
    def url(self) -> str:
        return url_for(f"console.{self.page}")

    @property
    def current(self) -> bool:
        """Whether the request is for its page or one below it."""
        below = self.page != "overview" and request.path.startswith(f"{self.url}/")
        return request.path == self.url or below


ENTRIES = (
    Entry("Overview", "overview"),
    Entry("Jobs", "jobs"),
    Entry("Compare", "compare"),
    Entry("Tenants", "tenants"),
    Entry("Workers", "workers"),
    Entry("Storage", "storage"),
    Entry("Audit", "audit"),
)


def install(console: Blueprint) -> None:
    console.app_context_processor(lambda: {"navigation": ENTRIES})
