"""What each task does with its own difficulties: long inputs, windows, spans, ids that are none, unseen classes."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from fat5.errors import ConfigError, DataError
from fat5.models import FAT5ForQuestionAnswering, FAT5ForTokenClassification
from fat5.tasks.classification import Classification, ClassificationOptions
from fat5.tasks.encoding import check_length
from fat5.tasks.generation import GenerationOptions, decode_ids, generate
from fat5.tasks.question_answering import Answers, QuestionAnswering, QuestionAnsweringOptions
from fat5.tasks.seq2seq import Seq2Seq
from fat5.tasks.similarity import Similarity, SimilarityOptions
from fat5.tasks.summarization import Summarization, SummarizationOptions
from fat5.tasks.task import IGNORE_INDEX, Inference, pad_features
from fat5.tasks.token_classification import TokenClassification, TokenClassificationOptions
from tests.data.small_tokenizer import small_tokenizer

CPU = Inference(4, torch.device("cpu"), progress=False)


class Fixed(torch.nn.Module):
    """A model that gives logits worked out from the ids."""

    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def forward(self, input_ids=None, attention_mask=None):
        return self.logits(input_ids)


def test_minus_100_in_predictions_decodes_as_padding():
    """Pitfall: -100 in predictions breaks decoding."""
    tokenizer = small_tokenizer()
    ids = tokenizer("Le chat", add_special_tokens=False)["input_ids"]
    table = [[IGNORE_INDEX, *ids, tokenizer.eos_token_id, IGNORE_INDEX], [*ids, len(tokenizer) + 5, *[-1] * 2]]
    assert decode_ids(table, tokenizer) == ["Le chat", "Le chat"]
    assert decode_ids(torch.full((1, 3), IGNORE_INDEX), tokenizer) == [""]


def test_padded_labels_are_ignored_and_padded_inputs_masked():
    tokenizer = small_tokenizer()
    features = [
        {"input_ids": [5, 6], "attention_mask": [1, 1], "labels": [7]},
        {"input_ids": [5], "attention_mask": [1], "labels": [7, 8]},
    ]
    batch = pad_features(features, tokenizer)
    assert batch["input_ids"].tolist() == [[5, 6], [5, tokenizer.pad_token_id]]
    assert batch["attention_mask"].tolist() == [[1, 1], [1, 0]]
    assert batch["labels"].tolist() == [[7, IGNORE_INDEX], [7, 8]]


def test_texts_that_are_too_long_are_cut_with_a_warning(caplog):
    task = Classification(ClassificationOptions(max_length=8, prefix="texte : "))
    task.learn_labels([{"label": "a"}, {"label": "b"}])
    rows = [{"text": "Il " * 50, "label": "b", "text_pair": None}, {"text": "Il", "label": "a", "text_pair": None}]
    tokenizer = small_tokenizer()
    with caplog.at_level(logging.WARNING):
        long, short = task.encode(rows, tokenizer)
    assert "1 of 2 texts are longer than options.max_length=8 tokens and were cut" in caplog.text
    assert len(long["input_ids"]) == 8
    assert long["input_ids"][-1] == tokenizer.eos_token_id
    assert tokenizer.decode(short["input_ids"]).startswith("texte : Il")
    assert (long["labels"], short["labels"]) == (1, 0)


def test_a_model_with_a_table_of_positions_refuses_longer_inputs():
    bert = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=512, model_type="bert", pad_token_id=0))
    check_length(bert, 512, "options.max_length")
    camembert = SimpleNamespace(
        config=SimpleNamespace(max_position_embeddings=514, model_type="camembert", pad_token_id=1)
    )
    check_length(camembert, 512, "options.max_length")
    with pytest.raises(ConfigError, match=r"options\.max_length is 513, but the model has positions for 512 tokens"):
        check_length(camembert, 513, "options.max_length")
    check_length(SimpleNamespace(config=SimpleNamespace(model_type="fat5")), 10**6, "options.max_length")


def test_classes_that_training_has_not():
    task = Classification(ClassificationOptions())
    task.learn_labels([{"label": "b"}, {"label": "a"}, {"label": "b"}])
    assert task.labels == ["a", "b"]
    assert task.unseen_labels([{"label": "a"}, {"label": "z"}]) == ["z"]
    with pytest.raises(DataError, match="all training rows have the label 'a'"):
        task.learn_labels([{"label": "a"}])


def test_tags_stand_at_the_first_token_of_each_word():
    tokenizer = small_tokenizer()
    task = TokenClassification(TokenClassificationOptions(max_length=64, stride=8))
    rows = [{"tokens": ["Aujourd'hui", "l'", "été", "\ufffd", "👩‍👧", "vient"], "tags": ["A", "B", "C", "D", "E", "F"]}]
    task.learn_labels(rows)
    (feature,) = task.encode(rows, tokenizer)
    kept = [label for label in feature["labels"] if label != IGNORE_INDEX]
    assert kept == [0, 1, 2, 3, 4, 5]
    words = tokenizer.convert_ids_to_tokens(feature["input_ids"])
    first = {label: word for word, label in zip(words, feature["labels"], strict=True) if label != IGNORE_INDEX}
    assert first[5].startswith("Ġv")  # with the space that it had in pretraining


def test_a_sentence_longer_than_a_window_gets_a_tag_for_every_word():
    tokenizer = small_tokenizer()
    task = TokenClassification(TokenClassificationOptions(max_length=16, stride=4))
    words = [f"mot{index}" for index in range(40)]
    rows = [{"tokens": words, "tags": ["X" if index % 2 else "O" for index in range(40)]}]
    task.learn_labels(rows)
    features = task.encode(rows, tokenizer)
    assert len(features) > 3
    assert max(len(feature["input_ids"]) for feature in features) == 16
    # A model that reads the right answer off the ids.
    known = {}
    for feature in features:
        for place, label in enumerate(feature["labels"]):
            if label != IGNORE_INDEX:
                known[tuple(feature["input_ids"]), place] = label

    def answer(ids):
        logits = torch.zeros(*ids.shape, 2)
        for row, tokens in enumerate(ids.tolist()):
            real = tuple(token for token in tokens if token != tokenizer.pad_token_id)
            for place in range(len(real)):
                logits[row, place, known.get((real, place), 0)] = 1.0
        return SimpleNamespace(logits=logits)

    assert task.predict(Fixed(answer), tokenizer, rows, CPU) == [rows[0]["tags"]]


def test_words_and_tags_of_different_numbers():
    task = TokenClassification(TokenClassificationOptions())
    with pytest.raises(DataError, match="row 0 has 2 words and 1 tags"):
        task.learn_labels([{"tokens": ["a", "b"], "tags": ["O"]}])
    with pytest.raises(ConfigError, match=r"options\.stride is 40, expected 0 to 32"):
        TokenClassificationOptions(max_length=64, stride=40)


def question(context, answer, start=None):
    answers = Answers([answer], [context.index(answer) if start is None else start]) if answer else Answers([], [])
    return {"question": "Qui vient ?", "context": context, "answers": answers}


def test_an_answer_in_a_long_context_is_found_in_the_window_that_holds_it():
    tokenizer = small_tokenizer()
    task = QuestionAnswering(QuestionAnsweringOptions(max_length=48, stride=12))
    rows = [question("Il pleut dans la forêt. " * 12 + "La reine vient. " + "Il neige. " * 20, "La reine")]
    features = task.encode(rows, tokenizer)
    assert len(features) > 4
    held = [feature for feature in features if feature["start_positions"] > 0]
    assert 1 <= len(held) < len(features)
    for feature in held:
        span = feature["input_ids"][feature["start_positions"] : feature["end_positions"] + 1]
        assert tokenizer.decode(span).strip() == "La reine"
    known = {tuple(f["input_ids"]): (f["start_positions"], f["end_positions"]) for f in features}

    def answer(ids):
        start, end = torch.zeros(2, *ids.shape)
        for row, tokens in enumerate(ids.tolist()):
            real = tuple(token for token in tokens if token != tokenizer.pad_token_id)
            start[row, known[real][0]] = end[row, known[real][1]] = 5.0
        return SimpleNamespace(start_logits=start, end_logits=end)

    assert task.predict(Fixed(answer), tokenizer, rows, CPU) == ["La reine"]
    assert task.score(rows, ["La reine"])["exact_match"] == 100.0


def test_no_answer_is_given_only_where_there_may_be_none():
    tokenizer = small_tokenizer()
    task = QuestionAnswering(QuestionAnsweringOptions(max_length=48, stride=12))

    def refuse(ids):
        logits = torch.zeros(*ids.shape)
        logits[:, 0] = 3.0
        return SimpleNamespace(start_logits=logits, end_logits=logits)

    answered, open_question = question("La reine vient.", "La reine"), question("Il pleut.", None)
    assert task.predict(Fixed(refuse), tokenizer, [answered, open_question], CPU) == ["", ""]
    (alone,) = task.predict(Fixed(refuse), tokenizer, [answered], CPU)
    assert alone
    assert task.encode([open_question], tokenizer)[0]["start_positions"] == 0


def test_an_answer_start_that_points_elsewhere_is_an_error():
    task = QuestionAnswering(QuestionAnsweringOptions())
    rows = [question("Le roi et la reine", "la reine", start=3)]
    with pytest.raises(DataError, match=r"row 0: answer_start 3 points at 'roi et l', expected the answer 'la reine'"):
        task.encode(rows, small_tokenizer())
    assert QuestionAnswering._answers({"text": [""], "answer_start": [-1]}) == Answers([], [])
    with pytest.raises(ValueError, match="as in SQuAD, got 'la reine'"):
        QuestionAnswering._answers("la reine")


def test_a_question_that_would_fill_the_window_is_cut(caplog):
    task = QuestionAnswering(QuestionAnsweringOptions(max_length=32, stride=8))
    row = question("La reine vient. " * 5, "La reine") | {"question": "Qui donc " * 40}
    with caplog.at_level(logging.WARNING):
        features = task.encode([row], small_tokenizer())
    assert "1 of 1 questions are longer than a quarter of options.max_length=8 tokens" in caplog.text
    assert features[0]["start_positions"] > 0


@pytest.mark.parametrize("cls", [FAT5ForQuestionAnswering, FAT5ForTokenClassification])
def test_predictions_do_not_depend_on_the_batch(cls, checkpoint):
    """Pitfall: a row's output must not depend on its padding."""
    tokenizer = small_tokenizer()
    model = cls.from_pretrained(checkpoint).eval()
    if cls is FAT5ForQuestionAnswering:
        task = QuestionAnswering(QuestionAnsweringOptions(max_length=48, stride=12))
        rows = [question("La reine vient. " * count, "La reine") for count in (1, 3, 9)]
    else:
        task = TokenClassification(TokenClassificationOptions(max_length=48, stride=12))
        task.labels = ["A", "O"]
        rows = [{"tokens": ["mot", "autre"] * count, "tags": ["O", "A"] * count} for count in (1, 5, 20)]
    together = task.predict(model, tokenizer, rows, CPU)
    alone = [task.predict(model, tokenizer, [row], CPU)[0] for row in rows]
    assert together == alone


