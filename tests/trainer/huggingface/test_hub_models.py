"""Models by their name on the hub, served by a hub on this machine: what is downloaded, what is
not, and what is refused."""

import contextlib
import dataclasses
import hashlib
import http.server
import json
import os
import shutil
import signal
import socket
import threading
import time
import urllib.parse
from pathlib import Path

import huggingface_hub.constants
import numpy as np
import pytest
import yaml
from huggingface_hub import _tree_cache

import train
from data import hub as data_hub
from data.download_checks import checked
from data.errors import UserError
from data.tokenizer import Tokenizer
from eval import needle
from model.adapter import AdapterConfig
from scripts import inspect_data, plan, prepare
from tests.conftest import REPOSITORY
from tests.data.loopback import HubHandler
from tests.model.build import llama
from trainer.config.schema import ModelConfig
from trainer.huggingface import adapter_config
from trainer.huggingface.hub_models import resolve_model_path
from trainer.huggingface.table import hf_layout
from trainer.model_source import choose_model, open_model

SHA = "c" * 40


class Hub(HubHandler):
    """The part of the hub's interface that downloading one model needs; the server records the
    names of the files it sends."""

    def do_HEAD(self):
        self.do_GET(body=False)

    def do_GET(self, body=True):
        path = self.path.partition("?")[0]
        self.server.requests.append(path)
        files = self.server.content
        if not path.startswith(("/api/models/me/tiny", "/me/tiny/")):
            return self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)
        if path.startswith("/api/") and not path.endswith(("/tiny", "/main", SHA)):
            return self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, body)
        if "/tree/" in path:
            tree = [
                {"type": "file", "oid": "b" * 40, "size": len(content), "path": name}
                for name, content in files.items()
            ]
            return self.answer(200, json.dumps(tree).encode(), {}, body)
        if path.startswith("/api/"):
            info = {
                "id": "me/tiny",
                "sha": SHA,
                "siblings": [{"rfilename": name} for name in files],
            }
            return self.answer(200, json.dumps(info).encode(), {}, body)
        name = urllib.parse.unquote(path.partition("/resolve/")[2].partition("/")[2])
        if name not in files:
            missing = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": SHA}
            return self.answer(404, b"{}", missing, body)
        mark = hashlib.sha256(files[name]).hexdigest() if self.server.has_digests else name
        headers = {"ETag": f'"{mark}"', "X-Repo-Commit": SHA, "Accept-Ranges": "bytes"}
        if body and name in self.server.refused:
            return self.answer(404, b"{}", {"X-Error-Code": "EntryNotFound"}, body)
        if body:
            self.server.sent.append(name)
            if name == "model.safetensors":
                self.server.sending.set()
                self.server.stalled.wait(30)
        return self.answer(200, files[name], headers, body)


