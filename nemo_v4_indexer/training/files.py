"""Writing files so that a crash or a kill leaves the old content or the new, never a mixture."""

import os
from pathlib import Path
from typing import IO


def sync(stream: IO) -> None:
    """Push what was written to `stream` down to the disk."""
    stream.flush()
    os.fsync(stream.fileno())


def sync_folder(path: Path) -> None:
    """Make the names in a folder (created, renamed, removed files) durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_bytes(path: Path, content: bytes) -> None:
    """Replace `path` in one step."""
    draft = path.with_name(f".{path.name}.writing")
    with draft.open("wb") as stream:
        stream.write(content)
        sync(stream)
    draft.replace(path)
    sync_folder(path.parent)


def write_text(path: Path, content: str) -> None:
    """Replace `path` in one step, UTF-8."""
    write_bytes(path, content.encode())
