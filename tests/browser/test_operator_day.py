"""The console in a real Chromium over real workers: what an operator does, and how every page looks."""

from __future__ import annotations

import json
import re
import uuid
import zipfile
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import pytest
import requests
from playwright.sync_api import Browser, Locator, Page, expect

from app.db import transaction
from app.embedded.ports import choose_ports
from app.manager import operators
from app.models import Tenant
from tests.browsing import check_accessible, keep_screenshots, watched_page
from tests.e2e.conftest import Service, service  # noqa: F401
from tests.workers import wait_for

(PORT,) = choose_ports([18_100])
SETTINGS = {"MARLAAS_WEB_PORT": str(PORT), "MARLAAS_SECRET_KEY": "a key of the browser tests alone"}
BASE_URL = f"http://127.0.0.1:{PORT}"
CONSOLE = f"{BASE_URL}/console"

NAME, PASSWORD = "ada", "a long enough password"
DESK, PHONE = {"width": 1360, "height": 900}, {"width": 390, "height": 844}

ITEMS = [{"messages": [{"role": "user", "content": f"say {n} digits"}], "answer": "1" * n} for n in range(1, 9)]
DATASET: dict[str, Any] = {
    "environment": {
        "type": "dataset",
        "params": {
            "items": ITEMS,
            "grader": {"type": "text_similarity", "reference": "{{ item.answer }}", "evaluation_metric": "fuzzy_match"},
        },
    },
    "evaluation": {"every": 1, "prompts": 2},
}
# Trains for as long as the tests last, and mostly waits for its tool.
ENDLESS: dict[str, Any] = {
    "environment": {"type": "toy_dialogue", "max_turns": 2, "params": {"latency": 0.6}},
    "hyperparameters": {"n_steps": 1000},
}

DRAWN = """
canvas => canvas.width > 0 && canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data
    .some((value, i) => i % 4 === 3 && value > 0)
"""


class World(NamedTuple):
    """Jobs in all states, of one tenant."""

    service: Service
    tenant: Tenant
    finished: uuid.UUID
    other: uuid.UUID
    failed: uuid.UUID
    live: uuid.UUID


@pytest.fixture(scope="module")
def web(service: Service) -> Service:  # noqa: F811
    service.workers.start("web")
    wait_for(answers, 60, "the web server is to answer", service.workers)
    with transaction() as session:
        operators.create(session, NAME, PASSWORD, "admin")
    return service


def answers() -> bool:
    try:
        return requests.get(f"{BASE_URL}/readyz", timeout=5).ok
    except requests.RequestException:  # not there yet, or slow while it starts
        return False


@pytest.fixture(scope="module")
def world(web: Service) -> World:
    tenant = web.tenant("acme")
    return World(
        web,
        tenant,
        finished=web.submit(tenant, name="similar", **DATASET),
        other=web.submit(tenant, name="digits", hyperparameters={"n_steps": 4}),
        failed=web.submit(tenant, name="broken-grader", environment={"type": "toy_raising"}),
        live=web.submit(tenant, name="dialogue", **ENDLESS),
    )


@pytest.fixture(scope="module")
def session_cookies(web: Service, browser: Browser) -> list[Any]:
    problems: list[str] = []
    with watched_page(browser, problems) as page:
        log_in(page)
        cookies = page.context.cookies()
    assert not problems, problems
    return cookies


@pytest.fixture
def admin(page: Page, session_cookies: list[Any]) -> Page:
    """A page whose operator is logged in as an admin."""
    page.context.add_cookies(session_cookies)
    page.set_viewport_size(DESK)
    return page


def log_in(page: Page, password: str = PASSWORD) -> None:
    page.goto(f"{CONSOLE}/login")
    page.get_by_label("Name").fill(NAME)
    page.get_by_label("Password").fill(password)
    page.get_by_role("button", name="Log in").click()


def field(page: Page, name: str) -> Locator:
    return page.locator(f'[name="{name}"]')


