"""Damaged files: runs, checkpoints, prepared data, recipes, configurations and records.

A copy of a good folder is damaged in one or two files, then a command reads it. It must end with status 0 or
2, without a traceback or a signal. A checkpoint whose seal names a file that was changed must not be used.
"""

import json
import random
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from fuzz import isolated
from fuzz.core import Case, Finding
from fuzz.drawing import ODD_JSON, SEEDS
from fuzz.fixtures import CommandPart, command_problem

WAYS = ("flip", "flip", "truncate", "empty", "garbage", "delete", "swap", "insert", "folder", *["json"] * 3)
MODEL_FILES = (
    "model.safetensors",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
COMMANDS = {  # what is damaged -> commands that read it; RUN, RECIPE, RECORDS and DATA stand for paths
    "run": (
        ["sample", "RUN", "hello", "--tokens", "2"],
        ["sample", "RUN", "hello", "--tokens", "2", "--temperature", "0"],
        ["train", "RECIPE", "--out", "RUN", "--resume", "--set", "training.steps=3"],
        ["report", "RUN", "--out", "page.html"],
        ["flops", "RUN"],
        ["plan", "RUN"],
        ["inspect", "RUN", "--prompt", "hello", "--out", "page.html"],
        ["train", "RECIPE", "--out", "new", "--init-from", "RUN", "--set", "training.steps=1"],
    ),
    "checkpoint": (
        ["sample", "RUN/checkpoint-2", "hello", "--tokens", "2"],
        ["flops", "RUN/checkpoint-2"],
        ["train", "RECIPE", "--out", "RUN", "--resume", "--set", "training.steps=3"],
    ),
    "data": (["train", "RECIPE", "--out", "new", "--set", "training.steps=1"],),
    "recipe": (
        ["train", "RECIPE", "--out", "new"],
        ["plan", "RECIPE"],
        ["flops", "RECIPE"],
    ),
    "records": (["report", "RECORDS", "--out", "page.html"], ["study", "report", "RECORDS", "--out", "new"]),
}


@st.composite
def damages(draw) -> Case:
    what = draw(st.sampled_from(("run", "run", "checkpoint", "data", "data", "recipe", "records")))
    damage = st.fixed_dictionaries(
        {"file": st.integers(0, 2**16), "way": st.sampled_from(WAYS), "seed": SEEDS, "value": ODD_JSON}
    )
    case = {"what": what, "command": draw(st.sampled_from(COMMANDS[what]))}
    case["damages"] = [draw(damage) for _ in range(draw(st.sampled_from((1, 1, 1, 1, 2))))]
    if what in ("run", "checkpoint") and draw(st.booleans()):
        case["damages"][0]["name"] = draw(st.sampled_from(MODEL_FILES))
    return case


class Damage(CommandPart):
    name = "damage"
    cases = damages
    share = 11
    enough = 550
    limit = 400.0
    seconds = 120.0

    def check_in(self, case, place):
        paths = self._copy(place)
        target = {"checkpoint": paths["RUN"] / "checkpoint-2", "data": next(paths["DATA"].glob("*/"))}
        target |= {"run": paths["RUN"], "recipe": paths["RECIPE"], "records": paths["RECORDS"]}
        changed = [damage_file(target[case["what"]], damage) for damage in case["damages"]]
        words = [
            re.sub("^(RUN|RECIPE|RECORDS|DATA)", lambda found: str(paths[found[0]]), word)
            for word in case["command"]
        ]
        broken = self._broken_seals(paths["RUN"])
        result = isolated.run(words, place / "work", seconds=self.seconds)
        name = " ".join(words[:2]) if words[0] == "study" else words[0]
        problem = command_problem(name, result, refused=False)
        about = f"hypermlp {' '.join(case['command'])}, after damage to {', '.join(changed)}"
        if problem:
            raise Finding(f"{name} on a damaged {case['what']}: {problem[0]}", f"{about}\n{problem[1]}")
        self._check_weights(name, words, paths["RUN"], broken, result, about)
        return Counter({"refused": int(result.status == 2), "worst seconds": result.seconds})

    def _copy(self, place: Path) -> dict[str, Path]:
        """Copy the good files, so that a command may write to them; the recipe names the copied cache."""
        good = self.fixtures
        paths = {"RUN": place / "run", "DATA": place / "prepared", "RECORDS": place / "records"}
        for source, name in ((good.run, "RUN"), (good.cache, "DATA"), (good.records, "RECORDS")):
            shutil.copytree(source, paths[name])
        paths["RECIPE"] = place / "tiny.yaml"
        text = good.recipe.read_text().replace(str(good.cache), str(paths["DATA"]))
        paths["RECIPE"].write_text(text)
        return paths

    def _broken_seals(self, run: Path) -> list[Path]:
        """Return the sealed folders in which a file of the model differs from the good one."""
        broken = []
        for folder in sorted(path.parent for path in self.fixtures.run.glob("*/complete.json")):
            copy, weights = run / folder.name, "model.safetensors"  # other files may be edited by hand
            if (copy / "complete.json").is_file() and _differs(folder / weights, copy / weights):
                broken.append(copy)
        return broken

    def _check_weights(self, name, words, run, broken, result, about):
        """Raise if a command that uses weights used those of a folder with a broken seal."""
        if name not in ("sample", "inspect") or result.status != 0:
            return
        given = Path(words[1])
        used = given if given != run else run / "final"
        if used in broken and f"passing over {used}" not in result.out + result.err:
            raise Finding(
                f"{name} accepted damaged weights", f"{about}\n{result.out[-300:]}\n{result.err[-300:]}"
            )


def _differs(good: Path, copy: Path) -> bool:
    return copy.is_file() and copy.read_bytes() != good.read_bytes()


def damage_file(target: Path, damage: dict) -> str:
    """Damage one file of a folder, or the file itself, and return what was done."""
    rng = random.Random(damage["seed"])
    files = sorted(path for path in (target, *target.rglob("*")) if path.is_file())
    named = [path for path in files if path.name == damage.get("name")]
    files = named or files
    if not files:  # an earlier damage left no file
        return "nothing"
    path = files[damage["file"] % len(files)]
    way, content = damage["way"], bytearray(path.read_bytes())
    if way == "json" and path.suffix not in (".json", ".jsonl", ".yaml"):
        way = "flip"
    if way == "delete":
        path.unlink()
    elif way == "folder":
        path.unlink()
        path.mkdir()
    elif way == "swap":
        path.write_bytes(rng.choice(files).read_bytes())
    elif way == "json":
        return f"{path.name} ({damage_json(path, rng, damage.get('value'))})"
    else:
        path.write_bytes(damaged(content, way, rng))
    return f"{path.name} ({way})"


def damaged(content: bytearray, way: str, rng: random.Random) -> bytes:
    if way == "truncate":
        return bytes(content[: rng.randrange(len(content) + 1)])
    if way == "empty":
        return b""
    if way == "garbage":
        return rng.randbytes(rng.choice((1, 8, 100, len(content) + 1)))
    if way == "insert":
        place = rng.randrange(len(content) + 1)
        return bytes(content[:place] + rng.randbytes(rng.randint(1, 9)) + content[place:])
    for _ in range(rng.randint(1, 6) if content else 0):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return bytes(content)


def damage_json(path: Path, rng: random.Random, value: Any) -> str:
    """Replace one value in a file of JSON, JSON lines or YAML, or remove it; return what was done."""
    text = path.read_text(errors="replace")
    try:
        if path.suffix == ".yaml":
            tree = yaml.safe_load(text)
        elif path.suffix == ".json":
            tree = json.loads(text)
        else:
            tree = [json.loads(line) for line in text.splitlines()]
    except (ValueError, yaml.YAMLError):  # an earlier damage left no such text
        return "unchanged"
    holder = [tree]
    parent: Any = holder
    key: Any = 0
    while isinstance(parent[key], dict | list) and parent[key] and (parent is holder or rng.random() < 0.75):
        parent = parent[key]
        key = rng.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
    if rng.random() < 0.2 and parent is not holder:
        del parent[key]
        done = f"without {key}"
    else:
        parent[key] = value
        done = f"{key} = {str(value)[:40]!r}"
    tree = holder[0]
    if path.suffix == ".jsonl" and isinstance(tree, list):
        path.write_text("".join(json.dumps(line) + "\n" for line in tree))
    else:
        path.write_text(yaml.safe_dump(tree) if path.suffix == ".yaml" else json.dumps(tree))
    return done
