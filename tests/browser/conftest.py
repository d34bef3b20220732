"""Fixtures of the browser tests: a real headless Chromium, and pages that fail their test by any complaint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.browsing import NoChromium, find_chromium, watched_page

expect.set_options(timeout=15_000)  # workers and other tests use the same cores


@pytest.fixture(scope="session")
def chromium() -> Path:
    """The browser's path; installed where it is missing. Fails, never skips, where it cannot be had."""
    try:
        return find_chromium()
    except NoChromium as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="session")
def browser(chromium: Path) -> Iterator[Browser]:
    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=chromium) as browser:
        yield browser


@pytest.fixture
def problems() -> list[str]:
    """What the page complained of so far. A test that provokes a complaint checks it here and clears the list."""
    return []


@pytest.fixture
def page(browser: Browser, problems: list[str]) -> Iterator[Page]:
    """A page of its own context (1280 × 800). Fails the test, once it is over, by any problem that is left."""
    with watched_page(browser, problems) as page:
        yield page
    assert not problems, "the browser complained:\n" + "\n".join(problems)
