"""A real Chromium for tests: found or installed, driven through Playwright, all that it complains of written down."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, ConsoleMessage, Page, Request, Response

BROWSER_TESTS = Path(__file__).resolve().parent / "browser"
SCREENSHOTS = BROWSER_TESTS / "screenshots"  # artefacts, not in git
AXE = BROWSER_TESTS / "vendor" / "axe-core" / "axe.min.js"

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
INSTALL_SECONDS = 600
SERIOUS = ("serious", "critical")

# Runs before a page's own scripts, and no policy of the page stops it.
REPORT_VIOLATIONS = """
document.addEventListener("securitypolicyviolation", event => console.error(
    `CSP violation: ${event.effectiveDirective} blocked ${event.blockedURI || "inline"} (${event.sample})`));
"""

ABORTED = "net::ERR_ABORTED"  # a download, or a request that the next navigation overtook


class NoChromium(Exception):
    """There is no Chromium, and none could be installed."""


def find_chromium() -> Path:
    """The path of a Chromium: of this machine, else Debian's (root), else Playwright's own. Raises NoChromium."""
    with open(Path(tempfile.gettempdir()) / f"marlaas-chromium-{os.geteuid()}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several test processes one installs it, and the others find it
        return _installed() or _from_debian() or _from_playwright()


def _installed() -> Path | None:
    found = next(filter(None, map(shutil.which, NAMES)), None)
    return Path(found) if found else None


def _from_debian() -> Path | None:
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return None
    print("installing Debian's chromium for the browser tests: some minutes, once", file=sys.stderr, flush=True)
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for arguments in (["update"], ["install", "--yes", "--no-install-recommends", "chromium"]):
        done = subprocess.run(["apt-get", *arguments], env=environment, timeout=INSTALL_SECONDS, stdout=sys.stderr)
        if done.returncode != 0:
            return None
    return _installed()


def _from_playwright() -> Path:
    from playwright.sync_api import sync_playwright

    print("installing Playwright's chromium for the browser tests: some minutes, once", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "playwright", "install", "chromium"]
    try:
        subprocess.run(command, check=True, timeout=INSTALL_SECONDS, stdout=sys.stderr)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise NoChromium(
            "the browser tests need Chromium: install your distribution's package (on Debian and Ubuntu:"
            " apt-get install chromium), so that one of " + ", ".join(NAMES) + " is on PATH"
        ) from error
    with sync_playwright() as playwright:
        return Path(playwright.chromium.executable_path)


@contextmanager
def watched_page(browser: Browser, problems: list[str]) -> Iterator[Page]:
    """A page of its own context; console errors, uncaught exceptions, CSP violations and failed requests are added to
    `problems` as they come."""
    with browser.new_context(viewport={"width": 1280, "height": 800}, reduced_motion="reduce") as context:
        context.set_default_timeout(10_000)
        page = context.new_page()
        page.add_init_script(REPORT_VIOLATIONS)

        def on_console(message: ConsoleMessage) -> None:
            if message.type == "error":
                problems.append(f"console error: {message.text} (at {message.location.get('url')})")

        def on_failed(request: Request) -> None:
            if request.failure != ABORTED:
                problems.append(f"failed request: {request.method} {request.url}: {request.failure}")

        def on_response(response: Response) -> None:
            if response.status >= 400:
                problems.append(f"failed request: {response.request.method} {response.url}: {response.status}")

        page.on("console", on_console)
        page.on("pageerror", lambda error: problems.append(f"uncaught exception: {error}"))
        page.on("requestfailed", on_failed)
        page.on("response", on_response)
        yield page


def check_accessible(page: Page) -> None:
    """Raises AssertionError with what axe-core finds serious or critical in the page as it is now."""
    page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    serious = [
        f"{rule['impact']} {rule['id']}: {rule['help']}: " + "; ".join(node["html"][:200] for node in rule["nodes"][:5])
        for rule in found["violations"]
        if rule["impact"] in SERIOUS
    ]
    assert not serious, f"{page.url} is not accessible:\n" + "\n".join(serious)


def keep_screenshots(page: Page, name: str) -> list[Path]:
    """`<name>-light.png` and `<name>-dark.png` of the whole page, by the system's preference; returns their paths."""
    SCREENSHOTS.mkdir(exist_ok=True)
    kept = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        kept.append(SCREENSHOTS / f"{name}-{scheme}.png")
        page.screenshot(path=kept[-1], full_page=True)
    page.emulate_media(color_scheme="null")
    return kept