def confirm(page: Page, verb: str) -> None:
    page.get_by_role("dialog").get_by_role("button", name=verb).click()


def state(page: Page) -> Locator:
    """The badge of a job's page."""
    return page.locator("#job-status .verdict .badge")


def goto_job(page: Page, job_id: uuid.UUID, part: str = "") -> None:
    page.goto(f"{CONSOLE}/jobs/{job_id}{part}")


def id_of(page: Page) -> uuid.UUID:
    """The job, or tenant, whose page this is."""
    return uuid.UUID(urlsplit(page.url).path.split("/")[3])


def audited(page: Page, target: object) -> set[str]:
    """What the audit log says was done to a target, or to what is a tenant's."""
    page.goto(f"{CONSOLE}/audit?target={target}")
    return set(page.locator("tbody .badge").all_inner_texts())


def expect_drawn(canvas: Locator) -> None:
    expect(canvas).to_be_visible()
    assert canvas.evaluate(DRAWN), "the canvas is blank"


# --- what an operator does


def test_a_wrong_password_is_refused_in_words_and_the_right_one_leads_on(
    web: Service, page: Page, problems: list[str]
) -> None:
    page.goto(f"{CONSOLE}/storage")
    log_in(page, "not the password")
    expect(page.get_by_role("alert")).to_have_text("The name or the password is wrong.")
    assert [problem for problem in problems if not problem.endswith(("401", "login)"))] == []
    problems.clear()

    page.goto(f"{CONSOLE}/storage")
    page.get_by_label("Name").fill(NAME)
    page.get_by_label("Password").fill(PASSWORD)
    page.keyboard.press("Enter")
    expect(page).to_have_url(f"{CONSOLE}/storage")
    assert {"login", "login.failed"} <= audited(page, "")

    page.get_by_role("button", name="Log out").click()
    page.goto(CONSOLE)
    expect(page).to_have_url(re.compile("/console/login"))


def test_a_tenant_and_its_key_whose_secret_is_shown_once(web: Service, admin: Page) -> None:
    admin.goto(f"{CONSOLE}/tenants")
    admin.get_by_role("button", name="New tenant").first.click()
    admin.get_by_label("Name").fill("globex")
    field(admin, "max_running_jobs").fill("3")
    admin.get_by_role("button", name="Create tenant").click()
    expect(admin.get_by_role("heading", level=1)).to_have_text("globex")

    field(admin, "name").fill("laptop")
    admin.get_by_role("button", name="Create key").click()
    secret = admin.locator("#secret").inner_text()
    models = requests.get(f"{BASE_URL}/v1/models", headers={"Authorization": f"Bearer {secret}"}, timeout=10)
    assert models.status_code == 200
    admin.reload()
    assert secret not in admin.content()

    admin.get_by_role("button", name="Revoke").click()
    confirm(admin, "Revoke")
    expect(admin.locator("#keys .badge")).to_have_text("revoked")

    admin.get_by_role("button", name="Suspend").click()
    confirm(admin, "Suspend")
    expect(admin.get_by_text("This tenant is suspended")).to_be_visible()
    admin.get_by_role("button", name="Lift suspension").click()
    expect(admin.get_by_role("button", name="Suspend")).to_be_visible()

    admin.get_by_role("button", name="Jobs", exact=True).click()
    expect(admin.get_by_role("heading", level=1)).to_have_text("Jobs")
    expected = {"tenant.create", "key.create", "key.revoke", "tenant.suspend", "tenant.resume"}
    assert audited(admin, "globex") == expected


