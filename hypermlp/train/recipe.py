"""A recipe: one YAML file that defines a training run. Unknown keys and impossible values raise."""

import dataclasses
import fnmatch
import json
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, Literal, get_type_hints

import yaml

from hypermlp.checkpoints import FOLDER, MODELS
from hypermlp.errors import UserError
from hypermlp.label import PAPER_NAMES, PAPER_ROWS
from hypermlp.layers.registry import BASELINES, mixer_name
from hypermlp.models import HyperMLPConfig
from hypermlp.train.building import build as build
from hypermlp.train.building import typed
from hypermlp.train.matching import MATCH, matched_config
from hypermlp.validation import (
    LARGEST_SIZE,
    NOT_NEGATIVE,
    NOT_NEGATIVE_NUMBER,
    POSITIVE,
    POSITIVE_NUMBER,
    check_fields,
    is_integer,
    is_number,
    near_miss,
    require,
    rule,
)

TOKENIZER_SIZES = {"bytes": 257, "gpt2": 50_257}
# In the package, and in a checkout.
RECIPE_FOLDERS = [Path(__file__).parents[level] / "recipes" for level in (1, 2)]
BETAS = rule(
    lambda value: len(value) == 2 and all(is_number(beta) and 0 <= beta < 1 for beta in value),
    "two numbers, each at least 0 and below 1",
)


@dataclasses.dataclass(kw_only=True)
class DataSettings:
    """What is read, and how it is cut into training sequences."""

    source: str = "stdlib"
    """"stdlib" (the source of Python's standard library), "hub:NAME" for a Hugging Face dataset, or a file or
    folder of .txt, .md, .py, .jsonl or .parquet."""
    text_field: str = "text"
    """The field that holds the text in records of JSONL, Parquet or a dataset."""
    split: str = "train"
    """Split of a Hugging Face dataset; "train:CONFIG" also selects a configuration."""
    streaming: bool = False
    """Read a Hugging Face dataset while preparing it, instead of downloading all of it first."""
    tokenizer: str = "bytes"
    """"bytes", "bpe:SIZE" (trained on the data), "gpt2", or a folder or hub name for AutoTokenizer."""
    context: int = field(default=256, metadata=rule(lambda value: value >= 2, "at least 2"))
    """Tokens in a training sequence."""
    packing: Literal["documents", "stream"] = "documents"
    """"documents": a token sees only its own document; "stream": the documents are joined to one text."""
    order: Literal["shuffled", "random"] = "shuffled"
    """"shuffled": every sequence once per epoch; "random": sequences begin anywhere and may overlap."""
    validation: float = field(default=0.01, metadata=rule(lambda value: 0 < value < 1, "between 0 and 1"))
    """Fraction of the documents that is held out for validation."""
    limit: int | None = field(
        default=None, metadata=rule(lambda value: value is None or value > 0, "positive, or null")
    )
    """Read at most this many characters; null for all."""
    cache: str | None = None
    """Folder for prepared data; null for the user's cache folder."""


