"""Training config: how a batch is divided, and checks of values."""

import pytest

from common.errors import UserError
from training.config import TrainConfig


def test_batch_is_divided_into_micro_batches_or_refused_with_valid_sizes():
    def split(batch, micro, world):
        return TrainConfig(batch_size=batch, micro_batch_size=micro).split_batch(world)

    assert split(12, None, 1) == (12, 1)
    assert split(12, 3, 1) == (3, 4)
    assert split(12, "auto", 2) == (1, 6)
    assert split(12, 3, 2) == (3, 2)
    with pytest.raises(UserError, match="set 9 or 12"):
        split(10, None, 3)
    with pytest.raises(UserError, match="set one of 1, 2, 3, 6"):
        split(12, 4, 2)
