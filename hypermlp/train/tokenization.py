"""Tokenizers by name. Every tokenizer has an ``eos_token``, which ends each document."""

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from hypermlp.errors import UserError
from hypermlp.validation import near_miss

END = "<|endoftext|>"
LEAST_SIZE = 257  # the 256 bytes and the end of text


def build_tokenizer(name: str, documents: Iterable[str]) -> Any:
    """Return the tokenizer that ``DataSettings.tokenizer`` names; "bpe:SIZE" is trained on ``documents``."""
    if name == "bytes":
        return from_ranks({bytes([byte]): byte for byte in range(256)})
    if name.startswith("bpe:"):
        return _trained(name, documents)
    if name == "gpt2":
        return _gpt2()
    likely = near_miss(name, ("bytes", "gpt2")) or (" (did you mean 'bpe:SIZE'?)" if name == "bpe" else "")
    if likely and not Path(name).exists():  # the hub would be asked for it, again and again
        raise UserError(
            f"data.tokenizer is {name!r}{likely}; allowed: bytes, bpe:SIZE, gpt2, a folder, or a name on the "
            "hub"
        )
    try:
        loaded: Any = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise UserError(f"data.tokenizer is {name!r}, which cannot be loaded: {error}") from error
    if loaded.eos_token_id is None:
        raise UserError(
            f"data.tokenizer is {name!r}, which has no eos_token to separate documents; set one and save it"
        )
    return loaded


def _byte_level(model: Any, train: Any = None) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer around a BPE model, after ``train(tokenizer)`` if given."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if train is not None:
        train(tokenizer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=END)


def _trained(name: str, documents: Iterable[str]) -> PreTrainedTokenizerFast:
    size = name.removeprefix("bpe:")
    if not size.isdigit() or int(size) < LEAST_SIZE:
        raise UserError(
            f"data.tokenizer is {name!r}; it must be bpe:SIZE with a SIZE of at least {LEAST_SIZE}: "
            "the 256 bytes and the end of text"
        )
    trainer = trainers.BpeTrainer(
        vocab_size=int(size),
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    return _byte_level(models.BPE(), lambda tokenizer: tokenizer.train_from_iterator(documents, trainer))


def _gpt2() -> PreTrainedTokenizerFast:
    """Return GPT-2's tokenizer from tiktoken, which downloads it or reads it from TIKTOKEN_CACHE_DIR."""
    try:
        import tiktoken

        return from_ranks(tiktoken.get_encoding("gpt2")._mergeable_ranks)
    except ImportError as error:
        raise UserError("data.tokenizer is 'gpt2', which needs a package: pip install tiktoken") from error
    except Exception as error:  # whatever the download raises
        raise UserError(f"data.tokenizer is 'gpt2', which tiktoken could not load: {error}") from error


def from_ranks(ranks: dict[bytes, int]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer, given the rank of every token.

    The merge that makes a token joins the two parts into which the merges of lower rank turn its bytes.
    """
    characters = bytes_to_unicode()

    def written(token: bytes) -> str:
        return "".join(characters[byte] for byte in token)

    by_rank = sorted(ranks.items(), key=lambda item: item[1])
    pairs = (_parts(ranks, token, rank) for token, rank in by_rank if len(token) > 1)
    merges = [(written(left), written(right)) for left, right in pairs]
    vocabulary = {written(token): rank for token, rank in ranks.items()}
    return _byte_level(models.BPE(vocab=vocabulary, merges=merges))


def _parts(ranks: dict[bytes, int], token: bytes, rank: int) -> list[bytes]:
    """Return the two parts that are merged to ``token``: apply all merges of lower rank to its bytes."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        best, place = min((ranks.get(a + b, rank), i) for i, (a, b) in enumerate(itertools.pairwise(parts)))
        if best >= rank:
            raise UserError(f"token {token!r} of rank {rank} does not consist of two tokens of lower rank")
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts


def save_tokenizer(tokenizer: Any, folder: str | Path) -> None:
    """Save a tokenizer; raise OSError if it cannot be written."""
    try:
        tokenizer.save_pretrained(str(folder))
    except Exception as error:  # the library raises a plain Exception
        raise OSError(f"the tokenizer could not be written to {folder}: {error}") from error
