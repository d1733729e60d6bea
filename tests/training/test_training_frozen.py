"""Weights that are not trained: no gradient, no state, no part in the norm, no decay; the others as torch.optim.AdamW has them."""

from __future__ import annotations

import copy
import fnmatch

import numpy as np
import pytest
import torch
from training_helpers import LOSS, MAX_LENGTH, make_group, oracle_gradient, tiny_module, train_step

from asyncrl.config.schema import LoraConfig, TrainConfig
from asyncrl.data.packing import pack_groups
from asyncrl.distributed.world import World
from asyncrl.errors import ConfigError
from asyncrl.models.parameters.frozen import describe_frozen, frozen_names, mark_unreached, unreached_families
from asyncrl.models.paths import FUSED, PACKED, PLAIN, ModelPath
from asyncrl.models.policy import PolicyModel
from asyncrl.training.sharded import ShardedTrainer
from asyncrl.training.trainer import TorchTrainer

SETTINGS = TrainConfig(lr=0.05, grad_clip=0.1, weight_decay=0.3)
# Part of one product (q of q, k and v), the tied head, vectors, all but one block.
FROZEN = ("*q_proj*", "*embed_tokens*", "*norm*", "*layers.0.*", "*mlp*")


def module_of(frozen: str, kind: str = "llama") -> torch.nn.Module:
    module = tiny_module(kind)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not fnmatch.fnmatch(name, frozen))
    return module


def groups() -> list[tuple[object, np.ndarray]]:
    rng = np.random.default_rng(3)
    return [make_group(rng, number) for number in range(3)]


def steps_of_torch(frozen: str, steps: int, config: TrainConfig = SETTINGS) -> tuple[float, dict[str, torch.Tensor]]:
    """(norm of the first gradient, weights), by transformers and torch alone."""
    module = module_of(frozen).double()
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    kept = [p for p in trained.values() if p.ndim < 2 and not config.decay_norms_and_biases]
    decayed = [p for p in trained.values() if all(p is not each for each in kept)]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": config.weight_decay}, {"params": kept, "weight_decay": 0.0}],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
    )
    norms = []
    for _ in range(steps):
        _, gradients = oracle_gradient(module, groups(), LOSS)
        for name, parameter in trained.items():
            parameter.grad = gradients[name]
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained.values(), config.grad_clip or 1e9)))
        optimizer.step()
    return norms[0], {name: p.detach() for name, p in module.named_parameters()}


def run(core: TorchTrainer, steps: int) -> float:
    """Norm of the first gradient."""
    batches = [batch for group in groups() for batch in pack_groups([group], 1000)]
    norms = [train_step(core, batches).grad_norm for _ in range(steps)]
    return norms[0]


@pytest.mark.parametrize("path", [FUSED, PACKED, PLAIN[0]], ids=["fused", "packed", "plain"])
@pytest.mark.parametrize("frozen", FROZEN)
def test_what_the_builder_froze_stays_and_the_rest_moves_as_with_torch(
    frozen: str, path: ModelPath, exact_norms: None
) -> None:
    before = {name: p.detach().double().clone() for name, p in module_of(frozen).named_parameters()}
    policy = PolicyModel(module_of(frozen), "float64", path=path)
    core = TorchTrainer(policy, SETTINGS, max_completion_length=MAX_LENGTH)
    norm, wanted = steps_of_torch(frozen, 3)
    assert run(core, 3) == pytest.approx(norm, rel=1e-9)
    found, held = dict(policy.flat.named_masters()), core.optimizer.state_dict()
    gradients = dict(policy.flat.named_grads())
    for name, value in found.items():
        if fnmatch.fnmatch(name, frozen):
            assert torch.equal(value, before[name]) and name not in held and not gradients[name].any(), name
        else:
            torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-6)
            assert name in held and not torch.equal(value, before[name])


