"""Prepared data is reproducible and verified, and is cut into sequences with document ids."""

import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from hypermlp.errors import UserError
from hypermlp.train.corpus import documents, stdlib_files
from hypermlp.train.data import IGNORED, Sequences, prepare
from hypermlp.train.recipe import DataSettings
from hypermlp.train.tokenization import build_tokenizer, from_ranks


@pytest.fixture
def settings(tmp_path, corpus):
    return DataSettings(source=str(corpus), context=32, cache=str(tmp_path / "prepared"), validation=0.1)


def text_of(prepared, split):
    return prepared.tokenizer.decode(prepared.tokens[split].astype(int).tolist())


def test_every_document_is_there_once_and_ends(settings, corpus):
    prepared = prepare(settings)
    whole = text_of(prepared, "train") + text_of(prepared, "validation")
    for path in corpus.iterdir():
        assert whole.count(path.read_text() + "<|endoftext|>") == 1
    counts = prepared.description["documents"]
    assert counts["train"] + counts["validation"] == 40
    assert counts["validation"] > 0


def test_from_the_cache_unless_it_was_touched_or_the_source_changed(settings, corpus):
    first = prepare(settings)
    assert prepare(settings).folder == first.folder
    (corpus / "new.txt").write_text("one more")
    assert prepare(settings).folder != first.folder
    (corpus / "new.txt").unlink()
    tokens = first.folder / "train.bin"
    content = bytearray(tokens.read_bytes())
    content[5] ^= 1
    tokens.write_bytes(content)
    with pytest.raises(ValueError, match=r"train.bin is not what was prepared: its checksum differs; remove"):
        prepare(settings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "object"}, "its checksum differs"),
        ({"dtype": "object", "seal": None}, "dtype is 'object', allowed: uint16, uint32"),
        ({"dtype": "uint32", "seal": None}, r"train.bin has \d+ bytes, not \d+ tokens of uint32"),
        ({"sha256": {}, "seal": None}, "it has no checksum of train-begins.npy, train.bin, validation-"),
        ({"tokens": 3, "seal": None}, "it is not a description of prepared data"),
    ],
    ids=str,
)
def test_a_damaged_description_is_refused(settings, change, message):
    folder = prepare(settings).folder
    content = json.loads((folder / "prepared.json").read_text())
    (folder / "prepared.json").write_text(json.dumps(content | change))
    with pytest.raises(
        UserError, match=f"prepared.json is damaged: {message}.*; remove .* and prepare again"
    ):
        prepare(settings)


def test_data_of_an_earlier_version_has_no_seal(settings):
    first = prepare(settings)
    content = json.loads((first.folder / "prepared.json").read_text())
    del content["seal"]
    (first.folder / "prepared.json").write_text(json.dumps(content))
    assert prepare(settings).digest == first.digest


