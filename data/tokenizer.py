"""Tokenizers of Hugging Face folders and sentencepiece; text never becomes control tokens."""

import contextlib
import copy
import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from data.added_tokens import CONFIG, LISTED, OLDER_CONFIG, parse_object
from data.converted_tokenizer import (
    BPE_FILES,
    WOULD_WORK,
    from_bpe_files,
    from_sentencepiece,
    read_files,
)
from data.errors import UserError, first_line
from data.huggingface_engine import HuggingFace
from data.paths import expanded
from data.rebuilt_tokenizer import rebuilt
from data.spans import ControlToken, Spans
from data.untrusted_files import check_within, check_writable, file_within, is_text

NAMED_TEMPLATES = "additional_chat_templates/*.jinja"  # beside the default one, chat_template.jinja
TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"  # used with `tools`
# Replaces chat_template.jinja.
DEFAULT_TEMPLATE = "additional_chat_templates/default.jinja"
# Where processors of images and texts had theirs, such as LLaVA's.
PROCESSORS_TEMPLATE = "chat_template.json"
# What another chat template makes obsolete.
_REPLACED = (TOOL_TEMPLATE, DEFAULT_TEMPLATE, PROCESSORS_TEMPLATE)
# The files of a tokenizer. A saved tokenizer has those that the original had.
FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    TOOL_TEMPLATE,
)
# The default date that chat templates write: fixed, so that the same data gives the same ids.
TEMPLATE_DATE = datetime(2025, 1, 1)
SHORT = 24
"""Most characters of a text whose ids are cached, such as a heading's "user" and the line ends
around it."""
# Characters that no text has: our own marks, and lone surrogates, which no encoder takes.
_NOT_IN_TEXT = re.compile("[\ufdd0\ufdd1\ud800-\udfff]")


def template_files(folder: Path) -> list[str]:
    """Returns the names of a folder's NAMED_TEMPLATES, which are read as in transformers.

    Raises:
      UserError: a link leads out of the folder.
    """
    paths = sorted(folder.glob(NAMED_TEMPLATES))
    names = [f"{path.parent.name}/{path.name}" for path in paths]
    return [name for name in names if file_within(folder, name)]


