"""Data sets of the Hugging Face hub, from a local hub: what is downloaded, what the cache serves,
what is refused."""

import gzip
import hashlib
import http.server
import json
import re
import shutil
import socket
import threading

import huggingface_hub.constants
import pytest
from huggingface_hub import _tree_cache

from data import hub as data_hub
from data import hub_transfers, source_files
from data.encode import EncodingRules
from data.errors import UserError, is_transient
from data.prepare import prepare
from data.report import Report
from data.sources import FORMATS, Source, Sources, read
from data.tokenizer import Tokenizer
from tests.conftest import REPOSITORY
from tests.data.loopback import HubHandler
from trainer.checkpoint.fetch import local_copy

CHATS = [
    {
        "conversations": [
            {"from": "human", "value": f"Question {n}?"},
            {"from": "gpt", "value": f"Answer {n}."},
        ]
    }
    for n in range(4)
]
FILES = {
    "README.md": b"a card",
    "train.jsonl": "\n".join(map(json.dumps, CHATS[:3])).encode(),
    "more/b.jsonl.gz": gzip.compress(json.dumps(CHATS[3]).encode()),
    "more/weights.bin": bytes(1000),
}
OF_RECORDS = (
    f"files whose names end in {', '.join(FORMATS['sharegpt'].suffixes)}, perhaps compressed, are "
    "read unless a part of the path begins with a dot or is a link to a folder"
)
SHA = "a" * 40
PARQUET = "refs%2Fconvert%2Fparquet"


class Hub(HubHandler):
    """The part of the hub's API that a download needs, for one data set; its server records the
    files that it sent."""

    def do_HEAD(self):
        self.do_GET(body=False)

    def do_GET(self, body=True):
        path = self.path.partition("?")[0]
        self.server.requests.append(path)
        if self.server.refusal is not None:
            status, headers = self.server.refusal
            return self.answer(status, b"{}", headers, body)
        if path.startswith("/api/datasets/") and self.server.listing is not None:
            return self.answer(200, self.server.listing, {}, body)
        if not path.startswith(("/api/datasets/me/chats", "/datasets/me/chats")):
            return self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)
        if path.startswith("/api/") and not path.endswith(
            ("/chats", "/revision/main", f"/revision/{PARQUET}", f"/{SHA}")
        ):
            return self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, body)
        if "/tree/" in path:
            tree = [
                {"type": "file", "oid": "b" * 40, "size": len(content), "path": name}
                for name, content in FILES.items()
            ]
            return self.answer(200, json.dumps(tree).encode(), {}, body)
        if path.startswith("/api/"):
            siblings = [{"rfilename": name} for name in FILES]
            return self.answer(
                200,
                json.dumps({"id": "me/chats", "sha": SHA, "siblings": siblings}).encode(),
                {},
                body,
            )
        name = path.partition("/resolve/")[2].partition("/")[2]
        if self.server.is_gated:
            return self.answer(403, b"{}", {"X-Error-Code": "GatedRepo"}, body)
        if body:
            self.server.sent.append(name)
        headers = {"ETag": f'"{name.replace("/", "-")}"', "X-Repo-Commit": SHA}
        content = self.server.content if body and self.server.content is not None else FILES[name]
        return self.answer(200, content, {**headers, **self.server.headers}, body)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Yields a local hub, with an empty cache."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.sent, server.requests, server.refusal = [], [], None
        server.listing, server.content, server.headers, server.is_gated = None, None, {}, False
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        for name, value in {
            "ENDPOINT": address,
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_HUB_OFFLINE": False,
            "HUGGINGFACE_CO_URL_TEMPLATE": address + "/{repo_id}/resolve/{revision}/{filename}",
        }.items():
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        yield server
        server.shutdown()


def answers(path):
    """Returns the last turns of a source's conversations."""
    return [record.messages[-1].content for record in read(Source(path), Report())]


