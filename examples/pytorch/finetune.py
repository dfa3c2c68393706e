"""Fine-tunes a language model of transformers on a text, with every sequence spread over the ranks:

  torchrun --nproc_per_node=4 examples/pytorch/finetune.py --model=DIR --text=FILE --seqlen=131072 --fsdp

DIR is a model as transformers keeps it (config.json, safetensors, tokenizer). The ranks use GPUs if there
are enough, else CPUs. Five lines marked with "Burst" make it long-context. With one rank and
--attention=sdpa it trains equally without them.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

import burst  # Burst


class Loss(torch.nn.Module):
    """Sums the losses of this rank's tokens. Logits exist for one chunk of tokens at a time."""

    def __init__(self, model, chunk=2048):
        super().__init__()
        self.model, self.chunk = model, chunk

    def of_chunk(self, hidden, labels):
        logits = self.model.lm_head(hidden).float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def forward(self, tokens, positions, labels):
        hidden = self.model.model(input_ids=tokens, position_ids=positions,
                                  use_cache=False).last_hidden_state
        parts = zip(hidden.split(self.chunk, 1), labels.split(self.chunk, 1))
        return sum(checkpoint(self.of_chunk, *part, use_reentrant=False) for part in parts)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder")
    parser.add_argument("--text", required=True, help="a file, UTF-8")
    parser.add_argument("--seqlen", type=int, default=4096, help="tokens of a sequence, over all ranks")
    parser.add_argument("--steps", type=int, default=10, help="of one sequence each")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--attention", choices=["burst", "sdpa"], default="burst")
    parser.add_argument("--fsdp", action="store_true",
                        help="the ranks divide parameters, gradients and AdamW's state (FSDP2, needs PyTorch 2.6)")
    parser.add_argument("--out", help="a folder for the tuned model")
    return parser.parse_args()


def main():
    options = parse_arguments()
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("LOCAL_RANK: must be set; start this program with torchrun, as its first lines show")
    local_rank, ranks_here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    on_gpu = torch.cuda.device_count() >= ranks_here
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    if options.attention == "sdpa" and ranks > 1:
        raise SystemExit("--attention=sdpa: it sees this rank's tokens only; start one rank")

    if options.attention == "burst":
        burst.register(group)  # Burst
    model = AutoModelForCausalLM.from_pretrained(
        options.model, attn_implementation=options.attention,
        dtype=torch.bfloat16 if on_gpu else torch.float32).to(device)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    loss_of = Loss(model)
    if options.fsdp:
        from torch.distributed.fsdp import fully_shard
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    with open(options.text, encoding="utf-8") as file:
        text = torch.tensor(tokenizer(file.read())["input_ids"])
    n = options.seqlen
    if len(text) <= n:
        raise SystemExit("--text: %d tokens; a sequence needs %d" % (len(text), n + 1))

    own = burst.positions(n, group, device=device)  # Burst
    for step in range(options.steps):
        begin = step * n % (len(text) - n)
        sequence = text[None, begin:begin + n + 1].to(device)
        # Labels are shifted first, because the token after a rank's last one is on another rank.
        tokens, labels = sequence[:, own], sequence[:, own + 1]  # Burst
        loss = loss_of(tokens, own[None], labels) / n  # Burst: positions in the whole sequence
        # The ranks' gradients add up, but FSDP takes their mean.
        (loss * ranks if options.fsdp else loss).backward()
        if not options.fsdp and ranks > 1:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            print("step %d/%d  loss %.6f" % (step + 1, options.steps, total.item()), flush=True)

    if options.out:
        state = model.state_dict()
        if options.fsdp:
            state = {name: value.full_tensor() for name, value in state.items()}
        if rank == 0:
            model.save_pretrained(options.out, state_dict=state)
            tokenizer.save_pretrained(options.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
