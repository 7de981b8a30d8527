"""Numbers of tokens are read in the notations that people use."""

import pytest

from data.lengths import tokens_of, with_lengths


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("4096", 4096),
        ("0", 0),
        ("-5", -5),
        ("64K", 65536),
        ("128k", 131072),
        ("1m", 1 << 20),
        ("1M", 1 << 20),
        ("2b", 2 << 30),
        ("1_048_576", 1 << 20),
        ("131,072", 131072),
        ("1.5K", 1536),
        (" 64K ", 65536),
    ],
)
def test_numbers_of_tokens_are_parsed(text, tokens):
    assert tokens_of(text) == tokens


@pytest.mark.parametrize(
    "text", ["", "K", "64X", "64KB", "64 tokens", "nan", "inf", "infk", "1e400", "0.3K", "9" * 99]
)
def test_an_invalid_number_of_tokens_is_refused_with_valid_ones(text):
    with pytest.raises(ValueError, match="write a number of tokens such as 4096, 64K or 1M"):
        tokens_of(text)


def test_lengths_in_nested_fields_are_parsed():
    names = ("max_position_embeddings", "original_max_position_embeddings")
    written = {
        "max_position_embeddings": "128K",
        "rope_theta": "64K",
        "rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": "8K"},
    }
    assert with_lengths(written, names) == {
        "max_position_embeddings": 131072,
        "rope_theta": "64K",
        "rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 8192},
    }
    assert with_lengths({"max_position_embeddings": "long"}, names) == {
        "max_position_embeddings": "long"
    }
