"""What the tests of whole runs share: one recipe and its uninterrupted run."""

import pytest

from tests.trainer import small_run


@pytest.fixture(scope="session")
def small_recipe(tmp_path_factory, repository):
    """Recipe of a very small run."""
    return small_run.recipe(tmp_path_factory.mktemp("small"), repository)


@pytest.fixture(scope="session")
def whole_run(small_recipe, repository):
    """Folder of that run, never interrupted; tests copy what they spoil."""
    run = small_recipe.parent / "whole"
    small_run.finish(small_run.start(repository, small_recipe, run), run)
    return run
