"""Tests of trainer/run/lease.py: two starts never hold a run in a bucket together, and a dead
holder does not keep it."""

import threading
import time

import pytest

from data.errors import TransientError, UserError
from tests import gcs_server
from trainer.run import bucket as buckets
from trainer.run import lease
from trainer.run.bucket import Bucket
from trainer.run.lease import LOCK, Lease, leased, require_unused


@pytest.fixture
def bucket(store_and_url, monkeypatch):
    monkeypatch.setattr(lease, "LEASE_SECONDS", 1.2)
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.2)
    monkeypatch.setattr(lease, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(lease, "_seen", {})
    return Bucket(f"{store_and_url[1]}/runs/mine")


def abandoned(bucket):
    """A lease whose process was killed: it is neither renewed nor returned."""
    lease = Lease(bucket, on_loss=print)
    lease.take()
    lease._released.set()
    lease._thread.join()
    return lease


def test_one_of_two_simultaneous_starts_holds_it_and_is_named_to_the_other(bucket):
    with leased(bucket):
        with pytest.raises(
            TransientError, match=rf"{bucket.url}: process \d+ on .* is training there"
        ):
            require_unused(bucket)
        with pytest.raises(TransientError, match="is training there since"):
            Lease(bucket).take()
    with leased(bucket):  # returned
        pass
    assert bucket.version(LOCK).content == b""


def test_only_one_of_many_simultaneous_starts_holds_it(bucket):
    """Every refusal names the one that holds the lease."""
    holders, refused = [], []

    def take():
        lease = Lease(bucket, on_loss=print)
        try:
            lease.take()
            holders.append(lease)
        except TransientError as error:
            refused.append(error)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(holders), len(refused)) == (1, 7)
    holders[0].require()
    holders[0].release()


def test_a_dead_holder_is_waited_for_until_the_lease_ends(bucket, capsys):
    dead, start = abandoned(bucket), time.monotonic()
    with leased(bucket) as now:
        assert 1.0 < time.monotonic() - start < 5
        assert "waiting for its end" in capsys.readouterr().err
        now.require()
        with pytest.raises(TransientError, match="another process has taken the lock"):
            dead.require()  # it had stalled, and would go on


def test_a_holder_seen_earlier_is_waited_for_no_longer(bucket):
    abandoned(bucket)
    require_unused(bucket)
    time.sleep(1.3)  # while the step compiles
    start = time.monotonic()
    with leased(bucket):
        assert time.monotonic() - start < 1


def test_a_process_that_lost_its_lease_ends(bucket):
    lines, lost = [], threading.Event()
    lease = Lease(bucket, on_loss=lambda line: (lines.append(line), lost.set()))
    lease.take()
    bucket.write(LOCK, b"another's")  # its clock said that this process was dead
    assert lost.wait(5) and lines == [f"{bucket.url}: another process has taken the lock"]


def test_a_process_that_cannot_renew_ends_before_another_may_take_over(store_and_url, bucket):
    lost = threading.Event()
    ours = Lease(bucket, on_loss=lambda line: lost.set())
    ours.take()
    start = time.monotonic()
    store_and_url[0].store.refused = lambda method, path: 503
    assert lost.wait(10) and time.monotonic() - start < 2 * lease.LEASE_SECONDS


@pytest.mark.parametrize("store_and_url", ["gs"], indirect=True)
def test_a_write_whose_response_was_lost_is_recognized_as_ours(store_and_url, bucket, monkeypatch):
    """The store has written the file, and the second try, a second later, finds it there."""
    monkeypatch.setattr(lease, "LEASE_SECONDS", 60)
    answers = iter([True])
    written = gcs_server.Handler.write

    def losing(handler, *arguments):
        answer, handler.answer = handler.answer, lambda *_: None
        written(handler, *arguments)
        handler.answer = answer
        return handler.fail(503) if next(answers, False) else written(handler, *arguments)

    store_and_url[0].http.RequestHandlerClass.write = losing
    with leased(bucket) as ours:
        ours.require()


def test_a_write_that_is_answered_too_late_is_recognized_as_ours(bucket, monkeypatch):
    """The lock then holds an earlier content of ours; the run once ended as if it were another's."""
    monkeypatch.setattr(lease, "BEAT_SECONDS", 60)
    answers, write = iter([True]), Bucket.write

    def answering_late(*arguments):
        mark = write(*arguments)
        if next(answers, False):
            raise TransientError("no answer within 20 s")
        return mark

    with leased(bucket) as ours:
        monkeypatch.setattr(Bucket, "write", answering_late)
        with pytest.raises(TransientError, match="no answer"):
            ours.require()
        before = bucket.version(LOCK)
        ours.require()
        assert bucket.version(LOCK).mark != before.mark, "renewed"
        bucket.write(LOCK, b"another's")
        with pytest.raises(TransientError, match="another process has taken the lock"):
            ours.require()


def test_a_forbidden_bucket_is_a_one_line_error(store_and_url):
    server, url = store_and_url
    server.store.refused = lambda method, path: 403
    refused = Bucket(f"{url}/run")
    for ask in (refused.names, lambda: refused.version("x"), lambda: refused.remove("x")):
        with pytest.raises(UserError, match=rf"{url}/run: .* would work") as error:
            ask()
        assert "\n" not in str(error.value) and not isinstance(error.value, TransientError)


@pytest.mark.parametrize(
    ("message", "ends"),
    [
        ("ABORTED: Conflicting operation [http_response_code='409']", "operation"),
        ("INVALID_ARGUMENT: ExpiredToken: The token has expired.", "; new credentials would work"),
        ("NOT_FOUND: NoSuchBucket: The bucket does not exist", "read and write would work"),
    ],
)
def test_a_stores_error_names_what_would_help(message, ends):
    assert str(Bucket("s3://bucket/run")._user_error(ValueError(message))).endswith(ends)


def test_an_unresponsive_store_is_a_transient_error(gcs, monkeypatch):
    monkeypatch.setattr(buckets, "_SECONDS", 0.5)
    gcs.store.refused = lambda method, path: 503
    with pytest.raises(TransientError, match="gs://bucket/run: no answer within"):
        Bucket("gs://bucket/run").version("x", 0.5)


def test_a_store_that_ignores_preconditions_is_refused(store_and_url):
    server, url = store_and_url
    Bucket(url).require_conditions("trial")
    server.store.conditions = False
    with pytest.raises(UserError, match="this store ignores write conditions"):
        Bucket(url).require_conditions("trial")
    assert server.store.names() == []
