"""SmolLM2 at twice its length: how the benchmark reads scripts.loss_by_position, and when
perplexity counts as falling."""

import json

import pytest

from scripts.benchmarks.extension import KNOWN, LENGTH, PIECES, Options, gain, is_falling, losses


def bucket(start, loss, error=0.01):
    return {
        "tokens_before_from": start,
        "tokens_before_to": 2 * start - 1,
        "targets": 100,
        "loss_nats_per_target": loss,
        "standard_error": error,
    }


def model(by_pieces, by_known, whole, error):
    gains = {
        1024: bucket(KNOWN, by_pieces - whole, error),
        KNOWN: bucket(KNOWN, by_known - whole, error),
    }
    return {
        "losses": dict(
            zip(
                (*PIECES, LENGTH),
                (bucket(KNOWN, loss) for loss in (by_pieces, by_known, whole)),
                strict=True,
            )
        ),
        "gains": gains,
    }


def test_rows_of_the_last_bucket_are_read_in_the_order_written(tmp_path):
    curves = {
        "model": 3.0,
        "model, pieces of 1024 tokens": 3.2,
        "model, pieces of 8192 tokens": 3.1,
    }
    gains = {
        "model, against pieces of 1024 tokens": 0.2,
        "model, against pieces of 8192 tokens": 0.1,
    }
    table = {
        kind: {name: [bucket(4096, 9.0), bucket(KNOWN, loss)] for name, loss in rows.items()}
        for kind, rows in (("curves", curves), ("gains", gains))
    }
    (tmp_path / "name").mkdir()
    (tmp_path / "name" / "loss_by_position.json").write_text(json.dumps(table))
    read = losses(
        "model",
        Options(output=str(tmp_path), model="model", text="text.txt", book="book.txt"),
        "name",
    )
    numbers = {
        kind: {tokens: row["loss_nats_per_target"] for tokens, row in rows.items()}
        for kind, rows in read.items()
    }
    assert numbers == {
        "losses": {LENGTH: 3.0, 1024: 3.2, KNOWN: 3.1},
        "gains": {1024: 0.2, KNOWN: 0.1},
    }


@pytest.mark.parametrize(
    ("by_pieces", "by_known", "whole", "error", "falls"),
    [
        (3.2, 3.1, 3.0, 0.01, True),
        (3.2, 3.1, 3.09, 0.01, False),
        (3.1, 3.2, 3.0, 0.01, False),
        (3.2, 3.1, 3.4, 0.01, False),
    ],
)
def test_perplexity_falls_if_more_context_helps_significantly(
    by_pieces, by_known, whole, error, falls
):
    assert is_falling(model(by_pieces, by_known, whole, error)) == falls


def test_a_gain_has_its_interval():
    assert gain(bucket(KNOWN, 0.1234, 0.01)) == "+0.123 +- 0.020"
