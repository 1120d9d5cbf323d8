"""Damaged files: runs, checkpoints, prepared data, recipes, configurations and records.

A copy of a good folder is damaged in one or two files, then a command reads it. It must end with status 0 or
2, without a traceback or a signal. A checkpoint whose seal names a file that was changed must not be used.
"""

import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from fuzz import isolated
from fuzz.core import Case, Finding
from fuzz.drawing import ODD_JSON, drawn_from, once_in, record
from fuzz.fixtures import CommandPart, command_problem

SHARES = st.floats(0, 1, exclude_max=True)  # of a file's bytes, or of the keys of a JSON value
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


SPLICE = record(
    way="splice",
    begin=SHARES,
    removed=st.sampled_from((1, 1, 1, 0, 4, 2**30)),
    new=st.binary(max_size=100).map(lambda x: x.decode("latin-1")),
)
JSON = record(way="json", path=st.lists(SHARES, max_size=6), value=ODD_JSON, remove=once_in(5))
SWAP = record(way="swap", other=st.integers(0, 2**16))
WAYS = drawn_from(record(way="delete"), record(way="folder"), SWAP, *[SPLICE] * 5, *[JSON] * 3)


@st.composite
def damages(draw) -> Case:
    what = draw(st.sampled_from(("run", "run", "checkpoint", "data", "data", "recipe", "records")))
    case = {"what": what, "command": draw(st.sampled_from(COMMANDS[what]))}
    ways = draw(st.lists(WAYS, min_size=1, max_size=2))
    case["damages"] = [{"file": draw(st.integers(0, 2**16))} | way for way in ways]
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
    files = sorted(path for path in (target, *target.rglob("*")) if path.is_file())
    if not files:  # an earlier damage left no file
        return "nothing"
    named = [path for path in files if path.name == damage.get("name")] or files
    path, way = named[damage["file"] % len(named)], damage["way"]
    if way in ("delete", "folder"):
        path.unlink()
    if way == "folder":
        path.mkdir()
    elif way == "swap":
        path.write_bytes(files[damage["other"] % len(files)].read_bytes())
    elif way == "splice":
        content = path.read_bytes()
        begin = int(damage["begin"] * len(content))
        path.write_bytes(
            content[:begin] + damage["new"].encode("latin-1") + content[begin + damage["removed"] :]
        )
    elif way == "json":
        way = damage_json(path, damage)
    return f"{path.name} ({way})"


def damage_json(path: Path, damage: dict) -> str:
    """Replace one value in a file of JSON, JSON lines or YAML, or remove it; return what was done."""
    lines = path.suffix == ".jsonl"
    load, dump = (yaml.safe_load, yaml.safe_dump) if path.suffix == ".yaml" else (json.loads, json.dumps)
    try:
        text = path.read_text()
        tree = [load(line) for line in text.splitlines()] if lines else load(text)
    except (ValueError, yaml.YAMLError):  # not such a file, or an earlier damage left no such text
        return "unchanged"
    parent: Any = [tree]
    key: Any = 0
    holder = parent
    for share in damage["path"]:
        if not isinstance(parent[key], dict | list) or not parent[key]:
            break
        parent = parent[key]
        key = (list(parent) if isinstance(parent, dict) else range(len(parent)))[int(share * len(parent))]
    if damage["remove"] and parent is not holder:
        del parent[key]
    else:
        parent[key] = damage["value"]
    tree = holder[0]
    path.write_text("\n".join(map(dump, tree)) if lines and isinstance(tree, list) else dump(tree))
    return f"without {key}" if damage["remove"] else f"{key} = {str(damage['value'])[:40]!r}"