@dataclasses.dataclass(kw_only=True)
class TrainingSettings:
    """Length, batch, optimizer, and what is written when."""

    steps: int = field(metadata=POSITIVE)
    """Number of optimizer steps."""
    batch_tokens: int = field(metadata=POSITIVE)
    """Tokens in one optimizer step, over all processes and accumulated micro-batches."""
    learning_rate: float = field(metadata=POSITIVE_NUMBER)
    """Learning rate at the end of the warm-up. In YAML and --set also a mapping from mixers, patterns such as
    "G-*", or "default" to rates: the rate of model.mixer is used, or that of the longest matching pattern, or
    that of "default" if there is none or model.mixer is a list."""
    micro_batch: int = field(default=8, metadata=POSITIVE)
    """Sequences in one forward pass of one process; gradients are accumulated up to batch_tokens."""
    min_learning_rate: float = field(default=0.0, metadata=NOT_NEGATIVE_NUMBER)
    """Learning rate at the end of the cosine decay. In YAML and --set also a percentage: "10%"."""
    warmup_steps: int = field(default=0, metadata=NOT_NEGATIVE)
    """Steps of linear warm-up: step i uses (i + 1) / (warmup_steps + 1) of the learning rate."""
    decay_steps: int | None = None
    """Step at which the cosine decay ends, which may lie beyond the last step; null for the last step."""
    weight_decay: float = field(default=0.1, metadata=NOT_NEGATIVE_NUMBER)
    """Weight decay of AdamW."""
    decayed: Literal["matrices", "all"] = "matrices"
    """Parameters with weight decay: "matrices" for those of two or more dimensions, or "all"."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95], metadata=BETAS)
    """The two beta coefficients of AdamW."""
    eps: float = field(default=1e-8, metadata=POSITIVE_NUMBER)
    """Epsilon of AdamW."""
    clip: float = field(default=1.0, metadata=POSITIVE_NUMBER)
    """Largest norm of the gradient; larger gradients are scaled down to it."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """"float32", or "bfloat16" for autocast to bfloat16."""
    seed: int = field(default=1337, metadata=rule(lambda value: 0 <= value < 2**32, "from 0 to 4294967295"))
    """Seed of the initialisation and of the order of the data."""
    eval_every: int = field(default=500, metadata=POSITIVE)
    """Steps between evaluations."""
    eval_sequences: int = field(default=160, metadata=POSITIVE)
    """Sequences per split in an evaluation, the same ones each time."""
    save_every: int = field(default=500, metadata=POSITIVE)
    """Steps between checkpoints."""
    keep: int = field(default=2, metadata=POSITIVE)
    """Number of checkpoints that are kept."""
    log_every: int = field(default=10, metadata=POSITIVE)
    """Steps between log lines."""
    explosion: float = field(default=3.0, metadata=rule(lambda value: value > 1, "more than 1"))
    """Stop when the loss exceeds this many times its recent mean."""
    report_to: list[str] = field(default_factory=lambda: ["tensorboard"])
    """Trackers that Trainer reports to besides metrics.jsonl, such as "tensorboard" or "wandb"."""
    sharding: bool = False
    """Shard parameters, gradients and optimizer over the processes (FSDP2) instead of copying them (DDP)."""
    gradient_checkpointing: bool = False
    """Recompute blocks in the backward pass, to save memory."""
    compile: bool = False
    """Train with torch.compile."""


