"""What the person at the terminal sees: a bar or a line now and then, and the table at the end."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

_LINES_PER_RUN = 20
_SHOWN = (("loss", "lm_loss", ".3f"), ("indexer", "indexer_loss", ".3f"), ("recall", "recall", ".3f"))


def _number(value: float | None, form: str) -> str:
    return "n/a" if value is None else format(value, form)


def _shown(record: Mapping[str, Any]) -> dict[str, str]:
    shown = {name: _number(record[key], form) for name, key, form in _SHOWN if key in record}
    if record.get("val_lm_loss") is not None:
        shown["val"] = _number(record["val_lm_loss"], ".3f")
    return shown | {"tokens/s": _number(record.get("tokens_per_s"), ",.0f")}


class Progress:
    """A bar on a terminal, otherwise one line every `interval` steps; nothing on ranks other than the first."""

    def __init__(self, first: int, total: int, interval: int | None, *, enabled: bool) -> None:
        self.total, self.enabled = total, enabled
        self.interval = interval or max(1, total // _LINES_PER_RUN)
        self._bar = None
        if enabled and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, initial=first, unit="step", dynamic_ncols=True)

    def note(self, text: str) -> None:
        """Say something between two steps."""
        if self._bar is not None:
            self._bar.write(text)
        elif self.enabled:
            print(text, flush=True)

    def step(self, record: Mapping[str, Any]) -> None:
        """Show one metrics record."""
        step = record["step"]
        if self._bar is not None:
            self._bar.set_postfix(_shown(record), refresh=False)
            self._bar.update()
        elif self.enabled and (step % self.interval == 0 or step in (1, self.total) or "val_lm_loss" in record):
            values = "  ".join(f"{name} {value}" for name, value in _shown(record).items())
            print(f"step {step:>{len(str(self.total))}}/{self.total}  {values}", flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _last(records: Sequence[Mapping[str, Any]], key: str) -> float | None:
    return next((record[key] for record in reversed(records) if record.get(key) is not None), None)


def _against(value: float | None, random: float | None) -> str:
    if value is None or random is None:
        return "n/a (no query sees more groups than top-k)"
    return f"{value:.3f} against {random:.3f} ({value / max(random, 1e-12):.1f}x)"


def summary(records: Sequence[Mapping[str, Any]], facts: Mapping[str, str]) -> str:
    """The closing table. `facts`: rows that the records do not tell, in order."""
    recent = [record["lm_loss"] for record in records[-20:] if record.get("lm_loss") is not None]
    speeds = sorted(record["tokens_per_s"] for record in records if record.get("tokens_per_s"))
    rows = {
        "steps": str(records[-1]["step"] if records else 0),
        "training loss, last 20 steps": _number(sum(recent) / len(recent) if recent else None, ".4f") + " nats/byte",
        "validation loss": _number(_last(records, "val_lm_loss"), ".4f") + " nats/byte",
        "validation recall against random": _against(_last(records, "val_recall"), _last(records, "val_recall_random")),
        "tokens/s, median": _number(speeds[len(speeds) // 2] if speeds else None, ",.0f"),
        **facts,
    }
    width = max(map(len, rows))
    rule = "-" * (width + 2 + max(map(len, rows.values())))
    return "\n".join([rule, *(f"{name:<{width}}  {value}" for name, value in rows.items()), rule])
