"""Byte-level training data: the interpreter's own library or the user's text, split by file, drawn by step number.

Letters: B sequences, S tokens per sequence.
"""

import fnmatch
import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from nemo_v4_indexer.training.config import DataConfig
from nemo_v4_indexer.training.errors import UsageError

VOCAB_SIZE = 256
SEPARATOR = b"\0"  # ends a document: no text file holds it, so every byte value stays a token of its own
# Tests and installed packages differ between distributions of one Python; build files differ between machines.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_SKIPPED_PREFIXES = ("_sysconfigdata", "config-")


@dataclass(frozen=True, slots=True)
class Corpus:
    """Two token streams, uint8. `fingerprint` changes whenever a byte of either stream does."""

    train: np.ndarray
    validation: np.ndarray
    description: str
    fingerprint: str


def load_corpus(config: DataConfig) -> Corpus:
    """Read and split the data. Raises UsageError when there is no or too little of it."""
    if config.source == "stdlib":
        documents, where = _stdlib(), "Python standard library"
    else:
        documents, where = _text(Path(config.path or ""), config.pattern), str(config.path)
    if len(documents) == 1:
        train, validation = _split_bytes(documents[0][1], config.validation_fraction)
    else:
        train, validation = _split_files(documents, config.validation_fraction)
    need = config.sequence_length + 1
    for name, tokens in (("training", train), ("validation", validation)):
        if len(tokens) < need:
            raise UsageError(
                f"{where} gives {len(tokens)} bytes of {name} text, fewer than data.sequence_length + 1 = {need}"
            )
    digest = hashlib.sha256(len(train).to_bytes(8, "little") + train.tobytes() + validation.tobytes()).hexdigest()[:16]
    files = "1 file" if len(documents) == 1 else f"{len(documents)} files"
    size = (len(train) + len(validation)) / 1e6
    return Corpus(train, validation, f"{where}: {files}, {size:.1f} MB", digest)


def _walk(root: Path, pattern: str) -> Iterator[tuple[str, Path]]:
    for folder, folders, files in os.walk(root):
        folders[:] = [f for f in folders if f not in _SKIPPED_FOLDERS and not f.startswith((".", *_SKIPPED_PREFIXES))]
        for name in files:
            if fnmatch.fnmatch(name, pattern) and not name.startswith((".", *_SKIPPED_PREFIXES)):
                path = Path(folder, name)
                yield path.relative_to(root).as_posix(), path


def _read(found: Iterator[tuple[str, Path]]) -> list[tuple[str, bytes]]:
    documents = []
    for name, path in sorted(found):
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}") from error
        if content:
            documents.append((name, content))
    return documents


def _stdlib() -> list[tuple[str, bytes]]:
    root = Path(sysconfig.get_path("stdlib"))
    documents = _read(_walk(root, "*.py"))
    if len(documents) < 2:
        raise UsageError(f"this Python keeps no library source under {root}; use data=text_file data.path=...")
    return documents


def _text(path: Path, pattern: str) -> list[tuple[str, bytes]]:
    if path.is_dir():
        documents = _read(_walk(path, pattern))
        if not documents:
            raise UsageError(f"data.path={path} holds no non-empty file matching data.pattern={pattern!r}")
        return documents
    if not path.is_file():
        raise UsageError(f"data.path={path} is neither a file nor a folder")
    documents = _read(iter([(path.name, path)]))
    if not documents:
        raise UsageError(f"data.path={path} is empty")
    return documents


def _tokens(chunks: list[bytes]) -> np.ndarray:
    return np.frombuffer(SEPARATOR.join([*chunks, b""]), dtype=np.uint8)


def _split_files(documents: list[tuple[str, bytes]], fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """A file's side depends on its relative name alone, so that adding a file moves no other."""
    places = {name: int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") for name, _ in documents}
    held_out = {name for name, place in places.items() if place < fraction * 2**64}
    by_place = sorted(places, key=lambda name: places[name])
    held_out = held_out or {by_place[0]}  # a small folder may hash to one side only
    if len(held_out) == len(documents):
        held_out.discard(by_place[-1])
    train = _tokens([content for name, content in documents if name not in held_out])
    return train, _tokens([content for name, content in documents if name in held_out])


def _split_bytes(content: bytes, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    cut = len(content) - int(len(content) * fraction)
    return _tokens([content[:cut]]), _tokens([content[cut:]])


def unigram_entropy(tokens: np.ndarray) -> float:
    """Entropy of the byte frequencies, in nats: what a model that ignores its context cannot beat."""
    counts = np.bincount(tokens, minlength=VOCAB_SIZE)
    share = counts[counts > 0] / tokens.size
    return float(-(share * np.log(share)).sum())


def train_batch(tokens: np.ndarray, seed: int, step: int, batch_size: int, length: int) -> torch.Tensor:
    """Random windows of step `step`, int64 [B, S+1]: a pure function of its arguments."""
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, step], dtype=np.uint64)))
    return _windows(tokens, generator.integers(0, len(tokens) - length, size=batch_size), length)


def validation_batch(tokens: np.ndarray, index: int, batches: int, batch_size: int, length: int) -> torch.Tensor:
    """Windows of validation batch `index` of `batches`, int64 [B, S+1], evenly spaced over the stream."""
    count = batches * batch_size
    starts = np.linspace(0, len(tokens) - length - 1, num=count).astype(np.int64)
    return _windows(tokens, starts[index::batches], length)


def _windows(tokens: np.ndarray, starts: np.ndarray, length: int) -> torch.Tensor:
    rows = tokens[starts[:, None] + np.arange(length + 1)]
    return torch.from_numpy(rows.astype(np.int64))
