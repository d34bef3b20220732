"""The console's pages in a real browser: no complaint, accessible, in both themes, narrow and wide, by keyboard."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from app.console import overview, storage, workers
from app.models import Tenant
from tests import by_hand
from tests.browsing import check_accessible, keep_screenshots
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


def test_the_login_page_is_accessible(page: Page, server: str, hand: None) -> None:  # noqa: F811
    page.goto(f"{server}/console/login")
    check_accessible(page)
    keep_screenshots(page, "login")


@pytest.mark.parametrize("name", PAGES)
def test_pages_are_accessible_in_both_themes(console: Page, server: str, data: Tenant, name: str) -> None:  # noqa: F811
    visit(console, server, PAGES[name])
    for scheme in ("light", "dark"):
        console.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        expect(console.locator("html")).to_have_attribute("data-theme", scheme)
        check_accessible(console)
    keep_screenshots(console, name)


@pytest.mark.parametrize("name", PAGES)
def test_pages_fit_a_phone(console: Page, server: str, data: Tenant, name: str) -> None:  # noqa: F811
    console.set_viewport_size(PHONE)  # type: ignore[arg-type]
    visit(console, server, PAGES[name])
    assert console.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    check_accessible(console)


@pytest.mark.parametrize("name", PAGES)
def test_pages_without_data_are_accessible(console: Page, server: str, name: str) -> None:  # noqa: F811
    visit(console, server, PAGES[name])
    check_accessible(console)


def test_a_tenant_is_made_and_its_key_shown_once(console: Page, server: str) -> None:  # noqa: F811
    visit(console, server, "/console/tenants")
    console.get_by_role("link", name="New tenant").first.click()
    console.get_by_label("Name").fill("acme")
    console.get_by_role("button", name="Create tenant").click()
    expect(console.get_by_role("heading", name="acme")).to_be_visible()
    console.get_by_label("Name of a new key").fill("ci")
    console.get_by_role("button", name="Create key").click()
    expect(console.locator("#secret")).to_have_text(re.compile(r"^mk-[\w-]{20,}$"))
    check_accessible(console)
    keep_screenshots(console, "tenant")
    console.reload()
    expect(console.get_by_role("rowheader", name="ci")).to_be_visible()
    expect(console.locator("#secret")).to_have_count(0)


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


def test_live_figures_follow_and_keep_the_focus(console: Page, server: str, data: Tenant) -> None:  # noqa: F811
    visit(console, server, "/console/workers")
    button = console.get_by_role("row").filter(has_text=by_hand.TOOLS.name).get_by_role("button")
    button.focus()
    by_hand.execute("UPDATE workers SET load = CAST('{\"calls\": 17}' AS jsonb) WHERE kind = 'tools'")
    expect(console.get_by_text("17/64")).to_be_visible()
    expect(button).to_be_focused()


def test_the_keyboard_skips_to_the_content(console: Page) -> None:
    console.keyboard.press("Tab")
    expect(console.get_by_role("link", name="Skip to content")).to_be_focused()
    console.keyboard.press("Enter")
    expect(console.locator("main")).to_be_focused()


def test_the_menu_of_a_phone_opens_and_closes(console: Page) -> None:
    console.set_viewport_size(PHONE)  # type: ignore[arg-type]
    audit = console.get_by_role("link", name="Audit")
    expect(audit).to_be_hidden()
    console.get_by_role("button", name="Menu").press("Enter")
    expect(audit).to_be_visible()
    console.keyboard.press("Escape")
    expect(audit).to_be_hidden()
    expect(console.get_by_role("button", name="Menu")).to_be_focused()


def test_a_chosen_theme_stays(console: Page) -> None:
    root = console.locator("html")
    before = root.get_attribute("data-theme")
    console.get_by_role("button", name="Light or dark").click()
    expect(root).not_to_have_attribute("data-theme", str(before))
    console.reload()
    expect(root).not_to_have_attribute("data-theme", str(before))
