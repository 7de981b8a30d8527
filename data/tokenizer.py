"""Text to ids and back, for Hugging Face folders and sentencepiece models; text never becomes a control token."""

import hashlib
import json
import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from data.engines import ControlToken, Engine, HuggingFace, Sentencepiece
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
_NONCHARACTERS = re.compile("[\ufdd0\ufdd1]")


class Tokenizer:
    """One tokenizer, the same for training, chat and export. Make it with `Tokenizer.load`.

    bos_id, eos_id, pad_id: int or None; bos_token, eos_token, pad_token: their text or None; vocab_size: 1 + the highest
    id; chat_template: Jinja text or None; controls: every ControlToken, by text; text_tokens: added tokens that are none,
    though they look like one; fingerprint: sha256 of its files, and of text_tokens.
    """

    def __init__(self, files: dict[str, bytes], engine: Engine, where: str, text_tokens: tuple[str, ...] = ()):
        self._files = files
        self._engine = engine
        self.text_tokens = text_tokens
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
        for text in text_tokens:
            if text not in self.controls or text in (self.bos_token, self.eos_token, self.pad_token):
                names = ", ".join(sorted(self.controls.keys() - {self.bos_token, self.eos_token, self.pad_token}))
                raise UserError(f"data.text_tokens: {text!r} is no added token of the tokenizer; {names or 'none'} would work")
            del self.controls[text]
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
        kind = HuggingFace if "tokenizer.json" in files else Sentencepiece
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
        return Tokenizer(files, type(self._engine)(files), "the tokenizer with added control tokens", self.text_tokens)

    def with_text_tokens(self, tokens: Iterable[str]) -> "Tokenizer":
        """A tokenizer whose texts may hold these added tokens, say <think>: typed, each is its token and not its letters."""
        tokens = tuple(sorted(set(tokens)))
        return Tokenizer(self._files, type(self._engine)(self._files), "the tokenizer", tokens) if tokens else self

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

    def typed(self, text: str) -> set[str]:
        """The control tokens that stand in a text, which stay letters there."""
        return set(self._typed_pattern.findall(text))

    @cached_property
    def _typed_pattern(self) -> re.Pattern:
        longest_first = sorted(self.controls, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over the files' names and bytes: equal tokenizers give equal ids."""
        digest = hashlib.sha256()
        for name in sorted(self._files):
            digest.update(f"{name}\0{len(self._files[name])}\0".encode() + self._files[name])
        digest.update("\0".join(self.text_tokens).encode())
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


def _json(files: dict[str, bytes], name: str, where: str) -> dict:
    try:
        return json.loads(files.get(name, b"{}"))
    except ValueError as error:
        raise UserError(f"{where}: {name} is no JSON ({error})") from None


def _dump(value: dict) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
