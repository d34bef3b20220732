"""The blueprint of the API: validated input, documented output, errors in one shape."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import pydantic
from apiflask import APIBlueprint
from apiflask.exceptions import _ValidationError
from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from werkzeug.exceptions import HTTPException

from app.api.errors import on_database_error, on_http_error, on_marlaas_error
from app.errors import InvalidRequest, MarlaasError
from app.specs.problems import problems, summary

PREFIX = "/v1"
View = Callable[..., Any]


class Body(pydantic.BaseModel):
    """Base of request bodies: unknown fields are refused, so that a slip of the pen is no silent default."""

    model_config = pydantic.ConfigDict(extra="forbid", allow_inf_nan=False)


class Blueprint(APIBlueprint):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register_error_handler(MarlaasError, on_marlaas_error)
        self.register_error_handler(HTTPException, on_http_error)
        self.register_error_handler(OperationalError, on_database_error)
        self.register_error_handler(PoolTimeout, on_database_error)

    def input(self, schema: type[pydantic.BaseModel], location: str = "json", **options: Any) -> Any:  # type: ignore[override]
        """As APIFlask's, with pydantic models alone; what is wrong is said in our words, field by field."""
        validated = super().input(schema, location, **options)

        def decorator(view: View) -> View:
            inner = validated(view)

            @wraps(inner)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                try:
                    return inner(*args, **kwargs)
                except _ValidationError as error:
                    assert isinstance(error.__cause__, pydantic.ValidationError)
                    raise invalid(error.__cause__, schema) from error

            return wrapper

        return decorator


def invalid(error: pydantic.ValidationError, schema: type[pydantic.BaseModel], *above: str) -> InvalidRequest:
    """A pydantic error as one that names the first wrong field and tells the others."""
    found = problems(error, schema, *above)
    return InvalidRequest(summary(found), param=found[0][0] or None)


def annotate(view: View, **marks: Any) -> None:
    """Notes on a view, which APIFlask and `app.api.openapi` make the document of."""
    if not hasattr(view, "_spec"):
        view._spec = {}  # type: ignore[attr-defined]
    view._spec.update(marks)  # type: ignore[attr-defined]


api = Blueprint("api", __name__, url_prefix=PREFIX)
