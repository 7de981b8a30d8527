"""The model card (README.md) of an export: its sources, recipe and measurements."""

from __future__ import annotations

import dataclasses
import re
import sys
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from data import hub
from data.errors import first_line
from data.printable import printable
from data.untrusted_files import read_json
from model.config import TransformerConfig
from trainer.config.schema import RunConfig
from trainer.reporting.rows import is_number, read_steps
from trainer.run.results import evaluated, is_of_checkpoint

from .assets import read_recipe
from .hub_models import hub_name

LICENCE = (
    "Not stated. Fill it in: the licences of the base model and the data decide what you may allow."
)


def model_card(
    checkpoint: Path,
    config: TransformerConfig,
    *,
    library: str = "transformers",
    base: str | None = None,
) -> str:
    """Returns an export's card as Markdown, with a YAML header for the Hugging Face hub.

    Its content comes from the checkpoint and its run's folder; the licence is left to the user.

    Args:
      checkpoint: the exported checkpoint's folder, in its run's folder or alone.
      library: what loads the export, `transformers` or `peft`.
      base: the path or name of the model it was trained from; None for the recipe's.
    """
    run = read_recipe(checkpoint / "assets" / "run.yaml", checkpoint)
    name = run.get("name") or checkpoint.name
    base = base or (_path_of(run) if library == "peft" else _first_model(run))
    data = run.get("data") or {}
    # On the hub, names of local folders would look like models there.
    hub_base = hub_name(base) if base else None
    head: dict[str, Any] = {
        "library_name": library,
        "pipeline_tag": "text-generation",
        "tags": ["longstripe", "long-context"],
    }
    if hub_base:
        head["base_model"] = hub_base.partition("@")[0]
    if names := _hub_datasets(data):
        head["datasets"] = names
    sections = [
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---",
        f"# {_text(name)}",
        "Trained with Longstripe: exact attention over sequences split across devices."
        if run
        else "Converted with Longstripe, without training.",
        _facts(checkpoint, config, run, hub_base or base),
    ]
    if library == "peft":
        sections += ["## Use", _use(config, bool(data.get("add_control_tokens")))]
    if rows := _data_rows(data):
        sections += ["## Data", rows]
    if results := _results(checkpoint):
        sections += ["## Results of the run", results]
    sections += ["## Licence", LICENCE]
    if run:
        changed = _without_defaults(run, RunConfig)
        recipe = yaml.safe_dump(_without_folders(changed), sort_keys=False)
        # Longer than any fence within.
        fence = "`" * max(3, *(len(ticks) + 1 for ticks in re.findall("`+", recipe)), 0)
        sections += [
            "## Recipe",
            "Fields that are not listed have their defaults.",
            f"{fence}yaml\n{recipe}{fence}",
        ]
    return "\n\n".join(sections) + "\n"


def _use(config: TransformerConfig, has_new_tokens: bool) -> str:
    """Returns how to load an adapter, and what of it PEFT does not read."""
    resize = (
        f"The run added tokens: the base needs `resize_token_embeddings({config.vocab_size})` "
        "before PEFT loads the adapter. "
    )
    return (
        "`PeftModel.from_pretrained(base, FOLDER)` loads the adapter, and "
        "`AutoTokenizer.from_pretrained(FOLDER)` the tokenizer and the chat template it was "
        f"trained with. {resize if has_new_tokens else ''}`trained_config.json` is the "
        "configuration it was trained with, which PEFT does not read: if the base's RoPE or length "
        "differ from it, set them in the base's."
    )


def base_without_hub_name(checkpoint: Path, base: str | None) -> str | None:
    """Returns the base model's folder, local or in a bucket, which a card cannot name.

    None if the model has a hub name, was trained from scratch, or is not recorded.

    Args:
      base: the path or name of that model; None for the recipe's.
    """
    run = read_recipe(checkpoint / "assets" / "run.yaml", checkpoint)
    base = base or _first_model(run)
    return base if base and not hub_name(base) else None


def _path_of(recipe: Mapping[str, Any]) -> str | None:
    """The path or name of the model from which a run starts; None from scratch."""
    return (recipe.get("model") or {}).get("path")


