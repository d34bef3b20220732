"""The update: gradient against a float64 reference and TRL, isolation, state, failures, learning."""

import math
from dataclasses import replace

import pytest
import torch
from peft import PeftModel
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from app.errors import InvalidRequest, NonFinite
from app.specs.job import HyperparametersSpec, LoraSpec
from workers.lora import fresh_adapter, read_adapter, write_adapter
from workers.training.grpo import Trajectory, advantages
from workers.training.optimizer import OPTIMIZER_FILE, adamw_step, initial_state, read_optimizer, write_optimizer
from workers.training.packing import pack_group
from workers.training.trainer import PackedGroup, Policy, Trainer, Update, can_stream

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
TEMPERATURE = 0.7
BUDGET = 4096


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("base")
    LlamaForCausalLM(CONFIG).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trainer(base):
    return Trainer(base, torch.float32, threads=1, microbatch_tokens=BUDGET)


@pytest.fixture(scope="module")
def wide_trainer(base):
    return Trainer(base, torch.float64, threads=1, microbatch_tokens=BUDGET)


def make_adapter(seed=0):
    """A fresh adapter with a small random B, so that gradients reach A."""
    weights = fresh_adapter(CONFIG, LoraSpec(), seed)
    generator = torch.Generator().manual_seed(seed + 100)
    for name, tensor in weights.tensors.items():
        if "lora_B" in name:
            tensor.normal_(std=0.05, generator=generator)
    return weights


def make_groups(seed=0):
    """Ragged, multi-turn: a truncated and a dropped episode, a zero-variance group, a lone survivor, an empty group."""
    generator = torch.Generator().manual_seed(seed)

    def ids(n):
        return torch.randint(3, 64, (n,), generator=generator).tolist()

    def episode(prompt, turns, reward, index, truncated=False):
        """`turns` alternate between sampled lengths and lengths of tool results."""
        tokens, mask = list(prompt), [0] * len(prompt)
        for i, length in enumerate(turns):
            tokens += ids(length)
            mask += [1 - i % 2] * length
        noise = (-4.2 + torch.randn(len(mask), generator=generator)).tolist()
        engine = [logprob if m else 0.0 for logprob, m in zip(noise, mask, strict=True)]
        return Trajectory(tokens, mask, engine, reward, index, truncated)

    a, b, c, d = ids(9), ids(5), ids(7), ids(4)
    return [
        [
            episode(a, [4], 1.0, 0),
            episode(a, [7, 3, 2], 0.0, 1),
            episode(a, [11], 0.25, 3, truncated=True),
        ],  # 2 dropped
        [episode(b, [3], 0.5, 0), episode(b, [6], 0.5, 1)],  # zero variance
        [episode(c, [2, 4, 5, 1], -1.0, 0), episode(c, [5], 2.0, 1)],  # ends with a tool result
        [episode(d, [5], 1.0, 2)],  # lone survivor
        [],
    ]


def off_ratio(groups, seed=5):
    """Old logprobs a trajectory, near enough to the policy's that some ratios clip and some do not."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [(-4.2 + 0.4 * torch.randn(len(t.token_ids), generator=generator)).tolist() for t in group] for group in groups
    ]


def reference(base, weights, groups, old, h, temperature):
    """Loss and gradients in float64, written from the formula: one trajectory at a time, full logits, no tricks."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64, attn_implementation="eager")
    masters = {name: t.to(torch.float64).requires_grad_() for name, t in weights.tensors.items()}

    def logprobs(trajectory, adapted):
        handles = []
        for name, module in model.named_modules():
            a, b = (masters.get(f"base_model.model.{name}.lora_{side}.weight") for side in "AB")
            if a is not None and adapted:
                handles.append(
                    module.register_forward_hook(
                        lambda _, x, y, a=a, b=b: y + (x[0] @ a.T @ b.T) * (weights.alpha / weights.rank)
                    )
                )
        logits = model(torch.tensor([trajectory.token_ids])).logits[0] / temperature
        for handle in handles:
            handle.remove()
        targets = torch.tensor(trajectory.token_ids[1:])
        return logits[:-1].log_softmax(-1)[range(len(targets)), targets]

    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for group, group_old in zip(groups, old, strict=True):
        values = advantages([t.reward for t in group], h.advantage_scale)
        for trajectory, value, old_lp in zip(group, values, group_old, strict=True):
            current = logprobs(trajectory, adapted=True)
            base_lp = logprobs(trajectory, adapted=False).detach()
            for t, sampled in enumerate(trajectory.loss_mask):
                if not sampled:
                    continue
                lp = current[t - 1]
                before = lp.detach() if old_lp is None else torch.tensor(old_lp[t], dtype=torch.float64)
                r = torch.exp(lp - before)
                surrogate = torch.min(r * value, torch.clamp(r, 1 - h.clip_low, 1 + h.clip_high) * value)
                w = min(math.exp(float(before) - trajectory.engine_logprobs[t]), h.tis_cap)
                d = base_lp[t - 1] - lp
                total = total - surrogate * w + h.kl_coefficient * r * (torch.exp(d) - d - 1)
                tokens += 1
    loss = total / tokens
    gradients = torch.autograd.grad(loss, list(masters.values()))
    return float(loss.detach()), dict(zip(masters, gradients, strict=True))


