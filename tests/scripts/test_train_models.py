"""The shipped models, and the page about them."""

from lit_effattn.checkpoints.shipped import metadata, models
from scripts.train_models import CARDS, MARK, PAGE, page


def test_every_shipped_model_can_be_trained_anew():
    assert {*models()} == {*CARDS}
    for name, path in models().items():
        about, card = metadata(path)["card"], CARDS[name]
        assert [*about["figures"]] == [*card.metrics]
        assert (about["summary"], about["limits"]) == (card.summary, card.limits)
        assert f"fit --config {card.config}" in about["training"]


def test_the_page_has_their_cards():
    assert PAGE.read_text(encoding="utf-8").endswith(f"{MARK}{page()}")
