"""Computes attention on one device and compares it with torch's matrix products:

  python examples/pytorch/one_device.py
"""

import torch

import burst

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

# [batch, tokens, heads, head_dim]: 8 query heads share 2 heads of keys and values.
torch.manual_seed(0)
q, k, v = (torch.randn(1, 512, heads, 64, device=device, dtype=dtype, requires_grad=True) for heads in (8, 2, 2))

out = burst.attention(q, k, v, causal=True)
out.sum().backward()

# The products want heads before tokens, and as many of keys as of queries.
queries, keys, values = (x.detach().float().transpose(1, 2) for x in (q, k, v))
keys, values = (x.repeat_interleave(4, dim=1) for x in (keys, values))
later = torch.ones(512, 512, dtype=torch.bool, device=device).triu(diagonal=1)
scores = (queries @ keys.transpose(2, 3) / 64 ** 0.5).masked_fill(later, float("-inf"))
want = (scores.softmax(dim=-1) @ values).transpose(1, 2)
print("out is off by %.1e from torch's, which is at most %.1f" % ((out.detach() - want).abs().max(), want.abs().max()))

# Masks that torch's kernels do not take: a window, packed documents, any union of slices.
burst.attention(q, k, v, window=128)
burst.attention(q, k, v, documents=[0, 100, 350])
burst.attention(q, k, v, causal=False, slices=burst.masks.tree(200, [100, 212]))
