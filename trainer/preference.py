"""The preference objective: of a prompt's two completions, the chosen one should become
likelier."""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float, Float32, Int

from data.batch import Batch, permute
from data.errors import UserError
from data.pairs import PAIR_ARRAYS, PairBatch, PairLoader
from data.paths import local_folder
from data.prepared import Documents
from data.tokenizer import Tokenizer
from model.adapter import AdapterConfig
from model.attention.names import BATCH_AXES
from model.config import TransformerConfig
from model.language_model import LanguageModel
from model.loss import LossSums, SourceSums

from .build import build_language_model, shares_prompts
from .config.preference import PreferenceConfig
from .config.schema import ModelConfig, RunConfig
from .mesh import LocalPart, is_abstract
from .model_source import choose_model, for_templates, named
from .objective import DeviceBatch, HostBatch, Loss, LossParams, Totals
from .preference_loss import Pairs, labelled_losses, mismatched_kl, pair_losses
from .reference import LogLikelihoods, reference_log_likelihoods
from .source_kinds import ModelSource
from .streaming import in_host_memory
from .text import TextObjective, text_batch

T = TypeVar("T")
KL_TOTALS = "kl_totals"
"""The whole batch's `_kl_totals` in a part of a batch."""


def preference_batch(
    rows: int, length: int, mesh: Mesh, max_pairs: int, config: PreferenceConfig, shares: bool
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes, dtypes and shardings of a `data.pairs.PairBatch`.

    Args:
      max_pairs: P, the most pairs in a row.
      shares: whether prompts are shared.
    """
    sharding = NamedSharding(mesh, PartitionSpec(BATCH_AXES))

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, *shape), jnp.float32, sharding=sharding)

    references = {"references": array(max_pairs, 2)} if config.needs_reference else {}
    labels = (
        {"labels": array(max_pairs), "label_shares": array(max_pairs, 2)} if config.labelled else {}
    )
    text = text_batch(rows, length, mesh)
    return {
        **text,
        **({"shared": text["segment_ids"]} if shares else {}),
        "pairs": array(max_pairs),
        "chosen_shares": array(max_pairs),
        **references,
        **labels,
    }


def preference_loss(
    model: LanguageModel, config: PreferenceConfig, params: LossParams, batch: DeviceBatch
) -> LossSums:
    """Returns the sums of losses over a batch's pairs, and of rewards and log-likelihoods under
    TRL's names.

    Args:
      batch: see `preference_batch`; a part of a batch of labelled completions has the whole one's
        KL_TOTALS.
    """
    pairs = _pairs(model, params, batch)
    if config.labelled:
        return _labelled_loss(pairs, config, batch)
    present, log_likelihoods = batch["pairs"], pairs.log_likelihoods
    losses = pair_losses(pairs, config)
    cross_entropy = -jnp.sum(log_likelihoods[..., 0] * batch["chosen_shares"])
    sft_weight = 1.0 if config.loss == "orpo" else config.sft_weight
    chosen, rejected = (jax.lax.stop_gradient(losses.rewards[..., i]) for i in range(2))
    # As in TRL, means over a completion's tokens if the loss has no reference.
    logps = log_likelihoods if config.needs_reference else pairs.means
    each = {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/accuracies": (chosen > rejected).astype(jnp.float32),
        "rewards/margins": chosen - rejected,
        "logps/chosen": jax.lax.stop_gradient(logps[..., 0]),
        "logps/rejected": jax.lax.stop_gradient(logps[..., 1]),
    }
    return _loss_sums(
        jnp.sum(losses.loss * present) + sft_weight * cross_entropy,
        jnp.sum(present),
        {name: jnp.sum(x * present) for name, x in each.items()},
    )


def preference_totals(
    model: LanguageModel, config: PreferenceConfig, params: LossParams, batch: DeviceBatch
) -> dict[str, Any]:
    """Returns a part's contribution to what `preference_loss` needs from a whole batch; see
    `Objective.totals`."""
    if not config.labelled:
        return {}
    return {KL_TOTALS: _kl_totals(_pairs(model, params, batch), batch["pairs"])}


def _pairs(model: LanguageModel, params: LossParams, batch: DeviceBatch) -> Pairs:
    """Returns the log-likelihoods of a batch's pairs."""
    present = batch["pairs"]
    tokens, _ = _split(batch)
    sums = model.document_sums(params, tokens, 2 * present.shape[1])
    log_likelihoods, counts = (x.reshape(*present.shape, 2) for x in sums)
    return Pairs(log_likelihoods, batch.get("references", jnp.zeros_like(counts)), counts)


def _labelled_loss(pairs: Pairs, config: PreferenceConfig, batch: DeviceBatch) -> LossSums:
    """Returns the sums over a batch's labelled completions; see `preference_loss`."""
    present = batch["pairs"]
    kl = mismatched_kl(*batch.get(KL_TOTALS, _kl_totals(pairs, present)))
    losses = labelled_losses(pairs, batch["labels"], kl, config)
    count = jnp.sum(present)

    def mean_sums(x: jax.Array) -> list[jax.Array]:
        """Sums that become the means of desirable and undesirable completions when divided by the
        number of completions."""
        shares = batch["label_shares"]
        return list(jnp.where(shares == 0, 0.0, x[..., None] * shares).sum((0, 1)))

    desirable, undesirable = mean_sums(jax.lax.stop_gradient(losses.rewards[..., 0]))
    logps = mean_sums(jax.lax.stop_gradient(pairs.log_likelihoods[..., 0]))
    measures = {
        "rewards/chosen": desirable,
        "rewards/rejected": undesirable,
        "rewards/margins": desirable - undesirable,
        "logps/chosen": logps[0],
        "logps/rejected": logps[1],
        "kl": kl * count,
    }
    return _loss_sums(jnp.sum(losses.loss * present), count, measures)


def _kl_totals(pairs: Pairs, present: Float[jax.Array, "B P"]) -> tuple[jax.Array, jax.Array]:
    """Returns the arguments of `mismatched_kl` for a batch or a part of one."""
    ratios = (pairs.log_likelihoods - pairs.references)[..., 1]
    return jnp.sum(ratios * present), jnp.sum(present)


def _loss_sums(
    total: jax.Array, weight: jax.Array, measures: dict[str, Float[jax.Array, ""]]
) -> LossSums:
    """Returns sums without sources or auxiliary losses."""
    none = jnp.zeros(0, jnp.float32)
    return LossSums(total, weight, SourceSums(none, none), {}, measures)


class PreferenceObjective(TextObjective):
    """Preference tuning on pairs of completions, each pair in one row; attributes as in
    `TextObjective`.

    The loss is the mean over pairs. The reference is the initial model, that model with its adapter
    disabled (`preference.ref_without_adapter`), or `preference.ref_model`; its log-likelihoods are
    computed before the first step.
    """

    loss_name = "preference_loss"
    weight_name = "pairs"
    loader: PairLoader

    def _open_data(self) -> None:
        if self.model.config.num_experts:
            raise UserError(
                "preference.loss: mixtures of experts are not supported, since their router "
                "losses would be left out; a dense model would work"
            )
        self.sources = ()
        super()._open_data()
        loaders = [x for x in (self.loader, self._held_out_loader) if isinstance(x, PairLoader)]
        # Both splits have as many slots for pairs, since they share a compiled program.
        max_pairs = max(loader.max_pairs for loader in loaders)
        for loader in loaders:
            loader.max_pairs = max_pairs
        # Without devices, as in a dry run, nothing is computed.
        if self.config.preference.needs_reference and not is_abstract(self.mesh):
            # The model is loaded once for both splits, and only if a file lacks something.
            load = functools.cache(self._log_likelihoods)
            for loader in loaders:
                loader.references = self._references(loader.documents, load)

    def _data_warnings(self) -> list[str]:
        warnings = super()._data_warnings()
        if self.config.preference.share_prompts and not self.loader.shares:
            warnings.append(
                "preference.share_prompts: the model has a window, so prompts are computed twice"
            )
        return warnings

    @classmethod
    def abstract_model_and_batch(
        cls, config: RunConfig, shape: TransformerConfig, mesh: Mesh
    ) -> tuple[LanguageModel, dict[str, jax.ShapeDtypeStruct]]:
        """See `Objective`. Each row has one pair: only the data determine how many fit, and a pair
        takes just a few numbers."""
        rows, length = config.train.batch_size, config.data.context_length
        shares = shares_prompts(config, shape)
        batch = preference_batch(rows, length, mesh, 1, config.preference, shares)
        return build_language_model(config, shape, mesh), batch

    @classmethod
    def loss_and_totals(cls, config: RunConfig, model: LanguageModel) -> tuple[Loss, Totals | None]:
        """See `Objective`."""
        return (
            functools.partial(preference_loss, model, config.preference),
            functools.partial(preference_totals, model, config.preference),
        )

    @property
    def inputs(self) -> dict[str, Any]:
        """See `Objective`."""
        if self.config.preference.ref_model is None:
            return super().inputs
        _, source = self._reference
        reference = {"fingerprint": source.fingerprint, **source.config.to_hf()}
        return {**super().inputs, "reference": reference}

    @property
    def pretrained(self) -> dict[str, ModelSource]:
        """See `TextObjective.pretrained`."""
        ref = self.config.preference.ref_model if self.config.preference.needs_reference else None
        return super().pretrained | ({ref: self._reference[1]} if ref else {})

    def _load(self, split: str) -> PairLoader:
        data = self.config.data
        documents = getattr(self.prepared, split)
        return self._pair_loader(documents, data.seed)

    def _pair_loader(self, documents: Documents, seed: int) -> PairLoader:
        rows, length = self.config.train.batch_size, self.config.data.context_length
        return PairLoader(
            documents, length, rows, seed, shares_prompts(self.config, self.source.config)
        )

    def shared_lengths(self, step: int) -> Int[np.ndarray, " documents"]:
        """See `PairLoader.shared_lengths`."""
        return self.loader.shared_lengths(step)

    @functools.cached_property
    def _reference(self) -> tuple[LanguageModel, ModelSource]:
        """The reference, and the source of its parameters.

        Raises:
          UserError, ValueError: there is no model at `preference.ref_model`, or it does not fit
            this run.
        """
        options = self.config.preference
        path, weights = options.ref_model, not is_abstract(self.mesh)
        if options.ref_without_adapter:
            # New adapters add nothing to their base.
            chosen = choose_model(self.config.model, weights=weights)
            source, _ = for_templates(chosen, self.config.data)
            return self.model, source
        if path is None:
            return self.model, self.source
        section = ModelConfig(
            path=path,
            tokenizer=options.ref_tokenizer,
            overrides=options.ref_overrides,
            compute_dtype=self.config.model.compute_dtype,
        )
        config = dataclasses.replace(self.config, model=section, adapter=AdapterConfig())
        with named("preference.ref_model"):
            chosen = choose_model(section, weights=weights, field="preference.ref_model")
            self._check_weights(chosen, "none")
        source, tokenizer = for_templates(chosen, config.data)
        if not _same_ids(tokenizer, self.tokenizer):
            raise UserError(
                f"preference.ref_model: {path} has a tokenizer other than the trained model's, so "
                "its log-likelihoods would be of other texts; a model with the same tokenizer "
                "would work"
            )
        if self.loader.shares and not shares_prompts(config, source.config):
            raise UserError(
                f"preference.ref_model: {path} has a sliding window, and prompts are shared; "
                "preference.share_prompts false would work"
            )
        shape = source.config.with_length(config.data.context_length)
        return build_language_model(config, shape, self.mesh), source

    def _references(
        self, documents: Documents, load: Callable[[], LogLikelihoods]
    ) -> Float32[np.ndarray, "N 2"]:
        """Returns the log-likelihoods of a split's N pairs under the reference."""
        unweighted = copy.copy(documents)
        unweighted.source_weights = np.ones_like(documents.source_weights)
        data, ref = self.config.data, self.config.preference.ref_model
        loader = self._pair_loader(unweighted, seed=0)
        name = f"{documents.folder.name}-{documents.name}-{self._reference_fingerprint()}.f32"
        return reference_log_likelihoods(
            loader,
            lambda step: loader.batch(step, **self._read_part),
            load,
            local_folder(data.prepared) / "references" / name,
            self.config.logging.console and sys.stderr.isatty(),
            f"preference.ref_model: {ref}" if ref else f"model.path: {self.config.model.path}",
        )

    def _log_likelihoods(self) -> LogLikelihoods:
        """Returns a function that computes a batch's document log-likelihoods under the
        reference."""
        model, source = self._reference
        params = source.read(model, self.config.model.seed)
        max_pairs = self.loader.max_pairs
        if self.config.memory.parameters_on_host:
            shardings = {name: in_host_memory(x) for name, x in model.shardings.items()}
            params = {name: jax.device_put(x, shardings[name]) for name, x in params.items()}
        replicated = NamedSharding(self.mesh, PartitionSpec())
        compiled = jax.jit(
            lambda params, batch: model.document_sums(params, batch, 2 * max_pairs)[0],
            out_shardings=replicated,
        )

        def log_likelihoods(batch: PairBatch) -> jax.Array:
            tokens, _ = _split(self.to_device(self._permuted(batch)))
            return compiled(params, tokens)

        return log_likelihoods

    def _reference_fingerprint(self) -> str:
        """Returns a text that changes whenever the reference's log-likelihoods would."""
        config = self.config
        model, source = self._reference
        parts = {
            "rules": 2,  # 2: `document_sums` without rounding errors that grow with the length
            "origin": source.fingerprint,
            "shape": repr(model.config),  # from config.json, which is not part of the weights
            "model": dataclasses.asdict(dataclasses.replace(config.model, path=None)),
            "adapter": dataclasses.asdict(dataclasses.replace(config.adapter, path=None)),
            "window": config.attention.window,
            "global_tokens": config.attention.global_tokens,
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[
            :16
        ]

    def loss(self, params: LossParams, batch: DeviceBatch) -> LossSums:
        """See `preference_loss`."""
        return preference_loss(self.model, self.config.preference, params, batch)

    def totals(self, params: LossParams, batch: DeviceBatch) -> dict[str, Any]:
        """Returns the sums for KTO's reference point, which needs the whole batch; see
        `mismatched_kl`."""
        return preference_totals(self.model, self.config.preference, params, batch)

    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """See `preference_batch`."""
        rows, length = self.config.train.batch_size, self.config.data.context_length
        max_pairs, shares = self.loader.max_pairs, self.loader.shares
        return preference_batch(rows, length, self.mesh, max_pairs, self.config.preference, shares)

    def _permuted(self, batch: Batch) -> HostBatch:
        tokens, pairs = _split(cast(HostBatch, batch))
        return {**cast(HostBatch, permute(cast(Batch, tokens), self.order)), **pairs}

    def to_device(self, batch: HostBatch) -> DeviceBatch:
        """Returns the global arrays from `batch`, this process's part."""
        tokens, pairs = _split(batch)
        return {
            **super().to_device(tokens),
            **{name: _place_rows(x, self.mesh, self.part) for name, x in pairs.items()},
        }


def _same_ids(first: Tokenizer, second: Tokenizer) -> bool:
    """Returns whether each id means the same text in both tokenizers."""
    return first.vocab_size == second.vocab_size and all(
        first.decode([number], skip_special=False) == second.decode([number], skip_special=False)
        for number in range(first.vocab_size)
    )


def _split(batch: Mapping[str, T]) -> tuple[dict[str, T], dict[str, T]]:
    """Returns the arrays of tokens [B, L] and those of pairs [B, P, ...]."""
    others = (*PAIR_ARRAYS, KL_TOTALS)
    return (
        {name: x for name, x in batch.items() if name not in others},
        {name: x for name, x in batch.items() if name in PAIR_ARRAYS},
    )


def _place_rows(x: np.ndarray, mesh: Mesh, part: LocalPart) -> jax.Array:
    """Returns the global array [B, ...] from `x`, this process's rows."""
    sharding = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
    shape = (part.shape[0], *x.shape[1:])

    def rows(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        start, stop, _ = index[0].indices(shape[0])
        return x[np.searchsorted(part.rows, start) : np.searchsorted(part.rows, stop)]

    return jax.make_array_from_callback(shape, sharding, rows)