def our_gradient(trainer, weights, groups, old, h, temperature, budget=BUDGET):
    """Loss and gradients through the trainer's own path, with old logprobs of the caller's."""
    packed, packed_old = [], []
    for group, group_old in zip(groups, old, strict=True):
        values = advantages([t.reward for t in group], h.advantage_scale)
        packed.append(PackedGroup(pack_group(group, values, budget), any(values)))
        if any(group_old):  # packed as if they were engine logprobs, so in the order of the micro-batches
            as_engine = [replace(t, engine_logprobs=o) for t, o in zip(group, group_old, strict=True)]
            packed_old += [batch.engine_logprobs for batch in pack_group(as_engine, values, budget)]
    policy = Policy(trainer.model, weights, h, temperature)
    update = Update(policy, initial_state(weights.tensors))
    flat = update.gradient(packed, iter(packed_old) if packed_old else None, lambda: None)
    tokens = sum(t.loss_tokens for group in groups for t in group)
    return update.tokens.loss / tokens, policy.layout.unflatten(flat / tokens), update.tokens.means()


H = HyperparametersSpec(clip_low=0.2, clip_high=0.3, kl_coefficient=0.05, tis_cap=2.0)


@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize("ratio", ["on", "off"])
def test_loss_and_gradient_equal_the_float64_reference(base, wide_trainer, scale, ratio):
    h = H.model_copy(update={"advantage_scale": scale})
    groups, weights = make_groups(), make_adapter()
    old = off_ratio(groups) if ratio == "off" else [[None] * len(group) for group in groups]
    loss, gradients, means = our_gradient(wide_trainer, weights, groups, old, h, TEMPERATURE)
    want_loss, want = reference(base, weights, groups, old, h, TEMPERATURE)
    assert loss == pytest.approx(want_loss, rel=1e-6)
    for name, gradient in want.items():
        torch.testing.assert_close(gradients[name].double(), gradient, rtol=1e-5, atol=1e-8)
    assert (0.1 < means["clip_fraction"] < 0.9) if ratio == "off" else means["clip_fraction"] == 0


