"""Whose fault it was: the job's own fails that job alone, one of ours gives the episode back (rule 7)."""

from __future__ import annotations

import structlog

from app.db import transaction
from app.errors import InvalidRequest, JobFault
from app.manager import episodes
from app.manager.episodes import Claim

log = structlog.get_logger(__name__)


def settle_fault(claim: Claim, error: Exception, *, second_chance: bool = False) -> None:
    """Fails the job for a fault of its own (after one more try with `second_chance`), else gives the episode back."""
    bound = {"tenant": str(claim.round.tenant_id), "job": str(claim.round.job_id), "round": claim.round.id}
    code, message = getattr(error, "code", "infrastructure"), str(error)
    own = isinstance(error, (JobFault, InvalidRequest))
    log.warning("episode_fault", code=code, error=message, episode=claim.episode_id, **bound)
    if own and not (second_chance and claim.retries == 0):
        with transaction() as session:
            episodes.fail_job(session, claim, code, message)
    else:
        with transaction() as session:
            episodes.give_back(session, [claim], code, message)