@pytest.mark.parametrize(
    ("path", "expected", "sent"),
    [
        (
            "hf://datasets/me/chats",
            ["Answer 3.", "Answer 0.", "Answer 1.", "Answer 2."],
            ["more/b.jsonl.gz", "train.jsonl"],
        ),
        (
            "hf://datasets/me/chats@main/",
            ["Answer 3.", "Answer 0.", "Answer 1.", "Answer 2."],
            ["more/b.jsonl.gz", "train.jsonl"],
        ),
        (
            "hf://datasets/me/chats/train.jsonl",
            ["Answer 0.", "Answer 1.", "Answer 2."],
            ["train.jsonl"],
        ),
        (f"hf://datasets/me/chats@{SHA}/more", ["Answer 3."], ["more/b.jsonl.gz"]),
        ("hf://datasets/me/chats@refs/convert/parquet/more", ["Answer 3."], ["more/b.jsonl.gz"]),
        (f"hf://datasets/me/chats@{PARQUET}/more", ["Answer 3."], ["more/b.jsonl.gz"]),
    ],
)
def test_named_files_are_downloaded_once_and_read(hub, path, expected, sent):
    files = source_files.find(path, (".json", ".jsonl", ".parquet")).files
    card = [] if path.endswith(("more", "train.jsonl")) else ["README.md"]
    assert sorted(hub.sent) == card + sent
    assert [str(file).partition(f"/{SHA}/")[2] for file in files] == sent
    hub.sent.clear()
    assert answers(path) == expected
    assert hub.sent == []


@pytest.mark.parametrize("is_cached", [False, True], ids=["downloaded", "cached"])
def test_cards_and_metadata_of_the_hub_are_not_read_as_records(hub, monkeypatch, is_cached):
    """Even if another program put all files into the cache; a file that the path names is read."""
    for name, content in {
        "more/README.md": b"another card",
        "dataset_infos.json": b"{}",
        "a.txt": b"a text",
    }.items():
        monkeypatch.setitem(FILES, name, content)
    if is_cached:
        huggingface_hub.snapshot_download(
            "me/chats", repo_type="dataset", endpoint=huggingface_hub.constants.ENDPOINT
        )
    texts = [
        record.text for record in read(Source("hf://datasets/me/chats/README.md", "text"), Report())
    ]
    assert texts == ["a card"]
    hub.sent.clear()
    files = source_files.find("hf://datasets/me/chats", (".txt", ".md")).files
    assert [str(file).partition(f"/{SHA}/")[2] for file in files] == ["a.txt"]
    assert hub.sent == ([] if is_cached else ["a.txt"])
    assert answers("hf://datasets/me/chats") == ["Answer 3.", "Answer 0.", "Answer 1.", "Answer 2."]


def test_a_readme_in_a_local_folder_is_read_as_a_text(tmp_path):
    (tmp_path / "README.md").write_text("mine")
    assert [record.text for record in read(Source(str(tmp_path), "text"), Report())] == ["mine"]


@pytest.mark.parametrize(
    ("names", "others"),
    [
        (["train.jsonl", "test.jsonl"], ["test.jsonl"]),
        (
            ["data/train-00000-of-00001.jsonl", "data/validation-00000-of-00001.jsonl"],
            ["validation-00000-of-00001.jsonl"],
        ),
        (
            ["default/train/0.jsonl", "default/test/0.jsonl", "default/test/1.jsonl"],
            ["test/0.jsonl", "test/1.jsonl"],
        ),
        (["test/0.jsonl", "test/1.jsonl"], []),
        (["contest.jsonl", "latest.jsonl"], []),
        (["test.jsonl"], []),
    ],
)
def test_evaluation_splits_next_to_training_files_are_named(hub, monkeypatch, names, others):
    for name in [*FILES]:
        monkeypatch.delitem(FILES, name)
    for name in names:
        monkeypatch.setitem(FILES, name, json.dumps(CHATS[0]).encode())
    notes = Source("hf://datasets/me/chats").notes(is_held_out=False)
    assert [note.partition(";")[0] for note in notes] == (
        [f"also reads {', '.join(others)}"] if others else []
    )


