"""Settings of a task, checked for what the task needs."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hypermlp.validation import NOT_NEGATIVE, POSITIVE, check_fields, is_integer, is_number, require, whole

IGNORED = -100  # target of a position that is not scored


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a task. Token ids are keys, then values (or content), then noise, then special tokens."""

    num_train: int = field(default=12_800, metadata=NOT_NEGATIVE)
    """Training examples."""
    num_test: int = field(default=1_280, metadata=NOT_NEGATIVE)
    """Test examples."""

    vocab_size: int
    """Number of tokens, including noise and special tokens."""
    noise_vocab_size: int = field(default=0, metadata=NOT_NEGATIVE)
    """Number of noise tokens."""
    specials: int = 0
    """Special tokens (padding, blank, instruction). The task sets it; users cannot."""

    seq_len: int = field(metadata=whole(4))
    """Length of a sequence; recall tasks cut it into input and target."""
    frac_noise: float = 0.0
    """Share of slots that hold noise instead of a key and its value."""
    key_motif: int = field(default=1, metadata=POSITIVE)
    """Tokens of the longest key (fuzzy recall)."""
    value_motif: int = field(default=1, metadata=POSITIVE)
    """Tokens of the longest value (fuzzy recall)."""
    copied: int = field(default=0, metadata=NOT_NEGATIVE)
    """Tokens to copy (selective copying)."""

    def __post_init__(self) -> None:
        check_fields(self)
        least = self.noise_vocab_size + self.specials + 2 * max(self.key_motif, self.value_motif)
        parts = f"{self.specials} special, {self.noise_vocab_size} for noise, and some for content"
        require(
            "vocab_size",
            self.vocab_size,
            is_integer(self.vocab_size) and self.vocab_size >= least,
            f"an integer, {least} or more: {parts}",
        )
        noise = self.frac_noise
        allowed = is_number(noise) and 0 <= noise < 1 and (noise == 0 or self.noise_vocab_size > 0)
        require("frac_noise", noise, allowed, "0 or more, below 1, and 0 without noise_vocab_size")

    @property
    def content(self) -> NDArray[np.int64]:
        """All tokens that are neither noise nor special."""
        return np.arange(self.vocab_size - self.noise_vocab_size - self.specials)

    @property
    def keys(self) -> NDArray[np.int64]:
        return self.content[: len(self.content) // 2]

    @property
    def values(self) -> NDArray[np.int64]:
        return self.content[len(self.content) // 2 :]

    @property
    def noise(self) -> NDArray[np.int64]:
        return len(self.content) + np.arange(self.noise_vocab_size)

    @property
    def pad(self) -> int:
        """Padding (fuzzy recall); in other tasks this token is an instruction."""
        return self.vocab_size - 1

    @property
    def blank(self) -> int:
        return self.vocab_size - 2


def check_seed(seed: Any) -> None:
    """Raise unless NumPy's generators, the legacy one included, accept ``seed``."""
    require("seed", seed, is_integer(seed) and 0 <= seed < 2**32, "an integer, 0 or more and below 2**32")


def check_pairs(settings: Settings) -> None:
    length = settings.seq_len
    require("seq_len", length, length % 2 == 0, "even, because each slot holds a key and its value")


def check_motifs(settings: Settings) -> None:
    length, least = settings.seq_len, 3 * (settings.key_motif + settings.value_motif)
    require("seq_len", length, length > least, f"above {least} to hold the probe twice and other pairs")


def check_copying(settings: Settings) -> None:
    count, most = settings.copied, (settings.seq_len - 1) // 2
    require("copied", count, 0 < count <= most, f"1 to {most}, so that seq_len holds the tokens twice")
