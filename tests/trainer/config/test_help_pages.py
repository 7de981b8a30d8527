"""The pages of train.py --help: a short first one, and every field on the others."""

import docstring_parser
import pytest

import train
from eval.live import TESTS
from eval.live_test import LiveTest
from trainer.config import fields
from trainer.config.data import SourceConfig
from trainer.config.help_pages import COMMON, FLAGS, RECORDED, help_text
from trainer.config.load import load
from trainer.config.stage import StageConfig

RUN = ["--model.path", "hf", "--data.path", "a.json"]


def page(capsys, *words):
    """What train.py --help prints."""
    assert train.main(["--help", *words]) == 0
    return capsys.readouterr().out


def joined(text):
    return " ".join(text.split())


def test_the_first_page_is_short_and_names_every_section(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    text = page(capsys)
    assert len(text.splitlines()) <= 70 and max(map(len, text.splitlines())) <= 100
    assert text.startswith("Fine-tunes") and text.rstrip().endswith("before the first step.")
    assert "python train.py --model.path MODEL --data.path FILE" in text
    assert "--help SECTION" in text and "--help all" in text
    for name in (*fields.SECTIONS, *fields.LISTS, "evaluations"):
        assert f"\n  {name} " in text
    in_no_section = {field for field in fields.FIELDS if "." not in field}
    in_no_section -= {*RECORDED, *fields.LISTS, "evaluations"}
    for name in (*COMMON, *in_no_section):
        assert f"\n  --{name} " in text
    for flag in FLAGS:
        assert f"\n  {flag} " in text
    assert "Peak learning rate, by default 1e-4 with adapters (default: 1e-05)" in text


def test_all_documents_every_field_that_a_user_may_set(capsys):
    text = page(capsys, "all")
    for field in {*fields.FIELDS} - {*RECORDED}:
        described = joined(text.partition(f"\n  --{field} ")[2].partition("\n  --")[0])
        words = described.partition(" (default:")[0].split()
        assert len(words) >= 4, f"{field} is not documented"
    for field in RECORDED:
        assert f"--{field}" not in text
    for cls in fields.SECTIONS.values():
        assert joined(cls.__doc__.partition("\n\n")[0]).rstrip(".") + ":" in text.splitlines()
    for flag in ("--config RECIPE.yaml", "--dry-run [MACHINE]"):
        assert flag in text
    for name in (*fields.LISTS, "evaluations"):
        assert f"Fields of each entry of {name}," in joined(text)
    assert "(default: )" not in text and "None" not in text and "tuple[" not in text


def test_values_and_defaults_are_in_a_recipes_words(capsys):
    text = page(capsys, "all")
    for flag in (
        "--train.steps N",
        "--data.context_length TOKENS",
        "--optimizer.learning_rate NUMBER",
        "--memory.prefetch {true, false}",
        "--mesh.dcn {NAME: N, ...}",
        "--logging.profile_steps [N, ...]",
        "--auto [{mesh, memory, positions}, ...]",
        "--train.non_finite {stop, skip}",
    ):
        assert f"\n  {flag}\n" in text
    assert "(default: [all-linear])" in text and "(default: false)" in text


def test_sections_that_a_word_may_replace_say_so(capsys):
    words = {"data.clean": "{scraped}", "mesh": "auto", "memory": "auto"}
    assert {name: f"--{name} {word}\n" in page(capsys, name) for name, word in words.items()} == (
        dict.fromkeys(words, True)
    )
    assert load([*RUN, "--mesh", "auto", "--memory", "auto"]).auto[:2] == ("mesh", "memory")
    assert load([*RUN, "--data.clean", "scraped"]).data.clean.html == "detect"


@pytest.mark.parametrize("name", ["data.sources", "stages", "evaluations"])
def test_the_fields_of_a_lists_entries_have_help(name, capsys):
    """Each with its description, without dashes: they are no flags."""
    kinds = {"data.sources": [SourceConfig], "stages": [StageConfig]}
    text = page(capsys, name)
    for cls in kinds.get(name, [LiveTest, *TESTS.values()]):
        for param in docstring_parser.parse_from_object(cls).params:
            assert f"\n  {param.arg_name} " in text
            assert joined(param.description) in joined(text)
    assert f"--{name} '[{{...}}]'" in joined(text) and f"--{name}." not in text
    for test in TESTS:
        assert (f"test: {test}: " in text or f"test: {test}; " in text) == (name == "evaluations")


def test_the_help_of_a_section_shows_only_that_section(capsys):
    text = page(capsys, "optimizer")
    assert "--optimizer.learning_rate" in text and "Peak learning rate" in text
    assert "--train.steps" not in text and "--memory.remat" not in text
    assert train.main(["--help", "optimiser"]) == 2
    assert "--help: optimiser is not a section (did you mean optimizer?); sections are model" in (
        capsys.readouterr().err
    )


def test_the_defaults_of_a_run_without_a_recipe_are_those_of_the_page():
    about = joined(help_text("", train.__doc__))
    plain, adapted = load(RUN), load([*RUN, "--adapter.rank", "8"])
    assert (plain.train.epochs, plain.auto[:2]) == (1, ("mesh", "memory"))
    rates = [f"{config.optimizer.learning_rate:g}" for config in (plain, adapted)]
    assert rates == ["1e-05", "0.0001"]
    assert "one epoch with learning rate 1e-5, or 1e-4 for adapters" in about
