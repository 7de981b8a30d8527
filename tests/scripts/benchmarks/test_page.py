"""BENCHMARKS.md is generated from the committed results, and figures on other pages agree with the
results."""

import dataclasses
import json
import re

import pytest

from scripts.benchmarks import page, results
from scripts.benchmarks.results import (
    ROOT,
    Result,
    changed,
    fingerprint,
    load_all,
    renew,
    row,
    save,
)

COMMITTED = load_all()
PAGE_TEXT = page.PAGE.read_text(encoding="utf-8")
# The figures of README.md: NAME.ROW of a result, and the words around the start of the figure.
README_FIGURES = {
    "quickstart.time": "After the install, the quickstart took {} in five runs on two CPU cores",
    "quickstart.retrieval": "the last two models answered {} line-lookup questions",
    "retrieval.lines_20": "one line among 20: it improves {}.",
    "curriculum.lines_2700": "finds one line among 2,700 in {} cases",
    "retrieval.lines_200": "LongChat's 200 lines remain hard: it improves {}.",
    "gpu_steps.1b_8k": "8K tokens: tokens/s, relative to transformers + Liger; memory | {} |",
    "gpu_steps.1b_32k": "32K tokens: slower, in less memory | {} |",
    "gpu_steps.1b_32k_packed": "32K tokens of 16 documents | {} |",
    "gpu_steps.1b_32k_recomputing": "keeps attention's outputs): faster, in more memory | {} |",
    "recipes.llama31_8b_1m_h100": "8 x H100: planned GiB per GPU; host GiB per GPU | {} |",
    "recipes.llama31_8b_1m_h100_seconds": "seconds per step, by the cost model | {} |",
    "table3.rows_held": "own settings (one row, float32, device memory alone) | {};",
    "table3.like_for_like": "(one row, float32, device memory alone) | 19 of 19; {} |",
    "exactness.smollm2_logits": "logit difference from transformers, SmolLM2 | {} |",
}
# The same per page; `...` is a table cell.
FIGURES = {
    "README.md": README_FIGURES,
    "docs/adapters.md": {
        "recipes.llama31_8b_qlora_24gb": "| `llama31_8b_qlora_24gb` | ... | ... | {}",
        "recipes.llama31_8b_lora_a100": "| `llama31_8b_lora_a100` | ... | ... | {}",
        "recipes.llama31_70b_qlora_128k_h100": "| `llama31_70b_qlora_128k_h100` | ... | ... | {}",
    },
    "docs/extension.md": {
        "retrieval.lines_20": "SmolLM2-135M-Instruct from {}",
        "curriculum.lines_2700": "2,700 in {}",
        "extension.rescaled_and_trained": "then gains {}",
        "extension.as_it_is": "model loses {}",
    },
    "docs/meshes_and_memory.md": {
        "recipes.llama31_8b_1m_h100": "| `configs/llama31_8b_1m_h100.yaml` | ... | {}",
        "recipes.llama31_70b_128k_v5p": "| `configs/llama31_70b_128k_v5p.yaml` | ... | {}",
        "recipes.sharegpt_llama13b_512k": "| `configs/sharegpt_llama13b_512k.yaml` | ... | {}",
        "memory_1m.nothing": "| `configs/sharegpt_llama7b_1m.yaml` | ... | {}",
    },
    "docs/models.md": {
        "gemma3.loss": "here and in transformers is {}",
        "recipes.qwen3_8b_128k_h100": "| `qwen3_8b_128k_h100` | ... | {}",
        "recipes.qwen3_8b_1m_h100": "| `qwen3_8b_1m_h100` | ... | {}",
        "recipes.qwen3_32b_1m_h100": "| `qwen3_32b_1m_h100` | ... | {}",
        "recipes.qwen3_30b_a3b_128k_h100": "| `qwen3_30b_a3b_128k_h100` | ... | {}",
        "recipes.qwen3_30b_a3b_1m_h100": "| `qwen3_30b_a3b_1m_h100` | ... | {}",
        "recipes.qwen3_30b_a3b_128k_v5p": "| `qwen3_30b_a3b_128k_v5p` | ... | {}",
        "recipes.qwen3_30b_a3b_1m_v5p": "| `qwen3_30b_a3b_1m_v5p` | ... | {}",
        "recipes.mixtral_8x7b_128k_h100": "| `mixtral_8x7b_128k_h100` | ... | {}",
        "recipes.gpt_oss_20b_lora_h100": "| `adapters/gpt_oss_20b_lora_h100` | ... | {}",
        "recipes.gpt_oss_20b_qlora_24gb": "| `adapters/gpt_oss_20b_qlora_24gb` | ... | {}",
        "recipes.mistral_7b_128k_v5p": "| `mistral_7b_128k_v5p` | ... | {}",
        "recipes.gemma3_12b_1m_v5p": "| `gemma3_12b_1m_v5p` | ... | {}",
        "recipes.qwen3_8b_1m_h100_gb": "are planned to take {}",
        "recipes.qwen3_32b_1m_h100_gb": "GB and {}",
        "recipes.qwen3_30b_a3b_1m_h100_gb": "is planned to take {}",
    },
    "docs/notes/cpu_speed.md": {
        "step.speed_2048": "it makes {}",
        "step.speed_4096": "tokens and {}",
    },
    "docs/notes/h200.md": {
        "gpu.exact_auto_bfloat16": "| `auto` (Mosaic), bfloat16 | {}",
        "gpu.exact_gpu_bfloat16": "| `gpu` (Triton), bfloat16 | {}",
        "gpu.exact_gpu_float32": "| `gpu` (Triton), float32 | {}",
        "gpu.part_forward": "| forward | {} | 600 |",
        "gpu.part_backward": "| backward, counted as five products | {}",
        "gpu.diagonal_forward_131072": "| 128K | {}",
        "gpu.diagonal_backward_131072": "| 128K | ... | {}",
        "gpu.diagonal_forward_32768": "| 32K | {}",
        "gpu.diagonal_backward_32768": "| 32K | ... | {}",
        "gpu.step_32k_everything": "| 32K, `everything` | {}",
        "gpu.step_32k_save_attention": "| 32K, `save_attention` | {}",
        "gpu.step_32k_triton": "| 32K, `save_attention`, Triton's kernels | {}",
        "gpu.step_128k_save_attention": "| 128K, `save_attention`, the first step | {}",
        "gpu.plans": "plus 0.17 GiB: {}",
    },
    "docs/preference.md": {
        "recipes.llama31_8b_128k_qlora": "compiler a step takes {}",
        "preference.words": "answers shorter ({} words",
        "preference.right": "become wrong ({} of 54)",
    },
}


