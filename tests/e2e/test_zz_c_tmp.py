import json, statistics
from sqlalchemy import select
from tests.e2e.conftest import *
from tests.e2e.test_real_preflights import check
from app.db import transaction
from app.models import PolicyVersion, StepMetrics, Round

def test_compare(service):
    tenant = service.tenant("acme")
    kw = dict(sampling={"max_tokens": 192}, hyperparameters={"n_steps": 8, "prompts_per_round": 4, "group_size": 8})
    service.wait(service.submit(tenant, **kw), "succeeded")
    said = json.loads(check(tenant, **kw).stdout)
    print(json.dumps({k: said["report"][k] for k in ("measured","prediction")}, indent=1))
    j = service.submit(tenant, **kw)
    service.wait(j, "succeeded")
    with transaction() as s:
        job = s.get(Job, j)
        rs = s.scalars(select(Round).where(Round.job_id==j).order_by(Round.id)).all()
        ms = s.scalars(select(StepMetrics).where(StepMetrics.job_id==j).order_by(StepMetrics.version)).all()
    for r, m in zip(rs, ms):
        print("rollout %.3f wait %.3f whole-training %.3f train %.3f gen %.1f" % ((r.ready_at-r.created_at).total_seconds(), (r.training_at-r.ready_at).total_seconds(), (r.finished_at-r.training_at).total_seconds(), m.metrics["seconds"], m.metrics["response_length"]))
    print("actual total", (job.finished_at-rs[0].created_at).total_seconds())
