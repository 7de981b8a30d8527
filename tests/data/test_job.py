"""Names of prepared folders: another name would prepare a user's data again."""

from datetime import datetime

import pytest

from data.clean import CleanConfig
from data.encode import EncodingRules
from data.job import Job
from data.sources import Source, Sources
from data.tokenizer import Tokenizer
from tests.conftest import REPOSITORY

EVERY_RULE = EncodingRules(
    4096,
    clean=CleanConfig(html="always", near_duplicates=0.8, languages=("en", "de")),
    train_on="last",
    cut_prompts=True,
    unpaired=True,
    share_prompts=True,
)


@pytest.mark.parametrize(
    ("rules", "held_out", "fraction", "name"),
    [
        (EncodingRules(64), False, 0.0, "9e4ff54bda65ec215c62"),
        (EncodingRules(64), True, 0.25, "786176a858936918f085"),
        (EVERY_RULE, False, 0.25, "0b5af95df0b2876393f5"),
    ],
)
def test_the_name_of_a_prepared_folder_is_that_of_earlier_versions(
    rules, held_out, fraction, name, tmp_path, monkeypatch
):
    """The names that commit eb2c5578 gave, with its `RULES`: the arguments' part is unchanged."""
    monkeypatch.setattr("data.job.RULES", "prepare-15")
    (tmp_path / "chats.jsonl").write_text('{"messages": ["a question", "an answer"]}\n')
    (tmp_path / "book.txt").write_text("Once upon a time.")
    chats = Source(str(tmp_path / "chats.jsonl"), template="plain", fields={"who": "user"})
    book = Source(str(tmp_path / "book.txt"), "text", add_bos=True, control_tokens=True)
    sources = Sources(
        (chats,) if held_out else (chats, book), (book,) if held_out else (), fraction
    )
    tokenizer = (
        Tokenizer.load(REPOSITORY / "data/fixtures/tiny_tokenizer")
        .with_template_date(datetime(2026, 2, 3))
        .with_template_kwargs({"enable_thinking": False})
    )
    assert Job(sources, tokenizer, rules).key() == name
