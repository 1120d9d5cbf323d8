"""One setting of a task, checked for what the task needs."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hypermlp.config import require

IGNORED = -100  # a target that counts for nothing


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Token ids: keys, values (or content), noise, and special ones last."""

    vocab_size: int
    """Tokens, noise and special ones included."""
    seq_len: int
    """Length of a sequence; recall tasks cut it into input and target."""
    num_train: int = 12_800
    """Training examples."""
    num_test: int = 1_280
    """Test examples."""
    frac_noise: float = 0.0
    """Share of slots that hold noise instead of a key and its value."""
    noise_vocab_size: int = 0
    """Tokens that only ever are noise."""
    key_motif: int = 1
    """Tokens of the longest key (fuzzy recall)."""
    value_motif: int = 1
    """Tokens of the longest value (fuzzy recall)."""
    copied: int = 0
    """Tokens to copy (selective copying)."""
    specials: int = 0
    """Tokens with a meaning of their own: padding, blank, a sign. The task's, not the user's."""

    def __post_init__(self) -> None:
        for name in ("num_train", "num_test", "noise_vocab_size", "copied"):
            require(
                name,
                getattr(self, name),
                whole(getattr(self, name)) and getattr(self, name) >= 0,
                "a whole number, 0 or more",
            )
        for name in ("key_motif", "value_motif"):
            require(
                name,
                getattr(self, name),
                whole(getattr(self, name)) and getattr(self, name) >= 1,
                "a whole number, 1 or more",
            )
        least = self.noise_vocab_size + self.specials + 2 * max(self.key_motif, self.value_motif)
        needs = f"a whole number, {least} or more: {self.specials} special, {self.noise_vocab_size} for noise, and some for content"
        require("vocab_size", self.vocab_size, whole(self.vocab_size) and self.vocab_size >= least, needs)
        noisy = (
            isinstance(self.frac_noise, int | float)
            and 0 <= self.frac_noise < 1
            and (self.frac_noise == 0 or self.noise_vocab_size > 0)
        )
        require("frac_noise", self.frac_noise, noisy, "0 or more, below 1, and 0 without noise_vocab_size")
        require(
            "seq_len", self.seq_len, whole(self.seq_len) and self.seq_len >= 4, "a whole number, 4 or more"
        )

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
        return self.vocab_size - 1

    @property
    def blank(self) -> int:
        return self.vocab_size - 2


def whole(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def check_pairs(settings: Settings) -> None:
    require("seq_len", settings.seq_len, settings.seq_len % 2 == 0, "even: a key and its value in each slot")


def check_motifs(settings: Settings) -> None:
    longest = settings.key_motif + settings.value_motif
    require(
        "seq_len",
        settings.seq_len,
        settings.seq_len > 3 * longest,
        f"above {3 * longest}: the probe twice, and something between",
    )


def check_copying(settings: Settings) -> None:
    count = settings.copied
    require(
        "copied",
        count,
        0 < count <= (settings.seq_len - 1) // 2,
        f"1 to {(settings.seq_len - 1) // 2}: twice that fits seq_len",
    )
