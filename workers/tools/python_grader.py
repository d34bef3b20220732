"""Tenants' graders in Python, run by Monty: an interpreter without files, network, clock control or the host's objects.

It runs in a process of its own, which this one ends when a limit does not hold it. Nothing lasts from one grade to the
next: each has a session, and the random numbers of each start with the same seed.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from pydantic_monty import (
    Monty,
    MontyCrashedError,
    MontyError,
    MontyRuntimeError,
    MontySession,
    MontyTypingError,
    OSPolicy,
    ResourceLimits,
)

from app.errors import EnvironmentFault, EnvironmentTimeout, InvalidRequest
from app.specs.grader import MAX_REWARD
from workers.once import once
from workers.tools.grades import Failure, Ungraded

JSON = dict[str, Any]

SECONDS = 4.0  # of one grade; below the usual deadline of an environment's call, so that the sandbox says it itself
GRACE_SECONDS = 0.5  # past which an interpreter that does not stop is killed
STARTS = 1000  # grades after which the interpreter's process is replaced
MAX_DETAILS = 2000

LIMITS: ResourceLimits = {
    "max_feed_duration_secs": SECONDS,
    "max_memory": 128 << 20,
    "max_recursion_depth": 400,
    "max_suspensions": 32,  # each import that is refused is one
}
POLICY: OSPolicy = {"sleep": "zero", "random_start": {"seed": 0}}

CALL = "grade(__sample, __item)"
# What the type checker is asked besides the source: whether `grade` is there and takes two values.
PROBE = "\n\ndef __call(sample, item):\n    return grade(sample, item)\n"
# Of its findings, those that make a grader fail whatever it is given, or soon enough; its opinion on types is none.
REFUSED = {"unresolved-reference", "too-many-positional-arguments", "missing-argument", "call-non-callable"}


def run_python(source: str, sample: JSON, item: JSON) -> float:
    """What the source's `grade(sample, item)` returns: a finite number, True and False being 1 and 0.

    Raises Ungraded where it raises or returns anything else, EnvironmentTimeout past its time, EnvironmentFault
    where the interpreter itself went down.
    """
    with _session() as session:
        _run(session, source)
        value = _run(session, CALL, {"__sample": sample, "__item": item})
    if not isinstance(value, int | float):
        _ungraded(f"grade returned {'nothing' if value is None else type(value).__name__}: return a number")
    if not abs(value) <= MAX_REWARD:  # NaN too
        shown = value if isinstance(value, float) else "a larger integer"
        _ungraded(f"grade returned {shown}: return a number between -{MAX_REWARD:g} and {MAX_REWARD:g}")
    return float(value)


def check_python(source: str, field: str) -> None:
    """Raises InvalidRequest (of `field`) for a source that cannot run here or has no `grade(sample, item)`, and
    EnvironmentTimeout for one that takes too long to load."""
    findings = _findings(source + PROBE)
    try:
        with _session() as session:
            _run(session, source)
            wrong = [f for f in findings if not (name := _unknown_name(f)) or not _is_there(session, name)]
    except Ungraded as error:
        raise InvalidRequest(f"{field}: {error.failure.message}", param=field) from error
    if wrong:
        told = "; ".join(_told(finding, source) for finding in wrong[:3])
        raise InvalidRequest(f"{field}: {told}", param=field)


def _findings(source: str) -> list[JSON]:
    """The type checker's, of those kinds that are refused."""
    try:
        with _session(type_check=True) as session:
            _run(session, source, type_check=True)
    except MontyTypingError as error:
        return [finding for finding in json.loads(error.display()) if finding["code"] in REFUSED]
    except (Ungraded, EnvironmentTimeout):  # then loading the source says more, or the checker alone is at a loss
        return []
    return []


def _unknown_name(finding: JSON) -> str | None:
    if finding["code"] != "unresolved-reference":
        return None
    return finding["message"].partition("`")[2].partition("`")[0]


def _is_there(session: MontySession, name: str) -> bool:
    """The interpreter knows names that its type checker does not."""
    try:
        _run(session, f"{name}\nNone")
    except Ungraded:
        return False
    return True


def _told(finding: JSON, source: str) -> str:
    row = finding["location"]["row"]
    if row > source.count("\n") + 1:  # in the probe
        return f"define grade(sample, item): {finding['message']}"
    return f"line {row}: {finding['message']}"


@once
def _pool() -> Monty:
    """This process's interpreter; it ends with its standard input, so with this process."""
    return Monty(
        min_processes=1, max_processes=1, feed_duration_limit_grace=GRACE_SECONDS, max_checkouts_per_worker=STARTS
    ).__enter__()


def _session(*, type_check: bool = False) -> MontySession:
    return _pool().checkout(
        script_name="grader.py",
        limits=LIMITS,
        os_policy=POLICY,
        type_check=type_check,
        type_check_format="json",
    )


def _run(session: MontySession, code: str, inputs: JSON | None = None, type_check: bool = False) -> Any:
    try:
        return session.feed_run(
            code, inputs=inputs, print_callback=lambda stream, text: None, skip_type_check=not type_check
        )
    except MontyTypingError:
        raise
    except MontyCrashedError as error:
        if error.timed_out:
            raise EnvironmentTimeout(_late()) from error
        raise EnvironmentFault(f"the python grader's interpreter went down: {error}") from error
    except MontyRuntimeError as error:
        if isinstance(error.exception(), TimeoutError) and "time limit exceeded" in str(error):
            raise EnvironmentTimeout(_late()) from error
        where = [frame for frame in error.traceback() if frame.function_name]
        place = f" (line {where[-1].line}, in {where[-1].function_name})" if where else ""
        _ungraded(error.display("type-msg")[: MAX_DETAILS - 200] + place)
    except MontyError as error:  # of syntax, or of values that do not fit in
        _ungraded(str(error))


def _late() -> str:
    return f"the python grader ran past {SECONDS:g} s"


def _ungraded(message: str) -> NoReturn:
    raise Ungraded(Failure("python_grader_runtime_error", message[:MAX_DETAILS]))
