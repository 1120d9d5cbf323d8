"""Every command with wrong values: status 2 and one line, never a traceback, a hang or silent success.

A value is either known to be invalid (the command must refuse it) or odd (the command may run or refuse).
Values of options that take numbers or choices come from the commands' own declarations.
"""

import random
from collections import Counter

from fuzz import isolated
from fuzz.core import Case, Finding
from fuzz.fixtures import CommandPart, Fixtures, command_problem
from hypermlp.cli import COMMANDS, implementation

NOT_NUMBERS = ("abc", "", "--", "1e", "0x1g", "1,5", "½x", "None", "[]")
ODD_INTEGERS = ("-1", "0", "1", "-999999999999", "9" * 30, "2147483648", "9223372036854775808")
ODD_FLOATS = ("nan", "inf", "-inf", "-1", "0", "1e-300", "1e300", "-0.0", "1e-45")
TEXTS = (
    "",
    " ",
    "nonsense",
    "/dev/null/x",
    "a\tb",
    "\udcff\udcfe",
    "x" * 5000,
    "../..",
    "%s%n",
    "{}",
    "-",
    "é",
)
SET_VALUES = (
    "",
    "abc",
    "-1",
    "0",
    "nan",
    "inf",
    "1e11",
    "1e308",
    "9" * 25,
    "null",
    "true",
    "[]",
    "[1]",
    "{}",
    "{a: 1}",
    "!!python/object:os.system",
    "[1, 2",
    "'",
    "1.5",
    "&a [*a]",
    "2000-01-01",
    "🙂",
)
KEYS = {
    "model": (
        "mixer",
        "hidden_size",
        "num_hidden_layers",
        "num_heads",
        "rank",
        "block",
        "sliding_window",
        "intermediate_size",
        "nonsense",
    ),
    "data": ("source", "context", "tokenizer", "validation", "packing", "nonsense"),
    "training": (
        "steps",
        "batch_tokens",
        "micro_batch",
        "learning_rate",
        "min_learning_rate",
        "warmup_steps",
        "weight_decay",
        "eval_every",
        "eval_sequences",
        "save_every",
        "log_every",
        "seed",
        "dtype",
        "explosion",
        "keep",
        "report_to",
        "sharding",
        "nonsense",
    ),
}
MAD_KEYS = ("num_train", "num_test", "learning_rate", "width", "seed", "vocab_size", "length", "nonsense")
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
# Values that the help or the documents exclude: {command: {argument: values}}.
INVALID = {
    "sample": {
        "--tokens": ("0", "-1"),
        "--temperature": ("-1", "nan"),
        "--top-k": ("0", "-3"),
        "checkpoint": ("nonsense", "", "/dev/null/x"),
    },
    "serve": {"checkpoint": ("nonsense", "/dev/null/x")},
    "eval": {
        "--batch": ("0", "-1"),
        "--max-length": ("0",),
        "--limit": ("0", "-2"),
        "checkpoints": ("nonsense",),
    },
    "report": {"places": ("nonsense", "/dev/null/x"), "--out": ("/dev/null/x/y.html", "/")},
    "flops": {"model": ("nonsense",), "--length": ("0", "-1", "9999999"), "--vocab": ("0", "-1")},
    "plan": {
        "recipe": ("nonsense",),
        "--count": ("0", "-1"),
        "--nodes": ("0", "-1", "3"),
        "--vocab": ("0", "-1"),
        "--utilisation": ("0", "-1", "1.5", "nan", "inf"),
    },
    "mad run": {
        "--mixer": ("nonsense", "X-cg", "no.such:thing"),
        "--task": ("nonsense",),
        "--grid": ("nonsense",),
        "--jobs": ("0", "-1"),
        "--threads": ("0",),
        "--device": ("nonsense",),
        "--gpus": ("-1", "1"),
    },
    "mad compare": {"mixers": ("nonsense",), "--task": ("nonsense",), "--jobs": ("0",)},
    "mad show": {"task": ("nonsense", "")},
    "study run": {
        "--labels": ("nonsense", "Q-1"),
        "--size": ("nonsense",),
        "--jobs": ("0",),
        "--threads": ("-1",),
    },
    "study tune": {"--labels": ("nonsense",), "--size": ("nonsense",), "--device": ("nonsense",)},
    "study report": {"folder": ("nonsense", "/dev/null/x")},
    "study scale": {"--points": ("nonsense",), "--jobs": ("0",)},
    "study figure": {"folder": ("nonsense", "/dev/null/x")},
    "verify": {"--only": ("zzzzqq",), "--doc": ("/dev/null/x/y.md",)},
    "inspect": {
        "checkpoint": ("nonsense",),
        "--tokens": ("1", "0", "-1"),
        "--out": ("/dev/null/x/y.html",),
        "--prompt": ("@/dev/null/x", ""),
    },
    "bench op": {
        "--label": ("nonsense",),
        "--batch": ("0", "-1"),
        "--length": ("1", "0"),
        "--hidden": ("0",),
        "--backend": ("nonsense",),
        "--rounds": ("0",),
        "--seconds": ("0", "nan", "inf", "-1"),
        "--softmax-heads": ("0", "7"),
        "--threads": ("0", "-1"),
        "--against": ("nonsense",),
    },
    "bench table": {
        "--mixer": ("nonsense",),
        "--batch": ("0",),
        "--length": ("0", "-5"),
        "--rounds": ("2",),
        "--seconds": ("nan", "0"),
    },
    "bench lm": {
        "--recipe": ("nonsense",),
        "--mixer": ("nonsense",),
        "--rounds": ("2", "0"),
        "--seconds": ("-1",),
    },
    "train": {"recipe": ("nonsense", ""), "--init-from": ("nonsense",)},
}
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


