"""first schema

Revision ID: 0001
Revises:
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None
# Every table that belongs to a tenant: the api role sees the rows of its tenant and no others.
TENANT_TABLES = (
    "api_keys",
    "episodes",
    "events",
    "files",
    "groups",
    "jobs",
    "objects",
    "phase_spans",
    "policy_versions",
    "rounds",
    "step_metrics",
    "tenants",
    "turns",
    "usage",
    "usage_days",
)

# Workers may not change the schema; these two functions are the only way to make and drop partitions of `turns`.
PARTITIONS = """
CREATE FUNCTION marlaas_ensure_turns_partition(round_id bigint) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, public AS $$
DECLARE
    size CONSTANT bigint := 10000;
    number bigint := round_id / size;
    name text := 'turns_p' || number;
BEGIN
    IF to_regclass('public.' || name) IS NULL THEN
        EXECUTE format(
            'CREATE TABLE public.%I PARTITION OF public.turns FOR VALUES FROM (%s) TO (%s)',
            name, number * size, (number + 1) * size
        );
    END IF;
END $$;

CREATE FUNCTION marlaas_drop_turns_partition(round_id bigint) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, public AS $$
BEGIN
    EXECUTE format('DROP TABLE IF EXISTS public.%I', 'turns_p' || round_id / 10000);
END $$;
"""

# Roles belong to the cluster, not to this database: they stay when the schema goes.
ROLES = """
DO $$ BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'marlaas_service') THEN
        CREATE ROLE marlaas_service NOLOGIN;
    END IF;
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'marlaas_api') THEN
        CREATE ROLE marlaas_api NOLOGIN;
    END IF;
    EXECUTE format('GRANT marlaas_service, marlaas_api TO %I', current_user);
END $$;
GRANT USAGE ON SCHEMA public TO marlaas_service, marlaas_api;
GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO marlaas_service;
GRANT USAGE, SELECT ON ALL SEQUENCES IN SCHEMA public TO marlaas_service, marlaas_api;
REVOKE ALL ON FUNCTION marlaas_ensure_turns_partition(bigint), marlaas_drop_turns_partition(bigint) FROM public;
GRANT EXECUTE ON FUNCTION marlaas_ensure_turns_partition(bigint), marlaas_drop_turns_partition(bigint)
    TO marlaas_service;
GRANT SELECT ON base_models, episodes, events, files, groups, jobs, objects, phase_spans, policy_versions, rounds,
    step_metrics, tenants, turns, usage, usage_days TO marlaas_api;
GRANT INSERT, UPDATE ON files, jobs, objects TO marlaas_api;
GRANT INSERT ON events TO marlaas_api;
"""

# The api role cannot read `api_keys`; a key that a client shows is looked up by its hash.
KEY_LOOKUP = """
CREATE FUNCTION marlaas_find_key(wanted bytea) RETURNS TABLE (key_id uuid, tenant_id uuid, scopes jsonb)
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, public AS $$
    UPDATE public.api_keys SET last_used_at = now()
    WHERE secret_hash = wanted AND revoked_at IS NULL AND (expires_at IS NULL OR expires_at > now())
    RETURNING id, api_keys.tenant_id, api_keys.scopes
