// bazel run //train:tokenize: texts to shards.
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
#include "train/tokenize/tokenize.h"

namespace burst {
namespace {

struct Config : TokenizeConfig {
  int64_t threads = -1;
};

OptionTable Options(Config* c) {
  constexpr OnResume kMayChange = OnResume::kMayChange;  // nothing is resumed here
  OptionTable t;
  t.Group("Options");
  t.Add("data", &c->data, kMayChange,
        "What to tokenize: a text file, a folder or a pattern; every file is a document. Of files "
        "that end in .jsonl every line is one.");
  t.Add("field", &c->field, kMayChange, "Of lines of JSON: the key of the text.");
  t.Add(
      "tokenizer", &c->tokenizer, kMayChange,
      "tokenizer.model, tokenizer.json, or a folder with one of them or with GPT-2's encoder.json "
      "and vocab.bpe.");
  t.Add("out", &c->out, kMayChange,
        "The folder to make: train_000000.bin, ..., and the tokenizer's file, for "
        "//train --data='OUT/train_*.bin' --tokenizer=OUT.");
  t.Add("shard_tokens", &c->shard_tokens, kMayChange, "Tokens of a shard.");
  t.Add(
      "val_tokens", &c->val_tokens, kMayChange,
      "Write the first documents, up to N tokens and the end of a document, to val_000000.bin, ... "
      "for validation.");
  t.Add("separators", &c->separators, kMayChange,
        "An end-of-text token before every document, where //train lets --packed attention end.");
  t.Add("bos", &c->bos, kMayChange,
        "What the tokenizer's file puts before a text, such as <s>, before every document, where "
        "--packed attention ends then; the end-of-text token comes behind it.");
  t.Add("threads", &c->threads, kMayChange, "Threads. -1: one for each core.");
  return t;
}

absl::Status Check(const Config& c) {
  if (c.data.empty()) return InvalidOption("data", "give a text file, a folder or a pattern");
  if (c.tokenizer.empty())
    return InvalidOption("tokenizer", "give tokenizer.model, tokenizer.json, or their folder");
  if (c.out.empty()) return InvalidOption("out", "give the folder to make");
  if (c.shard_tokens < 1 || c.shard_tokens > INT32_MAX) {
    return InvalidOption("shard_tokens", c.shard_tokens, " is not from 1 to ", INT32_MAX);
  }
  if (c.val_tokens < 0) return InvalidOption("val_tokens", "must be at least 0");
  if (c.val_tokens > 0 && !c.separators) {
    return InvalidOption("val_tokens", "needs the separators between documents");
  }
  if (c.threads != -1 && (c.threads < 1 || c.threads > 1024)) {
    return InvalidOption("threads", "must be -1 or from 1 to 1024; got ", c.threads);
  }
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  Config config;
  OptionTable options = Options(&config);
  const std::string help = options.Help(
      "Turns texts into shards of tokens for //train.\n\n"
      "  bazel run //train:tokenize -- --data=web.jsonl --tokenizer=gpt2 --out=shards\n");
  if (PrintHelpOrVersion(argc, argv, help)) return 0;
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
  return 0;
}

}  // namespace
}  // namespace burst

int main(int argc, char** argv) { return burst::RunProgram(burst::Main, argc, argv); }
