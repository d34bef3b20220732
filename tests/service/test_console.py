"""The operators' console: logins, roles, forged requests, headers, hostile text, secrets, the audit log."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from apiflask import APIFlask
from sqlalchemy import select, text
from sqlalchemy.exc import ProgrammingError
from werkzeug.routing import Rule

from app import db
from app.console import overview, security, storage, workers
from app.console.auth import RANKS
from app.db import transaction
from app.embedded import EmbeddedStack
from app.manager import audit, events, operators, tenants
from app.models import ApiKey, AuditEntry, Job, Tenant
from tests import by_hand
from tests.console_client import PASSWORD, Console, make_operator, shown_secrets

HOSTILE = "<script>alert('x')</script>"
PAGES = (
    "/console/",
    "/console/tenants",
    "/console/tenants/new",
    "/console/workers",
    "/console/storage",
    "/console/audit",
)
FRAGMENTS = ("/console/fragments/overview/figures", "/console/fragments/overview/queues", "/console/fragments/workers")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Figures that pages share are those of this test."""
    for page in (overview, storage, workers):
        page.shared.forget()
    yield


@pytest.fixture
def browser(web_app: APIFlask, hand: None) -> Console:
    """Nobody is logged in."""
    return Console(web_app.test_client())


@pytest.fixture
def admin(browser: Console) -> Console:
    make_operator("ada")
    assert browser.log_in("ada").status_code == 303
    return browser


@pytest.fixture
def viewer(browser: Console) -> Console:
    make_operator("vera", "viewer")
    assert browser.log_in("vera").status_code == 303
    return browser


def entries(action: str | None = None) -> list[AuditEntry]:
    """Of the audit log, in order."""
    with transaction() as session:
        wanted = select(AuditEntry).order_by(AuditEntry.id)
        return list(session.scalars(wanted if action is None else wanted.where(AuditEntry.action == action)))


def console_rules(app: APIFlask, method: str) -> list[tuple[str, Any, Rule]]:
    """Addresses of the console's routes for a method, with made-up ids, and each route's view."""
    values = {"uuid": str(uuid.UUID(int=1)), "int": 1, "default": "x", "path": "x"}
    found = []
    for rule in app.url_map.iter_rules():
        if not rule.endpoint.startswith("console.") or rule.endpoint == "console.static" or method not in rule.methods:
            continue
        address = re.sub(r"<(?:(\w+)[^:>]*:)?\w+>", lambda match: str(values[match[1] or "default"]), rule.rule)
        found.append((address, app.view_functions[rule.endpoint], rule))
    assert len(found) > 5
    return found


# --- logging in and out


def test_every_page_asks_for_a_login(web_app: APIFlask, browser: Console) -> None:
    for address, view, _ in console_rules(web_app, "GET"):
        if view.least_role is not None:
            response = browser.get(address)
            refused = response.status_code == 401 or "/console/login" in response.headers.get("Location", "")
            assert refused, address


def test_the_root_leads_to_the_console(browser: Console) -> None:
    assert browser.get("/").location == "/console/"


def test_a_login_leads_to_the_page_that_was_asked_for(browser: Console) -> None:
    make_operator("ada")
    wanted = "/console/audit?actor=ada"
    assert browser.get(wanted).location.startswith("/console/login?next=")
    assert browser.log_in("ada", next=wanted).location == wanted


@pytest.mark.parametrize("elsewhere", ["https://evil.test/", "//evil.test/console/", "/v1/models", "/console/\\evil"])
def test_a_login_leads_nowhere_else(browser: Console, elsewhere: str) -> None:
    make_operator("ada")
    assert browser.log_in("ada", next=elsewhere).location == "/console/"


@pytest.mark.parametrize(("name", "password"), [("ada", "wrong password"), ("nobody", PASSWORD), ("", "")])
def test_a_wrong_login_is_refused_in_the_same_words(browser: Console, name: str, password: str) -> None:
    make_operator("ada")
    response = browser.log_in(name, password)
    assert response.status_code == 401
    assert "The name or the password is wrong." in response.text
    assert browser.get("/console/").status_code == 302