@dataclasses.dataclass(kw_only=True)
class Recipe:
    """A training run."""

    name: str
    """Name of the run; it is the default name of its folder."""
    model: dict[str, Any]
    """Fields of HyperMLPConfig. vocab_size defaults to the tokenizer's size, and max_position_embeddings to
    data.context. ``match_parameters: LABEL`` chooses intermediate_size so that the model has as many
    parameters as the same model with LABEL as its mixer."""
    data: DataSettings
    training: TrainingSettings

    def __post_init__(self) -> None:
        fields = [*HyperMLPConfig.field_names(), MATCH]
        known = {*fields, *(f.name for f in dataclasses.fields(HyperMLPConfig))}
        for key in self.model:
            allowed = f"a field of HyperMLPConfig{near_miss(str(key), fields)}: {', '.join(sorted(fields))}"
            require("model key", key, key in known, allowed)
        check_fields(self.data, "data.")
        check_fields(self.training, "training.")
        # From here on: settings that are possible on their own, but not together.
        training, data = self.training, self.data
        possible = data.source.startswith("hub:") or not data.streaming
        require("data.streaming", data.streaming, possible, "false, unless the source is hub:NAME")
        name = "steps" if training.decay_steps is None else "decay_steps"
        require(
            f"training.{name}",
            getattr(training, name),
            getattr(training, name) >= max(1, training.warmup_steps),
            f"at least {max(1, training.warmup_steps)}; raise {name} or lower warmup_steps",
        )
        require(
            "training.batch_tokens",
            training.batch_tokens,
            training.batch_tokens % data.context == 0,
            f"a multiple of data.context = {data.context}",
        )

    @property
    def sequences_per_step(self) -> int:
        """Sequences in one optimizer step."""
        return self.training.batch_tokens // self.data.context

    def accumulation(self, processes: int) -> int:
        """Return the number of micro-batches that each process accumulates in one step."""
        together = self.training.micro_batch * processes
        require(
            "training.batch_tokens",
            self.training.batch_tokens,
            self.sequences_per_step % together == 0,
            f"a multiple of {together * self.data.context}: {together} sequences (micro_batch x processes) "
            f"of {self.data.context} tokens; or change training.micro_batch",
        )
        return self.sequences_per_step // together

    def vocab_size(self, given: int | None = None) -> int:
        """Return the tokenizer's size without loading it: ``given``, or by its name, or model.vocab_size."""
        name, own = self.data.tokenizer, self.model.get("vocab_size")
        trained = int(name[4:]) if name.startswith("bpe:") and name[4:].isdigit() else own
        size = TOKENIZER_SIZES.get(name, trained) if given is None else given
        if size is None:
            raise UserError(f"the size of tokenizer {name!r} is not known; give --vocab or model.vocab_size")
        key = "model.vocab_size" if given is None else "--vocab"
        fits = is_integer(size) and 0 < size <= LARGEST_SIZE
        require(key, size, fits, f"a whole number from 1 to {LARGEST_SIZE:,}")
        return int(size)

    def model_config(self, vocab_size: int, **special_tokens: Any) -> HyperMLPConfig:
        """Return the model's configuration, given the tokenizer's size and the ids of its special tokens."""
        defaults = {"vocab_size": vocab_size, "max_position_embeddings": self.data.context, **special_tokens}
        settings = defaults | {key: value for key, value in self.model.items() if value is not None}
        match = settings.pop(MATCH, None)
        try:
            config = HyperMLPConfig(**settings) if match is None else matched_config(settings, match)
        except Exception as error:  # transformers raises its own errors for wrong types
            raise UserError(f"model: {' '.join(str(error).split())}") from error
        require(
            "model.vocab_size",
            config.vocab_size,
            config.vocab_size >= vocab_size,
            f"at least the tokenizer's {vocab_size}",
        )
        require(
            "model.max_position_embeddings",
            config.max_position_embeddings,
            config.max_position_embeddings >= self.data.context,
            f"at least data.context = {self.data.context}",
        )
        return config

    def settings(self) -> dict[str, Any]:
        """Return the value of every key as "section.key", with the defaults of those that are left out.

        The two that depend on the data, model.vocab_size and model.max_position_embeddings, are left out.
        """
        own = {name: getattr(HyperMLPConfig, name, None) for name in HyperMLPConfig.field_names()}
        given = {key: value for key, value in self.model.items() if value is not None}
        model = own | {"vocab_size": None, "max_position_embeddings": None} | given
        sections = {"model": model, "data": vars(self.data), "training": vars(self.training)}
        return {
            f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the recipe as nested dictionaries, as in YAML."""
        return dataclasses.asdict(self)


FIRST_KEYS = {  # sections of a recipe -> their keys when the first studies were published
    "data": "cache context limit order packing source split streaming text_field tokenizer validation",
    "training": "batch_tokens betas clip compile decay_steps decayed eps eval_every eval_sequences explosion "
    "gradient_checkpointing keep learning_rate log_every micro_batch min_learning_rate precision report_to "
    "save_every seed sharding steps warmup_steps weight_decay",
}


def defaults(section: str) -> dict[str, Any]:
    """Return the optional keys of a section ("data" or "training") with their defaults."""
    values = {
        each.name: each.default if each.default_factory is dataclasses.MISSING else each.default_factory()
        for each in dataclasses.fields(get_type_hints(Recipe)[section])
    }
    return {key: value for key, value in values.items() if value is not dataclasses.MISSING}


def essential(content: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe's content, as of ``Recipe.to_dict``, without later keys that have their default.

    Trainings are identified by it: a key that is added to the recipe changes the identity of those alone that
    give it another value. Its default must mean what was done before, and never change. FIRST_KEYS always
    count, because the names of published records contain a digest of all of them.
    """
    found = dict(content)
    for section, first in FIRST_KEYS.items():
        usual, always = defaults(section), first.split()
        found[section] = {
            key: value
            for key, value in content[section].items()
            if key in always or key not in usual or value != usual[key]
        }
    return found


def find_recipe(name: str) -> Path:
    """Return the path of a recipe: a path, a name in ``recipes/``, or the name of a shipped model."""
    named = [*(folder / f"{name}.yaml" for folder in RECIPE_FOLDERS), *_shipped_recipes(name)]
    for candidate in (Path(name), *named):
        if candidate.is_file():
            return candidate
    names = recipe_names()
    note = ", which is not a file" if Path(name).suffix else near_miss(name, names)
    raise UserError(f"no recipe {name!r}{note}; allowed: a YAML file, or one of {', '.join(names)}")


def recipe_names() -> list[str]:
    """Return the names of the recipes that come with the package."""
    own = {path.stem for folder in RECIPE_FOLDERS for path in folder.glob("*.yaml")}
    return sorted(own | {path.parent.name for path in _shipped_recipes("*")})


def _shipped_recipes(name: str) -> list[Path]:
    """Return the recipes of the shipped models whose names match a pattern."""
    return [FOLDER / model / "recipe.yaml" for model in fnmatch.filter(MODELS.values(), name)]


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe by its path or name. ``overrides`` are ``section.key=value``, with values in YAML."""
    path = find_recipe(name)
    content = _yaml(path.read_bytes(), str(path))
    require(
        str(path), content, isinstance(content, dict), "a mapping with the keys name, model, data, training"
    )
    for override in overrides:
        _override(content, override)
    if isinstance(content.get("model"), dict) and isinstance(content["model"].get("mixer"), str):
        content["model"]["mixer"] = PAPER_NAMES.get(content["model"]["mixer"], content["model"]["mixer"])
    if isinstance(content.get("training"), dict) and isinstance(content.get("model"), dict):
        _resolve_rates(content["training"], content["model"].get("mixer", HyperMLPConfig.mixer))
    return build(Recipe, content, "")


def _yaml(text: str | bytes, source: str) -> Any:
    """Parse YAML; refuse a value that contains itself (``&a [*a]``)."""
    try:
        content = yaml.safe_load(text)
        json.dumps(content, default=str, skipkeys=True)  # ValueError if it contains itself
    # ValueError: also an impossible date, or bytes that are not UTF-8; RecursionError: nested too deeply
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{source} is not YAML: {' '.join(str(error).split())}") from error
    return content


def _override(content: dict[str, Any], override: str) -> None:
    """Set one key of a recipe's content from ``section.key=value`` or ``name=value``."""
    place, equals, value = override.partition("=")
    section, _, key = place.rpartition(".")
    require(
        "--set",
        override,
        bool(equals and (section or key == "name")),
        "section.key=value, for example training.steps=100",
    )
    if section:
        content[section] = content.get(section) or {}
        require(
            f"recipe section {section}", content[section], isinstance(content[section], dict), "a mapping"
        )
    target = content[section] if section else content
    target[key] = _yaml(value, f"--set {override}: the value")


def _is_family(name: Any) -> bool:
    """Return whether a key of a table of rates is a pattern such as "S-*" that some mixer matches."""
    known = (*PAPER_ROWS, *BASELINES)
    return isinstance(name, str) and "*" in name and any(fnmatch.fnmatchcase(each, name) for each in known)


def _rate_key(rates: dict[str, Any], mixer: Any) -> str:
    """Return the key of a mixer's rate: its name, else the longest pattern it matches, else "default"."""
    if mixer is None:
        mixer = HyperMLPConfig.mixer
    if not isinstance(mixer, str):
        return "default"
    named = {name for name in rates if name != "default" and not _is_family(name)}
    own = (name for name in sorted(named) if mixer_name(name) == mixer_name(mixer))
    families = sorted(filter(_is_family, rates), key=len, reverse=True)
    matching = (name for name in families if fnmatch.fnmatchcase(mixer_name(mixer), name))
    return next(own, next(matching, "default"))


def _resolve_rates(training: dict[str, Any], mixer: Any) -> None:
    """Replace, in place, a table of learning rates by the rate of ``mixer``, and a percentage by a number."""
    rates, least = training.get("learning_rate"), training.get("min_learning_rate")
    if isinstance(rates, dict):
        for name in rates.keys() - {"default"}:
            if not _is_family(name):
                mixer_name(name)  # raises for a misspelt name, which would otherwise have no effect
        key = _rate_key(rates, mixer)
        require(
            "model.mixer",
            mixer,
            key in rates,
            f"a key of training.learning_rate {rates}, or that table must have the key 'default'",
        )
        training["learning_rate"] = rates[key]
    if isinstance(least, str) and least.endswith("%"):
        rate = typed(training.get("learning_rate"), float, "training.learning_rate")
        percent = typed(least.removesuffix("%"), float, "training.min_learning_rate, in percent,")
        training["min_learning_rate"] = rate * percent / 100