@pytest.mark.parametrize("keep", [False, True])
def test_sharded_as_well(keep: bool) -> None:
    with World().open(torch.device("cpu"), single_rank_group=True) as world:
        policy = PolicyModel(tiny_module(), "float64", served=True)
        module = module_of(FROZEN[0])
        core = ShardedTrainer(policy, module, SETTINGS, world, max_completion_length=MAX_LENGTH, keep=keep)
        norm, wanted = steps_of_torch(FROZEN[0], 3)
        assert run(core, 3) == pytest.approx(norm, rel=1e-5)
        assert not any("q_proj" in name for name in core.optimizer.state_dict())
        for name, value in policy.flat.named_masters():
            torch.testing.assert_close(value, wanted[name], rtol=1e-3, atol=1e-4)
        world.before_leaving(core.sharded.parameters.release)


def test_frozen_bfloat16_weights_keep_their_bits_and_a_resume_goes_on(tmp_path: object) -> None:
    module = module_of("*q_proj*")
    before = {name: p.detach().bfloat16().clone() for name, p in module.named_parameters()}
    core = TorchTrainer(PolicyModel(module, "bfloat16"), SETTINGS, max_completion_length=MAX_LENGTH)
    run(core, 2)
    state = core.policy.host_state()
    assert all(torch.equal(state[name], before[name]) for name in before if "q_proj" in name)
    again = TorchTrainer(PolicyModel(module_of("*q_proj*"), "bfloat16"), SETTINGS, max_completion_length=MAX_LENGTH)
    again.load_state_dict(copy.deepcopy(core.state_dict()))
    run(core, 1), run(again, 1)
    assert torch.equal(core.policy.flat.master, again.policy.flat.master)


def test_buffers_that_begin_at_one_address_are_saved_as_they_are() -> None:
    module = module_of("*q_proj*")
    module.register_buffer("whole", torch.arange(4.0))
    module.register_buffer("part", module.whole[:2])
    state = PolicyModel(module, "float32").host_state()
    assert (state["whole"].tolist(), state["part"].tolist()) == ([0.0, 1.0, 2.0, 3.0], [0.0, 1.0])


@pytest.mark.parametrize("both", [False, True])
def test_norms_and_biases_are_decayed_where_the_setting_says_so(both: bool, exact_norms: None) -> None:
    config = SETTINGS.model_copy(update={"decay_norms_and_biases": both})
    assert TrainConfig().decay_norms_and_biases is False
    core = TorchTrainer(PolicyModel(tiny_module(), "float64"), config, max_completion_length=MAX_LENGTH)
    run(core, 2)
    _, wanted = steps_of_torch("nothing", 2, config)
    for name, value in core.policy.flat.named_masters():
        torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-6)


def test_what_no_text_reaches_is_told_by_families_of_layers_and_experts() -> None:
    one = torch.ones(1)
    gradients = {
        "m.layers.0.q": one,
        "m.layers.1.experts.3.w": one,
        "m.layers.1.experts.4.w": None,
        "vision.blocks.0.w": None,
    }
    assert unreached_families(gradients) == {"vision.blocks.*.w"}
    module = tiny_module()
    mark_unreached(module, {"model.layers.*.mlp.up_proj.weight"})
    assert frozen_names(copy.deepcopy(module)) == {f"model.layers.{n}.mlp.up_proj.weight" for n in (0, 1)}
    [line] = describe_frozen(module, frozen_names(module))
    size = 2 * module.model.layers[0].mlp.up_proj.weight.numel()  # type: ignore[union-attr]  # of a Llama
    assert f"2 parameters ({size / module.num_parameters():.1%} of the weights) are not trained: no text" in line


def test_all_frozen_is_refused_but_for_adapters() -> None:
    with pytest.raises(ConfigError, match=r"every weight of the model is frozen .* set model\.lora\.rank"):
        PolicyModel(module_of("*"), "float32")
    assert PolicyModel(module_of("*"), "float32", lora=LoraConfig(rank=2)).flat.names
