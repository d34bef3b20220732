"""Data plane of MARLaaS: `celery -A workers worker -Q rollout|tools|training|manager` (app in `workers.celery`)."""