def test_a_home_folder_is_found_and_skipped_files_are_counted(
    settings, corpus, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("a.pdf", "b.pdf", "notes"):
        (corpus / name).write_text("x")
    settings.source = "~/corpus"
    prepared = prepare(settings)
    assert prepared.description["documents"]["train"] > 30
    assert "not read: 3 files (2 of .pdf, 1 of no suffix); read are .txt" in capsys.readouterr().out


def test_text_that_is_not_utf8_and_a_small_validation_split_are_named(tmp_path, capsys):
    for name in ("good", "bad"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "first.txt").write_text("word " * 3000)
        (tmp_path / name / "second.txt").write_bytes(
            b"caf\xe9, na\xefve" if name == "bad" else b"word " * 3000
        )
        prepare(DataSettings(source=str(tmp_path / name), cache=str(tmp_path / "cache"), context=8))
    good, bad = capsys.readouterr().out.split(f"prepared {tmp_path / 'bad'}")
    assert "not UTF-8" not in good
    assert "held out" not in good
    assert f"not UTF-8: 2 characters in 1 files, most of them in {tmp_path / 'bad' / 'second.txt'}; " in bad
    assert "tokens are held out, so validation losses are rough; data.validation is 0.01" in bad


def test_nothing_half_written_stays(settings, monkeypatch, tmp_path):
    monkeypatch.setattr(
        "hypermlp.train.data.save_tokenizer", lambda *_: (_ for _ in ()).throw(OSError("disk full"))
    )
    with pytest.raises(OSError, match="disk full"):
        prepare(settings)
    assert not [path for path in (tmp_path / "prepared").iterdir() if path.is_dir()]


def test_jsonl_and_parquet_and_text_give_the_same(tmp_path):
    texts = ["first\ntext", "second ünïcode", "third"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": text, "id": 1}) + "\n" for text in texts))
    pyarrow.parquet.write_table(pyarrow.table({"body": texts}), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
        assert list(documents(DataSettings(source=str(tmp_path / name), text_field="body"))) == texts
        with pytest.raises(ValueError, match="data.text_field is 'text', but a record .* has 'body'"):
            list(documents(DataSettings(source=str(tmp_path / name))))


@pytest.mark.parametrize("streaming", [False, True])
def test_a_dataset_gives_the_same_streamed_or_not(tmp_path, monkeypatch, streaming):
    """A local folder stands for a dataset of the hub."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    texts = [f"text {i} of several" for i in range(30)]
    (tmp_path / "set").mkdir()
    (tmp_path / "plain").mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"content": texts}), tmp_path / "set" / "train-0.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"content": texts}), tmp_path / "plain" / "train-0.parquet")
    shared = {"text_field": "content", "context": 8, "validation": 0.2, "cache": str(tmp_path / "prepared")}
    ours = prepare(DataSettings(source=f"hub:{tmp_path / 'set'}", streaming=streaming, **shared))
    plain = prepare(DataSettings(source=str(tmp_path / "plain"), **shared))
    for split in ("train", "validation"):
        assert np.array_equal(ours.tokens[split], plain.tokens[split])
        assert np.array_equal(ours.begins[split], plain.begins[split])


def test_an_unknown_split_of_a_dataset_is_a_mistake_of_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "set").mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a text"]}), tmp_path / "set" / "train-0.parquet")
    with pytest.raises(UserError, match="data.split 'nonsense'"):
        list(documents(DataSettings(source=f"hub:{tmp_path / 'set'}", split="nonsense")))


def test_sources_that_are_not_there(tmp_path):
    with pytest.raises(
        ValueError, match="does not exist; allowed: 'stdlib', a file, a folder, or 'hub:NAME'"
    ):
        list(documents(DataSettings(source=str(tmp_path / "nowhere"))))
    (tmp_path / "x.bin").write_bytes(b"1")
    with pytest.raises(ValueError, match="allowed are files of .txt"):
        list(documents(DataSettings(source=str(tmp_path / "x.bin"))))


def test_the_standard_library_and_a_limit():
    assert len(stdlib_files()) > 300
    texts = list(documents(DataSettings(limit=10_000)))
    assert sum(map(len, texts)) == 10_000


def test_sequences_cover_an_epoch_once_and_are_a_function_of_their_index(settings):
    prepared = prepare(settings)
    sequences = Sequences(prepared, "train", settings, count=10_000, seed=3)
    epoch = sequences.per_epoch
    firsts = [sequences.first_token(i) for i in range(2 * epoch)]
    assert sorted(firsts[:epoch]) == sorted(firsts[epoch:]) == [32 * i for i in range(epoch)]
    assert firsts[:epoch] != firsts[epoch:]
    again = Sequences(prepared, "train", settings, count=10_000, seed=3)
    # The index alone determines a sequence, not the ones that were read before.
    assert torch.equal(again[epoch + 3]["input_ids"], sequences[epoch + 3]["input_ids"])
    assert Sequences(prepared, "train", settings, count=9, seed=4).first_token(0) != firsts[0]


def test_targets_are_the_next_tokens_and_stop_at_the_end_of_a_document(settings):
    prepared = prepare(settings)
    tokens, begins = prepared.tokens["train"], set(prepared.begins["train"].tolist())
    sequences = Sequences(prepared, "train", settings, count=100, seed=3)
    for index in range(sequences.per_epoch):
        item, first = sequences[index], sequences.first_token(index)
        assert torch.equal(
            item["input_ids"], torch.tensor(np.array(tokens[first : first + 32], dtype=np.int64))
        )
        for place in range(32):
            position = first + place + 1
            expected = IGNORED if position in begins else int(tokens[position])
            assert item["shift_labels"][place] == expected
        changes = (item["document_ids"].diff() != 0).nonzero().flatten() + first + 1
        assert set(changes.tolist()) == {b for b in begins if first < b < first + 32}


def test_a_stream_has_no_documents_and_random_sequences_begin_anywhere(settings):
    settings.packing, settings.order = "stream", "random"
    prepared = prepare(settings)
    sequences = Sequences(prepared, "train", settings, count=1000, seed=3)
    assert set(sequences[0]) == {"input_ids", "labels", "shift_labels"}
    firsts = [sequences.first_token(i) for i in range(1000)]
    assert len({first % 32 for first in firsts}) == 32
    assert max(firsts) <= len(prepared.tokens["train"]) - 33
    settings.context = 10**6
    with pytest.raises(ValueError, match="make no sequence"):
        Sequences(prepared, "train", settings, count=1, seed=0)


def test_byte_tokens_are_bytes():
    tokenizer = build_tokenizer("bytes", [])
    text = "naïve\t\n\x00 ∑ x"
    assert tokenizer(text).input_ids == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert (tokenizer.eos_token_id, len(tokenizer)) == (256, 257)


@pytest.mark.parametrize(("name", "likely"), [("bpe", "bpe:SIZE"), ("byte", "bytes"), ("gpt-2", "gpt2")])
def test_a_misspelled_tokenizer_is_refused_without_asking_the_hub(name, likely):
    with pytest.raises(UserError, match=f"is '{name}' .did you mean '{likely}'..; allowed: bytes, bpe:SIZE"):
        build_tokenizer(name, [])


def test_trained_and_named_tokenizers(corpus, tmp_path):
    texts = [path.read_text() for path in sorted(corpus.iterdir())]
    trained = build_tokenizer("bpe:300", texts)
    assert len(trained) == 300
    assert trained.decode(trained(texts[3]).input_ids) == texts[3]
    assert len(trained(texts[3]).input_ids) < len(texts[3].encode())
    trained.save_pretrained(tmp_path / "tokenizer")
    assert build_tokenizer(str(tmp_path / "tokenizer"), [])(texts[5]).input_ids == trained(texts[5]).input_ids
    for name, message in (
        ("bpe:12", "at least 257"),
        ("bpe:many", "at least 257"),
        (str(tmp_path / "none"), "cannot be loaded"),
    ):
        with pytest.raises(ValueError, match=message):
            build_tokenizer(name, texts)


def test_merges_are_recovered_from_ranks(corpus):
    """The tokenizer built from the ranks that tiktoken provides splits texts like the original."""
    texts = [path.read_text() for path in sorted(corpus.iterdir())]
    original = build_tokenizer("bpe:320", texts)
    to_byte = {
        c: b for b, c in ((b, build_tokenizer("bytes", []).convert_ids_to_tokens(b)) for b in range(256))
    }
    pieces = {token: i for token, i in original.get_vocab().items() if token != "<|endoftext|>"}
    ranks = {
        bytes(to_byte[c] for c in token): rank
        for rank, token in enumerate(sorted(pieces, key=pieces.__getitem__))
    }
    again = from_ranks(ranks)
    for text in texts[:5]:
        assert again.convert_ids_to_tokens(again(text).input_ids) == original.convert_ids_to_tokens(
            original(text).input_ids
        )


@pytest.mark.parametrize("share", [0.01, 0.3, 0.999999])
def test_the_end_of_a_single_document_is_held_out(tmp_path, share):
    """Also if the hash of its text would hold out all of it."""
    text = "".join(f"line {i}\n" for i in range(200))
    (tmp_path / "one.txt").write_text(text)
    data = DataSettings(
        source=str(tmp_path / "one.txt"), context=8, cache=str(tmp_path / "prepared"), validation=share
    )
    prepared = prepare(data)
    count, total = len(prepared.tokens["validation"]), len(text) + 1
    assert count == min(round(max(share, 0.1) * total), total - 1)
    assert (text_of(prepared, "train") + text_of(prepared, "validation"))[: len(text)] == text


def test_a_source_without_text_is_refused(tmp_path):
    (tmp_path / "one.txt").write_text(" \n")
    data = DataSettings(source=str(tmp_path / "one.txt"), context=8, cache=str(tmp_path / "prepared"))
    with pytest.raises(UserError, match="has no text; name files that are not empty"):
        prepare(data)
