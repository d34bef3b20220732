"""The blueprint that all pages register on."""

from __future__ import annotations

from apiflask import APIBlueprint

console = APIBlueprint(
    "console",
    __name__,
    url_prefix="/console",
    enable_openapi=False,  # pages are no part of the tenants' API
    template_folder="templates",
    static_folder="static",
    static_url_path="/static",
)