class Tokenizer:
    """A tokenizer, the same for training, chat and export. Made by `Tokenizer.load`."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    special_tokens: dict[str, str]
    """Texts that chat templates know by name, such as bos_token and unk_token."""
    controls: dict[str, ControlToken]
    """The control tokens by their text."""
    vocab_size: int
    """1 + the highest id."""
    adds_bos: bool
    """Whether the tokenizer puts BOS before a text by default, as in transformers."""
    chat_template: str | None
    """The tokenizer's own chat template, in Jinja."""
    text_tokens: tuple[str, ...]
    """Added tokens that may be typed in a text instead of being control tokens."""
    template_date: datetime
    """What strftime_now writes in a chat template."""
    template_kwargs: Mapping[str, Any]
    """Further variables of chat templates, such as {"enable_thinking": False}."""
    memory: dict[Any, Any] | None = None
    """Encoded texts, and prompts rendered by `data.templates`; see `remembering`."""

    def __init__(
        self,
        files: dict[str, bytes],
        engine: HuggingFace,
        path: str,
        text_tokens: tuple[str, ...] = (),
    ):
        """Makes a tokenizer from the contents of its `files`; `path` names it in messages."""
        self._files = files
        self._engine = engine
        self.controls = engine.controls
        self.vocab_size = engine.vocab_size
        config = parse_object(files, CONFIG)
        named = [parse_object(files, OLDER_CONFIG), config]
        if LISTED not in config:  # then transformers prefers the older file
            named.reverse()
        self._set_special_tokens({**_named(named[0]), **_named(named[1])}, path)
        self.adds_bos = self.bos_id is not None and engine.begins_with(self.bos_id)
        self.chat_template = _chat_template(files, config, path)
        check_writable(config, f"{path}: {CONFIG}")
        self.text_tokens = text_tokens
        self.template_date = TEMPLATE_DATE
        self.template_kwargs = {}
        for text in text_tokens:
            self._check_text_token(text)
            del self.controls[text]
        engine.forbid({control.id for control in self.controls.values()})
        self._encode_short = lru_cache(1024)(
            lambda text, beginning: engine.encode(_NOT_IN_TEXT.sub("\ufffd", text), beginning)
        )

    def _check_text_token(self, text: str) -> None:
        """Raises UserError if turns may not contain a token of this text."""
        special = {self.pad_token: "padding", self.bos_token: "BOS", self.eos_token: "EOS"}
        if text in self.controls and text not in special:
            return
        valid = ", ".join(sorted(self.controls.keys() - special.keys())) or "none"
        if text not in self.controls:
            raise UserError(
                f"data.text_tokens: {text!r} is not an added token of the tokenizer; {valid} would "
                "work"
            )
        raise UserError(
            f"data.text_tokens: {text!r} is the tokenizer's {special[text]} token, which no turn "
            f"may contain; {valid} would work, or, for texts that a chat template has rendered, "
            "control_tokens: true of their source"
        )

    def _set_special_tokens(self, config: dict[str, object], path: str) -> None:
        """Sets bos_token, bos_id and so on from the names in the tokenizer's files."""
        for name in ("bos", "eos", "pad"):
            text = _token_text(config.get(f"{name}_token"))
            if text is not None and not (isinstance(text, str) and is_text(text)):
                raise UserError(
                    f"{path}: its {name}_token is {text!r}, which is no text; the text of a token "
                    "would work"
                )
            token_id = None if text is None else self._engine.token_to_id(text)
            setattr(self, f"{name}_token", text)
            setattr(self, f"{name}_id", token_id)
            if text is None:
                continue
            if token_id is None:
                raise UserError(f"{path}: its {name}_token {text!r} is not in its vocabulary")
            if text not in self.controls:
                # Even if named only in the config, it is a control token.
                self.controls[text] = ControlToken(text, token_id)
        extra = config.get("extra_special_tokens")
        named = {**config, **(extra if isinstance(extra, dict) else {})}
        texts = {name: _token_text(value) for name, value in named.items()}
        self.special_tokens = {
            name: text
            for name, text in texts.items()
            if name.endswith("_token") and isinstance(text, str) and is_text(text)
        }
        for text in self.controls.keys() & self.special_tokens.values():
            self.controls[text] = dataclasses.replace(self.controls[text], special=True)

    @classmethod
    def load(cls, path: str | Path, as_saved: bool = False) -> "Tokenizer":
        """Reads a tokenizer from a folder or a file.

        Args:
          path: a folder with a tokenizer.json, or otherwise one sentencepiece .model file, or
            vocab.json and merges.txt, which transformers converts; or a single file of the first
            two kinds.
          as_saved: whether `save` wrote the folder, so that its tokenizer.json gives the ids that
            were trained; otherwise it gives those of transformers, see `data.rebuilt_tokenizer`.

        Raises:
          UserError: there is no tokenizer at `path`, or it cannot be read.
        """
        path = expanded(path)
        if path.is_dir():
            files = _files_in(path)
        elif path.is_file():
            name = "tokenizer.json" if path.suffix == ".json" else "tokenizer.model"
            files = {name: path.read_bytes()}
        else:
            raise UserError(f"{path}: no such file or folder; {WOULD_WORK}")
        if "tokenizer.json" not in files:
            files |= from_sentencepiece(path, files)
            as_saved = True
        try:
            files |= _template_of_processor(path, files)
            engine = HuggingFace(files)
            if not as_saved and (changed := rebuilt(path, files)):
                files |= changed
                engine = HuggingFace(files)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
        except Exception as error:  # the library raises bare Exceptions
            raise UserError(
                f"{path}: cannot be read as a tokenizer ({first_line(error)}); {WOULD_WORK}"
            ) from None
        return cls(files, engine, str(path))

    def with_controls(self, tokens: Iterable[str]) -> "Tokenizer":
        """Returns a tokenizer with these control tokens added after the highest id."""
        missing = [token for token in tokens if token not in self.controls]
        if not missing:
            return self
        files = {**self._files, **self._engine.with_control_tokens(missing)}
        return self._made_anew(files, "the tokenizer with added control tokens", self.text_tokens)

    def with_text_tokens(self, tokens: Iterable[str]) -> "Tokenizer":
        """Returns a tokenizer whose texts may contain these added tokens, such as <think>.

        Raises:
          UserError: a token is not an added token of this tokenizer, or is its BOS, EOS or padding
            token.
        """
        tokens = tuple(sorted(set(tokens)))
        if not tokens:
            return self
        return self._made_anew(self._files, "the tokenizer", tokens)

    def _made_anew(
        self, files: dict[str, bytes], path: str, text_tokens: tuple[str, ...]
    ) -> "Tokenizer":
        tokenizer = Tokenizer(files, HuggingFace(files), path, text_tokens)
        return tokenizer.with_template_date(self.template_date).with_template_kwargs(
            self.template_kwargs
        )

    def with_chat_template(self, text: str) -> "Tokenizer":
        """Returns this tokenizer with another chat template, as if its files had it."""
        tokenizer = copy.copy(self)
        tokenizer.__dict__.pop("fingerprint", None)
        tokenizer._files = _with_template(self._files, text)
        tokenizer.chat_template = text
        return tokenizer

    def with_template_date(self, date: datetime) -> "Tokenizer":
        """Returns this tokenizer with another date for chat templates that write one."""
        tokenizer = copy.copy(self)
        tokenizer.template_date = date
        return tokenizer

    def with_template_kwargs(self, kwargs: Mapping[str, Any]) -> "Tokenizer":
        """Returns this tokenizer with other variables for chat templates."""
        tokenizer = copy.copy(self)
        tokenizer.template_kwargs = dict(kwargs)
        return tokenizer

    def remembering(self) -> "Tokenizer":
        """Returns this tokenizer for a pair's conversations: their prompt is rendered, and texts
        that both have are encoded, once."""
        tokenizer = copy.copy(self)
        vars(tokenizer)["typed_pattern"] = self.typed_pattern  # compiled once for all copies
        tokenizer.memory = {}
        return tokenizer

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text that begins a document, without BOS, EOS and control tokens."""
        return list(self.encode_spans(text).ids)

    def encode_spans(self, text: str, beginning: bool = True) -> Spans:
        """Returns the ids of a text, and the offsets (start, end) of every token in `text`.

        Args:
          beginning: whether the text begins a document. Otherwise it follows a control token, which
            matters to tokenizers that put a space only at the beginning of a document.

        Returns:
          The tokens in order; start equals end for a token without characters.
        """
        if not text:
            return Spans([], [])
        if len(text) <= SHORT:
            return self._encode_short(text, beginning)
        memory = {} if self.memory is None else self.memory
        if (text, beginning) not in memory:
            encoded = self._engine.encode(_NOT_IN_TEXT.sub("\ufffd", text), beginning)
            memory[text, beginning] = encoded
        return memory[text, beginning]

    def decode(
        self,
        ids: Sequence[int] | Int[np.ndarray, " n"],
        skip_special: bool = True,
        keep: Sequence[str] = (),
    ) -> str:
        """Returns the text of ids: without special tokens, but with others such as <think>, as in
        transformers; or with the texts of all control tokens.

        Args:
          keep: special tokens that are not skipped.
        """
        ids = [int(token) for token in ids]
        if skip_special:
            skipped = [token for text, token in self.controls.items() if text not in keep]
            special = {control.id for control in skipped if control.special}
            return self._engine.decode([token for token in ids if token not in special])
        texts = {control.id: control.text for control in self.controls.values()}
        text = ""
        run: list[int] = []  # ids since the last control token
        for token in ids:
            if token in texts:
                text += self._engine.decode(run) + texts[token]
                run = []
            else:
                run.append(token)
        return text + self._engine.decode(run)

    def typed(self, text: str) -> set[str]:
        """Returns the texts of control tokens in a text; `encode` treats them as plain letters."""
        return set(self.typed_pattern.findall(text))

    @cached_property
    def typed_pattern(self) -> re.Pattern[str]:
        """Matches the texts of control tokens; the longest match wins."""
        longest_first = sorted(self.controls, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of file names, contents and text_tokens; equal fingerprints mean equal ids."""
        digest = hashlib.sha256()
        for name in sorted({*self._files} & {*FILES}):  # other templates change no ids
            digest.update(f"{name}\0{len(self._files[name])}\0".encode() + self._files[name])
        digest.update("\0".join(self.text_tokens).encode())
        # These had other ids in earlier versions, except for the three, if they had an id.
        roles = (self.bos_token, self.eos_token, self.pad_token)
        beside = {
            text: properties
            for text, properties in self._engine.named_beside.items()
            if text not in roles or properties != (properties[0], False, False, False, False)
        }
        if beside:
            digest.update(json.dumps(beside, sort_keys=True).encode())
        if self._engine.punctuation:
            digest.update(json.dumps(self._engine.punctuation).encode())
        return digest.hexdigest()

    def save(self, directory: str | Path, chat_template: str | None = None) -> None:
        """Writes a folder that `Tokenizer.load` and `transformers.AutoTokenizer` load.

        The original files are copied byte for byte, with the tokenizer.json that transformers made
        if they had none, and a tokenizer_config.json that belongs to it, also to added tokens.

        Args:
          chat_template: replaces the tokenizer's own chat template, such as the
            `templates.jinja_template(...)` trained with; written as chat_template.jinja.
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        files = {**self._files, **self._listing()}
        if chat_template is not None:
            files = _with_template(files, chat_template)
            for name in _REPLACED:
                (directory / name).unlink(missing_ok=True)  # perhaps copied here before
            with contextlib.suppress(OSError):  # there is none, or it has other templates
                (directory / TOOL_TEMPLATE).parent.rmdir()
        elif self.chat_template is not None and "chat_template.jinja" in files:
            files["chat_template.jinja"] = self.chat_template.encode()
        for name, content in files.items():
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_bytes(content)

    def _listing(self) -> dict[str, bytes]:
        """Returns the tokenizer_config.json that lists all added tokens, if it lists some but not
        all: transformers' LlamaTokenizer then reads no others from tokenizer.json."""
        config = parse_object(self._files, CONFIG)
        listed = config.get(LISTED)
        if not isinstance(listed, dict) or self._engine.added_tokens.keys() <= listed.keys():
            return {}
        config[LISTED] = {**self._engine.added_tokens, **listed}
        return {CONFIG: _dump_json(config)}


