"""A recipe: one YAML file that says everything about a training run. Unknown keys and impossible values raise."""

import dataclasses
import math
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from hypermlp.config import is_integer, require
from hypermlp.errors import UserError
from hypermlp.models import HyperMLPConfig, HyperMLPForCausalLM

MATCH, MATCH_TOLERANCE = "match_parameters", 0.005
TOKENIZER_SIZES = {"bytes": 257, "gpt2": 50_257}
RECIPE_FOLDERS = (
    Path(__file__).parents[1] / "recipes",
    Path(__file__).parents[2] / "recipes",
)  # installed, or a checkout


@dataclass(kw_only=True)
class DataSettings:
    """What is read, and how it is cut."""

    source: str = "stdlib"
    """"stdlib" (Python's own source), a file or folder of .txt, .py, .jsonl or .parquet, or "hub:NAME" for a Hugging Face dataset."""
    text_field: str = "text"
    """Where a record of JSONL, Parquet or a dataset has its text."""
    split: str = "train"
    """Split of a Hugging Face dataset; "train:CONFIG" names a configuration too."""
    streaming: bool = False
    """Read a Hugging Face dataset as it is prepared instead of downloading all of it first."""
    tokenizer: str = "bytes"
    """"bytes", "bpe:SIZE" (trained on the data), "gpt2", or a folder or hub name for transformers' AutoTokenizer."""
    context: int = 256
    """Tokens in a training sequence."""
    packing: str = "documents"
    """"documents": a token sees its own document only; "stream": the documents are one text."""
    order: str = "shuffled"
    """"shuffled": every sequence once per epoch; "random": sequences begin anywhere, drawn with replacement."""
    validation: float = 0.01
    """Share of the documents that is kept for validation."""
    limit: int | None = None
    """Read at most so many characters."""
    cache: str | None = None
    """Folder for prepared data; the default is in the user's cache."""

    def __post_init__(self) -> None:
        require("data.context", self.context, self.context > 1, "at least 2")
        require(
            "data.packing", self.packing, self.packing in ("documents", "stream"), "'documents' or 'stream'"
        )
        require("data.order", self.order, self.order in ("shuffled", "random"), "'shuffled' or 'random'")
        require("data.validation", self.validation, 0 < self.validation < 1, "between 0 and 1")
        require("data.limit", self.limit, self.limit is None or self.limit > 0, "positive")
        if self.streaming:
            require(
                "data.streaming", True, self.source.startswith("hub:"), "false, unless the source is hub:NAME"
            )


