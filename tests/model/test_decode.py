"""Greedy decoding on a mesh returns the tokens of transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from model.cache import CachedModel
from model.config import TransformerConfig
from model.decode import Generator, Sampling
from model.language_model import LanguageModel
from trainer.huggingface.read import read_hf

from .build import initial, llama, tiny
from .test_llama import RULES, saved_by_transformers, transformers_logits

PROMPTS = [5, 31, 64]


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"fsdp": 2, "tensor": 2, "sequence": 2},
        pytest.param({"sequence": 8}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_tokens_match_transformers_until_each_prompt_reaches_a_stop(tmp_path, shape):
    truth = saved_by_transformers(tmp_path, tiny(), None).eval()
    config = TransformerConfig.from_hf(tmp_path)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 128, length).tolist() for length in PROMPTS]
    answers = []
    for prompt in prompts:
        with torch.no_grad():
            ids = truth.generate(
                torch.tensor([prompt]),
                max_new_tokens=12,
                do_sample=False,
                eos_token_id=-1,
                pad_token_id=0,
            )
        answers.append(ids[0, len(prompt) :].tolist())
    stops = tuple({answer[step] for answer, step in zip(answers, (3, 6, 8), strict=True)})
    ends = [min(answer.index(stop) for stop in stops if stop in answer) for answer in answers]
    model = llama(config, shape)
    generator = Generator(model, rows=4, capacity=76, new_tokens=12, stop_ids=stops, chunk=32)
    compiled, computed = generator._generate, []

    def generate(*arguments):
        cache, tokens = compiled(*arguments)
        computed.append(np.asarray(tokens))
        return cache, tokens

    vars(generator)["_generate"] = generate
    continuations = generator(read_hf(tmp_path, config, model.shardings), prompts)
    assert (
        continuations == [answer[:end] for answer, end in zip(answers, ends, strict=True)]
        and len(set(ends)) > 1
    )
    # Decoding ends with the last prompt: the fourth row, which has no prompt, does not delay it.
    last, steps = np.argmax(ends), max(ends) + 1
    assert computed[0][last].tolist() == answers[last][:steps] + [0] * (12 - steps) and steps < 12


@pytest.mark.parametrize("rule", ["dynamic", pytest.param("yarn", marks=pytest.mark.slow)])
def test_tokens_match_one_forward_pass_over_the_whole_row(tmp_path, rule):
    """Under `dynamic` RoPE the row's length, prompt and new tokens, is part of the model, and
    cached keys agree with it."""
    truth = saved_by_transformers(tmp_path, tiny(), RULES[rule]).eval()
    config = TransformerConfig.from_hf(tmp_path)
    prompts = [
        np.random.default_rng(length).integers(3, 128, length).tolist() for length in PROMPTS
    ]
    model = llama(config, {"sequence": 2, "tensor": 2})
    answers = Generator(model, rows=4, capacity=76, new_tokens=12, stop_ids=(), chunk=32)(
        read_hf(tmp_path, config, model.shardings), prompts
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        row = np.zeros((1, 64 + 12), np.int64)
        row[0, : len(prompt) + 12] = prompt + answer
        assert (
            transformers_logits(truth, row)[0, len(prompt) - 1 : len(prompt) + 11]
            .argmax(-1)
            .tolist()
            == answer
        )


def test_only_requested_tokens_are_computed(monkeypatch):
    """For 3 new tokens, the prompt's last token gives the first, and the third never runs through
    the layers."""
    computed, embed = [], LanguageModel.local_embed

    def counted_embed(self, params, batch):
        jax.debug.callback(
            lambda index, is_token: computed.extend(index[is_token > 0].tolist()),
            batch["index"],
            batch["segment_ids"],
        )
        return embed(self, params, batch)

    monkeypatch.setattr(LanguageModel, "local_embed", counted_embed)
    model = llama(tiny())
    Generator(model, rows=1, capacity=35, new_tokens=3, stop_ids=())(initial(model), [[5] * 32])
    jax.effects_barrier()
    assert sorted(computed) == list(range(34))


def test_prompts_that_do_not_fit_are_refused():
    generator = Generator(llama(tiny()), rows=1, capacity=68, new_tokens=4, stop_ids=(2,))
    with pytest.raises(ValueError, match="found 65 tokens; needs 1 to 64"):
        generator({}, [[1] * 65])
    with pytest.raises(ValueError, match="found 2, compiled for 1 rows"):
        generator({}, [[1], [1]])


def test_ids_that_the_model_lacks_are_refused():
    """As by transformers; their embeddings would be zero."""
    generator = Generator(llama(tiny()), rows=1, capacity=68, new_tokens=4, stop_ids=(2,))
    message = "prompt: found the id 130, but the model has 128 rows of vocabulary"
    for use in (
        lambda: generator({}, [[1, 130]]),
        lambda: next(generator.stream({}, [1, 130, 2])),
        lambda: generator.score({}, [[1, 130]], [1]),
    ):
        with pytest.raises(ValueError, match=message):
            use()


@pytest.mark.parametrize("capacity", [4, 3])
def test_a_capacity_without_room_for_a_prompt_is_refused(capacity):
    with pytest.raises(
        ValueError, match=f"^capacity: found {capacity}; more than new_tokens = 4 would work"
    ):
        Generator(llama(tiny()), rows=1, capacity=capacity, new_tokens=4, stop_ids=())


@pytest.mark.parametrize("step", ["generate", pytest.param("truncate", marks=pytest.mark.slow)])
def test_an_interrupted_call_leaves_nothing_in_the_cache(step, monkeypatch):
    """The next call prefills the whole prompt again, although the last successful one had the same
    prompt."""

    def interrupted(*arguments):
        raise KeyboardInterrupt

    model, prompts = llama(tiny()), [[5, 9, 77] * 8]
    params = initial(model)
    generator = Generator(model, rows=1, capacity=64, new_tokens=4, stop_ids=(), chunk=16)
    expected = generator(params, prompts)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if step == "truncate":
            patch.setattr(CachedModel, "truncate", interrupted)
        else:
            patch.setitem(vars(generator), "_generate", interrupted)
        generator(params, prompts)
    before = generator.prefilled
    assert generator(params, prompts) == expected
    assert generator.prefilled - before == len(prompts[0]) - 1


@pytest.mark.parametrize(
    "shape",
    [{}, pytest.param({"fsdp": 2, "tensor": 2, "sequence": 2}, marks=pytest.mark.slow)],
    ids=str,
)
def test_streamed_tokens_match_a_call(shape):
    """Up to a stop, and sampled; the cache serves the next prompt, but not after an unfinished
    stream."""
    model, prompt = llama(tiny(), shape), [5, 9, 77] * 8
    params = initial(model)
    options = {
        "rows": shape.get("fsdp", 1),
        "capacity": 64,
        "new_tokens": 6,
        "sampling": Sampling(1.0, seed=3),
        "chunk": 16,
    }
    called, streamed = (Generator(model, stop_ids=(), **options) for _ in range(2))
    (answer,) = called(params, [prompt])
    assert list(streamed.stream(params, prompt)) == answer
    longer = [*prompt, *answer, 11]
    assert list(streamed.stream(params, longer)) == called(params, [longer])[0]
    assert streamed.prefilled == called.prefilled == len(longer) - 2
    stopping = Generator(model, stop_ids=(answer[3],), **options)
    assert list(stopping.stream(params, prompt)) == answer[: answer.index(answer[3])]
    unfinished = streamed.stream(params, prompt)
    assert 0 <= next(unfinished) < 128
    unfinished.close()
    before = streamed.prefilled
    assert (
        len(list(streamed.stream(params, prompt))) == 6
        and streamed.prefilled - before == len(prompt) - 1
    )


def answers_on(axes, config, params_of, prompts, new_tokens=8, **options):
    """Returns the generator on a mesh, and its continuations of the prompts."""
    model = llama(config, axes, **options.pop("model", {}))
    generator = Generator(
        model,
        **{
            "rows": len(prompts),
            "capacity": max(map(len, prompts)) + new_tokens,
            "stop_ids": (),
            "new_tokens": new_tokens,
            **options,
        },
    )
    return generator, generator(params_of(model), prompts)


def check_against_transformers(truth, prompts, answers, within=1e-3):
    """Asserts that each token is transformers' most likely one, except where its two best logits
    are within 1e-3."""
    compared = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        logits = transformers_logits(truth, np.array([prompt + answer]))[0, len(prompt) - 1 : -1]
        second, best = np.sort(logits, -1)[:, -2:].T
        is_decided = best - second > within
        assert (logits.argmax(-1) == answer)[is_decided].all()
        compared += is_decided.sum()
    assert compared > 0.9 * sum(map(len, answers))


@pytest.mark.parametrize(
    ("schedule", "lengths"),
    [
        ("ring", (300, 37, 1)),
        pytest.param("all_gather", (300, 37, 1), marks=pytest.mark.slow),
        pytest.param("balanced", (300, 37, 1), marks=pytest.mark.slow),
        pytest.param({"name": "ulysses"}, (300, 37, 1), marks=pytest.mark.slow),
        pytest.param({"name": "attention2d"}, (300, 37, 1), marks=pytest.mark.slow),
        pytest.param("ring", (8192, *range(7000, 8191, 63)), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_eight_devices_generate_the_tokens_of_one_and_of_transformers(tmp_path, schedule, lengths):
    """Prompts of different lengths in one batch, prefilled in several chunks; 20 of up to 8,192
    tokens in soak."""
    truth = saved_by_transformers(tmp_path, tiny(max_position_embeddings=8300), None).eval()
    config = TransformerConfig.from_hf(tmp_path)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 128, length).tolist() for length in lengths]
    chunk = 64 if max(lengths) < 1000 else 1024

    def params_of(model):
        return read_hf(tmp_path, config, model.shardings)

    eight, answers = answers_on(
        {"sequence": 8}, config, params_of, prompts, chunk=chunk, model={"schedule": schedule}
    )
    _, expected = answers_on({}, config, params_of, prompts, chunk=chunk)
    assert answers == expected and eight.prefilled == sum(lengths) - len(lengths)
    check_against_transformers(truth, prompts, answers)


def test_questions_about_one_context_prefill_it_once(tmp_path):
    config, rng = tiny(), np.random.default_rng(0)
    model = llama(config, {"sequence": 4})
    params = initial(model)
    context = rng.integers(3, 128, 200).tolist()
    questions = [context + rng.integers(3, 128, length).tolist() for length in (9, 1, 30, 9)] + [
        context[:100],
        context,
    ]
    generator = Generator(model, rows=1, capacity=240, new_tokens=6, stop_ids=(), chunk=64)
    answers, costs = [], []
    for question in questions:
        before = generator.prefilled
        answers += generator(params, [question])
        costs.append(generator.prefilled - before)
    # All but the last token, which decoding computes; the shorter prompt discarded the cache from
    # token 100 on.
    assert costs == [208, 0, 29, 8, 0, 99]
    expected = []
    for question in questions:
        generator.free_cache()
        expected += generator(params, [question])
    assert answers == expected and len({tuple(answer) for answer in answers}) > 1


def test_each_device_holds_its_share_of_the_cache():
    """With 2 layers and 2 float32 KV heads of size 8, a token takes 256 bytes, and 8 for its
    coordinates."""
    sizes = []
    for devices in (1, 2, 4, 8):
        cached = Generator(
            llama(tiny(), {"sequence": devices}), rows=2, capacity=1024, new_tokens=4, stop_ids=()
        ).cached
        sizes.append(cached.bytes_per_device)
        shards = [array.addressable_shards[0].data.nbytes for array in cached.empty()]
        assert sum(shards) == sizes[-1] == 2 * 1024 // devices * (2 * 2 * 2 * 8 * 4 + 8)
    assert sizes == [sizes[0], sizes[0] // 2, sizes[0] // 4, sizes[0] // 8]


@pytest.mark.slow
def test_the_longest_prompt_is_the_one_whose_prefill_fills_memory():
    """Extrapolated from a short capacity; compared with the compiler's figure for a prefill with a
    cache of that size."""
    model = llama(tiny(), {"sequence": 2})

    def prefill_bytes(capacity):
        generator = Generator(
            model, rows=1, capacity=capacity, new_tokens=10, stop_ids=(), chunk=64
        )
        cached = generator.cached
        params = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=model.shardings[name])
            for name, x in model.parameters.items()
        }
        batch = {name: np.zeros((1, 64), np.int32) for name in ("tokens", "index", "segment_ids")}
        memory = cached.lower_prefill(params, cached.shapes, batch).compile().memory_analysis()
        return generator, memory.argument_size_in_bytes + memory.temp_size_in_bytes

    generator, _ = prefill_bytes(2048)
    _, limit = prefill_bytes(20_000)
    assert generator.longest_prompt(limit) == pytest.approx(20_000, rel=0.02)
    assert generator.longest_prompt(1000) == 0


def test_sampling_draws_from_the_distribution():
    logits = np.log(np.array([[0.5, 0.25, 0.15, 0.1]], np.float32)).repeat(4000, 0)

    def shares(**options):
        tokens = Sampling(seed=1, **options).choose(
            jax.numpy.asarray(logits), np.arange(4000), jax.numpy.int32(3)
        )
        return np.bincount(np.asarray(tokens), minlength=4) / 4000

    np.testing.assert_allclose(shares(temperature=1.0), [0.5, 0.25, 0.15, 0.1], atol=0.03)
    squares = np.array([0.25, 0.0625, 0.0225, 0.01])
    np.testing.assert_allclose(shares(temperature=0.5), squares / squares.sum(), atol=0.03)
    np.testing.assert_allclose(shares(temperature=1.0, top_p=0.7), [2 / 3, 1 / 3, 0, 0], atol=0.03)
    assert shares(temperature=1.0, top_p=0.1)[0] == shares()[0] == 1
    for tiny_temperature in (1e-7, 1e-38, 1e-45):  # the logits divided by it are infinite
        choose = Sampling(temperature=tiny_temperature).choose
        chosen = choose(jnp.array([[1.0, 3.0, 2.0]]), np.arange(1), jnp.int32(0))
        assert chosen.tolist() == [1]
    for wrong in ({"temperature": -1}, {"top_p": 0}, {"top_p": 1.5}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Sampling(**wrong)


def test_sampled_tokens_do_not_depend_on_the_mesh():
    config, prompts = tiny(), [[5, 9, 77], [8] * 40]
    sampling = Sampling(temperature=1.0, seed=3)
    params = initial(llama(config))
    _, answers = answers_on({}, config, lambda model: params, prompts, sampling=sampling)
    _, sharded_answers = answers_on(
        {"fsdp": 2, "sequence": 2},
        config,
        lambda model: jax.device_put(params, model.shardings),
        prompts,
        sampling=sampling,
    )
    assert answers == sharded_answers and answers[0] != answers[1]


@pytest.mark.slow
def test_sampled_tokens_do_not_depend_on_the_number_of_rows():
    """Rows without a prompt draw nothing: the prompts of later calls get the same tokens."""
    model, calls, answers = llama(tiny()), ([[5, 9, 77]], [[8] * 5]), []
    params = initial(model)
    for rows in (1, 2):
        generator = Generator(
            model,
            rows=rows,
            capacity=16,
            new_tokens=8,
            stop_ids=(),
            sampling=Sampling(temperature=1.0, seed=3),
        )
        answers.append([generator(params, prompts) for prompts in calls])
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "axes",
    [
        {"sequence": 4},
        pytest.param({"fsdp": 2, "tensor": 2, "sequence": 2}, marks=pytest.mark.slow),
    ],
)
def test_likelihoods_match_transformers(tmp_path, axes):
    """In several chunks, for texts of different lengths; the prefix that a text shares with the
    last one is not recomputed."""
    truth = saved_by_transformers(tmp_path, tiny(), None).eval()
    config = TransformerConfig.from_hf(tmp_path)
    rng = np.random.default_rng(0)
    model = llama(config, axes)
    params = read_hf(tmp_path, config, model.shardings)
    generator = Generator(model, rows=4, capacity=220, new_tokens=4, stop_ids=(), chunk=64)
    texts = [rng.integers(3, 128, length).tolist() for length in (150, 7, 2)]
    likeliest = transformers_logits(truth, np.array([texts[1]]))[0, -1].argmax()
    texts[1].append(int(likeliest))
    for starts in ([3, 4, 1], [149, 7, 1]):
        for text, start, scores in zip(
            texts, starts, generator.score(params, texts, starts), strict=True
        ):
            logits = transformers_logits(truth, np.array([text]))[0]
            expected = torch.log_softmax(torch.tensor(logits), -1).numpy()[
                np.arange(start - 1, len(text) - 1), text[start:]
            ]
            np.testing.assert_allclose(scores.log_likelihoods, expected, atol=1e-4)
            assert scores.is_greedy == (logits[start - 1 : -1].argmax(-1) == text[start:]).tolist()
    assert generator.prefilled == 2 + 3 + 0  # before the first starts; the rest was cached
    assert generator.score(params, texts[1:2], [7])[0].is_greedy == [True]
    with pytest.raises(ValueError, match="start: found 2 in a text of 2 tokens; needs 1 to 1"):
        generator.score(params, [[5, 6]], [2])
    # A last token is predicted and is no input, so a text may have one more than a prompt.
    longest = rng.integers(3, 128, 220 - 4 + 1).tolist()
    logits = torch.tensor(transformers_logits(truth, np.array([longest])))[0, -2]
    (scores,) = generator.score(params, [longest], [len(longest) - 1])
    expected = torch.log_softmax(logits, -1)[longest[-1]].item()
    np.testing.assert_allclose(scores.log_likelihoods, [expected], atol=1e-4)
    with pytest.raises(ValueError, match="text: found 218 tokens; needs 2 to 217"):
        generator.score(params, [[*longest, 3]], [1])


def test_samples_depend_on_seed_draw_and_step():
    """Equal logits over 1,000 tokens: another step, draw or seed gives another token, the same ones
    the same."""
    logits = jnp.zeros((1, 1000))

    def drawn(seed=0, draw=0, step=0):
        return int(Sampling(1.0, seed=seed).choose(logits, jnp.array([draw]), jnp.int32(step))[0])

    assert drawn() == drawn()
    assert len({drawn(), drawn(seed=1), drawn(draw=1), drawn(step=1), drawn(step=2)}) == 5
