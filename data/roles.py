"""Names of roles in public data sets."""

import re
from functools import lru_cache

# Role names in public dumps, in lower case and with _ for a hyphen or space.
_ROLES = {
    **dict.fromkeys(["human", "user", "prompter", "person", "customer", "client", "usr"], "user"),
    **dict.fromkeys(
        [
            "assistant",
            "model",
            "bot",
            "ai",
            "llm",
            "chatbot",
            "agent",
            "function_call",
            "tool_call",
        ],
        "assistant",
    ),
    **dict.fromkeys(["system", "developer", "sys", "system_prompt"], "system"),
    **dict.fromkeys(
        [
            "tool",
            "function",
            "observation",
            "tool_response",
            "function_response",
            "tool_result",
            "function_result",
            "tool_output",
            "ipython",
        ],
        "tool",
    ),
    **dict.fromkeys(["thinking", "reasoning", "thought", "think"], "thought"),
}
_CALLS = ("function_call", "tool_call")  # whose turn's text is a call in JSON
# Model names, with any version: gpt, gpt-4o, chatgpt, claude-3-opus.
_MODELS = re.compile(
    r"(?:chat_?)?gpt|bing|bard|claude|gemini|gemma|llama|vicuna|alpaca|mistral|mixtral|qwen|deepseek|command_r|grok|phi|palm|kimi|o\d"
)
_VERSION = re.compile(r"(?:_?[\d.]\w*|_(?:\w|\.)+)*")


@lru_cache(maxsize=1024)
def role_of(name: str) -> str | None:
    """Returns the role for a name, `thought` for reasoning, or None."""
    role = _ROLES.get(name)
    if role is None:
        normal = _normal(name)
        role = _ROLES.get(normal)
        model = _MODELS.match(normal) if role is None else None
        if model and _VERSION.fullmatch(normal, model.end()):
            role = "assistant"
    return role


@lru_cache(maxsize=1024)
def is_call_role(name: str) -> bool:
    """Returns whether a role's name says that the text of its turn is a call in JSON."""
    return _normal(name) in _CALLS


def _normal(name: str) -> str:
    return re.sub(r"[\s-]+", "_", name.strip().lower())
