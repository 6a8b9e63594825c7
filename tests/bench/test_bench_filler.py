"""Random weights: of a plausible size, different from each other, and always the same."""

import pytest
import torch

from bench import filler

WIDTH = 512


def filled() -> torch.nn.Module:
    """Return a router, packed experts with their scales, and what surrounds them."""
    model = torch.nn.Module()
    packed = torch.zeros(4, WIDTH, WIDTH // 2, dtype=torch.uint8)
    shapes = {
        "embed_tokens": torch.zeros(64, WIDTH),
        "norm": torch.zeros(WIDTH),
        "router": torch.zeros(32, WIDTH),
        "other_router": torch.zeros(32, WIDTH),
        "router_bias": torch.ones(32),
        "w13_weight": packed,
        "w13_weight_scale": torch.zeros(4, WIDTH, WIDTH // 32, dtype=torch.uint8),
    }
    for name, tensor in shapes.items():
        model.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    filler.fill(model)
    return model


def unpacked(model: torch.nn.Module) -> torch.Tensor:
    """Decode MXFP4: two codes of four bits a byte, and an exponent for 32 of them."""
    codes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = torch.cat([codes, -codes])
    packed = model.w13_weight
    values = torch.stack([codes[(packed & 15).int()], codes[(packed >> 4).int()]], -1).flatten(-2)
    exponents = model.w13_weight_scale.float() - 127
    return values * (2**exponents).repeat_interleave(32, dim=-1)


def test_packed_experts_have_a_plausible_size_and_differ() -> None:
    weights = unpacked(filled())
    assert 0.5 < weights.std() * WIDTH**0.5 < 2
    for other in weights[1:]:
        assert abs(torch.corrcoef(torch.stack([weights[0].flatten(), other.flatten()]))[0, 1]) < 0.1


def test_tokens_spread_over_experts() -> None:
    model = filled()
    assert torch.equal(model.norm, torch.ones(WIDTH))
    assert not model.router_bias.any()
    assert not torch.equal(model.router, model.other_router)
    hidden = torch.nn.functional.rms_norm(model.embed_tokens, (WIDTH,))
    chosen = (hidden @ model.router.T).topk(4).indices
    # 64 tokens by chance: 32 x (1 - (1 - 4/32)^64), all but 0.006 of them
    assert len(chosen.unique()) >= 31
    assert len(chosen.sort().values.unique(dim=0)) > 60


@pytest.mark.parametrize("name", ["router", "w13_weight", "embed_tokens"])
def test_servers_that_are_compared_have_the_same(name: str) -> None:
    assert torch.equal(getattr(filled(), name), getattr(filled(), name))
