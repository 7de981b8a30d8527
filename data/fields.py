"""Fields of records and turns: which have values, are renamed, or are not read."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from data.printable import printable
from data.reasons import MISSING, NOT_TEXT, WITH_MEDIA, Drop

SHOWN_FIELDS = 12  # names of fields in a message
# Fields of a turn; the first one present is read.
ROLE_FIELDS = ("from", "role", "speaker", "author", "sender")
TEXT_FIELDS = ("value", "content", "text", "message", "utterance", "parts")
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")  # in transformers' order
WEIGHTS = ("weight", "loss_weight", "loss_scale")  # LLaMA-Factory's and ms-swift's are the last
IN_LOSS = ("train", "training", "trainable", "loss", *WEIGHTS)  # flags that say: trained on
NOT_IN_LOSS = ("mask", "masked")  # flags that say: not trained on
_FLAGS = frozenset((*IN_LOSS, *NOT_IN_LOSS))
# A record's verdict on its answer, as TRL and others name it.
LABEL_FIELDS = ("label", "kto_tag")
# Completions of a pair: TRL's, ms-swift's, LLaMA-Factory's, OpenAI's.
CHOSEN = ("chosen", "chosen_response", "chosen_messages", "preferred_output")
REJECTED = ("rejected", "rejected_response", "rejected_messages", "non_preferred_output")
TOKEN_FIELDS = ("tokens", "input_ids")
# Pictures and the like, as LLaMA-Factory and ms-swift name them; LLaVA's have a tag in the text.
_MEDIA = ("images", "videos", "audios")
_TAGGED = {"image": "<image>", "video": "<video>", "audio": "<audio>"}
_WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
# Values of a record's `reasoning` that are flags or from an unused column.
_NO_REASONING = ("", "on", "off", "yes", "no", "true", "false")


def has_value(value: object) -> bool:
    """Returns whether a field has a value; tables have None, NaN or empties in unused columns."""
    is_nan = isinstance(value, float) and value != value
    return value is not None and value != "" and value != [] and value != {} and not is_nan


def check_media(record: Mapping[Any, Any], texts: Sequence[str] = ()) -> None:
    """Raises Drop for a record with pictures and the like, without which it is another record.

    Args:
      texts: its texts; the field `image` counts if one of them has its tag.
    """
    for name, value in record.items():
        lower = str(name).lower()
        if lower not in _MEDIA and lower not in _TAGGED:
            continue
        is_shown = lower in _MEDIA or any(_TAGGED[lower] in text for text in texts)
        if is_shown and has_value(value) and (any(value) if isinstance(value, list) else value):
            raise Drop(f"{WITH_MEDIA}`{name}`")


def reasoning_of(record: Mapping[str, Any]) -> dict[str, str]:
    """Returns the fields of a record that hold the reasoning of its answer."""
    return {
        name: record[name]
        for name in REASONING_FIELDS
        if isinstance(record.get(name), str) and record[name].strip().lower() not in _NO_REASONING
    }


def yes_or_no(value: object) -> bool | None:
    """Returns a flag's truth value; None unless it is a boolean, a number or such a word."""
    if isinstance(value, str):
        return _WORDS.get(value.strip().lower())
    return bool(value) if isinstance(value, bool | int | float) and value == value else None


def loss_flags(fields: Mapping[str, Any]) -> dict[str, bool]:
    """Returns the flags of a turn or of a part of it: for each, whether it says: trained on."""
    values = {name: yes_or_no(fields[name]) for name in _FLAGS & fields.keys()}
    return {name: value is (name in IN_LOSS) for name, value in values.items() if value is not None}


def is_fraction(fields: Mapping[str, Any], name: str) -> bool:
    """Returns whether a flag of `loss_flags` is a weight other than 0 and 1."""
    value = fields[name]  # a text is 0, 1 or another word of `yes_or_no`
    return name in WEIGHTS and not isinstance(value, str) and value not in (0, 1)


def is_desirable(label: object) -> bool | None:
    """Returns what the label of a completion says; None unless it is true or false, as a boolean,
    1 or 0, or a word, as in CSV files."""
    return yes_or_no(label) if isinstance(label, str) or label in (True, False) else None


def is_undesirable(record: Mapping[str, Any]) -> bool:
    """Returns whether a record's `label` calls its answer bad, as in KTO data.

    Next to a `completion`, 0 and "no" do too; elsewhere they are more likely a class.
    """
    labels = [record[name] for name in LABEL_FIELDS if name in record]
    if record.get("completion") is not None:
        return any(is_desirable(label) is False for label in labels)
    return any(label is False or _is_word_false(label) for label in labels)


def _is_word_false(label: object) -> bool:
    return isinstance(label, str) and label.strip().lower() == "false"