def test_the_report_warns_of_evaluation_splits(hub, monkeypatch, tmp_path):
    """Once per training source; not for held-out sources."""
    for number in range(7):
        monkeypatch.setitem(FILES, f"test-{number}.jsonl", json.dumps(CHATS[3]).encode())
    own, held_out = tmp_path / "own", tmp_path / "held_out"
    for folder in (own, held_out):
        folder.mkdir()
        for name in ("train.jsonl", "test.jsonl"):
            (folder / name).write_bytes(FILES["train.jsonl"])
    source = Source("hf://datasets/me/chats")
    prepared = prepare(
        Sources((source, Source(str(own))), held_out=(Source(str(held_out)),)),
        Tokenizer.load(REPOSITORY / "data/fixtures/tiny_tokenizer"),
        EncodingRules(64),
        tmp_path / "prepared",
        progress=False,
    )
    names = ", ".join(f"test-{number}.jsonl" for number in range(5))
    remedy = (
        "; the path of the training split's folder, file or files, such as 'FOLDER/train*', leaves "
        "them out"
    )
    assert [
        line for line in prepared.report.summary().splitlines() if line.startswith("warning")
    ] == [
        f"warning: {source.path}: not read: more/weights.bin; {OF_RECORDS}",
        f"warning: {source.path}: also reads {names} and 2 more{remedy}",
        f"warning: {own}: also reads test.jsonl{remedy}",
    ]
    assert len(Source(f"{own}/train*").files()) == 1
    assert not Source(f"{own}/train*").notes(is_held_out=False)


CARD = """---
configs:
- config_name: good
  data_files: [{split: train, path: good/train-*}, {split: test, path: good/test-*}]
- config_name: bad
  data_files: bad/**
---
"""
OF_CONFIGURATIONS = {
    "good/train-0.jsonl": b'{"question": "a", "answer": "good"}',
    "good/train-1.jsonl.gz": gzip.compress(b'{"question": "b", "answer": "better"}'),
    "good/train.md5": b"",
    "good/test-0.jsonl": b'{"question": "c", "answer": "test"}',
    "bad/a/0.jsonl": b'{"question": "a", "answer": "bad"}',
    ".gitattributes": b"* text",
}


@pytest.fixture
def configurations(hub, monkeypatch):
    for name in [*FILES]:
        monkeypatch.delitem(FILES, name)
    for name, content in {"README.md": CARD.encode(), **OF_CONFIGURATIONS}.items():
        monkeypatch.setitem(FILES, name, content)


def test_several_configurations_are_refused_before_they_are_downloaded(hub, configurations):
    path = "hf://datasets/me/chats"
    for revision in ("", "@main"):
        with pytest.raises(UserError, match="has 2 configurations, and none of them is") as caught:
            answers(f"{path}{revision}")
        assert str(caught.value).endswith(f": {path}{revision}/good, {path}{revision}/bad")
    assert sorted(hub.sent) == [".gitattributes", "README.md"]
    assert answers(f"{path}/good") == ["test", "good", "better"]
    assert answers(f"{path}/bad") == ["bad"]


def test_of_a_default_configuration_only_its_files_are_downloaded(hub, configurations, monkeypatch):
    monkeypatch.setitem(
        FILES, "README.md", CARD.replace("name: good", "name: good\n  default: yes").encode()
    )
    source = Source("hf://datasets/me/chats")
    assert answers(source.path) == ["test", "good", "better"]
    names = ["good/test-0.jsonl", "good/train-0.jsonl", "good/train-1.jsonl.gz"]
    assert sorted(hub.sent) == [".gitattributes", "README.md", *names]
    assert source.notes(is_held_out=True) == [
        "reads its default configuration `good` alone; not read: hf://datasets/me/chats/bad"
    ]


def test_of_an_only_configuration_only_its_files_are_downloaded(hub, configurations, monkeypatch):
    """As by datasets.load_dataset; push_to_hub writes such a card."""
    only = CARD.partition("- config_name: bad")[0] + "---\n"
    monkeypatch.setitem(FILES, "README.md", only.encode())
    source = Source("hf://datasets/me/chats")
    assert answers(source.path) == ["test", "good", "better"]
    assert not [name for name in hub.sent if name.startswith("bad/")]
    assert source.notes(is_held_out=True) == []


