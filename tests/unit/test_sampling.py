"""The sampler: right distribution, right logprobs, rows that do not depend on each other."""

import math

import pytest
import torch

from workers.rollout.engine import SamplingParams
from workers.rollout.sampling import BLOCK, RowParams, Sampled, nucleus, random_stream, sample

VOCAB = 3 * BLOCK + 17  # neither one block nor a multiple


def logits_of(rows: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


def draw(logits: torch.Tensor, uniforms: list[float], *params: SamplingParams) -> Sampled:
    return sample(logits.clone(), torch.tensor(uniforms), RowParams.of(params))


def test_token_is_the_first_whose_cumulative_probability_exceeds_the_uniform_number() -> None:
    logits = logits_of(64)
    uniforms = random_stream(1, 64)
    tokens = draw(logits, uniforms, *[SamplingParams(1)] * 64).tokens
    cdf = logits.double().softmax(-1).cumsum(-1)
    for row, (token, u) in enumerate(zip(tokens.tolist(), uniforms, strict=True)):
        assert (cdf[row, token - 1] if token else 0) - 1e-6 <= u <= cdf[row, token] + 1e-6


def test_frequencies_follow_the_softmax() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).expand(20_000, -1)
    tokens = draw(logits, random_stream(3, 20_000), *[SamplingParams(1, temperature=0.7)] * 20_000).tokens
    got = torch.bincount(tokens, minlength=4) / 20_000
    torch.testing.assert_close(got, (logits[0] / 0.7).softmax(-1), atol=0.015, rtol=0)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-24])
def test_extreme_uniform_numbers_never_choose_an_impossible_token(uniform: float) -> None:
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, [5, BLOCK + 1, 2 * BLOCK + 3]] = 0.0
    assert draw(logits, [uniform], SamplingParams(1)).tokens.item() in (5, 2 * BLOCK + 3)


def test_logprobs_are_of_the_distribution_after_temperature() -> None:
    logits = logits_of(8)
    got = draw(logits, random_stream(2, 8), *[SamplingParams(1, temperature=0.7)] * 8)
    expected = (logits.double() / 0.7).log_softmax(-1).gather(1, got.tokens[:, None])[:, 0]
    torch.testing.assert_close(got.logprobs.double(), expected, atol=1e-5, rtol=0)


def test_temperature_zero_is_greedy_with_logprobs_at_temperature_one() -> None:
    logits = logits_of(2)
    got = draw(logits, [0.9, 0.9], SamplingParams(1, temperature=0, top_p=0.5), SamplingParams(1))
    assert got.tokens[0] == logits[0].argmax()
    assert math.isclose(got.logprobs[0], logits[0].log_softmax(-1).max(), abs_tol=1e-5)


def test_nucleus_keeps_the_fewest_tokens_that_hold_the_mass() -> None:
    probs = torch.tensor([[0.1, 0.4, 0.2, 0.3]])
    torch.testing.assert_close(nucleus(probs, torch.tensor([[0.6]])), torch.tensor([[0, 4 / 7, 0, 3 / 7]]))


def test_top_p_changes_only_the_rows_that_ask() -> None:
    logits, uniforms = logits_of(2), [0.97, 0.97]
    plain = draw(logits, uniforms, SamplingParams(1), SamplingParams(1))
    mixed = draw(logits, uniforms, SamplingParams(1, top_p=0.1), SamplingParams(1))
    assert mixed.tokens[0] != plain.tokens[0]
    assert mixed.tokens[1] == plain.tokens[1] and mixed.logprobs[1] == plain.logprobs[1]


def test_top_p_logprobs_are_of_the_kept_tokens() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    got = draw(logits, [0.99], SamplingParams(1, top_p=0.6))
    assert got.tokens.item() == 3
    assert math.isclose(got.logprobs.item(), math.log(3 / 7), abs_tol=1e-5)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """Bit for bit, whatever the number of rows and what they ask."""
    logits, uniforms = logits_of(9), random_stream(5, 9)
    asks = [SamplingParams(1, temperature=(0.0, 0.7, 1.0)[i % 3], top_p=(1.0, 0.9)[i % 2]) for i in range(9)]
    together = draw(logits, uniforms, *asks)
    for i in range(9):
        alone = draw(logits[i : i + 1], uniforms[i : i + 1], asks[i])
        assert alone.tokens[0] == together.tokens[i] and alone.logprobs[0] == together.logprobs[i]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_rows_that_are_not_finite_are_told_apart(value: float) -> None:
    logits = logits_of(3)
    logits[1, 7] = value
    assert draw(logits, [0.5] * 3, *[SamplingParams(1)] * 3).finite.tolist() == [True, False, True]


def test_same_seed_same_stream_and_longer_streams_begin_alike() -> None:
    assert random_stream(7, 5) == random_stream(7, 9)[:5]
    assert random_stream(7, 5) != random_stream(7 + 2**32, 5)
