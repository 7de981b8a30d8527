"""Text to ids and back, for Hugging Face folders and sentencepiece models; text never becomes a control token."""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from data.errors import UserError

# The files that make a tokenizer; a saved one carries whichever of them the original had.
FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
WOULD_WORK = "a folder with tokenizer.json or tokenizer.model, or a sentencepiece .model file, would work"
# Noncharacters: legal in a str, in nobody's text. GUARD keeps the library from treating a run in the middle of a
# conversation as the beginning of a text; the same characters in a user's text are replaced.
GUARD = "\ufdd0\ufdd1\ufdd0"
_NONCHARACTERS = re.compile("[\ufdd0\ufdd1]")


@dataclass(frozen=True)
class ControlToken:
    """A token that only a template may write. strips: white space left and right that its tokenizer takes with it."""

    text: str
    id: int
    strips: tuple[bool, bool] = (False, False)


class Tokenizer:
    """One tokenizer, the same for training, chat and export. Make it with `Tokenizer.load`.

    bos_id, eos_id, pad_id: int or None; bos_token, eos_token, pad_token: their text or None; vocab_size: 1 + the highest
    id; chat_template: Jinja text or None; controls: every ControlToken, by text; fingerprint: sha256 of its files.
    """

    def __init__(self, files: dict[str, bytes], engine: "_Engine", where: str):
        self._files = files
        self._engine = engine
        self.controls: dict[str, ControlToken] = engine.controls
        self.vocab_size: int = engine.vocab_size
        config = _json(files, "tokenizer_config.json", where)
        names = {**engine.names, **_json(files, "special_tokens_map.json", where), **config}
        for name in ("bos", "eos", "pad"):
            text = names.get(f"{name}_token")
            text = text.get("content") if isinstance(text, dict) else text
            if text is not None and engine.find(text) is None:
                raise UserError(f"{where}: its {name}_token {text!r} is not in its vocabulary")
            setattr(self, f"{name}_token", text)
            setattr(self, f"{name}_id", None if text is None else engine.find(text))
            if text is not None and text not in self.controls:
                # Named in the config alone: no less a control token for that.
                self.controls[text] = ControlToken(text, engine.find(text))
        template = files.get("chat_template.jinja")
        template = config.get("chat_template") if template is None else template.decode()
        if isinstance(template, list):  # transformers' older form: several named ones
            template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
        self.chat_template: str | None = template
        engine.seal({control.id for control in self.controls.values()})

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Reads a folder (tokenizer.json first, else one sentencepiece .model) or a single file of either kind.

        Raises UserError, in one line, when there is no tokenizer there or it cannot be read.
        """
        path = Path(path).expanduser()
        if path.is_dir():
            files = {name: (path / name).read_bytes() for name in FILES if (path / name).is_file()}
            if "tokenizer.json" not in files and "tokenizer.model" not in files:
                models = sorted(path.glob("*.model"))
                if len(models) != 1:
                    found = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"
                    raise UserError(f"{path}: no tokenizer in this folder (found {found}); {WOULD_WORK}")
                files["tokenizer.model"] = models[0].read_bytes()
        elif path.is_file():
            files = {"tokenizer.json" if path.suffix == ".json" else "tokenizer.model": path.read_bytes()}
        else:
            raise UserError(f"{path}: no such file or folder; {WOULD_WORK}")
        kind = _HuggingFace if "tokenizer.json" in files else _Sentencepiece
        try:
            engine = kind(files)
        except UserError:
            raise
        except Exception as error:  # both libraries raise bare Exception or RuntimeError
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise UserError(f"{path}: cannot be read as a tokenizer ({reason[:200]}); {WOULD_WORK}") from None
        return cls(files, engine, str(path))

    def with_controls(self, tokens: Iterable[str]) -> "Tokenizer":
        """A tokenizer with further control tokens, whose ids follow on the highest one; no other id changes."""
        missing = [token for token in tokens if token not in self.controls]
        if not missing:
            return self
        files = {**self._files, **self._engine.extended(missing)}
        return Tokenizer(files, type(self._engine)(files), "the tokenizer with added control tokens")

    def encode(self, text: str) -> list[int]:
        """Ids of a text as at the beginning of a document, without BOS or EOS; never a control id, whatever is typed."""
        return [token for token, _, _ in self.encode_spans(text)]

    def encode_spans(self, text: str, beginning: bool = True) -> list[tuple[int, int, int]]:
        """(id, start, end) of every token; start and end are places in `text`, equal where a token has no text of its own.

        beginning=False: the text goes on after a control token, which matters to tokenizers that mark only a text's
        beginning with a space.
        """
        if not text:
            return []
        text = _NONCHARACTERS.sub("\ufffd", text)
        return self._engine.encode(text, beginning)

    def decode(self, ids, skip_control: bool = True) -> str:
        """Text of ids; control tokens are left out, or written as their text."""
        ids = [int(token) for token in ids]
        if skip_control:
            hidden = {control.id for control in self.controls.values()}
            return self._engine.decode([token for token in ids if token not in hidden])
        names = {control.id: control.text for control in self.controls.values()}
        text, run = "", []
        for token in [*ids, None]:
            if token is None or token in names:
                text += self._engine.decode(run) + (names[token] if token is not None else "")
                run = []
            else:
                run.append(token)
        return text

    def control_id(self, token: str) -> int:
        """Id of a control token by its text; UserError when the tokenizer has none of that text."""
        if token not in self.controls:
            raise UserError(f"the tokenizer has no control token {token!r}; it has {', '.join(sorted(self.controls))}")
        return self.controls[token].id

    @cached_property
    def control_pattern(self) -> re.Pattern:
        """Finds control tokens in a *template's* own text, the longest first, with the white space they take along."""
        parts = []
        for control in sorted(self.controls.values(), key=lambda control: -len(control.text)):
            left, right = (r"\s*" if strip else "" for strip in control.strips)
            parts.append(left + f"({re.escape(control.text)})" + right)
        return re.compile("|".join(parts) or r"(?!)")

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over the files' names and bytes: equal tokenizers give equal ids."""
        digest = hashlib.sha256()
        for name in sorted(self._files):
            digest.update(f"{name}\0{len(self._files[name])}\0".encode() + self._files[name])
        return digest.hexdigest()

    def save(self, directory: str | Path, chat_template: str | None = None) -> None:
        """Writes a folder that `Tokenizer.load` and `transformers.AutoTokenizer` load.

        The original files are copied byte for byte; chat_template (say `templates.jinja_template(...)`, the one trained
        with) takes the place of the original one, and is written as chat_template.jinja.

        A sentencepiece model is written as tokenizer.model with a tokenizer_config.json that names LlamaTokenizer. Known to
        differ: transformers 5 converts it to its own fast tokenizer, which applies no sentencepiece normalisation (nfkc
        and the like), merges runs of spaces in its own way, and turns typed control tokens into control ids.
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        files = dict(self._files)
        template = self.chat_template if chat_template is None else chat_template
        if "tokenizer.model" in files and "tokenizer.json" not in files:
            config = json.loads(files.get("tokenizer_config.json", b"{}"))
            config.setdefault("tokenizer_class", "LlamaTokenizer")
            # transformers' own default of legacy differs between versions; BOS is the template's business.
            defaults = {"legacy": True, "add_bos_token": False, "add_eos_token": False}
            names = {"bos_token": self.bos_token, "eos_token": self.eos_token, "pad_token": self.pad_token}
            for key, value in {**defaults, **names, **self._engine.names}.items():
                config.setdefault(key, value)
            files["tokenizer_config.json"] = _dump(config)
        if chat_template is not None:
            config = json.loads(files.get("tokenizer_config.json", b"{}"))
            if config.pop("chat_template", None) is not None:  # two templates in one folder is one too many
                files["tokenizer_config.json"] = _dump(config)
        if template is not None and (chat_template is not None or "chat_template.jinja" in files):
            files["chat_template.jinja"] = template.encode()
        for name, content in files.items():
            (directory / name).write_bytes(content)


class _Engine(Protocol):
    """What the two libraries have in common, for Tokenizer's eyes only."""

    controls: dict[str, ControlToken]
    names: dict[str, str]  # bos_token, eos_token, ... as far as the model file itself tells
    vocab_size: int

    def find(self, text: str) -> int | None:
        """The id of exactly this token."""

    def extended(self, tokens: list[str]) -> dict[str, bytes]:
        """The model file with control tokens added at its end."""

    def seal(self, control_ids: set[int]) -> None:
        """Prepares encode so that it never gives one of these ids."""

    def encode(self, text: str, beginning: bool) -> list[tuple[int, int, int]]:
        """(id, first character, end) of each token; beginning: `text` stands at the start of what is encoded."""

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`, control tokens among it."""


class _HuggingFace(_Engine):
    def __init__(self, files: dict[str, bytes]):
        from tokenizers import Tokenizer as Library

        self._spec = json.loads(files["tokenizer.json"])
        self._full = Library.from_str(json.dumps(self._spec))
        self.names = {}
        # Runs of white space are sometimes kept as added tokens; they are text. Everything else that is added is a
        # token that a person could type and must not get.
        self._text_tokens = [token for token in self._spec.get("added_tokens", []) if _is_text(token)]
        self.controls = {
            token["content"]: ControlToken(
                token["content"], token["id"], (bool(token.get("lstrip")), bool(token.get("rstrip")))
            )
            for token in self._spec.get("added_tokens", [])
            if not _is_text(token)
        }
        self.vocab_size = max(self._full.get_vocab(with_added_tokens=True).values()) + 1

    def find(self, text):
        return self._full.token_to_id(text)

    def extended(self, tokens):
        from tokenizers import AddedToken
        from tokenizers import Tokenizer as Library

        library = Library.from_str(json.dumps(self._spec))
        library.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
        return {"tokenizer.json": library.to_str(pretty=True).encode()}

    def seal(self, control_ids):
        from tokenizers import AddedToken
        from tokenizers import Tokenizer as Library

        spec = json.loads(json.dumps(self._spec))
        spec.update(added_tokens=[], post_processor=None, truncation=None, padding=None)
        _rename(spec["model"], control_ids)
        self._plain = Library.from_str(json.dumps(spec))
        for token in self._text_tokens:
            if self._plain.token_to_id(token["content"]) == token["id"]:
                options = {name: token[name] for name in ("single_word", "lstrip", "rstrip", "normalized")}
                self._plain.add_tokens([AddedToken(token["content"], **options)])
        self._plain.add_special_tokens([AddedToken(GUARD, normalized=False)])
        # <unk> is the one control token that text can still become, where a vocabulary lacks its characters (never by
        # typing it): an unknown character is no command, and the id says just that.
        unknown = spec["model"].get("unk_id", spec["model"].get("unk_token"))
        self._forbidden = control_ids - {self._plain.token_to_id(unknown) if isinstance(unknown, str) else unknown}

    def encode(self, text, beginning):
        guard = "" if beginning else GUARD
        encoding = self._plain.encode(guard + text, add_special_tokens=False)
        shift, skip = len(guard), int(not beginning)
        spans = zip(encoding.ids[skip:], encoding.offsets[skip:], strict=True)
        result = [(token, start - shift, end - shift) for token, (start, end) in spans]
        _check(result, self._forbidden)
        return result

    def decode(self, ids):
        return self._full.decode(ids, skip_special_tokens=False)


class _Sentencepiece(_Engine):
    def __init__(self, files: dict[str, bytes]):
        import sentencepiece
        from sentencepiece import sentencepiece_model_pb2

        self._proto = sentencepiece_model_pb2.ModelProto()
        self._proto.ParseFromString(files["tokenizer.model"])
        kinds = sentencepiece_model_pb2.ModelProto.SentencePiece
        # Hugging Face adds tokens beside the model file, with the ids that follow on its own.
        for number, token in sorted(_added(files).items()):
            if number > len(self._proto.pieces):
                raise UserError(f"the added token {token!r} has id {number}, the one before it {len(self._proto.pieces) - 1}; "
                                "ids without a gap, or a tokenizer.json, would work")
            if number == len(self._proto.pieces):
                self._proto.pieces.add(piece=token, score=0.0, type=kinds.CONTROL)
        self._full = sentencepiece.SentencePieceProcessor(model_proto=self._proto.SerializeToString())
        self.vocab_size = self._full.get_piece_size()
        self._user_defined = kinds.USER_DEFINED
        self._control = kinds.CONTROL
        self._unused = kinds.UNUSED
        self.controls = {
            piece.piece: ControlToken(piece.piece, number)
            for number, piece in enumerate(self._proto.pieces)
            if piece.type == kinds.CONTROL or (piece.type == kinds.USER_DEFINED and piece.piece.strip(" \u2581\n\t"))
        }
        ids = {"bos": self._full.bos_id(), "eos": self._full.eos_id(), "pad": self._full.pad_id()}
        names = {f"{name}_token": self._full.id_to_piece(number) for name, number in ids.items() if number >= 0}
        self.names = {**names, "unk_token": self._full.id_to_piece(self._full.unk_id())}

    def find(self, text):
        number = self._full.piece_to_id(text)
        return number if self._full.id_to_piece(number) == text else None

    def extended(self, tokens):
        proto = type(self._proto)()
        proto.CopyFrom(self._proto)
        for token in tokens:
            proto.pieces.add(piece=token, score=0.0, type=self._control)
        return {"tokenizer.model": proto.SerializeToString()}

    def seal(self, control_ids):
        import sentencepiece

        proto = type(self._proto)()
        proto.CopyFrom(self._proto)
        for number in control_ids:
            if proto.pieces[number].type == self._user_defined:
                proto.pieces[number].type = self._unused  # matched nowhere any more, ids stay
        self._plain = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
        self._forbidden = control_ids - {self._full.unk_id()}

    def encode(self, text, beginning):
        # Each run gets sentencepiece's own dummy prefix, as LLaMA's authors encode each turn by itself.
        del beginning
        pieces = self._plain.encode(text, out_type="proto").pieces
        places, total = {0: 0}, 0  # offsets count bytes of UTF-8
        for number, character in enumerate(text, 1):
            total += len(character.encode())
            places[total] = number
        result = [(piece.id, places.get(piece.begin, 0), places.get(piece.end, 0)) for piece in pieces]
        _check(result, self._forbidden)
        return result

    def decode(self, ids):
        return self._full.decode(ids)


def _added(files: dict[str, bytes]) -> dict[int, str]:
    """The tokens that are added beside a sentencepiece model, by id, as transformers keeps them before and since 2023."""
    older = json.loads(files.get("added_tokens.json", b"{}"))
    newer = json.loads(files.get("tokenizer_config.json", b"{}")).get("added_tokens_decoder") or {}
    return {number: token for token, number in older.items()} | {int(n): token["content"] for n, token in newer.items()}


def _is_text(token: dict) -> bool:
    return not token.get("special") and not token["content"].strip()


def _rename(model: dict, control_ids: set[int]) -> None:
    """Hides control tokens that are ordinary entries: unigram and word models would find them by their text."""
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        hidden = {text: number for text, number in vocabulary.items() if number in control_ids}
        for text, number in hidden.items():
            del vocabulary[text]
            vocabulary[f"\ufdd1{number}\ufdd1"] = number
            if model.get("unk_token") == text:
                model["unk_token"] = f"\ufdd1{number}\ufdd1"
        merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in model.get("merges", [])]
        if "merges" in model:
            model["merges"] = [list(pair) for pair in merges if not ({*pair, "".join(pair)} & hidden.keys())]
    elif isinstance(vocabulary, list):  # unigram: [[piece, score], ...], the place is the id
        for number in control_ids:
            if number < len(vocabulary):
                vocabulary[number] = [f"\ufdd1{number}\ufdd1", vocabulary[number][1]]


def _check(spans: list[tuple[int, int, int]], forbidden: set[int]) -> None:
    # A last guard; the tests try every control token. It costs a set look-up per token.
    for token, start, _ in spans:
        if token in forbidden:
            raise AssertionError(f"control id {token} came out of text at {start}")


def _json(files: dict[str, bytes], name: str, where: str) -> dict:
    try:
        return json.loads(files.get(name, b"{}"))
    except ValueError as error:
        raise UserError(f"{where}: {name} is no JSON ({error})") from None


def _dump(value: dict) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