def test_the_hubs_conversion_has_a_folder_for_each_configuration(hub, configurations, monkeypatch):
    monkeypatch.delitem(FILES, "README.md")
    path = "hf://datasets/me/chats@refs/convert/parquet"
    with pytest.raises(UserError, match="has 2 configurations, and none of them is") as caught:
        answers(path)
    assert str(caught.value).endswith(f"would work: {path}/bad, {path}/good")
    assert hub.sent == [".gitattributes"]  # before they are downloaded
    assert answers(f"{path}/bad") == ["bad"]


def test_without_a_network_the_configurations_of_a_conversion_are_those_in_the_cache(
    hub, configurations, monkeypatch
):
    monkeypatch.delitem(FILES, "README.md")
    path = "hf://datasets/me/chats@refs/convert/parquet"
    for name in ("bad", "good"):
        answers(f"{path}/{name}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=f"would work: {path}/bad, {path}/good$"):
        answers(path)
    assert answers(f"{path}/bad") == ["bad"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("good/train-*", ["good", "better"]),
        ("good/t*-0.jsonl", ["test", "good"]),
        ("good/train-[1-9]*", ["better"]),
        ("good/*.json*", ["test", "good", "better"]),
        ("good/t*.json?", ["test", "good"]),
        ("good/*.jsonl.*", ["better"]),
        ("ba?", ["bad"]),
        ("good/*.md5", r"has no good/\*"),
        ("good/x*", r"has no good/x\*"),
        ("other/x*", r"has no other/x\*"),
    ],
)
def test_the_last_part_of_a_path_may_be_a_pattern(hub, configurations, pattern, expected):
    path = f"hf://datasets/me/chats/{pattern}"
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            answers(path)
        return
    assert answers(path) == expected
    sent = [name for name in hub.sent if name != "README.md"]
    assert len(sent) == len(expected)


def test_without_a_network_and_a_card_in_the_cache_all_files_are_read_and_a_note_says_so(
    hub, configurations, monkeypatch
):
    """As the cache of an earlier version, which left out the card."""
    everything = ["test", "good", "better", "bad"]
    answers("hf://datasets/me/chats/good")
    answers("hf://datasets/me/chats/bad")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert sorted(answers("hf://datasets/me/chats")) == sorted(everything)
    notes = Source("hf://datasets/me/chats").notes(is_held_out=True)
    assert notes == [data_hub.cards.UNKNOWN, f"not read: good/train.md5; {OF_RECORDS}"]


@pytest.mark.parametrize("offline", [True, False])
def test_cached_files_are_read_without_a_network(hub, monkeypatch, offline):
    """With HF_HUB_OFFLINE, and when the hub does not respond."""
    first = answers("hf://datasets/me/chats/train.jsonl")
    hub.shutdown()
    hub.server_close()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    assert (
        answers("hf://datasets/me/chats/train.jsonl")
        == first
        == ["Answer 0.", "Answer 1.", "Answer 2."]
    )
    with pytest.raises(
        UserError, match=r"hf://datasets/me/other: cannot be downloaded .* and is not in the cache"
    ):
        answers("hf://datasets/me/other")


def test_a_silent_hub_is_not_waited_for_without_end(hub, monkeypatch):
    """As behind a firewall: cached files are read, and others refused."""
    path = "hf://datasets/me/chats/train.jsonl"
    whole = answers(path)
    monkeypatch.setattr(hub_transfers, "_LONGEST_WAITS", {"connect": 0.2, "read": 0.2})
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections alone
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
        assert answers(path) == whole
        with pytest.raises(UserError, match=r"me/other: cannot be downloaded .*timed out"):
            answers("hf://datasets/me/other")


@pytest.mark.parametrize("network", ["forbidden", "unreachable", "there, cache read-only"])
def test_a_warning_says_that_nobody_knows_whether_a_cache_is_complete(
    hub, monkeypatch, tmp_path, network
):
    """As one filled by an earlier release of the hub's library, which kept no list of the files."""
    whole, path = answers("hf://datasets/me/chats/more"), "hf://datasets/me/chats"
    shutil.rmtree(trees := next((tmp_path / "cache").glob("*/trees")))
    trees.touch()  # no list can be written
    _tree_cache._IN_MEMORY_TREE_CACHE.clear()
    if network == "forbidden":
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    elif network == "unreachable":
        hub.shutdown()
        hub.server_close()
    else:
        whole = answers(path)
    assert answers(path) == whole
    notes = Source(path).notes(is_held_out=True)
    assert (source_files.NOT_LISTED in notes) == (network != "there, cache read-only")
    assert (data_hub.cards.UNKNOWN in notes) == (network != "there, cache read-only")


