"""metrics.jsonl: one strict JSON object per optimizer step."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_v4_indexer.training import files

# In every record, null when not measured: no layer has an indexer, or the dense stage selects nothing.
ALWAYS = ("lm_loss", "indexer_loss", "recall", "recall_random")


def read(path: Path, last_step: int | None = None) -> list[dict[str, Any]]:
    """The records up to `last_step` (all when None); what follows a damaged line is dropped."""
    records: list[dict[str, Any]] = []
    if not path.is_file():
        return records
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:  # a kill can cut the last line short
            break
        if last_step is not None and record["step"] > last_step:
            break
        records.append(record)
    return records


def _encode(record: Mapping[str, Any]) -> str:
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(finite, allow_nan=False) + "\n"


class MetricsFile:
    """Appends records. Opening cuts the file back to `last_step`, where a resumed run goes on."""

    def __init__(self, path: Path, last_step: int) -> None:
        self.records = read(path, last_step)
        files.write_text(path, "".join(_encode(record) for record in self.records))
        self._stream = path.open("a", encoding="utf-8")

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record through to the operating system. Numbers that JSON lacks become null."""
        line = _encode(record)
        self._stream.write(line)
        self._stream.flush()
        self.records.append(json.loads(line))

    def sync(self) -> None:
        """Make what was appended survive a power cut."""
        files.sync(self._stream)

    def close(self) -> None:
        self._stream.close()
