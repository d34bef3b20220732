"""The child process of an EnvironmentRunner, `python -m workers.tools.child`: JSON lines on stdin and stdout.

Requests: {"do": "open", key, type, params, seed} | {"do": "call", key, method, args} | {"do": "close", key} and, of no
environment, {"do": "grade", grader, item, text} | {"do": "check", grader}; each with `seconds`, its deadline.
Answers: {"ok": value} | {"error": {"kind", "message", "param"}}.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import sys
from dataclasses import asdict

from app.specs.grader import parse_grader
from workers.tools.calls import describe_error, invoke
from workers.tools.environment import JSON, Environment
from workers.tools.graders import check_grader, grade
from workers.tools.registry import Registry, build_registry

MEMORY_BYTES = 4 << 30
GRACE_SECONDS = 5.0  # after the deadline at which the parent kills; only an orphan lives so long


def main(modules: list[str]) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what an environment prints goes to the log
    registry = build_registry(modules)
    environments: dict[str, Environment] = {}
    for line in sys.stdin:
        answers.write(json.dumps(_answer(json.loads(line), registry, environments)) + "\n")
        answers.flush()


def _answer(request: JSON, registry: Registry, environments: dict[str, Environment]) -> JSON:
    faulthandler.dump_traceback_later(request["seconds"] + GRACE_SECONDS, exit=True)
    try:
        return {"ok": _do(request, registry, environments)}
    except BaseException as error:  # SystemExit too: the caller must hear of it
        return {"error": describe_error(error)}
    finally:
        faulthandler.cancel_dump_traceback_later()


def _do(request: JSON, registry: Registry, environments: dict[str, Environment]) -> JSON | None:
    match request["do"]:
        case "open":
            created = registry.create(request["type"], request["params"], request["seed"])
            environments[request["key"]] = created
        case "call":
            return invoke(environments[request["key"]], request["method"], request["args"])
        case "close":
            environments.pop(request["key"], None)
        case "grade":
            return asdict(grade(parse_grader(request["grader"]), request["item"], request["text"]))
        case "check":
            check_grader(parse_grader(request["grader"]), [], "grader")
    return None


if __name__ == "__main__":
    main(sys.argv[1:])