def _first_model(recipe: Mapping[str, Any]) -> str | None:
    """The path or name of the model from which training began; None from scratch.

    Back from a stage to the first one, and from a run that started from another one's weights.
    """
    path, earlier = _path_of(recipe), set[str]()
    while path and path not in earlier:
        earlier.add(path)
        folder = Path(path.removesuffix("/best"))  # a run, or a checkpoint
        is_run = (folder / "checkpoints").is_dir()
        found = read_recipe(folder / ("config.yaml" if is_run else "assets/run.yaml"), folder)
        if not found:
            return path
        path = _path_of(found)
    return path


def is_trained(checkpoint: Path) -> bool:
    """Whether a run saved this checkpoint, which `scripts.import_hf` may have made too."""
    return bool(read_recipe(checkpoint / "assets" / "run.yaml", checkpoint))


def write_card(checkpoint: Path, config: TransformerConfig, folder: Path, **options: Any) -> None:
    """Writes the card into an exported folder as README.md."""
    (folder / "README.md").write_text(model_card(checkpoint, config, **options), encoding="utf-8")


def _text(value: object) -> str:
    """Returns a value as one line of Markdown that renders as plain text."""
    line = " ".join(printable(str(value)).split())
    return re.sub(r"([\\`*\[\]<>|&])", r"\\\1", line)


def _facts(
    checkpoint: Path, config: TransformerConfig, run: dict[str, Any], base: str | None
) -> str:
    data, attention = run.get("data") or {}, run.get("attention") or {}
    facts = {
        "Base model": _without_folders(base)
        or ("none: trained from scratch" if run else "not recorded"),
        "Family": config.family,
        "Longest context in config.json": f"{config.max_position_embeddings:,} tokens",
    }
    if data.get("context_length"):
        facts["Tokens in a row of training"] = f"{data['context_length']:,}"
    if run:
        facts["Step"] = checkpoint.name
    if attention.get("window"):
        facts["Sliding window in training"] = f"{attention['window']:,} tokens"
    return "\n".join(f"- {name}: {_text(value)}" for name, value in facts.items())


def _data_rows(data: dict[str, Any]) -> str:
    """Returns a table of the sources, with the data report's counts if it still exists."""
    if not (sources := _sources(data)):
        return ""
    counts = _report(data)
    rows = ["| source | format | template | weight | records | kept |", "|---|---|---|---|---|---|"]
    for source in sources:
        report = counts.get(str(source.get("path")), {})
        cells = (
            _without_folders(source.get("path", "")),
            source.get("format") or "sharegpt",
            _without_folders(source.get("template") or data.get("template") or ""),
            source.get("weight", 1.0),
            report.get("records", ""),
            report.get("kept", ""),
        )
        rows.append(f"| {' | '.join(map(_text, cells))} |")
    return "\n".join(rows)


