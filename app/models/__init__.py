"""The Postgres schema: SQLAlchemy 2 tables, one file an aggregate. Invariants live here as constraints."""

from app.models.base import Base
from app.models.event import Event
from app.models.idempotency import StoredAnswer
from app.models.job import File, Job
from app.models.object import StoredObject
from app.models.operator import AuditEntry, Operator
from app.models.policy import PolicyVersion, StepMetrics
from app.models.round import Episode, Group, Round, Turn
from app.models.tenant import ApiKey, BaseModel, Tenant
from app.models.usage import UsageDay, UsageEntry
from app.models.worker import PhaseSpan, Worker

__all__ = [
    "ApiKey",
    "AuditEntry",
    "Base",
    "BaseModel",
    "Episode",
    "Event",
    "File",
    "Group",
    "Job",
    "Operator",
    "PhaseSpan",
    "PolicyVersion",
    "Round",
    "StepMetrics",
    "StoredAnswer",
    "StoredObject",
    "Tenant",
    "Turn",
    "UsageDay",
    "UsageEntry",
    "Worker",
]
