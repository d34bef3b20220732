"""`/v1/files`: the data files of a tenant, checked line by line as they come in."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any, Literal

import pydantic
from apiflask.fields import UploadFile
from apiflask.schemas import FileSchema
from flask import Response
from sqlalchemy.orm import Session

from app import storage
from app.api import idempotency, ids
from app.api.auth import caller, requires, tenant_transaction
from app.api.blueprint import Body, annotate, api
from app.api.pages import ListOf, PageQuery, page, select_page
from app.manager import files
from app.models import File, StoredObject
from app.specs.dataset import MAX_FILE_BYTES
from app.specs.job import Text

FORM_BYTES = 1 << 20  # of an upload, beside the file itself


class UploadForm(Body):
    file: UploadFile = pydantic.Field(description="JSON Lines, each line an object with `messages`")
    purpose: Literal["fine-tune"]


class FileObject(pydantic.BaseModel):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int = pydantic.Field(description="Unix seconds")
    filename: str
    purpose: str
    status: Literal["processed"]
    lines: int = pydantic.Field(description="items in the file")


class FileList(ListOf[FileObject]):
    pass


class FileDeleted(pydantic.BaseModel):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


class FileQuery(PageQuery):
    order: Literal["asc", "desc"] = pydantic.Field("desc", description="by time of upload")
    purpose: Text | None = pydantic.Field(None, max_length=64)


@api.post("/files")
@requires("write", max_bytes=MAX_FILE_BYTES + FORM_BYTES)
@api.input(UploadForm, location="form_and_files", arg_name="form")
@api.output(FileObject)
@api.doc(responses={429: "Too many requests, or the tenant's bytes of files are used up."})
def upload_file(form: UploadForm) -> idempotency.Answer:
    """Upload a file

    Checks every line; an error names line and field. Nothing is stored of a file that is refused.
    """
    stream = form.file.stream
    name = PurePath(form.file.filename or "").name
    content = files.check(name, stream)
    mark = idempotency.mark("\n".join((form.purpose, name, content.sha256)).encode())
    with tenant_transaction() as session:
        if known := idempotency.stored_answer(session, mark):
            return known
        file = files.announce(session, caller().tenant_id, name, content, form.purpose)
    files.put(file, stream, content)
    with tenant_transaction() as session:
        if known := idempotency.stored_answer(session, mark):
            return known  # an equal request was quicker; what this one put is swept as an orphan
        files.publish(session, file)
        answer = _document(file, content.size)
        idempotency.store_answer(session, mark, answer, 200)
    return answer, 200


annotate(upload_file, idempotent=True)


@api.get("/files")
@requires("read")
@api.input(FileQuery, location="query", arg_name="query")
@api.output(FileList)
def list_files(query: FileQuery) -> dict[str, Any]:
    """List files"""
    after = ids.parse_file(query.after, "after") if query.after is not None else None
    statement = files.of_tenant(caller().tenant_id)
    if query.purpose is not None:
        statement = statement.where(File.purpose == query.purpose)
    with tenant_transaction() as session:
        rows, more = select_page(session, statement, File.created_at, File.id, after, query.limit, query.order)
    return page([_document(file, stored.size) for file, stored in rows], more)


@api.get("/files/<file_id>")
@requires("read")
@api.output(FileObject)
def retrieve_file(file_id: str) -> dict[str, Any]:
    """Retrieve a file's description"""
    with tenant_transaction() as session:
        file, stored = _find(session, file_id)
    return _document(file, stored.size)


@api.get("/files/<file_id>/content")
@requires("read")
@api.output(FileSchema(type="string", format="binary"), content_type="application/octet-stream")
def download_file(file_id: str) -> Response:
    """Retrieve a file's content"""
    with tenant_transaction() as session:
        file, stored = _find(session, file_id)
    response = Response(storage.stream(stored.key), mimetype="application/octet-stream")
    response.content_length = stored.size
    response.headers.set("Content-Disposition", "attachment", filename=file.name)
    return response


@api.delete("/files/<file_id>")
@requires("write")
@api.output(FileDeleted)
@api.doc(responses={409: "A live job reads the file."})
def delete_file(file_id: str) -> dict[str, Any]:
    """Delete a file

    Jobs that are over keep what they made of it.
    """
    with tenant_transaction() as session:
        file, _ = _find(session, file_id)
        files.delete(session, file)
    return {"id": ids.file_id(file.id), "object": "file", "deleted": True}


def _find(session: Session, text: str) -> tuple[File, StoredObject]:
    """Raises NotFound."""
    found = session.execute(files.of_tenant(caller().tenant_id).where(File.id == ids.parse_file(text))).first()
    if found is None:
        raise ids.not_found("file", text, "file_id")
    file, stored = found
    return file, stored


def _document(file: File, size: int) -> dict[str, Any]:
    return {
        "id": ids.file_id(file.id),
        "object": "file",
        "bytes": size,
        "created_at": int(file.created_at.timestamp()),
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
        "lines": file.lines,
    }