def test_gradient_in_float32_is_near_the_float64_one(trainer, wide_trainer):
    groups, weights = make_groups(), make_adapter()
    old = off_ratio(groups)
    _, narrow, _ = our_gradient(trainer, weights, groups, old, H, TEMPERATURE)
    _, wide, _ = our_gradient(wide_trainer, weights, groups, old, H, TEMPERATURE)
    for name, gradient in wide.items():
        torch.testing.assert_close(narrow[name], gradient, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("budget", [24, 40])
def test_gradient_does_not_depend_on_how_groups_are_split(wide_trainer, budget):
    groups, weights = make_groups(), make_adapter()
    old = off_ratio(groups)
    _, whole, _ = our_gradient(wide_trainer, weights, groups, old, H, TEMPERATURE)
    _, split, _ = our_gradient(wide_trainer, weights, groups, old, H, TEMPERATURE, budget=budget)
    for name, gradient in whole.items():
        torch.testing.assert_close(split[name], gradient, rtol=1e-5, atol=1e-9)


def test_loss_and_gradient_equal_trls(base, trainer, tmp_path):
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    groups, weights = [group for group in make_groups() if group], make_adapter()
    old = off_ratio(groups)
    loss, gradients, _ = our_gradient(trainer, weights, groups, old, H, TEMPERATURE)

    write_adapter(tmp_path / "adapter", weights, str(base))
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter", is_trainable=True
    )
    words = models.WordLevel({str(i): i for i in range(64)}, unk_token="0")
    args = GRPOConfig(
        output_dir=str(tmp_path / "trl"),
        loss_type="dapo",
        beta=H.kl_coefficient,
        epsilon=H.clip_low,
        epsilon_high=H.clip_high,
        temperature=TEMPERATURE,
        num_generations=2,
        per_device_train_batch_size=2,
        use_cpu=True,
        bf16=False,
        report_to=[],
    )
    peer = GRPOTrainer(
        model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["3", "4"]}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="0", eos_token="2"),
    )
    peer.use_vllm = True  # only so that the importance weights below are used
    peer.model.eval()

    rows = [(t, o, v) for g, o_g in zip(groups, old, strict=True) for t, o, v in _rows(g, o_g)]
    starts = [t.loss_mask.index(1) for t, _, _ in rows]
    left = max(starts)
    right = max(len(t.token_ids) - start for (t, _, _), start in zip(rows, starts, strict=True))

    def pad(values, n, side):
        fill = [0] * (n - len(values))
        return fill + list(values) if side == "left" else list(values) + fill

    def column(pick):
        return torch.tensor([pad(pick(t, o)[s:], right, "right") for (t, o, _), s in zip(rows, starts, strict=True)])

    old_logprobs = column(lambda t, o: o)
    inputs = {
        "prompt_ids": torch.tensor(
            [pad(t.token_ids[:s], left, "left") for (t, _, _), s in zip(rows, starts, strict=True)]
        ),
        "prompt_mask": torch.tensor([pad([1] * s, left, "left") for s in starts]),
        "completion_ids": column(lambda t, o: t.token_ids),
        "completion_mask": column(lambda t, o: [1] * len(t.token_ids)),
        "tool_mask": column(lambda t, o: t.loss_mask),
        "advantages": torch.tensor([value for _, _, value in rows]),
        "old_per_token_logps": old_logprobs,
        "importance_sampling_ratio": (old_logprobs - column(lambda t, o: t.engine_logprobs)).exp().clamp(max=H.tis_cap),
        "num_items_in_batch": torch.tensor(float(sum(t.loss_tokens for t, _, _ in rows))),
    }
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    with torch.no_grad(), peer.model.disable_adapter():
        inputs["ref_per_token_logps"], _, _ = peer._get_per_token_logps_and_entropies(peer.model, ids, attention, right)
    peer_loss = peer._compute_loss(peer.model, inputs)
    peer_loss.backward()
    assert loss == pytest.approx(float(peer_loss.detach()), rel=1e-5)
    for name, parameter in peer.model.named_parameters():
        if ".default." in name:  # the other adapter is TRL's own reference
            ours = gradients[name.replace(".default", "")]
            torch.testing.assert_close(ours, parameter.grad, rtol=1e-3, atol=1e-6)