def test_the_committed_page_is_generated_from_the_committed_results(capsys):
    assert page.main(["--check"]) == 0, "run python -m scripts.benchmarks.page"


def test_every_result_is_on_the_page():
    shown = {
        name
        for about in page.PAGES["themes"].values()
        for names in about["sections"].values()
        for name in names
    }
    assert shown | {"accelerators"} == set(COMMITTED)
    for name, ids in page.PAGES["selected"].items():
        assert set(ids) <= set(COMMITTED[name].rows), name


def test_rows_without_a_goal_are_on_no_page():
    text = "".join(page.render(COMMITTED, with_age=False).values())
    rows = [cells for result in COMMITTED.values() for cells in result.rows.values()]
    without = [cells for cells in rows if not cells["goal"] and cells["verdict"] == "no goal"]
    assert without and not any(f"| {cells['what']} |" in text for cells in without)


@pytest.mark.parametrize("name", COMMITTED)
def test_a_result_names_what_is_needed_to_repeat_it(name):
    result = COMMITTED[name]
    assert result.title and result.rows
    for row_id, cells in result.rows.items():
        assert re.fullmatch(r"[\w-]+", row_id) and cells["verdict"] in results.VERDICTS
    for pattern in result.depends_on:
        assert any(ROOT.glob(pattern)), f"no file matches {pattern}"
    if result.note:
        assert (ROOT / result.note).is_file()
    assert not re.search(r"(^|[\s=])[/~]", result.command), "a path of one machine"
    if name != "accelerators":
        assert (
            re.fullmatch(r"\d{4}-\d\d-\d\d", result.date)
            and result.commit
            and result.hardware
            and result.depends_on
        )
        assert "python" in result.versions and "jax" in result.versions
    for columns in result.tables.values():
        assert all(len(cells) == len(columns["columns"]) for cells in columns["rows"])


