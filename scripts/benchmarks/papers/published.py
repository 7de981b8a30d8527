"""The papers' numbers, from published.toml, which explains each."""

import tomllib
from pathlib import Path
from typing import Any

_DATA: dict[str, Any] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
_STRIPED, _RING, _DISTFLASH = _DATA["striped"], _DATA["ring"], _DATA["distflash"]


def _by_size(entries: list[list[Any]]) -> dict[tuple[int, int], tuple[float, float]]:
    """Returns (nodes, thousand tokens) -> (seconds of the other system, of DistFlashAttn)."""
    return {(nodes, length): (theirs, ours) for nodes, length, theirs, ours in entries}


def _numbered(entries: dict[str, float]) -> dict[int, float]:
    return {int(number): value for number, value in entries.items()}


# (table, device, model, tensor shards, sequence shards): [(tokens, bound, measured), ...].
STRIPED_ATTENTION = {
    (entry["table"], entry["device"], entry["model"], *entry["mesh"]): entry["points"]
    for entry in _STRIPED["speedups"]
}
STRIPED_TABLE_2 = _STRIPED["table_2"]
STRIPED_TILES = {device: tuple(tile) for device, tile in _STRIPED["tiles"].items()}
STRIPED_VOCABULARY = _STRIPED["vocabulary"]
RING_TABLE_1, RING_TABLE_2 = _RING["table_1"], _RING["table_2"]
RING_FIGURE_5_HIDDEN = _RING["figure_5_hidden"]
RING_FIGURE_5_RATIO, RING_FIGURE_5_MILLION = _RING["figure_5_ratio"], _RING["figure_5_million"]
RING_ATTENTION_COLUMNS = tuple(_RING["columns"])
RING_ATTENTION_CONTEXTS = _RING["contexts"]
DISTFLASH_TABLE_1 = {model: _by_size(table) for model, table in _DISTFLASH["table_1"].items()}
DISTFLASH_TABLE_3 = _by_size(_DISTFLASH["tables"]["table_3"])
DISTFLASH_TABLE_4 = _by_size(_DISTFLASH["tables"]["table_4"])
DISTFLASH_TABLE_4_33H = _DISTFLASH["table_4_33h"]
DISTFLASH_TABLE_5 = _numbered(_DISTFLASH["table_5"])
DISTFLASH_FIGURE_5 = _DISTFLASH["figure_5"]
DISTFLASH_OVERHEAD = {name: _numbered(table) for name, table in _DISTFLASH["overhead"].items()}
DISTFLASH_OVERLAP_SPEEDUP = _DISTFLASH["overlap_speedup"]
DISTFLASH_FIGURE_4_SECONDS = _DISTFLASH["figure_4_seconds"]
DISTFLASH_VOLUME = _DISTFLASH["volume"]
ATTENTION2D_MODELS = _DATA["attention2d"]["models"]
ATTENTION2D_SPEEDUP = _DATA["attention2d"]["speedup"]
NOT_NUMBERS = _DATA["not_numbers"]
