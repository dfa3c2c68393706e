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
  std::vector<std::string> message;  // parts of it
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
      {{"--what_is_this"}, {"--what_is_this", "--help"}},
      {{"steps=5"}, {"'steps=5'", "--name=value"}},
      {{"--steps"}, {"--steps", "missing"}},
      {{"--steps=five"}, {"--steps", "'five'", "whole number"}},
      {{"--lr=fast"}, {"--lr", "'fast'", "number"}},
      {{"--lr=nan"}, {"--lr", "nan"}},
      {{"--packed=maybe"}, {"--packed", "'maybe'", "true or false"}},
      {{"--recompute=half"}, {"--recompute", "half", "none, full, selective or sequence"}},
      {{"--recompute=full", "--offload=activations"}, {"--offload", "--device=cuda"}},
      {{"--offload=optimizer"}, {"--offload", "--device=cuda"}},
      {{"--offload=weights"}, {"--offload", "none, activations, optimizer or all"}},
      {{"--recompute_every=2"}, {"--recompute_every", "removed", "--recompute_segment"}},
      {{"--recompute_segment=0"}, {"--recompute_segment", "0", "at least 1"}},
      {{"--recompute_segment=2"}, {"--recompute_segment", "2", "--recompute"}},
      {{"--ffn_chunk=-1"}, {"--ffn_chunk", "-1", "at least 0"}},
      {{"--recompute=sequence", "--head_chunk=1"}, {"--recompute", "sequence", "--head_chunk"}},
      {{"--attention_fp8"}, {"--attention_fp8", "--device=cuda"}},
      {{"--attention_fp8", "--device=cuda", "--precision=tf32"},
       {"--attention_fp8", "--precision=bf16"},
       {1, 8, 4}},
      {{"--attention_fp8", "--device=cuda"}, {"--attention_fp8", "72 to 128", "is 32"}, {1, 8, 4}},
      {{"--attention_fp8", "--device=cuda", "--model=llama_1b", "--attention_softcap=30"},
       {"--attention_softcap", "30", "--attention_fp8"},
       {1, 8, 4}},
      {{"--attention_fp8", "--device=cuda", "--model=llama_1b", "--attention_dropout=0.1"},
       {"--attention_dropout", "0.1", "--attention_fp8"},
       {1, 8, 4}},
      {{"--attention_fp8", "--device=cuda", "--model=llama_1b", "--exact"},
       {"--attention_fp8", "--exact"},
       {1, 8, 4}},
      {{"--exact_chunk=16"}, {"--exact_chunk", "16", "without --exact"}},
      {{"--exact", "--exact_chunk=24"}, {"--exact_chunk", "24", "multiple of 16", "--seqlen=256"}},
      {{"--exact", "--exact_chunk=48"}, {"--exact_chunk", "48", "multiple of 16", "--seqlen=256"}},
      {{"--exact", "--exact_chunk=768"},
       {"--exact_chunk", "768", "3 sequences", "do not divide the 8 of --batch=8"}},
      {{"--exact", "--exact_chunk=1024", "--dp=4"}, {"--exact_chunk", "the 2 of --batch=8"}},
      {{"--exact", "--exact_chunk=-16"}, {"--exact_chunk", "-16", "multiple of 16"}},
      {{"--exact", "--seqlen=100"}, {"--seqlen", "100", "--exact", "multiples of 16"}},
      {{"--exact", "--strategy=ulysses"}, {"--strategy", "ulysses", "--exact"}},
      {{"--exact", "--zero=2", "--ranks=2"}, {"--zero", "2", "--exact", "0 or 1"}},
      {{"--exact", "--head_chunk=1"}, {"--head_chunk", "1", "--exact"}},
      {{"--exact", "--recompute=sequence"}, {"--recompute", "sequence", "--exact"}},
      {{"--exact", "--deterministic=false"}, {"--deterministic", "--exact"}},
      {{"--exact", "--ring_backward=ring"}, {"--ring_backward", "ring", "--exact"}},
      {{"--exact", "--ranks_per_node=2", "--ranks=4"}, {"--ranks_per_node", "2", "--exact"}},
      {{"--head_chunk=-1"}, {"--head_chunk", "-1", "at least 0"}},
      {{"--head_chunk=4"}, {"--head_chunk", "4 does not divide the 2 KV heads"}},
      {{"--head_chunk=1", "--strategy=tp"}, {"--head_chunk", "1", "--strategy=tp", "leave it out"}},
      {{"--head_chunk=1", "--strategy=ulysses", "--ranks=4"}, {"--head_chunk", "ulysses", "burst"}},
      {{"--ffn_chunk=64", "--strategy=tp"}, {"--ffn_chunk", "64", "--strategy=tp", "leave it out"}},
      {{"--layout=zigzig"}, {"--layout", "zigzig", "contiguous", "zigzag", "striped"}},
      {{"--ring_backward=up"}, {"--ring_backward", "up", "auto", "burst", "ring"}},
      {{"--schedule=step"}, {"--schedule", "'step'", "use cosine, linear, constant or wsd"}},
      {{"--comm=shmem"}, {"--comm", "'shmem'", "use auto, threads, tcp, mpi or nccl"}},
      {{"--device=tpu"}, {"--device", "unknown device 'tpu'", "use auto, cpu or cuda"}},
      {{"--precision=fp4"}, {"--precision", "'fp4'", "use auto, fp32, tf32, bf16 or fp8"}},
      {{"--precision=fp8"}, {"--precision", "fp8", "--device=cuda"}},
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
      {{"--accumulate=0"}, {"--accumulate", "at least 1"}},
      {{"--steps=0"}, {"--steps", "at least 1"}},
      {{"--ranks=0"}, {"--ranks", "at least 1"}},
      {{"--ranks=100000"}, {"--ranks", "100000"}},
      {{"--threads=0"}, {"--threads", "at least 1"}},
      {{"--ranks=1024"}, {"--ranks", "1024 threads", "at most 512", "8 cores"}, {1, 8}},
      {{"--ranks=1024", "--threads=1024"}, {"--threads", "1024 times 1024 ranks"}, {1, 8}},
      {{"--threads=1024"}, {"--threads", "1024 times 1 rank", "64 for each"}, {4, 8}},
      {{"--dp=1024", "--sp=1024"}, {"--dp", "1024", "1048576 ranks; at most 1024"}},
      {{"--seed=-3"}, {"--seed", "-3"}},
      {{"--eval_every=-1"}, {"--eval_every"}},
      {{"--eval_batches=-1"}, {"--eval_batches"}},
      {{"--checkpoint_every=-1"}, {"--checkpoint_every"}},
      {{"--log_every=0"}, {"--log_every"}},
      {{"--patience=-1"}, {"--patience", "at least 0"}},
      {{"--sample=-2"}, {"--sample"}},
      {{"--dropout=1"}, {"--dropout", "1", "[0, 1)"}},
      {{"--attention_dropout=1"}, {"--attention_dropout", "1", "[0, 1)"}},
      {{"--attention_softcap=-2"}, {"--attention_softcap", "-2", "[0, inf)"}},
      {{"--attention_dropout=0.1", "--exact"}, {"--attention_dropout", "0.1", "--exact"}},
      {{"--attention_softcap=30", "--exact"}, {"--attention_softcap", "30", "--exact"}},
      {{"--beta1=1"}, {"--beta1"}},
      {{"--beta2=-0.1"}, {"--beta2"}},
      {{"--weight_decay=-1"}, {"--weight_decay"}},
      {{"--clip=-1"}, {"--clip"}},
      {{"--eps=0"}, {"--eps"}},
      {{"--lr=0"}, {"--lr", "above 0"}},
      {{"--lr=1e308"}, {"--lr", "1e+308", "at most 1e+30"}},
      {{"--min_lr=-2"}, {"--min_lr"}},
      {{"--seqlen=2000000000", "--batch=1000"}, {"--seqlen", "--batch"}},
      // Pairs that contradict.
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
      {{"--dp=0"}, {"--dp", "at least 1"}},
      {{"--sp=-2"}, {"--sp", "at least 1"}},
      {{"--dp=1024", "--sp=1024", "--batch=1024"}, {"--dp", "--sp=1024", "1048576 ranks", "1024"}},
      {{"--ranks=4", "--dp=3"}, {"--dp", "3", "does not divide", "4"}},
      {{"--ranks=4", "--sp=8"}, {"--sp", "8", "does not divide", "4"}},
      {{"--ranks=4", "--dp=2", "--sp=4"}, {"--dp", "2", "--sp=4", "4"}},
      {{"--dp=2", "--batch=3"}, {"--batch", "3", "--dp=2"}},
      {{"--pp=0"}, {"--pp", "0", "at least 1"}},
      {{"--pp_chunks=2"}, {"--pp_chunks", "2", "--pp"}},
      {{"--pp=2", "--ranks=3"}, {"--pp", "2", "divide", "3"}},
      {{"--pp=2", "--ranks=8", "--dp=3"}, {"--dp", "3", "--pp", "4"}},
      {{"--pp=512", "--dp=4"}, {"--pp", "512", "--dp", "1024"}},
      {{"--pp=64"}, {"--pp", "64", "layers"}},
      {{"--pp=2", "--pp_chunks=2", "--accumulate=3"}, {"--pp_chunks", "--pp=2", "--accumulate=3"}},
      {{"--pp=2", "--zero=2", "--dp=2", "--model=d12"}, {"--zero", "2", "--pp=2", "0 or 1"}},
      {{"--pp=2", "--exact"}, {"--exact", "--pp=2"}},
      {{"--pp=2", "--device=cuda", "--recompute=full", "--offload=activations"},
       {"--offload", "activations", "--pp=2"},
       {1, 8, 4}},
      {{"--pp=2", "--checkpoint_files=one"}, {"--checkpoint_files", "one", "--pp=2", "auto"}},
      {{"--zero=4"}, {"--zero", "4", "0, 1, 2 or 3"}},
      {{"--zero=-1"}, {"--zero", "-1", "0, 1, 2 or 3"}},
      {{"--zero=2", "--ranks=1"}, {"--zero", "2", "one rank"}},
      {{"--strategy=tp", "--ranks=2", "--zero=1", "--model=" + four_heads},
       {"--zero", "1", "--strategy=tp", "--dp=1", "larger --dp"}},
      {{"--strategy=spiral"}, {"--strategy", "spiral", "single", "burst+ulysses"}},
      {{"--strategy=single", "--ranks=2"}, {"--strategy", "single", "2", "--sp=1"}},
      {{"--strategy=single", "--ring_backward=ring"},
       {"--ring_backward", "ring", "--strategy=single"}},
      {{"--strategy=ulysses", "--ring_backward=burst"},
       {"--ring_backward", "burst", "--strategy=ulysses"}},
      {{"--strategy=ring", "--ring_backward=burst"},
       {"--ring_backward", "burst", "--strategy=ring"}},
      {{"--ulysses=2"}, {"--ulysses", "2", "--strategy=burst", "burst+ulysses"}},
      {{"--ring_grad_dtype=fp16"}, {"--ring_grad_dtype", "fp16", "fp32 or bf16"}},
      {{"--ring_grad_dtype=bf16"}, {"--ring_grad_dtype", "--precision=bf16", "fp32"}},
      {{"--strategy=ulysses", "--ring_grad_dtype=bf16"},
       {"--ring_grad_dtype", "--strategy=ulysses", "rings"}},
      {{"--ranks_per_node=-2"}, {"--ranks_per_node", "-2", "at least -1"}},
      {{"--ranks=4", "--ranks_per_node=3"}, {"--ranks_per_node", "3", "4 ranks"}},
      {{"--dp=4", "--ranks_per_node=2", "--ranks=4"}, {"--ranks_per_node", "2", "1 rank "}},
      {{"--strategy=ulysses", "--ranks=2", "--ranks_per_node=2"},
       {"--ranks_per_node", "--strategy=ulysses", "rings"}},
      {{"--strategy=burst+ulysses", "--ranks=4", "--ulysses=2", "--ranks_per_node=1"},
       {"--ranks_per_node", "--ulysses=2"}},
      {{"--strategy=burst+ulysses", "--ulysses=0"}, {"--ulysses", "at least 1"}},
      {{"--strategy=burst+ulysses", "--ranks=4", "--ulysses=3"}, {"--ulysses", "3", "4 ranks"}},
      {{"--strategy=ulysses", "--ranks=3", "--model=" + four_heads},
       {"--strategy", "4 heads (2 KV heads)", "3 ranks", "1, 2, 4 would do"}},
      {{"--strategy=burst+ulysses", "--ranks=6", "--ulysses=3", "--model=" + four_heads},
       {"--ulysses", "4 heads", "3 ranks", "1, 2, 4"}},
      {{"--strategy=tp", "--ranks=3", "--model=" + four_heads},
       {"--strategy", "tp", "4 heads (2 KV heads)", "3 ranks", "1, 2, 4 would do"}},
      {{"--strategy=tp+sp", "--ranks=4", "--model=" + odd_ffn},
       {"--strategy", "tp+sp", "ffn of 18", "4 ranks"}},
      {{"--strategy=tp", "--ring_backward=burst"}, {"--ring_backward", "burst", "--strategy=tp"}},
      {{"--strategy=tp+sp", "--ulysses=2"}, {"--ulysses", "--strategy=tp+sp"}},
      {{"--tp=0"}, {"--tp", "0", "at least 1"}},
      {{"--tp=2000"}, {"--tp", "2000", "at most 1024"}},
      {{"--tp=64", "--sp=32"}, {"--tp", "64", "more than 1024 ranks"}},
      {{"--tp=2", "--ranks=3"}, {"--tp", "2", "does not divide", "3"}},
      {{"--tp=2", "--dp=3", "--ranks=8"}, {"--dp", "3", "does not divide", "by --tp, 4"}},
      {{"--tp=2", "--sp=2", "--strategy=tp"}, {"--sp", "2", "--tp=2", "burst"}},
      {{"--tp=2", "--sp=2", "--strategy=ulysses"}, {"--tp", "2", "--strategy=ulysses", "burst"}},
      {{"--tp=3", "--model=" + four_heads},
       {"--tp", "3", "4 heads (2 KV heads)", "3 ranks", "1, 2, 4 would do"}},
      {{"--tp=2", "--ffn_chunk=64"}, {"--ffn_chunk", "64", "--tp=2", "leave it out"}},
      {{"--tp=2", "--head_chunk=1"}, {"--head_chunk", "1", "--tp=2", "leave it out"}},
      {{"--tp=2", "--zero=1"}, {"--zero", "1", "--tp=2", "--dp=1", "larger --dp"}},
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
