"""The request of the tenant API that makes the same job, as curl, Python and YAML."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

# Beside OpenAI's `method`, where a job's document has them by another name.
EVALUATION = {"every": "eval_interval", "prompts": "eval_prompts", "samples": "eval_samples"}


@dataclass(frozen=True)
class Snippets:
    curl: str
    python: str
    yaml: str


def snippets(document: Mapping[str, Any], base_url: str) -> Snippets:
    """`document`: a job's fields, those left out at their defaults. `base_url`: of this service, without /v1."""
    body = request_body(document)
    text = json.dumps(body, indent=2, ensure_ascii=False).replace("'", "'\\''")
    curl = (
        f"curl {base_url}/v1/fine_tuning/jobs \\\n"
        '  -H "Authorization: Bearer $MARLAAS_API_KEY" \\\n'
        "  -H 'Content-Type: application/json' \\\n"
        f"  -d '{text}'"
    )
    arguments = "".join(f"    {name}={_literal(value)},\n" for name, value in body.items())
    python = (
        "from openai import OpenAI\n\n"
        f'client = OpenAI(base_url="{base_url}/v1", api_key="mk-…")\n'
        f"job = client.fine_tuning.jobs.create(\n{arguments})\n"
    )
    return Snippets(curl, python, yaml.safe_dump(dict(document), sort_keys=False, allow_unicode=True))


def request_body(document: Mapping[str, Any]) -> dict[str, Any]:
    """In OpenAI's words: a dataset's file and grader stand where theirs do, everything else in our `environment`."""
    environment = document.get("environment", {})
    params = environment.get("params", {})
    reinforcement: dict[str, Any] = {}
    body: dict[str, Any] = {"model": document.get("base_model", "")}
    if environment.keys() <= {"type", "params"} and params.keys() <= {"file_id", "eval_file_id", "grader"} and params:
        body["training_file"] = _file_id(params.get("file_id"))
        if "eval_file_id" in params:
            body["validation_file"] = _file_id(params["eval_file_id"])
        reinforcement["grader"] = params.get("grader")
    else:
        body["training_file"] = ""  # the client wants one; an environment has none
        reinforcement["environment"] = environment
    said = dict(document.get("hyperparameters", {}))
    evaluation = document.get("evaluation", {})
    said |= {name: evaluation[ours] for ours, name in EVALUATION.items() if ours in evaluation}
    if "validation_file" in body:
        said.setdefault("eval_interval", 0)  # with a validation file the API evaluates by itself
    if said:
        reinforcement["hyperparameters"] = said
    reinforcement |= {part: document[part] for part in ("sampling", "lora", "weight") if part in document}
    body |= {"suffix": document.get("name", ""), "seed": document.get("seed", 0)}
    if "metadata" in document:
        body["metadata"] = document["metadata"]
    return body | {"method": {"type": "reinforcement", "reinforcement": reinforcement}}


def _file_id(plain: Any) -> str:
    try:
        return f"file-{uuid.UUID(plain).hex}"
    except (ValueError, TypeError, AttributeError):
        return "file-…"


def _literal(value: Any, indent: int = 4) -> str:
    """Python's notation, to stand as an argument: on one line where that is short, else a line an entry."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if not isinstance(value, Mapping | list):
        return repr(value)
    if isinstance(value, Mapping):
        parts = [f"{_literal(str(k))}: {_literal(v, indent + 4)}" for k, v in value.items()]
    else:
        parts = [_literal(v, indent + 4) for v in value]
    left, right = ("{", "}") if isinstance(value, Mapping) else ("[", "]")
    line = f"{left}{', '.join(parts)}{right}"
    if len(line) + indent <= 80 and "\n" not in line:
        return line
    pad = " " * indent
    return f"{left}\n" + "".join(f"{pad}    {part},\n" for part in parts) + f"{pad}{right}"