def _files_in(folder: Path) -> dict[str, bytes]:
    """Returns the contents of a folder's tokenizer, by name.

    Raises:
      UserError: there is none, or it cannot be read.
    """
    files = read_files(folder, (*FILES, *template_files(folder)))
    if "tokenizer.json" in files or "tokenizer.model" in files:
        return files
    if all(file_within(folder, name) for name in BPE_FILES):
        return files | from_bpe_files(folder)
    models = sorted(folder.glob("*.model"))
    if len(models) != 1:
        names = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "nothing"
        raise UserError(f"{folder}: no tokenizer in this folder (found {names}); {WOULD_WORK}")
    check_within(folder, models[0])
    return files | {"tokenizer.model": models[0].read_bytes()}


def _template_of_processor(folder: Path, files: dict[str, bytes]) -> dict[str, bytes]:
    """Returns a chat_template.jinja with the template of an image model's processor; empty if the
    tokenizer has a template, or the folder has no processor's.

    Raises:
      UserError: the file cannot be read.
    """
    has_own = parse_object(files, CONFIG).get("chat_template") or any(
        name.endswith(".jinja") for name in files
    )
    name = PROCESSORS_TEMPLATE
    if has_own or not (found := read_files(folder, (name,))):
        return {}
    template = parse_object(found, name).get("chat_template")
    if not isinstance(template, str) or not is_text(template):
        raise UserError(f"the chat_template in {name} is no text; a Jinja template would work")
    return {"chat_template.jinja": template.encode()}


