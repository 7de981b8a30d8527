"""The engine for a .model file: the library sentencepiece."""

from data.added_tokens import lacking, tokens_of_older_file, tokens_with_ids, tokens_without_ids
from data.errors import UserError
from data.tokenizer_engine import ControlToken, Engine, Spans, check_no_forbidden


class Sentencepiece(Engine):
    """The sentencepiece library with a .model file, and added tokens of Hugging Face files."""

    def __init__(self, files: dict[str, bytes]):
        import sentencepiece
        from sentencepiece import sentencepiece_model_pb2

        self._proto = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
        self._proto.ParseFromString(files["tokenizer.model"])
        self._types = sentencepiece_model_pb2.ModelProto.SentencePiece  # type: ignore[attr-defined]
        pieces = self._proto.pieces
        given = [piece.piece for piece in pieces]
        with_ids = _with_added_ids(given, files)
        lacked = [token.content for token in lacking(with_ids, tokens_without_ids(files))]
        self.named_beside = {
            text: (token_id, True) for token_id, text in enumerate(lacked, len(with_ids))
        }
        for text in [*with_ids, *lacked][len(given) :]:
            pieces.add(piece=text, score=0.0, type=self._types.CONTROL)
        self._full = sentencepiece.SentencePieceProcessor(
            model_proto=self._proto.SerializeToString()
        )
        self.vocab_size = self._full.get_piece_size()
        self.controls = {
            piece.piece: ControlToken(piece.piece, token_id)
            for token_id, piece in enumerate(pieces)
            if piece.type == self._types.CONTROL
            or (piece.type == self._types.USER_DEFINED and piece.piece.strip(" \u2581\n\t"))
        }
        ids = {"bos": self._full.bos_id(), "eos": self._full.eos_id(), "pad": self._full.pad_id()}
        texts = {
            f"{name}_token": self._full.id_to_piece(token_id)
            for name, token_id in ids.items()
            if token_id >= 0
        }
        self.special_tokens = {**texts, "unk_token": self._full.id_to_piece(self._full.unk_id())}

    def token_to_id(self, text: str) -> int | None:
        token_id = self._full.piece_to_id(text)
        return token_id if self._full.id_to_piece(token_id) == text else None

    def with_control_tokens(self, tokens: list[str]) -> dict[str, bytes]:
        proto = type(self._proto)()
        proto.CopyFrom(self._proto)
        for token in tokens:
            proto.pieces.add(piece=token, score=0.0, type=self._types.CONTROL)
        return {"tokenizer.model": proto.SerializeToString()}

    def forbid(self, control_ids: set[int]) -> None:
        import sentencepiece

        proto = type(self._proto)()
        proto.CopyFrom(self._proto)
        for token_id, piece in enumerate(proto.pieces):
            if token_id in control_ids and piece.type == self._types.USER_DEFINED:
                piece.type = self._types.UNUSED  # never matched; ids stay the same
            elif token_id not in control_ids and piece.type == self._types.CONTROL:
                # In Tokenizer.text_tokens: matched wherever it is typed.
                piece.type = self._types.USER_DEFINED
        self._encoder = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
        self._forbidden = control_ids - {self._full.unk_id()}

    def encode(self, text: str, beginning: bool) -> Spans:
        # sentencepiece puts a space before every text, as LLaMA's authors encode each turn
        # separately.
        del beginning
        pieces = self._encoder.encode(text, out_type="proto").pieces
        # From the library's offsets in bytes of UTF-8 to offsets in characters.
        characters = {0: 0}
        size = 0
        for count, character in enumerate(text, 1):
            size += len(character.encode())
            characters[size] = count
        ids = [piece.id for piece in pieces]
        check_no_forbidden(ids, self._forbidden)
        offsets = [
            (characters.get(piece.begin, 0), characters.get(piece.end, 0)) for piece in pieces
        ]
        return Spans(ids, offsets)

    def begins_with(self, bos_id: int, flag: bool | None) -> bool:
        return flag is not False  # LlamaTokenizer's default

    def decode(self, ids: list[int]) -> str:
        return self._encoder.decode(ids)


def _with_added_ids(texts: list[str], files: dict[str, bytes]) -> list[str]:
    """Returns the texts of a sentencepiece model's tokens, by id, with those that other files add
    at an id.

    Raises:
      UserError: the ids leave a gap, or one is that of another token.
    """
    texts = [*texts]
    tokens = {**tokens_of_older_file(files), **tokens_with_ids(files)}
    for token_id, token in sorted(tokens.items()):
        if token_id > len(texts):
            raise UserError(
                f"the added token {token.content!r} has id {token_id}, the one before it "
                f"{len(texts) - 1}; ids without a gap, or a tokenizer.json, would work"
            )
        if token_id == len(texts):
            texts.append(token.content)
        elif token.content not in texts:
            raise UserError(
                f"the added token {token.content!r} has id {token_id}, which is that of "
                f"{texts[token_id]!r}; an id after the model's, or a tokenizer.json, would work"
            )
    return texts
