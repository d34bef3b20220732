"""The schema comes and goes without a trace, is the one of the models, and shows a tenant its own rows only."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from alembic import command
from sqlalchemy import create_engine, text
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.orm import Session

from app import db, migrate
from app.db import transaction
from app.manager import tenants
from app.models import Base, Tenant
from tests import by_hand

TENANT_TABLES = """
    SELECT table_name FROM information_schema.columns JOIN information_schema.tables USING (table_schema, table_name)
    WHERE table_schema = 'public' AND column_name = 'tenant_id' AND table_type = 'BASE TABLE'
        AND table_name NOT LIKE 'turns\\_p%' ORDER BY 1
"""


@pytest.fixture
def other_database(database: str) -> Iterator[str]:
    """An empty database of its own in the same cluster."""
    name = f"migrations_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(database.replace("+psycopg", ""), autocommit=True) as owner:
        owner.execute(f"CREATE DATABASE {name}")
        yield database.rpartition("/")[0] + "/" + name
        owner.execute(f"DROP DATABASE {name} WITH (FORCE)")


def names(url: str) -> set[tuple[str, str]]:
    """Tables, views, sequences, indexes and functions of the public schema, without Alembic's own table."""
    with psycopg.connect(url.replace("+psycopg", "")) as connection:
        rows = connection.execute(
            "SELECT relname, relkind::text FROM pg_class WHERE relnamespace = 'public'::regnamespace"
            " UNION SELECT proname, 'function' FROM pg_proc WHERE pronamespace = 'public'::regnamespace"
        ).fetchall()
    return {row for row in rows if not row[0].startswith("alembic_version")}


def test_up_down_and_up_again_gives_the_same_schema(other_database: str) -> None:
    migrate.upgrade(other_database)
    first = names(other_database)
    migrate.downgrade(other_database, "base")
    assert names(other_database) == set()
    migrate.upgrade(other_database)
    assert names(other_database) == first


def test_migrations_and_models_are_the_same(other_database: str) -> None:
    migrate.upgrade(other_database)
    command.check(migrate.config(other_database))  # raises where Alembic would write a migration


def definitions(url: str) -> set[tuple[str, str, str]]:
    """Constraints and indexes in full, which Alembic compares by name at most."""
    with psycopg.connect(url.replace("+psycopg", "")) as connection:
        rows = connection.execute(
            "SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint"
            " WHERE connamespace = 'public'::regnamespace AND contype <> 'n'"
            " UNION SELECT tablename, indexname, indexdef FROM pg_indexes WHERE schemaname = 'public'"
        ).fetchall()
    return {row for row in rows if not row[0].startswith(("turns_p", "alembic_version"))}


def test_constraints_and_indexes_of_migrations_and_models_are_the_same(database: str, other_database: str) -> None:
    engine = create_engine(other_database)
    Base.metadata.create_all(engine)
    engine.dispose()
    assert definitions(database) == definitions(other_database)


def test_every_tenant_table_has_row_level_security(database: str) -> None:
    with db.engine("owner").connect() as connection:
        tables = set(connection.scalars(text(TENANT_TABLES)))
        guarded = set(
            connection.scalars(
                text(
                    "SELECT tablename FROM pg_policies JOIN pg_class ON relname = tablename AND relrowsecurity"
                    " WHERE schemaname = 'public' AND roles = '{marlaas_api}' AND cmd = 'ALL'"
                    " AND qual LIKE '%tenant_id = (NULLIF(current_setting(''marlaas.tenant''%'"
                )
            )
        )
    assert len(tables) >= 14
    assert tables - guarded == set()


@pytest.fixture
def two_tenants(hand: None) -> tuple[Tenant, Tenant]:
    """Two tenants with rows in every table that belongs to one."""
    both = by_hand.make_tenant("one"), by_hand.make_tenant("two")
    for tenant in both:
        job_id = by_hand.start_job(tenant)
        by_hand.step(job_id)
        with transaction() as session:
            tenants.create_key(session, tenant, "key")
            for statement in (
                "INSERT INTO files (id, tenant_id, name, purpose, lines, object_id)"
                " SELECT gen_random_uuid(), :t, 'f', 'fine-tune', 1, id FROM objects WHERE tenant_id = :t LIMIT 1",
                "INSERT INTO phase_spans (tenant_id, round_id, phase, worker, started_at, ended_at)"
                " SELECT :t, id, 'rollout', 'w', now(), now() FROM rounds WHERE tenant_id = :t LIMIT 1",
                "INSERT INTO usage_days SELECT :t, job_id, now(), 1, 1, 1, 1 FROM rounds WHERE tenant_id = :t LIMIT 1",
                "INSERT INTO idempotency_keys (tenant_id, api_key_id, request_digest, status, answer)"
                " SELECT :t, id, '', 200, '{}' FROM api_keys WHERE tenant_id = :t LIMIT 1",
                "INSERT INTO audit_log (actor, action, tenant_id) VALUES ('night shift', 'tenant.suspend', :t)",
            ):
                session.execute(text(statement), {"t": tenant.id})
    return both


def readable(session: Session) -> list[str]:
    """The tenant tables that the session's role may read, api_keys not being among them for the api role."""
    tables = session.scalars(text(TENANT_TABLES)).all()
    return [t for t in tables if session.scalar(text("SELECT has_table_privilege(:t, 'SELECT')"), {"t": t})]


def tenants_seen(session: Session) -> dict[str, set[uuid.UUID]]:
    seen = {t: set(session.scalars(text(f"SELECT tenant_id FROM {t}"))) for t in readable(session)}
    return seen | {"tenants": set(session.scalars(text("SELECT id FROM tenants")))}


