"""From an HTTP body to a checked record; what is wrong with it is a 400 that names the field."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json

from .api_error import bad_request, shown


class Record(BaseModel):
    """Part of a request: unknown fields, wrong types and numbers that are none are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


_R = TypeVar("_R", bound=Record)


def json_object(body: bytes) -> dict[str, Any]:
    """The fields of a body. Raises ApiError, a 400, if it is no JSON object."""
    try:
        # Refuses NaN and Infinity, lone surrogates, bytes that are not UTF-8, and nesting beyond 200 levels.
        fields = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise bad_request(f"the body is not valid JSON: {error}", None) from None
    if not isinstance(fields, dict):
        raise bad_request(f"the body should be a JSON object, got {shown(fields)}", None)
    return fields


def without_neutral(
    fields: dict[str, Any], neutral: Mapping[str, tuple[object, ...]], prefix: str = ""
) -> dict[str, Any]:
    """The fields that a record must know.

    Args:
        neutral: parameters that are not supported, and the values of each that ask for nothing ("*": any value); null
            does so for every one.
        prefix: comes before a field's name in errors.
    Raises:
        ApiError: a 400 that names a parameter that asks for something.
    """
    kept = {}
    for name, value in fields.items():
        allowed = neutral.get(name)
        if allowed is None:
            kept[name] = value
        elif value is not None and "*" not in allowed and not any(_same(value, one) for one in allowed):
            message = f"{prefix}{name}: not supported by this server, got {shown(value)}"
            raise bad_request(message, prefix + name, "unsupported_parameter")
    return kept


def _same(value: object, neutral: object) -> bool:
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def validated(record: type[_R], fields: dict[str, Any]) -> _R:
    """A record of the fields. Raises ApiError, a 400 that names the first field at fault."""
    try:
        return record.model_validate(fields)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False)[0]
    param = _path(fault["loc"])
    if fault["type"] == "missing":
        raise bad_request(f"missing required parameter: {param}", param, "missing_required_parameter")
    if fault["type"] == "extra_forbidden":
        raise bad_request(f"unknown parameter: {param}", param, "unknown_parameter")
    message = fault["msg"].replace("Input should", "should")
    raise bad_request(f"{param}: {message}, got {shown(fault['input'])}", param)


def _path(loc: tuple[int | str, ...]) -> str:
    """A field's place as in `messages[0].content[1].type`; the tags of unions (#...) are no part of it."""
    path = ""
    for step in loc:
        if isinstance(step, int):
            path += f"[{step}]"
        elif not step.startswith("#"):
            path += f".{step}" if path else step
    return path