def test_a_job_from_the_form_to_its_adapter(world: World, admin: Page, tmp_path: Path) -> None:
    admin.goto(f"{CONSOLE}/jobs/new")
    admin.get_by_role("navigation", name="Templates").get_by_role("link", name="Own data and grader").click()
    field(admin, "tenant").select_option(label=world.tenant.name)
    field(admin, "name").fill("from-form")
    admin.get_by_role("button", name="Similar text").click()
    field(admin, "params.dataset.items").fill("\n".join(map(json.dumps, ITEMS)))
    small = {"n_steps": 3, "prompts_per_round": 2, "group_size": 4, "learning_rate": 0.01}
    for name, value in small.items():
        field(admin, f"hyperparameters.{name}").fill(str(value))
    field(admin, "sampling.max_tokens").fill("8")
    field(admin, "evaluation.every").fill("1")
    field(admin, "evaluation.prompts").fill("2")
    admin.locator("summary", has_text="Preflight").click()
    field(admin, "preflight.prompts").fill("2")
    expect(admin.locator("#code-curl")).to_contain_text('"suffix": "from-form"')

    admin.get_by_role("button", name="Preflight").click()
    preflight = admin.get_by_role("region", name="Preflight").last
    expect(preflight.get_by_role("heading")).to_contain_text("Preflight: ", timeout=30_000)
    expect(preflight).to_contain_text("What to do:")
    expect(preflight).to_contain_text("answers to 2 prompts")

    admin.get_by_role("button", name="Create job").click()
    expect(admin.get_by_role("heading", level=1)).to_have_text("from-form")
    job_id = id_of(admin)
    admin.evaluate("window.stayed = true")
    expect(state(admin)).to_have_text("succeeded", timeout=60_000)
    expect(admin.locator("#charts [data-metric=reward_mean] [data-latest]")).to_have_text(re.compile(r"\d"))
    expect_drawn(admin.locator("#charts canvas").first)
    expect_drawn(admin.locator("#lane canvas"))
    expect(admin.locator("#lane .timeline-names")).to_contain_text("from-form")
    for part in ("h2", "p"):
        expect(admin.locator(f"#job-status .verdict {part}").first).to_have_text(re.compile(r"\w+ \w+|\w{5}"))
    assert admin.evaluate("window.stayed"), "the page was loaded anew"

    admin.get_by_role("link", name="Trajectories").click()
    field(admin, "version").fill("1")
    admin.get_by_role("button", name="Show").click()
    assert parse_qs(urlsplit(admin.url).query)["version"] == ["1"]
    group = admin.locator(".trajectory-group").first
    expect(group.get_by_role("heading")).to_contain_text("of version 1")
    expect(group.locator(".message-prompt").first).to_contain_text("say")
    answer = group.locator("details.episode").first
    answer.locator("summary").click()
    expect(answer.locator(".message-policy")).to_be_visible()
    expect(answer.locator(".reward").first).to_have_text(re.compile(r"^\d"))

    admin.get_by_role("link", name="Checkpoints").click()
    with admin.expect_download() as download:
        admin.get_by_role("button", name="Download the adapter of version 3").click()
    download.value.save_as(tmp_path / "adapter.zip")
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(
        map(name_only, zipfile.ZipFile(tmp_path / "adapter.zip").namelist())
    )
    assert audited(admin, job_id) == {"job.create", "adapter.download"}


def name_only(member: str) -> str:
    return member.rpartition("/")[2]


def test_what_a_form_lacks_is_told_beside_its_fields(world: World, admin: Page, problems: list[str]) -> None:
    admin.goto(f"{CONSOLE}/jobs/new?template=dataset")
    field(admin, "hyperparameters.group_size").fill("1")
    admin.get_by_role("button", name="Create job").click()
    expect(admin.get_by_role("alert")).to_contain_text("The job was not created.")
    expect(admin.locator("#tenant-error")).to_have_text("choose the tenant that the job belongs to")
    expect(field(admin, "hyperparameters.group_size")).to_have_attribute("aria-invalid", "true")
    check_accessible(admin)
    assert [problem for problem in problems if "422" not in problem] == []
    problems.clear()


