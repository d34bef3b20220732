"""A job from submission to its commits on real workers whose engine is vLLM. Run apart: its model is another `tiny`."""

from __future__ import annotations

from sqlalchemy import select

from app.db import transaction
from app.models import PolicyVersion, Round, StepMetrics, Turn
from tests.e2e.conftest import Service

SETTINGS = {"MARLAAS_ENGINE": "vllm", "MARLAAS_ENGINE_SLOTS": "8", "MARLAAS_ENGINE_KV_TOKENS": str(8 * 256)}
MODEL = {"num_attention_heads": 2, "num_key_value_heads": 1}  # heads of 32, the smallest that vLLM's attention knows


def test_a_job_commits_two_versions(service: Service) -> None:
    job_id = service.submit(service.tenant("acme"), hyperparameters={"n_steps": 2})
    job = service.wait(job_id, "succeeded", "failed", seconds=150)
    assert (job.state, job.version) == ("succeeded", 2)
    with transaction() as session:
        versions = session.scalars(select(PolicyVersion).where(PolicyVersion.job_id == job_id)).all()
        turns = session.execute(
            select(Turn.policy_version, Turn.weights_digest)
            .join(Round, Round.id == Turn.round_id)
            .where(Round.job_id == job_id)
            .distinct()
        ).all()
        steps = session.scalars(select(StepMetrics).where(StepMetrics.job_id == job_id)).all()
    digests = {version.version: version.weights_digest for version in versions}
    assert dict(map(tuple, turns)) == {0: digests[0], 1: digests[1]}
    assert all(step.metrics["logprob_gap"] < 1e-4 for step in steps)
