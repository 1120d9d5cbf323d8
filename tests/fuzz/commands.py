"""Every command with wrong values: status 2 and one line, never a traceback, a hang or silent success.

A value is either known to be invalid (the command must refuse it) or odd (the command may run or refuse).
Which options take numbers or choices comes from the commands' own declarations, and the keys of recipes from
theirs.
"""

import dataclasses
import inspect
import json
from collections import Counter

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from fuzz import isolated
from fuzz.core import Case, Finding
from fuzz.drawing import ODD_JSON, drawn_from, record
from fuzz.fixtures import CommandPart, Fixtures, command_problem
from hypermlp.cli import COMMANDS, implementation
from hypermlp.mad.settings import Settings
from hypermlp.models import HyperMLPConfig
from hypermlp.train.recipe import DataSettings, TrainingSettings

NOT_NUMBERS = ("abc", "", "--", "1e", "0x1g", "1,5", "½x", "None", "[]")
INTEGERS = st.sampled_from((-1, 0, 1, -999999999999, 2**31, 2**63 - 1)) | st.integers(-(10**30), 10**30)
NUMBERS = {int: INTEGERS.map(str), float: st.floats().map(repr)}
PRINTABLE = st.characters(codec="utf-8", exclude_categories=("Cc", "Zl", "Zp"))
TEXTS = st.sampled_from(
    ("", " ", "nonsense", "/dev/null/x", "a\tb", "\udcff\udcfe", "x" * 5000, "../..", "%s%n", "{}", "-")
) | st.text(PRINTABLE)
ODD_YAML = (
    "[1, 2",
    "'",
    "&a [*a]",
    "2000-01-01",
    "!!python/object:os.system",
    "{a: 1}",
    "abc",
    "nan",
    "1e11",
)
SET_VALUES = st.sampled_from(ODD_YAML) | ODD_JSON.map(json.dumps)
SECTIONS = {
    "model": inspect.signature(HyperMLPConfig.__init__).parameters,
    "data": [field.name for field in dataclasses.fields(DataSettings)],
    "training": [field.name for field in dataclasses.fields(TrainingSettings)],
}
KEYS = [f"{section}.{key}" for section, keys in SECTIONS.items() for key in (*keys, "nonsense")]
MAD_KEYS = [
    *(field.name for field in dataclasses.fields(Settings)),
    "learning_rate",
    "width",
    "seed",
    "nonsense",
]
MISSHAPEN = (
    "",
    "x",
    "=",
    "=1",
    "training.steps",
    "training=1",
    "a.b.c=1",
    ".=.",
    "model.=1",
    "training.steps==1",
)
MISSHAPEN += ("model.nonsense=1", "data.nonsense=1", "training.nonsense=1", "nonsense.model=1")
# Values that the help or the documents exclude, by argument.
PLACES = ("nonsense", "/dev/null/x")
INVALID = {
    **dict.fromkeys(
        ("checkpoint", "checkpoints", "folder", "places", "recipe", "model", "--init-from"), PLACES
    ),
    **dict.fromkeys(("--mixer", "mixers", "--label", "--labels", "--backend"), ("nonsense", "Q-1", "X-cg")),
    **dict.fromkeys(
        ("task", "--task", "--grid", "--size", "--points", "--device", "--recipe"), ("nonsense",)
    ),
    **dict.fromkeys(("--batch", "--length", "--vocab", "--count", "--jobs", "--rounds"), ("0", "-1")),
    **dict.fromkeys(("--tokens", "--threads", "--limit", "--max-length", "--top-k"), ("0", "-1")),
    "--hidden": ("0",),
    "--nodes": ("0", "-1", "3"),
    "--gpus": ("-1", "1"),
    "--softmax-heads": ("0", "7"),
    "--temperature": ("-1", "nan"),
    "--utilisation": ("0", "-1", "1.5", "nan", "inf"),
    "--seconds": ("0", "-1", "nan", "inf"),
    "--only": ("zzzzqq",),
    "--doc": ("/dev/null/x/y.md",),
    "--prompt": ("@/dev/null/x", ""),
}
VALID = {("eval", "--length")}
"""Arguments that a command reads together with another option only."""
# Commands whose smallest valid run is too long or never ends: they only get values that must be refused.
LONG = {
    "serve",
    "demo",
    "eval",
    "mad run",
    "mad compare",
    "study run",
    "study tune",
    "study scale",
    "bench lm",
    "bench op",
    "bench window",
    "verify",
    "gpu-check",
    "build",
}


