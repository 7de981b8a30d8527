"""Data prepared in parts, without a runner of Beam: repeats between files, whichever files hold
them."""

import json
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from data.encode import EncodingRules
from data.engine import Processes
from data.prepare import prepare
from data.report import MOST_NAMES, OTHER_FIELDS
from data.sources import Source, Sources
from data.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(Path(__file__).parents[2] / "data/fixtures/tiny_tokenizer")


class InParts(Processes):
    """Runs the steps of Beam's workers in this process."""

    in_parts = True


def _prepared(folder: Path, sources: Sources, engine: Processes):
    target = folder / type(engine).__name__
    return prepare(sources, TOKENIZER, EncodingRules(64), target, progress=False, engine=engine)


def _contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=25), min_size=1, max_size=5),
        min_size=1,
        max_size=2,
    )
)
def test_a_conversation_is_kept_in_the_first_file_of_its_source_that_has_it(numbers):
    """numbers[source][file] are the conversations of a file."""
    with tempfile.TemporaryDirectory() as name:
        folder, sources = Path(name), []
        for source, files in enumerate(numbers):
            (folder / f"{source}").mkdir()
            for file, conversations in enumerate(files):
                lines = (
                    json.dumps({"messages": [f"question {number}", f"answer {number}"]})
                    for number in conversations
                )
                (folder / f"{source}/{file}.jsonl").write_text("\n".join(lines))
            sources.append(Source(str(folder / f"{source}"), template="vicuna_v1.1"))
        one, parts = (
            _prepared(folder, Sources(tuple(sources)), engine)
            for engine in (Processes(), InParts())
        )
        assert _contents(one.folder) == _contents(parts.folder)
        for files, report in zip(numbers, parts.report.sources, strict=True):
            conversations = [number for file in files for number in file]
            assert report.kept == len(set(conversations))
            assert report.dropped.get("duplicate", 0) == len(conversations) - report.kept


def test_names_are_counted_in_the_order_of_one_process(tmp_path):
    """The first names of unread fields, which here are not the first by the alphabet, are counted
    separately."""
    lines = (
        json.dumps({"messages": [f"question {n}", f"answer {n}"], f"field {999 - n}": 1})
        for n in range(MOST_NAMES + 9)
    )
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    sources = Sources((Source(str(tmp_path / "a.jsonl"), template="vicuna_v1.1"),))
    one, parts = (_prepared(tmp_path, sources, engine) for engine in (Processes(), InParts()))
    assert _contents(one.folder) == _contents(parts.folder)
    [report] = parts.report.sources
    assert report.unread[OTHER_FIELDS] == 9 and "record field `field 999`" in report.unread
