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
    "commands": 16, "damage": 11, "kills": 4, "serving": 5, "decoding": 12, "triton": 4, "layer": 2,
    "operator": 46,
}  # fmt: skip
"""Parts of the time; a run of some parts divides it among those."""
ENOUGH = {"commands": 2_100, "damage": 550, "serving": 2_200, "decoding": 5_200, "layer": 3_000}
"""Cases after which a part leaves the rest of its time to the next ones, in a run of up to two hours."""


def enough(part: str, minutes: float, lanes: int) -> int | None:
    """Return the number of cases after which a part ends on one lane."""
    return int(ENOUGH[part] * max(1.0, minutes / 120) / lanes) + 1 if part in ENOUGH else None
