from __future__ import annotations

import json

import pytest

from app.errors import EnvironmentFault, InvalidRequest
from workers.tools import dataset_env
from workers.tools.calculator_env import CalculatorEnvironment
from workers.tools.dataset_env import DatasetEnvironment
from workers.tools.environment import JSON, Action, Outcome, Split
from workers.tools.reasoning_gym_env import ReasoningGymEnvironment
from workers.tools.splits import held_out
from workers.tools.tool_calls import format_tool_call

GCD: JSON = {"task": "gcd", "config": {"min_value": 1, "max_value": 10}, "shots": 3}
FAST: JSON = {"latency_seconds": [0, 0]}


def say(text: str) -> Action:
    return Action(text, truncated=False)


def questions(environment: ReasoningGymEnvironment | CalculatorEnvironment, split: Split, count: int = 60) -> set[str]:
    return {environment.reset(i, split).messages[-1]["content"] for i in range(count)}


def shot_questions(environment: ReasoningGymEnvironment | CalculatorEnvironment) -> set[str]:
    return {m["content"] for m in environment.reset(0, "train").messages[:-1] if m["role"] == "user"}


# reasoning-gym


def answer_of(environment: ReasoningGymEnvironment, state: JSON) -> str:
    return environment._dataset[state["position"]]["answer"]


def test_reasoning_gym_asks_after_its_examples() -> None:
    messages = ReasoningGymEnvironment(GCD, seed=1).reset(0, "train").messages
    assert [m["role"] for m in messages] == ["system", *["user", "assistant"] * 3, "user"]
    assert messages[0]["content"] == "Answer with the final answer only."


@pytest.mark.parametrize(
    ("text", "reward"), [("{}", 1.0), (" {}\n", 1.0), ("The answer is {}", 0.0), ("no", 0.0), ("", 0.0)]
)
def test_reasoning_gym_pays_for_the_exact_answer(text: str, reward: float) -> None:
    environment = ReasoningGymEnvironment(GCD, seed=1)
    state = environment.reset(0, "train").state
    outcome = environment.step(state, say(text.format(answer_of(environment, state))), 0)
    assert (outcome.reward, outcome.passed, outcome.done) == (reward, reward == 1.0, True)


@pytest.mark.parametrize("split", ["train", "eval"])
def test_same_seed_same_questions_other_seed_others(split: Split) -> None:
    def first(seed: int) -> list[str]:
        environment = ReasoningGymEnvironment({"task": "chain_sum"}, seed)
        return [environment.reset(i, split).messages[-1]["content"] for i in range(5)]

    assert first(1) == first(1)
    assert first(1) != first(2)


def test_reasoning_gym_splits_and_examples_share_no_question() -> None:
    environments = [ReasoningGymEnvironment(GCD, seed) for seed in range(4)]
    held = set().union(*(questions(environment, "eval") for environment in environments))
    for environment in environments:
        trained, shown = questions(environment, "train"), shot_questions(environment)
        assert len(shown) == 3
        assert not held & trained
        assert not held & shown
        assert not trained & shown


def test_train_size_bounds_the_different_questions() -> None:
    assert len(questions(ReasoningGymEnvironment({"task": "chain_sum", "train_size": 7}, 1), "train")) == 7


def test_an_unscorable_answer_is_wrong_and_flagged() -> None:
    environment = ReasoningGymEnvironment({"task": "prime_factorization"}, seed=1)
    outcome = environment.step(environment.reset(0, "train").state, say("two times x"), 0)
    assert (outcome.reward, outcome.passed, outcome.flags) == (0.0, False, ("unscorable",))


@pytest.mark.parametrize("reward", ["exact", "score"])
def test_marks_that_any_answer_gets_are_not_paid(reward: str) -> None:
    environment = ReasoningGymEnvironment({"task": "power_function", "reward": reward}, seed=1)
    state = environment.reset(0, "train").state
    assert environment._dataset.score_answer("nonsense", environment._dataset[state["position"]]) > 0
    assert environment.step(state, say("nonsense"), 0).reward == 0.0


def test_partial_scores_are_paid_only_where_asked_for() -> None:
    def reward(kind: str) -> float | None:
        environment = ReasoningGymEnvironment({"task": "gcd", "reward": kind}, seed=1)
        state = environment.reset(0, "train").state
        return environment.step(state, say("It is " + answer_of(environment, state)), 0).reward

    assert reward("exact") == 0.0
    partial = reward("score")
    assert partial is not None
    assert 0 < partial < 1


