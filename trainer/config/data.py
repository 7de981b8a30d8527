"""The section `data` of a recipe, and its sources."""

import dataclasses
import datetime
from typing import Any, Literal

from data.clean import CleanConfig
from data.conversation import DEFAULT_TEMPLATE, TEMPLATE_FILES
from data.tokenizer import TEMPLATE_DATE
from model.attention.names import Tokens

from .require import require, require_at_least

TODAY = "today"
"""The `template_date` that stands for the day on which a run first starts."""


class Today(str):
    """The date that TODAY was in this process; another time zone, or midnight, gives another."""


@dataclasses.dataclass(frozen=True)
class SourceConfig:
    """One file or folder of records."""

    path: str
    """File, folder or pattern such as chats/*.jsonl, local or in a store (gs://, s3://), or a data
    set on the hub, hf://datasets/OWNER/NAME; or generated exercises of all sizes up to the context
    length: synthetic:TASK?count=2000&seed=0, with the tasks lines (&like=FILE for another wording),
    needles, key_values, variables and copying."""
    format: str = "sharegpt"
    """Format of the records: sharegpt (conversations), text (books: plain files, or JSON with
    `text`), tokens (.npy, or JSON with `tokens` and optional `loss_mask`) or preference (`prompt`,
    `chosen` and `rejected`, or `completion` and `label`)."""
    template: str | None = None
    """Chat template of this source; data.template by default."""
    weight: float = 1.0
    """How many times an epoch contains the source."""
    fields: dict[str, str] = dataclasses.field(default_factory=dict)
    """Meanings of the records' field names, such as {question: user, answer: assistant} or {dialog:
    messages, speaker: role}; see docs/data.md."""
    add_bos: bool | None = None
    """Whether each text (format: text) begins with BOS; by default as the tokenizer does."""
    control_tokens: bool = False
    """Whether control tokens written in a text (format: text) are read as such, as in texts that a
    chat template has rendered; by default they are plain text."""


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The training data."""

    path: str | None = None
    """File or folder with the data, or hf://datasets/OWNER/NAME; short for one entry in `sources`.
    On the command line it replaces the recipe's sources, or only the path of a single one."""
    template: str = DEFAULT_TEMPLATE
    """Chat template: tokenizer for the model's own, or vicuna_v1.1, koala, llama-2, llama-3,
    chatml, alpaca, plain. A base model has none, so choose one of the others, or FILE.jinja (or
    .jinja2, .j2), a local file with a template, which replaces the model's."""
    add_control_tokens: bool = False
    """Add control tokens that the templates need and the tokenizer lacks, with new embedding
    rows."""
    text_tokens: tuple[str, ...] = ()
    """Added tokens of the tokenizer that turns may contain as text, such as [<think>, </think>]."""
    template_date: str = TEMPLATE_DATE.date().isoformat()
    """Date, YYYY-MM-DD or `today` (of the run's first start), for chat templates that write one
    (strftime_now); fixed so that the same data gives the same ids. Chats and evaluations of the
    model keep it."""
    chat_template_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Variables for the chat template, such as {enable_thinking: false} for Qwen 3's; a record's
    field of this name overrides them. Chats and evaluations of the model keep them."""
    train_on: Literal["all", "last", "everything"] = "all"
    """Assistant turns in the loss: all, or only each conversation's last; or everything, with the
    other turns and the template's text, TRL's default. A turn's `train: false` excludes it."""
    sources: tuple[SourceConfig, ...] = ()
    """The sources, each {path, format, template, weight, fields, add_bos, control_tokens}, which
    `--help data.sources` describes."""
    context_length: Tokens = 4096
    """Tokens in a packed row, such as 65536 or 64K (K and M are 2^10 and 2^20, in every token
    field); a multiple of mesh.sequence, or of twice that for the layout zigzag."""
    prepared: str = "prepared"
    """Folder of the tokenized data; from one in a store (gs://, s3://), shards are copied to this
    machine as needed."""
    cache_gib: float = 64.0
    """GiB of this machine's disk for shards of a `prepared` in a store; the least recently used
    shards are evicted."""
    held_out_fraction: float = 0.05
    """Share of the documents held out of training for the held-out loss, unless held_out_path is
    given."""
    held_out_path: str | None = None
    """File or folder of held-out records, in the first source's format and template; replaces
    held_out_fraction."""
    clean: CleanConfig = dataclasses.field(default_factory=CleanConfig)
    """How conversations are cleaned before training; `clean: scraped` for scraped web chats. Texts
    and tokens are unchanged, except that near-duplicate texts can be dropped."""
    seed: int = 0
    """Seed of the document order. The choice of held-out documents does not depend on it."""

    def __post_init__(self) -> None:
        require_at_least(self, "data", 1, "context_length")
        require(
            0 <= self.held_out_fraction < 1,
            "data.held_out_fraction",
            self.held_out_fraction,
            "a share from 0 to below 1",
        )
        # The date is recorded; `load` gives a run that continues tomorrow the recorded one.
        object.__setattr__(self, "template_date", _date(self.template_date))
        for index, source in enumerate(self.sources):
            require(
                source.weight > 0,
                f"data.sources[{index}].weight",
                source.weight,
                "a positive number",
            )
            self._check_template(f"data.sources[{index}].template", source.template)

    def _check_template(self, field: str, name: str | None) -> None:
        """Raises ValueError if a source's template is a file, or is replaced by data.template."""
        require(
            not (name or "").endswith(TEMPLATE_FILES),
            field,
            name,
            "a name; a file would work as data.template",
        )
        require(
            name != DEFAULT_TEMPLATE or not self.template.endswith(TEMPLATE_FILES),
            field,
            name,
            f"to be left out, since data.template {self.template} replaces the model's",
        )

    def template_of(self, source: SourceConfig) -> str:
        """The name of a source's template; that of a file is the model's, which it replaces."""
        name = source.template or self.template
        return DEFAULT_TEMPLATE if name.endswith(TEMPLATE_FILES) else name


def _date(text: str) -> str:
    """Returns a date as YYYY-MM-DD; for `today` a Today, which stays one."""
    if isinstance(text, Today):
        return text
    if text == TODAY:
        return Today(datetime.date.today().isoformat())
    try:
        return datetime.date.fromisoformat(text).isoformat()
    except ValueError:
        raise ValueError(
            f"data.template_date: found {text!r}, needs a date as YYYY-MM-DD, or today"
        ) from None
