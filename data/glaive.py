"""Glaive's dialogues: one text with speakers' names, and functions described in the system text."""

import json
import re

from data.turn_lists import parsed

_SPEAKERS = re.compile(r"(?:\A|\n)\s*(USER|ASSISTANT|FUNCTION RESPONSE):\s*")
_END_OF_TEXT = "<|endoftext|>"
_CALL = re.compile(  # the arguments are JSON, between single quotes or none
    r"""<functioncall>\s*\{\s*"name":\s*"(?P<name>[^"]+)",\s*"arguments":\s*(?P<quote>'?)(?P<arguments>.*?)(?P=quote)\s*\}\s*\Z""",
    re.DOTALL,
)
_ROLES = {"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool"}


def dialogue(chat: str) -> list[dict] | None:
    """Returns a dialogue's turns, with calls read; None for any other text."""
    before, *pieces = _SPEAKERS.split(chat)
    if not pieces or before.strip():
        return None
    return [
        _turn(_ROLES[speaker], text)
        for speaker, text in zip(pieces[::2], pieces[1::2], strict=True)
    ]


def _turn(role: str, text: str) -> dict:
    text = text.strip().removesuffix(_END_OF_TEXT).strip()
    call = _CALL.search(text) if role == "assistant" else None
    arguments = parsed(call["arguments"].replace("\\'", "'")) if call else None
    if not call or not isinstance(arguments, dict):
        return {"role": role, "content": text}
    calls = [{"function": {"name": call["name"], "arguments": arguments}}]
    return {"role": role, "content": text[: call.start()].strip(), "tool_calls": calls}


def described_functions(system: str) -> tuple[str, list[dict]]:
    """Returns a system text and the JSON objects at its end; the whole text if there are none."""
    system = re.sub(r"\A\s*SYSTEM:\s*", "", system)
    start = system.find("{")
    decoder, tools, offset = json.JSONDecoder(), [], start
    while 0 <= offset < len(system):
        try:
            value, offset = decoder.raw_decode(system, offset)
        except (ValueError, RecursionError):
            return system, []
        if not isinstance(value, dict) or "name" not in value:
            return system, []
        tools.append(value)
        offset += len(system[offset:]) - len(system[offset:].lstrip())
    return (system[:start].strip(), tools) if tools else (system, [])