def test_files_of_the_hub_that_may_hold_records_and_are_not_read_are_named(hub, monkeypatch):
    for name in ("more.zip", "TRAIN.JSONL", "more/c.jsonl.lz4", ".hidden.zip", "LICENSE"):
        monkeypatch.setitem(FILES, name, b"x")
    for path, names in {
        "hf://datasets/me/chats": "TRAIN.JSONL, more.zip, more/c.jsonl.lz4, more/weights.bin",
        "hf://datasets/me/chats/more": "c.jsonl.lz4, weights.bin",
        "hf://datasets/me/chats/mo*": "more.zip, more/c.jsonl.lz4, more/weights.bin",
    }.items():
        assert Source(path).notes(is_held_out=True) == [f"not read: {names}; {OF_RECORDS}"]
    assert Source("hf://datasets/me/chats/train.jsonl").notes(is_held_out=True) == []
    assert "more.zip" not in hub.sent


@pytest.mark.parametrize("folder", ["", "/good"])
def test_a_conversion_of_a_part_of_a_data_set_has_a_warning(
    hub, configurations, monkeypatch, folder
):
    """The hub converts the first 5 GB."""
    monkeypatch.delitem(FILES, "README.md")
    monkeypatch.delitem(FILES, "bad/a/0.jsonl")
    path = f"hf://datasets/me/chats@refs/convert/parquet{folder}"
    assert source_files.PARTIAL not in Source(path).notes(is_held_out=True)
    monkeypatch.setitem(FILES, "good/partial-train/0.jsonl", FILES["good/train-0.jsonl"])
    _tree_cache._IN_MEMORY_TREE_CACHE.clear()
    shutil.rmtree(hub_transfers.in_cache("me/chats", "dataset"))
    assert source_files.PARTIAL in Source(path).notes(is_held_out=True)


def test_a_data_set_is_not_read_from_a_partial_cache(hub, monkeypatch):
    assert len(answers("hf://datasets/me/chats/train.jsonl")) == 3
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="hf://datasets/me/chats: cannot be downloaded") as caught:
        answers("hf://datasets/me/chats")
    assert not is_transient(caught.value)  # another start may use the network no more than this one


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("hf://datasets/chats", "names no data set on the hub; hf://datasets/OWNER/NAME"),
        ("hf://datasets/me/a b", "names no data set on the hub"),
        ("hf://datasets/me/other", "shows no data set me/other"),
        ("hf://datasets/me/chats@old", "has no revision old; another one would work$"),
        ("hf://datasets/me/chats@a/b", "has no revision a; .*, and a slash in its name is .* %2F"),
        ("hf://datasets/me/chats/**/*.jsonl", "only the last part of a path may be a pattern"),
        ("hf://datasets/me/chats/test.jsonl", "has no test.jsonl"),
    ],
)
def test_a_missing_data_set_revision_or_file_is_a_one_line_error(hub, path, words):
    with pytest.raises(UserError, match=words) as caught:
        answers(path)
    assert "\n" not in str(caught.value) and hub.sent == []


def test_a_data_set_that_needs_its_owners_consent_says_so(hub):
    """As LMSYS-Chat-1M: the hub lists its files, and sends them to those who have access."""
    hub.is_gated = True
    with pytest.raises(
        UserError, match="its owner must grant you access: request it at "
    ) as caught:
        answers("hf://datasets/me/chats/train.jsonl")
    address = f"http://127.0.0.1:{hub.server_port}/datasets/me/chats"
    assert f"request it at {address}, then `hf auth login`" in str(caught.value)