def _sources(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the recipe's sources, or the one of its `data.path`."""
    return data.get("sources") or ([{"path": data["path"]}] if data.get("path") else [])


def _hub_datasets(data: dict[str, Any]) -> list[str]:
    """Returns the names of the sources on the hub, which links a model's page to theirs."""
    paths = [str(source.get("path")) for source in _sources(data)]
    return sorted({name for path in paths if (name := hub.dataset_name(path))})


def _report(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the newest data report about the recipe's sources, by path of a source."""
    sources = [str(source.get("path")) for source in data.get("sources") or ()]
    found = Path(data.get("prepared") or "prepared").glob("*/report.json")
    for path in sorted(filter(Path.is_file, found), key=lambda path: -path.stat().st_mtime):
        try:
            reports = read_json(path, path.parent)
        except (OSError, ValueError):
            continue
        by_path = {
            str(report["path"]): report
            for report in (reports if isinstance(reports, list) else ())
            if isinstance(report, dict) and "path" in report
        }
        if sources and set(sources) <= set(by_path):
            return by_path
    return {}


def _results(checkpoint: Path) -> str:
    """Returns the losses and scores in the run's folder, up to the checkpoint's step."""
    run, lines = checkpoint.parent.parent, []
    if not checkpoint.name.isdigit() or checkpoint.parent.name != "checkpoints":
        return ""
    for path in sorted(run.glob("*.jsonl")):
        rows = [row for row in read_steps(path, run) if row["step"] <= int(checkpoint.name)]
        for key in rows[-1] if rows else {}:
            # A loss that is not finite is null in the log.
            values = [
                (row["step"], row[key]) for row in rows if "loss" in key and is_number(row.get(key))
            ]
            if values:
                (first, loss), (last, last_loss) = values[0], values[-1]
                lines.append(
                    f"- {_text(key)}: {loss:.4g} at step {first}, {last_loss:.4g} at step {last}"
                )
    for path in sorted(run.rglob("results.json")):
        try:
            content = read_json(path, run)
        except (OSError, ValueError):
            continue
        if not isinstance(content, dict):
            continue
        about = content.get("about")
        if isinstance(about, dict) and not is_of_checkpoint(about, checkpoint):
            print(
                f"warning: {path}: evaluates {evaluated(about)}, not {checkpoint}; the card leaves "
                "it out",
                file=sys.stderr,
            )
            continue
        try:
            lines += _result_lines(content)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            print(
                f"warning: {path}: is not an evaluation's results ({type(error).__name__}: "
                f"{first_line(error)}); the card leaves it out",
                file=sys.stderr,
            )
    return "\n".join(lines)


def _result_lines(content: Mapping[str, Any]) -> list[str]:
    """Returns a line per row of an evaluation's results.

    Raises:
      KeyError, TypeError, ValueError, OverflowError: a row lacks a value or has one of the wrong
        kind.
    """
    lines = [
        f"- line retrieval, {_text(row['num_lines'])} lines: {_text(row['right'])} of "
        f"{_text(row['cases'])} right, 95% interval {row['low']:.2f} to {row['high']:.2f}"
        for row in content.get("within_trained_length", ())
    ]
    for row in content.get("results", ()) if "evaluation" in content else ():
        # Tasks of lm-eval have no length; some of its metrics no interval, some groups no number of
        # cases.
        parts = [_text(content["evaluation"]), _text(row["task"])]
        parts += [f"{row['tokens']:,} tokens"] if row["tokens"] else []
        score = f"{row['score']:.3f}"
        if row["low"] is not None:
            score += f", 95% interval {row['low']:.2f} to {row['high']:.2f}"
        if row["cases"]:
            score += f", {_text(row['cases'])} cases"
        lines.append(f"- {', '.join(parts)}: {score}")
    return lines


def _without_defaults(values: Mapping[str, Any], section: type) -> dict[str, Any]:
    """Returns the fields of a recipe or section that differ from their defaults."""
    kept: dict[str, Any] = {}
    fields = {field.name: field for field in dataclasses.fields(section)}
    kinds = typing.get_type_hints(section)
    for name, value in values.items():
        if isinstance(value, Mapping) and dataclasses.is_dataclass(kinds.get(name)):
            if changed := _without_defaults(value, kinds[name]):
                kept[name] = changed
        elif value and isinstance(value, list) and (kind := _dataclass_of_items(kinds.get(name))):
            kept[name] = [_without_defaults(item, kind) for item in value]
        elif name not in fields or value != _plain(_default(fields[name])):
            kept[name] = value
    return kept


def _dataclass_of_items(kind: Any) -> type | None:
    """Returns the dataclass of a sequence's items, or None if they are something else."""
    if typing.get_origin(kind) not in (tuple, list):
        return None
    item = typing.get_args(kind)[0]
    return item if isinstance(item, type) and dataclasses.is_dataclass(item) else None


def _default(field: dataclasses.Field) -> Any:
    return (
        field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    )


def _plain(value: Any) -> Any:
    """A default as in YAML: tuples are lists."""
    return list(value) if isinstance(value, tuple) else value


def _without_folders(value: Any) -> Any:
    """Returns a value with absolute paths cut to their last part, which hides private folders."""
    if isinstance(value, dict):
        return {key: _without_folders(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_without_folders(part) for part in value]
    return Path(value).name if isinstance(value, str) and value.startswith(("/", "~")) else value
