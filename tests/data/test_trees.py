"""Trees of messages, nested or one row per message: the best ranked replies, or every path, with
everything else reported."""

import json

from data.clean import CleanConfig
from data.report import Report
from data.sources import Source, read

ROWS = [
    {"message_id": "d", "parent_id": "c", "role": "assistant", "text": "Bye.", "rank": None},
    {"message_id": "b", "parent_id": "r", "role": "assistant", "text": "Hello.", "rank": 0},
    {"message_id": "a", "parent_id": "r", "role": "assistant", "text": "No.", "rank": 1},
    {"message_id": "r", "parent_id": None, "role": "prompter", "text": "Hi?", "rank": None},
    {"message_id": "c", "parent_id": "b", "role": "prompter", "text": "And?", "rank": None},
    {"message_id": "e", "parent_id": "c", "role": "assistant", "text": "Ciao.", "rank": None},
    {"message_id": "s", "parent_id": "", "role": "prompter", "text": "Who?", "rank": None},
    {"message_id": "t", "parent_id": "s", "role": "assistant", "text": "Me.", "rank": None},
]
BEST = [["Hi?", "Hello.", "And?", "Bye."], ["Who?", "Me."]]
ALL = [BEST[0], ["Hi?", "Hello.", "And?", "Ciao."], ["Hi?", "No."], BEST[1]]


def nested(name):
    [row] = [row for row in ROWS if row["message_id"] == name]
    replies = [nested(row["message_id"]) for row in ROWS if row["parent_id"] == name]
    return {**row, "replies": replies}


def conversations(tmp_path, records, replies):
    path = tmp_path / "trees.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    report = Report()
    source = Source(str(path))
    read_records = list(read(source, report, clean=CleanConfig(replies=replies)))
    texts = [[message.content for message in record.messages] for record in read_records]
    return texts, [record.id for record in read_records], report.sources[0]


def test_rows_and_nested_trees_give_the_same_conversations(tmp_path):
    trees = [{"message_tree_id": name, "prompt": nested(name)} for name in ("r", "s")]
    for records in (ROWS, trees, [{"data": ROWS}]):
        texts, ids, report = conversations(tmp_path, records, "best")
        assert texts == BEST and ids == ["r", "s"] and not report.unread
        assert report.repaired == {"replies of a tree other than the best ranked left out": 1}
        texts, ids, report = conversations(tmp_path, records, "all")
        # One id per tree, which is held out or trained on as a whole.
        assert texts == ALL and ids == ["r", "r", "r", "s"] and not report.repaired
        assert (report.records, report.kept, report.unread) == (4, 4, {})


def test_rows_outside_any_tree_are_dropped_with_their_line(tmp_path):
    lost = [
        {"message_id": "x", "parent_id": "y", "role": "assistant", "text": "?"},
        {"message_id": "p", "parent_id": "q", "role": "assistant", "text": "a"},
        {"message_id": "q", "parent_id": "p", "role": "prompter", "text": "circle"},
        {"message_id": "t", "parent_id": "s", "role": "assistant", "text": "You."},
        {"message_id": None, "parent_id": "s", "role": "assistant", "text": "?", "lang": "en"},
    ]
    dropped = []
    path = tmp_path / "trees.jsonl"
    path.write_text("\n".join(map(json.dumps, [*ROWS, *lost])))
    report = Report(on_drop=dropped.append)
    records = list(read(Source(str(path)), report))
    assert [[message.content for message in record.messages] for record in records] == BEST
    assert [record.line for record in records] == [4, 7]
    assert {(drop.line, drop.reason.split(", ")[1]) for drop in dropped} == {
        (9, "replying to a message that is missing"),
        (10, "replying to a message that is missing"),
        (11, "replying to a message that is missing"),
        (12, "with the id of another"),
        (13, "without a usable id"),
    }


def test_unread_fields_of_trees_are_named(tmp_path):
    tree = {"message_tree_id": "r", "tree_state": "ready", "prompt": {**nested("r"), "lang": "en"}}
    for replies in ("best", "all"):
        _, _, report = conversations(tmp_path, [tree], replies)
        assert {"record field `tree_state`", "turn field `lang`"} <= report.unread.keys()
