"""Graders as they are described, and what each of them says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from app.errors import InvalidRequest
from app.specs.environment import check_environment
from app.specs.grader import parse_grader
from app.specs.job import JobSpec
from workers.tools.graders import check_grader, grade
from workers.tools.grades import Failure
from workers.tools.similarity import METRICS

JSON = dict[str, Any]

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"

ANSWER: JSON = {"type": "string_check", "reference": "{{ item.answer }}"}
ENTRY: JSON = {"question": "gcd of 6 and 9?", "answer": "3", "metadata": {"source_dataset": "gcd"}}
GYM: JSON = {"type": "reasoning_gym", "task": "gcd"}


def multi(formula: str, **options: Any) -> JSON:
    close = {"type": "text_similarity", "reference": "{{ item.answer }}"}
    return {"type": "multi", "graders": {"exact": ANSWER, "close": close}, "calculate_output": formula, **options}


def reward(grader: JSON, text: str, /, **item: Any) -> float:
    given = grade(parse_grader(grader), item, text)
    assert given.failure is None
    return given.reward


def failure(grader: JSON, text: str, /, **item: Any) -> Failure:
    found = grade(parse_grader(grader), item, text).failure
    assert found is not None
    return found


# What a document may say


@pytest.mark.parametrize(
    ("grader", "field", "message"),
    [
        ({}, "grader", "type"),
        ("string_check", "grader", "object"),
        ({"type": "exact"}, "grader", "string_check"),
        ({"type": "score_model", "model": "gpt"}, "grader", "score_model is not offered.*use python"),
        ({"type": "label_model", "model": "gpt"}, "grader", "label_model is not offered.*use python"),
        ({"type": "string_check"}, "grader.reference", "is required"),
        (ANSWER | {"refernce": "x"}, "grader.refernce", "did you mean 'reference'"),
        (ANSWER | {"name": ""}, "grader.name", "at least 1"),
        (ANSWER | {"input": "{{ foo.bar }}"}, "grader.input", "only {{ item"),
        (ANSWER | {"input": "{{ item }}"}, "grader.input", "only {{ item"),
        (ANSWER | {"input": "{{ sample.choices }}"}, "grader.input", "no sample.choices"),
        (ANSWER | {"input": "{{ sample.output_text.x }}"}, "grader.input", "output_json"),
        (
            {"type": "text_similarity", "reference": "x", "evaluation_metric": "cosine"},
            "grader.evaluation_metric",
            "use",
        ),
        (
            {"type": "text_similarity", "reference": "x", "evaluation_metric": "meteor"},
            "grader.evaluation_metric",
            "use",
        ),
        (
            {"type": "text_similarity", "reference": "x", "evaluation_metric": "x"},
            "grader.evaluation_metric",
            "rouge_l",
        ),
        ({"type": "python", "source": ""}, "grader.source", "at least 1"),
        ({"type": "python", "source": "x" * (129 << 10)}, "grader.source", "at most"),
        ({"type": "reasoning_gym", "task": "gdc"}, "grader.task", "it has gcd"),
        (multi("exact + other"), "grader.calculate_output", "only numbers.*, close, exact, abs"),
        (multi("exact +"), "grader.calculate_output", "invalid expression"),
        (multi("sqrt(exact, close)"), "grader.calculate_output", "sqrt does not take 2"),
        (multi("exact.real"), "grader.calculate_output", "only numbers"),
        (multi("(" * 250 + "exact" + ")" * 200), "grader.calculate_output", "invalid expression"),
        (multi("exact", graders={"max": ANSWER}), "grader.calculate_output", "max is a function"),
        (multi("exact", graders={}), "grader.graders", "at least 1"),
        (multi("a", graders={"a": multi("exact")}), "grader.graders.a", "multi"),
        (multi("a", graders={"a": {"type": "label_model"}}), "grader.graders.a", "not offered"),
        (multi("python", graders={"python": {"type": "python"}}), "grader.graders.python.source", "is required"),
        (multi("exact", invalid_grade=1e9), "grader.invalid_grade", "at most"),
    ],
)
def test_a_wrong_document_is_refused_with_its_field(grader: Any, field: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        parse_grader(grader)
    assert caught.value.param == field


@pytest.mark.parametrize(
    "formula", ["log(exact - 0.5)", "1 / (exact - 0.25)", "min(exact, close, 1)^2", "ceil(-exact)"]
)
def test_a_formula_may_have_no_value_with_some_scores(formula: str) -> None:
    parse_grader(multi(formula))


# What items must have


@pytest.mark.parametrize(
    ("grader", "items", "field", "message"),
    [
        (ANSWER, [{"answer": 1}, {}], "g.reference", "line 2: there is no item.answer"),
        (multi("exact"), [{}], "g.graders.exact.reference", "line 1: there is no item.answer"),
        (ANSWER | {"input": "{{ item.a[1].b }}"}, [{"a": [1], "answer": 1}], "g.input", r"no item.a\[1\].b"),
        (GYM, [ENTRY, {"answer": "3"}], "g", "line 2 is no entry"),
        ({"type": "python", "source": "def grade(sample): return 1"}, [], "g.source", "Too many positional arguments"),
    ],
)
def test_what_an_item_lacks_is_told_before_there_is_an_answer(
    grader: JSON, items: list[JSON], field: str, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        check_grader(parse_grader(grader), items, "g")
    assert caught.value.param == field


# What they say


@pytest.mark.parametrize(
    ("operation", "text", "expected"),
    [
        ("eq", "Rome", 1),
        ("eq", "rome", 0),
        ("ne", "Rome", 0),
        ("ne", "Oslo", 1),
        ("like", "It is Rome.", 1),
        ("like", "It is rome.", 0),
        ("ilike", "It is ROME.", 1),
        ("ilike", "It is Oslo.", 0),
    ],
)
def test_string_check(operation: str, text: str, expected: float) -> None:
    assert reward(ANSWER | {"operation": operation}, text, answer="Rome") == expected


def test_templates_fill_in_texts_as_they_are_and_other_values_as_json() -> None:
    template = "{{item.text}} {{ item.list[1].deep-er }} {{ item.none }} {{ sample.output_json.n }} {{ item.open }}"
    item = {"text": "it's", "list": [0, {"deep-er": True}], "none": None, "open": "{{ item.text }}"}
    assert reward(ANSWER | {"input": template}, '{"n": 1.5}', answer="it's true null 1.5 {{ item.text }}", **item) == 1


def test_an_answer_that_is_no_json_cannot_be_reached_into() -> None:
    grader = ANSWER | {"input": "{{ sample.output_json.x }}"}
    assert failure(grader, "x", answer="x") == Failure(
        "sample_parse_error", "sample.output_json.x: the answer is not JSON"
    )
    assert failure(grader, "[1]", answer="x") == Failure("sample_parse_error", "there is no sample.output_json.x")
    assert failure(grader, "[" * 100_000, answer="x").flag == "sample_parse_error"


def test_a_variable_that_no_answer_could_supply_is_no_bad_answer() -> None:
    assert failure(ANSWER, "x") == Failure("invalid_variable_error", "there is no item.answer", by_sample=False)


# Values of nltk 3.9 (bleu with smoothing method 2, gleu) and rouge-score 0.1.2, on the same tokens.
PAPINENI = (
    "It is a guide to action which ensures that the military always obeys the commands of the party",
    "It is a guide to action that ensures that the military will forever heed Party commands",
)
CAT = ("the cat sat on the mat", "the cat is on the mat")
FOX = ("A quick brown fox, it jumps over!", "The quick brown fox jumps over the lazy dog.")
REVERSED = ("a b c d e f g", "g f e d c b a")


@pytest.mark.parametrize(
    ("texts", "bleu", "gleu", "rouge"),
    [
        (CAT, 0.4855, 0.5, (0.8333, 0.6, 0.25, 0.0, 0.0, 0.8333)),
        (PAPINENI, 0.4453, 0.4394, (0.7059, 0.5, 0.4, 0.2857, 0.1538, 0.6471)),
        (FOX, 0.2742, 0.2647, (0.625, 0.4286, 0.1667, 0.0, 0.0, 0.625)),
        (REVERSED, 0.2627, 0.3182, (1.0, 0.0, 0.0, 0.0, 0.0, 0.1429)),
        (("x", "y"), 0.0, 0.0, (0.0,) * 6),
        (("", "y"), 0.0, 0.0, (0.0,) * 6),
    ],
)
def test_overlap_of_n_grams(texts: tuple[str, str], bleu: float, gleu: float, rouge: tuple[float, ...]) -> None:
    names = ("bleu", "gleu", "rouge_1", "rouge_2", "rouge_3", "rouge_4", "rouge_5", "rouge_l")
    assert [METRICS[name](*texts) for name in names] == pytest.approx([bleu, gleu, *rouge], abs=5e-5)


@pytest.mark.parametrize("metric", METRICS)
def test_equal_texts_are_as_near_as_can_be(metric: str) -> None:
    assert METRICS[metric]("one two three four five", "one two three four five") == pytest.approx(1.0)


@pytest.mark.parametrize("metric", ["fuzzy_match", "bleu", "gleu", "rouge_1", "rouge_l"])
def test_an_equal_single_word_is_as_near_as_can_be(metric: str) -> None:
    assert METRICS[metric]("Paris", "Paris") == 1.0


def test_rouge_reads_words_of_any_script_and_case() -> None:
    assert METRICS["rouge_1"]("ПРИВЕТ, мир", "привет мир") == 1.0


def test_fuzzy_match_counts_the_common_subsequence() -> None:
    assert METRICS["fuzzy_match"]("abxd", "abcd") == pytest.approx(0.75)


def test_a_long_answer_is_compared_in_time() -> None:
    long = "word " * 30_000
    assert all(0 <= metric(long, long[::-1]) <= 1 for metric in METRICS.values())


@pytest.mark.parametrize(
    ("text", "expected"),
    [("$\\frac{1}{2}$", 1.0), ("The answer is \\boxed{0.5}", 1.0), ("$0.4$", 0.0), ("", 0.0)],
)
def test_math_verify(text: str, expected: float) -> None:
    assert reward({"type": "math_verify", "reference": "${{ item.answer }}$"}, text, answer="0.5") == expected


def test_reasoning_gym_scores_its_own_entries() -> None:
    assert reward(GYM, " 3 ", **ENTRY) == 1.0
    assert reward(GYM, "it is 3", **ENTRY) == 0.0
    assert 0 < reward(GYM | {"reward": "score"}, "it is 3", **ENTRY) < 1


def test_an_answer_at_which_a_scorer_of_reasoning_gym_raises_is_of_another_form() -> None:
    entry = {"answer": "2 × 3", "metadata": {"number": 6, "factors": [2, 3]}}
    assert (
        failure({"type": "reasoning_gym", "task": "prime_factorization"}, "two", **entry).flag == "sample_parse_error"
    )


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        ("0.75*exact + 0.25*close", 0.25 * 0.75),
        ("max(exact, close) ^ 2", 0.5625),
        ("-close^2", -0.5625),
        ("floor(close) + ceil(close) + abs(-1) + sqrt(4) + exp(exact) + log(1) + min(1, 2)", 6),
    ],
)
def test_formulas_over_parts(formula: str, expected: float) -> None:
    given = grade(parse_grader(multi(formula)), {"answer": "abcd"}, "abxd")
    assert given.reward == pytest.approx(expected)
    assert given.scores == {"exact": 0.0, "close": 0.75}


@pytest.mark.parametrize("formula", ["close / exact", "log(exact)", "(-close) ^ 0.5", "10^12 * close"])
def test_a_formula_without_a_value_gives_the_invalid_grade(formula: str) -> None:
    given = grade(parse_grader(multi(formula, invalid_grade=-0.5)), {"answer": "abcd"}, "abxd")
    assert (given.reward, given.failure and given.failure.flag) == (-0.5, "formula_parse_error")
    assert given.scores == {"exact": 0.0, "close": 0.75}


def test_a_part_that_fails_gives_the_invalid_grade() -> None:
    parts = {"a": ANSWER, "b": {"type": "python", "source": "def grade(sample, item): return item['x']"}}
    given = grade(parse_grader(multi("a + b", graders=parts, invalid_grade=-0.5)), {"answer": "y"}, "y")
    assert (given.reward, given.scores) == (-0.5, {"a": 1.0})
    assert given.failure and given.failure.message == "KeyError: x (line 1, in grade)"


def test_the_example_of_the_documentation_grades() -> None:
    spec = JobSpec.model_validate(yaml.safe_load((EXAMPLES / "python_grader.yaml").read_text()))
    check_environment(spec.environment, 30, plugins=False)
    grader, items = parse_grader(spec.environment.params["grader"]), spec.environment.params["items"]
    check_grader(grader, items)
    assert [grade(grader, items[0], text).reward for text in ("5", "It is 5", "It is six")] == [1.0, 0.9, 0.0]
