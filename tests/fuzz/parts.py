"""All fuzzers by name, and how the time of a run is divided."""

from fuzz.commands import Commands
from fuzz.damage import Damage
from fuzz.decoding import Decoding
from fuzz.layers import Layers
from fuzz.operators import Operators, TritonOperators
from fuzz.serving import Serving

PARTS = {
    part.name: part for part in (Operators, TritonOperators, Layers, Decoding, Commands, Damage, Serving)
}
SHARES = {"operator": 42, "triton": 5, "layer": 5, "decoding": 12, "commands": 18, "damage": 12, "serving": 6}
"""Parts of the time; a run of some parts divides it among those."""
