"""The form of a new job: every option, templates to start from, the equal API call, a preflight, and the submission."""

from __future__ import annotations

import uuid
from pathlib import PurePath
from typing import Any

from flask import redirect, render_template, request, url_for
from sqlalchemy.orm import Session
from werkzeug.exceptions import NotFound
from werkzeug.wrappers import Response

from app.console.auth import audit, role
from app.console.blueprint import console
from app.console.job import find
from app.console.job_form import (
    BASICS,
    ENVIRONMENTS,
    FIELDS,
    GROUPS,
    OTHER,
    OTHER_FIELDS,
    TURNS,
    WHOLE,
    Filled,
    Values,
    read,
    values_of,
)
from app.console.job_templates import GRADERS, TEMPLATES
from app.console.snippets import snippets
from app.db import transaction
from app.errors import InvalidRequest, MarlaasError
from app.manager import base_models, files, jobs, preflight, tenants
from app.models import Job, Tenant
from app.models.job import TERMINAL, JobKind
from app.settings import get_settings
from app.specs.job import JobSpec
from app.specs.reasoning_gym import TASKS

DEFAULT_TEMPLATE = "reasoning_gym"
UPLOAD_BYTES = 32 << 20  # through a browser; the API takes larger ones
TRAINING_FILE = "params.dataset.file_id"
FILE_FIELDS = [f for f in ENVIRONMENTS["dataset"] if f.kind == "file"]


@console.get("/jobs/new")
@role("operator")
def new_job() -> str:
    """An empty form, one filled with a `template`, or with what another job (`clone`) was made of."""
    with transaction() as session:
        if clone := request.args.get("clone"):
            document, tenant_id = _cloned(session, clone)
        else:
            template = TEMPLATES.get(request.args.get("template", DEFAULT_TEMPLATE))
            if template is None:
                raise NotFound(f"The templates are {', '.join(TEMPLATES)}.")
            document, tenant_id = dict(template.document), request.args.get("tenant", "")
            models = base_models.list_base_models(session)
            document["base_model"] = models[0].name if models else ""
        return _page(session, read(_sent(values_of(document))), tenant_id, shown_errors=False)


@console.post("/jobs/new")
@role("operator")
def create_job() -> Response | tuple[str, int]:
    """Creates the job and goes to its page; else the form again, each error beside its field."""
    filled, tenant_id = read(_form()), request.form.get("tenant", "")
    try:
        with transaction() as session:
            made = _submit(session, filled, tenant_id)
        return redirect(url_for("console.job", job_id=made.id), 303)
    except Unfit as refused:
        filled = refused.filled
    with transaction() as session:
        return _page(session, filled, tenant_id), 422


@console.post("/fragments/new-job")
@role("operator")
def new_job_preview() -> str:
    """The equal API call of the form as it stands, and what is wrong with it."""
    filled = read(_form())
    return render_template("console/_new_job_preview.html", **_preview(filled))


@console.get("/fragments/new-job/files")
@role("operator")
def new_job_files() -> str:
    """The file choices of a tenant."""
    return _file_choices(request.args.get("tenant", ""))


@console.post("/fragments/new-job/files")
@role("operator")
def upload_job_file() -> str:
    """Uploads a data file for the chosen tenant; answers the choices with it chosen, or what is wrong with it."""
    request.max_content_length = UPLOAD_BYTES
    tenant_id, sent = request.form.get("tenant", ""), request.files.get("file")
    with transaction() as session:
        tenant = _tenant(session, tenant_id)
    if tenant is None or sent is None:
        return _file_choices(tenant_id, wrong="choose the tenant first: the file will be its own")
    try:
        made = files.upload(tenant.id, PurePath(sent.filename or "").name, sent.stream)
    except MarlaasError as error:
        return _file_choices(tenant_id, wrong=error.message)
    with transaction() as session:
        audit(session, "file.upload", "file", made.id, tenant.id, name=made.name, lines=made.lines)
    return _file_choices(tenant_id, chosen=str(made.id))


def _file_choices(tenant_id: str, chosen: str = "", wrong: str | None = None) -> str:
    with transaction() as session:
        tenant = _tenant(session, tenant_id)
        return render_template(
            "console/_new_job_files.html",
            files=files.list_files(session, tenant) if tenant else [],
            fields=FILE_FIELDS,
            values={TRAINING_FILE: chosen},
            errors={TRAINING_FILE: [wrong]} if wrong else {},
        )


