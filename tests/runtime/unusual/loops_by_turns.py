"""Training loops of several optimizers, or of several kinds of steps: factories for every_mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from tests.runtime.unusual.every_mode import Factory, Step
from tests.runtime.unusual.small_networks import BATCH, WIDTH, adversaries, convolutional, deep, values_of


def gan_of_dcgan() -> Step:
    """The generator's forward runs before the critic's optimizer, and its backward after it."""
    generator, critic = convolutional(4, 3), convolutional(3, 1)
    of_generator, of_critic = adversaries(generator, critic)

    def step(_: int) -> Iterable[torch.Tensor]:
        of_critic.zero_grad()
        real_loss = (critic(torch.randn(4, 3, 8, 8)) - 1).square().mean()
        real_loss.backward()
        fake = generator(torch.randn(4, 4, 8, 8))
        fake_loss = critic(fake.detach()).square().mean()
        fake_loss.backward()
        of_critic.step()
        of_generator.zero_grad()
        loss = (critic(fake) - 1).square().mean()
        loss.backward()
        of_generator.step()
        return [real_loss, fake_loss, loss, *values_of(generator, critic)]

    return step


def gan_with_a_retained_graph() -> Step:
    """Nothing is detached: the critic's backward goes through the generator too, and its graph is used again. The
    critic's loss and everything that it holds live until the next step replaces the loss."""
    generator, critic = deep(), deep(outputs=1)
    of_generator, of_critic = adversaries(generator, critic)
    kept: dict[str, torch.Tensor] = {}

    def step(_: int) -> Iterable[torch.Tensor]:
        of_critic.zero_grad()
        fake = generator(torch.randn(BATCH, WIDTH))
        kept["critic"] = critic(fake).mean() - critic(torch.randn(BATCH, WIDTH)).mean()
        kept["critic"].backward(retain_graph=True)
        of_critic.step()
        of_generator.zero_grad()
        kept["generator"] = -critic(fake).mean()
        kept["generator"].backward()
        of_generator.step()
        return [*kept.values(), *values_of(generator, critic)]

    return step


def gan_with_two_critics() -> Step:
    """Three optimizers. All graphs are made at the beginning of the step."""
    generator, first, second = deep(), deep(outputs=1), deep(outputs=1, depth=2)
    of_generator, of_first, of_second = adversaries(generator, first, second)

    def step(_: int) -> Iterable[torch.Tensor]:
        fake = generator(torch.randn(BATCH, WIDTH))
        losses = []
        for critic, optimizer in ((first, of_first), (second, of_second)):
            optimizer.zero_grad()
            losses.append(critic(fake.detach()).mean() - critic(torch.randn(BATCH, WIDTH)).mean())
            losses[-1].backward()
            optimizer.step()
        of_generator.zero_grad()
        losses.append(-first(fake).mean() - second(fake).square().mean())
        losses[-1].backward()
        of_generator.step()
        return [*losses, *values_of(generator, first, second)]

    return step


def several_critic_steps_on_one_graph() -> Step:
    """The generator's graph lives while the critic's optimizer steps four times."""
    generator, critic = deep(), deep(outputs=1)
    of_generator, of_critic = adversaries(generator, critic)

    def step(_: int) -> Iterable[torch.Tensor]:
        fake = generator(torch.randn(BATCH, WIDTH))
        losses = []
        for _ in range(4):
            of_critic.zero_grad()
            losses.append(critic(fake.detach()).mean() - critic(torch.randn(BATCH, WIDTH)).mean())
            losses[-1].backward()
            of_critic.step()
        of_generator.zero_grad()
        losses.append(-critic(fake).mean())
        losses[-1].backward()
        of_generator.step()
        return [*losses, *values_of(generator, critic)]

    return step


def two_optimizers_with_a_late_backward() -> Step:
    first, second = deep(), deep()
    of_first, of_second = (torch.optim.SGD(module.parameters(), lr=1e-2) for module in (first, second))

    def step(_: int) -> Iterable[torch.Tensor]:
        x = torch.randn(BATCH, WIDTH)
        losses = [first(x).square().mean(), (second(x) - 1).square().mean()]
        losses[0].backward()
        of_first.step()
        losses[1].backward()
        of_second.step()
        of_first.zero_grad()
        of_second.zero_grad()
        return [*losses, *values_of(first, second)]

    return step


