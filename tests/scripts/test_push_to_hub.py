"""Exports have a model card and are pushed to a hub on this machine: what is sent, and what is
refused in one line."""

import base64
import http.server
import json
import shutil
import threading

import huggingface_hub.constants
import numpy as np
import pytest
import yaml
from huggingface_hub import ModelCard
from safetensors.numpy import save_file

from data.tokenizer import TOOL_TEMPLATE
from model.config import TransformerConfig
from scripts import export_hf, push_to_hub
from tests.conftest import REPOSITORY
from trainer.config import load
from trainer.config.data import DataConfig, SourceConfig
from trainer.config.schema import ModelConfig, RunConfig, TrainConfig
from trainer.huggingface.card import base_without_hub_name, model_card, write_card
from trainer.huggingface.peft import TRAINED_CONFIG
from trainer.text import _with_absolute_model

CARD = "---\nlibrary_name: transformers\n---\n# mine\n"


class Hub(http.server.BaseHTTPRequestHandler):
    """The part of the hub's interface that an upload needs; it stores what was sent in
    `server.sent` and `server.files`."""

    def do_GET(self):
        siblings = [{"rfilename": name} for name in self.server.files]
        info = {"id": "me/mine", "sha": "0" * 40, "siblings": siblings}
        self.answer(200, info | {"private": self.server.is_private})

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        self.server.sent.append((self.path, self.headers.get("Authorization"), body))
        if self.server.status != 200:
            return self.answer(self.server.status, {"error": "you may not write here with hf_ours"})
        if self.path.startswith("/api/repos/create"):
            return self.answer(
                200, {"url": f"{self.server.address}/me/mine", "id": "me/mine", "name": "me/mine"}
            )
        if "/preupload/" in self.path:
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            return self.answer(200, {"files": files})
        if "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "deletedFile":
                    del self.server.files[line["value"]["path"]]
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(
                        line["value"]["content"]
                    )
            return self.answer(
                200,
                {
                    "success": True,
                    "commitOid": "1" * 40,
                    "hookOutput": "",
                    "commitUrl": f"{self.server.address}/me/mine/commit/1",
                },
            )
        return self.answer(200, {"errors": [], "warnings": []})  # the check of the card's metadata

    def answer(self, status, content):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch):
    """A hub on this machine, and a token for it."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.sent, server.files, server.status, server.is_private = [], {}, 200, True
        server.address = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.address)
        monkeypatch.setenv("HF_TOKEN", "hf_ours")
        yield server
        server.shutdown()


@pytest.fixture
def exported(tmp_path):
    """A folder that looks like an export."""
    folder = tmp_path / "exported"
    folder.mkdir()
    save_file({"a": np.arange(5.0)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    (folder / "README.md").write_text(CARD)
    return folder


@pytest.mark.parametrize("flags", [[], ["--public"]])
def test_every_file_is_sent_into_a_private_repository_by_default(
    hub, exported, capsys, monkeypatch, flags
):
    monkeypatch.setattr(push_to_hub, "existing", lambda repository: None)
    assert push_to_hub.main([str(exported), "me/mine", *flags]) == 0
    assert hub.files == {path.name: path.read_bytes() for path in exported.iterdir()}
    created = json.loads(
        next(body for path, _, body in hub.sent if path.startswith("/api/repos/create"))
    )
    assert created["name"] == "mine" and created["organization"] == "me"
    # Versions of huggingface_hub send it in one of two ways.
    assert created.get("visibility", "private" if created.get("private") else "public") == (
        "public" if flags else "private"
    )
    assert {token for _, token, _ in hub.sent} == {"Bearer hf_ours"}
    assert f"{hub.address}/me/mine" in capsys.readouterr().out


def test_an_earlier_repository_stays_private_or_public(hub, exported, capsys):
    """As with transformers' push_to_hub, which does not say so."""
    assert push_to_hub.main([str(exported), "me/mine", "--public"]) == 2
    assert "me/mine: is a private repository, and --public makes only a" in capsys.readouterr().err
    assert not hub.sent
    hub.is_private, hub.files = False, {"README.md": b"with a licence"}
    assert push_to_hub.main([str(exported), "me/mine"]) == 0
    said = "/me/mine (a public repository; the earlier README.md is in its history)\n"
    assert capsys.readouterr().out.endswith(said) and hub.files["README.md"] == CARD.encode()