def test_jobs_are_steered_one_by_one_and_together(world: World, admin: Page) -> None:
    job_id = world.service.submit(world.tenant, name="steered", **ENDLESS)
    goto_job(admin, job_id)
    admin.get_by_role("button", name="Pause").click()
    expect(state(admin)).to_have_text("paused", timeout=30_000)
    admin.get_by_role("button", name="Resume").click()
    expect(state(admin)).to_have_text(re.compile("rollout|environment|training|buffered"), timeout=30_000)

    admin.get_by_role("button", name="Clone").click()
    expect(field(admin, "name")).to_have_value("steered-again")
    admin.get_by_role("button", name="Create job").click()
    expect(admin.get_by_role("heading", level=1)).to_have_text("steered-again")
    clone_id = id_of(admin)
    admin.get_by_role("button", name="Cancel", exact=True).first.click()
    confirm(admin, "Cancel the job")
    expect(state(admin)).to_have_text("cancelled", timeout=30_000)

    more_id = world.service.submit(world.tenant, name="steered-more", **ENDLESS)
    admin.goto(f"{CONSOLE}/jobs?q=steered")
    admin.get_by_role("checkbox", name="All jobs of this page").check()
    admin.get_by_role("button", name="Cancel", exact=True).first.click()
    confirm(admin, "Cancel jobs")
    expect(admin.locator("#toasts")).to_contain_text("2 jobs cancelled")
    expect(admin.locator("tbody .badge")).to_have_text(["cancelled"] * 3)

    assert audited(admin, job_id) == {"job.pause", "job.resume", "job.cancel"}
    assert audited(admin, clone_id) == {"job.create", "job.cancel"}
    assert audited(admin, more_id) == {"job.cancel"}


def test_two_jobs_on_one_chart(world: World, admin: Page) -> None:
    for job_id in (world.finished, world.other):
        world.service.wait(job_id, "succeeded")
    goto_job(admin, world.finished)
    admin.get_by_role("button", name="Compare").click()
    admin.get_by_role("checkbox", name="digits").check()
    admin.get_by_role("button", name="Compare").click()
    rewards = admin.locator("#charts [data-metric=reward_mean]")
    expect_drawn(rewards.locator("canvas"))
    expect(rewards.locator(".u-legend")).to_contain_text("similar")
    expect(rewards.locator(".u-legend")).to_contain_text("digits")


def test_a_worker_is_drained_and_takes_work_again(world: World, admin: Page) -> None:
    admin.goto(f"{CONSOLE}/workers")
    tools = admin.get_by_role("row", name=re.compile("tools@test"))
    tools.get_by_role("button", name="Drain").click()
    confirm(admin, "Drain")
    expect(tools.locator(".badge")).to_have_text("draining")
    tools.get_by_role("button", name="Undrain").click()
    expect(tools.locator(".badge")).to_have_text("alive")
    assert audited(admin, "tools@test") == {"worker.drain", "worker.undrain"}


# --- how every page looks

PAGES = {  # its address below /console, and what it shows once it is complete
    "overview": ("/", "[data-timeline] canvas"),
    "jobs": ("/jobs", "tbody tr"),
    "new-job": ("/jobs/new", "#code-curl"),
    "job": ("/jobs/{job}", "#charts canvas"),
    "job-live": ("/jobs/{live}", "#lane canvas"),
    "job-failed": ("/jobs/{failed}", ".verdict-bad"),
    "trajectories": ("/jobs/{job}/trajectories", ".trajectory-group"),
    "checkpoints": ("/jobs/{job}/checkpoints", "tbody tr"),
    "events": ("/jobs/{job}/events", "tbody tr"),
    "document": ("/jobs/{job}/document", "#document"),
    "compare": ("/compare?job={job}&job={other}", "#charts canvas"),
    "tenants": ("/tenants", "tbody tr"),
    "new-tenant": ("/tenants/new", "form.card"),
    "tenant": ("/tenants/{tenant}", "#keys form"),
    "workers": ("/workers", "tbody tr"),
    "storage": ("/storage", "tbody tr"),
    "audit": ("/audit", "tbody tr"),
}