def actor_and_critic() -> Step:
    """One trunk with two heads. Both losses use the trunk's graph, one of them after the optimizer of the other
    head."""
    trunk, actor, critic = deep(), deep(), deep(outputs=1)
    of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)
    of_actor = torch.optim.Adam([*trunk.parameters(), *actor.parameters()], lr=1e-3)

    def step(_: int) -> Iterable[torch.Tensor]:
        of_critic.zero_grad()
        of_actor.zero_grad()
        state = trunk(torch.randn(BATCH, WIDTH))
        value = critic(state)
        value_loss = (value - 1).square().mean()
        value_loss.backward(retain_graph=True)
        of_critic.step()
        actor_loss = (actor(state).log_softmax(-1) * value.detach()).mean()
        actor_loss.backward()
        of_actor.step()
        return [value_loss, actor_loss, *values_of(trunk, actor, critic)]

    return step


def encoder_and_decoder_with_an_unused_head() -> Step:
    """Two optimizers after one backward, which does not free the saves of the head. They live until the next step
    replaces their loss."""
    encoder, decoder, head = deep(), deep(), deep()
    of_encoder, of_decoder = adversaries(encoder, decoder)
    kept: dict[str, torch.Tensor] = {}

    def step(_: int) -> Iterable[torch.Tensor]:
        code = encoder(torch.randn(BATCH, WIDTH))
        kept["head"] = head(code.detach())
        loss = decoder(code).square().mean()
        of_encoder.zero_grad()
        of_decoder.zero_grad()
        loss.backward()
        of_encoder.step()
        of_decoder.step()
        return [loss, kept["head"], *values_of(encoder, decoder, head)]

    return step


BY_TURNS: dict[str, Factory] = {
    "as in DCGAN": gan_of_dcgan,
    "with a retained graph": gan_with_a_retained_graph,
    "with two critics": gan_with_two_critics,
    "several critic steps on one graph": several_critic_steps_on_one_graph,
    "with a late backward": two_optimizers_with_a_late_backward,
    "actor and critic": actor_and_critic,
    "encoder and decoder with an unused head": encoder_and_decoder_with_an_unused_head,
}


# Steps of several kinds.


def penalty(critic: nn.Module, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    share = torch.rand(real.shape[0], 1)
    between = (share * real + (1 - share) * fake).requires_grad_()
    (gradient,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return 10 * (gradient.norm(2, dim=1) - 1).square().mean()


def smooth_critic() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)
    )  # fmt: skip


def wgan_gp(critic_steps: int) -> Factory:
    """In each round the critic takes `critic_steps` steps, and the generator one. All steps begin with the generator's
    forward."""

    def factory() -> Step:
        generator, critic = deep(), smooth_critic()
        of_generator, of_critic = adversaries(generator, critic)

        def step(_: int) -> Iterable[torch.Tensor]:
            return list(turns())

        def turns() -> Iterator[torch.Tensor]:
            for _ in range(critic_steps):
                of_critic.zero_grad()
                real, fake = torch.randn(BATCH, WIDTH), generator(torch.randn(BATCH, WIDTH))
                loss = critic(fake.detach()).mean() - critic(real).mean() + penalty(critic, real, fake.detach())
                del fake
                loss.backward()
                of_critic.step()
                yield loss.detach()
            of_generator.zero_grad()
            loss = -critic(generator(torch.randn(BATCH, WIDTH))).mean()
            loss.backward()
            of_generator.step()
            yield loss.detach()
            yield from (one.clone() for one in values_of(generator, critic))

        return step

    return factory


def kinds_in_turn(*losses: Callable[[torch.Tensor], Any], pattern: str) -> Factory:
    """One model, with one loss for each letter of the pattern. The first saves of all steps are alike."""

    def factory() -> Step:
        model = deep()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

        def step(index: int) -> Iterable[torch.Tensor]:
            optimizer.zero_grad()
            chosen = losses[ord(pattern[index % len(pattern)]) - ord("A")]
            loss = chosen(model(torch.randn(BATCH, WIDTH)))
            loss.backward()
            optimizer.step()
            return [loss.detach(), *values_of(model)]

        return step

    return factory