def test_cosent_asks_for_the_right_order():
    task = Similarity(SimilarityOptions(scale=2.0))
    angles = torch.tensor([0.0, 0.0, 0.1, 1.5])  # first sentences at 0; second at 0.1 (alike) and 1.5

    def loss(labels):
        vectors = torch.stack([angles.cos(), angles.sin()], -1)
        model = Fixed(lambda ids: SimpleNamespace(embeddings=vectors))
        batch = {"input_ids": torch.zeros(4, 1), "attention_mask": torch.ones(4, 1), "labels": torch.tensor(labels)}
        return float(task.loss(model, batch))

    right, wrong = loss([1.0, 0.0]), loss([0.0, 1.0])
    gap = 2 * (torch.cos(torch.tensor(0.1)) - torch.cos(torch.tensor(1.5)))
    assert right == pytest.approx(float(torch.log1p(torch.exp(-gap))), rel=1e-4)
    assert wrong == pytest.approx(float(torch.log1p(torch.exp(gap))), rel=1e-4)
    assert loss([1.0, 1.0]) == 0.0


def test_generation_passes_mask_and_lengths_through_one_function():
    tokenizer = small_tokenizer()
    seen = {}

    class Recorder:
        generation_config = SimpleNamespace(
            decoder_start_token_id=0, forced_bos_token_id=None, eos_token_id=1, bos_token_id=None
        )

        def generate(self, **kwargs):
            seen.update(kwargs)
            return torch.tensor([[0, 5, 1]])

    batch = {"input_ids": torch.ones(1, 3), "attention_mask": torch.ones(1, 3)}
    generate(Recorder(), batch, tokenizer, GenerationOptions(max_target_length=7, num_beams=3))
    settings = seen.pop("generation_config")
    assert seen.keys() == {"input_ids", "attention_mask"}
    assert (settings.max_new_tokens, settings.num_beams, settings.pad_token_id) == (7, 3, tokenizer.pad_token_id)


