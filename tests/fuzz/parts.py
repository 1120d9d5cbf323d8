"""All fuzzers by name, and how the time of a run is divided."""

from fuzz.operators import Operators, TritonOperators

PARTS = {part.name: part for part in (Operators, TritonOperators)}
SHARES = {"operator": 40, "triton": 6}
"""Parts of the time; a run of some parts divides it among those."""