def test_the_api_role_sees_rows_of_its_tenant_only(two_tenants: tuple[Tenant, Tenant]) -> None:
    one, _ = two_tenants
    with transaction("api", one.id) as session:
        seen = tenants_seen(session)
    assert seen == {table: {one.id} for table in seen}
    assert len(seen) >= 14


def test_the_api_role_sees_nothing_without_a_tenant(two_tenants: tuple[Tenant, Tenant]) -> None:
    with transaction("api") as session:
        seen = tenants_seen(session)
    assert seen == {table: set() for table in seen}


def test_a_tenant_is_forgotten_with_its_transaction(two_tenants: tuple[Tenant, Tenant]) -> None:
    """Connections are shared: the next transaction on one must not see the tenant of the last."""
    for _ in range(3):
        with transaction("api", two_tenants[0].id) as session:
            assert session.scalars(text("SELECT id FROM tenants")).all() == [two_tenants[0].id]
        with transaction("api") as session:
            assert session.scalars(text("SELECT id FROM tenants")).all() == []


def test_the_service_role_sees_all_tenants(two_tenants: tuple[Tenant, Tenant]) -> None:
    with transaction() as session:
        seen = tenants_seen(session)
    assert seen == {table: {t.id for t in two_tenants} for table in seen}
    assert "api_keys" in seen


def test_the_api_role_cannot_read_keys(two_tenants: tuple[Tenant, Tenant]) -> None:
    with pytest.raises(ProgrammingError, match="permission denied"), transaction("api", two_tenants[0].id) as session:
        session.execute(text("SELECT * FROM api_keys"))


def test_the_api_role_cannot_read_a_partition_directly(two_tenants: tuple[Tenant, Tenant]) -> None:
    with pytest.raises(ProgrammingError, match="permission denied"), transaction("api", two_tenants[0].id) as session:
        session.execute(text("SELECT * FROM turns_p0"))


@pytest.mark.parametrize("table", ["jobs", "objects", "files"])
def test_the_api_role_changes_no_row_of_another_tenant(two_tenants: tuple[Tenant, Tenant], table: str) -> None:
    one, two = two_tenants
    with transaction("api", one.id) as session:
        changed = session.execute(text(f"UPDATE {table} SET id = id WHERE tenant_id = :t"), {"t": two.id})
        assert changed.rowcount == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("table", ["jobs", "objects", "files"])
def test_the_api_role_cannot_give_a_row_to_another_tenant(two_tenants: tuple[Tenant, Tenant], table: str) -> None:
    one, two = two_tenants
    with pytest.raises(ProgrammingError, match="row-level security"), transaction("api", one.id) as session:
        session.execute(text(f"UPDATE {table} SET tenant_id = :t"), {"t": two.id})


def test_the_api_role_cannot_write_events_of_another_tenant(two_tenants: tuple[Tenant, Tenant]) -> None:
    one, two = two_tenants
    with transaction() as session:
        job_id = session.scalar(text("SELECT id FROM jobs WHERE tenant_id = :t"), {"t": two.id})
    with pytest.raises(ProgrammingError, match="row-level security"), transaction("api", one.id) as session:
        session.execute(
            text("INSERT INTO events (tenant_id, job_id, level, code, message) VALUES (:t, :j, 'info', 'x', 'x')"),
            {"t": two.id, "j": job_id},
        )


@pytest.mark.parametrize(
    "statement", ["DROP TABLE turns_p0", "CREATE TABLE mine (a int)", "ALTER TABLE jobs ADD a int"]
)
def test_the_service_role_cannot_change_the_schema(clean: str, statement: str) -> None:
    with pytest.raises(ProgrammingError, match=r"must be owner|permission denied"), transaction() as session:
        session.execute(text(statement))


@pytest.mark.parametrize("statement", ["UPDATE audit_log SET actor = 'nobody'", "DELETE FROM audit_log"])
def test_the_audit_log_can_only_be_added_to(two_tenants: tuple[Tenant, Tenant], statement: str) -> None:
    with pytest.raises(ProgrammingError, match="permission denied"), transaction() as session:
        session.execute(text(statement))


# --- key look-up


def look_up(secret: str) -> list[tuple[uuid.UUID, list[str]]]:
    with transaction("api") as session:
        rows = session.execute(
            text("SELECT tenant_id, scopes FROM marlaas_find_key(:h)"), {"h": tenants.hash_secret(secret)}
        )
        return [(row.tenant_id, row.scopes) for row in rows]


def test_a_key_is_found_by_its_hash(tenant: Tenant) -> None:
    with transaction() as session:
        _, secret = tenants.create_key(session, tenant, "key", scopes=["read"])
    assert look_up(secret) == [(tenant.id, ["read"])]


def test_another_secret_finds_no_key(tenant: Tenant) -> None:
    with transaction() as session:
        tenants.create_key(session, tenant, "key")
    assert look_up("mk-guessed") == []


def test_a_revoked_key_is_not_found(tenant: Tenant) -> None:
    with transaction() as session:
        key, secret = tenants.create_key(session, tenant, "key")
        tenants.revoke_key(session, tenant, key.id)
    assert look_up(secret) == []


def test_an_expired_key_is_not_found(tenant: Tenant) -> None:
    with transaction() as session:
        past = datetime.now(UTC) - timedelta(seconds=1)
        _, secret = tenants.create_key(session, tenant, "key", expires_at=past)
    assert look_up(secret) == []