@pytest.fixture
def hub(monkeypatch, tmp_path, hf_model):
    """A hub on this machine with a very small model next to pickled weights and code; the cache is
    empty."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.sent, server.requests, server.refused = [], [], set()
        server.has_digests = False
        server.sending, server.stalled = threading.Event(), threading.Event()
        server.stalled.set()
        server.content = {
            path.name: path.read_bytes() for path in hf_model.iterdir() if path.is_file()
        }
        server.content |= {
            "pytorch_model.bin": b"pickle",
            "modeling_tiny.py": b"import os",
            "optimizer.pt": b"x",
            "original/model.safetensors": b"not this one",
        }
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        for name, value in {
            "ENDPOINT": address,
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_HUB_OFFLINE": False,
            "HUGGINGFACE_CO_URL_TEMPLATE": address + "/{repo_id}/resolve/{revision}/{filename}",
        }.items():
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield server
        server.shutdown()


def ours(hub):
    return sorted(
        name
        for name in hub.content
        if name
        not in (
            "pytorch_model.bin",
            "modeling_tiny.py",
            "optimizer.pt",
            "original/model.safetensors",
        )
    )


def test_a_model_is_downloaded_once_without_pickles_after_printing_its_size(
    hub, hf_model, tmp_path, capsys
):
    source = open_model("me/tiny")
    assert set(hub.sent) <= set(ours(hub)) and {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    } <= set(hub.sent)
    size = sum(len(hub.content[name]) for name in hub.sent)
    assert (
        f"me/tiny: downloading {size:,} bytes in {len(hub.sent)} files" in capsys.readouterr().err
    )
    assert source.name == "me/tiny"
    named = open_model("me/tiny@main")
    assert named.name == "me/tiny@main", "with its revision, which an adapter's base keeps"
    adapted = dataclasses.replace(named.config, adapter=AdapterConfig(rank=1))
    adapter_config.write_config(adapted, named.name, tmp_path)
    written = json.loads((tmp_path / "adapter_config.json").read_text(encoding="utf-8"))
    assert (written["base_model_name_or_path"], written["revision"]) == ("me/tiny", "main")
    assert adapter_config.read_config(tmp_path)[1] == "me/tiny@main"
    local = open_model(str(hf_model))
    for name, x in local.read(llama(local.config)).items():
        np.testing.assert_array_equal(x, source.read(llama(source.config))[name])
    hub.sent.clear()
    hub.requests.clear()
    assert open_model("me/tiny").fingerprint == local.fingerprint
    assert hub.requests == [], "a run does not depend on the hub once it has the model"


@pytest.mark.parametrize("network", ["there", "unreachable", "silent", "forbidden"])
def test_a_cache_that_another_program_filled_is_completed(hub, monkeypatch, network):
    """As by `AutoModelForCausalLM.from_pretrained` and `tokenizers.Tokenizer.from_pretrained`,
    which fetch single files: BOS, EOS and the chat template are in others. Without a network it
    opens at once, though the hub's library would repeat its requests and wait without end."""
    hub.has_digests = True
    names = ["config.json", "model.safetensors", "tokenizer.json"]
    if network == "silent":  # the cache has a note that the hub does not have the last one
        del hub.content["generation_config.json"]
        names.append("generation_config.json")
    for name in names:
        with contextlib.suppress(huggingface_hub.errors.EntryNotFoundError):
            huggingface_hub.hf_hub_download(
                "me/tiny", name, endpoint=huggingface_hub.constants.ENDPOINT
            )
    if network == "there":
        tokenizer = open_model("me/tiny").tokenizer()
        assert tokenizer.chat_template and (tokenizer.bos_token, tokenizer.eos_token) == (
            "<s>",
            "</s>",
        )
        assert {path for path in hub.requests if path.startswith("/api/")} == {
            f"/api/models/me/tiny/revision/{SHA}",
            f"/api/models/me/tiny/tree/{SHA}",
        }, "which commit is the newest was asked"
        hub.requests.clear()
        open_model("me/tiny")
        assert hub.requests == []
        return
    silent = socket.create_server(("127.0.0.1", 0))  # accepts connections and never answers
    if network == "forbidden":
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    elif network == "silent":
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
        monkeypatch.setattr(huggingface_hub.constants, "DEFAULT_ETAG_TIMEOUT", 0.2)
    else:
        hub.shutdown()
        hub.server_close()
    words = "me/tiny: tokenizer_config.json and generation_config.json: not in the local"
    if network == "silent":
        words = "me/tiny: tokenizer_config.json: not in the local"
    start = time.monotonic()
    with silent, pytest.warns(UserWarning, match=words):
        open_model("me/tiny")
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    "name", ["model.safetensors-00001-of-00001.safetensors", "weights [1].safetensors"]
)
def test_weights_have_the_names_that_the_index_says(hub, hf_model, name):
    """As in transformers."""
    hub.content[name] = hub.content.pop("model.safetensors")
    tensors = [entry.name for entry in hf_layout(open_model(str(hf_model)).config)]
    index = json.dumps({"weight_map": dict.fromkeys(tensors, name)})
    hub.content["model.safetensors.index.json"] = index.encode()
    assert not open_model("me/tiny").lacks_weights
    assert hub.sent.count(name) == 1 and "original/model.safetensors" not in hub.sent
    hub.requests.clear()
    open_model("me/tiny")
    assert hub.requests == []


