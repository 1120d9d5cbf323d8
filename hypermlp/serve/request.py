"""From the JSON of a completion request to checked settings of a generation."""

from typing import Any, NamedTuple

from hypermlp.errors import UserError
from hypermlp.validation import is_integer, is_number, near_miss

USUAL_TOKENS, MOST_STOPS = 16, 4  # as in OpenAI's API
TEMPERATURES = (0.01, 100.0)  # of random draws: below, the softmax overflows
SEEDS = 2**63
NEUTRAL: dict[str, tuple[Any, ...]] = {  # parameters that are accepted with these values only
    "n": (None, 1),
    "best_of": (None, 1),
    "logprobs": (None, False),
    "echo": (None, False),
    "suffix": (None, ""),
    "logit_bias": (None, {}),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
}
READ = ("model", "prompt", "max_tokens", "temperature", "top_p", "seed", "stop", "stream", "user")


class Completion(NamedTuple):
    """A completion that a client requests."""

    prompt: str
    max_tokens: int
    temperature: float
    """0 takes the most likely token each time."""
    top_p: float
    seed: int | None
    stop: list[str]
    stream: bool

    def settings(self) -> dict[str, Any]:
        """Return the arguments of ``generate`` for the random draws."""
        if self.temperature == 0:
            return {"do_sample": False, "num_beams": 1, "temperature": None, "top_p": None, "top_k": None}
        drawn = {"temperature": self.temperature, "top_p": self.top_p, "top_k": 0}
        return {"do_sample": True, "num_beams": 1, **drawn}


def parse_completion(body: Any) -> Completion:
    """Return the checked request; raise UserError with the parameter, its value and what is allowed."""
    if not isinstance(body, dict):
        raise UserError(f"the body is a {type(body).__name__}; it must be a JSON object with a prompt")
    for name, value in body.items():
        if name not in NEUTRAL and name not in READ:
            allowed = (*READ, *NEUTRAL)
            raise UserError(
                f"unknown parameter {name!r}{near_miss(name, allowed)}; allowed: {', '.join(READ)}"
            )
        if name in NEUTRAL and value not in NEUTRAL[name]:
            raise UserError(f"{name} is {_shown(value)}, which is not supported; leave it out")
    temperature, top_p = body.get("temperature"), body.get("top_p")
    stop = body.get("stop")
    parsed = Completion(
        prompt=_prompt(body.get("prompt")),
        max_tokens=USUAL_TOKENS if body.get("max_tokens") is None else body["max_tokens"],
        temperature=1.0 if temperature is None else temperature,
        top_p=1.0 if top_p is None else top_p,
        seed=body.get("seed"),
        stop=[] if stop is None else [stop] if isinstance(stop, str) else stop,
        stream=bool(body.get("stream")),
    )
    low, high = TEMPERATURES
    _require("max_tokens", parsed.max_tokens, _whole(parsed.max_tokens, 1), "a whole number, 1 or more")
    _require(
        "temperature",
        parsed.temperature,
        is_number(parsed.temperature) and (parsed.temperature == 0 or low <= parsed.temperature <= high),
        f"0, or between {low} and {high}",
    )
    fits = is_number(parsed.top_p) and 0 < parsed.top_p <= 1
    _require("top_p", parsed.top_p, fits, "above 0 and at most 1")
    fits = parsed.seed is None or (_whole(parsed.seed, 0) and parsed.seed < SEEDS)
    _require("seed", parsed.seed, fits, "a whole number of at least 0, below 2**63")
    fits = isinstance(parsed.stop, list) and len(parsed.stop) <= MOST_STOPS
    fits = fits and all(_is_text(text) for text in parsed.stop)
    _require("stop", parsed.stop, fits, f"a text, or a list of at most {MOST_STOPS}, none empty")
    return parsed


def _prompt(value: Any) -> str:
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    _require("prompt", value, _is_text(value), "one text that is not empty")
    assert isinstance(value, str)
    return value


def _is_text(value: object) -> bool:
    """Return True for a text that is not empty and has UTF-8: JSON can also hold half a surrogate pair."""
    try:
        return isinstance(value, str) and len(value.encode()) > 0
    except UnicodeEncodeError:
        return False


def _whole(value: object, least: int) -> bool:
    return is_integer(value) and isinstance(value, int) and value >= least


def _require(name: str, value: object, holds: bool, allowed: str) -> None:
    if not holds:
        raise UserError(f"{name} is {_shown(value)}; it must be {allowed}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]} ..."
