"""The description of a model on the console."""

from helpers import tiny_model

from training.progress import describe_model


def test_model_is_described_with_singular_and_plural():
    assert describe_model(tiny_model().config) == "2 layers, 2 heads, 16 channels, context 8"
    assert describe_model(tiny_model(n_layer=1, n_head=1).config) == "1 layer, 1 head, 16 channels, context 8"
