"""Tenants' python in its sandbox: what it can do, what it cannot, and that it always comes to an end."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.errors import EnvironmentTimeout, InvalidRequest
from workers.tools import python_grader
from workers.tools.calls import describe_error, described
from workers.tools.grader_runs import AT_ONCE_A_TENANT, BUSY, GraderRuns
from workers.tools.grades import Ungraded
from workers.tools.python_grader import check_python, run_python

JSON = dict[str, Any]

SAMPLE: JSON = {"output_text": '{"x": [1, 2]}', "output_json": {"x": [1, 2]}}
ITEM: JSON = {"messages": [{"role": "user", "content": "?"}], "answer": "12", "scores": {"a": None, "b": 0.5}}


def source(body: str) -> str:
    return "def grade(sample, item):\n" + "\n".join(f"    {line}" for line in body.splitlines())


def graded(body: str) -> float:
    return run_python(source(body), SAMPLE, ITEM)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(python_grader.LIMITS, "max_feed_duration_secs", 0.2)


# What a grader gives


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return 0.25", 0.25),
        ("return 1", 1.0),
        ("return True", 1.0),
        ("return sample['output_text'] == 'x'", 0.0),
        ("return -3.5", -3.5),
        ("return sum(sample['output_json']['x']) / float(item['answer'])", 0.25),
        ("return item['scores']['b'] if item['scores']['a'] is None else 0", 0.5),
        ("import json, re\nreturn len(re.findall(r'\\d', json.dumps(sample['output_json'])))", 2),
        ("import math\nreturn math.sqrt(len(item['messages']))", 1),
        ("print('seen')\nreturn 1", 1.0),
        ("import time\ntime.sleep(1000)\nreturn 1", 1.0),
        ("try:\n    import numpy\nexcept ImportError:\n    return 0.5", 0.5),
    ],
)
def test_a_grade_is_the_number_that_is_returned(body: str, expected: float) -> None:
    assert graded(body) == pytest.approx(expected)


def test_helpers_and_constants_of_the_source_are_there() -> None:
    text = (
        "import re\nLIMIT = 3\ndef item(x): return min(x, LIMIT)\ndef grade(s, i): return item(len(s['output_text']))"
    )
    assert run_python(text, SAMPLE, ITEM) == 3.0


def test_the_same_sample_has_the_same_grade() -> None:
    body = "import random\nreturn random.random()"
    assert graded(body) == graded(body)


def test_nothing_stays_from_one_grade_to_the_next() -> None:
    text = "seen = []\ndef grade(s, i):\n    seen.append(1)\n    return len(seen)"
    assert [run_python(text, SAMPLE, ITEM) for _ in range(3)] == [1.0] * 3
    with pytest.raises(Ungraded, match="NameError"):
        graded("return seen")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("pass", "grade returned nothing: return a number"),
        ("return '1.0'", "grade returned str: return a number"),
        ("return [1.0]", "grade returned list: return a number"),
        ("return grade", "grade returned"),
        ("return float('nan')", "grade returned nan"),
        ("return float('-inf')", "grade returned -inf"),
        ("return 10**400", "grade returned a larger integer"),
        ("return -1e7", "between -1e\\+06 and 1e\\+06"),
        ("return float(sample['output_text'])", "ValueError: could not convert string to float.*line 2, in grade"),
        ("return item['missing']", "KeyError: .*missing"),
        ("assert False, 'no'", "AssertionError: no"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise SystemExit", "SystemExit"),
        ("raise ValueError('x' * 1000000)", "ValueError: xxx"),
        ("async def f(): return 1\nreturn f()", "grade returned"),
    ],
)
def test_an_answer_without_a_grade_is_told_why(body: str, message: str) -> None:
    with pytest.raises(Ungraded, match=message) as caught:
        graded(body)
    assert caught.value.failure.flag == "python_grader_runtime_error"
    assert caught.value.failure.by_sample
    assert len(caught.value.failure.message) <= 2000


def test_a_text_that_is_no_unicode_is_ungraded() -> None:
    with pytest.raises(Ungraded, match="surrogates"):
        run_python(source("return 1"), {"output_text": "\ud800"}, {})


# What is refused before a job starts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "define grade\\(sample, item\\)"),
        ("grade = 1", "define grade\\(sample, item\\)"),
        ("def grade(sample): return 1", "define grade\\(sample, item\\): Too many"),
        ("def grade(sample, item, more): return 1", "define grade\\(sample, item\\): No argument.*more"),
        ("def grade(sample, item):\n    return scor", "line 2: Name `scor` used when not defined"),
        ("def grade(sample, item):\n    return callable(item)", "line 2: Name `callable` used when not defined"),
        ("def grade(:", "Expected"),
        ("import numpy\ndef grade(s, i): return 1", "No module named 'numpy'"),
        ("raise ValueError('at once')\ndef grade(s, i): return 1", "ValueError: at once"),
        ("class A(Exception): pass\ndef grade(s, i): return 1", "not yet support class inheritance"),
        ("x = " + "(" * 10_000 + ")" * 10_000, "nested"),
        ("x = " + "-" * 50_000 + "1", "nested"),
        ("\n".join(" " * i + "if 1:" for i in range(1000)) + "\n" + " " * 1000 + "pass", "nested"),
    ],
)
def test_a_source_that_cannot_grade_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        check_python(text, "grader.source")
    assert caught.value.param == "grader.source"


@pytest.mark.parametrize(
    "text",
    [
        "def grade(sample, item): return 1",
        "def grade(sample: dict, item: dict, more: int = 3) -> float: return 'typed wrongly'",
        "import re\ndef grade(s, i) -> float: return float(re.search('a', s['output_text']).group(1))",
        "try:\n    import numpy as np\nexcept ImportError:\n    np = None\ndef grade(s, i): return np is None",
        "grade = lambda sample, item: 1.0",
        "def grade(*args, **kwargs): return 1",
    ],
)
def test_a_source_that_may_grade_is_let_through(text: str) -> None:
    check_python(text, "grader.source")


def test_a_source_that_never_comes_to_its_end_is_ended(short: None) -> None:
    with pytest.raises(EnvironmentTimeout):
        check_python("while True: pass\ndef grade(s, i): return 1", "grader.source")


def test_a_type_checker_at_a_loss_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(python_grader.LIMITS, "max_feed_duration_secs", 0.5)
    turns = "".join("        x, y, z = (y, x), [z, x], {x: y}\n" for _ in range(200))
    check_python(f"def f(c):\n    x, y, z = 1, 2, 3\n    while c:\n{turns}\ndef grade(s, i): return 1", "grader.source")


# What it cannot do


@pytest.mark.parametrize(
    "body",
    [
        "import os\nreturn len(os.listdir('/'))",
        "import os\nreturn len(os.environ)",
        "import os\nreturn len(os.getenv('PATH'))",
        "import os\nos.system('true')",
        "return len(open('/etc/passwd').read())",
        "return len(open('/proc/self/environ').read())",
        "open('/tmp/marlaas-escaped', 'w').write('x')\nreturn 1",
        "import pathlib\nreturn len(pathlib.Path('/etc/passwd').read_text())",
        "import pathlib\npathlib.Path('/tmp/marlaas-escaped').write_text('x')\nreturn 1",
        "import subprocess\nreturn subprocess.call('true')",
        "import socket\nreturn socket.socket()",
        "import ctypes\nreturn 1",
        "import pydantic_monty\nreturn 1",
        "import app.settings\nreturn 1",
        "import urllib.request\nreturn 1",
        "import sys\nreturn len(sys.modules)",
        "return len(().__class__.__bases__[0].__subclasses__())",
        "return len(grade.__globals__)",
        "return len(grade.__code__.co_consts)",
        "return len('{0.__class__.__mro__}'.format(1))",
        "return len(str(type(1).__mro__))",
        "return __import__('os').getpid()",
        "return eval('__import__(\"os\").getpid()')",
        "exec('import socket')\nreturn 1",
        "return len(globals()['__builtins__'].__dict__)",
        "return getattr(getattr(1, '__cla' + 'ss__'), '__base__').__subclasses__()",
        "try:\n    1 / 0\nexcept Exception as e:\n    return len(e.__traceback__.tb_frame.f_globals)",
    ],
)
def test_nothing_outside_can_be_reached(body: str) -> None:
    with pytest.raises(Ungraded):
        graded(body)
    assert not Path("/tmp/marlaas-escaped").exists()


@pytest.mark.parametrize(
    "body",
    [
        "a = []\nwhile True: a.append('x' * 1000000)",
        "a = []\nwhile True:\n    try:\n        while True: a.append('x' * 1000000)\n    except BaseException: pass",
        "return len('x' * 10**11)",
        "return len([0] * 10**10)",
        "return len(list(range(10**12)))",
        "s = 'x'\nfor _ in range(60): s = s + s\nreturn len(s)",
        "return len('%1000000000d' % 1)",
        "return len(f'{1:>10000000000}')",
        "return len(('a' * 1000000).replace('a', 'b' * 1000000))",
        "return len('a'.join(['b' * 1000] * 10**7))",
        "return 10**10**8 > 0",
        "return (1 << 10**10) > 0",
        "return len(str(9**100000))",
        "return int('9' * 10000000) > 0",
        "def f(): return f()\nreturn f()",
        "a = []\nb = []\nfor _ in range(100000):\n    a = [a]\n    b = [b]\nreturn a == b",
        "import json\nreturn len(json.loads('[' * 1000000))",
        "import re\nreturn len(re.match(r'(a|aa|a?)*\\1b$', 'a' * 5000 + 'c').group())",
        "import re\nreturn re.compile('(a{1000}){1000}{1000}') is None",
        "import itertools\nreturn len(list(itertools.permutations(range(15))))",
        "a = []\nfor _ in range(100000): a = [a]\nreturn a",
        "return 'x' * 50000000",
    ],
)
def test_what_takes_too_much_is_ungraded(body: str) -> None:
    with pytest.raises(Ungraded):
        graded(body)


@pytest.mark.parametrize(
    "body",
    [
        "while True: pass",
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
        "return sum(range(10**15))",
        "while True: print('x' * 1000)",
        "x = 7\nfor _ in range(60): x = x * x\nreturn 1",  # in the interpreter's own multiplication: it is killed
        "import math\nreturn math.factorial(10**7) > 0",
    ],
)
def test_what_takes_too_long_is_ended(body: str, short: None) -> None:
    with pytest.raises(EnvironmentTimeout, match="ran past"):
        graded(body)
    assert graded("return 1") == 1.0


# In the process that can be killed


def test_a_timeout_in_the_child_is_one_for_its_parent() -> None:
    error = described(describe_error(EnvironmentTimeout("the python grader ran past 4 s")))
    assert isinstance(error, EnvironmentTimeout)
    assert error.message == "the python grader ran past 4 s"


@pytest.fixture
def runs() -> Iterator[GraderRuns]:
    runs = GraderRuns(processes=1)
    yield runs
    runs.close()


def request(body: str) -> JSON:
    return {"do": "grade", "grader": {"type": "python", "source": source(body)}, "item": ITEM, "text": "x"}


def interpreters() -> set[str]:
    """Processes of the sandbox, by id, that this user has."""
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and folder.stat().st_uid == os.getuid():
            try:
                if b"monty\0subprocess" in (folder / "cmdline").read_bytes():
                    found.add(folder.name)
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


def test_a_run_answers_with_the_grade(runs: GraderRuns) -> None:
    answer = runs.run("acme", request("return 0.5"), 20)
    assert answer["value"] == {"reward": 0.5, "scores": {}, "failure": None}


def test_a_run_past_the_deadline_is_killed_with_its_interpreter(runs: GraderRuns) -> None:
    before = interpreters()
    assert runs.run("acme", request("return 0.5"), 20)["value"]["reward"] == 0.5
    mine = interpreters() - before
    assert len(mine) == 1
    assert runs.run("acme", request("while True: pass"), 0.3)["failed"]["type"] == "timeout"
    wait_until_gone(mine)
    assert runs.run("acme", request("return 0.25"), 20)["value"]["reward"] == 0.25


def wait_until_gone(processes: set[str], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while processes & interpreters():
        assert time.monotonic() < end, f"{processes} still run"
        time.sleep(0.01)


def test_a_wrong_grader_is_told_apart_from_one_that_fails(runs: GraderRuns) -> None:
    check = {"do": "check", "grader": {"type": "python", "source": "def grade(s): return 1"}}
    assert runs.run("acme", check, 20)["invalid"]["param"] == "grader.source"


def test_a_tenant_has_so_many_runs_at_once(runs: GraderRuns) -> None:
    with runs._place("acme"), runs._place("acme"), runs._place("acme"):
        assert AT_ONCE_A_TENANT == 3
        assert runs.run("acme", request("return 1"), 20) == BUSY
        assert runs.run("other", request("return 1"), 20)["value"]["reward"] == 1.0
    assert runs.run("acme", request("return 1"), 20)["value"]["reward"] == 1.0
