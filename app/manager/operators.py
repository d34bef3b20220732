"""Operators of the console: names, roles and passwords. A new password or role ends all sessions."""

from __future__ import annotations

import secrets
import threading
import uuid
from collections.abc import Sequence
from datetime import timedelta
from functools import lru_cache

from argon2 import PasswordHasher
from argon2.exceptions import VerifyMismatchError
from sqlalchemy import func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from app.db import transaction
from app.errors import Conflict, InvalidRequest, MarlaasError, NotFound
from app.manager import audit
from app.models import AuditEntry, Operator
from app.models.operator import OperatorRole

SHORTEST_PASSWORD, LONGEST_PASSWORD = 10, 1024
LONGEST_NAME = 64

# Failed logins within the window, after which nobody gets a try: of one name, and from one address.
WINDOW = timedelta(minutes=15)
FAILURES_OF_NAME = 10
FAILURES_OF_ADDRESS = 30
FAILED = "login.failed"

_hasher = PasswordHasher()  # argon2id, RFC 9106's profile of 64 MiB
_at_once = threading.Semaphore(2)  # so that a burst of logins takes no more memory than this


class LoginRefused(MarlaasError):
    """Wrong name or password, or a disabled operator: which of them is not told."""

    code = "login_refused"


class LoginThrottled(MarlaasError):
    """Too many failures of late."""

    code = "login_throttled"


def create(session: Session, name: str, password: str, role: str) -> Operator:
    """Raises InvalidRequest, and Conflict where the name is taken."""
    if not 1 <= len(name) <= LONGEST_NAME or not name.isprintable() or name != name.strip():
        raise InvalidRequest(f"an operator's name has 1 to {LONGEST_NAME} printable characters", param="name")
    row = Operator(name=name, password_hash=_hash(password), role=_role(role))
    try:
        with session.begin_nested():
            session.add(row)
    except IntegrityError as error:
        raise Conflict(f"an operator named {name!r} exists already", param="name") from error
    return row


def new_password() -> str:
    return secrets.token_urlsafe(15)


def list_operators(session: Session) -> Sequence[Operator]:
    return session.scalars(select(Operator).order_by(Operator.name)).all()


def find_operator(session: Session, name: str) -> Operator:
    row = session.scalars(select(Operator).where(Operator.name == name)).first()
    if row is None:
        raise NotFound(f"no operator is named {name!r}; `marlaas operator list` shows them", param="name")
    return row


def set_password(row: Operator, password: str) -> None:
    row.password_hash = _hash(password)
    row.session_epoch += 1


def set_role(row: Operator, role: str) -> None:
    row.role = _role(role)
    row.session_epoch += 1


def disable(row: Operator) -> None:
    """Ends all sessions and refuses new ones."""
    row.disabled_at = func.now()
    row.session_epoch += 1


def enable(row: Operator) -> None:
    row.disabled_at = None


def of_session(session: Session, operator_id: uuid.UUID, epoch: int) -> Operator | None:
    """The operator whose session began at `epoch`, if it has not been ended since."""
    row = session.get(Operator, operator_id)
    if row is None or row.disabled_at is not None or row.session_epoch != epoch:
        return None
    return row


def log_in(name: str, password: str, address: str | None) -> Operator:
    """Checks a password, and writes down how that went. Raises LoginRefused, LoginThrottled.

    Opens its own transactions: none stays open while the hash is computed. Takes as long for a name that nobody has.
    """
    with _at_once:
        with transaction() as session:
            _check_throttle(session, name, address)
            row = session.scalars(select(Operator).where(Operator.name == name)).first()
        matches = _matches(row.password_hash if row else _nobodys_hash(), password)
        with transaction() as session:
            if row is None or not matches or row.disabled_at is not None:
                # The name is the target: it may be anything that somebody typed.
                audit.record(session, actor="-", action=FAILED, target_kind="operator", target_id=name, address=address)
            else:
                row = session.get_one(Operator, row.id)
                row.last_login_at = func.now()
                audit.record(session, actor=row.name, operator_id=row.id, action="login", address=address)
                session.flush()
                session.refresh(row)
                return row
    raise LoginRefused("The name or the password is wrong.")


def _check_throttle(session: Session, name: str, address: str | None) -> None:
    """Tries that are throttled are not written down, so the wait ends after the window."""
    recent = select(func.count()).where(AuditEntry.action == FAILED, AuditEntry.created_at > func.now() - WINDOW)
    of_name = recent.where(AuditEntry.target_kind == "operator", AuditEntry.target_id == name[: audit.MOST_TEXT])
    from_address = recent.where(AuditEntry.address == address)
    if (
        session.execute(of_name).scalar_one() >= FAILURES_OF_NAME
        or session.execute(from_address).scalar_one() >= FAILURES_OF_ADDRESS
    ):
        minutes = WINDOW.total_seconds() / 60
        raise LoginThrottled(f"Too many failed logins. Wait {minutes:.0f} minutes and try again.")


def _hash(password: str) -> str:
    if not SHORTEST_PASSWORD <= len(password) <= LONGEST_PASSWORD:
        raise InvalidRequest(f"a password has {SHORTEST_PASSWORD} to {LONGEST_PASSWORD} characters", param="password")
    return _hasher.hash(password)


def _matches(password_hash: str, password: str) -> bool:
    try:
        return _hasher.verify(password_hash, password[:LONGEST_PASSWORD])
    except VerifyMismatchError:
        return False


@lru_cache
def _nobodys_hash() -> str:
    return _hasher.hash(secrets.token_hex())


def _role(role: str) -> str:
    known = [r.value for r in OperatorRole]
    if role not in known:
        raise InvalidRequest(f"a role is one of {', '.join(known)}, not {role!r}", param="role")
    return role