def test_a_task_that_pays_anything_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="full marks to any answer"):
        ReasoningGymEnvironment({"task": "game_of_life_halting"}, seed=1)


def test_a_state_of_another_question_is_a_fault() -> None:
    environment = ReasoningGymEnvironment(GCD, seed=1)
    state = environment.reset(0, "train").state
    with pytest.raises(EnvironmentFault, match="another question"):
        environment.step(state | {"question": 0}, say("1"), 0)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({}, "environment.params.task"),
        ({"task": "nothing"}, "environment.params.task"),
        ({"task": "gcd", "shot": 1}, "environment.params.shot"),
        ({"task": "gcd", "shots": -1}, "environment.params.shots"),
        ({"task": "gcd", "config": {"max_valu": 1}}, "environment.params.config.max_valu"),
        ({"task": "gcd", "config": {"seed": 1}}, "environment.params.config.seed"),
        ({"task": "gcd", "config": {"min_value": -5}}, "environment.params.config"),
        ({"task": "gcd", "config": {"min_value": "x"}}, "environment.params.config"),
    ],
)
def test_wrong_reasoning_gym_parameters_are_named(params: JSON, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ReasoningGymEnvironment(params, seed=1)
    assert caught.value.param == field


def test_a_task_with_too_few_questions_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="too few different questions"):
        ReasoningGymEnvironment(GCD | {"config": {"min_value": 1, "max_value": 2}, "shots": 16}, seed=1)


# calculator


def dialogue(*texts: str) -> Outcome:
    """What a whole episode ends with; `{e}` and `{a}` stand for the expression and the right answer."""
    environment = CalculatorEnvironment(FAST, seed=1)
    state = environment.reset(0, "train").state
    for turn, text in enumerate(texts):
        filled = text.replace("{e}", state["expression"]).replace("{a}", str(eval_sum(state["expression"])))
        outcome = environment.step(json.loads(json.dumps(state)), say(filled), len(texts) - 1 - turn)
        if outcome.done:
            return outcome
        state = outcome.state
    raise AssertionError("the episode did not end")


def eval_sum(expression: str) -> int:
    for operator in "+*-":
        left, found, right = expression.partition(operator)
        if found:
            return {"+": int(left) + int(right), "*": int(left) * int(right), "-": int(left) - int(right)}[operator]
    raise AssertionError(expression)


CALL = format_tool_call("calculator", {"expression": "{e}"})


def test_a_call_and_its_result_are_paid() -> None:
    outcome = dialogue(CALL, "{a}")
    assert (outcome.reward, outcome.passed) == (1.0, True)


@pytest.mark.parametrize(
    ("texts", "flags"),
    [
        (["{a}"], ("no_call",)),  # guessing does not pay
        ([CALL, "{a}1"], ()),
        ([CALL, "1 2 3 {a}"], ()),
        ([CALL, CALL], ("no_answer",)),
        ([f"{CALL} {{a}}", "{a}"], ("malformed_call",)),
        (["<tool_call>{e}</tool_call>", "{a}"], ("malformed_call",)),
        ([format_tool_call("python", {"expression": "{e}"}), "{a}"], ("malformed_call",)),
        ([format_tool_call("calculator", {"expression": 7}), "{a}"], ("malformed_call",)),
        ([format_tool_call("calculator", {"expression": "{e}", "x": 1}), "{a}"], ("malformed_call",)),
        ([format_tool_call("calculator", {"expression": "9**9**9"}), "{a}"], ("no_call",)),  # a failed call is no call
    ],
)
def test_everything_else_is_not_paid(texts: list[str], flags: tuple[str, ...]) -> None:
    outcome = dialogue(*texts)
    assert (outcome.reward, outcome.passed, outcome.flags) == (0.0, False, flags)


def test_a_result_comes_back_as_a_tool_message() -> None:
    environment = CalculatorEnvironment(FAST | {"operators": ["*"]}, seed=1)
    state = environment.reset(0, "train").state
    outcome = environment.step(state, say(format_tool_call("calculator", {"expression": "6*7"})), 1)
    assert (outcome.done, outcome.reward, outcome.observation) == (False, None, [{"role": "tool", "content": "42"}])


