"""Tokenizers by name. Every one of them ends documents with its ``eos_token``."""

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hypermlp.errors import UserError

END = "<|endoftext|>"


def build_tokenizer(name: str, documents: Iterable[str]) -> Any:
    """``name`` as in ``DataSettings.tokenizer``; ``documents`` are what "bpe:SIZE" is trained on."""
    if name == "bytes":
        return _wrapped(_byte_level(models.BPE(vocab=_byte_vocabulary(), merges=[])))
    if name.startswith("bpe:"):
        size = name.removeprefix("bpe:")
        if not size.isdigit() or int(size) < 257:
            raise UserError(
                f"data.tokenizer is {name!r}; it must be bpe:SIZE with at least 257: the bytes and the end of text"
            )
        tokenizer = _byte_level(models.BPE())
        trainer = trainers.BpeTrainer(
            vocab_size=int(size),
            special_tokens=[END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(documents, trainer)
        return _wrapped(tokenizer)
    if name == "gpt2":
        return _gpt2()
    try:
        loaded: Any = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise UserError(f"data.tokenizer is {name!r}, which cannot be loaded: {error}") from error
    if loaded.eos_token_id is None:
        raise UserError(
            f"data.tokenizer is {name!r}, which has no eos_token; documents could not be told apart"
        )
    return loaded


def _byte_vocabulary() -> dict[str, int]:
    """Ids 0 to 255 are the bytes themselves, written in the characters that byte-level BPE has for them."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in visible]
    characters = {b: chr(b) for b in visible} | {b: chr(256 + i) for i, b in enumerate(hidden)}
    return {characters[b]: b for b in range(256)}


def _byte_level(model: Any) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=END)


def _gpt2() -> PreTrainedTokenizerFast:
    """GPT-2's, from tiktoken, which downloads it once or finds it in TIKTOKEN_CACHE_DIR."""
    try:
        import tiktoken

        ranks: dict[bytes, int] = tiktoken.get_encoding("gpt2")._mergeable_ranks
    except ImportError as error:
        raise UserError(
            "data.tokenizer is 'gpt2', which needs the package tiktoken: pip install tiktoken"
        ) from error
    except Exception as error:  # whatever its download raises
        raise UserError(f"data.tokenizer is 'gpt2', which tiktoken could not load: {error}") from error
    return from_ranks(ranks)


def from_ranks(ranks: dict[bytes, int]) -> PreTrainedTokenizerFast:
    """Byte-level BPE from the ranks of its tokens: a token's merge is the last pair that its own parts would be merged from."""
    characters = {b: c for c, b in _byte_vocabulary().items()}

    def written(token: bytes) -> str:
        return "".join(characters[b] for b in token)

    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            left, right = _parts(ranks, token, rank)
            merges.append((written(left), written(right)))
    vocabulary = {written(token): rank for token, rank in ranks.items()}
    return _wrapped(_byte_level(models.BPE(vocab=vocabulary, merges=merges)))


def _parts(ranks: dict[bytes, int], token: bytes, rank: int) -> tuple[bytes, bytes]:
    parts = [bytes([b]) for b in token]
    while len(parts) > 2:
        candidates = [(ranks.get(a + b, rank), i) for i, (a, b) in enumerate(itertools.pairwise(parts))]
        best, place = min(candidates)
        if best >= rank:
            raise UserError(f"token {token!r} of rank {rank} is not made of two earlier ones")
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts[0], parts[1]


def save_tokenizer(tokenizer: Any, folder: str | Path) -> None:
    try:
        tokenizer.save_pretrained(str(folder))
    except Exception as error:  # the library behind it raises nothing more precise
        raise OSError(f"the tokenizer could not be written to {folder}: {error}") from error