def _named(config: dict) -> dict:
    """Returns settings without empty texts, which the first LLaMA conversions have for
    bos_token."""
    return {name: value for name, value in config.items() if value != ""}


def _chat_template(files: dict[str, bytes], config: dict, path: str) -> str | None:
    """Returns the chat template in chat_template.jinja, or otherwise in tokenizer_config.json.

    If there is a separate one for conversations with tools, the two are combined.
    """
    named = _templates_by_name(config.get("chat_template"))
    for name in named:
        if not re.fullmatch(r"[^/\0.][^/\0]*", name):  # an export may write it to a file
            raise UserError(
                f"{path}: the name {name!r} of a chat_template in {CONFIG} is no file's name; "
                "letters, digits, - and _ would work"
            )
    for file in ("chat_template.jinja", *sorted(set(files) - set(FILES)), TOOL_TEMPLATE):
        if file not in files or not file.endswith(".jinja"):
            continue
        name = "default" if file == "chat_template.jinja" else Path(file).stem
        try:
            named[name] = files[file].decode()
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: byte {error.start} of {file} is not UTF-8 text") from None
    default, tool_use = named.get("default"), named.get("tool_use")
    for text in named.values():
        if text is not None and not is_text(text):
            raise UserError(
                f"{path}: the chat_template in tokenizer_config.json is no text; a Jinja template "
                "would work"
            )
    if not (isinstance(default, str) and isinstance(tool_use, str)):
        return default if isinstance(default, str) else None
    # Jinja drops a newline after a tag, and a template's last one.
    first, second = tool_use.removesuffix("\n"), default.removesuffix("\n")
    return f"{{% if tools %}}{{{{ '' }}}}{first}{{% else %}}{{{{ '' }}}}{second}{{% endif %}}"


def _with_template(files: Mapping[str, bytes], chat_template: str) -> dict[str, bytes]:
    """Returns a tokenizer's files with this chat template as the only default one, and none for
    tools."""
    files = dict(files)
    config = json.loads(files.get(CONFIG, b"{}"))
    if (template := config.pop("chat_template", None)) is not None:
        files[CONFIG] = _dump_json(config)
        for name, text in _templates_by_name(template).items():
            files.setdefault(NAMED_TEMPLATES.replace("*", name), (text or "").encode())
    files["chat_template.jinja"] = chat_template.encode()
    return {name: content for name, content in files.items() if name not in _REPLACED}


def _templates_by_name(template: Any) -> dict[str, Any]:
    """Returns the templates in `chat_template` of a tokenizer_config.json: one, or several."""
    if isinstance(template, list):  # an older form in transformers
        entries = [entry for entry in template if isinstance(entry, dict)]
        return {str(entry.get("name")): entry.get("template") for entry in entries}
    return dict(template) if isinstance(template, dict) else {"default": template}


def _token_text(value: object) -> object:
    """Returns the text of a special token given as a text or as its properties."""
    return value.get("content") if isinstance(value, dict) else value


def _dump_json(value: dict) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
