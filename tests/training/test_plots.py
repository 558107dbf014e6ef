"""Attention statistics of a training run: metrics, picture, and no effect on training."""

from helpers import metrics, summary, untimed

from generation.head_statistics import STATISTICS

HEADS = [f"/layer-{layer}/head-{head}" for layer in (1, 2) for head in (1, 2)]


def test_attention_statistics_do_not_change_training(train, workdir):
    settings = ["dtype=bfloat16", "model.dropout=0.2", "optimizer=adamw"]
    assert train("name=a", "eval.attention_stats=true", *settings) == 0
    assert train("name=b", *settings) == 0
    rows, rows_without = untimed(metrics("a")), untimed(metrics("b"))
    keys = {f"attention/{name}{end}" for name in STATISTICS for end in ("", *HEADS)}
    for row in rows:
        assert {key for key in row if key.startswith("attention")} == (
            keys if "val/loss" in row else set()
        )
        assert None not in row.values()
    assert [{k: v for k, v in row.items() if k not in keys} for row in rows] == rows_without
    assert summary("a")["attention_entropy"] == rows[-1]["attention/entropy"]
    assert (workdir / "runs/a/attention.png").read_bytes().startswith(b"\x89PNG")
    assert not (workdir / "runs/b/attention.png").exists()