def test_baselines():
    train = [
        {"text": f"le {word}", "label": label, "text_pair": None} for word, label in (("chat", "a"), ("clou", "o"))
    ]
    train = train * 4 + train[:1]
    topic = Classification(ClassificationOptions()).baselines(train, train[1::-1])
    assert topic == {"majority": ["a", "a"], "tf-idf + logistic regression": ["o", "a"]}
    tagged = [{"tokens": ["Eve", "dort"], "tags": ["B", "O"]}] * 2 + [{"tokens": ["Eve"], "tags": ["O"]}]
    names = TokenClassification(TokenClassificationOptions()).baselines(tagged, [{"tokens": ["Eve", "neuf"]}])
    assert names == {"most frequent tag of the word": [["B", "O"]]}
    asked = question("Il pleut. La reine vient demain.\nFin.", None)
    assert list(QuestionAnswering(QuestionAnsweringOptions()).baselines([], [asked]).values()) == [
        ["La reine vient demain."]
    ]
    document = {"document": "Titre\nUn. Deux. Trois.", "summary": ""}
    assert Summarization(SummarizationOptions()).baselines([], [document]) == {
        "first sentence": ["Titre"],
        "first three sentences": ["Titre Un. Deux."],
    }
    assert Seq2Seq(GenerationOptions()).baselines([], [{"source": "x"}]) == {"copy of the source": ["x"]}
    pairs = [
        {"sentence1": "un chat noir", "sentence2": "un chat gris", "label": 1.0},
        {"sentence1": "un chat noir", "sentence2": "la pluie", "label": 0.0},
    ]
    ((same, different),) = Similarity(SimilarityOptions()).baselines(pairs, pairs).values()
    assert same > different == 0.0


def test_similarity_needs_labels_that_differ():
    Similarity(SimilarityOptions()).learn_labels([{"label": 1.0}, {"label": 0.0}])
    with pytest.raises(DataError, match="all training rows have the label 1; expected at least two grades"):
        Similarity(SimilarityOptions()).learn_labels([{"label": 1.0}, {"label": 1.0}])
