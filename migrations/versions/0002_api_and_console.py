"""API and console: preflights, quotas, stored answers, operators, audit log

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

QUOTAS = {
    "max_live_jobs": (sa.Integer(), "100"),
    "max_file_bytes": (sa.BigInteger(), str(10 << 30)),
    "max_chat_requests": (sa.Integer(), "8"),
    "requests_per_minute": (sa.Integer(), "600"),
}
OLD_KINDS = "kind IN ('adapter_model', 'adapter_config', 'optimizer', 'file')"
NEW_KINDS = "kind IN ('adapter_model', 'adapter_config', 'adapter_zip', 'optimizer', 'file')"

# Every request looks its key up. When it was last used is written once a minute, so that the requests of one key do
# not wait for each other's row lock.
KEY_LOOKUP = """
CREATE OR REPLACE FUNCTION marlaas_find_key(wanted bytea) RETURNS TABLE (key_id uuid, tenant_id uuid, scopes jsonb)
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, public AS $$
    UPDATE public.api_keys SET last_used_at = now()
    WHERE secret_hash = wanted AND (last_used_at IS NULL OR last_used_at < now() - interval '1 minute')
        AND revoked_at IS NULL AND (expires_at IS NULL OR expires_at > now());
    SELECT id, api_keys.tenant_id, api_keys.scopes FROM public.api_keys
    WHERE secret_hash = wanted AND revoked_at IS NULL AND (expires_at IS NULL OR expires_at > now())
$$;
"""
OLD_KEY_LOOKUP = """
CREATE OR REPLACE FUNCTION marlaas_find_key(wanted bytea) RETURNS TABLE (key_id uuid, tenant_id uuid, scopes jsonb)
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, public AS $$
    UPDATE public.api_keys SET last_used_at = now()
    WHERE secret_hash = wanted AND revoked_at IS NULL AND (expires_at IS NULL OR expires_at > now())
    RETURNING id, api_keys.tenant_id, api_keys.scopes
$$;
"""

GRANTS = """
GRANT SELECT, INSERT, UPDATE, DELETE ON idempotency_keys, operators TO marlaas_service;
GRANT SELECT, INSERT ON audit_log TO marlaas_service;
GRANT SELECT, INSERT ON idempotency_keys TO marlaas_api;
GRANT USAGE, SELECT ON ALL SEQUENCES IN SCHEMA public TO marlaas_service;
GRANT USAGE ON SEQUENCE idempotency_keys_id_seq TO marlaas_api;
"""


def upgrade() -> None:
    op.add_column("jobs", sa.Column("kind", sa.Text(), server_default="train", nullable=False))
    _check("jobs", "kind", "kind IN ('train', 'preflight')")
    for name, (type_, default) in QUOTAS.items():
        op.add_column("tenants", sa.Column(name, type_, server_default=default, nullable=False))
    _check("tenants", "api_quotas_not_negative", " AND ".join(f"{name} >= 0" for name in QUOTAS))
    op.drop_constraint(op.f("ck_objects_kind"), "objects", type_="check")
    _check("objects", "kind", NEW_KINDS)
    op.create_table(
        "operators",
        sa.Column("id", sa.UUID(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("password_hash", sa.Text(), nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("session_epoch", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("last_login_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("disabled_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("role IN ('viewer', 'operator', 'admin')", name=op.f("ck_operators_role")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_operators")),
        sa.UniqueConstraint("name", name=op.f("uq_operators_name")),
    )
    op.create_table(
        "audit_log",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("operator_id", sa.UUID(), nullable=True),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("target_kind", sa.Text(), nullable=True),
        sa.Column("target_id", sa.Text(), nullable=True),
        sa.Column("tenant_id", sa.UUID(), nullable=True),
        sa.Column("address", sa.Text(), nullable=True),
        sa.Column("data", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(["operator_id"], ["operators.id"], name=op.f("fk_audit_log_operator_id")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_audit_log_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit_log")),
    )
    op.create_index("ix_audit_log_created", "audit_log", ["created_at"], unique=False)
    op.create_index("ix_audit_log_target", "audit_log", ["target_kind", "target_id"], unique=False)
    op.create_table(
        "idempotency_keys",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("tenant_id", sa.UUID(), nullable=False),
        sa.Column("api_key_id", sa.UUID(), nullable=False),
        sa.Column("key", sa.Text(), nullable=True),
        sa.Column("request_digest", sa.LargeBinary(), nullable=False),
        sa.Column("status", sa.SmallInteger(), nullable=False),
        sa.Column("answer", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id", "api_key_id"],
            ["api_keys.tenant_id", "api_keys.id"],
            name=op.f("fk_idempotency_keys_tenant_id_api_key_id"),
        ),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_idempotency_keys_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_idempotency_keys")),
    )
    op.create_index("ix_idempotency_keys_created", "idempotency_keys", ["created_at"], unique=False)
    op.create_index(
        "ix_idempotency_keys_digest", "idempotency_keys", ["tenant_id", "request_digest", "created_at"], unique=False
    )
    op.create_index(
        "uq_idempotency_keys_key",
        "idempotency_keys",
        ["tenant_id", "key"],
        unique=True,
        postgresql_where=sa.text("key IS NOT NULL"),
    )
    op.create_index("ix_jobs_created", "jobs", ["created_at", "id"], unique=False)
    op.create_index("ix_usage_tenant_created", "usage", ["tenant_id", "created_at"], unique=False)
    op.execute(GRANTS)
    for table in ("audit_log", "idempotency_keys"):
        op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
        op.execute(f"CREATE POLICY service ON {table} TO marlaas_service USING (true) WITH CHECK (true)")
        op.execute(
            f"CREATE POLICY tenant ON {table} TO marlaas_api"
            " USING (tenant_id = nullif(current_setting('marlaas.tenant', true), '')::uuid)"
        )
    op.execute(KEY_LOOKUP)


def _check(table: str, name: str, condition: str) -> None:
    op.create_check_constraint(op.f(f"ck_{table}_{name}"), table, condition)


def downgrade() -> None:
    op.execute(OLD_KEY_LOOKUP)
    op.drop_index("ix_usage_tenant_created", table_name="usage")
    op.drop_index("ix_jobs_created", table_name="jobs")
    op.drop_table("idempotency_keys")
    op.drop_table("audit_log")
    op.drop_table("operators")
    # The first schema knows no zips: the files that they were made of stay.
    op.execute("DELETE FROM objects WHERE kind = 'adapter_zip'")
    op.drop_constraint(op.f("ck_objects_kind"), "objects", type_="check")
    _check("objects", "kind", OLD_KINDS)
    op.drop_constraint(op.f("ck_tenants_api_quotas_not_negative"), "tenants", type_="check")
    for name in QUOTAS:
        op.drop_column("tenants", name)
    op.drop_constraint(op.f("ck_jobs_kind"), "jobs", type_="check")
    op.drop_column("jobs", "kind")
