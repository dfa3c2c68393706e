// bazel run //train:tokenize: turns texts into shards.
#include "train/data/tokenize.h"

#include <chrono>
#include <cstdio>
#include <string>

#include "absl/strings/str_format.h"
#include "burst/base/parallel.h"
#include "burst/base/status.h"
#include "burst/cli/files.h"
#include "burst/cli/options.h"
#include "burst/cli/process.h"
#include "burst/cli/text.h"

namespace burst {
namespace {

struct Config : TokenizeConfig {
  int64_t threads = -1;
};

OptionTable Options(Config* c) {
  OptionTable t;
  t.Group("Options");
  t.Add("data", &c->data)
      .Help(
          "Tokenize a text file, a folder or a pattern; each file is a document, and each line of "
          "a .jsonl file.");
  t.Add("field", &c->lines.field).Help(kFieldHelp);
  t.Add("bad_lines", &c->lines.bad_lines, kBadLines).Help(kBadLinesHelp);
  t.Add("tokenizer", &c->tokenizer)
      .Help(
          "Read tokenizer.model, tokenizer.json, or their folder (or GPT-2's encoder.json and "
          "vocab.bpe).");
  t.Add("out", &c->out)
      .Help(
          "Make this folder: train_000000.bin, ..., and the tokenizer, for //train "
          "--data='OUT/train_*.bin' --tokenizer=OUT.");
  t.Add("shard_tokens", &c->shard_tokens).Min(1).Max(INT32_MAX).Help("Put N tokens into a shard.");
  t.Add("val_tokens", &c->val_tokens)
      .Min(0)
      .Help(
          "Write the first documents, up to N tokens and the end of one, as val_000000.bin, ... "
          "for validation.");
  t.Add("separators", &c->separators)
      .Help(
          "Put an end-of-text token before every document, where //train lets --packed attention "
          "end.");
  t.Add("bos", &c->bos)
      .Help(
          "Put tokens such as <s> before every document, as the tokenizer does; --packed attention "
          "then ends there.");
  t.Add("threads", &c->threads)
      .Min(1)
      .Max(1024)
      .Or(-1)
      .Help("Use N threads. -1: one for each core.");
  return t;
}

absl::Status Check(const Config& c) {
  if (c.data.empty()) return InvalidOption("data", "give a text file, a folder or a pattern");
  if (c.tokenizer.empty())
    return InvalidOption("tokenizer", "give tokenizer.model, tokenizer.json, or their folder");
  if (c.out.empty()) return InvalidOption("out", "give the folder to make");
  if (c.val_tokens > 0 && !c.separators) {
    return InvalidOption("val_tokens", "must be 0 with --noseparators, because documents must be ",
                         "found; got ", c.val_tokens, "; leave one of the two out");
  }
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  Config config;
  OptionTable options = Options(&config);
  const std::string help = options.Help(
      "Turns texts into shards of tokens for //train.\n\n"
      "  bazel run //train:tokenize -- --data=web.jsonl --tokenizer=gpt2 --out=shards\n");
  if (PrintHelpOrVersion(argc, argv, help)) return ExitWithOutput();
  absl::Status usage = options.ParseArguments(argc, argv);
  if (usage.ok()) usage = Check(config);
  if (!usage.ok()) return ExitCode(usage, kExitBadUsage);
  config.data = ResolvePath(config.data);
  config.tokenizer = ResolvePath(config.tokenizer);
  config.out = ResolvePath(config.out);
  while (config.out.size() > 1 && config.out.back() == '/') config.out.pop_back();

  const ScopedThreadPool pool(config.threads == -1 ? NumCores() : static_cast<int>(config.threads));
  const auto start = std::chrono::steady_clock::now();
  const absl::StatusOr<TokenizeSummary> summary = TokenizeToShards(config);
  if (!summary.ok()) return ExitCode(summary.status(), kExitFailure);
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  absl::PrintF("%s tokens of %s documents in %d %s: %s, %.2f bytes a token, %.1f MB/s\n",
               Thousands(summary->tokens), Thousands(summary->documents), summary->shards,
               summary->shards == 1 ? "shard" : "shards", config.out,
               static_cast<double>(summary->bytes) / static_cast<double>(summary->tokens),
               static_cast<double>(summary->bytes) / 1e6 / seconds);
  absl::PrintF("%s", summary->skipped.Describe());
  return ExitWithOutput();
}

}  // namespace
}  // namespace burst

int main(int argc, char** argv) { return burst::RunProgram(burst::Main, argc, argv); }
