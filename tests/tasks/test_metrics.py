"""The scores against values worked out by hand, and their traps in French."""

from __future__ import annotations

import pytest

from fat5.errors import ConfigError
from fat5.tasks import metrics
from fat5.tasks.extras import require
from fat5.tasks.results import summarize, table


def test_classification():
    scores = metrics.classification_scores(["a", "a", "b", "c"], ["a", "b", "b", "b"])
    assert scores["accuracy"] == 50.0
    assert scores["f1/a"] == pytest.approx(200 / 3)  # precision 1, recall 1/2
    assert scores["f1/b"] == pytest.approx(50.0)  # precision 1/3, recall 1
    assert scores["macro_f1"] == pytest.approx((200 / 3 + 50 + 0) / 3)


def test_a_class_that_training_has_not_counts_as_wrong():
    scores = metrics.classification_scores(["a", "new"], ["a", "a"])
    assert scores["accuracy"] == 50.0
    assert scores["f1/new"] == 0.0


def test_entities_count_whole():
    expected = [["B-PER", "I-PER", "O", "B-LOC"], ["O", "B-PER"]]
    predicted = [["B-PER", "O", "O", "B-LOC"], ["O", "B-PER"]]
    scores = metrics.entity_scores(expected, predicted)
    assert scores["precision"] == scores["recall"] == scores["f1"] == pytest.approx(200 / 3)
    assert (scores["f1/PER"], scores["f1/LOC"]) == (50.0, 100.0)
    assert scores["macro_f1"] == 75.0
    nothing = metrics.entity_scores(expected, [["O"] * 4, ["O"] * 2])
    assert nothing["f1"] == nothing["macro_f1"] == 0.0


def test_entities_without_prefixes_are_runs_of_one_class():
    scores = metrics.entity_scores([["PER", "PER", "O", "LOC"]], [["PER", "PER", "O", "PER"]])
    assert scores["f1"] == 50.0
    # An entity that begins with I-, as a model may predict, is one all the same.
    assert metrics.entity_scores([["O", "B-LOC"]], [["O", "I-LOC"]])["f1"] == 100.0


@pytest.mark.parametrize(
    ("answer", "other"),
    [
        ("l'école", "École"),
        ("Le chat, noir", "chat noir"),
        ("l’État", "état"),
        ("the European Union.", "European union"),
        ("« Les Misérables »", "Misérables"),
        ("cafe\u0301 du coin", "café coin"),
    ],
)
def test_answers_that_are_equal(answer, other):
    assert metrics.normalize_answer(answer) == metrics.normalize_answer(other) != ""


def test_answers_that_are_not_equal():
    assert metrics.normalize_answer("pêche") != metrics.normalize_answer("péché")
    assert metrics.normalize_answer("laine") == "laine"
    assert metrics.normalize_answer("aujourd'hui") == "aujourd hui"


def test_answer_scores_take_the_best_of_several_right_answers():
    scores = metrics.answer_scores([["en 1870", "1870"], ["le roi de France"]], ["1870", "roi"])
    assert scores["exact_match"] == 50.0
    assert scores["f1"] == pytest.approx((1.0 + 2 / 3) / 2 * 100)  # roi, of roi and france
    assert metrics.answer_scores([[], []], ["", "x"]) == {"exact_match": 50.0, "f1": 50.0}


def test_similarity():
    assert metrics.similarity_scores([0, 1, 0, 1], [0.1, 0.9, 0.2, 0.8]) == pytest.approx(
        {"spearman": 89.4427, "average_precision": 100.0}, rel=1e-4
    )
    graded = metrics.similarity_scores([0.0, 2.5, 5.0], [0.3, 0.2, 0.1])
    assert graded == pytest.approx({"spearman": -100.0})
    assert metrics.similarity_scores([0, 1, 2], [0.5, 0.5, 0.5]) == {"spearman": 0.0}


def test_rouge_keeps_accented_words_whole():
    pytest.importorskip("rouge_score")
    # With words cut at accents, "élève" and "relève" would share "l" and "ve".
    assert metrics.rouge_scores(["élève"], ["relève"])["rouge1"] == 0.0
    scores = metrics.rouge_scores(["le chat est là", "un"], ["le chat est ici", "un"])
    assert scores["rouge1"] == pytest.approx((75 + 100) / 2)
    assert scores["rouge2"] == pytest.approx((200 / 3 + 0) / 2)
    assert scores["rouge_l"] == pytest.approx((75 + 100) / 2)
    assert metrics.rouge_scores(["un texte"], [""])["rouge1"] == 0.0


def test_translation():
    pytest.importorskip("sacrebleu")
    same = metrics.translation_scores(["Ouvrez la fenêtre du fond."], ["Ouvrez la fenêtre du fond."])
    assert same == pytest.approx({"chrf": 100.0, "bleu": 100.0})
    other = metrics.translation_scores(["Ouvrez la fenêtre du fond."], ["Fermez la porte du fond."])
    assert 0 < other["bleu"] < other["chrf"] < 100


def test_a_missing_package_is_asked_for_by_its_extra():
    with pytest.raises(ConfigError, match=r"LoRA needs the package no_such_peft.*pip install 'fat5\[lora\]'"):
        require("no_such_peft.tuners", "lora", "LoRA")


def test_mean_and_spread_over_runs():
    summary = summarize([{"f1": 60.0, "f1/x": 1.0}, {"f1": 70.0}])
    assert summary["f1"] == {"mean": 65.0, "spread": pytest.approx(50**0.5), "values": [60.0, 70.0]}
    assert summary["f1/x"] == {"mean": 1.0, "spread": None, "values": [1.0]}
    lines = table({"ours": summary, "simple": {"f1": 10.0, "em": 3.0}}, "f1").splitlines()
    assert lines[0] == "| score (%) | ours | simple |"
    assert lines[2] == "| **f1** | 65.00 ± 7.07 | 10.00 |"
    assert lines[3] == "| em | - | 3.00 |"
