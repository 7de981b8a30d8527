"""The augmented random search: it climbs, resumes, and tracks the statistics of the states it
saw."""

import numpy as np

from data.trajectories.search import Search, SearchConfig


def test_the_search_climbs(tmp_path):
    """On an artificial return: the policy's closeness to a fixed one."""
    best = np.linspace(-1, 1, 6).reshape(2, 3)
    search = Search(
        SearchConfig(directions=8, best=4, step=0.1, noise=0.1),
        best.shape,
        0,
        tmp_path / "search.npz",
    )
    start = np.square(search.weights - best).sum()
    states = [(np.zeros(3), np.ones(3), 10)]
    for _ in range(60):
        policies = [
            search.weights + sign * 0.1 * direction
            for direction in search.directions()
            for sign in (1, -1)
        ]
        search.update(np.array([-np.square(policy - best).sum() for policy in policies]), states)
    assert np.square(search.weights - best).sum() < 0.1 * start


def test_the_search_resumes(tmp_path):
    def search():
        return Search(SearchConfig(directions=2, best=1), (1, 3), 7, tmp_path / "search.npz")

    first = search()
    first.update(np.array([1.0, 2.0, 3.0, 5.0]), [(np.ones(3), np.full(3, 4.0), 2)])
    again = search()
    assert again.iteration == 1
    np.testing.assert_array_equal(again.weights, first.weights)
    np.testing.assert_array_equal(again.std, first.std)
    np.testing.assert_array_equal(again.directions(), first.directions())


def test_statistics_cover_all_states(tmp_path):
    states = np.random.default_rng(0).normal(3, 2, size=(50, 4))
    search = Search(SearchConfig(directions=1, best=1), (1, 4), 0, tmp_path / "search.npz")
    search.update(
        np.array([1.0, 2.0]),
        [(part.sum(0), np.square(part).sum(0), len(part)) for part in np.split(states, 2)],
    )
    np.testing.assert_allclose(search.mean, states.mean(0), rtol=1e-12)
    np.testing.assert_allclose(search.std, states.std(0), rtol=1e-10)
