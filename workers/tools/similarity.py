"""How near two texts are, from 0 to 1, by the metrics of OpenAI's text_similarity grader.

Tokens are Unicode words; for BLEU and GLEU, which look at fluency, also single punctuation marks.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence

from rapidfuzz import fuzz
from rapidfuzz.distance import LCSseq

Tokens = Sequence[str]

ORDER = 4  # longest n-grams of BLEU and GLEU

_WORD = re.compile(r"\w+")
_WORD_OR_MARK = re.compile(r"\w+|[^\w\s]")


def fuzzy_match(text: str, reference: str) -> float:
    """Twice the longest common subsequence of characters over both lengths (rapidfuzz's ratio)."""
    return fuzz.ratio(text, reference) / 100


def bleu(text: str, reference: str) -> float:
    """Sentence BLEU up to 4-grams with its brevity penalty (Papineni et al., 2002); precisions above unigrams are
    smoothed by adding one (Lin and Och, 2004)."""
    said, wanted = _WORD_OR_MARK.findall(text), _WORD_OR_MARK.findall(reference)
    if not said or not wanted:
        return float(said == wanted)
    logs = 0.0
    for n in range(1, ORDER + 1):
        same, in_text, _ = _common(said, wanted, n)
        smoothing = int(n > 1)
        if same + smoothing == 0:
            return 0.0
        logs += math.log((same + smoothing) / (in_text + smoothing)) / ORDER
    return math.exp(min(0.0, 1 - len(wanted) / len(said)) + logs)


def gleu(text: str, reference: str) -> float:
    """The lesser of precision and recall over all n-grams up to 4 (Wu et al., 2016, arXiv 1609.08144)."""
    said, wanted = _WORD_OR_MARK.findall(text), _WORD_OR_MARK.findall(reference)
    if not said or not wanted:
        return float(said == wanted)
    counts = [_common(said, wanted, n) for n in range(1, ORDER + 1)]
    same, in_text, in_reference = map(sum, zip(*counts, strict=True))
    return same / max(in_text, in_reference)


def rouge_n(text: str, reference: str, n: int) -> float:
    """F1 of n-grams of words, whatever their case (Lin, 2004). 0 where a text is too short to have any."""
    return _f1(*_common(_words(text), _words(reference), n))


def rouge_l(text: str, reference: str) -> float:
    """F1 of the longest common subsequence of words, whatever their case (Lin, 2004)."""
    said, wanted = _words(text), _words(reference)
    return _f1(LCSseq.similarity(said, wanted), len(said), len(wanted))


METRICS: dict[str, Callable[[str, str], float]] = {
    "fuzzy_match": fuzzy_match,
    "bleu": bleu,
    "gleu": gleu,
    **{f"rouge_{n}": lambda text, reference, n=n: rouge_n(text, reference, n) for n in range(1, 6)},  # type: ignore[misc]
    "rouge_l": rouge_l,
}


def _words(text: str) -> Tokens:
    return _WORD.findall(text.casefold())


def _common(said: Tokens, wanted: Tokens, n: int) -> tuple[int, int, int]:
    """(n-grams in both, in `said`, in `wanted`), each counted as often as it occurs."""
    first, second = _ngrams(said, n), _ngrams(wanted, n)
    return (first & second).total(), first.total(), second.total()


def _ngrams(tokens: Tokens, n: int) -> Counter[tuple[str, ...]]:
    return Counter(zip(*(tokens[i:] for i in range(n)), strict=False))


def _f1(same: int, in_text: int, in_reference: int) -> float:
    return 2 * same / (in_text + in_reference) if same else 0.0