def _rows(group, group_old):
    return zip(group, group_old, advantages([t.reward for t in group], "std"), strict=True)


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def run_job(trainer, seed, between=lambda: None, rounds=2, folder=None):
    """A job's rounds; with a folder, adapter and state go through their files between rounds."""
    adapter = make_adapter(seed)
    optimizer = initial_state(adapter.tensors)
    h = HyperparametersSpec(learning_rate=1e-2, kl_coefficient=0.01, minibatches=2)
    for i in range(rounds):
        result = trainer.update(adapter, optimizer, make_groups(10 * seed + i), h, TEMPERATURE)
        adapter, optimizer = result.adapter, result.optimizer
        if folder is not None:
            write_adapter(folder, adapter, "base")
            write_optimizer(folder / OPTIMIZER_FILE, optimizer)
            adapter, optimizer = read_adapter(folder), read_optimizer(folder / OPTIMIZER_FILE)
        between()
    return adapter, optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_is_bit_identical_with_another_job_in_between_and_from_files(base, tmp_path, dtype):
    trainer = Trainer(base, dtype, threads=1, microbatch_tokens=BUDGET)
    adapter, optimizer = run_job(trainer, 1)
    beside, beside_optimizer = run_job(trainer, 1, between=lambda: run_job(trainer, 2, rounds=1))
    restored, restored_optimizer = run_job(trainer, 1, folder=tmp_path)
    assert same(adapter.tensors, beside.tensors) and same(adapter.tensors, restored.tensors)
    for state in (beside_optimizer, restored_optimizer):
        assert state.step == optimizer.step
        assert same(state.exp_avg, optimizer.exp_avg) and same(state.exp_avg_sq, optimizer.exp_avg_sq)
    assert not same(adapter.tensors, make_adapter(1).tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kl_coefficient", [0.0, 0.05])
@pytest.mark.parametrize("known", [(0,), (2, 1), (0, 1, 2, 3, 4)])
def test_an_update_is_bit_identical_with_sums_of_groups_computed_before(base, dtype, kl_coefficient, known):
    trainer = Trainer(base, dtype, threads=1, microbatch_tokens=40)
    groups, adapter = make_groups(), make_adapter()
    optimizer = initial_state(adapter.tensors)
    h = HyperparametersSpec(learning_rate=1e-2, kl_coefficient=kl_coefficient)
    whole = trainer.update(adapter, optimizer, groups, h, TEMPERATURE)
    sums = {position: trainer.group_sums(adapter, groups[position], h, TEMPERATURE) for position in known}
    streamed = trainer.update(adapter, optimizer, groups, h, TEMPERATURE, sums=sums)
    assert same(streamed.adapter.tensors, whole.adapter.tensors)
    assert same(streamed.optimizer.exp_avg, whole.optimizer.exp_avg)
    assert same(streamed.optimizer.exp_avg_sq, whole.optimizer.exp_avg_sq)
    assert streamed.metrics | {"seconds": 0} == whole.metrics | {"seconds": 0}


def test_sums_of_groups_are_refused_in_a_round_of_several_steps(trainer):
    groups, adapter = make_groups(), make_adapter()
    h = HyperparametersSpec(minibatches=2)
    sums = {0: trainer.group_sums(adapter, groups[0], h, TEMPERATURE)}
    assert not can_stream(h)
    with pytest.raises(ValueError, match="several steps"):
        trainer.update(adapter, initial_state(adapter.tensors), groups, h, TEMPERATURE, sums=sums)


def test_inputs_are_never_written_to(trainer):
    adapter = make_adapter()
    optimizer = initial_state(adapter.tensors)
    trainer.update(adapter, optimizer, make_groups(), HyperparametersSpec(learning_rate=0.1), 1.0)
    assert same(adapter.tensors, make_adapter().tensors)
    assert not any(t.any() for t in (*optimizer.exp_avg.values(), *optimizer.exp_avg_sq.values()))


def test_optimizer_state_round_trip_gives_the_same_bytes(trainer, tmp_path):
    adapter = make_adapter()
    state = trainer.update(adapter, initial_state(adapter.tensors), make_groups(), HyperparametersSpec(), 1.0).optimizer
    write_optimizer(tmp_path / "a", state)
    write_optimizer(tmp_path / "b", read_optimizer(tmp_path / "a"))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert read_optimizer(tmp_path / "a").step == 1


def test_adamw_equals_torchs():
    h = HyperparametersSpec(learning_rate=0.01, weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(50, generator=generator)
    theirs, ours, m, v = start.clone().requires_grad_(), start.clone(), torch.zeros(50), torch.zeros(50)
    peer = torch.optim.AdamW([theirs], lr=0.01, betas=(h.adam_beta1, h.adam_beta2), eps=h.adam_eps, weight_decay=0.1)
    for step in range(1, 4):
        gradient = torch.randn(50, generator=generator)
        theirs.grad = gradient.clone()
        peer.step()
        adamw_step(ours, gradient, m, v, step, h)
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("which", ["zero variance", "lone survivors", "all dropped", "no groups"])
def test_a_round_without_signal_returns_what_it_was_given(trainer, which):
    groups = {
        "zero variance": make_groups()[1:2],
        "lone survivors": make_groups()[3:4],
        "all dropped": [[], []],
        "no groups": [],
    }
    adapter = make_adapter()
    optimizer = initial_state(adapter.tensors)
    result = trainer.update(adapter, optimizer, groups[which], HyperparametersSpec(kl_coefficient=0.1), 1.0)
    assert not result.signal
    assert result.adapter is adapter and result.optimizer is optimizer
    assert result.metrics["zero_variance_share"] == 1.0


def test_an_update_reports_its_metrics_and_progress(trainer):
    adapter, ticks = make_adapter(), []
    h = HyperparametersSpec(kl_coefficient=0.1, minibatches=2)
    result = trainer.update(
        adapter, initial_state(adapter.tensors), make_groups(), h, 1.0, lambda done, total: ticks.append((done, total))
    )
    assert result.signal and result.optimizer.step == 2
    assert ticks == [(i, len(ticks)) for i in range(1, len(ticks) + 1)]
    assert result.metrics.keys() == {
        *("reward_mean", "reward_std", "response_length", "truncated_share", "zero_variance_share", "loss_tokens"),
        *("total_tokens", "loss", "grad_norm", "entropy", "kl", "clip_fraction", "logprob_gap", "tis_weight_mean"),
        *("learning_rate", "seconds"),
    }
    assert 0 < result.metrics["entropy"] <= math.log(64)


def test_a_trajectory_over_the_budget_is_refused(base):
    small = Trainer(base, torch.float32, threads=1, microbatch_tokens=8)
    adapter = make_adapter()
    with pytest.raises(InvalidRequest, match="at most 8"):
        small.update(adapter, initial_state(adapter.tensors), make_groups(), HyperparametersSpec(), 1.0)


def test_a_loss_that_is_not_finite_is_named(trainer):
    adapter = make_adapter()
    next(iter(adapter.tensors.values()))[0, 0] = math.nan
    with pytest.raises(NonFinite, match="loss"):
        trainer.update(adapter, initial_state(adapter.tensors), make_groups(), HyperparametersSpec(), 1.0)


def test_an_adapter_that_becomes_infinite_is_named(trainer):
    adapter = make_adapter()
    state = initial_state(adapter.tensors)
    name = next(iter(adapter.tensors))
    state.exp_avg[name].fill_(math.inf)
    with pytest.raises(NonFinite, match=name):
        trainer.update(adapter, state, make_groups(), HyperparametersSpec(), 1.0)


def test_a_bandit_learns(tmp_path):
    """One prompt, one token, reward 1 for a low id: a few updates raise the mean reward."""
    torch.manual_seed(0)
    config = LlamaConfig(**CONFIG.to_dict() | {"initializer_range": 0.2})  # a head that can tell tokens apart
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    trainer = Trainer(tmp_path, torch.float32, threads=1, microbatch_tokens=BUDGET)
    adapter = fresh_adapter(config, LoraSpec(), 0)
    optimizer = initial_state(adapter.tensors)
    generator = torch.Generator().manual_seed(0)
    rewards = []
    for _ in range(10):
        logprobs = next_token_logprobs(trainer, adapter)
        sampled = torch.multinomial(logprobs.exp(), 32, replacement=True, generator=generator).tolist()
        group = [one_token(token, float(logprobs[token]), float(token < 16), i) for i, token in enumerate(sampled)]
        result = trainer.update(adapter, optimizer, [group], HyperparametersSpec(learning_rate=2e-2), 1.0)
        adapter, optimizer = result.adapter, result.optimizer
        rewards.append(result.metrics["reward_mean"])
    assert rewards[0] < 0.5 and rewards[-1] > 0.9


def one_token(token, logprob=0.0, reward=0.0, index=0):
    return Trajectory([5, 6, 7, token], [0, 0, 0, 1], [0.0, 0.0, 0.0, logprob], reward, index, False)


def next_token_logprobs(trainer, adapter):
    """The policy's distribution over all 64 tokens after the prompt, from the trainer's own model."""
    (batch,) = pack_group([one_token(token, index=token) for token in range(64)], [0.0] * 64, BUDGET)
    with torch.no_grad():
        return trainer.model.chosen_logprobs(batch, 1.0, trainer.model.fuse(adapter.tensors, adapter.scaling))[0]