$$;
REVOKE ALL ON FUNCTION marlaas_find_key(bytea) FROM public;
GRANT EXECUTE ON FUNCTION marlaas_find_key(bytea) TO marlaas_api, marlaas_service;
"""


def upgrade() -> None:
    op.create_table(
        "base_models",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("queue_suffix", sa.Text(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("dtype", sa.Text(), nullable=False),
        sa.Column("config", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_base_models")),
        sa.UniqueConstraint("queue_suffix", name=op.f("uq_base_models_queue_suffix")),
    )
    op.create_table(
        "tenants",
        sa.Column("id", sa.UUID(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.Column("max_running_jobs", sa.Integer(), nullable=False),
        sa.Column("max_inflight_episodes", sa.Integer(), nullable=False),
        sa.Column("suspended", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint(
            "max_running_jobs >= 0 AND max_inflight_episodes >= 0", name=op.f("ck_tenants_quotas_not_negative")
        ),
        sa.CheckConstraint("weight > 0", name=op.f("ck_tenants_weight_positive")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tenants")),
        sa.UniqueConstraint("name", name=op.f("uq_tenants_name")),
    )
    op.create_table(
        "workers",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("boot", sa.UUID(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("base_model", sa.Text(), nullable=True),
        sa.Column("slots", sa.Integer(), nullable=False),
        sa.Column("adapter_slots", sa.Integer(), nullable=False),
        sa.Column("draining", sa.Boolean(), nullable=False),
        sa.Column("load", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("seen_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("kind IN ('rollout', 'tools', 'training', 'manager')", name=op.f("ck_workers_kind")),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_workers")),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.UUID(), nullable=False),
        sa.Column("tenant_id", sa.UUID(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("prefix", sa.Text(), nullable=False),
        sa.Column("secret_hash", sa.LargeBinary(), nullable=False),
        sa.Column("scopes", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_used_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_api_keys_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("secret_hash", name=op.f("uq_api_keys_secret_hash")),
        sa.UniqueConstraint("tenant_id", "id", name=op.f("uq_api_keys_tenant_id_id")),
    )
    op.create_index("ix_api_keys_tenant_id", "api_keys", ["tenant_id"], unique=False)
    op.create_table(
        "jobs",
        sa.Column("id", sa.UUID(), nullable=False),
        sa.Column("tenant_id", sa.UUID(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("base_model", sa.Text(), nullable=False),
        sa.Column("spec", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("wanted", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("rounds_without_signal", sa.Integer(), nullable=False),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.Column("error_code", sa.Text(), nullable=True),
        sa.Column("error_message", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("first_step_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("doorbell_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("doorbells", sa.Integer(), nullable=False),
        sa.Column("submit_key", sa.Text(), nullable=True),
        sa.CheckConstraint("(state = 'failed') = (error_code IS NOT NULL)", name=op.f("ck_jobs_failed_has_error")),
        sa.CheckConstraint(
            "(state IN ('succeeded', 'failed', 'cancelled')) = (finished_at IS NOT NULL)",
            name=op.f("ck_jobs_finished_at_end"),
        ),
        sa.CheckConstraint(
            "state IN ('validating_files', 'queued', 'running', 'paused', 'succeeded', 'failed', 'cancelled')",
            name=op.f("ck_jobs_state"),
        ),
        sa.CheckConstraint("wanted IN ('run', 'pause', 'cancel')", name=op.f("ck_jobs_wanted")),
        sa.CheckConstraint("version >= 0", name=op.f("ck_jobs_version_not_negative")),
        sa.ForeignKeyConstraint(["base_model"], ["base_models.name"], name=op.f("fk_jobs_base_model")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_jobs_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
        sa.UniqueConstraint("tenant_id", "id", name=op.f("uq_jobs_tenant_id_id")),
        sa.UniqueConstraint("tenant_id", "submit_key", name=op.f("uq_jobs_tenant_id_submit_key")),
    )
    op.create_index(
        "ix_jobs_live",
        "jobs",
        ["tenant_id", "created_at"],
        unique=False,
        postgresql_where=sa.text("state NOT IN ('succeeded', 'failed', 'cancelled')"),
    )
    op.create_index("ix_jobs_tenant_created", "jobs", ["tenant_id", "created_at"], unique=False)
    op.create_table(
        "objects",
        sa.Column("id", sa.UUID(), nullable=False),
        sa.Column("tenant_id", sa.UUID(), nullable=False),
        sa.Column("job_id", sa.UUID(), nullable=True),
        sa.Column("version", sa.Integer(), nullable=True),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("state_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint(
            "kind IN ('adapter_model', 'adapter_config', 'optimizer', 'file')", name=op.f("ck_objects_kind")
        ),
        sa.CheckConstraint("state IN ('pending', 'live', 'expired', 'deleted')", name=op.f("ck_objects_state")),
        sa.CheckConstraint("length(sha256) = 64 AND size >= 0", name=op.f("ck_objects_sha256_and_size")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_objects_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_objects")),
        sa.UniqueConstraint("key", name=op.f("uq_objects_key")),
        sa.UniqueConstraint("tenant_id", "id", name=op.f("uq_objects_tenant_id_id")),
    )
    op.create_index(
        "ix_objects_live",
        "objects",
        ["kind", "job_id", "version"],
        unique=False,
        postgresql_where=sa.text("state = 'live'"),
    )
    op.create_index(
        "ix_objects_unsettled",
        "objects",
        ["state", "state_at"],
        unique=False,
        postgresql_where=sa.text("state IN ('pending', 'expired')"),
    )
    op.create_table(
        "usage",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("tenant_id", sa.UUID(), nullable=False),
        sa.Column("job_id", sa.UUID(), nullable=False),
        sa.Column("round_id", sa.BigInteger(), nullable=False),
        sa.Column("episode_id", sa.BigInteger(), nullable=False),
        sa.Column("turn", sa.SmallInteger(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("generated_tokens", sa.Integer(), nullable=False),
        sa.Column("trained_tokens", sa.Integer(), nullable=False),
        sa.Column("busy_seconds", sa.Double(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_usage_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_usage")),
        sa.UniqueConstraint(
            "round_id", "episode_id", "turn", "attempt", name=op.f("uq_usage_round_id_episode_id_turn_attempt")
        ),
    )
    op.create_index("ix_usage_created", "usage", ["created_at"], unique=False)
    op.create_table(
        "usage_days",
        sa.Column("tenant_id", sa.UUID(), nullable=False),
        sa.Column("job_id", sa.UUID(), nullable=False),
        sa.Column("day", sa.Date(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("generated_tokens", sa.BigInteger(), nullable=False),
        sa.Column("trained_tokens", sa.BigInteger(), nullable=False),
        sa.Column("busy_seconds", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_usage_days_tenant_id")),
        sa.PrimaryKeyConstraint("tenant_id", "job_id", "day", name=op.f("pk_usage_days")),
    )
    op.create_table(
        "events",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("tenant_id", sa.UUID(), nullable=False),
        sa.Column("job_id", sa.UUID(), nullable=False),
        sa.Column("level", sa.Text(), nullable=False),
        sa.Column("code", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("data", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("level IN ('info', 'warn', 'error')", name=op.f("ck_events_level")),
        sa.ForeignKeyConstraint(
            ["tenant_id", "job_id"], ["jobs.tenant_id", "jobs.id"], name=op.f("fk_events_tenant_id_job_id")
        ),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_events_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_events")),
    )
    op.create_index("ix_events_job", "events", ["job_id", "id"], unique=False)
    op.create_table(
        "files",
        sa.Column("id", sa.UUID(), nullable=False),
        sa.Column("tenant_id", sa.UUID(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("purpose", sa.Text(), nullable=False),
        sa.Column("lines", sa.Integer(), nullable=False),
        sa.Column("object_id", sa.UUID(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("deleted_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["tenant_id", "object_id"], ["objects.tenant_id", "objects.id"], name=op.f("fk_files_tenant_id_object_id")
        ),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_files_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_files")),
        sa.UniqueConstraint("tenant_id", "id", name=op.f("uq_files_tenant_id_id")),
    )
    op.create_table(
        "policy_versions",
        sa.Column("job_id", sa.UUID(), nullable=False),
        sa.Column("version", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("parent_version", sa.Integer(), nullable=True),
        sa.Column("tenant_id", sa.UUID(), nullable=False),
        sa.Column("round_id", sa.BigInteger(), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("weights_digest", sa.Text(), nullable=False),
        sa.Column("adapter_object_id", sa.UUID(), nullable=False),
        sa.Column("config_object_id", sa.UUID(), nullable=False),
        sa.Column("optimizer_object_id", sa.UUID(), nullable=True),
        sa.Column("optimizer_steps", sa.Integer(), nullable=False),
        sa.Column("signal", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint(
            "CASE version WHEN 0 THEN parent_version IS NULL ELSE coalesce(parent_version = version - 1, false) END",
            name=op.f("ck_policy_versions_stands_on_parent"),
        ),
        sa.CheckConstraint("(version = 0) = (round_id IS NULL)", name=op.f("ck_policy_versions_made_by_round")),
        sa.ForeignKeyConstraint(
            ["job_id", "parent_version"],
            ["policy_versions.job_id", "policy_versions.version"],
            name="fk_parent_version",
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id", "adapter_object_id"], ["objects.tenant_id", "objects.id"], name="fk_adapter"
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id", "config_object_id"], ["objects.tenant_id", "objects.id"], name="fk_config"
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id", "job_id"], ["jobs.tenant_id", "jobs.id"], name=op.f("fk_policy_versions_tenant_id_job_id")
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id", "optimizer_object_id"], ["objects.tenant_id", "objects.id"], name="fk_optimizer"
        ),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_policy_versions_tenant_id")),
        sa.PrimaryKeyConstraint("job_id", "version", name=op.f("pk_policy_versions")),
        sa.UniqueConstraint("job_id", "version", "weights_digest", name="uq_policy_versions_digest"),
        sa.UniqueConstraint("round_id", name=op.f("uq_policy_versions_round_id")),
    )
    op.create_table(
        "rounds",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("tenant_id", sa.UUID(), nullable=False),
        sa.Column("job_id", sa.UUID(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("policy_version", sa.Integer(), nullable=False),
        sa.Column("weights_digest", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("open_episodes", sa.Integer(), nullable=False),
        sa.Column("cursor", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("admitted_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ready_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("training_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("lease_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("doorbell_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("worker", sa.Text(), nullable=True),
        sa.Column("losses", sa.Integer(), nullable=False),
        sa.Column("retries", sa.Integer(), nullable=False),
        sa.Column("summary", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.CheckConstraint("kind IN ('train', 'eval', 'preflight')", name=op.f("ck_rounds_kind")),
        sa.CheckConstraint(
            "state IN ('rolling_out', 'abandoned') OR open_episodes = 0", name=op.f("ck_rounds_ready_when_closed")
        ),
        sa.CheckConstraint(
            "state IN ('rolling_out', 'ready', 'training', 'committed', 'abandoned')", name=op.f("ck_rounds_state")
        ),
        sa.CheckConstraint("open_episodes >= 0", name=op.f("ck_rounds_open_episodes_not_negative")),
        sa.ForeignKeyConstraint(
            ["job_id", "policy_version", "weights_digest"],
            ["policy_versions.job_id", "policy_versions.version", "policy_versions.weights_digest"],
            name="fk_policy_version",
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id", "job_id"], ["jobs.tenant_id", "jobs.id"], name=op.f("fk_rounds_tenant_id_job_id")
        ),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_rounds_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rounds")),
        sa.UniqueConstraint(
            "id", "policy_version", "weights_digest", name=op.f("uq_rounds_id_policy_version_weights_digest")
        ),
        sa.UniqueConstraint("job_id", "id", "policy_version", name=op.f("uq_rounds_job_id_id_policy_version")),
        sa.UniqueConstraint("tenant_id", "id", name=op.f("uq_rounds_tenant_id_id")),
        sa.UniqueConstraint("tenant_id", "id", "policy_version", name=op.f("uq_rounds_tenant_id_id_policy_version")),
    )
    op.create_index(
        "ix_rounds_live",
        "rounds",
        ["state", "id"],
        unique=False,
        postgresql_where=sa.text("state IN ('rolling_out', 'ready', 'training')"),
    )
    op.create_index(
        "ix_rounds_trained",
        "rounds",
        ["finished_at"],
        unique=False,
        postgresql_where=sa.text("kind = 'train' AND state = 'committed'"),
    )
    op.create_index(
        "uq_rounds_live_train",
        "rounds",
        ["job_id"],
        unique=True,
        postgresql_where=sa.text("kind = 'train' AND state IN ('rolling_out', 'ready', 'training')"),
    )
    op.create_index(
        "uq_rounds_train_version",
        "rounds",
        ["job_id", "policy_version"],
        unique=True,
        postgresql_where=sa.text("kind = 'train' AND state <> 'abandoned'"),
    )
    op.create_table(
        "step_metrics",
        sa.Column("job_id", sa.UUID(), nullable=False),
        sa.Column("version", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("tenant_id", sa.UUID(), nullable=False),
        sa.Column("metrics", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id", "version"],
            ["policy_versions.job_id", "policy_versions.version"],
            name=op.f("fk_step_metrics_job_id_version"),
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id", "job_id"], ["jobs.tenant_id", "jobs.id"], name=op.f("fk_step_metrics_tenant_id_job_id")
        ),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_step_metrics_tenant_id")),
        sa.PrimaryKeyConstraint("job_id", "version", name=op.f("pk_step_metrics")),
    )
    op.create_table(
        "groups",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("tenant_id", sa.UUID(), nullable=False),
        sa.Column("round_id", sa.BigInteger(), nullable=False),
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column("item", sa.BigInteger(), nullable=False),
        sa.Column("messages", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("tools", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("state", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.ForeignKeyConstraint(
            ["tenant_id", "round_id"], ["rounds.tenant_id", "rounds.id"], name=op.f("fk_groups_tenant_id_round_id")
        ),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_groups_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_groups")),
        sa.UniqueConstraint("round_id", "id", name=op.f("uq_groups_round_id_id")),
        sa.UniqueConstraint("round_id", "index", name=op.f("uq_groups_round_id_index")),
    )
    op.create_table(
        "phase_spans",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("tenant_id", sa.UUID(), nullable=False),
        sa.Column("round_id", sa.BigInteger(), nullable=False),
        sa.Column("phase", sa.Text(), nullable=False),
        sa.Column("worker", sa.Text(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("phase IN ('rollout', 'environment', 'training')", name=op.f("ck_phase_spans_phase")),
        sa.CheckConstraint("ended_at >= started_at", name=op.f("ck_phase_spans_ends_after_start")),
        sa.ForeignKeyConstraint(
            ["tenant_id", "round_id"], ["rounds.tenant_id", "rounds.id"], name=op.f("fk_phase_spans_tenant_id_round_id")
        ),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_phase_spans_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_phase_spans")),
    )
    op.create_index("ix_phase_spans_round", "phase_spans", ["round_id"], unique=False)
    op.create_index("ix_phase_spans_time", "phase_spans", ["started_at"], unique=False)
    op.create_table(
        "turns",
        sa.Column("round_id", sa.BigInteger(), nullable=False),
        sa.Column("episode_id", sa.BigInteger(), nullable=False),
        sa.Column("index", sa.SmallInteger(), nullable=False),
        sa.Column("tenant_id", sa.UUID(), nullable=False),
        sa.Column("policy_version", sa.Integer(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("weights_digest", sa.Text(), nullable=True),
        sa.Column("context_ids", sa.LargeBinary(), nullable=True),
        sa.Column("sampled_ids", sa.LargeBinary(), nullable=True),
        sa.Column("logprobs", sa.LargeBinary(), nullable=True),
        sa.Column("finish_reason", sa.Text(), nullable=True),
        sa.Column("messages", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("state", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("(kind = 'policy') = (weights_digest IS NOT NULL)", name=op.f("ck_turns_policy_has_digest")),
        sa.CheckConstraint("kind IN ('policy', 'environment')", name=op.f("ck_turns_kind")),
        sa.CheckConstraint("(kind = 'policy') = (context_ids IS NOT NULL)", name=op.f("ck_turns_policy_has_context")),
        sa.CheckConstraint(
            "CASE kind WHEN 'policy' THEN coalesce(octet_length(sampled_ids) = octet_length(logprobs), false)"
            " ELSE sampled_ids IS NULL AND logprobs IS NULL END",
            name=op.f("ck_turns_a_logprob_a_token"),
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id", "round_id", "policy_version"],
            ["rounds.tenant_id", "rounds.id", "rounds.policy_version"],
            name="fk_round_version",
        ),
        sa.ForeignKeyConstraint(
            ["round_id", "policy_version", "weights_digest"],
            ["rounds.id", "rounds.policy_version", "rounds.weights_digest"],
            name="fk_round_weights",
        ),
        sa.PrimaryKeyConstraint("round_id", "episode_id", "index", name=op.f("pk_turns")),
        postgresql_partition_by="RANGE (round_id)",
    )
    op.create_table(
        "episodes",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("tenant_id", sa.UUID(), nullable=False),
        sa.Column("round_id", sa.BigInteger(), nullable=False),
        sa.Column("group_id", sa.BigInteger(), nullable=False),
        sa.Column("index", sa.SmallInteger(), nullable=False),
        sa.Column("policy_version", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("turn", sa.SmallInteger(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("reward", sa.Double(), nullable=True),
        sa.Column("passed", sa.Boolean(), nullable=True),
        sa.Column("truncated", sa.Boolean(), nullable=False),
        sa.Column("flags", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("error_code", sa.Text(), nullable=True),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("lease_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("doorbell_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("worker", sa.Text(), nullable=True),
        sa.Column("losses", sa.SmallInteger(), nullable=False),
        sa.Column("retries", sa.SmallInteger(), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("(state = 'finished') = (reward IS NOT NULL)", name=op.f("ck_episodes_finished_has_reward")),
        sa.CheckConstraint(
            "reward IS NULL OR (reward > '-Infinity' AND reward < 'Infinity')", name=op.f("ck_episodes_reward_finite")
        ),
        sa.CheckConstraint(
            "state IN ('waiting', 'resetting', 'generating', 'acting', 'finished', 'failed')",
            name=op.f("ck_episodes_state"),
        ),
        sa.ForeignKeyConstraint(["round_id", "group_id"], ["groups.round_id", "groups.id"], name="fk_group"),
        sa.ForeignKeyConstraint(
            ["tenant_id", "round_id", "policy_version"],
            ["rounds.tenant_id", "rounds.id", "rounds.policy_version"],
            name="fk_round_version",
        ),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_episodes_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_episodes")),
        sa.UniqueConstraint("group_id", "index", name=op.f("uq_episodes_group_id_index")),
    )
    op.create_index(
        "ix_episodes_in_flight",
        "episodes",
        ["round_id"],
        unique=False,
        postgresql_where=sa.text("state IN ('resetting', 'generating', 'acting')"),
    )
    op.create_index("ix_episodes_round", "episodes", ["round_id", "group_id", "index"], unique=False)
    op.create_index(
        "ix_episodes_waiting",
        "episodes",
        ["round_id", "group_id", "index"],
        unique=False,
        postgresql_where=sa.text("state = 'waiting'"),
    )
    op.create_foreign_key(
        "fk_objects_tenant_id_job_id", "objects", "jobs", ["tenant_id", "job_id"], ["tenant_id", "id"]
    )
    op.create_foreign_key(
        "fk_round",
        "policy_versions",
        "rounds",
        ["job_id", "round_id", "parent_version"],
        ["job_id", "id", "policy_version"],
    )
    op.execute(PARTITIONS)
    op.execute("SELECT marlaas_ensure_turns_partition(0)")
    op.execute(ROLES)
    for table in TENANT_TABLES:
        column = "id" if table == "tenants" else "tenant_id"
        op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
        op.execute(f"CREATE POLICY service ON {table} TO marlaas_service USING (true) WITH CHECK (true)")
        op.execute(
            f"CREATE POLICY tenant ON {table} TO marlaas_api"
            f" USING ({column} = nullif(current_setting('marlaas.tenant', true), '')::uuid)"
        )
    op.execute(KEY_LOOKUP)


def downgrade() -> None:
    op.execute("DROP FUNCTION marlaas_find_key(bytea)")
    op.execute("DROP OWNED BY marlaas_service, marlaas_api")
    op.drop_constraint("fk_round", "policy_versions", type_="foreignkey")
    op.drop_constraint("fk_objects_tenant_id_job_id", "objects", type_="foreignkey")
    op.drop_table("episodes")
    op.drop_table("turns")
    op.drop_table("phase_spans")
    op.drop_table("groups")
    op.drop_table("step_metrics")
    op.drop_table("rounds")
    op.drop_table("policy_versions")
    op.drop_table("files")
    op.drop_table("events")
    op.drop_table("usage_days")
    op.drop_table("usage")
    op.drop_table("objects")
    op.drop_table("jobs")
    op.drop_table("api_keys")
    op.drop_table("workers")
    op.drop_table("tenants")
    op.drop_table("base_models")
    op.execute("DROP FUNCTION marlaas_ensure_turns_partition(bigint), marlaas_drop_turns_partition(bigint)")
