"""Scores, all in percent, computed on this machine: nothing is downloaded."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from fat5.tasks.extras import require

Scores = dict[str, float]

_ARTICLES = re.compile(r"\b(the|an?|le|la|les|un|une|des|du|de|aux?)\b|\b[ldLD]['’]")
_WORD = re.compile(r"\w+")


def classification_scores(expected: Sequence[str], predicted: Sequence[str]) -> Scores:
    """Return accuracy, macro F1 and the F1 of each class.

    The macro F1 is the mean over the classes that occur among the expected labels; a class that is only predicted costs
    precision where it was predicted in another's place.
    """
    metrics: Any = require("sklearn.metrics", "tasks", "classification")
    classes = sorted(set(expected))
    f1 = metrics.f1_score(expected, predicted, labels=classes, average=None, zero_division=0.0)
    right = sum(a == b for a, b in zip(expected, predicted, strict=True))
    scores = {"accuracy": 100.0 * right / len(expected), "macro_f1": 100.0 * float(f1.mean())}
    return scores | {f"f1/{name}": 100.0 * float(value) for name, value in zip(classes, f1, strict=True)}


def entity_scores(expected: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> Scores:
    """Return micro F1 with precision and recall, macro F1 and F1 of each class, over whole entities.

    An entity counts as found where its class and its first and last word are right. Tags are BIO; tags without a prefix
    (`PER`, `O`) are taken as pieces of one entity where equal ones follow each other.
    """
    sequence: Any = require("seqeval.metrics.sequence_labeling", "tasks", "token-classification")
    both = [[_prefixed(tags) for tags in side] for side in (expected, predicted)]
    found = [
        {(row, *entity) for row, tags in enumerate(side) for entity in sequence.get_entities(tags)} for side in both
    ]
    truth, guess = found
    scores = dict(zip(("precision", "recall", "f1"), _prf(truth, guess), strict=True))
    classes = sorted({entity[1] for entity in truth})
    per_class = {
        name: _prf({e for e in truth if e[1] == name}, {e for e in guess if e[1] == name})[2] for name in classes
    }
    scores["macro_f1"] = sum(per_class.values()) / len(classes) if classes else 0.0
    return scores | {f"f1/{name}": value for name, value in per_class.items()}


def _prefixed(tags: Sequence[str]) -> list[str]:
    if any(tag != "O" and tag[1:2] == "-" for tag in tags):
        return list(tags)
    return [tag if tag == "O" else f"I-{tag}" for tag in tags]


def _prf(truth: set[Any], guess: set[Any]) -> tuple[float, float, float]:
    right = len(truth & guess)
    precision = 100.0 * right / len(guess) if guess else 0.0
    recall = 100.0 * right / len(truth) if truth else 0.0
    return precision, recall, 2 * precision * recall / (precision + recall) if right else 0.0


def normalize_answer(text: str) -> str:
    """Return an answer as it is compared: lower case, no articles, no punctuation, single spaces.

    SQuAD's normalisation with the articles of French beside those of English: le, la, les, l', un, une, des, du, de,
    d', au, aux; the, a, an. Accents stay. Unicode is brought to one form first (NFC).
    """
    lowered = unicodedata.normalize("NFC", text).lower()
    bare = _ARTICLES.sub(" ", lowered)
    kept = "".join(" " if unicodedata.category(letter)[0] in "PS" else letter for letter in bare)
    return " ".join(kept.split())


def answer_scores(expected: Sequence[Sequence[str]], predicted: Sequence[str]) -> Scores:
    """Return SQuAD's exact match and token F1, for each row the best over its right answers.

    A row without a right answer asks for an empty one (SQuAD 2).
    """
    pairs = [(answers or [""], guess) for answers, guess in zip(expected, predicted, strict=True)]
    exact = [max(normalize_answer(answer) == normalize_answer(guess) for answer in answers) for answers, guess in pairs]
    f1 = [max(_token_f1(answer, guess) for answer in answers) for answers, guess in pairs]
    return {"exact_match": 100.0 * sum(exact) / len(pairs), "f1": 100.0 * sum(f1) / len(pairs)}


def _token_f1(answer: str, guess: str) -> float:
    truth, found = normalize_answer(answer).split(), normalize_answer(guess).split()
    if not truth or not found:
        return float(truth == found)
    shared = sum((Counter(truth) & Counter(found)).values())
    return 2.0 * shared / (len(truth) + len(found))


def similarity_scores(expected: Sequence[float], predicted: Sequence[float]) -> Scores:
    """Return Spearman's rank correlation, and the average precision where the expected scores are 0 and 1 alone."""
    stats: Any = require("scipy.stats", "tasks", "similarity")
    metrics: Any = require("sklearn.metrics", "tasks", "similarity")
    constant = len(set(expected)) < 2 or len(set(predicted)) < 2
    scores = {"spearman": 0.0 if constant else 100.0 * float(stats.spearmanr(expected, predicted).statistic)}
    if set(expected) == {0.0, 1.0}:
        scores["average_precision"] = 100.0 * float(metrics.average_precision_score(expected, predicted))
    return scores


class _FrenchWords:
    """Words for ROUGE: lower case, accented letters kept; rouge-score's own would cut words at each accent."""

    def tokenize(self, text: str) -> list[str]:
        return _WORD.findall(unicodedata.normalize("NFC", text).lower())


def rouge_scores(expected: Sequence[str], predicted: Sequence[str]) -> Scores:
    """Return the mean F1 of ROUGE-1, ROUGE-2 and ROUGE-L over lower-cased words, without stemming."""
    rouge: Any = require("rouge_score.rouge_scorer", "tasks", "summarization")
    names = {"rouge1": "rouge1", "rouge2": "rouge2", "rougeL": "rouge_l"}
    scorer = rouge.RougeScorer(list(names), tokenizer=_FrenchWords())
    rows = [scorer.score(truth, guess) for truth, guess in zip(expected, predicted, strict=True)]
    return {own: 100.0 * sum(row[name].fmeasure for row in rows) / len(rows) for name, own in names.items()}


def translation_scores(expected: Sequence[str], predicted: Sequence[str]) -> Scores:
    """Return corpus chrF and BLEU (sacrebleu's own tokenisation 13a), both from 0 to 100."""
    sacrebleu: Any = require("sacrebleu", "tasks", "seq2seq")
    scorers: dict[str, Callable[..., Any]] = {"chrf": sacrebleu.corpus_chrf, "bleu": sacrebleu.corpus_bleu}
    return {name: float(scorer(list(predicted), [list(expected)]).score) for name, scorer in scorers.items()}
