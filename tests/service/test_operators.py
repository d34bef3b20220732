"""Operators on the command line and at the first start."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from app.db import transaction
from app.manager import operators
from app.manager.operators import LoginRefused
from app.up import FIRST_OPERATOR, PASSWORD_FILE, make_first_operator
from tests.service.test_cli import refused, run, told

PASSWORD = "correct horse battery"


def create(name: str = "ada", *options: str, password: str = PASSWORD) -> dict[str, str]:
    return told("operator", "create", name, "--password-stdin", *options, input=f"{password}\n")


def logs_in(name: str, password: str) -> bool:
    try:
        operators.log_in(name, password, None)
    except LoginRefused:
        return False
    return True


def test_an_operator_is_created_and_listed_without_the_password(clean: str) -> None:
    assert create("ada", "--role", "admin")["role"] == "admin"
    (listed,) = told("operator", "list")
    assert (listed["name"], listed["disabled_at"]) == ("ada", None)
    shown = run("operator", "list").stdout + str(listed)
    assert PASSWORD not in shown and "argon2" not in shown
    assert logs_in("ada", PASSWORD)


def test_a_password_is_made_and_shown_once(clean: str) -> None:
    made = told("operator", "create", "ada", "--generate")
    assert logs_in("ada", made["password"])
    assert "password" not in told("operator", "list")[0]


@pytest.mark.parametrize(
    ("name", "password"), [("ada", "short"), ("", PASSWORD), ("x" * 65, PASSWORD), ("a\nb", PASSWORD)]
)
def test_weak_passwords_and_odd_names_are_refused(clean: str, name: str, password: str) -> None:
    refused("operator", "create", name, "--password-stdin", input=f"{password}\n")


def test_a_name_is_taken_once(clean: str) -> None:
    create()
    refused("operator", "create", "ada", "--password-stdin", input=f"{PASSWORD}\n")


def test_without_a_terminal_nothing_is_asked(clean: str) -> None:
    assert "--password-stdin" in refused("operator", "create", "ada")


def test_a_new_password_replaces_the_old_one(clean: str) -> None:
    create()
    told("operator", "passwd", "ada", "--password-stdin", input="another password\n")
    assert (logs_in("ada", PASSWORD), logs_in("ada", "another password")) == (False, True)


def test_disabling_refuses_logins_until_enabling(clean: str) -> None:
    create()
    assert told("operator", "disable", "ada")["disabled_at"] is not None
    assert not logs_in("ada", PASSWORD)
    told("operator", "enable", "ada")
    assert logs_in("ada", PASSWORD)


def test_the_first_start_makes_an_admin_and_later_ones_none(clean: str, tmp_path: Path) -> None:
    password = make_first_operator(tmp_path)
    file = tmp_path / PASSWORD_FILE
    assert password is not None and file.read_text().strip() == password
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert operators.log_in(FIRST_OPERATOR, password, None).role == "admin"
    assert make_first_operator(tmp_path) is None


def test_where_there_is_an_operator_none_is_made(clean: str, tmp_path: Path) -> None:
    with transaction() as session:
        operators.create(session, "ada", PASSWORD, "viewer")
    assert make_first_operator(tmp_path) is None
    assert not (tmp_path / PASSWORD_FILE).exists()
