"""Training config: how a batch is divided, and rules between settings."""

import pytest

from common.errors import UserError
from common.settings import check
from training.config import AdamWConfig, MuonConfig, RunConfig, TrainConfig


def split(batch_size: int, micro_batch_size: int | None, world_size: int) -> tuple[int, int]:
    config = TrainConfig(batch_size=batch_size, micro_batch_size=micro_batch_size)
    return config.split_batch(world_size)


@pytest.mark.parametrize(
    ("micro_batch_size", "world_size", "expected"),
    [
        (None, 1, (12, 1)),
        (None, 2, (6, 1)),
        (3, 1, (3, 4)),
        (3, 2, (3, 2)),
        (8, 2, (6, 1)),
        (8, 1, (6, 2)),
        (5, 2, (3, 2)),
    ],
    ids=[
        "one device",
        "two devices",
        "micro batches",
        "both",
        "larger than the share",
        "not a divisor",
        "both, and not a divisor",
    ],
)
def test_batch_is_divided_over_devices_and_micro_batches(micro_batch_size, world_size, expected):
    assert split(12, micro_batch_size, world_size) == expected


@pytest.mark.parametrize(
    ("batch_size", "advice"), [(10, "set 9 or 12"), (2, "set 3")], ids=["10", "fewer than devices"]
)
def test_batch_that_devices_cannot_share_is_refused_with_valid_sizes(batch_size, advice):
    with pytest.raises(UserError, match=f"{advice}$"):
        split(batch_size, None, world_size=3)


def test_default_config_is_valid():
    check(RunConfig())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (TrainConfig(steps=None), "steps=null needs train.epochs or train.minutes"),
        (AdamWConfig(betas=[0.9]), "betas=.* must be two numbers"),
        (AdamWConfig(name="sgd"), "name=sgd selects no optimizer"),
        (AdamWConfig(lr=2.0, weight_decay=0.5), "weight_decay=0.5 reverses the sign"),
        (
            MuonConfig(embedding_lr=2.0, ngram_weight_decay=0.5),
            "ngram_weight_decay=0.5 reverses the sign",
        ),
        (RunConfig(name="last"), "name=last is reserved"),
        (RunConfig(flops_per_second=1.0), "flops_per_second=1.0 needs plan=true"),
        (RunConfig(world_size=2), "world_size=2 needs plan=true"),
    ],
    ids=[
        "no end", "betas", "name", "decay", "decay of n-grams",
        "run", "speed", "processes",
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other_are_refused(config, message):
    with pytest.raises(UserError, match=message):
        check(config)