@dataclass(kw_only=True)
class TrainingSettings:
    """How long, how large, how fast."""

    steps: int
    """Optimizer steps."""
    batch_tokens: int
    """Tokens of one step, over all processes and accumulation."""
    learning_rate: float
    """At the end of the warm-up."""
    micro_batch: int = 8
    """Sequences that a process takes at once; the rest of the batch is accumulated."""
    min_learning_rate: float = 0.0
    """At the end of the decay, a cosine."""
    warmup_steps: int = 0
    """Linear: step i has (i + 1) / (warmup_steps + 1) of the learning rate."""
    decay_steps: int | None = None
    """When the cosine ends; None for the last step. May lie beyond it."""
    weight_decay: float = 0.1
    """AdamW's."""
    decayed: str = "matrices"
    """"matrices": parameters of two dimensions or more; "all"."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """AdamW's."""
    eps: float = 1e-8
    """AdamW's."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    precision: str = "float32"
    """"float32", or "bfloat16" for autocast."""
    seed: int = 1337
    """Of initialisation and data order."""
    eval_every: int = 500
    """Steps between evaluations."""
    eval_sequences: int = 160
    """Sequences of one evaluation, the same ones each time, from either split."""
    save_every: int = 500
    """Steps between checkpoints."""
    keep: int = 2
    """Checkpoints that are kept."""
    log_every: int = 10
    """Steps between log lines."""
    explosion: float = 3.0
    """Stop when the loss is so many times the mean of the last steps."""
    report_to: list[str] = field(default_factory=lambda: ["tensorboard"])
    """Where Trainer reports besides metrics.jsonl: any name that it knows."""
    sharding: bool = False
    """Split parameters, gradients and optimizer over the processes (FSDP2) instead of copying them (DDP)."""
    gradient_checkpointing: bool = False
    """Recompute blocks in the backward pass."""
    compile: bool = False
    """torch.compile."""

    def __post_init__(self) -> None:
        for name in (
            "steps",
            "batch_tokens",
            "micro_batch",
            "eval_every",
            "eval_sequences",
            "save_every",
            "keep",
            "log_every",
        ):
            require(f"training.{name}", getattr(self, name), getattr(self, name) > 0, "positive")
        for name in ("learning_rate", "eps", "clip"):
            require(
                f"training.{name}",
                getattr(self, name),
                0 < getattr(self, name) < math.inf,
                "positive and finite",
            )
        for name in ("min_learning_rate", "weight_decay", "warmup_steps"):
            require(f"training.{name}", getattr(self, name), getattr(self, name) >= 0, "zero or more")
        require("training.decayed", self.decayed, self.decayed in ("matrices", "all"), "'matrices' or 'all'")
        fine = len(self.betas) == 2 and all(isinstance(b, (int, float)) and 0 <= b < 1 for b in self.betas)
        require("training.betas", self.betas, fine, "two numbers, 0 or more and below 1")
        require(
            "training.precision",
            self.precision,
            self.precision in ("float32", "bfloat16"),
            "'float32' or 'bfloat16'",
        )
        require("training.explosion", self.explosion, self.explosion > 1, "more than 1")
        name, end = ("steps", self.steps) if self.decay_steps is None else ("decay_steps", self.decay_steps)
        allowed = f"at least training.warmup_steps = {self.warmup_steps}, or that less"
        require(f"training.{name}", end, end >= max(1, self.warmup_steps), allowed)


@dataclass(kw_only=True)
class Recipe:
    """A training run."""

    name: str
    """What it is called."""
    model: dict[str, Any]
    """Fields of HyperMLPConfig. vocab_size and max_position_embeddings default to the tokenizer's and the context's.
    ``match_parameters: LABEL`` sets intermediate_size so that the model has as many parameters as with that label as its mixer."""
    data: DataSettings
    training: TrainingSettings

    def __post_init__(self) -> None:
        known = {f.name for f in dataclasses.fields(HyperMLPConfig)} | {MATCH}
        for key in self.model:
            require(
                "model key",
                key,
                key in known,
                f"a field of HyperMLPConfig: {', '.join(sorted(known & (_OWN_FIELDS | {MATCH})))}",
            )
        self.sequences_per_step  # noqa: B018 - raises if it does not divide

    @property
    def sequences_per_step(self) -> int:
        tokens, context = self.training.batch_tokens, self.data.context
        require(
            "training.batch_tokens", tokens, tokens % context == 0, f"a multiple of data.context = {context}"
        )
        return tokens // context

    def accumulation(self, processes: int) -> int:
        """Micro-batches of one step on each process."""
        together = self.training.micro_batch * processes
        fits = self.sequences_per_step % together == 0
        allowed = (
            f"a multiple of {together} sequences (micro_batch x processes) of {self.data.context} tokens"
        )
        require("training.batch_tokens", self.training.batch_tokens, fits, allowed)
        return self.sequences_per_step // together

    def vocab_size(self, asked: int | None = None) -> int:
        """The tokenizer's, before it is made or loaded: by its name, as ``asked``, or as the model has it."""
        name, given = self.data.tokenizer, self.model.get("vocab_size")
        size = TOKENIZER_SIZES.get(
            name, int(name[4:]) if name.startswith("bpe:") and name[4:].isdigit() else None
        )
        size = next((each for each in (asked, size, given) if each is not None), None)
        if size is None:
            raise UserError(
                f"how many tokens {name!r} has is not known before it is loaded; give --vocab, or model.vocab_size"
            )
        require(
            "--vocab" if asked is not None else "model.vocab_size",
            size,
            is_integer(size) and size > 0,
            "a whole number, 1 or more",
        )
        return int(size)

    def model_config(self, vocab_size: int, **special_tokens: Any) -> HyperMLPConfig:
        defaults = {"vocab_size": vocab_size, "max_position_embeddings": self.data.context, **special_tokens}
        settings = defaults | {key: value for key, value in self.model.items() if value is not None}
        other = settings.pop(MATCH, None)
        try:
            config = HyperMLPConfig(**settings) if other is None else matched_config(settings, other)
        except Exception as error:  # transformers has errors of its own for wrong types
            raise UserError(f"model: {error}") from error
        require(
            "model.vocab_size",
            config.vocab_size,
            config.vocab_size >= vocab_size,
            f"at least the tokenizer's {vocab_size}",
        )
        longest = config.max_position_embeddings
        require(
            "model.max_position_embeddings",
            longest,
            longest >= self.data.context,
            f"at least data.context = {self.data.context}",
        )
        return config

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


