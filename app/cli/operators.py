"""`marlaas operator …`: who may use the console, and as what."""

from __future__ import annotations

import getpass
import sys
from typing import Annotated

import typer

from app.cli.output import Cell, JsonFlag, ago, columns, print_json, say, show
from app.db import transaction
from app.errors import InvalidRequest
from app.manager import audit, operators
from app.models import Operator
from app.models.operator import OperatorRole

app = typer.Typer(no_args_is_help=True, help="Logins of the operators' console.")

FIELDS = ("id", "name", "role", "created_at", "last_login_at", "disabled_at")
CELLS: dict[str, Cell] = {
    "OPERATOR": lambda o: o.name,
    "ROLE": lambda o: o.role,
    "STATE": lambda o: "disabled" if o.disabled_at else "active",
    "LAST LOGIN": lambda o: ago(o.last_login_at),
    "CREATED": lambda o: ago(o.created_at),
}

Role = Annotated[OperatorRole, typer.Option(help="viewer looks, operator steers jobs and workers, admin all.")]
FromInput = Annotated[bool, typer.Option("--password-stdin", help="Read the password from standard input.")]
Generate = Annotated[bool, typer.Option("--generate", help="Make a password and print it, this once.")]


@app.command()
def create(
    name: str,
    role: Role = OperatorRole.VIEWER,
    from_input: FromInput = False,
    generate: Generate = False,
    as_json: JsonFlag = False,
) -> None:
    """Creates a login. Asks for the password unless told where to take it from."""
    password = _password(from_input, generate)
    with transaction() as session:
        row = operators.create(session, name, password, role)
        _record(session, "operator.create", row, role=role.value)
        session.refresh(row)
    _tell(row, f"created {row.role} {row.name}", as_json, password if generate else None)


@app.command("list")
def list_(as_json: JsonFlag = False) -> None:
    """Shows all operators."""
    with transaction() as session:
        rows = operators.list_operators(session)
    empty = "no operators; marlaas operator create NAME --role admin"
    show(rows, CELLS, as_json, empty=empty, data=[columns(o, *FIELDS) for o in rows])


@app.command()
def passwd(name: str, from_input: FromInput = False, generate: Generate = False, as_json: JsonFlag = False) -> None:
    """Sets a new password and ends the operator's sessions."""
    with transaction() as session:
        operators.find_operator(session, name)
    password = _password(from_input, generate)
    with transaction() as session:
        row = operators.find_operator(session, name)
        operators.set_password(row, password)
        _record(session, "operator.password", row)
    _tell(row, f"changed the password of {row.name}", as_json, password if generate else None)


@app.command("role")
def role_(name: str, role: OperatorRole, as_json: JsonFlag = False) -> None:
    """Gives an operator another role and ends the operator's sessions."""
    with transaction() as session:
        row = operators.find_operator(session, name)
        operators.set_role(row, role)
        _record(session, "operator.role", row, role=role.value)
    _tell(row, f"{row.name} is {row.role}", as_json)


@app.command()
def disable(name: str, as_json: JsonFlag = False) -> None:
    """Ends an operator's sessions and refuses new ones."""
    with transaction() as session:
        row = operators.find_operator(session, name)
        operators.disable(row)
        _record(session, "operator.disable", row)
        session.flush()
        session.refresh(row)
    _tell(row, f"disabled {row.name}", as_json)


@app.command()
def enable(name: str, as_json: JsonFlag = False) -> None:
    """Lets a disabled operator log in again."""
    with transaction() as session:
        row = operators.find_operator(session, name)
        operators.enable(row)
        _record(session, "operator.enable", row)
    _tell(row, f"enabled {row.name}", as_json)


def _password(from_input: bool, generate: bool) -> str:
    if generate:
        return operators.new_password()
    if from_input:
        return sys.stdin.readline().rstrip("\r\n")
    if not sys.stdin.isatty():
        raise InvalidRequest("there is no terminal to ask on; use --password-stdin or --generate", param="password")
    password = getpass.getpass("Password: ")
    if getpass.getpass("Again: ") != password:
        raise InvalidRequest("the two passwords differ", param="password")
    return password


def _record(session: operators.Session, action: str, row: Operator, **data: str) -> None:
    session.flush()
    audit.record(
        session,
        actor=f"{audit.COMMAND_LINE} ({getpass.getuser()})",
        action=action,
        target_kind="operator",
        target_id=row.name,
        data=data or None,
    )


def _tell(row: Operator, message: str, as_json: bool, password: str | None = None) -> None:
    if as_json:
        print_json(columns(row, *FIELDS) | ({"password": password} if password else {}))
        return
    say(message)
    if password is not None:
        say("keep the password, it is not shown again:")
        print(password)