def base(name: str, fixtures: Fixtures) -> list[str]:
    """Return a small valid command line, or as much of it as there is."""
    recipe, run = str(fixtures.recipe), str(fixtures.run)
    return {
        "train": [recipe, "--set", "training.steps=1"],
        "sample": [run, "hello", "--tokens", "2"],
        "serve": [run],
        "eval": [run, "--limit", "1"],
        "report": [run],
        "flops": [recipe],
        "plan": [recipe],
        "mad run": ["--mixer", "S"],
        "mad compare": ["S"],
        "mad show": ["compression"],
        "study report": [str(fixtures.records)],
        "study figure": [str(fixtures.records)],
        "inspect": [run, "--prompt", "hello", "--tokens", "4"],
        "bench table": ["--count-only", "--mixer", "S", "--length", "64"],
        "bench lm": ["--recipe", recipe],
        "bench op": ["--batch", "1", "--length", "8", "--hidden", "32", "--rounds", "1", "--seconds", "0.1"],
        "extend": [run],
    }.get(name, [])


def takes_value(argument) -> bool:
    return argument.settings.get("action") not in ("store_true", "store_false")


def change(argument, values: SearchStrategy[str], joined: bool = False) -> SearchStrategy[dict]:
    """Draw a value of an argument, as a word of its own or joined to the option's name."""
    name = argument.names[0]
    if not name.startswith("-"):
        return values.map(lambda value: {"how": "first", "words": [value]})
    words = values.map(lambda value: [f"{name}={value}"] if joined else [name, value])
    return words.map(lambda given: {"how": "append", "words": given})


def invalid_changes(name: str) -> SearchStrategy[dict]:
    """Draw a change that the command must refuse."""
    arguments = implementation(name).arguments
    unknown = st.sampled_from(("--nonsense", "--nonsense=1", "-Z", "--set-"))
    ways = [unknown.map(lambda word: {"how": "append", "words": [word]})]
    for argument in filter(takes_value, arguments):
        first, settings = argument.names[0], argument.settings
        values = () if (name, first) in VALID else INVALID.get(first, ())
        if first.startswith("-"):
            values += NOT_NUMBERS if settings.get("type") in (int, float) else ()
            values += ("nonsense",) if settings.get("choices") else ()
            values += MISSHAPEN if first == "--set" and not name.startswith("mad") else ()
        elif settings.get("nargs") not in ("?", "*"):
            ways.append(st.just({"how": "nothing"}))
        if values:
            ways.append(change(argument, st.sampled_from(values)))
    return st.one_of(ways)


def odd_changes(name: str) -> SearchStrategy[dict]:
    """Draw a change that the command may accept or refuse, but must survive."""
    ways = []
    for argument in filter(takes_value, implementation(name).arguments):
        if argument.names[0] == "--set":
            key = st.sampled_from(MAD_KEYS if name.startswith("mad") else KEYS)
            values = st.tuples(key, SET_VALUES).map("=".join)
            ways += [change(argument, values)] * (4 if name == "train" else 1)
        else:
            ways.append(change(argument, NUMBERS.get(argument.settings.get("type"), TEXTS), joined=True))
    return drawn_from(*ways) if ways else TEXTS.map(lambda text: {"how": "append", "words": [text]})


def command_lines() -> SearchStrategy[Case]:
    """Draw a command line. The commands are imported here, not while Hypothesis draws."""
    lines = []
    for name in COMMANDS:
        kinds = {True: invalid_changes(name)} | ({} if name in LONG else {False: odd_changes(name)})
        lines += [
            record(command=name, changes=st.lists(changes, min_size=1, max_size=2), refused=refused)
            for refused, changes in kinds.items()
        ]
    return st.one_of(lines)


class Commands(CommandPart):
    name = "commands"
    cases = command_lines
    share = 16
    enough = 2_100
    limit = 300.0
    seconds = 90.0

    def words(self, case: Case) -> list[str]:
        """Return the command line of a case."""
        words = base(case["command"], self.fixtures)
        for change in case["changes"]:
            if change["how"] == "append":  # the last value of an option counts
                words = words + change["words"]
            elif change["how"] == "first":
                words = [*change["words"], *words[1:]]
            else:
                words = []
        return [*case["command"].split(), *words]

    def check_in(self, case, place):
        words = self.words(case)
        result = isolated.run(words, place, seconds=self.seconds)
        problem = command_problem(case["command"], result, refused=case["refused"])
        if problem:
            kind, message = problem
            raise Finding(f"{case['command']}: {kind}", f"hypermlp {words!r}\n{message}")
        return Counter({"refused": int(result.status == 2), "worst seconds": result.seconds})