def test_a_changed_figure_changes_its_pages():
    text = page.render(COMMITTED, with_age=False)
    step = COMMITTED["step"]
    figure = dataclasses.replace(
        step, rows=step.rows | {"speed_4096": step.rows["speed_4096"] | {"found": "1.16x"}}
    )
    other = page.render(COMMITTED | {"step": figure}, with_age=False)
    assert [path.name for path, content in other.items() if content != text[path]] == [
        "BENCHMARKS.md",
        "speed.md",
    ]


@pytest.fixture
def headlines_of_one_result(monkeypatch):
    """Whose digest takes a second; that of all headlines' programs takes many."""
    headlines = [entry for entry in page.PAGES["headlines"] if entry[1].startswith("step.")]
    monkeypatch.setitem(page.PAGES, "headlines", headlines)


def test_the_page_says_which_headlines_are_of_the_program_as_it_is(headlines_of_one_result):
    step = COMMITTED["step"]
    fresh = dataclasses.replace(
        step, depends_on={pattern: fingerprint(pattern) for pattern in step.depends_on}
    )
    aged = dataclasses.replace(step, depends_on=dict.fromkeys(step.depends_on, "0" * 16))
    lines = [page.age(COMMITTED | {"step": result}) for result in (fresh, aged)]
    assert [line.startswith(page.AGE) and "[step]" in line for line in lines] == [True, False]
    for line in PAGE_TEXT.splitlines():
        if line.endswith("[step] |") and "| met |" in line:
            assert f"{step.date}, {step.commit}" in line


def test_a_missed_goal_is_listed_once_unless_it_was_measured_again():
    for name, row_id, cells in page.with_verdict("short", COMMITTED):
        headline = f"{name}.{row_id}" in {reference for _, reference in page.PAGES["headlines"]}
        assert (f"\n| {cells['what']} | {cells['goal']} |" in PAGE_TEXT) != headline
    for name, _, cells in page.with_verdict("superseded", COMMITTED):
        assert f"| {cells['what']} |" not in PAGE_TEXT
        speed = (ROOT / "docs" / "benchmarks" / "speed.md").read_text(encoding="utf-8")
        assert f"{cells['found']} | superseded | [{name}]" in speed
    defined = re.findall(r"^\[([^]]+)\]:", PAGE_TEXT, re.MULTILINE)
    assert [name for name in defined if PAGE_TEXT.count(f"[{name}]") == 1] == []


def test_the_readme_says_at_which_commit_its_speeds_were_measured():
    measured = COMMITTED["gpu_steps"]
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"commit {measured.commit} ({measured.date})" in readme


