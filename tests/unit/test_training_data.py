"""Byte data: deterministic split and batches, clear refusals, entropy."""

import math

import numpy as np
import pytest

from nemo_v4_indexer.training.config import DataConfig
from nemo_v4_indexer.training.data import load_corpus, train_batch, unigram_entropy, validation_batch
from nemo_v4_indexer.training.errors import UsageError


def text_config(path, **changes):
    return DataConfig(**{"source": "text_file", "path": str(path), "sequence_length": 16} | changes)


def folder_of(tmp_path, count, size=100):
    for index in range(count):
        (tmp_path / f"file{index:03}.txt").write_bytes(bytes([index]) * size)
    return tmp_path


def test_standard_library_is_real_text_split_by_file():
    first, again = load_corpus(DataConfig()), load_corpus(DataConfig())
    assert first.fingerprint == again.fingerprint
    share = len(first.validation) / (len(first.train) + len(first.validation))
    assert 0.01 < share < 0.12 and len(first.train) > 2_000_000
    assert b"def __init__(self" in first.train.tobytes() and b"def __init__(self" in first.validation.tobytes()
    assert 2.5 < unigram_entropy(first.validation) < 4.0


def test_files_stay_whole_and_on_one_side(tmp_path):
    corpus = load_corpus(text_config(folder_of(tmp_path, 60), validation_fraction=0.2))
    train, held_out = set(corpus.train.tolist()) - {0}, set(corpus.validation.tolist()) - {0}
    assert not train & held_out
    assert train | held_out == set(range(1, 60))
    assert np.all(np.unique(corpus.train[corpus.train > 0], return_counts=True)[1] == 100)


def test_a_new_file_moves_no_other(tmp_path):
    before = load_corpus(text_config(folder_of(tmp_path, 40), validation_fraction=0.3))
    after = load_corpus(text_config(folder_of(tmp_path, 41), validation_fraction=0.3))
    assert set(before.train.tolist()) <= set(after.train.tolist())
    assert set(before.validation.tolist()) <= set(after.validation.tolist())
    assert before.fingerprint != after.fingerprint


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("fraction", [0.001, 0.999])
def test_both_sides_get_a_file(tmp_path, count, fraction):
    corpus = load_corpus(text_config(folder_of(tmp_path, count), validation_fraction=fraction))
    assert len(corpus.train) > 16 and len(corpus.validation) > 16


def test_single_file_is_split_by_position(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes(bytes(range(1, 101)) * 10)
    corpus = load_corpus(text_config(path, validation_fraction=0.1))
    assert (corpus.train.tobytes() + corpus.validation.tobytes()).replace(b"\0", b"") == path.read_bytes()
    assert len(corpus.validation) == 101


def test_pattern_and_hidden_files(tmp_path):
    folder_of(tmp_path, 4)
    (tmp_path / "other.md").write_bytes(b"\xc8" * 500)
    (tmp_path / ".hidden.txt").write_bytes(b"\xc9" * 500)
    corpus = load_corpus(text_config(tmp_path, pattern="*.txt"))
    assert not {0xC8, 0xC9} & (set(corpus.train.tolist()) | set(corpus.validation.tolist()))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda p: p / "absent.txt", "neither a file nor a folder"),
        (lambda p: p, "holds no non-empty file"),
        (lambda p: (p / "empty.txt").touch() or p / "empty.txt", "is empty"),
        (lambda p: (p / "short.txt").write_bytes(b"abc") and p / "short.txt", r"data\.sequence_length \+ 1 = 17"),
    ],
)
def test_unusable_text_is_refused(tmp_path, make, said):
    with pytest.raises(UsageError, match=said):
        load_corpus(text_config(make(tmp_path)))


def test_batches_depend_on_seed_and_step_alone():
    tokens = np.random.default_rng(0).integers(0, 256, 5000).astype(np.uint8)
    batch = train_batch(tokens, 1, 7, 4, 32)
    assert batch.shape == (4, 33)
    assert np.array_equal(batch, train_batch(tokens, 1, 7, 4, 32))
    assert not np.array_equal(batch, train_batch(tokens, 1, 8, 4, 32))
    assert not np.array_equal(batch, train_batch(tokens, 2, 7, 4, 32))
    stream = tokens.tobytes()
    assert all(row.numpy().astype(np.uint8).tobytes() in stream for row in batch)


def test_shortest_stream_gives_its_only_window():
    tokens = np.arange(17, dtype=np.uint8)
    assert train_batch(tokens, 0, 0, 2, 16).tolist() == [list(range(17))] * 2
    assert validation_batch(tokens, 0, 1, 2, 16).tolist() == [list(range(17))] * 2


def test_validation_windows_cover_the_stream():
    tokens = (np.arange(3300) // 33).astype(np.uint8)
    rows = [row for index in range(5) for row in validation_batch(tokens, index, 5, 4, 32)]
    assert len({tuple(row.tolist()) for row in rows}) == 20
    assert min(row.min() for row in rows) == 0 and max(row.max() for row in rows) == 99


def test_unigram_entropy():
    assert unigram_entropy(np.frombuffer(b"aaaa", dtype=np.uint8)) == 0.0
    assert unigram_entropy(np.arange(256, dtype=np.uint8)) == pytest.approx(math.log(256))
    assert unigram_entropy(np.frombuffer(b"aaab", dtype=np.uint8)) == pytest.approx(0.562335, abs=1e-6)
