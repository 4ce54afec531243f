"""Copies between host and device: what arrives is what was sent. test_host_waits.py counts them."""

import torch

from workers.model.copies import to_device


def test_tensors_of_all_types_arrive_as_they_were_sent():
    sent = [
        torch.tensor([True, False, True]),
        torch.arange(6).view(2, 3),
        torch.empty(0, 4),
        torch.tensor(2.5, dtype=torch.float64),
        torch.arange(5, dtype=torch.int16)[::2],
        torch.rand(3, 2).T,
    ]
    for tensor, found in zip(sent, to_device(torch.device("cpu"), *sent), strict=True):
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)