@console.post("/jobs/preflight")
@role("operator")
def start_preflight() -> str:
    """Tries the job of the form with the base model; answers the fragment that follows it."""
    filled, tenant_id = read(_form()), request.form.get("tenant", "")
    try:
        with transaction() as session:
            tenant, spec = _checked(session, filled, tenant_id)
            try:
                made = preflight.submit(session, tenant, spec)
            except MarlaasError as error:
                raise Unfit(filled.with_error(error.param, error.message)) from error
            audit(session, "preflight.create", "preflight", made.id, tenant.id, name=made.name)
    except Unfit as refused:
        told = [f"{label(name)}: {what}" for name, said in refused.filled.errors.items() for what in said]
        return render_template("console/_preflight.html", refused=told)
    return preflight_fragment(made.id)


@console.get("/fragments/preflights/<uuid:preflight_id>")
@role("operator")
def preflight_fragment(preflight_id: uuid.UUID) -> str:
    with transaction() as session:
        job = session.get(Job, preflight_id)
        if job is None or job.kind != JobKind.PREFLIGHT:
            raise NotFound("There is no such preflight.")
        over = job.state in TERMINAL
        return render_template(
            "console/_preflight.html", job=job, over=over, report=preflight.report(session, job) if over else None
        )


def label(name: str) -> str:
    """A form field's name for people."""
    return FIELDS[name].label if name in FIELDS else name.rpartition(".")[2].capitalize() or "Job"


class Unfit(Exception):
    """The form does not make a job; `filled` says why, field by field."""

    def __init__(self, filled: Filled) -> None:
        super().__init__(filled.errors)
        self.filled = filled


def _submit(session: Session, filled: Filled, tenant_id: str) -> Job:
    tenant, spec = _checked(session, filled, tenant_id)
    submit_key = f"console:{_once()}"
    try:
        job = jobs.submit(session, tenant, spec, submit_key=submit_key)
    except MarlaasError as error:
        raise Unfit(filled.with_error(error.param, error.message)) from error
    audit(session, "job.create", "job", job.id, tenant.id, name=job.name)
    return job


def _checked(session: Session, filled: Filled, tenant_id: str) -> tuple[Tenant, JobSpec]:
    """Raises Unfit."""
    tenant = _tenant(session, tenant_id)
    if tenant is None:
        filled = filled.with_error("tenant", "choose the tenant that the job belongs to")
    if tenant is None or filled.spec is None:
        raise Unfit(filled)
    return tenant, filled.spec


def _once() -> str:
    """The form's own number: sent twice, it makes one job."""
    try:
        return str(uuid.UUID(request.form.get("once", "")))
    except ValueError as error:
        raise InvalidRequest("this form is out of date; reload the page") from error


def _tenant(session: Session, tenant_id: str) -> Tenant | None:
    try:
        return session.get(Tenant, uuid.UUID(tenant_id))
    except ValueError:
        return None


def _cloned(session: Session, job_id: str) -> tuple[dict[str, Any], str]:
    try:
        job = find(session, uuid.UUID(job_id))
    except ValueError as error:
        raise NotFound("There is no such job to clone.") from error
    document = JobSpec.model_validate(job.spec).model_dump(mode="json")
    return document | {"name": f"{job.name[:58]}-again"}, str(job.tenant_id)


def _form() -> dict[str, list[str]]:
    return {name: request.form.getlist(name) for name in request.form}


def _sent(values: Values) -> dict[str, list[str]]:
    return {name: value if isinstance(value, list) else [value] for name, value in values.items()}


def _page(session: Session, filled: Filled, tenant_id: str, *, shown_errors: bool = True) -> str:
    tenant = _tenant(session, tenant_id)
    return render_template(
        "console/new_job.html",
        values=filled.values,
        errors=filled.errors if shown_errors else {},
        whole=filled.errors.get(WHOLE, []) if shown_errors else [],
        tenant_id=tenant_id,
        tenants=tenants.list_tenants(session),
        base_models=base_models.list_base_models(session),
        files=files.list_files(session, tenant) if tenant else [],
        label=label,
        basics=BASICS,
        turns=TURNS,
        environments=ENVIRONMENTS | ({OTHER: OTHER_FIELDS} if get_settings().environment_modules else {}),
        groups=GROUPS,
        templates=TEMPLATES,
        graders=GRADERS,
        tasks=sorted(TASKS),
        once=request.form.get("once") or uuid.uuid4(),
        **_preview(filled),
    )


def _preview(filled: Filled) -> dict[str, Any]:
    base = get_settings().public_url or request.host_url
    h = filled.spec.hyperparameters if filled.spec else None
    return {
        "equal": snippets(filled.document, base.rstrip("/")),
        "problems": [f"{label(name)}: {told[0]}" for name, told in filled.errors.items()],
        "episodes": h and h.prompts_per_round * h.group_size,
        "steps": h and h.n_steps,
    }
