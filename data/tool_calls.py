"""Reads tool calls and descriptions of tools into OpenAI's form, with arguments as JSON values."""

import hashlib
import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from data.fields import first_present, has_value, shown_fields, unread_of, without_surrogates
from data.printable import printable
from data.turn_lists import parsed

ID_LENGTH = 9  # Mistral's templates accept ids of nine letters and digits only
_THOUGHT = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)
_FENCED = re.compile(r"\s*```(?:json)?[ \t]*\n(.*)```\s*", re.DOTALL)
# Fields of a call's arguments: OpenAI's, Llama's, LangChain's and Anthropic's. The first one
# given is read, {} included: a call may need no arguments.
_ARGUMENTS = ("arguments", "parameters", "args", "input")
# Fields beside a call's name that are never its arguments.
_ABOUT_CALL = frozenset(("name", "function", "type", "id", "call_id", "tool_call_id", "index"))
# Types that say no more than that this is a call.
_CALL_TYPES = ("function", "function_call", "tool_call", "tool_use")
_SCHEMAS = ("input_schema", "inputSchema")  # of Anthropic's and MCP's tools: OpenAI's `parameters`


class CallText(NamedTuple):
    """The text of a ShareGPT turn `function_call`."""

    calls: tuple[dict[str, Any], ...]
    reasoning: str | None
    """The text in <think> and </think> before the calls, if they are there."""
    unread: set[str]
    """Fields of the calls that nothing reads."""


def parse_calls(calls: list[Any]) -> tuple[dict[str, Any], ...]:
    """Returns calls in OpenAI's form, with arguments as JSON values.

    Raises:
      ValueError: a call has no name, or its arguments are not a JSON object, or under no known
        name; the message says which.
    """
    return tuple(map(_parse_call, calls))


def written_calls(value: Any, name: str) -> list[Any]:
    """Returns the calls in a turn's field of this name, also if it, or an entry, is JSON or Python
    text, as in a table's columns.

    Raises:
      ValueError: a text is neither.
    """
    value = _written_call(value, name)
    if not isinstance(value, list):
        return [value] if value else []
    calls = (_written_call(call, name) for call in value)
    return [call for call in calls if call is not None]  # tables pad lists with null


def _written_call(value: Any, name: str) -> Any:
    if not isinstance(value, str):
        return value
    if value.strip() in ("", "null", "None"):
        return None
    call = parsed(value)
    if not isinstance(call, dict | list):
        raise ValueError(f"`{name}` that is a text, but no call in JSON")
    return call


def _parse_call(call: Any) -> dict[str, Any]:
    function = _function(call) if isinstance(call, dict) else None
    if (
        not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
        or not function["name"]
    ):
        raise ValueError("a tool call without a name")
    arguments = _raw_arguments(call)
    if arguments is None:
        if any(has_value(function[name]) for name in function.keys() - _ABOUT_CALL):
            raise ValueError(f"a tool call without `arguments`: it has {shown_fields(function)}")
        arguments = {}
    elif isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise ValueError("a tool call whose arguments are not a JSON object")
    call_id = call.get("id")
    result = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return _unicode(result | ({"id": call_id} if isinstance(call_id, str) and call_id else {}))


def _function(call: dict[str, Any]) -> Any:
    """Returns a call's `function`, or the call itself if it has none."""
    function = call.get("function")
    return call if function is None else function


def _raw_arguments(call: dict[str, Any]) -> Any:
    """Returns the arguments of a call as written, None if it has none."""
    fields, name = _find_arguments(call)
    return None if name is None else fields[name]


def _find_arguments(call: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Returns the fields with a call's arguments, which are its `function` or stand beside it, and
    the arguments' name there; None instead of the name if there are no arguments."""
    holders = (_function(call), call)
    for fields in holders:
        for name in _ARGUMENTS:
            if has_value(fields.get(name)) or fields.get(name) == {}:
                return fields, name
    # An empty text stands for no arguments if nothing else does.
    fields = next((fields for fields in holders if first_present(fields, _ARGUMENTS)), call)
    return fields, first_present(fields, _ARGUMENTS)


def rewrites_arguments(calls: list[Any]) -> bool:
    """Returns whether the arguments of any call are JSON text that will be written differently,
    for example because it has no spaces."""
    return any(map(_rewrites, calls))


def _rewrites(call: dict[str, Any]) -> bool:
    text = _raw_arguments(call)
    return isinstance(text, str) and text != json.dumps(
        json.loads(text or "{}"), ensure_ascii=False
    )


def unread_call_fields(calls: list[Any]) -> set[str]:
    """Returns the fields of calls that nothing reads, such as "tool call's field `index`"."""
    return {
        f"tool call's field `{printable(str(name))[:80]}`"
        for call in calls
        for name in _unread_names(call)
    }


def _unread_names(call: dict[str, Any]) -> set[Any]:
    """Returns the names of a call's fields, in its `function` or beside it, that nothing reads."""
    function = _function(call)
    holder, arguments = _find_arguments(call)
    unread = set()
    for fields in (function, call):
        read = {"function", arguments if fields is holder else None}
        read |= {"name"} if fields.get("name") == function["name"] else set()
        read |= {"type"} if fields.get("type") in _CALL_TYPES else set()
        read |= {"id"} if fields is call and isinstance(call.get("id"), str) else set()
        unread |= {name for name in fields if name not in read and has_value(fields[name])}
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
    read = parse_calls(calls)
    if not read:
        raise ValueError("it holds none")
    reasoning = thought[1].strip() if thought else None
    return CallText(read, reasoning, unread | unread_call_fields(calls))


def _json_values(text: str) -> list[Any]:
    """Returns the JSON values that a text consists of; raises ValueError for other text."""
    decoder, values, text = json.JSONDecoder(), [], text.strip()
    while text:
        value, end = decoder.raw_decode(text)
        values.append(value)
        text = text[end:].lstrip()
    return values


def parse_tools(value: object) -> tuple[tuple[dict[str, Any], ...], bool] | None:
    """Returns the descriptions in `tools`, a list or its JSON text or of such texts, and whether
    any was put into OpenAI's form; None for anything else."""
    try:
        value = json.loads(value) if isinstance(value, str) else value
        if not isinstance(value, list):
            return None
        tools = [json.loads(tool) if isinstance(tool, str) else tool for tool in value]
        if not all(isinstance(tool, dict) for tool in tools):
            return None
        nested = [_nested(tool) for tool in tools]
        return tuple(map(_unicode, nested)), nested != tools
    except (ValueError, TypeError, RecursionError):
        return None


def _is_flat(tool: dict[str, Any]) -> bool:
    """Returns whether a description is that of a function by itself; others, such as that of a
    service's own tool, stay as they are."""
    kind = tool.get("type")
    return (
        "function" not in tool
        and isinstance(tool.get("name"), str)
        and (kind in (None, "function") or (kind == "custom" and _SCHEMAS[0] in tool))
    )


def _nested(tool: dict[str, Any]) -> dict[str, Any]:
    """Returns a description of a function in OpenAI's form, with its schema in `parameters`."""
    if not _is_flat(tool):
        return tool
    schema = first_present(tool, _SCHEMAS) if tool.get("parameters") is None else None
    function = {
        "parameters" if name == schema else name: value
        for name, value in tool.items()
        if name != "type" and (schema is None or name != "parameters")
    }
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
    return json.loads(without_surrogates(text))


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Returns a JSON value with `change` applied to every text in it, including keys."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): map_texts(item, change) for key, item in value.items()}
    return [map_texts(item, change) for item in value] if isinstance(value, list | tuple) else value
