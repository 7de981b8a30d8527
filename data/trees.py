"""Message trees, as published by OpenAssistant: nested in a record, or one row per message.

A tree becomes one conversation of the best ranked replies, or one per path from its first message
to a last one.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from data.errors import UserError
from data.reasons import MESSAGE_TWICE, NO_PARENT, TREE_MESSAGE
from data.records import MAX_BYTES, would_fit
from data.report import SourceReport

_ROW = frozenset({"message_id", "parent_id", "role", "text"})
# Fields for a message's position in its tree; they are read, but not part of its turn.
_PLACE = frozenset({"message_id", "parent_id", "message_tree_id", "rank", "replies"})


def is_row(record: object) -> bool:
    """Returns whether a record is one message of a tree."""
    return isinstance(record, dict) and record.keys() >= _ROW


def root_of(record: object) -> dict | None:
    """Returns the first message of the tree that a record holds; None if it holds none."""
    root = record.get("prompt") if isinstance(record, dict) else None
    return root if isinstance(root, dict) and isinstance(root.get("replies"), list) else None


def tree_id(record: dict) -> str | None:
    """Returns the id of the tree that a record holds; None if it has none."""
    name = record.get("message_tree_id") or record["prompt"].get("message_id")
    return name if isinstance(name, str) else None


def best_path(root: dict) -> tuple[list[object], bool]:
    """Returns the turns of the best ranked replies, and whether there are others."""
    turns: list[object] = []
    others = False
    node: object = root
    while node is not None:
        turns.append(_turn(node))
        replies = _replies(node)
        others = others or len(replies) > 1
        node = min(replies, key=_rank, default=None)
    return turns, others


def paths(root: dict) -> Iterator[list[object]]:
    """Yields the turns of each path from the root to a leaf, the best ranked first."""
    turns: list[object] = []
    waiting: list[tuple[int, object]] = [(0, root)]
    while waiting:
        depth, node = waiting.pop()
        del turns[depth:]
        turns.append(_turn(node))
        replies = sorted(_replies(node), key=_rank)
        waiting.extend((depth + 1, reply) for reply in reversed(replies))
        if not replies:
            yield list(turns)


def _replies(node: object) -> list[object]:
    replies = node.get("replies") if isinstance(node, dict) else None
    return replies if isinstance(replies, list) else []


def _turn(node: object) -> object:
    if not isinstance(node, dict):
        return node
    return {name: value for name, value in node.items() if name not in _PLACE}


def _rank(reply: object) -> float:
    """Returns a reply's rank, 0 for the best; unranked ones come last, in order."""
    rank = reply.get("rank") if isinstance(reply, dict) else None
    return float("inf") if not isinstance(rank, int | float) or rank != rank else rank


class _Row(NamedTuple):
    message: dict[str, Any]
    file: str
    line: int


class Forest:
    """Makes records of trees: joins the rows of a source, splits trees into paths."""

    def __init__(self, every_path: bool):
        self._every_path = every_path
        self._rows: dict[str | int, _Row] = {}  # by the id of the message
        self._characters = 0

    @property
    def has_rows(self) -> bool:
        """Whether rows were added."""
        return bool(self._rows)

    def records(self, raw: object) -> Iterator[object]:
        """Yields a raw record, or one for each path of the tree that it holds."""
        root = root_of(raw) if self._every_path else None
        if root is None or not isinstance(raw, dict):
            yield raw
            return
        others = {name: raw[name] for name in raw if name not in ("prompt", "message_tree_id")}
        for turns in paths(root):
            # All share an id, so that none is held out while others are trained on.
            yield {"id": tree_id(raw), **others, "messages": turns}

    def add(self, row: dict[str, Any], report: SourceReport) -> None:
        """Keeps a row until all are read; drops one without a usable id."""
        name = row["message_id"]
        if not isinstance(name, str | int):
            report.drop(TREE_MESSAGE, row)
        elif name in self._rows:
            report.drop(MESSAGE_TWICE, row)
        else:
            self._rows[name] = _Row(row, report.file, report.line)
            self._characters += len(str(row["text"]))
            if self._characters > MAX_BYTES:
                raise UserError(
                    f"{report.file}: more than {MAX_BYTES >> 20} MiB of messages of trees; "
                    f"{would_fit('several sources')}"
                )

    def trees(self, report: SourceReport) -> Iterator[dict[str, Any]]:
        """Yields a record for each tree in the rows, in the order of roots; drops other rows."""
        nodes = {name: {**row.message, "replies": []} for name, row in self._rows.items()}
        roots, others = [], set(nodes)
        for name, node in nodes.items():
            parent = node["parent_id"]
            if parent is None or parent == "":
                roots.append(name)
            elif isinstance(parent, str | int) and parent in nodes:
                nodes[parent]["replies"].append(node)
        for name in roots:
            waiting = [nodes[name]]
            while waiting:
                node = waiting.pop()
                others.discard(node["message_id"])
                waiting += node["replies"]
        for name, (row, report.file, report.line) in self._rows.items():
            if name in others:
                report.drop(NO_PARENT, row)
        for name in roots:
            _, report.file, report.line = self._rows[name]
            yield {"message_tree_id": str(name), "prompt": nodes[name]}
