"""Baselines, filled masks, the loss curve and the progress text."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch

from fat5.data.tokenizer import load_tokenizer
from fat5.errors import DataError
from fat5.training.baselines import target_counts, unigram_loss
from fat5.training.fill import fill_masks
from fat5.training.plot import plot_loss, read_log_history
from fat5.training.progress import describe_log

TRAIN_LOG = {"step": 2, "loss": 3.0, "accuracy": 0.1, "grad_norm": 1.0, "learning_rate": 1e-3, "z_loss": 0.0}
TRAIN_LOG |= {"tokens_per_second": 1234.5, "tokens_seen": 100, "epoch": 0.5, "fill": 0.97}
EVAL_LOG = {"step": 2, "tokens_seen": 100, "eval_loss": 2.5, "eval_perplexity": 12.2, "eval_accuracy": 0.3}
EVAL_LOG |= {"eval_accuracy_text": 0.2, "eval_loss/R": 2.0, "eval_accuracy/R": 0.4, "eval_accuracy_text/R": 0.1}


def test_unigram_loss_is_the_cross_entropy_of_smoothed_frequencies():
    batches = [{"labels": torch.tensor([0, 0, 1, -100])}, {"labels": torch.tensor([[0, 2], [-100, 0]])}]
    train = target_counts(batches, vocab_size=4)
    assert train.tolist() == [4, 1, 1, 0]
    # Add-one over 6 targets and 4 ids: 5, 2, 2 and 1 in 10.
    expected = -(2 * math.log(0.5) + math.log(0.1)) / 3
    assert unigram_loss(train, torch.tensor([2, 0, 0, 1])) == pytest.approx(expected)


class Scripted:
    """A model whose generation is given."""

    device = torch.device("cpu")

    def __init__(self, tokenizer, output: str) -> None:
        self.output = torch.tensor([[0, *tokenizer(output)["input_ids"]]])

    def eval(self) -> None:
        pass

    def generate(self, **inputs) -> torch.Tensor:
        self.inputs = inputs["input_ids"][0]
        return self.output


def test_masks_are_filled_with_what_stands_behind_their_sentinel(toy):
    tokenizer = load_tokenizer(toy.tokenizer)
    model = Scripted(tokenizer, "<extra_id_0> est<extra_id_1> claire<extra_id_2> trop")
    assert fill_masks(model, tokenizer, "La loi <extra_id_0> très <extra_id_1>.") == "La loi est très claire."
    seen = tokenizer.convert_ids_to_tokens(model.inputs)
    assert (seen[0], seen[-1]) == ("[R]", "</s>")
    space = tokenizer.tokenize(" ")[0]
    before = [seen[i - 1] for i, token in enumerate(seen) if token.startswith("<extra_id_")]
    assert before
    assert space not in before, "a masked word takes the space before it along, as in training"
    assert fill_masks(model, tokenizer, "Le <extra_id_0> .", prefix="").startswith("Le est")


def test_a_mask_the_model_does_not_answer_stays_empty(toy):
    tokenizer = load_tokenizer(toy.tokenizer)
    assert fill_masks(Scripted(tokenizer, "rien"), tokenizer, "La loi <extra_id_0>.") == "La loi."


@pytest.mark.parametrize("text", ["sans masque", "<extra_id_1> seul", "<extra_id_0> et <extra_id_0>"])
def test_text_without_masks_in_order_is_refused(toy, text):
    with pytest.raises(DataError, match="expected the sentinels <extra_id_0>, <extra_id_1>"):
        fill_masks(SimpleNamespace(), load_tokenizer(toy.tokenizer), text)


def test_loss_curve_draws_the_log_as_a_png(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    drawn = []
    original = Axes.plot
    monkeypatch.setattr(
        Axes, "plot", lambda self, *args, **kw: (drawn.append(args[:2]), original(self, *args, **kw))[1]
    )
    path = plot_loss([TRAIN_LOG, EVAL_LOG, {"train_runtime": 3.0}], tmp_path / "loss.png", baselines={"unigram": 6.0})
    assert path.read_bytes().startswith(b"\x89PNG")
    assert drawn == [((100,), (3.0,)), ((100,), (2.5,))]
    with pytest.raises(DataError, match="no loss to draw"):
        plot_loss([], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_log_history_is_read_from_a_trainer_state(tmp_path):
    state = tmp_path / "trainer_state.json"
    state.write_text(json.dumps({"log_history": [TRAIN_LOG]}))
    assert read_log_history(state) == [TRAIN_LOG]
    state.write_text("[]")
    with pytest.raises(DataError, match="holds no training log"):
        read_log_history(state)


def test_progress_text_names_what_people_look_for():
    line = describe_log(2, TRAIN_LOG)
    assert "loss 3.0000" in line
    assert "1,234 tokens/s" in line
    assert "97% of slots filled" in line
    lines = describe_log(2, EVAL_LOG).splitlines()
    assert "loss 2.5000" in lines[0]
    assert lines[1].split()[:3] == ["R", "loss", "2.0000"]
    assert describe_log(2, {"train_runtime": 3.0}) is None
