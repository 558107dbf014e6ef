"""Progress of many samples or documents: lines on stderr if it is not a terminal."""

from model.generation.progress import GenerationProgress


def test_lines_have_items_speed_and_remaining_time(monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    with GenerationProgress(3, 3_000, "documents") as progress:
        for _ in range(3):
            clock[0] += 7
            progress.add(1_000, finished=True)
    assert capsys.readouterr().err == "2/3 documents  143 tokens/s  0:07 left\n"
    assert progress.summary() == "3 documents, 3,000 tokens in 21.0 s, 143 tokens/s"


def test_skipped_tokens_count_for_progress_but_not_for_speed(monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    with GenerationProgress(2, 2_000, "samples") as progress:
        clock[0] += 20
        progress.add(100, skipped=900, finished=True)
    assert capsys.readouterr().err == "1/2 samples  5 tokens/s  0:20 left\n"


def test_progress_continues_after_finished_samples(monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    with GenerationProgress(4, 4_000, "samples", finished_items=2) as progress:
        clock[0] += 20
        progress.add(1_000, finished=True)
    assert capsys.readouterr().err == "3/4 samples  50 tokens/s  0:20 left\n"
