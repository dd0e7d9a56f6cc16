import torch

from elastic.worker.trainer.adamw import AdamW


def test_it_is_torchs_bit_for_bit_and_goes_on_from_its_moments() -> None:
    generator = torch.Generator().manual_seed(0)
    ours = [torch.randn(shape, generator=generator) for shape in ((3, 5), (7,))]
    theirs = [torch.nn.Parameter(tensor.clone()) for tensor in ours]
    settings = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    norm_stays = {"params": theirs[1:], "weight_decay": 0.0}
    optimizer, reference = AdamW(ours, **settings), torch.optim.AdamW([{"params": theirs[:1]}, norm_stays], **settings)
    for update in range(6):
        gradients = [torch.randn(tensor.shape, generator=generator) for tensor in ours]
        if update == 3:
            resumed = AdamW(ours, **settings)
            for mine, former in zip(
                (*resumed.exp_avg, *resumed.exp_avg_sq), (*optimizer.exp_avg, *optimizer.exp_avg_sq), strict=True
            ):
                mine.copy_(former)
            resumed.begin_at(update)
            optimizer = resumed
        optimizer.step(gradients, 1e-2 / (update + 1))
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient
        for part in reference.param_groups:
            part["lr"] = 1e-2 / (update + 1)
        reference.step()
        assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))
