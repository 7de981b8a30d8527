"""Tables of nested values: JSON columns as `datasets` decodes them, and structs without the nulls of
other rows' keys, give the same conversations as JSON lines of the rows."""

import json

import pyarrow
import pytest
from pyarrow import ipc, parquet

from data.conversation import Conversation
from data.paths import File
from data.reasons import TABLE_NULLS
from data.report import Report, SourceReport
from data.sources import Source, read
from data.table_values import Struct, decoders, without_unused
from data.tables import read_table


def _row(tool, argument, value, answer):
    call = {"type": "function", "function": {"name": tool, "arguments": {argument: value}}}
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}}
    described = {"name": tool, "description": "d", "parameters": parameters}
    return {
        "messages": [
            {"role": "user", "content": f"{tool}?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": answer},
            {"role": "assistant", "content": f"It is {answer}."},
        ],
        "tools": [{"type": "function", "function": described}],
    }


ROWS = [_row("weather", "city", "Ulm", "sunny"), _row("time", "zone", "CET", "noon")]


def _conversations(path) -> tuple[list[Conversation], Report]:
    report = Report()
    return [(record.messages, record.tools) for record in read(Source(str(path)), report)], report


def _from_json_lines(tmp_path, rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return _conversations(path)[0]


def _rows_of(path, report=None):
    return list(read_table(File(str(path)), report or SourceReport(str(path))))


def _json_features():
    from datasets import Features, Json, List, Value

    turn = {"role": Value("string"), "content": Value("string"), "tool_calls": List(Json())}
    return {
        "mixed": None,
        "calls": Features({"messages": List(turn), "tools": List(Json())}),
        "all": Features({"messages": List(Json()), "tools": Json()}),
    }


def _write(dataset, folder, kind):
    """Writes a data set; returns its table's file."""
    if kind == "parquet":
        dataset.to_parquet(folder / "a.parquet")
        return folder / "a.parquet"
    dataset.save_to_disk(folder / "set")
    [stream] = (folder / "set").glob("*.arrow")
    if kind == "stream":
        return stream
    table = ipc.open_stream(stream).read_all()
    with ipc.new_file(folder / "a.arrow", table.schema) as file:
        file.write_table(table)
    return folder / "a.arrow"


@pytest.mark.parametrize("kind", ["parquet", "stream", "file"])
@pytest.mark.parametrize("features", ["mixed", "calls", "all"])
def test_json_columns_are_read_as_datasets_decodes_them(tmp_path, features, kind):
    datasets = pytest.importorskip("datasets", "5.2")
    form = _json_features()[features]
    options = {"features": form} if form else {"on_mixed_types": "use_json"}
    dataset = datasets.Dataset.from_list(ROWS, **options)
    path = _write(dataset, tmp_path, kind)
    assert _rows_of(path) == list(dataset)
    assert _conversations(path)[0] == _from_json_lines(tmp_path, ROWS)


NOTE = {"info": {"features": {"messages": {"feature": {"_type": "Json"}, "_type": "List"}}}}


@pytest.mark.parametrize(
    ("in_field", "in_schema"),
    [
        ({"ARROW:extension:name": "arrow.json", "ARROW:extension:metadata": ""}, None),
        (None, {"huggingface": json.dumps(NOTE)}),
    ],
    ids=["Arrow's name", "the note of datasets"],
)
@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_json_is_known_by_its_name_if_arrow_lacks_the_type(tmp_path, in_field, in_schema, suffix):
    form = pyarrow.list_(pyarrow.field("element", pyarrow.string(), metadata=in_field))
    texts = [[json.dumps(turn) for turn in row["messages"]] for row in ROWS]
    schema = pyarrow.schema([("messages", form)], in_schema)
    table, path = pyarrow.table([pyarrow.array(texts, form)], schema), tmp_path / f"a{suffix}"
    if suffix == ".parquet":
        parquet.write_table(table, path)
    else:
        with ipc.new_file(path, schema) as file:
            file.write_table(table)
    assert [row["messages"] for row in _rows_of(path)] == [row["messages"] for row in ROWS]


def _json_array(*texts):
    return pyarrow.ExtensionArray.from_storage(pyarrow.json_(), pyarrow.array(texts))


def test_json_is_decoded_in_every_nested_type():
    texts, one = _json_array('{"a": [null]}', None), pyarrow.array([0, 2])
    value = [{"a": [None]}, None]
    arrays = {
        "list": (pyarrow.ListArray.from_arrays(one, texts), value),
        "large list": (pyarrow.LargeListArray.from_arrays(one, texts), value),
        "fixed list": (pyarrow.FixedSizeListArray.from_arrays(texts, 2), value),
        "struct": (pyarrow.StructArray.from_arrays([texts[:1]], ["x"]), {"x": {"a": [None]}}),
        "map": (
            pyarrow.MapArray.from_arrays(one, pyarrow.array(["k", "l"]), texts),
            {"k": {"a": [None]}, "l": None},
        ),
        "dictionary": (
            pyarrow.DictionaryArray.from_arrays(pyarrow.array([0]), texts),
            {"a": [None]},
        ),
    }
    for name, (array, expected) in arrays.items():
        decode = decoders(pyarrow.schema([(name, array.type)]))
        assert decode[name](array[0].as_py()) == expected, name
    plain = pyarrow.schema([("a", pyarrow.list_(pyarrow.string())), ("b", pyarrow.int8())])
    assert decoders(plain) == {}


def test_turns_that_are_maps_are_read_as_turns(tmp_path):
    turn = pyarrow.map_(pyarrow.string(), pyarrow.string())
    talk = [[("role", "user"), ("content", "Hi?")], [("role", "assistant"), ("content", "Ho.")]]
    table = pyarrow.table({"messages": pyarrow.array([talk], pyarrow.list_(turn))})
    parquet.write_table(table, tmp_path / "maps.parquet")
    [(messages, _)], _ = _conversations(tmp_path / "maps.parquet")
    assert [(message.role, message.content) for message in messages] == [
        ("user", "Hi?"),
        ("assistant", "Ho."),
    ]


def test_a_map_with_a_key_twice_or_other_keys_stays_a_list_of_pairs():
    for key, pairs in ((pyarrow.string(), [("a", 1), ("a", 2)]), (pyarrow.int8(), [(1, 1)])):
        array = pyarrow.array([pairs, None], pyarrow.map_(key, pyarrow.int8()))
        decode = decoders(pyarrow.schema([("x", array.type)]))["x"]
        assert decode(array[0].as_py()) == pairs and decode(None) is None


def test_broken_json_is_left_out_and_counted(tmp_path):
    path, report = tmp_path / "a.parquet", SourceReport("a")
    texts = _json_array('{"a": 1}', "{", "[" * 100_000)
    parquet.write_table(pyarrow.table({"id": [1, 2, 3], "x": texts}), path)
    assert _rows_of(path, report) == [{"id": 1, "x": {"a": 1}}, {"id": 2}, {"id": 3}]
    assert ["2 values of the column x cannot be read" in note for note in report.notes] == [True]


def test_a_tables_nulls_for_other_rows_keys_are_left_out_of_calls_and_tools(tmp_path):
    """Only the key that the row had is called and described, as in JSON lines of the rows."""
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    found, report = _conversations(path)
    assert found == _from_json_lines(tmp_path, ROWS)
    assert report.repaired[TABLE_NULLS] == 2
    (messages, tools), _ = found
    assert messages[1].tool_calls[0]["function"]["arguments"] == {"city": "Ulm"}
    assert tools[0]["function"]["parameters"]["properties"] == {"city": {"type": "string"}}


def test_nulls_of_xlams_calls_and_of_results_are_left_out_too(tmp_path):
    path = tmp_path / "a.parquet"
    rows = [
        {"query": f"{name}?", "answers": [{"name": "f", "arguments": {name: 1}}], "tools": "[{}]"}
        for name in "xy"
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert [m[1].tool_calls[0]["function"]["arguments"] for m, _ in _conversations(path)[0]] == [
        {"x": 1},
        {"y": 1},
    ]
    talk = [
        {"role": "user", "content": [{"type": "text", "text": "Hi?"}]},
        {"role": "tool", "content": [{"type": "map", "place": "Ulm"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Ulm."}]},
    ]
    parquet.write_table(pyarrow.Table.from_pylist([{"messages": talk}]), path)
    found, report = _conversations(path)
    assert found == _from_json_lines(tmp_path, [{"messages": talk}])
    assert report.repaired[TABLE_NULLS] == 1


def test_nulls_in_json_stay(tmp_path):
    """In JSON lines, in arguments as JSON text, and in a column of JSON, nulls are the user's."""
    row = _row("weather", "city", None, "sunny")
    for arguments in ({"city": None}, '{"city": null}'):
        row["messages"][1]["tool_calls"][0]["function"]["arguments"] = arguments
        [(messages, _)] = _from_json_lines(tmp_path, [row])
        assert messages[1].tool_calls[0]["function"]["arguments"] == {"city": None}
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    [(messages, _)] = _conversations(path)[0]
    assert messages[1].tool_calls[0]["function"]["arguments"] == {"city": None}
    in_json = {"messages": _json_array(json.dumps(row["messages"]))}
    parquet.write_table(pyarrow.table(in_json), path)
    found, report = _conversations(path)
    assert found[0][0] == messages and TABLE_NULLS not in report.repaired


def test_json_that_nests_deeper_than_any_table_is_returned_as_it_is():
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    assert without_unused(deep)[0] is deep
    assert without_unused([Struct(a=None, b=[Struct(c=None)])]) == ([{"b": [{}]}], True)


def test_a_tables_nulls_do_not_override_template_arguments(tmp_path):
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    rows = [
        {"messages": turns, "chat_template_kwargs": {"thinking": True}},
        {"messages": [turns[0], {**turns[1], "content": "b"}], "chat_template_kwargs": {"n": 1}},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    report = Report()
    records = list(read(Source(str(tmp_path / "a.parquet")), report))
    assert [record.template_kwargs for record in records] == [{"thinking": True}, {"n": 1}]
    assert report.sources[0].repaired == {TABLE_NULLS: 2}
