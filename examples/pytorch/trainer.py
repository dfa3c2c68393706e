"""Trains a model with windows with the Trainer of transformers, every sequence spread over the ranks:

  torchrun --nproc_per_node=4 examples/pytorch/trainer.py      # GPUs if there are enough, else CPUs

One line, marked with "Burst", does it; TRL's SFTTrainer takes the same line. The model is small and random; a trained one
comes from AutoModelForCausalLM.from_pretrained(DIR).
"""

import os

import torch
import transformers

import burst  # Burst

SEQLEN, STEPS = 256, 10


def main():
    torch.manual_seed(0)
    config = transformers.MistralConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                                        num_key_value_heads=2, vocab_size=64, sliding_window=32)
    model = transformers.MistralForCausalLM(config)
    text = torch.arange(STEPS * SEQLEN) ** 2 % 61
    dataset = [dict(input_ids=tokens, labels=tokens) for tokens in text.split(SEQLEN)]
    on_cpu = torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    options = transformers.TrainingArguments(
        os.environ.get("OUT", "out"), max_steps=STEPS, per_device_train_batch_size=1, learning_rate=3e-3, logging_steps=1,
        save_strategy="no", report_to=[], use_cpu=on_cpu, bf16=not on_cpu, disable_tqdm=True)
    trainer = transformers.Trainer(model, options, train_dataset=dataset)
    burst.context_parallel(trainer)  # Burst
    trainer.train()


if __name__ == "__main__":
    main()
