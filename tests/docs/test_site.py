"""The site that mkdocs builds from docs/: no warnings, every page in the navigation, nothing loaded
from a network."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from data.errors import UserError
from model.attention.choice import KERNELS
from model.attention.names import SCHEDULES
from model.families import FAMILIES
from trainer.config.load import load

ROOT = Path(__file__).resolve().parents[2]
INDEX = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
NOTEBOOK = ROOT / "docs" / "longstripe.ipynb"
needs_mkdocs = pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None,
    reason="mkdocs is not installed: pip install -r requirements-test.txt",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site's folder."""
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    return folder


@needs_mkdocs
def test_the_site_is_built_without_warnings(site):
    names = {
        page.relative_to(ROOT / "docs").with_suffix("").as_posix()
        for page in (ROOT / "docs").rglob("*.md")
    }
    missing = [
        name
        for name in names
        if not (site / ("" if name == "index" else name) / "index.html").is_file()
    ]
    assert len(names) > 25 and missing == []
    index = (site / "index.html").read_text(encoding="utf-8")
    first = re.search(r'<h1 id="longstripe">.*?<p>(.*?)</p>', index, re.DOTALL)
    assert first and first[1].startswith("Longstripe fine-tunes Hugging Face language models")
    assert 'href="site.css"' in index and "pre-wrap" in (site / "site.css").read_text()
    assert (site / "start" / "index.html").is_file()
    assert (site / "BENCHMARKS" / "index.html").is_file() and (site / "longstripe.ipynb").is_file()


@needs_mkdocs
def test_pages_load_nothing_from_a_network_and_their_links_resolve(site):
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|link|img|iframe)[^>]*?(?:src|href)=\"([^\"]+)\"", text)
        assert [link for link in loaded if link.startswith(("http:", "https:", "//"))] == [], page
        if page.name == "index.html":
            links = [
                link.partition("#")[0]
                for link in re.findall(r"<(?:a|img)[^>]*?(?:href|src)=\"([^\"]+)\"", text)
            ]
            broken = [
                link
                for link in links
                if link
                and "://" not in link
                and not link.startswith("mailto:")
                and not (page.parent / link).exists()
            ]
            assert broken == [], page


def test_every_page_is_in_the_navigation():
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert [
        page for page in pages if not re.search(rf"(: |- ){re.escape(page)}$", nav, re.MULTILINE)
    ] == []
    assert yaml.safe_load(nav)["nav"][0] == {"Longstripe": "index.md"}


def test_the_first_page_has_every_family_schedule_and_kernel():
    cells = {
        name
        for row in re.findall(r"^\| (`[^|]*)", INDEX, re.MULTILINE)
        for name in re.findall(r"`([\w-]+)`", row)
    }
    expected = {*FAMILIES, *SCHEDULES, *KERNELS} - {"auto"}
    assert expected <= cells


def code_cells():
    """Returns the code of the notebook's cells."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def outputs():
    """Returns each code cell's stored text, and the types of its other outputs."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    for cell in cells:
        if cell["cell_type"] == "code":
            kinds = {kind for output in cell["outputs"] for kind in output.get("data", {})}
            yield "".join("".join(output.get("text", "")) for output in cell["outputs"]), kinds


def test_the_notebook_shows_its_own_results():
    """It was executed from first cell to last, and trained a model that retrieves lines."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    counts = [cell["execution_count"] for cell in cells if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))
    texts, kinds = zip(*outputs(), strict=True)
    assert any("image/png" in cell_kinds for cell_kinds in kinds)
    [chat] = [text for text in texts if "scripts.chat" in text]
    assert "line cat: 88" in chat.partition("--simulate")[2]
    [retrieval] = [text for text in texts if "eval.line_retrieval" in text]
    assert int(re.search(r"(\d+)/50", retrieval)[1]) > 25
    printed = "".join(texts)
    assert "Traceback" not in printed and not re.search(r"/(?:work|home|tmp|root)/", printed)


def test_the_notebooks_commands_match_the_recipe(monkeypatch, tmp_path):
    """Executes every cell here; commands are collected instead of run, and train.py's flags are
    parsed as train.py parses them."""
    monkeypatch.setenv("STEPS", "2")
    monkeypatch.chdir(ROOT / "docs")
    for name, field in (("metrics", ""), ("held_out", "held_out_")):
        row = {"step": 1, f"{field}loss_nats_per_target": 7.0}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row))
    commands = []
    scope = {}
    for code in code_cells():
        exec(compile(code, NOTEBOOK.name, "exec"), scope)
        scope |= {"run": lambda *command: commands.append(command), "RUN": str(tmp_path)}
    assert (tmp_path / "loss.png").is_file() and Path.cwd() == ROOT
    assert [command[:2] for command in commands] == [
        ("-m", "scripts.inspect_data"),
        ("train.py", "--config"),
        ("-m", "scripts.chat"),
        ("-m", "eval.line_retrieval"),
        ("-m", "scripts.export_hf"),
        ("-m", "scripts.plan"),
    ]
    config = load(list(commands[1][1:]))
    assert config.train.steps == 2 and config.mesh.sequence == config.mesh.simulate == 8
    with pytest.raises(UserError):
        load([*commands[1][1:], "--mesh.simulat", "8"])


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("nbclient") is None, reason="pip install -r requirements-test.txt"
)
def test_the_notebook_runs_on_simulated_devices(tmp_path, monkeypatch):
    """Executes it as Jupyter does, in a copy of the tracked files, with 2 steps."""
    import nbformat
    from nbclient import NotebookClient

    files = (
        subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
        .stdout.decode()
        .split("\0")
    )
    for name in filter(None, files):
        (tmp_path / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "copy" / name)
    monkeypatch.setenv("STEPS", "2")
    NotebookClient(
        nbformat.read(NOTEBOOK, as_version=4),
        timeout=900,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path / "copy")}},
    ).execute()
    assert (tmp_path / "copy/runs/notebook/exported/model.safetensors").is_file()
