"""Runs torchtitan with Burst in the place of its context parallelism, with torchtitan's own arguments:

  torchrun --nproc_per_node=4 examples/pytorch/titan.py ... \\
      --parallelism.context_parallel_degree=4 --parallelism.spmd_backend=partial_dtensor

torchtitan cuts the batches: its load balancer "headtail", the default, is the layout zigzag. The model's inner
attention is ScaledDotProductAttention. torchtitan's other backends do not let a program choose the attention.
"""

import functools
import sys

import burst


def attend(q, k, v, *, group, attention_masks=None, scale=None, enable_gqa=False, is_causal=True, **_):
    """Takes what ScaledDotProductAttention.forward takes: q, k, v [batch, tokens of this rank, heads, head_dim]."""
    if attention_masks is not None:
        raise ValueError("attention_masks: must be None; got a %s; use ScaledDotProductAttention" % type(attention_masks))
    return burst.attention(q, k, v, causal=is_causal, softmax_scale=scale, group=group, layout="zigzag")


def use(attention_modules, cp_mesh):
    """Makes the modules attend over the ranks of the mesh, as torchtitan's apply_cp_to_forward does."""
    for module in attention_modules:
        module.forward = functools.partial(attend, group=cp_mesh.get_group())


def install():
    """Replaces apply_cp_to_forward for the models that torchtitan imports later."""
    from torchtitan.distributed import context_parallel
    context_parallel.apply_cp_to_forward = use


if __name__ == "__main__":
    if not any("partial_dtensor" in argument for argument in sys.argv):
        raise SystemExit("--parallelism.spmd_backend: must be partial_dtensor, because the others take no other attention")
    install()
    from torchtitan.train import main
    main()
