"""Replies that are not answers, in the OpenAI API's shape."""

from collections.abc import Mapping

_MAX_SHOWN_CHARS = 80


class ApiError(Exception):
    """A reply that is not an answer, in OpenAI's shape.

    status: of HTTP, for an error before the stream opens.
    type, param, code: as in OpenAI's error object; `param` is the field at fault.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, object]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def shown(value: object) -> str:
    """A value for an error message; long ones are cut, and containers named by their size."""
    if isinstance(value, list) and value:
        return f"a list of {len(value)}"
    if isinstance(value, dict) and len(value) > 2:
        return f"an object of {len(value)}"
    text = repr(value[: _MAX_SHOWN_CHARS + 1] if isinstance(value, str) else value)
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "..."
