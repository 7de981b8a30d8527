"""Results are passed on in order, none is lost, and the next one is always under way."""

from trainer.overlap import one_behind


def test_each_result_follows_the_request_for_the_next():
    made = []
    results = one_behind(made.append(number) or number for number in range(4))
    assert [(number, len(made)) for number in results] == [(0, 2), (1, 3), (2, 4), (3, 4)]


def test_one_result_or_none():
    assert list(one_behind([7])) == [7] and list(one_behind([])) == []