def test_a_page_edited_by_hand_is_reported(headlines_of_one_result, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(page, "PAGE", tmp_path / "BENCHMARKS.md")
    figure = COMMITTED["step"].rows["speed_2048"]["found"]
    page.write()
    assert page.main(["--check"]) == 0
    edited = tmp_path / "docs" / "benchmarks" / "speed.md"
    edited.write_text(edited.read_text(encoding="utf-8").replace(figure, "9.99x"), encoding="utf-8")
    assert page.main(["--check"]) == 1 and "speed.md" in capsys.readouterr().err


def test_the_headline_page_is_short():
    assert len(page.PAGE.read_text(encoding="utf-8").splitlines()) <= 250


def test_a_result_is_stale_once_a_file_has_changed(monkeypatch, tmp_path):
    monkeypatch.setattr(results, "ROOT", tmp_path)
    (tmp_path / "code").mkdir()
    file = tmp_path / "code" / "step.py"
    file.write_text("x = 1")
    before = fingerprint("code/**/*.py")
    result = Result(
        "t", {"a": row("a", "1")}, "c", "2026-01-01", "abc", {}, {}, {"code/**/*.py": before}
    )
    assert changed(result) == []
    file.write_text("x = 2")
    assert changed(result) == ["code/**/*.py"]
    file.write_text("x = 1  # again")
    assert changed(result) == []
    (file.parent / "more.py").write_text("y = 1")
    assert changed(result) == ["code/**/*.py"]


def test_a_renewed_result_keeps_its_title_and_says_where_it_was_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    stored = {"title": "title", "depends_on": {"LICENSE": ""}, "note": "note", "carried": True}
    (tmp_path / "x.json").write_text(json.dumps(stored))
    result = renew("x", {"a": row("what", "1.2", "1", held=True)}, command="command", seconds=1.5)
    assert load_all() == {"x": result}
    assert (result.title, result.note, result.command) == ("title", "note", "command")
    assert result.hardware["cores"] and result.versions["jax"] and not result.carried
    assert result.depends_on["LICENSE"] == fingerprint("LICENSE")
    result.rows["a"]["verdict"] = "splendid"
    with pytest.raises(ValueError, match=r"x\.a.*splendid"):
        save("x", result)


def beginnings(cell: str) -> list[str]:
    """Returns what pages may quote of a cell: its text and its prefixes up to a space, and each of
    these with "from A to B" for a leading "A -> B"."""
    words = cell.split(" ")
    prefixes = [" ".join(words[:count]).rstrip(",;:") for count in range(1, len(words) + 1)]
    spelt_out = [re.sub(r"^(\S+) -> (\S+)", r"from \1 to \2", prefix) for prefix in prefixes]
    return list(dict.fromkeys([*prefixes, *spelt_out]))


def missing_figures(text: str, figures: dict[str, str], known: dict[str, Result]) -> list[str]:
    """Returns the figures that a page's text does not quote as in the results."""
    words = " ".join(text.split())
    missing = []
    for reference, phrase in figures.items():
        name, row_id = reference.split(".")
        quotes = [phrase.format(part) for part in beginnings(known[name].rows[row_id]["found"])]
        patterns = [re.escape(quote).replace(r"\.\.\.", "[^|]*") for quote in quotes]
        if not any(re.search(rf"(?<!\w){pattern}(?!\w|\.\d)", words) for pattern in patterns):
            missing.append(f"{reference}: expected {quotes[-1]!r}")
    return missing


@pytest.mark.parametrize("page_name", FIGURES)
def test_figures_on_pages_match_the_results(page_name):
    text = (ROOT / page_name).read_text(encoding="utf-8")
    assert missing_figures(text, FIGURES[page_name], COMMITTED) == []
    assert "<!--" not in text


@pytest.mark.parametrize(
    ("page_name", "old", "new"),
    [
        ("README.md", "193 of 200", "194 of 200"),
        ("docs/adapters.md", "13.2 of 22.3", "13.3 of 22.3"),
        ("docs/extension.md", "from 2 to 44 of 48", "from 1 to 44 of 48"),
        ("docs/notes/h200.md", "489, 88%", "488, 88%"),
    ],
)
def test_a_wrong_figure_is_found(page_name, old, new):
    text = (ROOT / page_name).read_text(encoding="utf-8")
    assert old in text
    assert len(missing_figures(text.replace(old, new), FIGURES[page_name], COMMITTED)) == 1
