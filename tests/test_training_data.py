# SPDX-License-Identifier: Apache-2.0
"""What a model is trained on: no passage in both parts, windows that are slices, files that are what they say."""

from __future__ import annotations

import builtins
import errno
import gzip
import hashlib
import io
import itertools
import os
import pickle
import struct
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dash_optim.training import data, text
from dash_optim.training.data import Corpus, load_corpus
from dash_optim.training.leaks import PASSAGE, WINDOW, passage_starts, without_shared
from matroots._command import InputError
from matroots.studies.record_factors import training_bytes


def windows_of(content, size=WINDOW):
    return {content[i : i + size] for i in range(len(content) - size + 1)}


def share(held, train, size=WINDOW):
    """Which part of the windows held out stands in the other part too, by sets of slices."""
    seen, places = windows_of(train, size), range(len(held) - size + 1)
    return sum(held[i : i + size] in seen for i in places) / len(places)


def array(content):
    return np.frombuffer(content, np.uint8)


def prose(seed, paragraphs, lines=4):
    """Paragraphs of lines that no two have in common."""
    rng = np.random.default_rng(seed)
    letters = rng.integers(97, 123, (paragraphs, lines, 50)).astype(np.uint8)
    return b"\n\n".join(b"\n".join(line.tobytes() for line in paragraph) for paragraph in letters)


def tokens_file(path, values, dtype="<u2"):
    np.asarray(values, dtype).tofile(path)
    return path


def corpus(train, held_out=None, vocab=2**16):
    held_out = train if held_out is None else held_out
    return Corpus(np.asarray(train), np.asarray(held_out), vocab, "numbers", "")


# The default text


def test_no_window_of_the_default_text_stands_in_both_parts():
    """Of whole topics 71% do before anything is removed; of the last tenth 8% did."""
    found = load_corpus()
    assert share(found.held_out.tobytes(), found.train.tobytes()) == 0
    assert share(found.held_out.tobytes(), found.train.tobytes(), 32) < 0.05


def test_the_last_tenth_leaks():
    """The measure is able to see a leak."""
    whole = training_bytes().numpy().tobytes()
    cut = len(whole) * 9 // 10
    assert share(whole[cut:], whole[:cut]) > 0.02


def test_the_default_text_is_nearly_all_there_and_a_tenth_is_held_out():
    found, whole = load_corpus(), training_bytes().numpy().tobytes()
    assert 0.08 < len(found.held_out) / len(whole) < 0.12
    missing = len(
        windows_of(whole) - windows_of(found.train.tobytes()) - windows_of(found.held_out.tobytes())
    )
    assert missing / len(windows_of(whole)) < 0.05
    assert any("bytes left out of the training part" in note for note in found.notes)


def test_the_default_text_is_prose_in_its_order():
    """Whole topics are held out; the lines of either part are those of all topics, in order, and nearly all paragraphs are whole."""
    from pydoc_data.topics import topics

    found = load_corpus()
    held, train = found.held_out.tobytes().decode(), found.train.tobytes().decode()
    whole = [name for name in topics if topics[name] in held]
    assert len(whole) >= 5
    assert sum(len(topics[name].encode()) for name in whole) > 0.6 * len(found.held_out)
    everything = "\n\n".join(topics[name] for name in sorted(topics))
    for part in (held, train):
        lines = iter(everything.split("\n"))
        assert all(line in lines for line in part.split("\n"))
    whole = [paragraph for paragraph in train.split("\n\n") if f"{paragraph}\n\n" in everything]
    assert sum(map(len, whole)) > 0.93 * len(train) - 2 * train.count("\n\n")
    assert (found.vocab, found.train.dtype, found.name) == (256, np.uint8, "Python's help topics")
    assert not found.train.flags.writeable
    assert not found.held_out.flags.writeable


def test_the_default_text_does_not_depend_on_the_order_of_the_topics(monkeypatch):
    from pydoc_data import topics

    before = load_corpus().fingerprint
    monkeypatch.setattr(topics, "topics", dict(reversed(topics.topics.items())))
    assert load_corpus().fingerprint == before