def without_surrogates(text: str) -> str:
    """Returns a text with lone surrogates, halves of pairs such as \\ud83d\\ude00, replaced: no
    tokenizer accepts them."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def first_present(fields: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    """Returns the first of these names whose field is not None."""
    for name in names:  # a generator takes twice as long, and this runs for every turn
        if fields.get(name) is not None:
            return name
    return None


def shown_fields(record: Mapping[Any, Any]) -> str:
    """Returns the names of a record's fields for a message, such as `the fields a, b`.

    It does not say which are null: a table would have a message for each combination.
    """
    names = [printable(str(name))[:40] for name in record]
    more = ", ..." if len(names) > SHOWN_FIELDS else ""
    more += ", of which some are null" * any(value is None for value in record.values())
    return f"the fields {', '.join(names[:SHOWN_FIELDS])}{more}" if names else "no fields"


# What a source's `fields` may map a record's fields to.
ROLE_TARGETS = ("user", "assistant")
TURN_TARGETS = (
    "role",
    "content",
    "reasoning_content",
    "tool_calls",
    "tool_call_id",
    "name",
    "train",
)
RECORD_TARGETS = (
    "messages",
    "system",
    "prompt",
    "completion",
    "history",
    "tools",
    "id",
    "loss_mask",
    "context",
    "answers",
)
# TURN_TARGETS that a field of a record gives to its only answer.
_ANSWER_TARGETS = ("reasoning_content", "tool_calls", "train")


class FieldMap:
    """A source's own field names: `{question: user, answer: assistant}`, `{dialog: messages}`.

    Attributes:
      found: receives the names that occur in a record or turn.
    """

    def __init__(self, fields: Mapping[str, str], found: set[str]):
        self.found = found
        self._names = fields.keys()
        self._roles = {name: target for name, target in fields.items() if target in ROLE_TARGETS}
        self._turns = {name: target for name, target in fields.items() if target in TURN_TARGETS}
        self._record = {
            name: target
            for name, target in fields.items()
            if target not in ROLE_TARGETS + TURN_TARGETS
        }

    def record(self, record: dict) -> dict:
        """Returns a record under the names that are read; fields mapped to roles become `messages`.

        Raises:
          Drop: a field that is mapped to a turn is missing or holds no text.
        """
        self._find(record)
        as_written, record = record, renamed(record, self._record)
        if not self._roles:
            return record
        record = dict(record)
        turns: list[dict] = []
        for name, role in self._roles.items():
            if name not in record:
                raise Drop(f"{MISSING}`{printable(name)}` (it has {shown_fields(as_written)})")
            text = only_text(record.pop(name))
            if not isinstance(text, str):
                raise Drop(f"{NOT_TEXT}`{printable(name)}`")
            turns.append({"role": role, "content": text})
        context = only_text(record.get("context")) if "context" in self._record.values() else None
        asked = next((turn for turn in turns if turn["role"] == "user"), None)
        if asked and isinstance(context, str):
            asked["content"] = with_context(asked["content"], context)
            del record["context"]
        answers = [turn for turn in turns if turn["role"] == "assistant"]
        of_answer = {**{name: name for name in reasoning_of(record)}, **self._turns}
        for name, target in of_answer.items() if answers else ():
            if name in record:
                answers[-1][target] = record.pop(name)
        if has_value(record.get("messages")):
            record["messages, for which others are named"] = record["messages"]
        return {**record, "messages": turns}

    def turn(self, turn: dict) -> dict:
        """Returns a turn under the names read here."""
        self._find(turn)
        return renamed(turn, self._turns) if self._turns else turn

    def of_answer(self, record: Mapping[str, Any]) -> dict[str, str]:
        """Returns, by name, the targets of a record's fields that belong to its only answer."""
        return {
            name: target
            for name, target in self._turns.items()
            if target in _ANSWER_TARGETS and has_value(record.get(name))
        }

    def _find(self, fields: Mapping[str, Any]) -> None:
        if len(self.found) < len(self._names):
            self.found |= self._names & fields.keys()


def only_text(value: Any) -> Any:
    """Returns the text in a list of one, and any other value itself."""
    return (
        value[0] if isinstance(value, list) and [type(each) for each in value] == [str] else value
    )


def with_context(question: str, context: str) -> str:
    """Returns a question after the text that it is about, unless it already has this text."""
    return question if context in question else "\n\n".join(filter(None, (context, question)))


def renamed(fields: dict, names: Mapping[str, str]) -> dict:
    """Returns renamed fields; a field that already had a target's name is kept under another."""
    moved = {
        names[name]: value for name, value in fields.items() if name in names and value is not None
    }
    if not moved:
        return fields
    others = {name: value for name, value in fields.items() if name not in names}
    kept = {
        f"{name}, for which another is named" if name in moved else name: value
        for name, value in others.items()
    }
    return {**kept, **moved}


def names_in_capitals(record: Mapping[Any, Any], known: Collection[str]) -> dict[str, Any]:
    """Returns, by the name in `known` that is read, the names of a record's fields such as
    `Question`."""
    return {
        str(name).lower(): name
        for name in record
        if name not in known and str(name).lower() in known and str(name).lower() not in record
    }


def unread_of(fields: Mapping[Any, Any], read: Collection[object], where: str) -> set[str]:
    """Returns the fields with a value that are not read, such as "record field `source`"."""
    return {
        f"{where} field `{printable(str(name))[:80]}`"
        for name, value in fields.items()
        if name not in read and has_value(value)
    }