@pytest.mark.parametrize("kind", ["data set", "model"])
@pytest.mark.parametrize(
    ("status", "code", "said", "expected"),
    [
        (
            401,
            None,
            "Invalid credentials in Authorization header",
            "answered 401 (Invalid credentials in Authorization header); a valid token (`hf auth "
            "login` or HF_TOKEN), or none, would work",
        ),
        (
            403,
            None,
            "Access to this resource is disabled.",
            "answered 403 (Access to this resource is disabled.); another token (`hf auth login` or "
            "HF_TOKEN), or another name, would work",
        ),
        (
            403,
            None,
            "",
            "answered 403; another token (`hf auth login` or HF_TOKEN), or another "
            "name, would work",
        ),
        (
            403,
            "GatedRepo",
            "Allow hf_ours to read gated repositories.",
            "then `hf auth login` (the hub says: Allow hf_... to read gated repositories.)",
        ),
    ],
)
def test_a_refusal_has_the_hubs_own_words_without_the_token(
    hub, monkeypatch, kind, status, code, said, expected
):
    """Such as that a token has expired, or may not read gated repositories."""
    monkeypatch.setenv("HF_TOKEN", "hf_ours")
    hub.refusal = status, {"X-Error-Message": said, **({"X-Error-Code": code} if code else {})}
    with pytest.raises(UserError) as caught:
        if kind == "model":
            data_hub.download_model("me/model", None, ["*.json"])
        else:
            answers("hf://datasets/me/chats")
    assert str(caught.value).endswith(expected) and "\n" not in str(caught.value)
    assert not is_transient(caught.value)


@pytest.mark.parametrize(
    ("path", "is_name"),
    [("me/chats", True), ("me/chats-v1.5", True), ("me/chats.jsonl", False), ("/me/chats", False)],
)
def test_a_missing_file_named_as_on_the_hub_says_how_the_hubs_are_named(path, is_name):
    with pytest.raises(UserError, match=f"^{path}: no such file; ") as caught:
        answers(path)
    named = f"a data set on the hub is named hf://datasets/{path};"
    assert (named in str(caught.value)) == is_name


@pytest.mark.parametrize(
    ("page", "name"),
    [
        ("https://huggingface.co/datasets/me/chats", "hf://datasets/me/chats"),
        ("https://huggingface.co/datasets/me/chats/", "hf://datasets/me/chats"),
        ("https://hf.co/datasets/me/chats.v1/tree/main", "hf://datasets/me/chats.v1"),
        ("https://huggingface.co/datasets/me/chats/viewer/default/train", "hf://datasets/me/chats"),
        ("https://huggingface.co/datasets/me/chats/blob/main/a.jsonl", "hf://datasets/me/chats"),
        ("https://huggingface.co/me/model?library=x", "me/model"),
        ("huggingface.co/me/model/tree/main", "me/model"),
        ("hf://me/model", "me/model"),
        ("https://huggingface.co/datasets/me/chats/resolve/main/a.jsonl", None),  # a file
        ("https://huggingface.co/me", None),
        ("https://example.org/me/model", None),
        ("hf://datasets/me/chats", None),
        ("hf://datasets/me", None),
        ("me/model", None),
    ],
)
def test_a_page_of_the_hub_is_refused_with_the_name_that_would_work(page, name):
    assert data_hub.name_of_page(page) == name
    if name is None:
        return
    with pytest.raises(UserError, match=f"{re.escape(page)}: .*; {re.escape(name)} would work"):
        source_files.find(page, (".jsonl",)) if "datasets" in page else local_copy(page)


