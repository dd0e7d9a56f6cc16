import torch


def test_a_token_depends_only_on_what_stands_before_it(make_model):
    model = make_model()
    ids = torch.randint(0, 32, (1, 12))
    changed = ids.clone()
    changed[0, 7] = (ids[0, 7] + 1) % 32
    before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_padding_changes_nothing(make_model):
    model = make_model()
    lengths = torch.tensor([3, 11, 1, 7])
    ids = torch.randint(0, 32, (4, 11))
    padded = model(ids, lengths)
    for row, length in enumerate(lengths.tolist()):
        torch.testing.assert_close(padded[row, :length], model(ids[row : row + 1, :length])[0], atol=1e-5, rtol=1e-5)
        assert not padded[row, length:].any()


def test_gradients_are_those_of_the_unpadded_sequences(make_model):
    model = make_model()
    lengths = torch.tensor([4, 9])
    ids = torch.randint(0, 32, (2, 9))
    model(ids, lengths).logsumexp(-1)[torch.arange(9) < lengths[:, None]].sum().backward()
    padded = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for row, length in enumerate(lengths.tolist()):
        model(ids[row : row + 1, :length]).logsumexp(-1).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().sum() > 0, name
        torch.testing.assert_close(padded[name], parameter.grad, atol=1e-3, rtol=1e-3)


def test_trains_under_bfloat16_autocast(make_model):
    model = make_model()
    ids = torch.randint(0, 32, (2, 9))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(ids, torch.tensor([4, 9])).float().square().mean()
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
