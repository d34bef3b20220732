"""How the console's pages behave in a real browser, with made-up workers: empty, live, narrow, by keyboard."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from app.console import overview, storage, workers
from app.models import Tenant
from tests import by_hand
from tests.browsing import check_accessible
from tests.console_client import PASSWORD, make_operator
from tests.service.conftest import bells, clean, hand, server, tenant, web_app  # noqa: F401

PHONE = {"width": 390, "height": 844}
PAGES = {
    "overview": "/console/",
    "tenants": "/console/tenants",
    "new-tenant": "/console/tenants/new",
    "workers": "/console/workers",
    "storage": "/console/storage",
    "audit": "/console/audit",
}


@pytest.fixture
def data(tenant: Tenant) -> Tenant:  # noqa: F811
    """A little of everything."""
    job_id = by_hand.start_job(tenant)
    by_hand.step(job_id)
    by_hand.to_phase(by_hand.start_job(tenant), "generating")
    return tenant


@pytest.fixture
def console(page: Page, server: str, hand: None) -> Iterator[Page]:  # noqa: F811
    """Logged in as an admin, at the overview. Figures are of this test."""
    for shared in (overview.shared, storage.shared, workers.shared):
        shared.forget()
    make_operator("ada")
    page.goto(f"{server}/console/")
    page.get_by_label("Name").fill("ada")
    page.get_by_label("Password").fill(PASSWORD)
    page.keyboard.press("Enter")
    page.wait_for_url(f"{server}/console/")
    yield page
    page.goto("about:blank")  # nothing polls once the test is over


def visit(console: Page, server: str, path: str) -> None:  # noqa: F811
    console.goto(server + path)
    console.wait_for_load_state("networkidle")


@pytest.mark.parametrize("name", PAGES)
def test_pages_without_data_are_accessible(console: Page, server: str, name: str) -> None:  # noqa: F811
    visit(console, server, PAGES[name])
    check_accessible(console)


def test_what_cannot_be_undone_is_asked_for(console: Page, server: str, data: Tenant) -> None:  # noqa: F811
    visit(console, server, "/console/workers")
    dialog = console.get_by_role("dialog")
    row = console.get_by_role("row").filter(has_text=by_hand.ROLLOUT.name)
    row.get_by_role("button", name="Drain", exact=True).press("Enter")
    expect(dialog).to_be_visible()
    check_accessible(console)
    console.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(row).to_contain_text("alive")
    row.get_by_role("button", name="Drain", exact=True).press("Enter")
    dialog.get_by_role("button", name="Drain").press("Enter")
    expect(row).to_contain_text("draining")


def test_what_was_opened_stays_open(console: Page, server: str, data: Tenant) -> None:  # noqa: F811
    visit(console, server, "/console/workers")
    console.locator("summary").first.click()
    by_hand.execute("UPDATE workers SET load = CAST('{\"calls\": 17}' AS jsonb) WHERE kind = 'tools'")
    expect(console.get_by_text("17/64")).to_be_visible()
    expect(console.locator("details").first).to_have_attribute("open", "")


def test_nothing_is_asked_for_while_nobody_looks(console: Page, server: str, data: Tenant) -> None:  # noqa: F811
    visit(console, server, "/console/workers")
    console.evaluate("Object.defineProperty(document, 'hidden', {get: () => window.away, configurable: true})")
    console.evaluate("window.away = true")
    asked: list[str] = []
    console.on("request", lambda request: asked.append(request.url))
    for _ in range(2):  # the second one comes after whatever the first one may have sent
        console.evaluate("new Promise(done => addEventListener('every', done, {capture: true, once: true}))")
    assert asked == []
    console.evaluate("window.away = false")
    with console.expect_request("**/fragments/workers"):
        pass


def test_live_figures_follow_and_keep_the_focus(console: Page, server: str, data: Tenant) -> None:  # noqa: F811
    visit(console, server, "/console/workers")
    button = console.get_by_role("row").filter(has_text=by_hand.TOOLS.name).get_by_role("button")
    button.focus()
    by_hand.execute("UPDATE workers SET load = CAST('{\"calls\": 17}' AS jsonb) WHERE kind = 'tools'")
    expect(console.get_by_text("17/64")).to_be_visible()
    expect(button).to_be_focused()


def test_the_menu_of_a_phone_opens_and_closes(console: Page) -> None:
    console.set_viewport_size(PHONE)  # type: ignore[arg-type]
    audit = console.get_by_role("link", name="Audit")
    expect(audit).to_be_hidden()
    console.get_by_role("button", name="Menu").press("Enter")
    expect(audit).to_be_visible()
    console.keyboard.press("Escape")
    expect(audit).to_be_hidden()
    expect(console.get_by_role("button", name="Menu")).to_be_focused()
