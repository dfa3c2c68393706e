"""Trains a model of transformers on packed documents, with every sequence spread over the ranks:

  torchrun --nproc_per_node=4 examples/pytorch/packed.py      # GPUs if there are enough, else CPUs

The layout "balanced" gives every rank nearly the same work, whatever the documents' lengths are. The model is small and
random; a trained one comes from AutoModelForCausalLM.from_pretrained(DIR, attn_implementation="burst").
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers

import burst

SEQLEN, VOCABULARY, STEPS = 256, 64, 10


def pack(step):
    """Returns tokens, labels and the documents' starts of a sequence. Real programs take texts."""
    generator = torch.Generator().manual_seed(step)
    documents = [0] + sorted((torch.randperm(SEQLEN - 1, generator=generator)[:4] + 1).tolist())
    tokens = torch.arange(SEQLEN) ** 2 % 61
    labels = torch.cat([tokens[1:], tokens[:1]])
    labels[[start - 1 for start in documents]] = -100  # a document's last token has no next one
    return tokens[None], labels[None], documents


def main():
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("LOCAL_RANK: must be set; start this program with torchrun, as its first lines show")
    local_rank, ranks_here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    on_gpu = torch.cuda.device_count() >= ranks_here
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    group = dist.group.WORLD

    torch.manual_seed(0)
    config = transformers.LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                                      num_key_value_heads=2, vocab_size=VOCABULARY, use_cache=False)
    model = transformers.LlamaForCausalLM(config).to(device, torch.bfloat16 if on_gpu else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        tokens, labels, documents = pack(step)
        burst.register(group, layout="balanced", documents=documents, seqlen=SEQLEN)
        model.set_attn_implementation("burst")
        own = burst.positions(SEQLEN, group, layout="balanced", documents=documents)
        logits = model(input_ids=tokens[:, own].to(device), position_ids=own[None].to(device)).logits
        count = (labels != -100).sum().to(device)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels[:, own].flatten().to(device),
                               ignore_index=-100, reduction="sum") / count
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)  # the gradients of the ranks add up
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print("step %d/%d  loss %.5f" % (step + 1, STEPS, total), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
