"""From a name to a layer."""

from __future__ import annotations

from typing import Any

from hypermlp.layers.mixer import Mixer


def build_mixer(name: str, *, hidden_size: int, max_length: int, **settings: Any) -> Mixer:
    """The mixer of a label, such as "G-cg-q-12o" or "S-p"."""
    return Mixer.from_label(name, hidden_size=hidden_size, max_length=max_length, **settings)
