"""The labels of the paper's design study: ``Base-Features-Rank-Mix``, such as ``G-cg-q-12o``.

base      S softmax, R relu of the normalised scores, G glu (softplus times relu); the only required part
features  any of p RoPE, c convolution on the inputs of keys and values, g feature gates, in this order
rank      q divides the width of queries and keys by ``compression`` (4), v that of values and head outputs;
          a side that is not named has the full width ``hidden_size``
mix       1 mixes before the activation, 2 after it, 12 both. A following o puts the slots in lag order
          (slot 0 is the newest position); without it the layout is "forward" (slot 0 is the oldest)
!         the last character. q or v (not both) shrinks the projections, so that gates and mixes fit into the
          parameters of attention; ! marks a label without q or v that has more. It changes nothing in the
          layer. A mix without q or v needs it; for the feature g alone it is optional

An empty part is left out together with its hyphen: "S" is plain softmax attention, "S-p" has RoPE, "R-c-q"
has no mix, "R-12o!" has no features and full width. "G-cg-q-12o" is HyperGLU: glu (G), convolution (c) and
gates (g), queries and keys at a quarter of the width (q), both mixes (12), in lag order (o).

``PAPER_ROWS`` maps each of the 33 labels of the paper's Table 1 to its numbers (``PaperRow``).
``PROBABLE_READING`` maps two printed labels, whose scores do not fit them, to those that the paper probably
ran. ``from_label`` always builds the label as it is written. ``PAPER_NAMES`` maps the paper's two names,
which ``Label.parse`` accepts too, to their labels.
"""

import re
from dataclasses import dataclass
from typing import Any, Self

from hypermlp.errors import UserError
from hypermlp.paper.variants import PAPER_ROWS, PROBABLE_READING, PaperRow

__all__ = ["PAPER_NAMES", "PAPER_ROWS", "PROBABLE_READING", "Label", "PaperRow"]

PAPER_NAMES = {"HyperGLU": "G-cg-q-12o", "HyperMLP": "R-cg-q-12o"}
BASES = "SRG"
FEATURES = "pcg"
RANKS = "qv"
MIXES = ("12", "1", "2")
GRAMMAR = (
    "S|R|G, then optionally -[p][c][g], -q or -v, -1 or -2 or -12 each with an optional o, and a final !; "
    "for example 'G-cg-q-12o'"
)


@dataclass(frozen=True)
class Label:
    """One variant of the design study in its parts. ``str(label)`` is its text; see hypermlp.label.

    Attributes:
        base: "S", "R" or "G".
        features: letters of "pcg", in this order; empty for none.
        rank: "q", "v" or empty.
        mix: "1", "2", "12" or empty.
        lag: whether the slots are in lag order (the letter o); needs a mix.
        full_width: whether the label ends in "!"; then it has no rank, and a mix or the feature g.

    Raises:
        UserError: if a part is not allowed, or parts contradict each other; a mix needs a rank or "!".

    Example::

        from hypermlp.label import Label

        label = Label.parse("G-cg-q-12o")
        assert label == Label("G", features="cg", rank="q", mix="12", lag=True)
        assert str(label) == "G-cg-q-12o"
    """

    base: str
    features: str = ""
    rank: str = ""
    mix: str = ""
    lag: bool = False
    full_width: bool = False

    def __post_init__(self) -> None:
        text = str(self)
        if self.base not in tuple(BASES):
            raise _error(text, self.base, f"one of {', '.join(BASES)} as the base")
        if not re.fullmatch("p?c?g?", self.features):
            wrong = next((letter for letter in self.features if letter not in FEATURES), self.features)
            raise _error(text, wrong, "features p, c, g, each at most once, in this order")
        if self.rank not in ("", *RANKS):
            raise _error(text, self.rank, "q or v as the rank")
        if self.mix not in ("", *MIXES):
            raise _error(text, self.mix, "1, 2 or 12 as the mix")
        if self.lag and not self.mix:
            raise _error(text, "o", "o after 1, 2 or 12: it is the layout of a mix")
        if self.full_width and (self.rank or not (self.mix or "g" in self.features)):
            raise _error(
                text,
                "!",
                "! only without q or v, on a label with gates or a mix: it marks parameters beyond "
                "attention's",
            )
        if self.mix and not (self.rank or self.full_width):
            raise _error(text, self.mix, f"a mix paid for by q or v, or marked with !: {text}!")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the label that ``text`` spells, such as "R-12o!", or the label of "HyperGLU" or "HyperMLP".

        Raises:
            UserError: if the text is not a label; the message has the grammar.
        """
        if not isinstance(text, str):
            raise UserError(f"a label must be a string, got {text!r}; {GRAMMAR}")
        text = PAPER_NAMES.get(text, text)
        base, *parts = text.removesuffix("!").split("-")
        if base not in tuple(BASES):
            names = " or ".join(PAPER_NAMES)
            raise _error(text, base, f"one of {', '.join(BASES)} as the base, or the name {names}")
        found: dict[str, Any] = {"base": base, "full_width": text.endswith("!")}
        kinds = {"features": FEATURES, "rank": RANKS, "mix": "12o"}
        expected = list(kinds)
        for part in parts:
            name = next((name for name in expected if part and part[0] in kinds[name]), None)
            if name is None:
                raise _error(text, part[:1], "")
            wrong = next((letter for letter in part if letter not in kinds[name]), None)
            if wrong:
                raise _error(text, wrong, f"only {', '.join(kinds[name])} in {part!r}")
            found[name] = part
            expected = expected[expected.index(name) + 1 :]
        mix = found.get("mix", "")
        found |= {"mix": mix.removesuffix("o"), "lag": mix.endswith("o")}
        return cls(**found)

    def __str__(self) -> str:
        mix = self.mix + "o" * self.lag
        return (
            "-".join(part for part in (self.base, self.features, self.rank, mix) if part)
            + "!" * self.full_width
        )


def _error(text: str, wrong: str, allowed: str) -> UserError:
    return UserError(
        f"label {text!r}: {wrong!r} is not allowed there; allowed: "
        f"{allowed + '. Grammar: ' if allowed else ''}{GRAMMAR}"
    )
