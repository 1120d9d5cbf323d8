"""Random ``starts`` of every kind, and steps towards smaller cases."""

import random

import numpy as np


def draw_starts(rng: random.Random, length: int) -> dict:
    """Return the description of ``starts`` for ``length`` positions."""
    kind = rng.choice(("none", "none", "padding", "packed", "window", "rows"))
    if kind == "window":
        return {"kind": kind, "width": rng.randint(1, max(1, length))}
    return {"kind": kind} if kind == "none" else {"kind": kind, "seed": rng.randrange(2**32)}


def starts_array(described: dict, batch: int, queries: int, earlier: int) -> np.ndarray | None:
    """Return the described ``starts`` as int64 ``[batch]`` or ``[batch, queries]``; None for none."""
    positions = earlier + np.arange(queries)
    if described["kind"] == "none":
        return None
    if described["kind"] == "window":
        rows = np.maximum(0, positions - described["width"] + 1)
        return np.broadcast_to(rows, (batch, queries)).copy()
    rng = np.random.default_rng(described["seed"])
    if described["kind"] == "padding":
        return rng.integers(0, earlier + queries + 1, size=batch)
    if described["kind"] == "packed":
        return np.stack([_packed(rng, positions) for _ in range(batch)])
    rows = rng.integers(0, positions[-1] + 2, size=(batch, queries))
    rows = np.minimum(np.sort(rows, axis=1), positions + 1)
    return np.maximum.accumulate(rows, axis=1)


def _packed(rng, positions):
    """Documents that begin at random positions, now and then after a few positions of padding."""
    length = positions[-1] + 1
    begins = np.flatnonzero(rng.random(length) < 0.25)
    padding = int(rng.integers(0, length)) if rng.random() < 0.3 else 0
    rows = np.array([max([0, *begins[begins <= t]]) for t in positions])
    rows = np.maximum(rows, padding)
    return np.minimum(rows, positions + 1)


def smaller_numbers(case: dict, least: dict):
    """Yield cases in which one number is its least value, or nearer to it."""
    for name, low in least.items():
        value = case[name]
        for candidate in dict.fromkeys((low, (low + value) // 2, value - 1)):
            if low <= candidate < value:
                yield case | {name: candidate}