def test_all_files_of_an_adapter_are_sent(tmp_path):
    names = (
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
        TRAINED_CONFIG,
        TOOL_TEMPLATE,
    )
    (tmp_path / TOOL_TEMPLATE).parent.mkdir()
    for name in (*names, f"{TOOL_TEMPLATE}.bak"):
        (tmp_path / name).write_text("{}")
    save_file({"a": np.arange(5.0)}, tmp_path / "adapter_model.safetensors")
    files, others = push_to_hub.export_files(tmp_path)
    assert {*files} == {*names} and others == [f"{TOOL_TEMPLATE}.bak"]


def test_only_an_exports_own_files_are_sent_and_they_are_listed_first(
    hub, exported, capsys, monkeypatch
):
    """The other files are a token, an optimizer, a log, a git folder, and links to files
    elsewhere."""
    ours = {path.name: path.read_bytes() for path in exported.iterdir()} | {"LICENSE": b"mine"}
    (exported / "LICENSE").write_bytes(b"mine")
    (exported / ".env").write_text("HF_TOKEN=hf_ours")
    (exported / "optimizer.pt").write_bytes(b"x")
    (exported / ".git").mkdir()
    (exported / ".git/config.json").write_text("x")
    (exported / "notes.safetensors").write_text("x")
    secret = exported.parent / "secret"
    secret.write_text("TOP SECRET")
    (exported / "notes.txt").symlink_to(secret)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert push_to_hub.main([str(exported), "me/mine", "--dry-run"]) == 0
    listed = capsys.readouterr().out
    assert hub.sent == [] and f"model.safetensors  {len(ours['model.safetensors'])} bytes" in listed
    assert (
        "not uploaded, since they are not part of an export: .env, .git, notes.safetensors, "
        "notes.txt, optimizer.pt" in listed
    )
    monkeypatch.undo()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.address)
    monkeypatch.setenv("HF_TOKEN", "hf_ours")
    assert push_to_hub.main([str(exported), "me/mine"]) == 0
    assert hub.files == ours
    assert capsys.readouterr().out.startswith(listed)
    (exported / "merges.txt").symlink_to(secret)
    hub.sent.clear()
    assert push_to_hub.main([str(exported), "me/mine"]) == 2
    assert "merges.txt: leads to" in capsys.readouterr().err and hub.sent == []


def test_no_file_of_an_earlier_push_is_loaded_with_or_instead_of_the_new_ones(
    hub, exported, capsys
):
    """transformers prefers model.safetensors to several files, and applies any adapter."""
    earlier = (
        "adapter_config.json",
        "adapter_model.safetensors",
        "model-00001-of-00003.safetensors",
        "generation_config.json",
        TOOL_TEMPLATE,
        "config.json",
    )
    kept = ("LICENSE.md", ".gitattributes", "results.csv")
    hub.files |= dict.fromkeys((*earlier, *kept, "model.safetensors"), b"earlier")
    (exported / "model.safetensors").unlink()
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for name in shards:
        save_file({name: np.arange(5.0)}, exported / name)
    (exported / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {name: name for name in shards}})
    )
    assert push_to_hub.main([str(exported), "me/mine"]) == 2
    words = f"instead of it: {', '.join(earlier[:-1])}, model.safetensors; --replace removes"
    assert words in capsys.readouterr().err and hub.files["config.json"] == b"earlier"
    assert push_to_hub.main([str(exported), "me/mine", "--replace"]) == 0
    ours = {path.name: path.read_bytes() for path in exported.iterdir()}
    assert hub.files == ours | dict.fromkeys(kept, b"earlier")
    commit = next(body for path, _, body in hub.sent if "/commit/" in path)
    assert json.loads(commit.splitlines()[0])["value"]["parentCommit"] == "0" * 40


