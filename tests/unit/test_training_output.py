"""Metrics, curves, progress and summary on their own."""

import io
import json

import matplotlib.image
import numpy as np
import pytest

from nemo_v4_indexer.training.curves import write_curves
from nemo_v4_indexer.training.metrics import MetricsFile, read
from nemo_v4_indexer.training.report import Progress, summary


def record(step, **values):
    return {
        "step": step,
        "lm_loss": 5.0 / step,
        "indexer_loss": 0.3 / step,
        "recall": 0.5,
        "recall_random": 0.2,
    } | values


def test_metrics_are_strict_json_and_cut_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, 0)
    for step in range(1, 6):
        metrics.append(record(step, recall=float("nan"), grad_norm=float("inf")))
    metrics.close()
    assert "NaN" not in path.read_text() and "Infinity" not in path.read_text()
    assert json.loads(path.read_text().splitlines()[0])["recall"] is None
    again = MetricsFile(path, 3)
    again.append(record(4))
    again.close()
    assert [row["step"] for row in read(path)] == [1, 2, 3, 4]
    assert again.records == read(path)


def test_metrics_survive_a_cut_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "lm_loss": 2.0}\n{"step": 2, "lm_')
    assert MetricsFile(path, 5).records == [{"step": 1, "lm_loss": 2.0}]
    assert path.read_text() == '{"step": 1, "lm_loss": 2.0}\n'


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"step": 1, "lm_loss": 2.0, "recall": None}],
        [record(s, val_lm_loss=4.0 / s, val_recall=0.4, val_recall_random=0.1) for s in range(1, 60)],
    ],
)
def test_curves_are_a_picture(tmp_path, rows):
    path = tmp_path / "curves.png"
    write_curves(path, rows, 3.1)
    pixels = matplotlib.image.imread(io.BytesIO(path.read_bytes()))
    assert pixels.shape[1] > 1200 and np.std(pixels) > 0.02
    assert [item.name for item in tmp_path.iterdir()] == ["curves.png"]


def test_progress_lines_are_few_and_only_from_the_first_rank(capsys):
    for enabled in (True, False):
        progress = Progress(0, 200, None, enabled=enabled)
        for step in range(1, 201):
            progress.step(record(step, tokens_per_s=1234.5))
        progress.close()
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == (21 if enabled else 0)
        if enabled:
            assert lines[-1].startswith("step 200/200  loss 0.025") and "recall 0.500" in lines[-1]
            assert "tokens/s 1,2" in lines[-1]


def test_summary():
    rows = [record(s, tokens_per_s=100.0 * s) for s in range(1, 30)]
    text = summary(rows, {"time": "9 s"})
    assert "validation loss" in text and "n/a" in text and "9 s" in text
    rows[-1] |= {"val_lm_loss": 1.25, "val_recall": 0.6, "val_recall_random": 0.2}
    text = summary(rows, {})
    assert "1.2500 nats/byte" in text and "0.600 against 0.200 (3.0x)" in text and "1,500" in text