@pytest.mark.parametrize("offline", [False, True])
@pytest.mark.parametrize("has_weights", [False, True])
def test_a_dry_run_says_what_training_would_of_weights_on_the_hub(
    hub, small_recipe, tmp_path, monkeypatch, capsys, offline, has_weights
):
    """Without downloading them."""
    if not has_weights:
        del hub.content["model.safetensors"]
    recipe = yaml.safe_load(small_recipe.read_text(encoding="utf-8"))
    recipe["model"] = {"path": "me/tiny"}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    words = ["--config", str(tmp_path / "recipe.yaml"), "--run_dir", str(tmp_path / "run")]
    if offline:
        resolve_model_path("me/tiny", weights=False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    capsys.readouterr()
    status = train.main([*words, "--dry-run"])
    output, errors = capsys.readouterr()
    if has_weights and not offline:
        assert status == 0 and "weights: me/tiny is not downloaded yet; training down" in output
    else:
        (error,) = [line for line in errors.splitlines() if line.startswith("error: ")]
        assert status == 2 and (offline or "has no safetensors on the hub" in error)
        assert train.main(words) == 2 and error in capsys.readouterr().err.splitlines()
    assert "model.safetensors" not in hub.sent


def test_an_interrupted_download_resumes(hub):
    hub.refused.add("model.safetensors")
    with pytest.raises((UserError, ValueError)):
        resolve_model_path("me/tiny")
    hub.refused.clear()
    before = list(hub.sent)
    folder = resolve_model_path("me/tiny")
    assert (folder / "model.safetensors").read_bytes() == hub.content["model.safetensors"]
    assert hub.sent[len(before) :].count("model.safetensors") == 1
    assert len(hub.sent) == len(set(hub.sent)), "nothing is downloaded twice"


def test_ctrl_c_does_not_wait_for_the_current_file(hub):
    hub.stalled.clear()
    interrupted = threading.Thread(
        target=lambda: hub.sending.wait(20) and os.kill(os.getpid(), signal.SIGINT), daemon=True
    )
    interrupted.start()
    start = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            resolve_model_path("me/tiny")
        assert hub.sending.is_set() and time.monotonic() - start < 10
        # Not rglob: threads that still end remove temporary folders beside `blobs`.
        blobs = Path(huggingface_hub.constants.HF_HUB_CACHE) / "models--me--tiny/blobs"
        assert blobs.is_dir() and not list(blobs.glob("model.safetensors*.incomplete"))
    finally:
        hub.stalled.set()


def test_partial_files_of_a_killed_download_are_removed(hub):
    blobs = Path(huggingface_hub.constants.HF_HUB_CACHE) / "models--me--tiny/blobs"
    blobs.mkdir(parents=True)
    for name, age in (("a.1.incomplete", 2 * 3600), ("b.2.incomplete", 60)):
        (blobs / name).write_bytes(b"part")
        os.utime(blobs / name, (time.time() - age,) * 2)
    resolve_model_path("me/tiny")
    assert [path.name for path in blobs.glob("*.incomplete")] == ["b.2.incomplete"]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer_config.json"])
def test_a_file_damaged_by_a_killed_download_is_downloaded_again(hub, capsys, monkeypatch, name):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # which is restored afterwards
    hub.has_digests = True
    folder = resolve_model_path("me/tiny")
    blob = (folder / name).resolve()
    whole = blob.read_bytes()
    blob.unlink()
    with pytest.raises(KeyboardInterrupt), checked(blob.parents[1]):
        blob.write_bytes(whole[:-1])
        raise KeyboardInterrupt  # leaves what a kill leaves
    hub.sent.clear()
    assert (resolve_model_path("me/tiny") / name).read_bytes() == whole
    assert hub.sent == [name]
    with pytest.raises(KeyboardInterrupt), checked(blob.parents[1]):
        blob.unlink()
        raise KeyboardInterrupt
    data_hub.no_downloads()
    with pytest.raises(ValueError, match="me/tiny: neither a folder nor in the local"):
        resolve_model_path("me/tiny")
    shutil.rmtree(blob.parents[1] / "trees")  # as earlier releases of the hub's library left it
    _tree_cache._IN_MEMORY_TREE_CACHE.clear()
    with pytest.raises(UserError, match=f"me/tiny: {name} is no longer in the local"):
        resolve_model_path("me/tiny")
    assert f"{blob}: does not match the hub's digest" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("offline", "words"),
    [
        (False, "no such run or model folder in runs; as a hub model: neither a folder nor a"),
        (True, "no such run or model folder in runs, nor a model in the local Hugging Face cache"),
    ],
)
def test_a_mistyped_run_folder_is_named(hub, offline, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    assert needle.main(["--checkpoint", "runs/nosuch", "--tokens", "1K", "--output", "out"]) == 2
    assert f"runs/nosuch: {words}" in capsys.readouterr().err
    assert bool(hub.requests) != offline


def test_a_local_folder_hides_no_hub_models_of_an_owner_of_its_name(hub, tmp_path, monkeypatch):
    """As after `hf download me/another --local-dir me/another`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "me").mkdir()
    downloaded = resolve_model_path("me/tiny")
    assert (downloaded / "config.json").read_bytes() == hub.content["config.json"]
    assert resolve_model_path("me/tiny@main") == downloaded


def test_an_adapter_is_downloaded_by_its_name(hub, hf_model):
    fields = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
        "base_model_name_or_path": "a/base",
    }
    hub.content = {
        "adapter_config.json": json.dumps(fields).encode(),
        "adapter_model.safetensors": b"weights",
        "adapter_model.bin": b"pickle",
    }
    source = choose_model(ModelConfig(path=str(hf_model)), "me/tiny")
    assert source.adapter.config.rank == 4 and source.base.folder == hf_model
    assert (source.adapter.folder / "adapter_model.safetensors").read_bytes() == b"weights"
    assert "adapter_model.bin" not in hub.sent


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("is_whole", [False, True])
def test_an_adapter_with_a_config_is_told_from_a_whole_model(hub, hf_model, weights, is_whole):
    """Alike with and without the weights, of which the latter does not download any."""
    fields = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
        "base_model_name_or_path": str(hf_model),
    }
    hub.content["adapter_config.json"] = json.dumps(fields).encode()
    hub.content["adapter_model.safetensors"] = b"weights"
    if is_whole:
        with pytest.raises(ValueError, match=r"config\.json describes a whole model, and adapter_"):
            open_model("me/tiny", weights)
    else:
        del hub.content["model.safetensors"]
        source = open_model("me/tiny", weights)
        assert source.base.folder == hf_model and source.adapter.config.rank == 4
    assert weights or not any(name.endswith(".safetensors") for name in hub.sent)


@pytest.mark.parametrize(
    "command",
    [
        [prepare, "--config", "RECIPE"],
        [inspect_data, "RECIPE"],
        [plan, "--model", "me/tiny", "--machine", "v4-8", "--context", "1K"],
        [plan, "--compare", "--model", "me/tiny", "--hardware", "v4", "--context", "1K"],
    ],
    ids=["prepare", "inspect", "plan", "compare"],
)
def test_commands_that_open_a_model_can_be_forbidden_downloads(
    hub, monkeypatch, tmp_path, capsys, command
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # which is restored afterwards
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model:\n  path: me/tiny\ndata:\n  path: {REPOSITORY / 'data/fixtures/conversations.json'}\n"
    )
    module, *words = command
    assert (
        module.main(
            [str(recipe) if word == "RECIPE" else word for word in words] + ["--no-download"]
        )
        != 0
    )
    assert "me/tiny: neither a folder nor in the local" in capsys.readouterr().err
    assert hub.requests == []


def test_commands_that_need_no_weights_download_none(hub):
    assert choose_model(ModelConfig(path="me/tiny"), weights=False).config.num_hidden_layers
    assert "model.safetensors" not in hub.sent
    open_model("me/tiny")
    assert hub.sent.count("model.safetensors") == 1 and hub.sent.count("config.json") == 1


@pytest.mark.parametrize("with_config", [True, False])
def test_a_tokenizer_may_have_a_hub_name(hub, hf_model, with_config):
    """As axolotl's tokenizer_config; some repositories have only a tokenizer."""
    if not with_config:
        hub.content = {
            name: content for name, content in hub.content.items() if name.startswith("tokenizer")
        }
    expected = Tokenizer.load(hf_model).fingerprint
    shape = {"preset": "llama-7b"}
    for config in (shape, {"path": str(hf_model)}):
        chosen = choose_model(ModelConfig(**config, tokenizer="me/tiny"), weights=False)
        tokenizer = chosen.tokenizer()
        assert (tokenizer.fingerprint == expected) == with_config  # it has the template
        assert tokenizer.bos_token == "<s>"
    assert hub.requests.count("/api/models/me/tiny/revision/main") == 2, "only while downloading"
    assert "model.safetensors" not in hub.sent
    with pytest.raises(UserError, match="me/none: neither a folder nor a model that"):
        choose_model(ModelConfig(**shape, tokenizer="me/none"))


def test_the_processes_of_a_machine_download_once(hub):
    threads = [threading.Thread(target=resolve_model_path, args=("me/tiny",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(hub.sent) == len(set(hub.sent)) > 2


def test_downloads_can_be_forbidden(hub, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # which is restored afterwards
    data_hub.no_downloads()
    with pytest.raises(
        ValueError,
        match=r"me/tiny: neither a folder nor in the local .* cache, and downloads are forbidden",
    ):
        open_model("me/tiny")
    assert hub.requests == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("me/another", "me/another: neither a folder nor a model that http://127.0.0.1"),
        ("me/tiny@v9", "me/tiny: has no revision v9"),
    ],
)
def test_names_missing_on_the_hub_are_reported(hub, name, words):
    with pytest.raises(UserError, match=words):
        open_model(name)


def test_only_pickled_weights_are_refused_before_a_download(hub):
    del hub.content["model.safetensors"]
    with pytest.raises(UserError, match="me/tiny: has no safetensors on the hub"):
        open_model("me/tiny")
    assert hub.sent == []


def test_an_unreachable_hub_is_a_one_line_error(hub, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        UserError, match=r"neither a folder nor in the local .* cache, and not downloaded from"
    ) as error:
        open_model("me/tiny")
    assert "\n" not in str(error.value)