@pytest.mark.parametrize("name", ["config.json", "model-00002-of-00002.safetensors", "index"])
def test_an_incomplete_export_is_refused(hub, exported, capsys, name):
    """As after a copy that was interrupted; its last file may be cut off."""
    (exported / "model.safetensors").rename(exported / "model-00001-of-00002.safetensors")
    index = exported / "model.safetensors.index.json"
    if name != "index":
        second = exported / "model-00002-of-00002.safetensors"
        save_file({"b": np.arange(5.0)}, second)
        index.write_text(json.dumps({"weight_map": {"b": second.name}}))
        (exported / name).unlink()
    assert push_to_hub.main([str(exported), "me/mine"]) == 2
    missing = index.name if name == "index" else name
    assert f"not a complete export: {missing} is missing" in capsys.readouterr().err
    for path in exported.iterdir():
        path.unlink()
    (exported / "adapter_config.json").write_text("{}")
    (exported / "adapter_model.safetensors").write_bytes(b"\x08")
    assert push_to_hub.main([str(exported), "me/mine"]) == 2
    assert "not a complete safetensors file" in capsys.readouterr().err and not hub.sent


@pytest.mark.parametrize(
    ("status", "code", "remedy"),
    [
        (401, 2, "use a token that may write"),
        (413, 2, ""),
        (412, 2, ""),
        (429, 75, "repeat the command later"),
        (503, 75, "repeat the command later"),
    ],
)
def test_a_refusal_has_the_remedy_of_its_status(hub, exported, capsys, status, code, remedy):
    hub.status = status
    assert push_to_hub.main([str(exported), "me/mine"]) == code
    said = f"answered {status} (you may not write here with hf_...)"
    assert f"{said}{remedy and '; '}{remedy}" in (error := capsys.readouterr().err)
    assert ("token" in error) == (status == 401)


