// Tests the configurations that a trainer refuses with a sentence that names the option.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "tests/train/config_arguments.h"
#include "train/config/config.h"

namespace burst {
namespace {

struct BadOption {
  std::vector<std::string> arguments;
  std::vector<std::string> message;  // parts of the error
  Launch launch = {1, 8};
};

TEST(TrainConfig, EveryErrorNamesItsOption) {
  const std::string not_json = Write("not.json", "{");
  const std::string deep =
      Write("deep.json", "{\"data\": " + std::string(500000, '[') + std::string(500000, ']') + "}");
  const std::string unknown_key = Write("key.json", R"({"stesp": 1})");
  const std::string bad_value = Write("value.json", R"({"steps": "many"})");
  const std::string heads =
      Write("heads.json", R"({"family": "llama", "layers": 1, "width": 10, "heads": 3})");
  const std::string kv_heads = Write(
      "kv.json", R"({"family": "llama", "layers": 1, "width": 8, "heads": 4, "kv_heads": 3})");
  const std::string context = Write(
      "context.json", R"({"family": "gpt2", "layers": 1, "width": 8, "heads": 2, "context": 16})");
  const std::string four_heads = Write(
      "four.json", R"({"family": "llama", "layers": 1, "width": 8, "heads": 4, "kv_heads": 2})");
  const std::string odd_ffn =
      Write("ffn.json", R"({"family": "llama", "layers": 1, "width": 8, "heads": 4, "ffn": 18})");
  const std::vector<BadOption> table = {
      {{"--stesp=5"}, {"--stesp", "did you mean --steps?"}},
      {{"--batch_size=5"}, {"--batch_size", "did you mean --batch?"}},
      {{"--what_is_this"}, {"--what_is_this", "--help"}},
      {{"steps=5"}, {"'steps=5'", "--name=value"}},
      {{"--steps"}, {"--steps", "missing"}},
      {{"--steps=five"}, {"--steps", "'five'", "whole number"}},
      {{"--lr=fast"}, {"--lr", "'fast'", "number"}},
      {{"--lr=nan"}, {"--lr", "nan"}},
      {{"--packed=maybe"}, {"--packed", "'maybe'", "true or false"}},
      {{"--recompute=half"},
       {"--recompute", "half", "none, full, selective, sequence; got 'half'"}},
      {{"--recompute=full", "--offload=activations"}, {"--offload", "--device=cuda"}},
      {{"--offload=optimizer"}, {"--offload", "--device=cuda"}},
      {{"--offload=weights"},
       {"--offload", "must be one of none, activations, optimizer, all; got"}},
      {{"--dropout=0.1"}, {"--dropout", "renamed", "give --model.dropout"}},
      {{"--attention_sinks"}, {"--attention_sinks", "renamed", "give --model.attention_sinks"}},
      {{"--recompute_every=2"}, {"--recompute_every", "removed", "--recompute_segment"}},
      {{"--attention_fp8"}, {"--attention_fp8", "removed", "--precision=fp8"}},
      {{"--recompute_segment=0"}, {"--recompute_segment", "0", "at least 1"}},
      {{"--recompute_segment=2"}, {"--recompute_segment", "2", "--recompute"}},
      {{"--ffn_chunk=-1"}, {"--ffn_chunk", "-1", "at least 0"}},
      {{"--recompute=sequence", "--head_chunk=1"}, {"--recompute", "sequence", "--head_chunk"}},
      {{"--exact_chunk=16"}, {"--exact_chunk", "got 16", "must be 0 without --exact"}},
      {{"--exact", "--exact_chunk=24"}, {"--exact_chunk", "24", "multiple of 16", "--seqlen=256"}},
      {{"--exact", "--exact_chunk=48"}, {"--exact_chunk", "48", "multiple of 16", "--seqlen=256"}},
      {{"--exact", "--exact_chunk=768"},
       {"--exact_chunk", "768", "3 sequences", "divide the 8 of --batch=8"}},
      {{"--exact", "--exact_chunk=1024", "--dp=4"}, {"--exact_chunk", "the 2 of --batch=8"}},
      {{"--exact", "--exact_chunk=-16"}, {"--exact_chunk", "got -16", "at least 0"}},
      {{"--exact", "--seqlen=100"}, {"--seqlen", "100", "--exact", "multiples of 16"}},
      {{"--exact", "--strategy=ulysses"}, {"--strategy", "ulysses", "--exact"}},
      {{"--exact", "--zero=2", "--ranks=2"}, {"--zero", "2", "--exact", "0 or 1"}},
      {{"--exact", "--head_chunk=1"}, {"--head_chunk", "1", "--exact"}},
      {{"--exact", "--recompute=sequence"}, {"--recompute", "sequence", "--exact"}},
      {{"--exact", "--deterministic=false"}, {"--deterministic", "--exact"}},
      {{"--exact", "--ring_backward=ring"}, {"--ring_backward", "ring", "--exact"}},
      {{"--exact", "--ranks_per_node=2", "--ranks=4"}, {"--ranks_per_node", "2", "--exact"}},
      {{"--head_chunk=-1"}, {"--head_chunk", "-1", "at least 0"}},
      {{"--head_chunk=4"}, {"--head_chunk", "a divisor of the 2 KV heads; got 4"}},
      {{"--head_chunk=1", "--tp=2"}, {"--head_chunk", "1", "--tp=2", "leave it out"}},
      {{"--head_chunk=1", "--strategy=ulysses", "--ranks=4"}, {"--head_chunk", "ulysses", "burst"}},
      {{"--ffn_chunk=64", "--tp=2"}, {"--ffn_chunk", "64", "--tp=2", "leave it out"}},
      {{"--layout=zigzig"}, {"--layout", "zigzig", "contiguous", "zigzag", "striped"}},
      {{"--ring_backward=up"}, {"--ring_backward", "up", "auto", "burst", "ring"}},
      {{"--schedule=step"},
       {"--schedule", "must be one of cosine, linear, constant, wsd; got 'step'"}},
      {{"--comm=shmem"}, {"--comm", "must be one of auto, threads, tcp, mpi, nccl; got 'shmem'"}},
      {{"--device=tpu"}, {"--device: must be one of auto, cpu, cuda; got 'tpu'"}},
      {{"--precision=fp4"},
       {"--precision", "must be one of auto, fp32, tf32, bf16, fp8; got 'fp4'"}},
      {{"--precision=fp8"}, {"--precision", "fp8", "--device=cuda"}},
      {{"--fp8_recipe=tensor"}, {"--fp8_recipe", "tensorwise, rowwise, blocks"}},
      {{"--precision=fp8", "--device=cuda", "--bf16_layers=2", "--model=llama_tiny"},
       {"--bf16_layers", "less than half", "got 2"},
       {1, 8, 1}},
      {{"--precision=fp8", "--device=cuda", "--exact"},
       {"--precision", "fp8", "--exact"},
       {1, 8, 4}},
      {{"--precision=fp8", "--device=cuda",
        R"(--model={"family":"llama","layers":1,"width":24,"heads":3})"},
       {"--precision", "fp8", "multiples of 16", "width", "24"},
       {1, 8, 4}},
      {{"--tokenizer=bpe"}, {"--tokenizer", "bpe", "byte", "char", "file or folder"}},
      {{"--tokenizer="}, {"--tokenizer", "empty"}},
      {{"--seqlen=0"}, {"--seqlen", "0", "at least 1"}},
      {{"--window=-2"}, {"--window", "-2", "at least -1"}},
      {{"--batch=0"}, {"--batch", "at least 1"}},
      {{"--accumulate=0"}, {"--accumulate", "from 1 to", "got 0"}},
      {{"--steps=0"}, {"--steps", "at least 1"}},
      {{"--ranks=0"}, {"--ranks", "from 1 to", "got 0"}},
      {{"--ranks=100000"}, {"--ranks", "100000"}},
      {{"--threads=0"}, {"--threads", "from 1 to", "got 0"}},
      {{"--ranks=1024"}, {"--ranks", "1024 threads", "at most 512", "8 cores"}, {1, 8}},
      {{"--ranks=1024", "--threads=1024"}, {"--threads", "1024 times 1024 ranks"}, {1, 8}},
      {{"--threads=1024"}, {"--threads", "1024 times 1 rank", "64 for each"}, {4, 8}},
      {{"--dp=1024", "--sp=1024"}, {"--dp", "1024", "at most 1024 ranks", "1048576"}},
      {{"--seed=-3"}, {"--seed", "-3"}},
      {{"--eval_every=-1"}, {"--eval_every"}},
      {{"--eval_batches=-1"}, {"--eval_batches"}},
      {{"--checkpoint_every=-1"}, {"--checkpoint_every"}},
      {{"--log_every=0"}, {"--log_every"}},
      {{"--patience=-1"}, {"--patience", "at least 0"}},
      {{"--sample=-2"}, {"--sample"}},
      {{"--model.dropout=1"}, {"--model.dropout", "got 1", "-1, or at least 0 and below 1"}},
      {{"--model.attention_dropout=1"},
       {"--model.attention_dropout", "got 1", "-1, or at least 0 and below 1"}},
      {{"--model.attention_softcap=-2"},
       {"--model.attention_softcap", "got -2", "-1, or at least 0"}},
      {{"--model.attention_dropout=0.1", "--exact"},
       {"--model.attention_dropout", "0.1", "--exact"}},
      {{"--model.attention_softcap=30", "--exact"}, {"--model.attention_softcap", "30", "--exact"}},
      {{"--beta1=1"}, {"--beta1"}},
      {{"--beta2=-0.1"}, {"--beta2"}},
      {{"--weight_decay=-1"}, {"--weight_decay"}},
      {{"--clip=-1"}, {"--clip"}},
      {{"--z_loss=-1"}, {"--z_loss", "got -1", "at least 0"}},
      {{"--model.logits_softcap=-2"}, {"--model.logits_softcap", "got -2"}},
      {{"--eps=0"}, {"--eps"}},
      {{"--lr=0"}, {"--lr", "above 0"}},
      {{"--lr=1e308"}, {"--lr", "1e+308", "at most 1e+30"}},
      {{"--min_lr=-2"}, {"--min_lr"}},
      {{"--seqlen=2000000000", "--batch=1000"}, {"--seqlen", "--batch"}},
      // Contradicting pairs.
      {{"--lr=1e-3", "--min_lr=1e-2"}, {"--min_lr", "--lr"}},
      {{"--schedule=constant", "--min_lr=1e-5"}, {"--min_lr", "--schedule=constant"}},
      {{"--steps=10", "--warmup=20"}, {"--warmup", "20", "--steps=10"}},
      {{"--warmup=-2"}, {"--warmup"}},
      {{"--resume"}, {"--resume", "--out"}},
      {{"--resume=auto"}, {"--resume", "--out"}},
      {{"--resume=maybe"}, {"--resume", "maybe", "auto"}},
      {{"--comm=mpi", "--ranks=2"}, {"--ranks", "2", "4 processes"}, {4, 8}},
      {{"--comm=threads"}, {"--comm", "4 separate models", "torchrun"}, {4, 8, 0, "torchrun"}},
      {{"--comm=tcp", "--device=cuda"}, {"--comm", "tcp", "--device=cuda"}, {4, 8, 4}},
      {{"--comm=tcp"}, {"--comm", "tcp", "mpirun, torchrun or srun"}, {1, 8}},
      {{},
       {"--comm", "tcp", "RANK is not set"},
       {1, 8, 0, "", absl::InvalidArgumentError("RANK is not set")}},
      {{},
       {"--comm", "tcp", "BURST_TOKEN is not set"},
       {4, 8, 0, "srun", absl::OkStatus(), absl::InvalidArgumentError("BURST_TOKEN is not set")}},
      {{"--comm=threads"}, {"--comm", "4 separate models", "leave it out"}, {4, 8, 4}},
      {{"--comm=mpi", "--device=cuda"}, {"--comm", "mpi", "--device=cuda"}, {4, 8, 4}},
      {{"--comm=nccl"}, {"--comm", "nccl", "--device=cuda"}, {4, 8}},
      {{"--comm=nccl"}, {"--comm", "nccl", "mpirun, torchrun or srun"}, {1, 8, 4}},
      {{},
       {"--comm", "RANK is not set"},
       {1, 8, 4, "", absl::InvalidArgumentError("RANK is not set")}},
      {{"--ranks=2"}, {"--ranks", "2", "4 processes", "srun"}, {4, 8, 4, "srun"}},
      {{"--ranks=5", "--device=cuda"}, {"--ranks", "5", "4 GPUs"}, {1, 8, 4}},
      {{"--dp=0"}, {"--dp", "from 1 to", "got 0"}},
      {{"--sp=-2"}, {"--sp", "from 1 to 1024"}},
      {{"--dp=1024", "--sp=1024", "--batch=1024"}, {"--dp", "--sp", "1048576", "1024"}},
      {{"--ranks=4", "--dp=3"},
       {"--dp", "got 3", "a divisor of the number of ranks, 4", "give another number of ranks"}},
      {{"--ranks=1", "--zero=3"}, {"--zero", "must be 0 on one rank", "got 3", "give 0"}},
      {{"--ranks=4", "--sp=8"}, {"--sp", "got 8", "a divisor of", "4"}},
      {{"--ranks=4", "--dp=2", "--sp=4"}, {"--dp", "2", "--sp=4", "4"}},
      {{"--dp=2", "--batch=3"}, {"--batch", "3", "--dp=2"}},
      {{"--pp=0"}, {"--pp", "got 0", "from 1 to 1024"}},
      {{"--pp_chunks=2"}, {"--pp_chunks", "2", "--pp"}},
      {{"--pp=2", "--ranks=3"}, {"--pp", "got 2", "a divisor of", "3"}},
      {{"--pp=2", "--ranks=8", "--dp=3"}, {"--dp", "3", "--pp", "4"}},
      {{"--pp=512", "--dp=4"}, {"--pp", "512", "--dp", "1024"}},
      {{"--pp=64"}, {"--pp", "64", "layers"}},
      {{"--pp=2", "--pp_chunks=2", "--accumulate=3"}, {"--pp_chunks", "--pp=2", "--accumulate=3"}},
      {{"--pp=2", "--zero=2", "--dp=2", "--model=d12"}, {"--zero", "got 2", "--pp=2", "0 or 1"}},
      {{"--pp=2", "--exact"}, {"--exact", "--pp=2"}},
      {{"--pp=2", "--device=cuda", "--recompute=full", "--offload=activations"},
       {"--offload", "activations", "--pp=2"},
       {1, 8, 4}},
      {{"--pp=2", "--checkpoint_files=one"}, {"--checkpoint_files", "one", "--pp=2", "auto"}},
      {{"--zero=4"}, {"--zero", "4", "from 0 to 3"}},
      {{"--zero=-1"}, {"--zero", "-1", "from 0 to 3"}},
      {{"--zero=2", "--ranks=1"}, {"--zero", "2", "one rank"}},
      {{"--strategy=spiral"}, {"--strategy", "spiral", "single", "burst+ulysses"}},
      {{"--strategy=single", "--ranks=2"}, {"--strategy", "single", "--sp above 1", "--sp=1"}},
      {{"--strategy=single", "--ring_backward=ring"},
       {"--ring_backward", "ring", "--strategy=single"}},
      {{"--strategy=ulysses", "--ring_backward=burst"},
       {"--ring_backward", "burst", "--strategy=ulysses"}},
      {{"--strategy=ring", "--ring_backward=burst"},
       {"--ring_backward", "burst", "--strategy=ring"}},
      {{"--ulysses=2"}, {"--ulysses", "got 2", "without --strategy=burst+ulysses"}},
      {{"--ring_grad_dtype=fp16"}, {"--ring_grad_dtype", "fp16", "must be one of fp32, bf16; got"}},
      {{"--ring_grad_dtype=bf16"}, {"--ring_grad_dtype", "--precision=bf16", "fp32"}},
      {{"--strategy=ulysses", "--ring_grad_dtype=bf16"},
       {"--ring_grad_dtype", "--strategy=ulysses", "rings"}},
      {{"--ranks_per_node=-2"}, {"--ranks_per_node", "-2", "at least -1"}},
      {{"--ranks=4", "--ranks_per_node=3"},
       {"--ranks_per_node", "got 3", "a divisor of the 4 ranks"}},
      {{"--dp=4", "--ranks_per_node=2", "--ranks=4"}, {"--ranks_per_node", "2", "1 rank "}},
      {{"--strategy=ulysses", "--ranks=2", "--ranks_per_node=2"},
       {"--ranks_per_node", "--strategy=ulysses", "rings"}},
      {{"--strategy=burst+ulysses", "--ranks=4", "--ulysses=2", "--ranks_per_node=1"},
       {"--ranks_per_node", "--ulysses=2"}},
      {{"--strategy=burst+ulysses", "--ulysses=0"}, {"--ulysses", "at least 1"}},
      {{"--strategy=burst+ulysses", "--ranks=4", "--ulysses=3"}, {"--ulysses", "3", "4 ranks"}},
      {{"--strategy=ulysses", "--ranks=3", "--model=" + four_heads},
       {"--sp with --strategy=ulysses: must be 1, 2, 4 ranks to share 4 heads (2 KV heads); got 3",
        "give one of them, or --strategy=burst"}},
      {{"--strategy=burst+ulysses", "--ranks=6", "--ulysses=3", "--model=" + four_heads},
       {"--ulysses", "1, 2, 4 ranks to share 4 heads", "got 3"}},
      {{"--strategy=tp"}, {"--strategy", "got tp", "give --tp=N"}},
      {{"--strategy=tp+sp"}, {"--strategy", "got tp+sp", "give --tp=N"}},
      {{"--tp=4", "--model=" + odd_ffn},
       {"--tp: must be a divisor of the 18 channels of the ffn; got 4; give one"}},
      {{"--tp=0"}, {"--tp", "got 0", "from 1 to 1024"}},
      {{"--tp=2000"}, {"--tp", "got 2000", "1 to 1024"}},
      {{"--tp=64", "--sp=32"}, {"--tp", "64", "at most 1024 ranks", "2048"}},
      {{"--tp=2", "--ranks=3"}, {"--tp", "got 2", "a divisor of", "3"}},
      {{"--tp=2", "--dp=3", "--ranks=8"}, {"--dp", "got 3", "a divisor of", "by --tp, 4"}},
      {{"--tp=2", "--sp=2", "--strategy=ulysses"}, {"--tp", "2", "--strategy=ulysses", "burst"}},
      {{"--tp=3", "--model=" + four_heads},
       {"--tp: must be 1, 2, 4 ranks to share 4 heads (2 KV heads); got 3; give one of them"}},
      {{"--tp=2", "--ffn_chunk=64"}, {"--ffn_chunk", "64", "--tp=2", "leave it out"}},
      {{"--tp=2", "--head_chunk=1"}, {"--head_chunk", "1", "--tp=2", "leave it out"}},
      {{"--tp=2", "--zero=1"}, {"--zero", "got 1", "--tp=2", "larger --dp"}},
      {{"--tp=2", "--exact"}, {"--tp", "2", "--exact", "leave it out"}},
      {{"--tp=2", "--sp=2", "--ranks_per_node=4"}, {"--ranks_per_node", "4", "2 ranks"}},
      // Models.
      {{"--model=llama_huge"}, {"--model", "llama_huge", "llama_tiny", "d12"}},
      {{"--model="}, {"--model", "llama_tiny"}},
      {{"--model=/no/such.json"}, {"--model", "/no/such.json"}},
      {{"--model=" + not_json}, {"--model", "not.json"}},
      {{"--model=" + heads}, {"--model", "heads", "3"}},
      {{"--model=" + kv_heads}, {"--model", "kv_heads", "3"}},
      {{"--model=" + context, "--seqlen=17"}, {"--seqlen", "17", "16"}},
      // Files of options.
      {{"--config=/no/such.json"}, {"--config", "/no/such.json"}},
      {{"--config=" + not_json}, {"--config", "not.json", "JSON"}},
      {{"--config=" + deep}, {"--config", "deep.json", "JSON"}},
      {{"--config=" + unknown_key}, {"--config", "key.json", "--stesp", "--steps"}},
      {{"--config=" + bad_value}, {"--config", "value.json", "--steps", "many"}},
      {{"--resume", "--out=/no/such/run"}, {"--resume", "/no/such/run"}},
      {{"--data="}, {"--data", "empty"}},
      {{"--tokenizer=" + std::string(5000, 'x')}, {"--tokenizer", "xxx"}},
      {{"--profile_steps=3"}, {"--profile_steps", "3", "--device=cuda"}},
      {{"--profile_steps=3-"}, {"--profile_steps", "3-", "10-12"}},
      {{"--profile_steps=4-3"}, {"--profile_steps", "4-3"}},
      {{"--profile_steps=0-3"}, {"--profile_steps", "0-3"}},
      {{"--profile_steps=1-2-3"}, {"--profile_steps", "1-2-3"}},
      {{"--profile_steps=9-11", "--steps=10"}, {"--profile_steps", "9-11", "--steps=10"}},
  };
  for (const BadOption& bad : table) {
    const auto config = Resolve(bad.arguments, bad.launch);
    const std::string given = bad.arguments.empty() ? "" : bad.arguments[0];
    ASSERT_FALSE(config.ok()) << given;
    for (const std::string& part : bad.message) {
      EXPECT_TRUE(absl::StrContains(config.status().message(), part))
          << given << " should mention " << part << ":\n  " << config.status().message();
    }
    EXPECT_FALSE(absl::StrContains(config.status().message(), "\n")) << "one sentence";
  }
}

}  // namespace
}  // namespace burst
