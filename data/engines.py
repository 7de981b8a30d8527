"""The two libraries behind data.tokenizer, alike: a tokenizer.json by tokenizers, a .model by sentencepiece."""

import json
import string
from dataclasses import dataclass
from typing import Protocol

from data.errors import UserError

# Noncharacters: legal in a str, in nobody's text. GUARD keeps the library from treating a run in the middle of a
# conversation as the beginning of a text; the same characters in a user's text are replaced.
GUARD = "\ufdd0\ufdd1\ufdd0"


@dataclass(frozen=True)
class ControlToken:
    """A token that only a template may write. strips: white space left and right that its tokenizer takes with it."""

    text: str
    id: int
    strips: tuple[bool, bool] = (False, False)


class Engine(Protocol):
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
        """The text of `ids`, none of which is a control token's."""


class HuggingFace(Engine):
    """A tokenizer.json."""

    def __init__(self, files: dict[str, bytes]):
        from tokenizers import Tokenizer as Library

        self._spec = json.loads(files["tokenizer.json"])
        self._full = Library.from_str(json.dumps(self._spec))
        self.names = {}
        # Runs of white space and single letters are sometimes kept as added tokens; they are text. Everything else that is
        # added is a token that a person could type and must not get.
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
        self._numbers = {}  # of an added token, id here, where others are left out: id there; the library chooses both
        for token in self._spec.get("added_tokens", []):
            if token["id"] not in control_ids:
                options = {name: token[name] for name in ("single_word", "lstrip", "rstrip", "normalized")}
                self._plain.add_tokens([AddedToken(token["content"], **options)])
                self._numbers[self._plain.token_to_id(token["content"])] = self.find(token["content"])
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
        result = [(self._numbers.get(token, token), start - shift, end - shift) for token, (start, end) in spans]
        _check(result, self._forbidden)
        return result

    def decode(self, ids):
        return self._full.decode(ids, skip_special_tokens=False)


class Sentencepiece(Engine):
    """A sentencepiece model, and the tokens that Hugging Face adds beside it."""

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
        for number, piece in enumerate(proto.pieces):
            if number in control_ids and piece.type == self._user_defined:
                piece.type = self._unused  # matched nowhere any more, ids stay
            elif number not in control_ids and piece.type == self._control:
                piece.type = self._user_defined  # of text_tokens: matched wherever it is typed
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
        return self._plain.decode(ids)


def _added(files: dict[str, bytes]) -> dict[int, str]:
    """The tokens that are added beside a sentencepiece model, by id, as transformers keeps them before and since 2023."""
    older = json.loads(files.get("added_tokens.json", b"{}"))
    newer = json.loads(files.get("tokenizer_config.json", b"{}")).get("added_tokens_decoder") or {}
    return {number: token for token, number in older.items()} | {int(n): token["content"] for n, token in newer.items()}


def _is_text(token: dict) -> bool:
    return not token.get("special") and not set(token["content"]) & set(string.punctuation)


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