@pytest.fixture(scope="module")
def settled(world: World) -> World:
    """All of the jobs that end have ended."""
    for job_id in (world.finished, world.other, world.failed):
        world.service.wait(job_id, "succeeded", "failed")
    world.service.wait_version(world.live, 2)
    return world


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_accessible_and_fits(settled: World, admin: Page, name: str) -> None:
    address, complete = PAGES[name]
    ids = {"job": settled.finished, "live": settled.live, "failed": settled.failed, "other": settled.other}
    admin.goto(CONSOLE + address.format(**ids, tenant=settled.tenant.id))
    expect(admin.locator(complete).first).to_be_visible()
    check_looks(admin, name)


def test_the_login_page_is_accessible_and_fits(web: Service, page: Page) -> None:
    page.goto(f"{CONSOLE}/login")
    check_looks(page, "login")


def test_the_page_of_a_wrong_address_is_accessible_and_fits(web: Service, admin: Page, problems: list[str]) -> None:
    admin.goto(f"{CONSOLE}/nowhere")
    expect(admin.get_by_role("heading")).to_have_text("Nothing here")
    assert [problem for problem in problems if "404" not in problem] == []
    problems.clear()
    check_looks(admin, "404")


def check_looks(page: Page, name: str) -> None:
    """Nothing serious for axe-core in either theme, nothing wider than a phone; keeps the four pictures."""
    page.set_viewport_size(DESK)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        check_accessible(page)
    keep_screenshots(page, name)
    page.set_viewport_size(PHONE)
    wide = page.evaluate("document.documentElement.scrollWidth")
    assert wide <= PHONE["width"], f"{page.url} is {wide} pixels wide on a phone"
    keep_screenshots(page, f"{name}-{PHONE['width']}")


# --- by keyboard


def tab_to(page: Page, selector: str, most: int = 80) -> None:
    """Presses Tab until the element is reached."""
    for _ in range(most):
        page.keyboard.press("Tab")
        if page.locator(selector).evaluate("element => element === document.activeElement"):
            return
    raise AssertionError(f"{selector} was not reached by {most} tabs")


def test_the_first_tab_reaches_the_link_that_skips_to_the_content(world: World, admin: Page) -> None:
    admin.goto(f"{CONSOLE}/jobs")
    admin.keyboard.press("Tab")
    expect(admin.get_by_role("link", name="Skip to content")).to_be_focused()
    expect(admin.get_by_role("link", name="Skip to content")).to_be_in_viewport()
    admin.keyboard.press("Enter")
    expect(admin.locator("main")).to_be_focused()
    admin.keyboard.press("Tab")
    assert admin.evaluate("document.querySelector('main').contains(document.activeElement)")


def test_a_job_is_created_and_cancelled_without_a_pointer(world: World, admin: Page) -> None:
    admin.goto(f"{CONSOLE}/jobs/new?clone={world.live}")
    tab_to(admin, "#name")
    admin.keyboard.press("Control+A")
    admin.keyboard.type("typed")
    tab_to(admin, "#create")
    admin.keyboard.press("Enter")
    expect(admin.get_by_role("heading", level=1)).to_have_text("typed")
    tab_to(admin, "#job-status button.destructive")
    admin.keyboard.press("Space")
    expect(admin.get_by_role("dialog")).to_be_visible()
    tab_to(admin, "#confirm [value=yes]", 3)
    admin.keyboard.press("Enter")
    expect(state(admin)).to_have_text("cancelled", timeout=30_000)


def test_the_theme_that_was_chosen_stays(web: Service, admin: Page) -> None:
    root = admin.locator("html")
    admin.goto(f"{CONSOLE}/storage")
    expect(root).to_have_attribute("data-theme", "light")
    admin.get_by_role("button", name="Light or dark").click()
    expect(root).to_have_attribute("data-theme", "dark")
    admin.goto(f"{CONSOLE}/audit")
    expect(root).to_have_attribute("data-theme", "dark")
    admin.get_by_role("button", name="Light or dark").click()
    expect(root).to_have_attribute("data-theme", "light")
