"""Tests arguments of burst.attention that are refused, and lists that are given as iterators."""

import unittest

import torch

import burst
from harness import main, normal, run_ranks

assert_raises = unittest.TestCase().assertRaisesRegex


class ArgumentsTest(unittest.TestCase):
    def test_second_derivatives_are_refused(self):
        def body(rank, group):
            x = normal("x", 1, 6, 2, 4)
            weight = torch.eye(4, dtype=torch.float64, requires_grad=True)

            def gradient(of_lse):
                y = x.clone().requires_grad_() @ weight
                out, lse = burst.attention(y, y.detach(), y.detach(), return_lse=True)
                return torch.autograd.grad((lse if of_lse else out).pow(2).sum(), y, create_graph=True)[0]

            for of_lse in (False, True):
                assert gradient(of_lse).abs().sum() > 0
                for second in (lambda: torch.autograd.grad(gradient(of_lse).pow(2).sum(), weight),
                               lambda: gradient(of_lse).pow(2).sum().backward()):
                    with assert_raises(RuntimeError, "attention: must be differentiated once"):
                        second()
            # dout alone leads to `weight`.
            q = x.clone().requires_grad_()
            first, = torch.autograd.grad(burst.attention(q, x, x), q, grad_outputs=x @ weight, create_graph=True)
            with assert_raises(RuntimeError, "attention: must be differentiated once"):
                torch.autograd.grad(first.sum(), weight)
        run_ranks(1, body)

    def test_masks_of_wrong_numbers_are_refused(self):
        masks = burst.masks
        for error, text, make in (
                (ValueError, "key_blocks: must be at least 0 and less than 2; got -1",
                 lambda: masks.blocks(8, 4, [[0], [-1]])),
                (ValueError, "key_blocks: must be at least 0 and less than 2; got 2",
                 lambda: masks.blocks(8, 4, [[0], [2]])),
                (ValueError, "key_blocks: must have a row for each of the 3", lambda: masks.blocks(9, 4, [[0], [1]])),
                (ValueError, "size: must be at least 1", lambda: masks.blocks(8, 2**32, [[0]])),
                (ValueError, "size: must be at least 1", lambda: masks.blocks(8, 0, [[0]])),
                (ValueError, "window: must be at least 1", lambda: masks.window_with_global_tokens(8, 0)),
                (ValueError, "global_tokens: must be", lambda: masks.window_with_global_tokens(8, 1, [8])),
                (ValueError, "seqlen: must be", lambda: masks.window_with_global_tokens(2**31, 1)),
                (ValueError, "prompt: must be", lambda: masks.tree(2**32 + 4, [4])),
                (ValueError, "prompt: must be", lambda: masks.tree(-1, [4])),
                (ValueError, "answers: must be", lambda: masks.tree(1, [-4])),
                (TypeError, "answers: must be a whole number", lambda: masks.tree(1, [1.5]))):
            with assert_raises(error, text):
                make()

    def test_iterators_in_lists_are_read(self):
        def body(rank, group):
            q, k, v = (normal(name, 1, 8, 1, 2) for name in "qkv")
            parts = [(0, 4, 0, 4, "full"), (4, 8, 2, 6, "full")]
            want = burst.attention(q, k, v, causal=False, slices=parts)
            tensors = [[torch.tensor(0), 4, torch.tensor(0), 4, "full"], (4, torch.tensor(8), 2, 6, "full")]
            for slices in (iter(parts), [iter(parts)], burst.masks.Frozen([iter(parts)]), [map(iter, parts)], tensors):
                assert torch.equal(burst.attention(q, k, v, causal=False, slices=slices), want)
            pairs = [(0, 3), (3, 8)]
            want = burst.attention(q, k, v, causal=False, spans=pairs)
            for spans in (iter(pairs), [zip([0, 3], [3, 8])], torch.tensor([pairs])):
                assert torch.equal(burst.attention(q, k, v, causal=False, spans=spans), want)
            # Equal numbers of other types are other arguments.
            burst.attention(q, k, v, window=1)
            for window in (True, 1.0):
                with assert_raises((TypeError, ValueError), "window: must be an integer"):
                    burst.attention(q, k, v, window=window)
        run_ranks(1, body)

    def test_any_error_of_one_rank_reaches_the_others(self):
        def body(rank, group):
            x = normal("x", 1, 8, 1, 2)
            for given in (dict(documents=torch.zeros(2, dtype=torch.long, device="meta")), dict(alibi_slopes=[10**400])):
                with assert_raises(ValueError, "attention: its arguments must be readable"):
                    burst.attention(x, x, x, group=group, **(given if rank == 1 else {}))
                burst.attention(x, x, x, group=group)
        run_ranks(2, body)

    def test_shard_and_unshard_have_the_dimensions_of_the_tensor(self):
        def body(rank, group):
            x = normal("x", 2, 8, 3)
            for dim in (3, -4):
                for function in (burst.shard, burst.unshard):
                    with assert_raises(IndexError, "dim: must be within"):
                        function(x, dim, group)
        run_ranks(1, body)


if __name__ == "__main__":
    main()
