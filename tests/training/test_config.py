"""Training config: how a batch is divided."""

import pytest

from common.errors import UserError
from training.config import TrainConfig


def split(batch_size: int, micro_batch_size: int | None, world_size: int) -> tuple[int, int]:
    config = TrainConfig(batch_size=batch_size, micro_batch_size=micro_batch_size)
    return config.split_batch(world_size)


@pytest.mark.parametrize(
    ("micro_batch_size", "world_size", "expected"),
    [(None, 1, (12, 1)), (None, 2, (6, 1)), (3, 1, (3, 4)), (3, 2, (3, 2))],
)
def test_batch_is_divided_over_devices_and_micro_batches(micro_batch_size, world_size, expected):
    assert split(12, micro_batch_size, world_size) == expected


@pytest.mark.parametrize(
    ("batch_size", "micro_batch_size", "world_size", "advice"),
    [(10, None, 3, "set 9 or 12"), (2, None, 3, "set 3"), (12, 4, 2, "set one of 1, 2, 3, 6")],
)
def test_batch_that_cannot_be_divided_is_refused_with_valid_sizes(
    batch_size, micro_batch_size, world_size, advice
):
    with pytest.raises(UserError, match=f"{advice}$"):
        split(batch_size, micro_batch_size, world_size)