def test_no_upload_is_tried_while_the_network_is_forbidden(hub, exported, capsys, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert push_to_hub.main([str(exported), "me/mine"]) == 2
    assert "HF_HUB_OFFLINE is set, which forbids uploads" in capsys.readouterr().err
    assert push_to_hub.main([str(exported), "me/mine", "--dry-run"]) == 0 and not hub.sent


@pytest.mark.parametrize(
    ("repository", "words"),
    [
        ("mine", "mine: lacks its owner; expected OWNER/mine"),
        ("me/a b", "is not a repository name"),
        ("a/b/c", "is not a repository name"),
    ],
)
def test_a_bad_name_is_refused_before_anything_is_sent(hub, exported, capsys, repository, words):
    assert push_to_hub.main([str(exported), repository]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1 and hub.sent == []


def test_a_missing_token_model_or_hub_is_one_line_with_a_remedy(
    hub, exported, tmp_path, capsys, monkeypatch
):
    assert push_to_hub.main([str(tmp_path), "me/mine"]) == 2
    assert "contains no exported model" in capsys.readouterr().err and hub.sent == []
    hub.status = 403
    assert push_to_hub.main([str(exported), "me/mine"]) == 2
    error = capsys.readouterr().err
    assert "answered 403" in error and "hf_ours" not in error
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    hub.sent.clear()
    assert push_to_hub.main([str(exported), "me/mine"]) == 2
    assert "no Hugging Face hub token" in capsys.readouterr().err and hub.sent == []


def test_a_card_describes_the_checkpoint_and_its_run(tmp_path):
    checkpoint, prepared = tmp_path / "run" / "checkpoints" / "20", tmp_path / "prepared" / "abc"
    (checkpoint / "assets").mkdir(parents=True)
    prepared.mkdir(parents=True)
    chats = str(tmp_path / "secret" / "chats.json")
    (checkpoint / "assets" / "run.yaml").write_text(
        yaml.safe_dump(
            {
                "name": "mine",
                "model": {"path": "org/base@main"},
                "data": {
                    "sources": [
                        {"path": chats, "format": "sharegpt", "template": None, "weight": 0.5}
                    ],
                    "template": "chatml",
                    "context_length": 32768,
                    "prepared": str(tmp_path / "prepared"),
                },
            }
        )
    )
    (prepared / "report.json").write_text(json.dumps([{"path": chats, "records": 12, "kept": 11}]))
    (tmp_path / "run" / "held_out.jsonl").write_text(
        "".join(
            json.dumps({"step": step, "held_out_loss_nats_per_target": loss}) + "\n"
            for step, loss in ((0, 7.0), (20, 4.25), (40, 1.0))
        )
    )
    (tmp_path / "run" / "metrics.jsonl").write_text(
        "".join(
            json.dumps({"step": step, "loss_nats_per_target": loss}) + "\n"
            for step, loss in ((1, None), (2, 6.5), (20, 4.5))
        )
    )
    config = TransformerConfig.preset("llama-7b")
    card = model_card(checkpoint, config)
    head = yaml.safe_load(card.split("---")[1])
    assert (
        head["base_model"] == "org/base"
        and "license" not in head
        and head["library_name"] == "transformers"
    )
    assert "| chats.json | sharegpt | chatml | 0.5 | 12 | 11 |" in card and "32,768" in card
    assert (
        "7 at step 0, 4.25 at step 20" in card
        and "6.5 at step 2, 4.5 at step 20" in card
        and "step 40" not in card
    )
    assert str(tmp_path) not in card
    write_card(checkpoint, config, tmp_path, library="peft")
    card = (tmp_path / "README.md").read_text()
    assert "library_name: peft" in card and "`trained_config.json`" in card
    assert "resize_token_embeddings" not in card
    run = yaml.safe_load((checkpoint / "assets/run.yaml").read_text())
    run["data"]["add_control_tokens"] = True
    (checkpoint / "assets/run.yaml").write_text(yaml.safe_dump(run))
    assert "resize_token_embeddings(32000)" in model_card(checkpoint, config, library="peft")


def test_a_card_lists_non_default_fields_and_the_base_by_its_hub_name(tmp_path):
    recipe = RunConfig(
        name="mine",
        model=ModelConfig(path="/home/me/models--org--base/snapshots/0123"),
        train=TrainConfig(steps=7),
    )
    (tmp_path / "5/assets").mkdir(parents=True)
    (tmp_path / "5/assets/run.yaml").write_text(load.dump(recipe))
    card = model_card(tmp_path / "5", TransformerConfig.preset("llama-7b"))
    assert yaml.safe_load(card.split("---")[1])["base_model"] == "org/base"
    listed = yaml.safe_load(card.split("```yaml\n")[1].split("```")[0])
    assert listed == {"name": "mine", "model": {"path": "0123"}, "train": {"steps": 7}}
    assert "/home/me" not in card


@pytest.mark.parametrize("first", ["org/base", None])
def test_the_card_of_a_later_stage_names_the_model_of_the_first(tmp_path, first):
    """Each stage starts from the one before; a run may also start from another's checkpoint."""
    paths = [
        first,
        *(str(tmp_path / name) for name in ("run/stages/1", "run/checkpoints/5", "run/best")),
    ]
    for folder, path in zip(("run/stages/1", "run", "next", "third"), paths, strict=True):
        recipe = load.dump(RunConfig(name="mine", model=ModelConfig(path=path)))
        (tmp_path / folder / "checkpoints/5/assets").mkdir(parents=True)
        (tmp_path / folder / "config.yaml").write_text(recipe)
        (tmp_path / folder / "checkpoints/5/assets/run.yaml").write_text(recipe)
    config = TransformerConfig.preset("llama-7b")
    for run in ("run", "next", "third"):
        checkpoint = tmp_path / run / "checkpoints/5"
        card = model_card(checkpoint, config)
        assert yaml.safe_load(card.split("---")[1]).get("base_model") == first
        assert f"- Base model: {first or 'none: trained from scratch'}\n" in card
        assert base_without_hub_name(checkpoint, None) is None
    # peft loads an adapter into the model that it was trained on, which has no hub name.
    assert "base_model" not in model_card(checkpoint, config, library="peft").split("---")[1]


def test_a_card_lists_the_sources_without_their_defaults(tmp_path):
    recipe = RunConfig(
        data=DataConfig(sources=(SourceConfig(path="chats.jsonl", weight=2.0),)),
    )
    (tmp_path / "5/assets").mkdir(parents=True)
    (tmp_path / "5/assets/run.yaml").write_text(load.dump(recipe))
    card = model_card(tmp_path / "5", TransformerConfig.preset("llama-7b"))
    listed = yaml.safe_load(card.split("```yaml\n")[1].split("```")[0])
    assert listed["data"]["sources"] == [{"path": "chats.jsonl", "weight": 2.0}]
    assert "datasets" not in yaml.safe_load(card.split("---")[1])
    assert "stages" not in listed


def test_a_card_links_to_the_data_sets_of_the_hub(tmp_path):
    """In the metadata that huggingface_hub reads, as TRL's and Trainer's cards do."""
    paths = ("hf://datasets/b/chats@v1/train-*", "hf://datasets/a/x", "hf://datasets/b/chats", "x")
    recipe = RunConfig(data=DataConfig(sources=tuple(SourceConfig(path=path) for path in paths)))
    (tmp_path / "5/assets").mkdir(parents=True)
    (tmp_path / "5/assets/run.yaml").write_text(load.dump(recipe))
    card = ModelCard(model_card(tmp_path / "5", TransformerConfig.preset("llama-7b")))
    metadata = card.data.to_dict()
    assert metadata["datasets"] == ["a/x", "b/chats"]
    assert metadata["library_name"] == "transformers"


def test_an_export_warns_that_it_cannot_name_a_local_base(tmp_path, monkeypatch):
    """Also for a full model whose path was relative to where training ran: elsewhere, `models/mine`
    looks like a name on the hub."""
    run = REPOSITORY / "tests/fixtures/run_0_1_0"
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    (tmp_path / "models/mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    recipe = _with_absolute_model(RunConfig(name="mine", model=ModelConfig(path="models/mine")))
    (copy / "assets/run.yaml").write_text(load.dump(recipe))
    monkeypatch.chdir("/")
    unnamed = base_without_hub_name(copy, None)
    assert unnamed == str(tmp_path / "models/mine")
    assert base_without_hub_name(copy, "org/base") is None
    assert base_without_hub_name(copy, "/models/base") == "/models/base"
    config = TransformerConfig.preset("llama-7b")
    assert "base_model" not in yaml.safe_load(model_card(copy, config).split("---")[1])
    named = yaml.safe_load(model_card(copy, config, base="org/base@v1").split("---")[1])
    assert named["base_model"] == "org/base"


def test_the_base_of_a_whole_model_is_a_hub_name(tmp_path, capsys):
    run = str(REPOSITORY / "tests/fixtures/run_0_1_0")
    assert export_hf.main([run, str(tmp_path / "named"), "--base", "org/base"]) == 0
    assert "base_model: org/base\n" in (tmp_path / "named/README.md").read_text()
    assert export_hf.main([run, str(tmp_path / "other"), "--base", "/models/base"]) == 2
    assert "expected a hub name, OWNER/NAME" in capsys.readouterr().err
