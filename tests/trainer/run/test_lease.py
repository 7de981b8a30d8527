"""Tests of trainer/run/lease.py: two never hold a run in a bucket, and a holder that is gone does
not keep it."""

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
    """A lease whose process was killed: nobody renews it, and nobody gave it back."""
    gone = Lease(bucket, on_loss=print)
    gone.take()
    gone._released.set()
    gone._thread.join()
    return gone


def test_of_two_at_once_one_has_it_and_the_other_is_told_who(bucket):
    with leased(bucket):
        with pytest.raises(
            TransientError, match=rf"{bucket.url}: process \d+ on .* is training there"
        ):
            require_unused(bucket)
        with pytest.raises(TransientError, match="is training there since"):
            Lease(bucket).take()
    with leased(bucket):  # given back
        pass
    assert bucket.version(LOCK).content == b""


def test_many_that_begin_at_the_same_moment(bucket):
    """Whoever is refused was refused by the one that has it."""
    taken, refused = [], []

    def take():
        one = Lease(bucket, on_loss=print)
        try:
            one.take()
            taken.append(one)
        except TransientError as error:
            refused.append(error)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(taken), len(refused)) == (1, 7)
    taken[0].require()
    taken[0].release()


def test_a_holder_that_is_gone_is_waited_for_until_the_lease_ends(bucket, capsys):
    gone, begun = abandoned(bucket), time.monotonic()
    with leased(bucket) as now:
        assert 1.0 < time.monotonic() - begun < 5
        assert "waiting for its end" in capsys.readouterr().err
        now.require()
        with pytest.raises(TransientError, match="another process has taken the lock"):
            gone.require()  # it stood still, and would go on


def test_who_was_seen_early_is_waited_for_no_longer(bucket):
    abandoned(bucket)
    require_unused(bucket)
    time.sleep(1.3)  # while the step is compiled
    begun = time.monotonic()
    with leased(bucket):
        assert time.monotonic() - begun < 1


def test_who_has_lost_it_ends(bucket):
    lines, lost = [], threading.Event()
    mine = Lease(bucket, on_loss=lambda line: (lines.append(line), lost.set()))
    mine.take()
    bucket.write(LOCK, b"another's")  # whose clock said that this one was gone
    assert lost.wait(5) and lines == [f"{bucket.url}: another process has taken the lock"]


def test_who_cannot_renew_it_ends_before_another_may_take_it(store_and_url, bucket):
    lost = threading.Event()
    mine = Lease(bucket, on_loss=lambda line: lost.set())
    mine.take()
    begun = time.monotonic()
    store_and_url[0].store.refused = lambda method, path: 503
    assert lost.wait(10) and time.monotonic() - begun < 2 * lease.LEASE_SECONDS


@pytest.mark.parametrize("store_and_url", ["gs"], indirect=True)
def test_a_write_whose_answer_was_lost_is_known_as_ones_own(store_and_url, bucket, monkeypatch):
    """The store has written, and the second try, after a second, finds the first one's file."""
    monkeypatch.setattr(lease, "LEASE_SECONDS", 60)
    answers = iter([True])
    written = gcs_server.Handler.write

    def losing(handler, *arguments):
        answer, handler.answer = handler.answer, lambda *_: None
        written(handler, *arguments)
        handler.answer = answer
        return handler.fail(503) if next(answers, False) else written(handler, *arguments)

    store_and_url[0].http.RequestHandlerClass.write = losing
    with leased(bucket) as mine:
        mine.require()


def test_a_bucket_that_one_may_not_use_is_told_in_one_line(store_and_url):
    server, url = store_and_url
    server.store.refused = lambda method, path: 403
    refused = Bucket(f"{url}/run")
    for ask in (refused.names, lambda: refused.version("x"), lambda: refused.remove("x")):
        with pytest.raises(UserError, match=rf"{url}/run: .* would work") as told:
            ask()
        assert "\n" not in str(told.value) and not isinstance(told.value, TransientError)


def test_a_store_that_does_not_answer_may_answer_later(gcs, monkeypatch):
    monkeypatch.setattr(buckets, "_SECONDS", 0.5)
    gcs.store.refused = lambda method, path: 503
    with pytest.raises(TransientError, match="gs://bucket/run: no answer within"):
        Bucket("gs://bucket/run").version("x", 0.5)


def test_a_store_that_writes_whatever_the_condition_is_refused(store_and_url):
    server, url = store_and_url
    Bucket(url).require_conditions("trial")
    server.store.conditions = False
    with pytest.raises(UserError, match="this store ignores write conditions"):
        Bucket(url).require_conditions("trial")
    assert server.store.names() == []