_OWN_FIELDS = set(HyperMLPConfig.__annotations__)


def matched_config(settings: dict[str, Any], mixer: str) -> HyperMLPConfig:
    """Return the configuration whose MLP width brings its parameter count closest to that of the same model with ``mixer``.

    Raises ValueError if the closest width is more than MATCH_TOLERANCE away, or if ``settings`` fixes the width.
    """
    given = settings.get("intermediate_size")
    require("model.intermediate_size", given, given is None, f"left out: model.{MATCH} sets it")
    target = _parameter_count(HyperMLPConfig(**(settings | {"mixer": mixer})))
    own = HyperMLPConfig(**settings)
    assert own.intermediate_size is not None
    one_wider = HyperMLPConfig(**(settings | {"intermediate_size": own.intermediate_size + 1}))
    count = _parameter_count(own)
    width = own.intermediate_size + round((target - count) / (_parameter_count(one_wider) - count))
    reachable = f"a mixer whose parameter count ({target:,}) some MLP width reaches; this model has {count:,}"
    require(f"model.{MATCH}", mixer, width > 0, reachable)
    config = HyperMLPConfig(**(settings | {"intermediate_size": width}))
    off = abs(_parameter_count(config) / target - 1)
    require(
        f"model.{MATCH}", mixer, off <= MATCH_TOLERANCE, f"{reachable}; the closest width is {off:.1%} off"
    )
    return config


def _parameter_count(config: HyperMLPConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in HyperMLPForCausalLM(config).parameters())


def find_recipe(name: str) -> Path:
    """A path, or the name of one of ours."""
    names = sorted({path.stem for folder in RECIPE_FOLDERS for path in folder.glob("*.yaml")})
    for candidate in (Path(name), *(folder / f"{name}.yaml" for folder in RECIPE_FOLDERS)):
        if candidate.is_file():
            return candidate
    raise UserError(f"no recipe {name!r}; allowed: a YAML file, or one of {', '.join(names)}")


def load_recipe(name: str, overrides: list[str] | None = None) -> Recipe:
    """Read a recipe; ``overrides`` are ``section.key=value``, values in YAML."""
    path = find_recipe(name)
    try:
        content = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not YAML: {error}") from error
    require(str(path), content, isinstance(content, dict), "a mapping: name, model, data, training")
    for override in overrides or []:
        key, equals, value = override.partition("=")
        section, dot, inner = key.partition(".")
        require(
            "--set",
            override,
            bool(equals and (dot or section == "name")),
            "section.key=value, for example training.steps=100",
        )
        if dot and not isinstance(content.get(section), dict):
            require(
                f"recipe section {section}", content.get(section), content.get(section) is None, "a mapping"
            )
            content[section] = {}
        target = content[section] if dot else content
        try:
            target[inner or section] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UserError(f"--set {override}: the value is not YAML: {error}") from error
    return build(Recipe, content, "")


def build(cls: type, content: dict[str, Any], where: str) -> Any:
    """A dataclass from a dictionary, with every key and type checked."""
    hints = typing.get_type_hints(cls)
    required = [
        f.name
        for f in dataclasses.fields(cls)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    for key in content:
        require(
            "recipe key", f"{where}{key}", key in hints, f"one of {', '.join(where + name for name in hints)}"
        )
    for name in required:
        require("recipe key " + where + name, "missing", name in content, "given")
    return cls(**{key: _value(value, hints[key], where + key) for key, value in content.items()})


def _value(value: Any, hint: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        require(where, value, isinstance(value, dict), "a mapping")
        return build(typing.cast(type, hint), value, where + ".")
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for option in options:
        plain = typing.get_origin(option) or option
        if plain is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
            try:
                return float(value)  # YAML takes 6e-4 for a string
            except ValueError:
                continue
        if isinstance(value, plain) and not (plain is int and isinstance(value, bool)):
            return value
    names = " or ".join(
        "null" if option is types.NoneType else getattr(option, "__name__", str(option)) for option in options
    )
    raise UserError(f"{where} is {value!r}; it must be {names}")