@pytest.mark.parametrize(
    "download",
    [
        lambda: answers("hf://datasets/me/chats/train.jsonl"),
        lambda: data_hub.download_model("me/model", None, ["*.json"]),
    ],
)
def test_a_cache_that_may_not_be_written_is_named(hub, monkeypatch, download):
    """As /.cache is for a container's user without a home folder; not even root may make /sys/x."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", "/sys/cache")
    with pytest.raises(UserError, match=r"^/sys/cache: .* \(.*\); HF_HOME=FOLDER with another"):
        download()


def test_a_local_source_sends_no_request_to_the_hub(hub, tmp_path):
    (tmp_path / "chats.jsonl").write_bytes(FILES["train.jsonl"])
    assert len(answers(str(tmp_path / "chats.jsonl"))) == 3 and hub.requests == []


TRAIN = FILES["train.jsonl"]
GIT = hashlib.sha1(b"blob %d\0" % len(TRAIN) + TRAIN).hexdigest()
SHA256 = hashlib.sha256(TRAIN).hexdigest()


@pytest.mark.parametrize(
    "etag", ['"../../../../x"', 'W/"a/../../x"', '".."', '"{tmp_path}/x"', '"{secret}"']
)
@pytest.mark.parametrize("header", ["ETag", "X-Linked-ETag"])
def test_an_etag_cannot_make_the_cache_write_or_read_outside_it(hub, tmp_path, header, etag):
    """The hub's library names the file that it writes after the ETag."""
    (tmp_path / "secret").write_text("the user's own")
    hub.headers = {header: etag.format(tmp_path=tmp_path, secret=tmp_path / "secret")}
    with pytest.raises(UserError, match=f"its {header} leads out of the cache") as caught:
        answers("hf://datasets/me/chats/train.jsonl")
    assert "\n" not in str(caught.value)
    assert {path.name for path in tmp_path.iterdir()} == {"cache", "secret"}
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.name == "x"]


@pytest.mark.parametrize("etag", [GIT, SHA256, hashlib.sha1(TRAIN).hexdigest(), "of-a-mirror"])
def test_contents_must_match_the_digest(hub, tmp_path, etag):
    """A changed file is removed; an ETag that is not a digest cannot be checked."""
    path, hub.headers = "hf://datasets/me/chats/train.jsonl", {"ETag": f'"{etag}"'}
    hub.content = TRAIN.replace(b"Answer 1", b"Answer 9")
    if etag == "of-a-mirror":
        assert answers(path)[1] == "Answer 9."
        return
    with pytest.raises(UserError, match="does not match the hub's digest"):
        answers(path)
    hub.content = None
    assert answers(path) == ["Answer 0.", "Answer 1.", "Answer 2."]
    assert len(hub.sent) == 2


@pytest.mark.parametrize(
    ("sent", "words"),
    [(TRAIN * 50, "more than the .* bytes announced"), (TRAIN[:-1], "should be of size")],
    ids=["more", "less"],
)
def test_a_file_of_another_size_than_announced_is_discarded(hub, tmp_path, sent, words):
    """Compressed in transit, so Content-Length does not tell; an endless body would fill the
    disk."""
    hub.headers, hub.content = {"X-Linked-Size": str(len(TRAIN))}, gzip.compress(sent)
    hub.headers |= {"Content-Encoding": "gzip", "Content-Length": str(len(hub.content))}
    with pytest.raises(UserError, match=words):
        answers("hf://datasets/me/chats/train.jsonl")
    assert not [*(tmp_path / "cache").rglob("blobs/*")]


@pytest.mark.parametrize(
    "listing",
    [
        b"<html>\x1b[2J",
        b"[1, 2]",
        b"[" * 100_000,
        b'{"id": "me/chats", "siblings": []}',
        b'{"id": "me/chats", "sha": "../../x", "siblings": [{"rfilename": "a.jsonl"}]}',
        b'{"id": "me/chats", "sha": "%b", "siblings": [7, {"x": 1}]}' % SHA.encode(),
        b'{"id": "me/chats", "sha": "%b", "siblings": [{"rfilename": "../a.jsonl"}]}'
        % SHA.encode(),
        b'"%b"' % bytes(3_000_000),
    ],
    ids=["page", "list", "nested", "no revision", "path", "no names", "out", "without end"],
)
def test_an_invalid_response_of_the_hub_is_a_one_line_error(hub, monkeypatch, tmp_path, listing):
    monkeypatch.setattr(hub_transfers, "MAX_JSON_BYTES", 1_000_000)
    hub.listing = listing
    with pytest.raises(UserError, match="hf://datasets/me/chats: cannot be downloaded") as caught:
        answers("hf://datasets/me/chats")
    assert "\n" not in str(caught.value) and "\x1b" not in str(caught.value)
    assert {path.name for path in tmp_path.iterdir()} <= {"cache"}