class Commands(CommandPart):
    name = "commands"
    limit = 300.0
    seconds = 90.0

    def draw(self, rng: random.Random) -> Case:
        name = rng.choice(list(COMMANDS))
        arguments = implementation(name).arguments
        refused = name in LONG or rng.random() < 0.6
        changes = []
        for _ in range(1 if rng.random() < 0.8 else 2):
            changes.append(
                invalid_change(rng, name, arguments) if refused else odd_change(rng, name, arguments)
            )
        return {"command": name, "changes": changes, "refused": refused}

    def smaller(self, case):
        if len(case["changes"]) > 1:
            yield from (case | {"changes": [change]} for change in case["changes"])

    def words(self, case: Case) -> list[str]:
        """Return the command line of a case."""
        words = base(case["command"], self.fixtures)
        for change in case["changes"]:
            if change["how"] == "append":
                words = words + change["words"]
            elif change["how"] == "option":
                words = without(words, change["words"][0]) + change["words"]
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


def without(words: list[str], option: str) -> list[str]:
    """Return the words without an option and its value, if the option may be given once."""
    if option not in words or option == "--set":
        return words
    place = words.index(option)
    return words[:place] + words[place + 2 :]


def takes_value(argument) -> bool:
    return argument.settings.get("action") not in ("store_true", "store_false")


def invalid_change(rng: random.Random, name: str, arguments) -> dict:
    """Return a change that the command must refuse."""
    options = [a for a in arguments if a.names[0].startswith("-") and takes_value(a)]
    ways = ["unknown option"] + ["table"] * 4 * (name in INVALID)
    numbers = [a for a in options if a.settings.get("type") in (int, float)]
    choices = [a for a in options if a.settings.get("choices")]
    settable = name in ("train", "flops", "plan", "bench lm") and any(a.names[0] == "--set" for a in options)
    ways += ["number"] * 2 * bool(numbers) + ["choice"] * bool(choices) + ["set"] * 2 * settable
    if any(not a.names[0].startswith("-") and a.settings.get("nargs") not in ("?", "*") for a in arguments):
        ways.append("nothing")
    way = rng.choice(ways)
    if way == "table":
        argument = rng.choice(list(INVALID[name]))
        value = rng.choice(INVALID[name][argument])
        if argument.startswith("-"):
            return {"how": "option", "words": [argument, value]}
        return {"how": "first", "words": [value]}
    if way == "number":
        return {"how": "option", "words": [rng.choice(numbers).names[0], rng.choice(NOT_NUMBERS)]}
    if way == "choice":
        return {"how": "option", "words": [rng.choice(choices).names[0], "nonsense"]}
    if way == "set":
        section = rng.choice(list(KEYS))
        bad = rng.choice((*MISSHAPEN, f"{section}.nonsense=1", f"nonsense.{section}=1"))
        return {"how": "option", "words": ["--set", bad]}
    if way == "nothing":
        return {"how": "nothing"}
    return {"how": "append", "words": [rng.choice(("--nonsense", "--nonsense=1", "-Z", "--set-"))]}


def odd_change(rng: random.Random, name: str, arguments) -> dict:
    """Return a change that the command may accept or refuse, but must survive."""
    options = [a for a in arguments if takes_value(a)]
    if not options or (name == "train" and rng.random() < 0.7):
        argument = next((a for a in arguments if a.names[0] == "--set"), None)
    else:
        argument = rng.choice(options)
    if argument is None:
        return {"how": "append", "words": [rng.choice(TEXTS)]}
    first = argument.names[0]
    if first == "--set":
        section = rng.choice(list(KEYS))
        key = rng.choice(MAD_KEYS) if name.startswith("mad") else f"{section}.{rng.choice(KEYS[section])}"
        return {"how": "option", "words": ["--set", f"{key}={rng.choice(SET_VALUES)}"]}
    kind = argument.settings.get("type")
    value = rng.choice(ODD_INTEGERS if kind is int else ODD_FLOATS if kind is float else TEXTS)
    if not first.startswith("-"):
        return {"how": "first", "words": [value]}
    return {"how": "option", "words": [f"{first}={value}"]}