def test_an_unknown_name_takes_a_hash_as_well(browser: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed, matches = [], operators._matches
    monkeypatch.setattr(operators, "_matches", lambda *a: hashed.append(a) or matches(*a))  # type: ignore[func-returns-value]
    browser.log_in("nobody")
    assert len(hashed) == 1


def test_logging_out_ends_the_session(admin: Console) -> None:
    assert admin.post("/console/logout").location == "/console/login"
    assert admin.get("/console/").status_code == 302


def change(name: str, how: str) -> None:
    with transaction() as session:
        row = operators.find_operator(session, name)
        match how:
            case "disabled":
                operators.disable(row)
            case "password":
                operators.set_password(row, "another password")
            case "role":
                operators.set_role(row, "viewer")


@pytest.mark.parametrize("how", ["disabled", "password", "role"])
def test_a_session_ends_at_once_with_a_change_of_its_operator(admin: Console, how: str) -> None:
    assert admin.get("/console/").status_code == 200
    change("ada", how)
    assert admin.get("/console/").status_code == 302


def test_a_disabled_operator_cannot_log_in_until_enabled(browser: Console) -> None:
    make_operator("ada")
    change("ada", "disabled")
    assert browser.log_in("ada").status_code == 401
    with transaction() as session:
        operators.enable(operators.find_operator(session, "ada"))
    assert browser.log_in("ada").status_code == 303


def test_a_session_ends_after_its_lifetime(admin: Console) -> None:
    lifetime = security.SESSION_LIFETIME.total_seconds()
    for seconds, status in ((lifetime - 60, 200), (lifetime + 60, 302)):
        with admin.client.session_transaction("/console/") as session:
            session["since"] -= seconds
        assert admin.get("/console/").status_code == status
        with admin.client.session_transaction("/console/") as session:
            session["since"] += seconds


def test_the_cookie_is_out_of_reach_of_scripts_and_other_sites(browser: Console) -> None:
    make_operator("ada")
    (cookie,) = browser.log_in("ada").headers.getlist("Set-Cookie")
    assert {"HttpOnly", "SameSite=Lax", "Path=/console"} <= set(cookie.split("; "))


# --- throttling


def fail(browser: Console, name: str, times: int) -> None:
    for _ in range(times):
        assert browser.log_in(name, "wrong password").status_code == 401


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few failures are too many."""
    monkeypatch.setattr(operators, "FAILURES_OF_NAME", 3)
    monkeypatch.setattr(operators, "FAILURES_OF_ADDRESS", 5)


def test_too_many_failures_of_a_name_stop_even_the_right_password(browser: Console, quick: None) -> None:
    make_operator("ada")
    make_operator("bea")
    fail(browser, "ada", 3)
    assert browser.log_in("ada").status_code == 429
    assert browser.log_in("bea").status_code == 303


def test_too_many_failures_from_an_address_stop_every_name(browser: Console, quick: None) -> None:
    make_operator("ada")
    for number in range(5):
        fail(browser, f"guess {number}", 1)
    assert browser.log_in("ada").status_code == 429


def test_the_wait_ends_and_is_not_prolonged_by_tries(browser: Console, quick: None) -> None:
    make_operator("ada")
    fail(browser, "ada", 3)
    assert browser.log_in("ada").status_code == 429
    assert len(entries(operators.FAILED)) == 3
    age_log(minutes=16)
    assert browser.log_in("ada").status_code == 303


def age_log(minutes: int) -> None:
    """The service may only add to the log; its owner makes the entries older."""
    with db.engine("owner").begin() as connection:
        connection.execute(
            text("UPDATE audit_log SET created_at = created_at - make_interval(mins => :minutes)"), {"minutes": minutes}
        )


# --- roles and forged requests


def test_each_route_says_who_may_use_it(web_app: APIFlask) -> None:
    for method in ("GET", "POST"):
        for address, view, _ in console_rules(web_app, method):
            assert view.least_role is None or view.least_role in RANKS, address


def test_a_viewer_changes_nothing(web_app: APIFlask, viewer: Console) -> None:
    for address, view, _ in console_rules(web_app, "POST"):
        if view.least_role in ("operator", "admin"):
            assert viewer.post(address).status_code == 403, address
    assert {e.action for e in entries()} == {"login"}


def test_an_operator_is_no_admin(browser: Console, tenant: Tenant) -> None:
    make_operator("otto", "operator")
    browser.log_in("otto")
    assert browser.post("/console/tenants", name="mine").status_code == 403
    assert browser.post(f"/console/tenants/{tenant.id}/keys", name="mine", scope="read").status_code == 403
    browser.done(f"/console/tenants/{tenant.id}/suspend", suspended="yes")


def test_no_form_works_without_the_sessions_token(web_app: APIFlask, admin: Console) -> None:
    for address, _, _ in console_rules(web_app, "POST"):
        for data in ({}, {"csrf_token": "of somebody else"}):
            assert admin.client.post(address, data=data).status_code == 403, address
    assert {e.action for e in entries()} == {"login"}


def test_a_new_session_has_a_new_token(browser: Console) -> None:
    make_operator("ada")
    before = browser.token()
    browser.log_in("ada")
    assert browser.token() != before


def test_a_script_sends_the_token_as_a_header(admin: Console) -> None:
    headers = {"X-CSRF-Token": admin.token()}
    response = admin.client.post("/console/tenants/00000000-0000-0000-0000-000000000001/suspend", headers=headers)
    assert response.status_code == 404  # it got as far as looking for the tenant


# --- headers, errors


@pytest.mark.parametrize("path", ["/console/", "/console/login", "/console/nothing", "/console/audit"])
def test_pages_are_strict_and_not_kept(admin: Console, path: str) -> None:
    headers = admin.get(path).headers
    policy = headers["Content-Security-Policy"]
    assert "default-src 'self'" in policy and "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy and "script-src" not in policy and "style-src" not in policy
    assert headers["Cache-Control"] == "no-store"
    assert headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize("path", PAGES)
def test_pages_hold_no_code_or_style_of_their_own(admin: Console, tenant: Tenant, path: str) -> None:
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=|javascript:", admin.get(path).text)


def test_static_files_are_kept_under_the_address_of_their_content(admin: Console) -> None:
    (address,) = re.findall(r'href="([^"]+/app\.css\?v=\w+)"', admin.get("/console/").text)
    response = admin.get(address)
    assert (response.status_code, "immutable" in response.headers["Cache-Control"]) == (200, True)
    assert "immutable" not in admin.get(address.split("?")[0]).headers.get("Cache-Control", "")


def test_an_unknown_address_has_a_page_too(admin: Console) -> None:
    response = admin.get("/console/no/such/page")
    assert response.status_code == 404
    assert "To the overview" in response.text


def test_a_bug_tells_nothing_of_the_inside(admin: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("password=hunter2")

    monkeypatch.setattr(storage.shared, "get", broken)
    response = admin.get("/console/storage")
    assert response.status_code == 500
    assert "hunter2" not in response.text and "reference" in response.text


def test_without_the_database_a_page_says_so(admin: Console, stack: EmbeddedStack) -> None:
    stack.stop("postgres")
    try:
        response = admin.get("/console/tenants")
    finally:
        stack.start("postgres")
        db.dispose_engines()
    assert response.status_code == 503
    assert "The database does not answer." in response.text


def test_a_lost_session_sends_scripts_to_the_login(browser: Console) -> None:
    response = browser.get(FRAGMENTS[0], headers={"HX-Request": "true"})
    assert (response.status_code, response.headers["HX-Redirect"]) == (401, "/console/login")
    assert browser.get("/console/data/timeline").status_code == 401


# --- pages


@pytest.mark.parametrize("path", (*PAGES, *FRAGMENTS))
def test_pages_without_data(admin: Console, path: str) -> None:
    by_hand.execute("DELETE FROM workers")
    admin.page(path)


@pytest.fixture
def hostile(admin: Console) -> Tenant:
    """A service in which every text that somebody else chose is a piece of script."""
    with transaction() as session:
        tenant = tenants.create_tenant(session, "hostile")
    with transaction() as session:
        tenants.create_key(session, tenant, HOSTILE)
    job_id = by_hand.start_job(tenant)
    by_hand.step(job_id)
    by_hand.execute("UPDATE jobs SET name = :name", name=HOSTILE)  # jobs and tenants have plain names, but who knows
    by_hand.execute("UPDATE tenants SET name = :name WHERE id = :id", name=HOSTILE, id=tenant.id)
    with transaction() as session:
        events.record(session, session.get_one(Job, job_id), HOSTILE, HOSTILE, level="error")
    by_hand.execute("UPDATE workers SET name = :name, base_model = NULL WHERE kind = 'tools'", name=HOSTILE)
    load = f'{{"resident": {{"{job_id}:1": "digest", "{HOSTILE}": "digest"}}, "running": 1}}'
    by_hand.execute("UPDATE workers SET load = CAST(:load AS jsonb) WHERE kind = 'rollout'", load=load)
    Console(admin.client.application.test_client()).log_in(HOSTILE)  # fails, and is written down
    return tenant


@pytest.mark.parametrize("path", (*PAGES, *FRAGMENTS, "/console/tenants/{tenant}", "/console/tenants?q=<script>alert("))
def test_text_of_others_is_shown_and_not_run(admin: Console, hostile: Tenant, path: str) -> None:
    response = admin.get(path.format(tenant=hostile.id))
    assert response.status_code == 200
    assert "<script>alert(" not in response.text
    if path not in ("/console/tenants/new", FRAGMENTS[0]):
        assert "&lt;script&gt;alert(" in response.text


def test_an_operators_own_name_is_shown_and_not_run(browser: Console) -> None:
    make_operator(HOSTILE)
    browser.log_in(HOSTILE)
    page = browser.get("/console/").text
    assert "<script>alert(" not in page and "&lt;script&gt;alert(" in page


# --- tenants and keys

QUOTAS = {
    "weight": "2",
    "max_running_jobs": "1",
    "max_live_jobs": "5",
    "max_inflight_episodes": "16",
    "max_chat_requests": "2",
    "requests_per_minute": "60",
    "max_file_gib": "0.5",
}


def tenant_named(name: str) -> Tenant:
    with transaction() as session:
        return tenants.find_tenant(session, name)


def test_a_tenant_is_made_changed_and_suspended(admin: Console) -> None:
    assert "acme" in admin.done("/console/tenants", name="acme", **QUOTAS)
    made = tenant_named("acme")
    assert (made.weight, made.max_running_jobs, made.max_file_bytes) == (2.0, 1, 1 << 29)
    admin.done(f"/console/tenants/{made.id}", **QUOTAS | {"max_running_jobs": "3"})
    assert tenant_named("acme").max_running_jobs == 3
    assert "suspended" in admin.done(f"/console/tenants/{made.id}/suspend", suspended="yes")
    assert tenant_named("acme").suspended
    admin.done(f"/console/tenants/{made.id}/suspend", suspended="no")
    assert not tenant_named("acme").suspended
    actions = ["tenant.create", "tenant.quotas", "tenant.suspend", "tenant.resume"]
    assert [e.action for e in entries()][1:] == actions
    (quotas,) = entries("tenant.quotas")
    assert (quotas.actor, quotas.address, quotas.tenant_id) == ("ada", "127.0.0.1", made.id)
    assert quotas.data == {"max_running_jobs": 3}


@pytest.mark.parametrize(
    "wrong", [{"name": ""}, {"name": "x" * 65}, {"weight": "nan"}, {"weight": "0"}, {"max_live_jobs": "-1"}]
)
def test_a_wrong_tenant_is_refused_with_the_form_as_it_was(admin: Console, wrong: dict[str, str]) -> None:
    given = {"name": "acme", **QUOTAS, **wrong}
    response = admin.post("/console/tenants", **given)
    assert response.status_code == 400
    assert 'role="alert"' in response.text and 'value="0.5"' in response.text
    assert entries("tenant.create") == []


def test_wrong_quotas_are_told_on_the_tenants_page(admin: Console, tenant: Tenant) -> None:
    page = f"/console/tenants/{tenant.id}"
    referrer = {"Referer": f"http://localhost{page}"}
    response = admin.post(page, headers=referrer, **QUOTAS | {"max_live_jobs": "many"})
    assert response.status_code == 303
    assert "Live jobs must be a whole number." in admin.page(response.location)
    assert tenant_named("acme").max_live_jobs == 100


def test_a_keys_secret_is_shown_once(admin: Console, tenant: Tenant) -> None:
    response = admin.post(f"/console/tenants/{tenant.id}/keys", name="ci", scope=["read", "write"])
    (secret,) = set(shown_secrets(response.text))
    with transaction() as session:
        key = session.scalars(select(ApiKey)).one()
    assert key.secret_hash == tenants.hash_secret(secret)
    for page in (f"/console/tenants/{tenant.id}", "/console/audit", "/console/tenants"):
        assert secret not in admin.page(page)
    assert secret not in str([(e.data, e.target_id) for e in entries()])
    with admin.client.session_transaction("/console/") as session:
        assert secret not in str(dict(session))


def test_a_key_is_made_in_place_and_revoked(admin: Console, tenant: Tenant) -> None:
    response = admin.post(
        f"/console/tenants/{tenant.id}/keys", headers={"HX-Request": "true"}, name="ci", scope="read", days="7"
    )
    assert shown_secrets(response.text) and "<html" not in response.text
    with transaction() as session:
        key = session.scalars(select(ApiKey)).one()
    assert (key.scopes, key.expires_at is None) == (["read"], False)
    admin.done(f"/console/tenants/{tenant.id}/keys/{key.id}/revoke")
    with transaction() as session:
        assert session.get_one(ApiKey, key.id).revoked_at is not None
    assert [e.action for e in entries()][1:] == ["key.create", "key.revoke"]


def test_a_key_without_scopes_is_refused_in_place(admin: Console, tenant: Tenant) -> None:
    response = admin.post(f"/console/tenants/{tenant.id}/keys", headers={"HX-Request": "true"}, name="ci")
    assert (response.status_code, response.headers["HX-Reswap"]) == (400, "none")
    assert "scopes" in response.headers["HX-Trigger"]


def test_no_key_of_another_tenant_is_revoked(admin: Console, tenant: Tenant) -> None:
    other = by_hand.make_tenant("other")
    with transaction() as session:
        key, _ = tenants.create_key(session, other, "theirs")
    assert admin.post(f"/console/tenants/{tenant.id}/keys/{key.id}/revoke").status_code == 404
    assert entries("key.revoke") == []


# --- workers


def test_a_worker_is_drained_and_undrained(admin: Console) -> None:
    name = by_hand.ROLLOUT.name
    assert ">Undrain<" in admin.done("/console/workers/drain", name=name, draining="yes")
    assert ">Undrain<" not in admin.done("/console/workers/drain", name=name, draining="no")
    assert [(e.action, e.target_id) for e in entries()][1:] == [("worker.drain", name), ("worker.undrain", name)]


def test_a_training_worker_tells_what_it_publishes_and_computes_ahead(admin: Console) -> None:
    assert "being published" not in admin.page("/console/fragments/workers")
    load = '{"round": null, "publishing": [{"round": 1, "job": "a"}, {"round": 2, "job": "b"}], "streaming": 3}'
    by_hand.execute("UPDATE workers SET load = CAST(:load AS jsonb) WHERE kind = 'training'", load=load)
    workers.shared.forget()
    page = admin.page("/console/fragments/workers")
    assert "2 being published" in page
    assert "a group ahead of round 3" in page


def test_an_unknown_worker_cannot_be_drained(admin: Console) -> None:
    assert admin.post("/console/workers/drain", name="nobody", draining="yes").status_code == 404
    assert entries("worker.drain") == []


# --- the audit log


def test_logins_and_failures_are_written_down(browser: Console) -> None:
    ada = make_operator("ada")
    browser.log_in("ada", "wrong password")
    browser.log_in("ada")
    browser.post("/console/logout")
    failed, login, logout = entries()
    assert (failed.action, failed.actor, failed.target_id, failed.address) == ("login.failed", "-", "ada", "127.0.0.1")
    assert (login.action, login.actor, login.operator_id) == ("login", "ada", ada.id)
    assert (logout.action, logout.actor) == ("logout", "ada")
    assert PASSWORD not in str([e.data for e in entries()])


def test_the_log_is_filtered_and_paged(admin: Console) -> None:
    with transaction() as session:
        for number in range(120):
            audit.record(session, actor="bea", action="job.cancel", target_kind="job", target_id=f"job-{number:03}")
    first = admin.page("/console/audit?action=job&actor=bea")
    assert "job-119" in first and "job-070" in first and "job-069" not in first and "login" not in rows(first)
    (older,) = re.findall(r'href="(/console/audit\?[^"]*before=\d+[^"]*)"', first)
    second = admin.page(older)
    assert "job-069" in second and "job-070" not in rows(second)
    assert "job-033" in rows(admin.page("/console/audit?target=job-033"))
    assert "Nothing matches" in admin.page("/console/audit?target=%25")  # no wildcard
    assert "Nothing matches" in admin.page("/console/audit?until=2020-01-01")


def rows(page: str) -> str:
    return page.partition("<tbody>")[2].partition("</tbody>")[0]


@pytest.mark.parametrize("query", ["since=yesterday", "before=x", "before=9999999999999999999999"])
def test_a_filter_that_is_none_is_refused(admin: Console, query: str) -> None:
    assert admin.get(f"/console/audit?{query}").status_code == 400


def test_the_service_cannot_change_the_log(admin: Console) -> None:
    for statement in ("UPDATE audit_log SET actor = 'x'", "DELETE FROM audit_log"):
        with pytest.raises(ProgrammingError, match="permission denied"):
            by_hand.execute(statement)
