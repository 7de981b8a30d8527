"""Decoding: prompts are prefilled in chunks through the model's attention schedule, then tokens are
generated one per step.

Prompt and generated tokens are kept in one cache, split over the sequence axis (`model.cache`). The
common prefix of a row's successive prompts stays in the cache, so many questions about one context
cost one prefill.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from .attention.layout import inverse, permutation
from .attention.names import BATCH_AXES
from .cache import ROWS, SPECS, Cache, CachedModel
from .language_model import TOKENS, LanguageModel
from .weight_gathering import Shards

# Chunks at a prompt's end are halved, but never below this many tokens per rank.
SMALLEST_CHUNK = 16


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
      temperature: divides the logits; 0 takes the most likely token.
      top_p: tokens are drawn from the fewest likeliest ones whose probabilities reach this sum
        (nucleus sampling, Holtzman et al. 2020).
      seed: equal seeds, prompts and draws (see `Generator`) give equal tokens, on any mesh.

    Raises:
      ValueError: a negative temperature, or a top_p that is not in (0, 1].
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature: found {self.temperature}; needs 0 (the most likely token) or more"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: found {self.top_p}; needs more than 0 and at most 1")

    def choose(
        self, logits: Float[Array, "B V"], draws: Int[Array, " B"], step: Int[Array, ""]
    ) -> Int[Array, " B"]:
        """Returns the next token of each row.

        Args:
          draws: numbers that distinguish all prompts answered with this seed.
        """
        # Below this, only ties differ from the likeliest token, and the division would overflow.
        if self.temperature < 1e-6:
            return jnp.argmax(logits, -1).astype(jnp.int32)
        logits = logits / self.temperature
        if self.top_p < 1:
            ordered = jnp.sort(logits, -1, descending=True)
            probabilities = jax.nn.softmax(ordered, -1)
            is_kept = jnp.cumsum(probabilities, -1) - probabilities < self.top_p
            logits = jnp.where(
                logits >= jnp.min(jnp.where(is_kept, ordered, jnp.inf), -1, keepdims=True),
                logits,
                -jnp.inf,
            )
        fold = jax.random.fold_in
        keys = jax.vmap(lambda draw: fold(fold(jax.random.key(self.seed), draw), step))(draws)
        return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


class Scores(NamedTuple):
    """How likely the tokens of a text are.

    Attributes:
      log_likelihoods: of each token given those before it, in nats.
      is_greedy: whether it is the likeliest one.
    """

    log_likelihoods: list[float]
    is_greedy: list[bool]


class Generator:
    """Continues prompts; compiled for `rows` at a time, of at most `capacity` tokens with their
    continuations.

    Attributes:
      model: computes on its mesh; `rows` is a multiple of data x fsdp.
      new_tokens: most tokens of a continuation.
      stop_ids: ids that end it.
      chunk: tokens that a prefill step computes at once, over all devices of the sequence axis.
      prefilled: prompt tokens computed so far, not counting those already cached.
      answered: prompts continued so far.

    Raises:
      ValueError: the capacity leaves no room for a prompt.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        rows: int,
        capacity: int,
        new_tokens: int,
        stop_ids: Sequence[int],
        chunk: int = 4096,
        sampling: Sampling = Sampling(),
    ) -> None:
        if capacity <= new_tokens:
            raise ValueError(
                f"capacity: found {capacity}; more than new_tokens = {new_tokens} would work, "
                "since a prompt has at least 1 token"
            )
        self.model, self.rows, self.capacity, self.new_tokens = model, rows, capacity, new_tokens
        self.stop_ids, self.sampling = tuple(stop_ids), sampling
        self.cached = CachedModel(model, type(model).local_logits, rows, capacity)
        self.chunk = -(-chunk // self.cached.ranks) * self.cached.ranks
        self.prefilled = self.answered = 0
        self.free_cache()

    def free_cache(self) -> None:
        """Frees the cache; call it before passing parameters other than the last call's."""
        self._cache: Cache | None = None
        # The tokens in the cache.
        self._tokens: list[list[int]] = [[] for _ in range(self.rows)]

    def __call__(
        self, params: Shards, prompts: list[list[int]], draws: Sequence[int] | None = None
    ) -> list[list[int]]:
        """Returns the continuations of prompts (token ids, at most `rows` of them), without the
        stop id.

        Only the part of a prompt that differs from the last one in its row is computed.

        Args:
          draws: a number from 0 to 2^31 - 1 per prompt: prompts with different numbers are sampled
            independently, and the same prompt and number give the same tokens. By default they
            count from 0 over all calls.

        Raises:
          ValueError: see `check`; or another number of draws.
        """
        self.check(prompts)
        count = len(prompts)
        draws = range(self.answered, self.answered + count) if draws is None else draws
        if len(draws) != count:
            raise ValueError(f"draws: found {len(draws)} for {count} prompts; needs one for each")
        prompts = [*prompts, *([] for _ in range(self.rows - count))]
        cache = self._prefill(params, prompts)
        self._cache, generated = self._generate(
            params, cache, *self._decoding_inputs(prompts, draws)
        )
        self.answered += count
        self._tokens = prompts
        answers = np.asarray(generated).tolist()
        return [
            self._until_stop(answer)
            for answer, prompt in zip(answers, prompts, strict=True)
            if prompt
        ]

    def stream(self, params: Shards, prompt: list[int]) -> Iterator[int]:
        """Yields the tokens that a call with only this prompt would return, each once computed.

        Raises:
          ValueError: see `check`.
        """
        self.check([prompt])
        prompts = [prompt, *([] for _ in range(self.rows - 1))]
        cache = self._prefill(params, prompts)
        token, lengths, draws = self._decoding_inputs(prompts, [self.answered])
        for step in range(self.new_tokens):
            cache, token = self._step(params, cache, token, lengths, draws, np.int32(step))
            if (generated := int(np.asarray(token)[0, 0])) in self.stop_ids:
                break
            yield generated
        self.answered += 1
        self._cache, self._tokens = cache, prompts

    def score(self, params: Shards, texts: list[list[int]], starts: list[int]) -> list[Scores]:
        """Returns how likely the tokens of each text (at most `rows` of them) are from its start
        on, given all before them.

        Of these earlier tokens only those that differ from the last text in the row are computed.

        Args:
          starts: at least 1 and less than the text's length.

        Raises:
          ValueError: too many texts, one that is too short or too long or has an id that the model
            lacks, or a start outside its text.
        """
        self.check([[0] for _ in texts])
        longest = self.capacity - self.new_tokens + 1  # nothing is predicted after a last token
        for text, start in zip(texts, starts, strict=True):
            if not 2 <= len(text) <= longest:
                raise ValueError(f"text: found {len(text)} tokens; needs 2 to {longest}")
            if not 1 <= start < len(text):
                raise ValueError(
                    f"start: found {start} in a text of {len(text)} tokens; needs 1 to "
                    f"{len(text) - 1}"
                )
            self._check_ids(text)
        empty: list[list[int]] = [[] for _ in range(self.rows - len(texts))]
        texts, before = [*texts, *empty], np.array([*starts, *(1 for _ in empty)]) - 1
        cache = self._prefill(
            params, [text[: start + 1] for text, start in zip(texts, before, strict=True)]
        )
        done, ends = before, np.maximum([len(text) - 1 for text in texts], 0)
        likely = [Scores([], []) for _ in texts]
        while (done < ends).any():
            batch, following = self._next_chunk(texts, done, ends)
            cache, logs, greedy = self._score(params, cache, self._with_targets(batch, texts))
            is_new = batch["segment_ids"] > 0
            for row, scores in enumerate(likely):
                scores.log_likelihoods.extend(logs[row, is_new[row]].tolist())
                scores.is_greedy.extend(greedy[row, is_new[row]].tolist())
            done = following
        self._cache, self._tokens = cache, [text[:-1] for text in texts]
        return likely[: len(starts)]

    def _with_targets(self, batch: dict, texts: list[list[int]]) -> dict:
        """Returns the batch with `targets`, the token after each one."""
        targets = np.zeros_like(batch["tokens"])
        for row, text in enumerate(texts):
            is_new = batch["segment_ids"][row] > 0
            targets[row, is_new] = [text[index + 1] for index in batch["index"][row, is_new]]
        return {**batch, "targets": targets}

    @functools.cached_property
    def _score(self) -> Callable:
        """From a batch in natural order, computes the cache, each target's log-likelihood, and
        whether it is the likeliest token."""

        def local(params, cache, batch):
            cache, x = self.cached.local_run(params, cache, batch)
            logits = self.model.local_logits(params, x)
            chosen = jnp.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
            scores = chosen - jax.nn.logsumexp(logits, -1), chosen >= logits.max(-1)
            # So that every process has all rows.
            return cache, *(
                lax.all_gather(
                    lax.all_gather(x, "sequence", axis=1, tiled=True), BATCH_AXES, tiled=True
                )
                for x in scores
            )

        compiled = self.cached.compiled(local, (TOKENS,), (SPECS, PartitionSpec(), PartitionSpec()))

        def score(params, cache, batch):
            order = permutation(batch["index"].shape[1], self.cached.ranks, "striped")
            cache, *scores = compiled(
                params, cache, {name: array[:, order] for name, array in batch.items()}
            )
            return cache, *(np.asarray(x)[:, inverse(order)] for x in scores)

        return score

    def check(self, prompts: list[list[int]]) -> None:
        """Raises ValueError if there are too many prompts, or one is empty, too long, or has an id
        that the model lacks."""
        if len(prompts) > self.rows:
            raise ValueError(f"prompts: found {len(prompts)}, compiled for {self.rows} rows")
        longest = self.capacity - self.new_tokens
        for prompt in prompts:
            if not 0 < len(prompt) <= longest:
                raise ValueError(f"prompt: found {len(prompt)} tokens; needs 1 to {longest}")
            self._check_ids(prompt)

    def _check_ids(self, ids: Sequence[int]) -> None:
        rows = self.model.config.vocab_size
        if max(ids) >= rows:
            raise ValueError(
                f"prompt: found the id {max(ids)}, but the model has {rows} rows of vocabulary; a "
                "tokenizer that fits the model would work"
            )

    def _until_stop(self, ids: list[int]) -> list[int]:
        stops = [i for i, token in enumerate(ids) if token in self.stop_ids]
        return ids[: stops[0]] if stops else ids

    # Prefill

    def _prefill(self, params: Shards, prompts: list[list[int]]) -> Cache:
        """Returns a cache with all but each prompt's last token, which the first decoding step
        computes."""
        cache = self.cached.empty() if self._cache is None else self._cache
        done = np.array([_common(*pair) for pair in zip(self._tokens, prompts, strict=True)])
        ends = np.maximum([len(prompt) - 1 for prompt in prompts], 0)
        done = np.minimum(done, ends)
        # The cache's memory is reused: until the call succeeds, nothing counts as cached.
        self.free_cache()
        cache = self.cached.truncate(cache, done.astype(np.int32))
        while (done < ends).any():
            batch, done = self._next_chunk(prompts, done, ends)
            self.prefilled += int(batch["segment_ids"].sum())
            cache = self.cached.prefill(params, cache, batch)
        return cache

    def _next_chunk(
        self, prompts: list[list[int]], done: np.ndarray, ends: np.ndarray
    ) -> tuple[dict, np.ndarray]:
        """Returns each prompt's next tokens as `CachedModel.prefill` takes them, and the prompts'
        progress after them."""
        first = done // self.cached.ranks * self.cached.ranks
        size, missing = self.chunk, int(np.max(np.where(done < ends, ends - first, 0)))
        while size % (2 * self.cached.ranks) == 0 and size // 2 >= max(
            missing, SMALLEST_CHUNK * self.cached.ranks
        ):
            size //= 2
        index = first[:, None] + np.arange(size)
        is_new = (index >= done[:, None]) & (index < ends[:, None])
        tokens = np.zeros((self.rows, size), np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, is_new[row]] = prompt[done[row] : min(first[row] + size, ends[row])]
        batch = {
            "tokens": tokens,
            "index": index.astype(np.int32),
            "segment_ids": is_new.astype(np.int32),
        }
        return batch, np.where(done < ends, np.minimum(first + size, ends), done)

    # Decoding

    def _decoding_inputs(
        self, prompts: list[list[int]], draws: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns each row's last token [rows, 1], its length [rows], 0 for a row without a prompt,
        and its draw [rows]."""
        last = np.array([prompt[-1:] or [0] for prompt in prompts], np.int32)
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        return last, lengths, np.array([*draws, *[0] * (self.rows - len(draws))], np.int32)

    @functools.cached_property
    def _step(self) -> Callable:
        """From each row's last token, computes the cache and the next tokens [rows, 1] for the next
        call."""

        def local(params, cache, token, lengths, draws, step):
            cache, token = self._local_step(params, cache, token, lengths, draws, step, lengths > 0)
            # So that every process has all rows.
            return cache, lax.all_gather(token, BATCH_AXES, tiled=True)

        inputs = (ROWS, ROWS, ROWS, PartitionSpec())
        return self.cached.compiled(local, inputs, (SPECS, PartitionSpec()))

    def _local_step(
        self,
        params: Shards,
        cache: Cache,
        token: Int[Array, "B 1"],
        lengths: Int[Array, " B"],
        draws: Int[Array, " B"],
        step: Int[Array, ""],
        is_active: Bool[Array, " B"],
    ) -> tuple[Cache, Int[Array, "B 1"]]:
        """Runs inside `shard_map`: returns the cache with `token`, and the token after it; `step`
        were generated before."""
        batch = {
            "tokens": token,
            "index": jnp.maximum(lengths - 1, 0)[:, None] + step,
            "segment_ids": is_active.astype(jnp.int32)[:, None],
        }
        cache, logits = self.cached.local_extend(params, cache, batch)
        return cache, self.sampling.choose(logits[:, -1], draws, step)[:, None]

    @functools.cached_property
    def _generate(self) -> Callable:
        return self.cached.compiled(self._local, (ROWS, ROWS, ROWS), (SPECS, PartitionSpec()))

    def _local(
        self,
        params: Shards,
        cache: Cache,
        last: Int[Array, "B 1"],
        lengths: Int[Array, " B"],
        draws: Int[Array, " B"],
    ) -> tuple[Cache, Int[Array, "rows new_tokens"]]:
        """Runs inside `shard_map`: returns the cache, and the new tokens of all rows.

        Args:
          last: each prompt's last token; lengths: its length, 0 for a row without a prompt.
        """

        def unfinished(state):
            step, _, _, _, is_active = state
            # All devices must stop at the same step, since every step has collectives.
            return (step < self.new_tokens) & (lax.psum(is_active.sum(), BATCH_AXES) > 0)

        def generate_one(state):
            step, cache, token, generated, is_active = state
            cache, token = self._local_step(params, cache, token, lengths, draws, step, is_active)
            stops = functools.reduce(
                jnp.logical_or, [token[:, 0] == stop for stop in self.stop_ids], jnp.bool_(False)
            )
            return (
                step + 1,
                cache,
                token,
                lax.dynamic_update_slice_in_dim(generated, token, step, 1),
                is_active & ~stops,
            )

        nothing = jnp.zeros((last.shape[0], self.new_tokens), jnp.int32)
        _, cache, _, generated, _ = lax.while_loop(
            unfinished, generate_one, (jnp.int32(0), cache, last, nothing, lengths > 0)
        )
        # So that every process has all rows.
        return cache, lax.all_gather(generated, BATCH_AXES, tiled=True)

    # Memory

    def longest_prompt(self, limit: int) -> int:
        """Returns how many tokens a prompt may have for parameters, cache and a chunk's prefill to
        fit in `limit` bytes per device. Extrapolates linearly from the compiled memory of two
        prefills, one with half the cache."""
        half = self.capacity // 2
        small, large = (
            self.prefill_bytes(dataclasses.replace(self.cached, capacity=size))
            for size in (half, self.capacity)
        )
        per_token = max(large - small, 1) / (self.capacity - half)
        return max(int(self.capacity + (limit - large) / per_token) - self.new_tokens, 0)

    def prefill_bytes(self, cached: CachedModel) -> int:
        """Returns a prefill's bytes on each device: parameters, cache and the compiler's
        temporaries."""
        params = {
            name: jax.ShapeDtypeStruct(
                parameter.shape, parameter.dtype, sharding=self.model.shardings[name]
            )
            for name, parameter in self.model.parameters.items()
        }
        batch = dict.fromkeys(
            ("tokens", "index", "segment_ids"),
            jax.ShapeDtypeStruct((self.rows, self.chunk), jnp.int32),
        )
        memory = cached.lower_prefill(params, cached.shapes, batch).compile().memory_analysis()
        return memory.argument_size_in_bytes + memory.temp_size_in_bytes


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Returns the length of two prompts' common prefix."""
    shorter = min(len(a), len(b))
    differs = np.flatnonzero(np.asarray(a[:shorter]) != np.asarray(b[:shorter]))
    return int(differs[0]) if len(differs) else shorter
