"""All fuzzers by name, and how the time of a run is divided."""

from fuzz.commands import Commands
from fuzz.damage import Damage
from fuzz.decoding import Decoding
from fuzz.kills import Kills
from fuzz.layers import Layers
from fuzz.operators import Operators, TritonOperators
from fuzz.serving import Serving

PARTS = {
    part.name: part
    for part in (Commands, Damage, Kills, Serving, Decoding, TritonOperators, Layers, Operators)
}
SHARES = {
    "commands": 20, "damage": 9, "kills": 5, "serving": 7, "decoding": 12, "triton": 5, "layer": 4,
    "operator": 38,
}  # fmt: skip
"""Parts of the time; a run of some parts divides it among those."""
ENOUGH = {"commands": 2_100, "damage": 750, "serving": 2_500, "decoding": 6_000, "layer": 6_000}
"""Cases after which a part leaves the rest of its time to the next ones, in a run of up to two hours."""


def enough(part: str, minutes: float, lanes: int) -> int | None:
    """Return the number of cases after which a part ends on one lane."""
    return int(ENOUGH[part] * max(1.0, minutes / 120) / lanes) + 1 if part in ENOUGH else None
