"""The checks of the browser tests can fail: each kind of complaint is caught, and a clean page has none."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import pytest
from playwright.sync_api import Page

from tests.browsing import NoChromium, check_accessible, find_chromium, keep_screenshots

ADDRESS = "http://page.test/"  # answered by the test itself, nothing goes out
CLEAN = (
    '<!doctype html><html lang="en"><head><title>Clean</title></head><body><main><h1>Clean</h1>{}</main></body></html>'
)
STRICT = {"Content-Security-Policy": "default-src 'self'", "Content-Type": "text/html; charset=utf-8"}


def serve(page: Page, body: str, headers: dict[str, str] | None = None) -> None:
    """Shows a page with `body` in it; every other address answers 404."""
    page.route("**/*", lambda route: route.fulfill(status=404, body=""))
    page.route(ADDRESS, lambda route: route.fulfill(body=CLEAN.format(body), headers=headers or STRICT))
    page.route(ADDRESS + "favicon.ico", lambda route: route.fulfill(status=204))
    page.goto(ADDRESS)


def caught(page: Page, problems: list[str], kind: str) -> bool:
    """Whether a problem of this kind was noticed; forgets all, as they were provoked."""
    page.wait_for_load_state("networkidle")
    found = any(problem.startswith(kind) for problem in problems)
    problems.clear()
    return found


def test_a_clean_page_under_a_strict_policy_has_no_problems(page: Page, problems: list[str]) -> None:
    serve(page, '<p>Nothing to see. <a href="/">Home</a></p>')
    check_accessible(page)
    assert problems == []


@pytest.mark.parametrize(
    ("body", "headers", "kind"),
    [
        ("<script>console.error('broken')</script>", {"Content-Type": "text/html"}, "console error: broken"),
        ("<script>undefined.broken</script>", {"Content-Type": "text/html"}, "uncaught exception"),
        ("<script>1</script>", STRICT, "console error: CSP violation: script-src-elem blocked inline"),
        ("<p style='color: red'>red</p>", STRICT, "console error: CSP violation: style-src-attr blocked inline"),
        ("<img src='/missing.png' alt=''>", STRICT, f"failed request: GET {ADDRESS}missing.png: 404"),
    ],
    ids=["console-error", "exception", "script-policy", "style-policy", "not-found"],
)
def test_a_complaint_is_caught(page: Page, problems: list[str], body: str, headers: dict[str, str], kind: str) -> None:
    serve(page, body, headers)
    assert caught(page, problems, kind)


@pytest.mark.parametrize(
    ("body", "rule"),
    [("<img src='data:image/gif;base64,R0lGODlhAQABAAAAACw='>", "image-alt"), ("<input>", "label")],
    ids=["image-without-text", "field-without-label"],
)
def test_an_inaccessible_page_is_caught(page: Page, problems: list[str], body: str, rule: str) -> None:
    serve(page, body)
    with pytest.raises(AssertionError, match=rule):
        check_accessible(page)
    problems.clear()  # the policy of this page forbids the image


def test_screenshots_are_kept_in_both_themes(page: Page) -> None:
    serve(page, "<p>Nothing to see.</p>")
    assert [path.name for path in keep_screenshots(page, "checks")] == ["checks-light.png", "checks-dark.png"]


def test_where_no_chromium_can_be_had_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: list[str], **_: Any) -> None:
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(shutil, "which", lambda _name: None)
    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(NoChromium, match="apt-get install chromium"):
        find_chromium()