def test_python_without_help_topics(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pydoc_data.topics", None)
    with pytest.raises(InputError, match="without its help topics"):
        load_corpus()


# Passages


def naive_without_shared(content, other):
    """The same by sets and loops."""
    seen = windows_of(other)
    while True:
        hit = bytearray(len(content))
        for i in range(len(content) - WINDOW + 1):
            if content[i : i + WINDOW] in seen:
                hit[i : i + WINDOW] = b"\1" * WINDOW
        if not any(hit):
            return content
        starts = [*passage_starts(array(content)).tolist(), len(content)]
        content = b"".join(content[a:b] for a, b in itertools.pairwise(starts) if not any(hit[a:b]))


pieces = st.lists(
    st.sampled_from(
        [b"a" * 70, b"bc" * 40, b"x" * 63, b"The quick brown fox. " * 4, b"\n", b"\n\n", b"\r\n\r\n", b"end"]
    ),
    max_size=12,
).map(b"".join)


@settings(max_examples=150, deadline=None)
@given(pieces, pieces)
def test_removal_is_that_of_the_naive_one(content, other):
    result = without_shared(array(content), array(other)).tobytes()
    assert result == naive_without_shared(content, other)
    assert not windows_of(result) & windows_of(other)


def test_a_quoted_paragraph_goes_and_its_neighbours_stay():
    mine, theirs = prose(0, 9), prose(1, 9)
    quoted = theirs[1000:1064]  # one window, in the middle of a paragraph
    paragraphs = mine.split(b"\n\n")
    content = b"\n\n".join([*paragraphs[:4], paragraphs[4] + quoted + b"and so on", *paragraphs[5:]])
    expected = b"\n\n".join(paragraphs[:4] + paragraphs[5:])
    assert without_shared(array(content), array(theirs)).tobytes() == expected
    shorter = content.replace(quoted, quoted[:63])
    assert without_shared(array(shorter), array(theirs)).tobytes() == shorter


def test_what_comes_together_by_a_removal_is_looked_at_again():
    shared, left, right = prose(1, 1), prose(2, 1)[:100] + b"\n\n", prose(3, 1)[:100]
    content = left + shared + b"\n\n" + right
    clean = without_shared(array(content), array(shared + b"." + left[-60:] + right[:60])).tobytes()
    assert clean == b""


@pytest.mark.parametrize("place", [2**18 - 64, 2**18 - 1, 2**18, 2**18 + 1, 700_000])
def test_windows_across_chunks_are_found(place):
    content = bytearray(prose(0, 4000))
    other = prose(1, 2)
    content[place : place + 64] = other[100:164]
    clean = without_shared(array(bytes(content)), array(other)).tobytes()
    assert 0 < len(content) - len(clean) < 700
    assert other[100:164] not in clean


def test_passages_cover_a_text_and_are_short():
    content = b"short\n\n" + b"line of a long paragraph\n" * 200 + b"\n" + b"x" * 9000 + b"\r\n\r\nlast\n"
    starts = passage_starts(array(content)).tolist()
    assert starts[0] == 0
    assert starts == sorted(set(starts))
    assert {7, 7 + 25, content.index(b"x"), content.index(b"last")} < set(starts)
    assert 7 + 12 not in starts
    assert max(b - a for a, b in zip(starts, [*starts[1:], len(content)], strict=True)) <= PASSAGE


def test_paragraphs_that_end_as_on_windows():
    assert passage_starts(array(b"one\r\ntwo\r\n\r\nthree\r\n\r\n\r\nfour\nfive")).tolist() == [0, 12, 23]


# Text files


def test_a_text_is_split_at_a_paragraph_near_its_end(tmp_path):
    whole = prose(0, 100)
    (tmp_path / "a.txt").write_bytes(whole)
    found = load_corpus(tmp_path / "a.txt")
    assert found.train.tobytes() + found.held_out.tobytes() == whole
    assert found.train.tobytes().endswith(b"\n\n")
    assert 0.08 < len(found.held_out) / len(whole) < 0.12
    assert (found.vocab, found.name, found.notes) == (256, str(tmp_path / "a.txt"), ())
    half = load_corpus(str(tmp_path / "a.txt"), held_out=0.5)
    assert 0.48 < len(half.held_out) / len(whole) < 0.52


def test_a_text_without_lines_is_split_where_it_has_to_be(tmp_path):
    whole = np.random.default_rng(0).integers(97, 123, 1000).astype(np.uint8).tobytes()
    (tmp_path / "a.txt").write_bytes(whole)
    found = load_corpus(tmp_path / "a.txt")
    assert (found.train.tobytes(), found.held_out.tobytes()) == (whole[:900], whole[900:])


def test_a_folder_is_read_by_name_and_what_is_no_text_is_noted(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    contents = {"a.txt": prose(1, 20), "b/a.md": prose(2, 20), "b.txt": prose(3, 20), "c.py": prose(4, 20)}
    others = {
        ".hidden": prose(5, 3),
        ".git/config": prose(6, 3),
        "image.png": b"\x89PNG12",
        "late.txt": b"a" * 9000 + b"\0",
    }
    others |= {"empty.txt": b"", "z-copy.txt": contents["c.py"]}
    for name, content in (contents | others).items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    found = load_corpus(tmp_path, held_out=0.25)
    # the documents in the order of their names, those first by the hash of the name held out
    first = min(contents, key=lambda name: hashlib.sha256(name.encode()).digest())
    others_in_order = [contents[name] for name in sorted(contents) if name != first]
    held, train = found.held_out.tobytes(), found.train.tobytes()
    assert held == contents[first]
    assert train == b"\n\n".join(others_in_order)
    notes = "\n".join(found.notes)
    assert len(found.notes) == 5
    for words in (
        "image.png: left out: looks like a PNG",
        "late.txt: left out: has bytes that are 0",
        "empty.txt: left out: is empty",
    ):
        assert words in notes
    assert "link: left out: is a link to nothing" in notes
    assert "z-copy.txt: left out: the same as c.py" in notes


def test_several_files_do_not_leak(tmp_path):
    """Every file has the same licence, and each quotes a paragraph of the next."""
    licence, own = prose(0, 3), [prose(10 + i, 30) for i in range(12)]
    for i in range(12):
        quoted = own[(i + 1) % 12].split(b"\n\n")[5]
        (tmp_path / f"{i}.txt").write_bytes(licence + b"\n\n" + own[i] + b"\n\n" + quoted + b"\n")
    found = load_corpus(sorted(tmp_path.iterdir()), held_out=0.2)
    assert share(found.held_out.tobytes(), found.train.tobytes()) == 0
    assert licence in found.held_out.tobytes()
    assert licence not in found.train.tobytes()
    assert len(found.train) > 0.7 * sum(map(len, own))
    assert found.name == f"{tmp_path / '0.txt'} and 11 more"


def test_the_order_in_which_files_were_made_does_not_matter(tmp_path):
    for folder, order in (("x", range(8)), ("y", reversed(range(8)))):
        (tmp_path / folder).mkdir()
        for i in order:
            (tmp_path / folder / f"{i}.txt").write_bytes(prose(i, 10))
    assert load_corpus(tmp_path / "x").fingerprint == load_corpus(tmp_path / "y").fingerprint


# Token files


def test_nanogpt_files(tmp_path):
    """Little-endian whatever the machine is: the bytes are written by hand."""
    train, held = [1, 256, 50256, 513] * 5, [7, 1000] * 4
    (tmp_path / "train.bin").write_bytes(b"".join(struct.pack("<H", t) for t in train))
    (tmp_path / "val.bin").write_bytes(b"".join(struct.pack("<H", t) for t in held))
    (tmp_path / "input.txt").write_bytes(prose(0, 5))
    found = load_corpus(tmp_path)
    assert found.train.tolist() == train
    assert found.held_out.tolist() == held
    assert found.vocab == 50304
    assert isinstance(found.train, np.memmap)
    assert found.batch(0, batch=50, context=19, seed=0).tolist() == [train] * 50
    assert load_corpus(tmp_path, vocab=50257).vocab == 50257


@pytest.mark.parametrize(("largest", "vocab"), [(0, 64), (63, 64), (64, 128), (50256, 50304), (65535, 65536)])
@pytest.mark.parametrize("where", [0, 1_500_000, -1])
def test_the_vocabulary_is_that_of_the_largest_token(largest, vocab, where, tmp_path):
    """Wherever it stands, in the part held out too: it is looked for in chunks."""
    values = np.zeros(2_000_001, np.uint16)
    values[where] = largest
    assert load_corpus(tokens_file(tmp_path / "a.bin", values)).vocab == vocab


@pytest.mark.parametrize("folder", [False, True])
def test_a_single_token_file_is_split(folder, tmp_path):
    values = np.random.default_rng(0).integers(0, 1000, 1001)
    path = tokens_file(tmp_path / "train.bin", values)
    found = load_corpus(tmp_path if folder else path)
    assert found.train.tolist() == values[:901].tolist()
    assert found.held_out.tolist() == values[901:].tolist()
    assert isinstance(found.train, np.memmap)


class Touch:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_pickle_beside_tokens_is_not_run(tmp_path):
    tokens_file(tmp_path / "train.bin", range(100))
    tokens_file(tmp_path / "val.bin", range(100))
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(Touch(tmp_path / "run")))
    load_corpus(tmp_path)
    assert not (tmp_path / "run").exists()


def test_a_large_file_is_mapped_not_read(tmp_path):
    path, size = tmp_path / "train.bin", 2**31
    with path.open("wb") as stream:
        stream.truncate(size)
        stream.seek(size - 4)
        stream.write(b"\7\0\7\0")
    if path.stat().st_blocks * 512 > 2**24:
        pytest.skip("the file system cannot store holes")
    tracemalloc.start()
    begun = time.process_time()
    found = load_corpus(path, vocab=8)
    drawn = found.batch(0, batch=8, context=64, seed=0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert time.process_time() - begun < 1
    assert peak < 2**24
    assert len(found.train) + len(found.held_out) == size // 2
    assert drawn.shape == (8, 65)
    assert found.held_out[-2:].tolist() == [7, 7]
    starts = [int(w) % (len(found.train) - 64) for w in words(0, 0, 8)]
    assert max(starts) > 2**29  # beyond what 32 bits of bytes reach


# Wrong files


def zipped(seed=0):
    stream = io.BytesIO()
    np.savez(stream, a=np.zeros(9))
    return stream.getvalue()


def saved(values):
    stream = io.BytesIO()
    np.save(stream, values)
    return stream.getvalue()


TOKENS = np.random.default_rng(0).integers(0, 50257, 3000).astype("<u2")
REFUSED = {
    "empty": (b"", "is empty"),
    "odd": (TOKENS.tobytes() + b"x", "odd number of bytes, 6001"),
    "llm.c": (
        np.array([20240520, 1, 3000] + [0] * 253, "<i4").tobytes() + TOKENS.tobytes(),
        "header of 256 int32, as llm.c",
    ),
    "llama": (np.array([20240801, 7, 3000] + [0] * 253, "<i4").tobytes(), "32-bit tokens after a header"),
    "npz": (zipped(), "a zip archive"),
    "npy": (saved(TOKENS), "a numpy array"),
    "gzip": (gzip.compress(TOKENS.tobytes()), "a gzip archive"),
    **{f"pickle{i}": (pickle.dumps({"stoi": TOKENS.tolist()}, i), "a pickle") for i in (2, 3, 4, 5)},
    "text": (b"First Citizen:\nBefore we proceed any further, hear me speak.\n" * 3, "looks like text"),
    "utf8": ("Ärger über Öl — “naïve” café\n".encode() * 300, "looks like text"),
    "int32": (TOKENS.astype("<i4").tobytes(), "32-bit or 64-bit integers"),
    "int64": (TOKENS.astype("<i8").tobytes(), "32-bit or 64-bit integers"),
    "big-endian": ((TOKENS % 65).astype(">u2").tobytes(), "big-endian"),
    "safetensors": (struct.pack("<Q", 64) + b'{"a":' + b" " * 59 + bytes(8), "a safetensors file"),
    "one": (b"\1\0\1\0", "more tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("beside", [False, True])
def test_token_files_that_are_none(name, beside, tmp_path):
    content, message = REFUSED[name]
    path = tmp_path / ("val.bin" if beside else "a.bin")
    path.write_bytes(content[:2] if beside and name == "one" else content)
    tokens_file(tmp_path / "train.bin", TOKENS)
    with pytest.raises(InputError, match=message) as stop:
        load_corpus(tmp_path if beside else path)
    assert str(tmp_path if name == "one" and beside else path) in str(stop.value)
    assert "\n" not in str(stop.value)


@pytest.mark.parametrize(
    "first", [(0x0280, 0x127D), (0x0480, 0x9E95), (0x0480, 0x0095), (0x0580, 1), (0x8B1F, 1)]
)
def test_tokens_that_begin_like_another_format_are_tokens(first, tmp_path):
    """GPT-2's token 1152 is 0x0480, the first two bytes of a pickle."""
    path = tokens_file(tmp_path / "a.bin", [*first, *TOKENS, 50256])
    assert load_corpus(path).train[:2].tolist() == list(first)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"a", "more text"),
        ("text".encode("utf-16"), "bytes that are 0"),
        (b"a" * 10_000 + b"\0", "bytes that are 0"),
        (gzip.compress(b"text", mtime=0), "a gzip archive"),
        (pickle.dumps({"a": 1}), "a pickle"),
        (b"All work and no play makes Jack a dull boy.\n" * 1000, "repeats itself"),
    ],
)
def test_text_files_that_are_none(content, message, tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message) as stop:
        load_corpus(path)
    assert str(path) in str(stop.value)
    assert "\n" not in str(stop.value)


def test_paths_that_do_not_serve(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "only").mkdir()
    a, b = tokens_file(tmp_path / "a.bin", TOKENS), tokens_file(tmp_path / "b.bin", TOKENS)
    tokens_file(tmp_path / "only" / "val.bin", TOKENS)
    (tmp_path / "note.txt").write_bytes(prose(0, 9))
    os.mkfifo(tmp_path / "pipe")
    for paths, message in [
        (tmp_path / "absent", "absent: no such file or folder"),
        ([tmp_path / "note.txt", tmp_path / "absent"], "absent: no such file"),
        (tmp_path / "empty", "none of its 0 files is"),
        (tmp_path / "only", "train.bin: no such file, only a val.bin"),
        ([a, b], "token files alone"),
        ([tmp_path / "note.txt", a], "a.bin: expected token files alone"),
        (tmp_path / "pipe", "not a regular file"),
        ([], "at least one"),
    ]:
        with pytest.raises(InputError, match=message):
            load_corpus(paths)
    for wrong in (3, [3], {"a.txt"}):
        with pytest.raises(TypeError, match="a path or several"):
            load_corpus(wrong)


@pytest.mark.parametrize("name", ["a.txt", "a.bin"])
def test_files_that_cannot_be_read(name, tmp_path, monkeypatch):
    """Root can read everything, so the refusal is staged."""
    (tmp_path / name).write_bytes(b"text" * 100)

    def refuse(*args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(io, "open", refuse)
    monkeypatch.setattr(builtins, "open", refuse)
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(InputError, match=rf"{name}: cannot be read: Permission denied"):
        load_corpus(tmp_path / name)


def test_too_much_text(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "MOST", 1000)
    for i in range(3):
        (tmp_path / f"{i}.txt").write_bytes(prose(i, 2))  # 409 bytes each
    with pytest.raises(
        InputError, match=r"2\.txt: too much text: with it there are 1,2\d\d bytes, more than the 1,000"
    ):
        load_corpus(tmp_path)


@pytest.mark.parametrize("held_out", [0, 1, -0.1, 1.5, float("nan")])
def test_shares_that_are_none(held_out):
    with pytest.raises(InputError, match=r"held_out: expected a share between 0 and 1"):
        load_corpus(held_out=held_out)


@pytest.mark.parametrize("vocab", [0, -1, 65537, 2.5, True, 255])
def test_vocabularies_that_cannot_be(vocab):
    with pytest.raises(InputError, match="vocab: "):
        load_corpus(vocab=vocab)


def test_a_larger_vocabulary_for_text():
    assert load_corpus(vocab=320).vocab == 320


# Windows


def words(seed, step, count):
    """The first 64-bit words of SHAKE-128 of seed and step, byte by byte."""
    digest = hashlib.shake_128(f"{seed} {step}".encode()).digest(8 * count)
    return [
        sum(byte << 8 * place for place, byte in enumerate(digest[8 * i : 8 * i + 8])) for i in range(count)
    ]


@settings(max_examples=100, deadline=None)
@given(
    dtype=st.sampled_from(["u1", "<u2", ">u2"]),
    length=st.integers(2, 300),
    context=st.integers(1, 40),
    batch=st.integers(1, 9),
    step=st.integers(0, 2**40),
    seed=st.integers(0, 2**63),
)
def test_every_row_is_a_slice_at_a_hashed_place(dtype, length, context, batch, step, seed):
    tokens = np.random.default_rng(length).integers(0, 256 if dtype == "u1" else 2**16, length).astype(dtype)
    context = min(context, length - 1)
    rows = corpus(tokens).batch(step, batch=batch, context=context, seed=seed)
    starts = [word % (length - context) for word in words(seed, step, batch)]
    assert rows.dtype == torch.int64
    assert rows.tolist() == [tokens[s : s + context + 1].tolist() for s in starts]


def test_batches_are_those_of_other_machines():
    """Stored, so that no change of the drawing goes unnoticed: runs are resumed on it."""
    starts = corpus(np.arange(60_000, dtype=np.uint16)).batch(5, batch=4, context=1, seed=3)[:, 0].tolist()
    assert starts == GOLDEN


GOLDEN = [14259, 56119, 57281, 4562]


def test_batches_do_not_depend_on_one_another():
    numbers = corpus(np.arange(5000, dtype=np.uint16))
    draw = {step: numbers.batch(step, batch=6, context=9, seed=1) for step in range(20)}
    torch.manual_seed(7)
    np.random.seed(7)
    for step in reversed(range(20)):
        assert torch.equal(numbers.batch(step, batch=6, context=9, seed=1), draw[step])
        assert torch.equal(numbers.batch(step, batch=2, context=9, seed=1), draw[step][:2])
    before = torch.random.get_rng_state()
    numbers.batch(0, batch=6, context=9, seed=1)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_all_starts_are_equally_likely():
    """Chi-squared of 20,000 draws over 50 places, the first and the last among them; its 0.9999 quantile for 49 degrees is 94."""
    numbers = corpus(np.arange(59, dtype=np.uint16))
    starts = torch.cat([numbers.batch(step, batch=20, context=9, seed=0)[:, 0] for step in range(1000)])
    counts = np.bincount(starts.numpy(), minlength=50)
    assert len(counts) == 50
    assert ((counts - 400) ** 2 / 400).sum() < 94


def test_neighbouring_seeds_and_steps_are_independent():
    """No start recurs more often than among independent draws, and correlations are those of 10,000 pairs."""
    numbers = corpus(np.arange(60_001, dtype=np.uint16))
    draws = {
        (seed, step): numbers.batch(step, batch=10_000, context=1, seed=seed)[:, 0].numpy().astype(float)
        for seed, step in [(0, 0), (0, 1), (1, 0), (1, 1), (0, 10), (10, 0), (11, 1), (1, 11)]
    }
    assert np.abs(np.corrcoef(list(draws.values())) - np.eye(len(draws))).max() < 5 / 100


@settings(max_examples=100, deadline=None)
@given(length=st.integers(2, 400), context=st.integers(1, 50))
def test_every_held_out_token_is_predicted_once(length, context):
    context = min(context, length - 1)
    rows = corpus(np.arange(length, dtype=np.uint16)).validation(context=context)
    predicted = rows[:, 1:].flatten().tolist()
    assert predicted == list(range(1, 1 + len(predicted)))
    assert length - context <= 1 + len(predicted) <= length
    assert torch.equal(rows[:, :1] + torch.arange(context + 1), rows)
    assert rows.dtype == torch.int64


@pytest.mark.parametrize("most", [1, 2, 7, 99, 100, 1000])
def test_some_windows_are_spread_evenly(most):
    numbers = corpus(np.arange(1001, dtype=np.uint16))
    everything = numbers.validation(context=10)
    some = numbers.validation(context=10, most=most)
    assert len(everything) == 100
    assert len(some) == min(most, 100)
    starts = some[:, 0].tolist()
    assert set(starts) <= set(everything[:, 0].tolist())
    middles = [1000 * (i + 0.5) / len(some) for i in range(len(some))]
    assert max(abs(start + 5 - middle) for start, middle in zip(starts, middles, strict=True)) <= 10


def test_windows_that_do_not_fit():
    short = Corpus(np.arange(10, dtype=np.uint16), np.arange(5, dtype=np.uint16), 64, "mine", "")
    assert short.batch(0, batch=1, context=9, seed=0).tolist() == [list(range(10))]
    with pytest.raises(
        InputError, match=r"mine: context 10 needs windows of 11 tokens, the training part has 10"
    ):
        short.batch(0, batch=1, context=10, seed=0)
    assert short.validation(context=4).tolist() == [list(range(5))]
    with pytest.raises(
        InputError, match=r"mine: context 5 needs windows of 6 tokens, the held-out part has 5"
    ):
        short.validation(context=5)


@pytest.mark.parametrize("wrong", [0, -1, 2.0, True])
def test_counts_that_are_none(wrong):
    numbers = corpus(np.arange(10, dtype=np.uint16))
    for name, call in [
        ("batch", lambda: numbers.batch(0, batch=wrong, context=2, seed=0)),
        ("context", lambda: numbers.batch(0, batch=2, context=wrong, seed=0)),
        ("context", lambda: numbers.validation(context=wrong)),
        ("most", lambda: numbers.validation(context=2, most=wrong)),
    ]:
        with pytest.raises(InputError, match=f"{name}: expected an integer of at least 1, got {wrong}"):
            call()


def test_tokens_beyond_the_vocabulary_are_named_when_drawn():
    values = np.zeros(100, np.uint16)
    values[37] = 300
    numbers = corpus(values, vocab=300)
    message = r"numbers: token 37 of the {} part is 300, expected less than vocab, 300"
    with pytest.raises(InputError, match=message.format("held-out")):
        numbers.validation(context=10)
    with pytest.raises(InputError, match=message.format("training")):
        numbers.batch(0, batch=200, context=10, seed=0)
    assert corpus(values, vocab=301).validation(context=10).max() == 300


def test_what_is_drawn_is_a_copy():
    values = np.arange(100, dtype=np.uint16)
    numbers = corpus(values)
    numbers.batch(0, batch=2, context=10, seed=0).zero_()
    numbers.validation(context=10).zero_()
    assert values.tolist() == list(range(100))


# Fingerprints


def test_other_data_has_another_fingerprint(tmp_path):
    values = np.random.default_rng(0).integers(0, 1000, 5000)
    path = tokens_file(tmp_path / "a.bin", values)
    first = load_corpus(path)
    assert len(first.fingerprint) == 16
    assert load_corpus(str(path), vocab=2000).fingerprint == first.fingerprint
    changed = values.copy()
    changed[2500] += 1
    prints = {
        first.fingerprint,
        load_corpus(path, held_out=0.2).fingerprint,
        load_corpus(tokens_file(tmp_path / "b.bin", changed)).fingerprint,
        load_corpus(tokens_file(tmp_path / "c.bin", values[:-1])).fingerprint,
        load_corpus(tokens_file(tmp_path / "d.bin", values[::-1])).fingerprint,
        load_corpus().fingerprint,
    }
    assert len(prints) == 6


def test_a_long_file_is_sampled_from_its_first_byte_to_its_last(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "_WHOLE", 1999)
    monkeypatch.setattr(data, "_BLOCKS", 4)
    monkeypatch.setattr(data, "_BLOCK", 8)
    plain = np.arange(1000, dtype=np.uint16)

    def fingerprint(values):
        return load_corpus(tokens_file(tmp_path / "a.bin", values), vocab=2000).fingerprint

    def changed(place):
        values = plain.copy()
        values[place] += 1
        return fingerprint(values) != before

    # blocks of 4 tokens: the last starts at byte 1992, those between at a third and two thirds of it
    before = fingerprint(plain)
    sampled = [*range(4), *range(332, 336), *range(664, 668), *range(996, 1000)]
    assert [place for place in range(1000) if changed(place)] == sampled
