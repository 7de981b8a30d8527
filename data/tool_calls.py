"""Reads tool calls and descriptions of tools into OpenAI's form, with arguments as JSON values."""

import hashlib
import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from data.fields import unread_of
from data.printable import printable

ID_LENGTH = 9  # Mistral's templates accept ids of nine letters and digits only
_THOUGHT = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)
_FENCED = re.compile(r"\s*```(?:json)?[ \t]*\n(.*)```\s*", re.DOTALL)


class CallText(NamedTuple):
    """The text of a ShareGPT turn `function_call`."""

    calls: tuple[dict[str, Any], ...]
    reasoning: str | None
    """The text in <think> and </think> before the calls, if they are there."""
    unread: set[str]
    """Fields of the calls that nothing reads."""


def parse_calls(value: object) -> tuple[dict[str, Any], ...]:
    """Returns the calls in `tool_calls` or one `function_call`, with arguments as JSON values.

    Raises:
      ValueError: a call has no name, or its arguments are not a JSON object; the message says
        which.
    """
    return tuple(map(_parse_call, value if isinstance(value, list) else [value]))


def _parse_call(call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if (
        not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
        or not function["name"]
    ):
        raise ValueError("a tool call without a name")
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
    elif arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError("a tool call whose arguments are not a JSON object")
    call_id = call.get("id")
    parsed = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return _unicode(parsed | ({"id": call_id} if isinstance(call_id, str) and call_id else {}))


def rewrites_arguments(value: Any) -> bool:
    """Returns whether the arguments of any call are JSON text in another form than they are
    written in, such as without spaces."""
    return any(map(_rewrites, value if isinstance(value, list) else [value]))


def _rewrites(call: dict[str, Any]) -> bool:
    function = call.get("function", call)
    text = function.get("arguments", function.get("parameters"))
    return isinstance(text, str) and text != json.dumps(
        json.loads(text or "{}"), ensure_ascii=False
    )


def unread_call_fields(value: Any) -> set[str]:
    """Returns the fields of calls that nothing reads, such as "tool call's field `index`"."""
    unread: set[str] = set()
    for call in value if isinstance(value, list) else [value]:
        function = call.get("function", call)
        read = {"function", "name", "arguments" if "arguments" in function else "parameters"}
        read |= {"id"} if isinstance(call.get("id"), str) else set()
        read |= {"type"} if call.get("type") == "function" else set()
        fields = {**call, **function}
        unread |= {
            f"tool call's field `{printable(str(name))[:80]}`"
            for name, content in fields.items()
            if name not in read and content is not None and content not in ("", [], {})
        }
    return unread


def parse_call_text(text: str) -> CallText:
    """Reads calls in JSON, one after another, in a list, or in an object's `tool_calls`.

    They may stand in a fence of markdown, and after reasoning in <think> and </think>.

    Raises:
      ValueError: there is no call, or a broken one, or other text.
      RecursionError: the JSON nests too deeply.
    """
    thought = _THOUGHT.match(text)
    rest = text[thought.end() :] if thought else text
    fenced = _FENCED.fullmatch(rest)
    calls: list[Any] = []
    unread: set[str] = set()
    for value in _json_values(fenced[1] if fenced else rest):
        wraps = isinstance(value, dict) and isinstance(value.get("tool_calls"), list)
        if wraps:
            unread |= unread_of(value, {"tool_calls"}, "tool call's")
        inner = value["tool_calls"] if wraps else value
        calls += inner if isinstance(inner, list) else [inner]
    parsed = parse_calls(calls)
    if not parsed:
        raise ValueError("no call")
    reasoning = thought[1].strip() if thought else None
    return CallText(parsed, reasoning, unread | unread_call_fields(calls))


def _json_values(text: str) -> list[Any]:
    """Returns the JSON values that a text consists of; raises ValueError for other text."""
    decoder, values, text = json.JSONDecoder(), [], text.strip()
    while text:
        value, end = decoder.raw_decode(text)
        values.append(value)
        text = text[end:].lstrip()
    return values


def parse_tools(value: object) -> tuple[tuple[dict[str, Any], ...], bool] | None:
    """Returns the descriptions in `tools`, a list or its JSON text, and whether any was put into
    OpenAI's nested form; None for anything else."""
    try:
        value = json.loads(value) if isinstance(value, str) else value
        if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
            return None
        return tuple(_unicode(_nested(tool)) for tool in value), any(map(_is_flat, value))
    except (ValueError, TypeError, RecursionError):
        return None


def _is_flat(tool: dict[str, Any]) -> bool:
    """Returns whether a description is that of a function by itself; others, such as that of a
    service's own tool, stay as they are."""
    return (
        "function" not in tool
        and isinstance(tool.get("name"), str)
        and tool.get("type") in (None, "function")
    )


def _nested(tool: dict[str, Any]) -> dict[str, Any]:
    if not _is_flat(tool):
        return tool
    function = {name: value for name, value in tool.items() if name != "type"}
    return {"type": "function", "function": function}


def new_id(turn: int, number: int, call: dict[str, Any]) -> str:
    """Returns a call's id: nine letters and digits derived from the call and its position."""
    content = json.dumps([turn, number, call["function"]], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:ID_LENGTH]


def _unicode(value: Any) -> Any:
    """Returns a JSON value with lone surrogates, which no tokenizer accepts, replaced.

    Raises:
      ValueError: a value that JSON lacks, such as a table's bytes.
    """
    try:
        text = json.dumps(value, ensure_ascii=False)
    except TypeError as error:
        raise ValueError(f"a tool call with a value that JSON lacks ({error})") from None
    return json.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Returns a JSON value with `change` applied to every text in it, including keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): map_texts(item, change) for key, item in value.items()}
    return [map_texts(item, change) for item in value] if isinstance(value, list | tuple) else value
