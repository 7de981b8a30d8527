"""A process without prepared data on its disk reads the same rows from a store on the loopback,
even from one that refuses one request in five."""

import os
from unittest import mock

import pytest

from data import record_store
from tests.soak import cold_start


@pytest.mark.slow
def test_the_first_batch_is_the_same_from_a_store_that_refuses_requests(tmp_path, monkeypatch):
    monkeypatch.setattr(record_store, "RECORDS_IN_A_FILE", 16)
    with mock.patch.dict(os.environ):
        measured = cold_start.measure(tmp_path, 64 * cold_start.CONTEXT_LENGTH)
    assert measured["whole"]["sha256"] == measured["refusing"]["sha256"] == measured["sha256"]
    assert measured["requests"] > 8 and measured["refused"] >= 1
    assert measured["whole"]["copied"] > 10**5
    rows = cold_start.result_rows(measured, 64 * cold_start.CONTEXT_LENGTH)
    assert [row["verdict"] for row in rows.values()] == ["held", "held"]
    other = cold_start.result_rows({**measured, "sha256": "other"}, 1)
    assert other["refusing"]["verdict"] == "short" and "ANOTHER" in other["refusing"]["found"]
