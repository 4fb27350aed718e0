"""curves.png: what the run learned, drawn from the metrics records."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_v4_indexer.training import files

Records = Sequence[Mapping[str, Any]]


def _series(records: Records, key: str) -> tuple[list[int], list[float]]:
    points = [(record["step"], record[key]) for record in records if record.get(key) is not None]
    return [step for step, _ in points], [value for _, value in points]


def _draw(axes: Any, records: Records, key: str, label: str, **style: Any) -> None:
    steps, values = _series(records, key)
    if steps:
        style = {"marker": "o", "markersize": 4} | style if len(steps) < 40 else style
        axes.plot(steps, values, label=label, **style)


def _finish(axes: Any, records: Records, title: str, unit: str) -> None:
    axes.set_title(title, fontsize=11)
    axes.set_xlim(0, max([record["step"] for record in records], default=1) + 1)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    axes.grid(alpha=0.25)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8)
    else:
        axes.text(0.5, 0.5, "nothing was measured", ha="center", va="center", transform=axes.transAxes, color="grey")


def write_curves(path: Path, records: Records, unigram: float) -> None:
    """Draw the language-model loss, the indexer loss and the recall, and replace `path`. unigram: nats per byte."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.4), layout="constrained", dpi=110)
    FigureCanvasAgg(figure)
    loss, indexer, recall = figure.subplots(1, 3)

    _draw(loss, records, "lm_loss", "training", color="tab:blue", lw=1, alpha=0.6)
    _draw(loss, records, "val_lm_loss", "validation", color="tab:red", lw=1.6)
    loss.axhline(unigram, color="black", ls="--", lw=1, label=f"unigram entropy {unigram:.2f}")
    _finish(loss, records, "Language-model loss", "nats per byte")

    _draw(indexer, records, "indexer_loss", "indexer", color="tab:green", lw=1)
    _draw(indexer, records, "kl_uniform", "uniform guess", color="grey", lw=1, ls="--")
    _finish(indexer, records, "Indexer loss: KL to the attention's own choice", "nats")

    _draw(recall, records, "recall", "training", color="tab:blue", lw=1, alpha=0.6)
    _draw(recall, records, "recall_random", "random choice, training", color="grey", lw=1, alpha=0.6)
    _draw(recall, records, "val_recall", "validation", color="tab:red", lw=1.6)
    _draw(recall, records, "val_recall_random", "random choice, validation", color="black", lw=1.2, ls="--")
    recall.set_ylim(0, 1.02)
    _finish(recall, records, "Recall of attention mass by the selected groups", "share")

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    files.write_bytes(path, buffer.getvalue())
