"""The loss of each source in a mixture against sums by hand over the losses of single tokens, on
several meshes."""

import dataclasses
import functools

import jax
import numpy as np

from data.encode import EncodingRules
from data.loader import Loader
from data.prepare import prepare
from data.sources import Source, Sources
from data.tokenizer import Tokenizer
from tests.errors import within
from tests.model.build import ALL_AT_ONCE, MESHES, llama, packed_batch, permuted, tiny
from trainer.config.data import DataConfig, SourceConfig
from trainer.config.schema import RunConfig, TrainConfig
from trainer.mesh import place_batch
from trainer.step import StepBuilder
from trainer.text import source_names, text_batch

NAMES = ("chats", "books", "never")
ROWS, LENGTH = 8, 32


def mixed_batch() -> dict[str, np.ndarray]:
    """Documents of two of the three sources share rows; one source has far more targets."""
    batch = packed_batch(tiny(), ROWS, LENGTH)
    return {**batch, "source_ids": (batch["segment_ids"] % 3 == 2).astype(np.int32)}


@functools.cache
def by_hand() -> tuple[dict[str, float], float]:
    """Each source's mean over its targets, and the overall mean, in float64 from token losses on
    one device."""
    model, batch = llama(tiny()), mixed_batch()
    losses = np.asarray(jax.jit(model.token_losses)(model.init(0), batch), np.float64)
    parts = [(batch["source_ids"] == number) * batch["loss_weights"] for number in range(2)]
    means = {NAMES[number]: (losses * part).sum() / part.sum() for number, part in enumerate(parts)}
    return means, (losses * batch["loss_weights"]).sum() / batch["loss_weights"].sum()


def test_each_sources_loss_is_the_mean_over_its_own_targets():
    """Over the whole mesh and all parts of the batch; a source without a target gives NaN and does
    not affect the others."""
    model = llama(tiny(), MESHES["fsdp 2 x tensor 2 x sequence 2"], **ALL_AT_ONCE)
    builder = StepBuilder(
        model,
        functools.partial(model.loss, sources=len(NAMES)),
        text_batch(ROWS, LENGTH, model.mesh, with_sources=True),
        train_config=TrainConfig(steps=10, accumulation=2),
    )
    batch, _ = permuted(mixed_batch(), model)
    params, placed = model.init(0), place_batch(batch, model.mesh)
    evaluated = builder.lower_evaluate().compile()(params, placed)
    sums, weights = evaluated.by_source
    _, _, metrics = builder.lower_train().compile()(
        params, {}, builder.init_optimizer(params), placed, np.int32(0)
    )
    means, total = by_hand()
    by_source = dict(zip(NAMES, map(float, metrics.loss_by_source), strict=True))
    assert abs(means["chats"] / means["books"] - 1) > 1e-3, (
        "otherwise one mean could pass for the other"
    )
    for loss in (metrics.loss, evaluated.total / evaluated.weight):
        within(abs(float(loss) / total - 1), 1e-5, "loss")
    for i, (name, mean) in enumerate(means.items()):
        for loss in (by_source[name], sums[i] / weights[i]):
            within(abs(float(loss) / mean - 1), 1e-5, "loss", name)
    assert np.isnan(by_source["never"]) and np.isfinite(metrics.grad_norm)


def test_the_loader_labels_each_token_with_its_source(tmp_path, repository):
    """Each text repeats one letter, so a token identifies its source."""
    for name, text in (("a", "a" * 40), ("b", "b" * 40)):
        (tmp_path / f"{name}.jsonl").write_text(
            "\n".join(f'{{"text": "{text}{i}"}}' for i in range(5))
        )
    tokenizer = Tokenizer.load(repository / "data/fixtures/tiny_tokenizer")
    made = prepare(
        Sources(tuple(Source(str(tmp_path / f"{name}.jsonl"), "text") for name in "ab")),
        tokenizer,
        EncodingRules(64),
        tmp_path / "prepared",
        progress=False,
    )
    rows = len(Loader(made, 64, 1, seed=0))
    batch = Loader(made, 64, rows, seed=0, with_sources=True).batch(0)
    assert batch["source_ids"].dtype == np.int32 and set(np.unique(batch["source_ids"])) == {0, 1}
    for row in range(rows):
        for segment in range(1, batch["segment_ids"][row].max() + 1):
            in_document = batch["segment_ids"][row] == segment
            text = tokenizer.decode(batch["tokens"][row][in_document].tolist())
            assert {"ab"[number] for number in batch["source_ids"][row][in_document]} == set(
                text
            ) & {"a", "b"}
    assert not batch["source_ids"][batch["segment_ids"] == 0].any()
    assert "source_ids" not in Loader(made, 64, 2, seed=0).batch(0)


def test_sources_are_named_after_their_files():
    def names(*paths, held_out=None):
        data = DataConfig(sources=tuple(map(SourceConfig, paths)), held_out_path=held_out)
        return source_names(dataclasses.replace(RunConfig(), data=data))

    assert names("gs://x/chats.jsonl.gz", "books/") == ("chats", "books")
    assert names("a/train.json", "b/train.json", held_out="c/train.json") == (
        "train",
        "train_2",
        "train_3",
    )
    assert names("a/train-*", "a/*.jsonl", "b/train-0000?-of-*") == (
        "train",
        "files",
        "train-0000-of",
    )
    assert names("chats.json", held_out="more.json") == (), (
        "a single source's loss is the overall loss"
    )