def test_an_expression_that_fails_is_an_answer_of_the_tool() -> None:
    environment = CalculatorEnvironment(FAST, seed=1)
    state = environment.reset(0, "train").state
    outcome = environment.step(state, say(format_tool_call("calculator", {"expression": "1/0"})), 1)
    assert (outcome.done, outcome.flags) == (False, ("tool_error",))
    assert outcome.observation == [{"role": "tool", "content": "error: division by zero"}]


def test_calculator_examples_show_the_tool_dialogue() -> None:
    prompt = CalculatorEnvironment(FAST | {"shots": 2}, seed=1).reset(0, "train")
    assert [m["role"] for m in prompt.messages] == ["system", *["user", "assistant", "tool", "assistant"] * 2, "user"]
    assert prompt.tools is None


def test_without_examples_the_tool_is_defined() -> None:
    prompt = CalculatorEnvironment(FAST | {"shots": 0}, seed=1).reset(0, "train")
    assert [tool["function"]["name"] for tool in prompt.tools or []] == ["calculator"]


def test_calculator_splits_and_examples_share_no_question() -> None:
    environment = CalculatorEnvironment(FAST | {"max_operand": 9, "operators": ["+"], "shots": 4}, seed=1)
    trained, held, shown = questions(environment, "train"), questions(environment, "eval"), shot_questions(environment)
    assert len(shown) == 4
    assert not held & trained
    assert not held & shown
    assert not trained & shown
    assert all(map(held_out, held))


