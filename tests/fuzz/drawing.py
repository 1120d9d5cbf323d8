"""Strategies that several parts share: seeds, rare switches, odd values, and ``starts`` of every kind."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

SEEDS = st.integers(0, 2**32 - 1)
ODD = (
    None, True, -1, 0, 1, 10**30, -(10**18), 0.5, 1e308, 1e-300, "", "1", "nonsense", "NaN", "\x00",
    "é🙂\u202e", "../../x", "x" * 3000, [], [[]], [None], [1, 2], ["a", "b"], {}, {"a": 1}, {"a": {}},
)  # fmt: skip
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
ODD_JSON = st.sampled_from(ODD) | st.recursive(
    SCALARS | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=4
)
"""Values that JSON can hold, mostly wrong ones."""


def once_in(times: int) -> SearchStrategy[bool]:
    return st.sampled_from([False] * (times - 1) + [True])


def drawn_from(*strategies: SearchStrategy) -> SearchStrategy:
    """Draw from one of the strategies, more often from one that is given several times."""
    return st.integers(0, len(strategies) - 1).flatmap(lambda i: strategies[i])


def record(**fields) -> SearchStrategy[dict]:
    """Draw a dict with these fields; a field that is no strategy is a constant."""
    return st.fixed_dictionaries(
        {name: x if isinstance(x, SearchStrategy) else st.just(x) for name, x in fields.items()}
    )


def weighted(**weights: int) -> SearchStrategy[str]:
    """Draw a name as often as its weight says; the first is the simplest."""
    return st.sampled_from([name for name, weight in weights.items() for _ in range(weight)])


STARTS = drawn_from(
    *[record(kind="none")] * 2,
    record(kind="window", width=st.integers(1, 9)),
    *(record(kind=kind, seed=SEEDS) for kind in ("padding", "packed", "rows")),
)
"""Descriptions of ``starts``, which ``starts_array`` reads."""


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
