"""The fields of request bodies that are not served, in one table, and how a body is checked."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from sealring.mesh.errors import InvalidInput

MAX_STRING = 256

IGNORED: dict[str, type] = {
    "cache_prompt": bool,  # llama.cpp's
    "include_reasoning": bool,  # OpenRouter's
    "metadata": dict,
    "prediction": dict,
    "prompt_cache_retention": str,
    "safety_identifier": str,
    "service_tier": str,
    "store": bool,  # nothing is stored
    "timings_per_token": bool,  # llama.cpp's
}
"""Bookkeeping: fields that change no answer, taken with any value of their type."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),  # of chats
    "suffix": ("",),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "verbosity": ("medium",),
    # vLLM's
    "add_generation_prompt": (True,),
    "add_special_tokens": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "chat_template": (),
    "continue_final_message": (False,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "min_tokens": (0,),
    "prompt_logprobs": (),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": ([],),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    # mlx_lm.server's
    "adapters": (),
    "draft_model": (),
    "frequency_context_size": (),
    "presence_context_size": (),
    "role_mapping": (),
    "xtc_probability": (0,),
    "xtc_threshold": (0.1,),
}
"""Fields that would change the answer, taken where they ask for nothing: one of these values, or null."""

DUMPED = frozenset(
    {
        "annotations",
        "images",
        "parsed",
        "provider_specific_fields",
        "reasoning_details",
        "thinking_blocks",
    }
)
"""What SDKs and frameworks leave in an assistant's message when they pass it back. No template reads it."""

B = TypeVar("B", bound=BaseModel)


class Body(BaseModel):
    """A part of a body: of the right types, with no fields but those that are known."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)


def check_body(value: dict[str, Any], model: type[B]) -> B:
    """Raises InvalidInput with `param`: UNSUPPORTED_FIELD, UNKNOWN_FIELD, BAD_FIELD, MISSING_FIELD."""
    rest = {name: item for name, item in value.items() if not _neutral(name, item, model)}
    try:
        return model.model_validate(rest)
    except ValidationError as error:
        raise _first_error(error) from None


def bad(param: str, why: str) -> InvalidInput:
    """The refusal of a field that is malformed."""
    return InvalidInput(f"{param} is refused: {why}", reason="BAD_FIELD", param=param)


def as_object(value: Any, param: str) -> dict[str, Any]:
    """Raises InvalidInput (BAD_FIELD)."""
    if not isinstance(value, dict):
        raise bad(param, "it is not an object")
    return value


def as_list(value: Any, param: str) -> list[Any]:
    """Raises InvalidInput (BAD_FIELD)."""
    if not isinstance(value, list):
        raise bad(param, "it is not a list")
    return value


def unsupported(name: str, hint: str = "") -> InvalidInput:
    """The refusal of what would change the answer."""
    return InvalidInput(
        f"{name} is not supported", hint=hint or f"leave {name} out", reason="UNSUPPORTED_FIELD", param=name
    )


def _neutral(name: str, item: Any, model: type[BaseModel]) -> bool:
    if name in model.model_fields:
        return False
    if name in IGNORED and (item is None or isinstance(item, IGNORED[name])):
        return not isinstance(item, str) or len(item) <= MAX_STRING
    if name not in NEUTRAL:
        return False
    if item is None or any(type(item) in _alike(value) and item == value for value in NEUTRAL[name]):
        return True
    raise unsupported(name)


def _alike(value: Any) -> tuple[type, ...]:
    return (int, float) if type(value) in (int, float) else (type(value),)


def _first_error(error: ValidationError) -> InvalidInput:
    errors = error.errors(include_input=False, include_url=False, include_context=False)
    first = max(errors, key=lambda each: len(each["loc"]))
    param = _param(first["loc"])
    if first["type"] == "extra_forbidden":
        return InvalidInput(
            f"unknown field {param!r}", hint="check its spelling", reason="UNKNOWN_FIELD", param=param
        )
    if first["type"] == "missing":
        return InvalidInput(f"{param} is missing", reason="MISSING_FIELD", param=param)
    said = first["msg"][:1].lower() + first["msg"][1:]
    return InvalidInput(f"{param} is refused: {said}", reason="BAD_FIELD", param=param)


def _param(location: tuple[int | str, ...]) -> str:
    """`messages[0].content`; the names of a union's branches and token ids are left out."""
    param = ""
    if location[0] == "logit_bias":
        return "logit_bias"
    for part in location:
        if isinstance(part, int):
            param += f"[{part}]"
        elif "[" not in part and part not in ("str", "constrained-str", "NamedTool"):
            param += f".{part[:64]}" if param else part[:64]
    return param[:128]