def test_latency_is_the_groups_own_and_within_the_range() -> None:
    environment = CalculatorEnvironment({"latency_seconds": [0.3, 2.0]}, seed=1)
    latencies = [environment.reset(i, "train").state["latency"] for i in range(20)]
    assert all(0.3 <= latency <= 2.0 for latency in latencies)
    assert len(set(latencies)) == 20
    assert environment.reset(3, "train").state["latency"] == latencies[3]


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"operators": ["^"]}, "environment.params.operators.0"),
        ({"operators": []}, "environment.params.operators"),
        ({"latency_seconds": [2, 1]}, "environment.params"),
        ({"latency_seconds": [0, 1000]}, "environment.params.latency_seconds.1"),
        ({"term": 1}, "environment.params.term"),
    ],
)
def test_wrong_calculator_parameters_are_named(params: JSON, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        CalculatorEnvironment(params, seed=1)
    assert caught.value.param == field


# dataset


def item(i: int, **fields: object) -> JSON:
    return {"messages": [{"role": "user", "content": f"What is {i}+{i}?"}], "answer": str(2 * i), **fields}


def dataset(grader: JSON, items: list[JSON] | None = None, **params: object) -> DatasetEnvironment:
    return DatasetEnvironment({"items": items or [item(i) for i in range(40)], "grader": grader, **params}, seed=1)


EXACT: JSON = {"type": "string_check", "reference": "{{ item.answer }}"}
NUMBER: JSON = {"type": "python", "source": "def grade(sample, item): return float(sample['output_text'])"}


def reward(grader: JSON, text: str, **fields: object) -> float | None:
    environment = dataset(grader, [item(4, **fields)], eval_items=[item(5, **fields)])
    return environment.step(environment.reset(0, "train").state, say(text), 0).reward


@pytest.mark.parametrize(
    ("grader", "text", "expected"),
    [
        (EXACT, "8", 1.0),
        (EXACT, "8 ", 0.0),
        (EXACT | {"operation": "ne"}, "9", 1.0),
        (EXACT | {"operation": "like"}, "it is 8.", 1.0),
        (EXACT | {"operation": "like", "reference": "Eight"}, "it is eight", 0.0),
        (EXACT | {"operation": "ilike", "reference": "Eight"}, "it is eight", 1.0),
        (EXACT | {"input": "<{{sample.output_text}}>", "reference": "<8>"}, "8", 1.0),
        ({"type": "text_similarity", "reference": "abcd"}, "abxd", 0.75),
        ({"type": "math_verify", "reference": "$8$"}, "The answer is $\\frac{16}{2}$", 1.0),
        ({"type": "math_verify", "reference": "$8$"}, "$9$", 0.0),
        ({"type": "math_verify", "reference": "$8$"}, "", 0.0),
        (
            {
                "type": "multi",
                "graders": {"exact": EXACT, "close": {"type": "text_similarity", "reference": "8x"}},
                "calculate_output": "0.75*exact + 0.25*close",
            },
            "8",
            0.75 + 0.25 * 2 / 3,
        ),
    ],
)
def test_graders(grader: JSON, text: str, expected: float) -> None:
    assert reward(grader, text) == pytest.approx(expected)


def test_templates_reach_into_items_and_are_filled_in_once() -> None:
    reference = "{{ item.solutions[1].text }} {{ item.solutions[0] }}"
    solutions = [{"n": 1}, {"text": "{{ item.answer }}"}]
    assert reward(EXACT | {"reference": reference}, '{{ item.answer }} {"n": 1}', solutions=solutions) == 1.0


@pytest.mark.parametrize(
    ("grader", "message"),
    [
        (EXACT | {"reference": "{{ item.missing }}"}, "line 1: there is no item.missing"),
        (EXACT | {"reference": "{{ item.answer.x }}"}, "line 1: there is no item.answer.x"),
        (EXACT | {"reference": "{{ item.answer "}, "only"),
        (EXACT | {"reference": "{{ item.answer | upper }}"}, "only"),
        (EXACT | {"reference": "{{ sample.output_tools }}"}, "no sample.output_tools"),
        (EXACT | {"reference": "{{ cycler.__init__ }}"}, "only"),
        (EXACT | {"operation": "matches"}, "operation"),
        ({"type": "python"}, "source"),
        ({"type": "multi", "graders": {"exact": EXACT}, "calculate_output": "exact + other"}, "calculate_output"),
    ],
)
def test_a_wrong_grader_is_refused_with_its_field(grader: JSON, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        dataset(grader)
    assert str(caught.value.param).startswith("environment.params.grader")


def outcomes(grader: JSON, *texts: str) -> list[Outcome]:
    environment = dataset(grader)
    state = environment.reset(0, "train").state
    return [environment.step(state, say(text), 0) for text in texts]


def test_an_answer_on_which_the_grader_fails_is_a_bad_answer() -> None:
    grader = {"type": "multi", "graders": {"n": NUMBER}, "calculate_output": "1 / n", "invalid_grade": -1}
    good, bad = outcomes(grader, "4", "0")
    assert (good.reward, good.flags) == (0.25, ())
    assert (bad.reward, bad.passed, bad.flags) == (-1.0, False, ("grader_error",))


def test_an_answer_of_another_form_is_a_bad_answer() -> None:
    grader = EXACT | {"input": "{{ sample.output_json.answer }}", "reference": "8"}
    assert [(o.reward, o.flags) for o in outcomes(grader, '{"answer": 8}', "8", '{"result": 8}')] == [
        (1.0, ()),
        (0.0, ("unscorable",)),
        (0.0, ("unscorable",)),
    ]


def test_a_grader_that_fails_on_all_of_the_first_answers_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_env, "MAX_FAILURES", 3)
    assert [o.flags for o in outcomes(NUMBER, "a", "b", "1", *"cdefg")].count(("grader_error",)) == 7
    with pytest.raises(EnvironmentFault, match="failed on each of the first 3 answers: ValueError: could not convert"):
        outcomes(NUMBER, "a", "b", "c", "1")


def test_an_unreadable_reference_is_a_fault() -> None:
    with pytest.raises(EnvironmentFault, match="cannot read the reference"):
        reward({"type": "math_verify", "reference": "no mathematics"}, "8")


def test_every_training_item_comes_once_an_epoch_in_an_order_of_its_own() -> None:
    environment = dataset(EXACT)
    size = len(environment._items["train"])
    epochs = [[environment.reset(e * size + i, "train").state["position"] for i in range(size)] for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(size))
    assert epochs[0] != epochs[1]


def test_held_out_items_are_not_trained_on() -> None:
    environment = dataset(EXACT)
    train, held = environment._items["train"], environment._items["eval"]
    assert len(train) + len(held) == 40
    assert train
    assert held
    given = dataset(EXACT, eval_items=[item(3)])
    assert given._items["eval"] == [item(3)]
    assert item(3) not in given._items["train"]


def test_a_split_without_items_says_so() -> None:
    with pytest.raises(InvalidRequest, match="no items are left for the train split"):
        dataset(EXACT, [item(3)], eval_items=[item(3)]).reset(0, "train")


def test_a_broken_item_is_named_by_its_line() -> None:
    with pytest.raises(InvalidRequest, match="line 2: messages must be"):
        dataset(EXACT, [item(1), {"answer": "2"}])
