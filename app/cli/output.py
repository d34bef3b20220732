"""What commands print: tables for people, JSON with stable keys for programs, errors as one line and an exit status."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table
from rich.text import Text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, ProgrammingError
from typer.core import TyperGroup

from app.errors import InfrastructureFault, MarlaasError
from app.settings import get_settings

WIDE = 160  # columns where the output is no terminal

out = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDE)
err = Console(stderr=True)

NO_SCHEMA = ("42P01", "42703")  # undefined table, undefined column

EXIT_NOT_SUCCEEDED, EXIT_REFUSED, EXIT_UNREACHABLE = 1, 2, 3

JsonFlag = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
TenantName = Annotated[str, typer.Option("--tenant", "-t", envvar="MARLAAS_TENANT", help="The tenant's name.")]
MaybeTenant = Annotated[str | None, typer.Option("--tenant", "-t", envvar="MARLAAS_TENANT", help="Only this tenant's.")]
Version = Annotated[int | None, typer.Option("--version", min=0, help="Policy version; default: the latest.")]

Cell = Callable[[Any], object]


class Commands(TyperGroup):
    """A group whose errors are one red line: status 2 for a wrong request, 3 for a service that does not answer."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except InfrastructureFault as error:
            _give_up(error.message, EXIT_UNREACHABLE)
        except MarlaasError as error:
            _give_up(with_field(error), EXIT_REFUSED)
        except ValidationError as error:
            first = error.errors()[0]
            _give_up(f"setting {'.'.join(map(str, first['loc']))}: {first['msg']}", EXIT_REFUSED)
        except ProgrammingError as error:
            if getattr(error.orig, "sqlstate", None) not in NO_SCHEMA:
                raise
            _give_up(f"{_first_line(error)}; is the schema in place? `marlaas db upgrade` makes it", EXIT_UNREACHABLE)
        except (OperationalError, InterfaceError) as error:
            _give_up(
                f"the database at {_database()} does not answer: {_first_line(error)}. `marlaas up` starts one; if one"
                f" runs with another folder than {get_settings().state_dir}, set MARLAAS_STATE_DIR as it has it;"
                " MARLAAS_DATABASE_URL names any other",
                EXIT_UNREACHABLE,
            )


def with_field(error: MarlaasError) -> str:
    """The message, with the field in front where it does not start with it."""
    return error.message if not error.param or error.param in error.message else f"{error.param}: {error.message}"


def _give_up(message: str, status: int) -> None:
    err.print(Text(f"error: {safe(message)}", style="red"), soft_wrap=True)
    raise typer.Exit(status)


def _first_line(error: DBAPIError) -> str:
    return str(error.orig).strip().splitlines()[0]


def _database() -> str:
    url = make_url(get_settings().database_url.get_secret_value())
    return f"{url.host}:{url.port or 5432}"


def safe(text: str) -> str:
    """Text of users and models without what would steer a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def plain(value: Any) -> Any:
    """Rows, dataclasses and their parts as JSON knows them."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, uuid.UUID):
        return str(value)
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    return value


def print_json(value: Any, *, indent: int | None = 2) -> None:
    sys.stdout.write(json.dumps(plain(value), indent=indent, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def columns(row: object, *names: str) -> dict[str, Any]:
    """These columns of a database row, as a JSON object."""
    return {name: plain(getattr(row, name)) for name in names}


def table(rows: Sequence[Any], cells: Mapping[str, Cell], *, title: str | None = None) -> Table:
    """A table with one column for each of `cells`: its heading and what it shows of a row."""
    result = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for heading in cells:
        result.add_column(heading, overflow="fold")  # an id that is cut off is of no use
    for row in rows:
        result.add_row(*(_text(cell(row)) for cell in cells.values()))
    return result


def _text(value: object) -> Text:
    if isinstance(value, Text):
        return value
    if value is None or value == "":
        return Text("-", style="dim")
    if isinstance(value, float):
        return Text(f"{value:.4g}")
    return Text(safe(str(value)))


def show(rows: Sequence[Any], cells: Mapping[str, Cell], as_json: bool, *, empty: str, data: Any = None) -> None:
    """Rows as a table, or as a JSON array (`data`, where what is shown is not what is told)."""
    if as_json:
        print_json(rows if data is None else data)
    elif rows:
        out.print(table(rows, cells))
    else:
        out.print(Text(empty, style="dim"))


def say(message: str) -> None:
    out.print(Text(safe(message)), soft_wrap=True)


def short(identifier: uuid.UUID | str) -> str:
    """Enough of an id to name it by."""
    return str(identifier)[:8]


def duration(seconds: float | None) -> str | None:
    """`12s`, `3m05s`, `2h07m`."""
    if seconds is None:
        return None
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def ago(moment: datetime | None) -> str | None:
    return None if moment is None else f"{duration((datetime.now(UTC) - moment).total_seconds())} ago"


def size(count: int) -> str:
    """Bytes for people."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"
